"""Reinforcement-learning post-training of language models on tasks that are executed for real."""

__version__ = "0.1.0"
