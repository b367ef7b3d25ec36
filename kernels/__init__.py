"""Kernels: attention over packed sequences and per-token log-probabilities."""

from headrace.kernels.attention.api import packed_attention
from headrace.kernels.attention.layout import Blocks
from headrace.kernels.logprob.api import LogProbs, linear_logprob

__all__ = ["Blocks", "LogProbs", "linear_logprob", "packed_attention"]
