"""The flat weights of one version in anonymous shared memory, with the tensors as views of it.

Both ends of the weight path use it: the learner to stage what it publishes, the actor to receive
into and to hand to the engine's processes, which map the same pages. The memory has no name in any
file system, so a killed process leaves nothing behind.
"""

import mmap
import os
import weakref
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from headrace.broker.weights import Layout
from headrace.errors import WeightError

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def layout_of(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> Layout:
    """Layout of named tensors in their order, cast to `dtype` if given."""
    return Layout.of(
        (name, NAMES[dtype or tensor.dtype], list(tensor.shape)) for name, tensor in tensors.items()
    )


def tensor_views(flat: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
    """Views of flat uint8 weights `[layout.nbytes]` as the tensors of the layout."""
    return {
        spec.name: flat[spec.offset : spec.offset + spec.nbytes]
        .view(DTYPES[spec.dtype])
        .view(spec.shape)
        for spec in layout.tensors
    }


class HostWeights:
    """Shared memory of `layout.nbytes` bytes, given back with the object and its last view."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._fd = os.memfd_create("headrace-weights", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, max(layout.nbytes, 1))
        self._map = mmap.mmap(self._fd, max(layout.nbytes, 1))
        self.flat = torch.frombuffer(self._map, dtype=torch.uint8)[: layout.nbytes]
        """uint8 `[layout.nbytes]`."""

    @classmethod
    def of(
        cls, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
    ) -> "HostWeights":
        """Copy named tensors, cast to `dtype` if given."""
        weights = cls(layout_of(tensors, dtype))
        weights.fill(tensors)
        return weights

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrite all tensors, casting to the layout's dtypes.

        Raises:
            WeightError: names or shapes are not those of the layout.
        """
        views = self.tensors()
        if list(views) != list(tensors):
            odd = sorted(set(views) ^ set(tensors)) or ["their order"]
            raise WeightError(f"the weights changed their tensors: {odd[:3]}")
        with torch.no_grad():
            for name, view in views.items():
                if view.shape != tensors[name].shape:
                    raise WeightError(
                        f"tensor {name} has shape {list(tensors[name].shape)}, "
                        f"expected {list(view.shape)}"
                    )
                view.copy_(tensors[name])

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors as views; they follow every later change."""
        return tensor_views(self.flat, self.layout)

    def array(self) -> npt.NDArray[np.uint8]:
        """The flat bytes as a numpy view."""
        return self.flat.numpy()

    def memory(self) -> memoryview:
        """The flat bytes as a memory view."""
        return memoryview(self._map)[: self.layout.nbytes]

    @property
    def path(self) -> str:
        """Path by which other processes of the same user can map the memory while it is open."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"


def map_tensors(path: str, layout: bytes) -> Iterable[tuple[str, torch.Tensor]]:
    """Map the weights that another process holds at `HostWeights.path`.

    Args:
        path: where they are.
        layout: MessagePack of their `Layout`.
    """
    parsed = msgspec.msgpack.decode(layout, type=Layout)
    with open(path, "rb") as file:
        # A private mapping is writable as torch wants it; no page is copied unless written.
        mapped = mmap.mmap(file.fileno(), parsed.nbytes, access=mmap.ACCESS_COPY)
    return tensor_views(torch.frombuffer(mapped, dtype=torch.uint8), parsed).items()
