"""Actor: samples trajectories with vLLM and environments, and receives weights."""
