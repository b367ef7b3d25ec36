"""The inference engine: vLLM's AsyncLLM, token ids in and token ids out.

vLLM's engine core runs in a process of its own. Weights always arrive by `apply`; the engine starts
with dummy values and serves nothing before the first version.
"""

import asyncio
import gc
import importlib.util
import logging
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.broker.host_weights import HostWeights
from headrace.broker.records import Span
from headrace.errors import ConfigError, EngineError
from headrace.precision import warn_if_slow

_MIN_TEMPERATURE = 0.01  # vLLM silently samples at this where less is asked
_BLOCK_SIZE = 32
_SHUTDOWN_S = 1.0  # the engine's process holds nothing that is worth waiting for


@dataclass(frozen=True)
class Generation:
    """What one request sampled. Positions of `versions` count from the first sampled token."""

    tokens: list[int]
    logprobs: list[float]
    """Log-probability of each token in the distribution it was sampled from (temperature
    applied), nats."""
    versions: list[Span]
    """Policy version of each token, contiguous from 0 to the number of tokens."""
    stop: str
    """`stop` (a stop token, which is the last of `tokens`) or `length`."""


@dataclass(frozen=True)
class ApplyReport:
    """What one weight update cost, in seconds."""

    pause_s: float
    """From the last token under the old weights until generation may go on."""
    apply_s: float
    """Of it, in the worker."""


def _environment(threads: int, start_s: float, sockets: str) -> dict[str, str]:
    """Settings that vLLM takes only from the environment; its processes inherit them.

    On a GPU the CPU entries are read by nobody.
    """
    import torch

    settings = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(start_s)),
        # a folder that is removed: vLLM leaves its sockets lying in the temporary folder
        "VLLM_RPC_BASE_PATH": sockets,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
    }
    if not torch.cuda.is_available():
        # Log-probabilities would otherwise compile a small kernel at the first request, which
        # needs a C++ compiler and many seconds.
        settings["TORCH_COMPILE_DISABLE"] = "1"
    return settings


class Engine:
    """One vLLM engine. After an `EngineError` from `apply` it must be closed and started anew."""

    def __init__(self, llm: Any, max_model_len: int, sockets: str) -> None:
        """Use `start`."""
        self._llm = llm
        self._sockets = sockets
        self.max_model_len = max_model_len
        """Longest sequence, prompt and sampled tokens together."""
        self._version: int | None = None
        self._failed = ""
        self._admitting = asyncio.Event()
        self._applying = asyncio.Lock()

    @classmethod
    async def start(
        cls,
        model_dir: Path,
        *,
        dtype: str,
        max_model_len: int,
        kv_cache_bytes: int,
        threads: int,
        max_num_seqs: int = 256,
        start_s: float = 600.0,
    ) -> "Engine":
        """Start the engine's process; takes 10 to 40 s, in which the event loop keeps running.

        Args:
            model_dir: folder with `config.json`; no weights are read from it.
            dtype: `bfloat16`, `float16` or `float32`.
            max_model_len: longest sequence in tokens.
            kv_cache_bytes: size of the key-value cache in bytes.
            threads: CPU threads of the engine's process.
            max_num_seqs: requests that are decoded together.
            start_s: deadline in seconds.

        Raises:
            ConfigError: vLLM is not installed or there is no model configuration.
            EngineError: the engine did not come up.
        """
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError("vLLM is not installed: pip install 'headrace[cpu]' or [gpu]")
        if not (model_dir / "config.json").is_file():
            raise ConfigError(f"model folder {model_dir} has no config.json")
        await asyncio.to_thread(warn_if_slow, dtype)
        sockets = tempfile.mkdtemp(prefix="headrace-engine-")
        os.environ.update(_environment(threads, start_s, sockets))
        started: list[Any] = []  # the thread's future would keep what it returns for ever
        try:
            await asyncio.to_thread(
                _start_llm, started, model_dir, dtype, max_model_len, kv_cache_bytes, max_num_seqs
            )
        except (RuntimeError, ValueError, TimeoutError) as error:
            raise EngineError(f"the engine did not start for {model_dir}: {error}") from error
        finally:
            if not started:
                shutil.rmtree(sockets, ignore_errors=True)
        return cls(started.pop(), max_model_len, sockets)

    @property
    def version(self) -> int | None:
        """Policy version that is served; None before the first `apply`."""
        return self._version

    async def generate(
        self,
        prompt: list[int],
        *,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        stop_token_ids: list[int],
        request_id: str,
    ) -> Generation:
        """Sample a continuation without truncation (top_p = 1, top_k = 0).

        Args:
            prompt: token ids; at least one, fewer than `max_model_len`.
            max_new_tokens: upper bound; the model length is another.
            temperature: at least 0.01.
            seed: makes the request's random choices, given the same log-probabilities.
            stop_token_ids: tokens that end the continuation, which includes them.
            request_id: unique among the running requests.

        Raises:
            EngineError: the engine is dead, or refused the request.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if not 0 < len(prompt) < self.max_model_len:
            raise EngineError(
                f"request {request_id}: a prompt of {len(prompt)} tokens does not fit "
                f"actors.max_model_len = {self.max_model_len}"
            )
        if temperature < _MIN_TEMPERATURE:
            raise EngineError(
                f"request {request_id}: temperature {temperature} is below {_MIN_TEMPERATURE}"
            )
        await self._admitting.wait()
        params = SamplingParams(
            max_tokens=max_new_tokens,
            temperature=temperature,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            seed=seed,
            stop_token_ids=stop_token_ids,
            ignore_eos=True,  # the caller names every token that stops
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        # The prefix cache is keyed by tokens; the salt keeps the versions apart in it.
        salted = {"prompt_token_ids": prompt, "cache_salt": str(self._version)}
        async with self._translated(f"request {request_id}"):
            outputs = [part async for part in self._llm.generate(salted, params, request_id)]
        if not outputs:
            raise EngineError(f"request {request_id} ended without an output")
        return _generation(outputs[-1].outputs[0], request_id)

    async def apply(
        self, weights: HostWeights, *, version: int, deadline_s: float = 120.0
    ) -> ApplyReport:
        """Replace all weights while generation is paused; running requests go on afterwards.

        Raises:
            EngineError: the engine failed in the middle; it serves nothing any more.
        """
        async with self._applying, self._translated(f"applying version {version}"):
            self._admitting.clear()
            started = time.perf_counter()
            layout = msgspec.msgpack.encode(weights.layout)
            try:
                async with asyncio.timeout(deadline_s):
                    await self._llm.pause_generation(mode="keep", clear_cache=False)
                    apply_s = await self._apply_in_worker(weights.path, layout)
                    await self._llm.update_weight_version(str(version))
                    await self._llm.resume_generation()
            except BaseException as error:
                self._fail(f"applying version {version} was not finished: {error!r}")
                raise
            self._version = version
            self._admitting.set()
            return ApplyReport(time.perf_counter() - started, apply_s)

    async def _apply_in_worker(self, path: str, layout: bytes) -> float:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            seconds: list[float] = await self._llm.collective_rpc(
                "headrace_apply", args=(path, layout)
            )
        except EngineDeadError:
            raise
        except Exception as error:  # vLLM's type for whatever failed in the worker
            raise EngineError(f"the weights do not fit the engine's model: {error}") from error
        return max(seconds)

    async def close(self) -> None:
        """End the engine's process."""
        self._fail("it was closed")
        llm, self._llm = self._llm, None
        if llm is not None:
            # It would report the end of its process, which is wanted now, as a failure.
            logging.getLogger("vllm.v1.engine.async_llm").setLevel(logging.CRITICAL)
            await asyncio.to_thread(llm.shutdown, timeout=_SHUTDOWN_S)
            del llm
            gc.collect()  # its destructor complains when it runs as late as the interpreter's end
        shutil.rmtree(self._sockets, ignore_errors=True)

    def _fail(self, reason: str) -> None:
        self._failed = self._failed or reason
        # Whoever waits for admission must see the failure.
        self._admitting.set()

    @asynccontextmanager
    async def _translated(self, what: str) -> AsyncIterator[None]:
        """Turn vLLM's failures into `EngineError`."""
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        if self._failed:
            raise EngineError(f"{what}: the engine can no longer serve: {self._failed}")
        try:
            yield
        except EngineDeadError as error:
            self._fail("its process died")
            raise EngineError(
                f"{what}: the engine's process died; start the actor again"
            ) from error
        except TimeoutError as error:
            raise EngineError(f"{what}: the engine did not answer in time") from error
        except (EngineGenerateError, ValueError, RuntimeError) as error:
            cause = error.__cause__ or error
            raise EngineError(f"{what}: {cause}") from error


def _start_llm(
    started: list[Any],
    model_dir: Path,
    dtype: str,
    max_model_len: int,
    kv_cache_bytes: int,
    max_num_seqs: int,
) -> None:
    import torch
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine_args = AsyncEngineArgs(
        model=str(model_dir),
        skip_tokenizer_init=True,
        trust_remote_code=False,
        load_format="dummy",
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        kv_cache_memory_bytes=kv_cache_bytes,
        block_size=_BLOCK_SIZE,
        enable_prefix_caching=True,
        distributed_executor_backend="headrace.actor.executor.SingleProcessExecutor",
        enforce_eager=not torch.cuda.is_available(),
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        disable_log_stats=True,
        worker_extension_cls=("headrace.actor.worker_extension.WeightReceiverExtension"),
    )
    started.append(AsyncLLM.from_engine_args(engine_args))


def _generation(output: Any, request_id: str) -> Generation:
    if output.finish_reason not in {"stop", "length"}:
        raise EngineError(f"request {request_id} ended by {output.finish_reason!r}")
    tokens = list(output.token_ids)
    logprobs = [float(value) for value in output.logprobs.logprobs]
    spans = [Span(int(span.version), span.start, span.end) for span in output.weight_versions]
    if len(logprobs) != len(tokens) or list(output.logprobs.token_ids) != tokens:
        raise EngineError(f"request {request_id}: log-probabilities do not match the tokens")
    return Generation(tokens, logprobs, spans, output.finish_reason)
