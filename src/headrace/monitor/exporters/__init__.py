"""Destinations of a run's metrics beside `metrics.jsonl`: one class each."""
