"""Command line of training: `python -m kimijax.train STAGE --recipe RECIPE [--out FOLDER]`."""

import argparse
import logging
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import jax

from kimijax.errors import CheckpointError, ConfigError, RequestError, TemplateError, TokenizerError
from kimijax.layer_ids import CONVENTIONS
from kimijax.multihost import HostsConfig, hosts_value, initialize, leave

from . import draft_stages, stages
from .config import load_recipe
from .draft_recipe import load_draft_recipe
from .feature_import import LAYOUTS, ImportOptions
from .run_record import command_line

RUNS = Path("runs")  # in the current directory
IMPORT = "import-features"
STAGES = {
    "pretrain": (stages.pretrain, "train a small target from scratch, then evaluate, export and report it"),
    "export-pretrained": (stages.export_pretrained, "evaluate, export and report a run's newest checkpoint"),
}


def parser() -> argparse.ArgumentParser:
    """The stages and their options."""
    top = argparse.ArgumentParser(prog="python -m kimijax.train", description="Train models and drafters.")
    commands = top.add_subparsers(dest="stage", required=True, metavar="STAGE")
    helps = {name: stage.help for name, stage in draft_stages.STAGES.items()}
    helps |= {draft_stages.ALL: "all stages of a drafter, from corpus to export"}
    for name, help_text in {**{name: text for name, (_, text) in STAGES.items()}, **helps}.items():
        command = commands.add_parser(name, help=help_text, description=help_text)
        command.add_argument("--recipe", required=True, help="name of a recipe, or the path of a .toml file")
        command.add_argument(
            "--out", type=Path, help="the run's folder; an earlier run is resumed (default: runs/RECIPE)"
        )
        command.add_argument(
            "--set", action="append", default=[], metavar="TABLE.FIELD=VALUE", help="change a field of the recipe"
        )
        command.add_argument("--install", action="store_true", help="make the result the embedded model, or its draft")
        if name in helps:
            command.add_argument(
                "--online", action="store_true", help="no files of features: the same as features.source = online"
            )
            _add_hosts(command)
    about = "read the hidden states that another trainer stored"
    _add_import(commands.add_parser(IMPORT, help=about, description=about))
    return top


def _add_hosts(command: argparse.ArgumentParser) -> None:
    stages_ = ", ".join(name for name, stage in draft_stages.STAGES.items() if stage.on_hosts)
    command.add_argument(
        "--num-hosts", type=hosts_value, default=1, help=f"processes that work together, or auto; only for {stages_}"
    )
    command.add_argument("--host-id", type=int, help="which of them this is, from 0")
    command.add_argument(
        "--coordinator", metavar="HOST:PORT", help="where host 0 is reached, a port that is free there"
    )


def _add_import(command: argparse.ArgumentParser) -> None:
    command.add_argument("--layout", required=True, help="who wrote the files: " + ", ".join(LAYOUTS))
    command.add_argument("--source", type=Path, required=True, help="their folder")
    command.add_argument("--model", required=True, help="the target that they are of: a checkpoint's folder, or nano")
    command.add_argument("--layer-ids", type=int, nargs="+", required=True, help="of the streams, in the files' order")
    command.add_argument(
        "--layer-id-convention", required=True, choices=sorted(CONVENTIONS), help="whose numbering the ids are"
    )
    command.add_argument("--masks", type=Path, help="JSON lines with input_ids and loss_mask, for speculators")
    command.add_argument("--heldout", type=int, default=64, help="files kept for evaluation (default: %(default)s)")
    command.add_argument("--dtype", default="bfloat16", help="of what is stored (default: %(default)s)")
    command.add_argument("--out", type=Path, required=True, help="the run's folder")


def _overrides(given: Sequence[str], *, online: bool) -> list[str]:
    """The fields that the command line changes. ConfigError: --online beside a setting of what it sets."""
    if not online:
        return list(given)
    for item in given:
        if item.partition("=")[0].strip() == "features.source":
            raise ConfigError("--online", f"--set {item} beside it", "one of the two")
    return [*given, 'features.source="online"']


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a stage. Returns the exit status: 0 done or stopped in order, 2 refused, 1 failed, 130 stopped at once."""
    code = _run(parser().parse_args(arguments))
    if code and jax.distributed.is_initialized():
        leave(code)  # the others may be waiting for this process
    return code


def _run(args: argparse.Namespace) -> int:
    # Orbax reports every file it writes, and warns of opening a folder only to read it.
    logging.getLogger("absl").setLevel(logging.ERROR)
    try:
        if args.stage == IMPORT:
            options = ImportOptions(
                layout=args.layout,
                source=args.source,
                model=args.model,
                layer_ids=tuple(args.layer_ids),
                convention=args.layer_id_convention,
                masks=args.masks,
                heldout=args.heldout,
                dtype=args.dtype,
            )
            draft_stages.run_import(options, args.out)
        elif args.stage in STAGES:
            recipe = load_recipe(args.recipe, args.set)
            stage, _ = STAGES[args.stage]
            stage(recipe, args.out or RUNS / recipe.name, command_line(), install=args.install)
        else:
            recipe = load_draft_recipe(args.recipe, _overrides(args.set, online=args.online))
            hosts = HostsConfig(args.num_hosts, args.host_id, args.coordinator)
            draft_stages.check_hosts(args.stage, hosts)
            initialize(hosts)
            draft_stages.run(args.stage, recipe, args.out or RUNS / recipe.name, command_line(), install=args.install)
    except (ConfigError, CheckpointError, TokenizerError, TemplateError, RequestError) as e:
        print(f"kimijax.train: {e}", file=sys.stderr)
        return 2
    except (FloatingPointError, OSError) as e:
        print(f"kimijax.train: {e}", file=sys.stderr)
        return 1
    except RuntimeError:
        if not jax.distributed.is_initialized():
            raise
        traceback.print_exc()
        print("kimijax.train: failed; if another process was lost, see what that one said", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("kimijax.train: stopped; the last checkpoint is kept", file=sys.stderr)
        return 130
    return 0
