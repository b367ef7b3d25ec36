"""How vLLM's engine core runs the worker: in its own process, and never longer than the actor."""

import ctypes
import multiprocessing
import os
import signal

from vllm.v1.executor.uniproc_executor import UniProcExecutor

_PR_SET_PDEATHSIG = 1


class SingleProcessExecutor(UniProcExecutor):  # type: ignore[misc]
    """The worker inside the engine core: half the start-up time and memory of two processes.

    vLLM does the same on a GPU; on the CPU it insists on a second process only to bind threads,
    which the engine's environment settles. The kernel ends this process with the actor: an engine
    core whose actor was killed would stay for ever.
    """

    def _init_executor(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid != os.getppid():
            raise SystemExit("the actor ended while its engine started")
        super()._init_executor()
