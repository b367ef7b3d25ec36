"""Environments: the extension point for domains, tasks, sessions and verdicts."""
