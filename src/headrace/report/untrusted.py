"""Text that a model, a jailed program or an actor wrote, made safe to print.

`visible` writes out every character that a terminal would act on, and `bordered` puts every line
behind a border, so that no text can pass for a line of headrace's own.
"""

_TAB = "    "


def visible(text: str) -> str:
    r"""Text in which every character that is neither printable nor a newline is written out.

    >>> visible("red\x1b[31m\r\u202e")
    'red\\x1b[31m\\r\\u202e'
    """
    return "".join(
        character
        if character.isprintable() or character == "\n"
        else _TAB
        if character == "\t"
        else character.encode("unicode_escape").decode()
        for character in text
    )


def bordered(text: str, width: int) -> list[str]:
    """Lines of untrusted text, each behind `│`, or `┊` where a long line goes on.

    Lines are broken here, because one that a terminal breaks goes on without a border.

    Args:
        text: any text.
        width: cells of a line with its border.
    """
    from rich.cells import chop_cells

    lines: list[str] = []
    for line in visible(text).split("\n"):
        pieces = chop_cells(line, max(width - 2, 8)) or [""]
        lines += [f"{'┊' if number else '│'} {piece}" for number, piece in enumerate(pieces)]
    return lines


def word(text: str) -> str:
    """Text on one line."""
    return visible(text).replace("\n", "\\n")
