"""Learner: reads the run log, forms batches, trains, and publishes weights."""
