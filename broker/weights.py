"""Records of the weight path: what a version consists of, where it is stored, how it is sent.

A version is one flat run of bytes: the tensors in a fixed order, each at an aligned offset. The
flat bytes are cut into buckets of one size; a bucket is the unit of broadcast, of deltas and of
hashing. So one manifest serves both ways, and a receiver needs no knowledge of the model.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator

import msgspec
from msgspec import Struct

from headrace.broker.records import Record
from headrace.errors import WeightError

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
ALIGNMENT = 64
MAX_MANIFEST_BYTES = 6 << 20

ANCHOR = "anchor"
DELTA = "delta"


class TensorSpec(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor by its checkpoint name, at `offset` bytes of the flat weights."""

    name: str
    dtype: str
    shape: list[int]
    offset: int

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"tensor {self.name}: dtype {self.dtype!r} is not sent")
        if self.offset < 0 or self.offset % ALIGNMENT or any(size < 0 for size in self.shape):
            raise ValueError(f"tensor {self.name}: impossible shape or offset")

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class Layout(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where each tensor lies in the flat weights of `nbytes` bytes."""

    tensors: list[TensorSpec]
    nbytes: int

    def __post_init__(self) -> None:
        position = 0
        for spec in self.tensors:
            if spec.offset < position:
                raise ValueError(f"tensor {spec.name} overlaps the one before it")
            position = spec.offset + spec.nbytes
        if not position <= self.nbytes < position + ALIGNMENT:
            raise ValueError(f"{self.nbytes} bytes do not hold tensors that end at {position}")

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, str, list[int]]]) -> "Layout":
        """Lay out (name, dtype, shape) triples one after the other.

        >>> Layout.of([("a", "bfloat16", [3]), ("b", "float32", [2, 2])]).nbytes
        128
        """
        specs, position = [], 0
        for name, dtype, shape in tensors:
            spec = TensorSpec(name, dtype, shape, position)
            specs.append(spec)
            position = _aligned(position + spec.nbytes)
        return cls(specs, position)


class Manifest(Record, frozen=True, kw_only=True, tag="manifest"):
    """What one version is, byte for byte, and how its stored form is read."""

    version: int
    lineage: int
    kind: str
    """`anchor`: the chunks are the flat bytes; `delta`: they change the named base."""
    base_hash: str
    """Weights hash that a delta must be applied to; empty for an anchor."""
    layout: Layout
    bucket_bytes: int
    bucket_hashes: list[bytes]
    """SHA-256 of every bucket of the flat weights of this version."""
    weights_hash: str
    """Hash of layout and buckets: names the exact weights."""
    chunk_count: int
    stored_bytes: int

    def __post_init__(self) -> None:
        count = bucket_count(self.layout.nbytes, self.bucket_bytes)
        if self.kind not in {ANCHOR, DELTA} or count != len(self.bucket_hashes):
            raise ValueError("kind or bucket count do not fit")
        if self.weights_hash != weights_hash(self.layout, self.bucket_hashes):
            raise ValueError("the weights hash is not that of layout and buckets")


class Link(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One stored version of the pull chain."""

    kind: str
    version: int
    lineage: int
    base_hash: str
    weights_hash: str
    first_seq: int
    """Stream sequence at or below the first of its messages."""


class Head(Record, frozen=True, kw_only=True, tag="head"):
    """The newest version that can be pulled: an anchor and the deltas that follow it.

    Publishing the head makes a version visible; everything it names was stored before.
    """

    version: int
    lineage: int
    chain: list[Link]

    def __post_init__(self) -> None:
        if not self.chain or self.chain[0].kind != ANCHOR:
            raise ValueError("a chain begins with an anchor")
        for before, link in zip(self.chain, self.chain[1:], strict=False):
            if link.kind != DELTA or link.base_hash != before.weights_hash:
                raise ValueError(f"delta {link.version} does not continue {before.version}")
        last = self.chain[-1]
        if (last.version, last.lineage) != (self.version, self.lineage):
            raise ValueError("the chain does not end at the head's version")


class Prepare(Record, frozen=True, kw_only=True, tag="prepare"):
    """Learner to one actor: can you take this version in a broadcast? Binds nobody yet."""

    version: int
    lineage: int
    subject: str
    """Subject of the manifest that the received bytes are verified against."""


class Join(Record, frozen=True, kw_only=True, tag="join"):
    """Learner to one actor: build the process group of this membership."""

    epoch: str
    """Name of the membership; unique in the run."""
    rank: int
    size: int
    host: str
    """Address of the learner's store."""
    port: int
    timeout_s: float


class Begin(Record, frozen=True, kw_only=True, tag="begin"):
    """Learner to one actor: receive the buckets of the prepared version now."""

    epoch: str
    version: int
    lineage: int


class Commit(Record, frozen=True, kw_only=True, tag="commit"):
    """Learner to one actor: everything was sent; verify and apply."""

    version: int
    lineage: int
    weights_hash: str


class Offer(Record, frozen=True, kw_only=True, tag="offer"):
    """Learner to one actor: this version can be pulled."""

    version: int
    lineage: int


class Answer(Record, frozen=True, kw_only=True, tag="answer"):
    """Actor to learner."""

    ok: bool
    reason: str
    version: int
    lineage: int
    epoch: str
    """Membership whose group the actor holds; empty if none."""


Control = Prepare | Join | Begin | Commit | Offer


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def bucket_count(nbytes: int, bucket_bytes: int) -> int:
    """Number of buckets of the flat weights; the last may be shorter."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket size {bucket_bytes} is not positive")
    return -(-nbytes // bucket_bytes)


def bucket_ranges(nbytes: int, bucket_bytes: int) -> Iterator[tuple[int, int]]:
    """Byte ranges `[start, end)` of the buckets in order."""
    for start in range(0, nbytes, bucket_bytes):
        yield start, min(start + bucket_bytes, nbytes)


def weights_hash(layout: Layout, bucket_hashes: list[bytes]) -> str:
    """Hash that names exact weights: SHA-256 over the layout and the bucket hashes, in hex."""
    digest = hashlib.sha256(msgspec.msgpack.encode(layout))
    for item in bucket_hashes:
        digest.update(item)
    return digest.hexdigest()


def check_bucket(manifest: Manifest, index: int, data: memoryview) -> None:
    """Compare one bucket with the manifest.

    Raises:
        WeightError: it is not what the learner published.
    """
    if hashlib.sha256(data).digest() != manifest.bucket_hashes[index]:
        raise WeightError(
            f"weights {manifest.version} (lineage {manifest.lineage}): bucket {index} of "
            f"{len(manifest.bucket_hashes)} does not match its hash"
        )


def supersedes(version: int, lineage: int, held: tuple[int, int]) -> bool:
    """Whether (version, lineage) may replace the held pair: neither part ever falls."""
    return version >= held[0] and lineage >= held[1] and (version, lineage) != held
