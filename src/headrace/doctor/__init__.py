"""Doctor: small checks of a machine, each in a process of its own with a deadline."""
