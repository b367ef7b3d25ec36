"""Kernels: attention over packed sequences and per-token log-probabilities."""
