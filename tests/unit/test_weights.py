from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.delta import apply_delta, changed_share, encode_delta
from headrace.broker.weights import (
    ANCHOR,
    DELTA,
    Head,
    Layout,
    Link,
    Manifest,
    TensorSpec,
    bucket_ranges,
    supersedes,
    weights_hash,
)
from headrace.errors import WeightError

WORDS = st.lists(st.integers(0, 65535), min_size=1, max_size=200)


def flat(words: list[int]) -> np.ndarray:
    return np.array(words, np.uint16).view(np.uint8)


@given(WORDS, st.data(), st.sampled_from([2, 6, 64, 128]))
def test_a_delta_gives_the_new_bytes_and_gives_them_again(words, data, bucket_bytes) -> None:
    new = [data.draw(st.sampled_from([word, 65535 - word])) for word in words]
    delta = encode_delta(flat(words), flat(new), bucket_bytes)
    target = flat(words).copy()
    apply_delta(target, delta, bucket_bytes)
    assert (target == flat(new)).all()
    apply_delta(target, delta, bucket_bytes)
    assert (target == flat(new)).all(), "absolute values: applying twice changes nothing"


def test_a_delta_stores_only_what_changed() -> None:
    rng = np.random.default_rng(0)
    base = rng.integers(0, 65536, 1 << 20, np.uint16)
    new = base.copy()
    new[rng.choice(base.size, base.size // 100, replace=False)] ^= 1
    assert len(encode_delta(base.view(np.uint8), new.view(np.uint8), 1 << 20)) < new.nbytes / 20


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_the_share_of_changed_words_is_told_to_a_twentieth_from_a_sample(share, size) -> None:
    rng = np.random.default_rng(0)
    base = rng.integers(0, 65536, size, np.uint16)
    new = base ^ (np.arange(size) < share * size).astype(np.uint16)
    told = changed_share(base.view(np.uint8), new.view(np.uint8))
    assert abs(told - float((new != base).mean())) < 0.05


@pytest.mark.parametrize(
    "spoil",
    [
        lambda bucket: [7, bucket[1], bucket[2]],
        lambda bucket: [bucket[0], bucket[1] + 1, bucket[2]],
        lambda bucket: [bucket[0], bucket[1], bucket[2][:-1]],
        lambda bucket: [bucket[0], bucket[1], b"not zstd"],
        lambda bucket: [bucket[0], bucket[1]],
    ],
)
def test_a_malformed_delta_is_refused(spoil) -> None:
    delta = encode_delta(flat([1, 2, 3, 4]), flat([1, 9, 3, 4]), 8)
    [bucket] = msgspec.msgpack.decode(delta)
    with pytest.raises(WeightError):
        apply_delta(flat([1, 2, 3, 4]).copy(), msgspec.msgpack.encode([spoil(bucket)]), 8)


def test_buckets_cover_all_bytes_once() -> None:
    assert list(bucket_ranges(10, 4)) == [(0, 4), (4, 8), (8, 10)]
    assert list(bucket_ranges(0, 4)) == []


def test_a_layout_that_overlaps_or_leaves_bytes_out_is_refused() -> None:
    good = Layout.of([("a", "bfloat16", [40]), ("b", "float32", [3])])
    assert [spec.offset for spec in good.tensors] == [0, 128]
    for tensors, nbytes in [
        ([TensorSpec("a", "float32", [40], 0), TensorSpec("b", "float32", [3], 64)], 192),
        (good.tensors, 64),
        (good.tensors, 1024),
    ]:
        with pytest.raises(ValueError, match=r"overlaps|do not hold"):
            Layout(tensors, nbytes)


def test_a_manifest_whose_hashes_do_not_make_its_hash_is_refused() -> None:
    layout = Layout.of([("a", "bfloat16", [64])])
    hashes = [b"x" * 32]
    fields: dict[str, Any] = {
        "version": 1, "lineage": 1, "kind": ANCHOR, "base_hash": "", "layout": layout,
        "bucket_bytes": 128, "bucket_hashes": hashes, "chunk_count": 1, "stored_bytes": 128,
    }  # fmt: skip
    Manifest(**fields, weights_hash=weights_hash(layout, hashes))
    with pytest.raises(ValueError, match="hash"):
        Manifest(**fields, weights_hash=weights_hash(layout, [b"y" * 32]))


def test_a_chain_is_an_anchor_and_deltas_that_continue_it() -> None:
    anchor = Link(ANCHOR, 3, 1, "", "h3", 1)
    Head(version=4, lineage=1, chain=[anchor, Link(DELTA, 4, 1, "h3", "h4", 9)])
    for chain in [
        [],
        [Link(DELTA, 4, 1, "h3", "h4", 9)],
        [anchor, Link(DELTA, 4, 1, "other", "h4", 9)],
        [anchor],
    ]:
        with pytest.raises(ValueError, match=r"chain|continue"):
            Head(version=4, lineage=1, chain=chain)


@pytest.mark.parametrize(
    ("offered", "held", "expected"),
    [
        ((4, 1), (3, 1), True),
        ((3, 2), (3, 1), True),
        ((3, 1), (3, 1), False),
        ((2, 1), (3, 1), False),
        ((2, 2), (3, 1), False),
        ((9, 1), (3, 2), False),
    ],
)
def test_neither_version_nor_lineage_ever_falls(
    offered: tuple[int, int], held: tuple[int, int], expected: bool
) -> None:
    assert supersedes(*offered, held) is expected
