"""Words from which the items of `lookup` are put together: 65 x 85 items."""

# fmt: off
FIRST = (
    "amber", "black", "blue", "brass", "bronze", "brown", "cheap", "clay", "clean", "copper",
    "cotton", "cream", "curved", "dark", "dusty", "faded", "fancy", "flat", "folding", "fresh",
    "glass", "golden", "green", "grey", "heavy", "hollow", "iron", "ivory", "leather", "light",
    "linen", "little", "long", "marble", "modern", "narrow", "old", "orange", "pale", "paper",
    "pink", "plain", "plastic", "polished", "purple", "round", "rusty", "sharp", "short", "silver",
    "simple", "small", "soft", "square", "steel", "stone", "tall", "thick", "thin", "tiny", "warm",
    "white", "wide", "wooden", "yellow",
)
SECOND = (
    "anchor", "basket", "bell", "belt", "bench", "blanket", "boat", "book", "boot", "bottle",
    "bowl", "box", "brush", "bucket", "button", "cage", "candle", "carpet", "chair", "chain",
    "clock", "coat", "cup", "curtain", "desk", "dish", "doll", "door", "drum", "fan", "flag",
    "flute", "fork", "frame", "glove", "guitar", "hammer", "hat", "jacket", "jar", "kettle", "key",
    "kite", "knife", "ladder", "lamp", "lantern", "lock", "map", "mask", "mirror", "mug", "nail",
    "needle", "oven", "pan", "pen", "piano", "pillow", "pipe", "plate", "pot", "ring", "rope",
    "ruler", "scarf", "shelf", "shirt", "shoe", "shovel", "sofa", "spoon", "stool", "stove",
    "table", "tent", "towel", "toy", "tray", "vase", "wagon", "wallet", "watch", "whistle",
    "window",
)
# fmt: on
