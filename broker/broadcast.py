"""The process group of one membership, built alike by the learner (rank 0) and by the actors.

The backend is constructed directly on a store, without torch.distributed's global state: a process
may hold two memberships at a time, and a failed one takes nothing down. NCCL on GPUs, gloo on CPUs.
"""

import collections
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from headrace.broker.weights import bucket_ranges
from headrace.errors import ConfigError, WeightError

_IN_FLIGHT = 2


def default_device() -> torch.device:
    """Where buckets lie: on the process's current GPU (NCCL), or on the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def open_store(host: str, *, timeout_s: float) -> TCPStore:
    """The learner's store, listening on a free port of `host`; it serves all memberships.

    Raises:
        ConfigError: `host` is not an address of this machine.
    """
    try:
        # Left to itself the store listens on every interface.
        listener = socket.create_server((host, 0))
    except OSError as error:
        raise ConfigError(
            f"weights.interface {host!r} is not an address of this machine: {error}"
        ) from error
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        None,
        True,
        timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def reach_store(host: str, port: int, *, timeout_s: float) -> TCPStore:
    """An actor's connection to the learner's store.

    Raises:
        WeightError: it does not answer.
    """
    try:
        return TCPStore(
            host, port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False
        )
    except (RuntimeError, OSError) as error:
        raise WeightError(
            f"the learner's store at {host}:{port} does not answer: {error}"
        ) from error


def local_address(host: str, port: int) -> str:
    """Address of this machine's interface that leads to `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


class BroadcastGroup:
    """Rank 0 sends flat weights to all others."""

    def __init__(
        self,
        store: Store,
        *,
        epoch: str,
        rank: int,
        size: int,
        address: str,
        timeout_s: float,
        device: torch.device,
    ) -> None:
        """Meet the other ranks; blocks until all have come.

        Args:
            store: the learner's store.
            epoch: name of the membership; all ranks give the same.
            rank: 0 for the learner.
            size: number of ranks.
            address: of this process's interface.
            timeout_s: deadline of the meeting and of every bucket, in seconds.
            device: `cpu` for gloo, a CUDA device for NCCL.

        Raises:
            WeightError: a rank did not come in time.
        """
        self.epoch, self.rank, self.size = epoch, rank, size
        self._device = device
        prefixed = PrefixStore(f"weights/{epoch}", store)
        try:
            self._group: Any = _backend(prefixed, rank, size, address, timeout_s, device)
            if size > 1:
                self._start(torch.zeros(1, dtype=torch.uint8, device=device)).wait()
        except RuntimeError as error:
            raise WeightError(f"broadcast membership {epoch}: not all came: {error}") from error

    def transfer(
        self,
        flat: torch.Tensor,
        bucket_bytes: int,
        *,
        deadline_s: float,
        received: Callable[[int], None] | None = None,
    ) -> None:
        """Send (rank 0) or receive all buckets of `flat`, two in flight.

        Args:
            flat: uint8 `[N]` in host memory; written on all ranks but 0.
            bucket_bytes: size of a bucket.
            deadline_s: limit of the whole transfer in seconds.
            received: called with the number of each bucket as soon as it is in `flat`.

        Raises:
            WeightError: a peer died or the deadline passed; the group is of no use any more.
        """
        deadline = time.monotonic() + deadline_s
        waiting: collections.deque[tuple[int, torch.Tensor, torch.Tensor, Any]] = (
            collections.deque()
        )

        def finish() -> None:
            index, view, buffer, work = waiting.popleft()
            work.wait()
            if self.rank and buffer is not view:
                view.copy_(buffer)
            if received is not None:
                received(index)
            if time.monotonic() > deadline:
                raise WeightError(
                    f"broadcast membership {self.epoch}: bucket {index} came after the deadline of "
                    f"{deadline_s:.0f} s"
                )

        try:
            for index, (start, end) in enumerate(bucket_ranges(flat.numel(), bucket_bytes)):
                if len(waiting) == _IN_FLIGHT:
                    finish()
                view = flat[start:end]
                buffer = view if self._device.type == "cpu" else view.to(self._device)
                waiting.append((index, view, buffer, self._start(buffer)))
            while waiting:
                finish()
        except RuntimeError as error:
            raise WeightError(f"broadcast membership {self.epoch} broke: {error}") from error

    def _start(self, buffer: torch.Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        return self._group.broadcast([buffer], options)

    def close(self) -> threading.Thread:
        """Leave the group; a transfer that is blocked on a peer does not hold the caller up.

        Gloo's end waits for such a transfer until its timeout, so it happens in the thread that is
        returned. A process that is about to end joins it: the interpreter's end would otherwise
        meet gloo's threads half closed and abort.
        """
        holder, self._group = [self._group], None
        ending = threading.Thread(target=_end, args=(holder,), daemon=True)
        ending.start()
        return ending


def _end(holder: list[Any]) -> None:
    holder.pop().abort()


def _backend(
    store: Store, rank: int, size: int, address: str, timeout_s: float, device: torch.device
) -> Any:
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        # torch takes this only from the environment, when it makes a group. Without it no wait
        # has a deadline, and torch ends the whole process when a peer has died.
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, nccl)
    gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    gloo._timeout = timeout
    gloo._threads = 2
    return dist.ProcessGroupGloo(store, rank, size, gloo)
