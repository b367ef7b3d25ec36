"""Monitor: metrics, logs and live progress."""
