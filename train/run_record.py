"""What a run was: command, commit, versions, recipe and input hashes, in `run.json` beside the run's output.

The file holds one entry a session: a run that is stopped and resumed has several, in order.
"""

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import kimijax
from kimijax.errors import ConfigError

from .config import Recipe
from .draft_recipe import DraftRecipe

FILE = "run.json"
FORMAT = 1

# A resumed run must go on with the model, the text and the rows of a step it began with; schedules, rates and how often
# something is logged, evaluated or saved may change, and the record shows that they did.
_FIXED_PRETRAIN = ("seed", "rows", "row_tokens", "prompt_weight")


class RunRecord:
    """The record of the session that is running; every change is written at once, atomically."""

    def __init__(
        self,
        out: Path,
        recipe: Recipe | DraftRecipe,
        command: Sequence[str],
        inputs: Mapping[str, str],
        stage: str = "pretrain",
    ) -> None:
        """Append a session.

        Args:
          out: the run's folder.
          recipe: as it is used, overrides applied.
          command: the command line.
          inputs: SHA-256 by name of what the run reads.
          stage: what was asked for.
        """
        self._path = out / FILE
        self._sessions = sessions(out)
        self._session: dict[str, Any] = {
            "stage": stage,
            "command": list(command),
            "started": _now(),
            "commit": source_commit(),
            "versions": versions(),
            "devices": [f"{d.platform}:{d.device_kind}" for d in jax.devices()],
            "inputs": dict(inputs),
            "recipe": plain(recipe),
        }
        self._sessions.append(self._session)
        self._write()

    def note(self, **facts: Any) -> None:
        """Add facts, such as the step reached and how the session ended, to this session's entry."""
        self._session |= {**facts, "updated": _now()}
        self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_name(f".{FILE}.{os.getpid()}")
        part.write_text(json.dumps({"format": FORMAT, "sessions": self._sessions}, indent=2) + "\n", encoding="utf-8")
        part.replace(self._path)


def sessions(out: Path) -> list[dict[str, Any]]:
    """The sessions recorded in a run's folder, oldest first; none where there is no record.

    Raises:
      ConfigError: the file is not a record of this format.
    """
    path = out / FILE
    if not path.is_file():
        return []
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as e:
        raise ConfigError(str(path), str(e), "valid JSON") from e
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("sessions"), list):
        raise ConfigError(f"{path}: format", data if not isinstance(data, dict) else data.get("format"), str(FORMAT))
    return data["sessions"]


def check_resumable(out: Path, recipe: Recipe, inputs: Mapping[str, str]) -> None:
    """Refuse to go on with another model, text or data order than the run began with.

    Raises:
      ConfigError: names the first field that differs, with both values.
    """
    recorded = [s for s in sessions(out) if "recipe" in s]
    if not recorded:
        return
    old, new = recorded[-1], plain(recipe)
    fix = "resume with the run's own recipe, or start in another --out"
    for table in ("corpus", "model"):
        _check_same(old["recipe"][table], new[table], table, fix)
    for name in _FIXED_PRETRAIN:
        _check_same({name: old["recipe"]["pretrain"].get(name)}, {name: new["pretrain"][name]}, "pretrain", fix)
    _check_same(old["inputs"], dict(inputs), "inputs", "the run's inputs have changed; start in another --out")


def _check_same(old: Mapping[str, Any], new: Mapping[str, Any], where: str, fix: str) -> None:
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            raise ConfigError(f"{where}.{name}", new.get(name), f"{old.get(name)!r}, with which the run began", fix)


def versions() -> dict[str, str]:
    """Versions of what computes."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    found = {name: importlib.metadata.version(name) for name in packages}
    return {"kimijax": kimijax.__version__, "python": platform.python_version(), **found}


def source_commit() -> str:
    """The commit of the checkout that runs, "+changes" if it has uncommitted ones; else why there is none."""
    root = Path(kimijax.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return "not a checkout"
    git = shutil.which("git")
    if git is None:
        return "unknown: git is not installed"

    def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([git, "-C", str(root), *arguments], capture_output=True, text=True, check=False)

    head, changes = ask("rev-parse", "HEAD"), ask("status", "--porcelain", "--untracked-files=no")
    if head.returncode or changes.returncode:
        return f"unknown: {(head.stderr or changes.stderr).strip()}"
    return head.stdout.strip() + ("+changes" if changes.stdout.strip() else "")


def file_hash(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def command_line() -> list[str]:
    """The command as it was typed, `-m` restored."""
    return ["python", "-m", "kimijax.train", *sys.argv[1:]]


def plain(recipe: Recipe | DraftRecipe) -> dict[str, Any]:
    """A recipe as JSON gives it back: lists for tuples."""
    return json.loads(json.dumps(dataclasses.asdict(recipe)))


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
