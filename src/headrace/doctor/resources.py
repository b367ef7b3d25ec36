"""Memory, disk, cores and limits, against what a run needs of them.

The needs are sums of what is known: of the model its parameters and dtype, of the configuration
caches and limits. What a process takes besides was measured with SmolLM2-135M on a CPU.
"""

import math
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from headrace.broker.weights import DTYPE_BYTES
from headrace.config import Config
from headrace.doctor.findings import Finding, failed, not_needed, ok, warning
from headrace.doctor.run import model_folder
from headrace.monitor.placement import GPU_DRIVER

GIB = 1 << 30
LIBRARIES = {"learner": int(0.6 * GIB), "actor": int(1.5 * GIB)}
"""Measured bytes of a process without its arrays; an actor's are two processes."""
ACTIVATIONS = 20
"""Values that the learner's forward keeps for each token, layer and hidden unit: 0.7 MB a token
for 30 layers of 576 units in two bytes, as measured."""
DESCRIPTORS = 1024
"""Open files per process: the usual default, with which the tests pass."""
_SHARED = 1 * GIB


def parameters(folder: Path) -> int | None:
    """Parameters of the safetensors files of a folder; None where there are none.

    Only the files' headers are read.
    """
    total = 0
    for path in folder.glob("model*.safetensors"):
        with path.open("rb") as file:
            header = msgspec.json.decode(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        total += sum(math.prod(tensor["shape"]) for tensor in header.values())
    return total or None


def hidden_units(folder: Path) -> int:
    """Layers times hidden units, by a model's configuration; 0 where it names them otherwise."""
    config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    return int(config.get("num_hidden_layers", 0) * config.get("hidden_size", 0))


def memory(config: Config | None, *, free: int | None = None) -> list[Finding]:
    """Free memory, against learner and actors of the run together."""
    free = available() if free is None else free
    if config is None:
        return [ok("memory", f"{_gib(free)} free")]
    model = model_folder(config)
    count = parameters(model) if model else None
    if model is None or count is None:
        found = f"{_gib(free)} free; what the run needs is known once its model is there"
        return [not_needed("memory", found)]
    width = DTYPE_BYTES[config.model.dtype]
    kept = ACTIVATIONS * width * hidden_units(model)
    # two versions are held for publication; master, gradient and two moments are float32
    learner = LIBRARIES["learner"] + (3 * width + 16) * count + config.learner.token_budget * kept
    # in the engine, and the version that arrives and the one before
    actor = LIBRARIES["actor"] + 3 * width * count + config.actors.kv_cache_bytes
    actors = config.actors.count
    need = learner + actors * actor
    found = (
        f"{_gib(free)} free for about {_gib(need)} at most: learner {_gib(learner)} and {actors} x "
        f"{_gib(actor)} for actors, with {count / 1e6:.1f} M parameters"
    )
    if need > free:
        remedy = (
            "take a smaller model, or start actors on another machine: `headrace actor RUN.toml` "
            "there and actors.count=0 here"
        )
        return [failed("memory", found, remedy)]
    return [ok("memory", found)]


def disk(
    config: Config | None, *, usage: Callable[[Path], int] = lambda p: shutil.disk_usage(p).free
) -> list[Finding]:
    """Free space at the run folder, against checkpoints, log and weights on the broker."""
    where = Path.cwd() if config is None else Path(config.run.dir).absolute()
    nearest = next(each for each in (where, *where.parents) if each.is_dir())
    free = usage(nearest)
    if config is None:
        return [ok("disk", f"{_gib(free)} free at {nearest}")]
    model = model_folder(config)
    count = parameters(model) if model else None
    if model is None or count is None:
        found = f"{_gib(free)} free at {nearest}; the need is known once the model is there"
        return [not_needed("disk", found)]
    rollout = count * DTYPE_BYTES[config.model.dtype]
    # one is written before the oldest goes; float32 master and two moments beside the weights
    checkpoints = (config.learner.keep_checkpoints + 1) * (rollout + 12 * count)
    # an anchor, the next one, and deltas of at most half of one
    weights = int(rollout * (2 + config.weights.anchor_every / 2))
    need = checkpoints + weights + config.broker.log_bytes
    found = (
        f"{_gib(free)} free at {nearest} for at most {_gib(need)}: checkpoints "
        f"{_gib(checkpoints)}, log {_gib(config.broker.log_bytes)}, weights {_gib(weights)}"
    )
    if need > free:
        remedy = (
            "add another folder (`run.dir=FOLDER`) or learner.keep_checkpoints=1 to the command"
        )
        return [failed("disk", found, remedy)]
    return [ok("disk", found)]


def limits(config: Config | None) -> list[Finding]:
    """Cores, open files, and shared memory."""
    cores = len(os.sched_getaffinity(0))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    shared = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    return [
        cores_for(config, cores),
        descriptors(files),
        shared_memory(shared, gpu=GPU_DRIVER.exists()),
    ]


def cores_for(config: Config | None, cores: int) -> Finding:
    """Whether the run's threads have a core each."""
    if config is None:
        return ok("cores", str(cores))
    learner, actors, each = config.learner.threads, config.actors.count, config.actors.threads
    threads = learner + actors * each
    found = f"{cores} for {threads} threads: learner {learner}, {actors} x {each} for actors"
    if threads > cores and not GPU_DRIVER.exists():
        remedy = (
            "add actors.count=1 actors.threads=1 learner.threads=1 to `headrace train RUN.toml`"
        )
        return warning("cores", f"{found}; threads that share a core wait for each other", remedy)
    return ok("cores", found)


def descriptors(files: int) -> Finding:
    """Whether a process may open enough files."""
    if files == resource.RLIM_INFINITY:
        return ok("open files", "without a limit")
    if files < DESCRIPTORS:
        found = f"{files} per process, fewer than the usual {DESCRIPTORS}"
        return warning("open files", found, "`ulimit -n 4096` in the shell that starts headrace")
    return ok("open files", f"{files} per process")


def shared_memory(size: int, *, gpu: bool) -> Finding:
    """Whether /dev/shm is large enough for NCCL; nothing else uses it."""
    found = f"/dev/shm has {_gib(size)}"
    if not gpu:
        return not_needed("shared memory", f"{found}; only NCCL uses it")
    if size < _SHARED:
        remedy = "`mount -o remount,size=8G /dev/shm`, or `docker run --shm-size=8g`"
        return warning("shared memory", f"{found}; NCCL may need more", remedy)
    return ok("shared memory", found)


def available(meminfo: Path = Path("/proc/meminfo"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that may still be taken: of the machine, or of the control group that holds us."""
    free = _fields(meminfo)["MemAvailable"] << 10
    for limit, used, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        file = cgroups / limit
        if file.is_file() and (most := file.read_text().strip()) != "max":
            # files that were read count as used, and give way to whoever needs their room
            kept = _fields(file.with_name("memory.stat")).get(cache, 0)
            free = min(free, int(most) - int((cgroups / used).read_text()) + kept)
    return free


def _fields(path: Path) -> dict[str, int]:
    """Lines of a name and a number, as the kernel writes them."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {name.rstrip(":"): int(number) for name, number, *_ in lines}


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
