"""What runs inside vLLM's worker: apply a whole version in one call.

vLLM mixes `WeightReceiverExtension` into its worker class (`worker_extension_cls`). All bytes are
in hand and verified before the call: a layerwise reload that stops half-way cannot be repaired.
"""

import time
from typing import Any

import torch

from headrace.broker.host_weights import map_tensors
from headrace.errors import WeightError


class WeightReceiverExtension:
    """Methods that the engine calls by name through `collective_rpc`."""

    # Set by vLLM's worker, into which this class is mixed.
    model_runner: Any
    vllm_config: Any

    def headrace_apply(self, path: str, layout: bytes) -> float:
        """Replace all weights by those at `path`; returns the seconds it took.

        Args:
            path: `HostWeights.path` of the version to apply.
            layout: MessagePack of its `Layout`.

        Raises:
            WeightError: parameters got no value. Like any error here it leaves the model unusable.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        started = time.perf_counter()
        model = self.model_runner.get_model()
        expected = {name for name, _ in model.named_parameters()}
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            loaded = model.load_weights(iter(map_tensors(path, layout)))
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            # vLLM only warns of these and keeps serving whatever was in their memory.
            if missing := sorted(expected - loaded):
                raise WeightError(f"no values came for {', '.join(missing[:3])}")
            self._repack_tied_head(model)
        return time.perf_counter() - started

    def _repack_tied_head(self, model: Any) -> None:
        # On the CPU the output head multiplies by a packed copy. A reload renews it for layers
        # that it loads; a tied head is not loaded, and would silently keep the old weights.
        from vllm.platforms import current_platform

        head = getattr(model, "lm_head", None)
        if not current_platform.is_cpu() or head is None:
            return
        if self.vllm_config.model_config.hf_text_config.tie_word_embeddings:
            from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

            dispatch_cpu_unquantized_gemm(head, remove_weight=False)
