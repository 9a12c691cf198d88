"""Command line of training: `python -m kimijax.train STAGE --recipe RECIPE [--out FOLDER]`."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from kimijax.errors import CheckpointError, ConfigError, TemplateError, TokenizerError

from . import stages
from .config import load_recipe
from .run_record import command_line

RUNS = Path("runs")  # in the current directory
STAGES = {
    "pretrain": (stages.pretrain, "train a small target from scratch, then evaluate, export and report it"),
    "export-pretrained": (stages.export_pretrained, "evaluate, export and report a run's newest checkpoint"),
}


def parser() -> argparse.ArgumentParser:
    """The stages and their options."""
    top = argparse.ArgumentParser(prog="python -m kimijax.train", description="Train models and drafters.")
    commands = top.add_subparsers(dest="stage", required=True, metavar="STAGE")
    for name, (_, help_text) in STAGES.items():
        command = commands.add_parser(name, help=help_text, description=help_text)
        command.add_argument("--recipe", required=True, help="name of a recipe, or the path of a .toml file")
        command.add_argument(
            "--out", type=Path, help="the run's folder; an earlier run is resumed (default: runs/RECIPE)"
        )
        command.add_argument(
            "--set", action="append", default=[], metavar="TABLE.FIELD=VALUE", help="change a field of the recipe"
        )
        command.add_argument("--install", action="store_true", help="make the result the embedded model")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a stage. Returns the exit status: 0 done or stopped in order, 2 refused, 1 failed, 130 stopped at once."""
    args = parser().parse_args(arguments)
    # Orbax reports every file it writes, and warns of opening a folder only to read it.
    logging.getLogger("absl").setLevel(logging.ERROR)
    stage, _ = STAGES[args.stage]
    try:
        recipe = load_recipe(args.recipe, args.set)
        out = RUNS / recipe.name if args.out is None else args.out
        stage(recipe, out, command_line(), install=args.install)
    except (ConfigError, CheckpointError, TokenizerError, TemplateError) as e:
        print(f"kimijax.train: {e}", file=sys.stderr)
        return 2
    except FloatingPointError as e:
        print(f"kimijax.train: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("kimijax.train: stopped; the last checkpoint is kept", file=sys.stderr)
        return 130
    return 0
