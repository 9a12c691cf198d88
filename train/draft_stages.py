"""The stages that make a drafter, one after the other, from a recipe and a folder.

corpus → generate → features → vocab → fit → evaluate → export. Each reads what those before it wrote into the run's
folder, and each can be run again: what is done is not done twice, what was interrupted goes on. Evaluate and export
alone begin anew each time.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kimijax.errors import ConfigError
from kimijax.multihost import HostsConfig

from . import corpus, evaluate, export, features, fit, generate, vocab
from .draft_recipe import DraftRecipe
from .draft_target import DraftTarget
from .feature_import import ImportOptions, import_features
from .feature_manifest import MANIFEST, ORIGIN, Manifest
from .hosts import check_alike, is_first
from .run_record import RunRecord
from .stage_inputs import check_made_with
from .stopping import StopRequest

type Stop = Callable[[], bool]  # asked now and then; after a yes the stage saves and returns


@dataclass(frozen=True)
class Stage:
    """One stage: what it does (false: it was stopped), why a recipe may have no use for it (empty: it has), and
    whether several processes can work on it together."""

    run: Callable[[DraftRecipe, Path, Stop], object]
    help: str
    unused: Callable[[DraftRecipe, Path], str] = lambda recipe, out: ""
    on_hosts: bool = False


def _imported(recipe: DraftRecipe, out: Path) -> str:
    manifest = out / features.FOLDER / MANIFEST
    if not manifest.is_file() or (origin := Manifest.read(out / features.FOLDER).origin) == ORIGIN:
        return ""
    return f"documents and features of {out} were imported from {origin}"


def _no_answers(recipe: DraftRecipe, out: Path) -> str:
    off = "" if recipe.generate.enabled else "generate.enabled is false: the answers in the files are learned from"
    return off or _imported(recipe, out)


def _no_files(recipe: DraftRecipe, out: Path) -> str:
    online = "features.source is online: fit computes them in every step"
    return _imported(recipe, out) if recipe.features.source == "files" else online


STAGES: dict[str, Stage] = {
    "corpus": Stage(lambda r, out, _: corpus.build(r, out), "conversations to tokens and loss masks", _imported),
    "generate": Stage(generate.generate, "answer every prompt again with the target", _no_answers),
    "features": Stage(features.extract, "store the target's hidden states", _no_files, on_hosts=True),
    "vocab": Stage(lambda r, out, _: vocab.build_vocab(r, out), "choose the draft vocabulary"),
    "fit": Stage(fit.fit, "train the drafter", on_hosts=True),
    "evaluate": Stage(lambda r, out, _: evaluate.run(r, out), "measure acceptance with the served program"),
    "export": Stage(lambda r, out, _: export.run(r, out), "write the draft in the formats of servers"),
}
ALL = "all"


def check_hosts(name: str, hosts: HostsConfig) -> None:
    """Refuse several processes for what one does alone. ConfigError."""
    if hosts.is_several and (name == ALL or not STAGES[name].on_hosts):
        shared = " and ".join(other for other, stage in STAGES.items() if stage.on_hosts)
        raise ConfigError("--num-hosts", hosts.num_hosts, f"1 for {name}", f"only {shared} run on several hosts")


def run(name: str, recipe: DraftRecipe, out: Path, command: Sequence[str], *, install: bool = False) -> None:
    """Run one stage, or all of them in order.

    Args:
      name: of `STAGES`, or all.
      recipe: what to make.
      out: the run's folder.
      command: the command line, for the record.
      install: after the export, make the draft the embedded one.
    Raises:
      ConfigError: a stage that the recipe has no use for, or files that do not fit the recipe.
      FloatingPointError: the loss is not finite.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError("--out", str(out), "a folder")
    if install and name not in (ALL, "export"):
        raise ConfigError("--install", name, f"the stage export, or {ALL}")
    if name != ALL and (reason := STAGES[name].unused(recipe, out)):
        raise ConfigError("stage", name, "a stage that the recipe uses", reason)
    target = DraftTarget.of(recipe)
    if name != ALL:  # all stages check, or make again, what they find
        check_made_with(out, name, recipe)
    if name in (ALL, "fit"):
        export.check_recipe(recipe, target)
    # Of processes that work together, one keeps the record.
    record = RunRecord(out, recipe, command, {"contract": target.contract.digest}, stage=name) if is_first() else None
    check_alike(recipe, out)

    def note(**facts: object) -> None:
        if record is not None:
            record.note(**facts)

    with StopRequest() as stop:
        for stage_name in STAGES if name == ALL else (name,):
            stage = STAGES[stage_name]
            if reason := stage.unused(recipe, out):
                _say(f"{stage_name}: skipped, {reason}")
                continue
            _say(f"{stage_name}: {stage.help}")
            start = time.monotonic()
            try:
                finished = stage.run(recipe, out, stop)
            except Exception as e:
                note(outcome=f"{stage_name} failed: {e}")
                raise
            if stop() or finished is False:
                note(outcome=f"interrupted in {stage_name}")
                _say("stopped; run the same command again to resume")
                return
            note(outcome=f"{stage_name} done", **{f"{stage_name}_seconds": round(time.monotonic() - start, 1)})
    if install:
        export.install(recipe, out)


def run_import(options: ImportOptions, out: Path) -> None:
    """Turn another trainer's feature files into the documents and features of a run, for `vocab` and `fit`.

    Raises:
      ConfigError, CheckpointError: options or files that do not fit the target.
    """
    with StopRequest() as stop:
        if not import_features(options, out, stop):
            _say("stopped; run the same command again to resume")
            return
    taps = f"target.taps as in {out / features.FOLDER / MANIFEST}"
    _say(f"imported; now vocab, fit, evaluate and export, with generate.enabled=false and {taps}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
