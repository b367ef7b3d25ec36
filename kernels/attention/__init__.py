"""Attention over packed sequences: reference, CPU path, Triton kernels, public function."""
