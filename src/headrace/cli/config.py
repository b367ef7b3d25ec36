"""`headrace config`: what a run would be configured as, and what can be configured."""

import argparse

from headrace.cli import runargs
from headrace.errors import ConfigError

HELP = """\
Show the resolved configuration that the arguments name, or explain every key."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser(
        "show",
        help="print the resolved configuration as JSON",
        description=runargs.USAGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    runargs.add_arguments(show)
    keys = actions.add_parser("keys", help="print every key with type, default and meaning")
    keys.add_argument("--markdown", action="store_true", help="all of them as a page of tables")
    keys.add_argument("prefix", nargs="?", default="", help="only keys that start with this")


def run(args: argparse.Namespace) -> int:
    """Print the configuration or the keys.

    Raises:
        ConfigError: an argument is wrong.
    """
    if args.action == "show":
        from headrace.config import to_json

        print(to_json(runargs.resolve(args.items)).decode(), end="")
        return 0
    from headrace.configkeys import every_key, markdown

    if args.markdown:
        if args.prefix:
            raise ConfigError("--markdown prints every key: leave the prefix away")
        print(markdown(), end="")
        return 0
    found = [key for key in every_key() if key.name.startswith(args.prefix)]
    if not found:
        raise ConfigError(f"no key starts with {args.prefix!r}; `headrace config keys` shows all")
    for key in found:
        default = f" = {key.default}" if key.default else ""
        print(f"{key.name}: {key.type}{default}\n    {key.meaning}")
    return 0
