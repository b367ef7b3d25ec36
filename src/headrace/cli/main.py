"""Entry point of the `headrace` command."""


def main() -> int:
    """Run the command line."""
    return 0
