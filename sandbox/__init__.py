"""Sandbox: runs untrusted commands and scorers in nsjail with proven limits."""
