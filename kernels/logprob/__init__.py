"""Per-token log-probability and entropy: reference, CPU path, Triton kernels, public function."""
