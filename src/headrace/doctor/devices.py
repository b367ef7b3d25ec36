"""GPUs, the speed of the run's dtype, and the collectives that broadcast weights."""

from collections.abc import Callable
from pathlib import Path

from headrace.config import Config
from headrace.doctor.findings import Finding, failed, not_needed, ok, warning
from headrace.monitor.placement import GPU_DRIVER
from headrace.precision import TOO_SLOW, slowdown

Slowdown = Callable[[str], float]


def devices(config: Config | None) -> list[Finding]:
    """All three checks, since importing torch takes most of their time."""
    return [*gpus(config), *precision(config), *collectives(config)]


def gpus(_config: Config | None, *, driver: Path = GPU_DRIVER) -> list[Finding]:
    """The devices that torch can use."""
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        found = ", ".join(f"{each.name} with {each.total_memory / 2**30:.0f} GiB" for each in names)
        return [ok("GPU", found)]
    if driver.exists():
        return [
            failed(
                "GPU",
                f"{driver} is there, but torch {torch.__version__} cannot use it",
                "`pip install 'headrace[gpu]'` for a CUDA build, and see what `nvidia-smi` says",
            )
        ]
    return [not_needed("GPU", "none; everything runs on the CPU")]


def precision(config: Config | None, *, slowdown: Slowdown = slowdown) -> list[Finding]:
    """Whether the machine computes in the run's dtype, or only emulates it."""
    dtype = config.model.dtype if config is not None else "bfloat16"
    times = slowdown(dtype)
    found = f"products in {dtype} take {times:.2g} times as long as in float32"
    if times <= TOO_SLOW:
        return [ok("precision", found)]
    remedy = '`headrace train RUN.toml model.dtype="float32"`'
    if config is None:
        return [ok("precision", found, remedy)]
    return [warning("precision", found, remedy)]


def collectives(_config: Config | None) -> list[Finding]:
    """A group of one member sums a tensor, over NCCL where there is a GPU and gloo elsewhere."""
    import torch
    from torch import distributed

    cuda = torch.cuda.is_available()
    backend = "nccl" if cuda else "gloo"
    remedy = "`make setup`" if not cuda else "`pip install 'headrace[gpu]'`"
    if not distributed.is_backend_available(backend):
        return [failed("collectives", f"this torch has no {backend}", remedy)]
    store = distributed.HashStore()  # type: ignore[attr-defined]  # public, but not listed
    distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        tensor = torch.ones(4, device="cuda" if cuda else "cpu")
        distributed.all_reduce(tensor)
        total = float(tensor.sum())
    finally:
        distributed.destroy_process_group()
    if total != 4:
        return [failed("collectives", f"{backend} made {total} of four ones", remedy)]
    return [ok("collectives", f"{backend} sums a tensor in a group of one")]
