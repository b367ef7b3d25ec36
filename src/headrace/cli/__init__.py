"""Command line: one file per command, none of which imports torch or vLLM at the top."""
