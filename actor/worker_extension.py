"""What runs inside vLLM's worker: apply a whole version in one call.

vLLM mixes `WeightReceiverExtension` into its worker class (`worker_extension_cls`). All bytes are
in hand and verified before the call: a layerwise reload that stops half-way cannot be repaired.
"""

import time
from typing import Any

import torch

from headrace.broker.host_weights import map_tensors


class WeightReceiverExtension:
    """Methods that the engine calls by name through `collective_rpc`."""

    # Set by vLLM's worker, into which this class is mixed.
    model_runner: Any
    vllm_config: Any
    reload_weights: Any

    def headrace_apply(self, path: str, layout: bytes) -> float:
        """Replace all weights by those at `path`; returns the seconds it took.

        Args:
            path: `HostWeights.path` of the version to apply.
            layout: MessagePack of its `Layout`.
        """
        started = time.perf_counter()
        with torch.no_grad():
            self.reload_weights(
                weights_iterator=iter(map_tensors(path, layout)), is_checkpoint_format=True
            )
            self._repack_tied_head()
        return time.perf_counter() - started

    def _repack_tied_head(self) -> None:
        # On the CPU the output head multiplies by a packed copy. A reload renews it for layers
        # that it loads; a tied head is not loaded, and would silently keep the old weights.
        from vllm.platforms import current_platform

        model = self.model_runner.get_model()
        head = getattr(model, "lm_head", None)
        if not current_platform.is_cpu() or head is None:
            return
        if self.vllm_config.model_config.hf_text_config.tie_word_embeddings:
            from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

            dispatch_cpu_unquantized_gemm(head, remove_weight=False)
