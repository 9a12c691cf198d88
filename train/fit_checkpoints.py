"""Checkpoints of a drafter's training: all that a resumed run needs, or nothing; and what it must not change.

A step's folder holds the float32 parameters, the optimiser's state and the step (`state`), and a JSON record
(`record`): the position in the data, the sums of the unfinished report, and what the run is. It gets its name when it
is complete; the newest three are kept. Saved on any number of devices, it is restored onto those of the new run.
"""

import dataclasses
import fcntl
import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, Self, cast

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

from kimijax.draft_config import DraftConfig
from kimijax.errors import ConfigError
from kimijax.fingerprint import Contract, check_contract

from .draft_recipe import FitTable

CHECKPOINTS = "checkpoints"  # folder within `fit/`
LOCK = ".lock"
KEPT = 3
_FORMAT = 1

# What decides which rows an update sees and what it minimises. Rates, clipping, epochs, placement, and how often
# something is logged, evaluated or saved may change.
_FIXED = ("seed", "rows", "row_tokens", "accumulate", "ttt_steps", "decay", "loss", "lk_rate", "normaliser")


class FitState(NamedTuple):
    """Everything an update reads and writes."""

    params: nnx.State  # float32, of the drafter's `nnx.Param`s alone: what it borrows is not trained
    optimizer: optax.OptState
    step: jax.Array  # int32, updates done


@dataclass(frozen=True)
class Identity:
    """What a run is: a checkpoint of another one is refused."""

    contract: Contract
    draft: DraftConfig
    vocabulary: str  # sha256 of the target ids
    data: str  # sha256 of the documents
    fit: FitTable

    def to_json(self) -> dict[str, Any]:
        fit = dataclasses.asdict(self.fit)
        return {
            "contract": self.contract.to_json(),
            "draft": _plain(dataclasses.asdict(self.draft)),
            "vocabulary": self.vocabulary,
            "data": self.data,
            "fit": {name: fit[name] for name in _FIXED},
        }

    def check(self, saved: Mapping[str, Any], where: Path) -> None:
        """Refuse to go on from a checkpoint of another run.

        Args:
          saved: `to_json` of the run that wrote it.
          where: the checkpoint.
        Raises:
          WiringError: another wiring, target or tokenizer; shows both sides.
          ConfigError: names the first other field that differs, with both values.
        """
        written = Contract.from_json(saved["contract"], f"{where}: contract")
        check_contract(written, self.contract, artefact_name=f"checkpoint {where}", running_name="this run")
        new, fix = self.to_json(), "resume with the run's own recipe, or start in another --out"
        for table in ("draft", "fit"):
            old = saved[table]
            for name in sorted(old.keys() | new[table].keys()):
                _check_same(old.get(name), new[table].get(name), f"{table}.{name}", fix)
        _check_same(saved["vocabulary"], new["vocabulary"], "vocab/target_ids.npy (sha256)", fix)
        fix = "the run's documents have changed; start in another --out"
        _check_same(saved["data"], new["data"], "documents (sha256)", fix)


class Saved(NamedTuple):
    """A restored checkpoint."""

    state: FitState
    data: dict[str, Any]  # of the data's iterator
    progress: dict[str, Any]  # of the unfinished report


class Checkpoints:
    """The checkpoints of a run, within `with`.

    A reader of a run that another process is training must be `read_only`: opening for writing removes what looks like
    the rest of a killed save, and is for one process at a time.
    """

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        """Opens `folder/checkpoints`, and says which half-written ones are passed over.

        Raises:
          ConfigError: another process is writing there.
        """
        self._path = (folder / CHECKPOINTS).absolute()
        self._lock = None if read_only or jax.process_index() else _locked(folder)
        torn = _half_written(self._path)
        if read_only:  # the other two are what read_only implies; not saying so is a warning
            options = ocp.CheckpointManagerOptions(read_only=True, create=False, save_interval_steps=0)
        else:
            options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(self._path, options=options, item_names=("state", "record"))
        self.latest: int | None = self._manager.latest_step()
        if torn and jax.process_index() == 0:
            goes_on = f"step {self.latest} is the newest complete one" if self.latest else "no other is complete"
            print(f"{self._path}: not completely written, ignored: {', '.join(torn)}; {goes_on}", file=sys.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._manager.close()
        if self._lock is not None:
            self._lock.close()

    def check(self, identity: Identity) -> None:
        """Refuse the newest checkpoint if it is of another run; see `Identity.check`. Reads its record only."""
        if self.latest is not None:
            identity.check(self._record(self.latest)["identity"], self._path / str(self.latest))

    def save(self, state: FitState, identity: Identity, data: Mapping[str, Any], progress: Mapping[str, Any]) -> None:
        """Write the state of a step, in the background; a step that is there already is left as it is."""
        step = int(state.step)
        if step == self.latest:
            return
        record = {"format": _FORMAT, "identity": identity.to_json(), "data": dict(data), "progress": dict(progress)}
        args = ocp.args.Composite(state=ocp.args.StandardSave(tuple(state)), record=ocp.args.JsonSave(record))
        self._manager.save(step, args=args)
        self.latest = step

    def wait(self) -> None:
        """Return once everything is on disk."""
        self._manager.wait_until_finished()

    def restore(self, like: FitState) -> Saved:
        """The newest checkpoint. There must be one.

        Args:
          like: shapes, dtypes and where every array goes.
        """
        if self.latest is None:
            raise ValueError(f"{self._path}: found no checkpoint, expected one")
        record = self._record(self.latest)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(tuple(like)))
        found = self._manager.restore(self.latest, args=args)["state"]
        params, optimizer, step = cast(tuple[nnx.State, optax.OptState, jax.Array], found)
        return Saved(FitState(params, optimizer, step), record["data"], record["progress"])

    def _record(self, step: int) -> dict[str, Any]:
        record = self._manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore()))["record"]
        if record.get("format") != _FORMAT:
            raise ConfigError(f"{self._path / str(step)}: format", record.get("format"), str(_FORMAT))
        return record


def last_step(folder: Path) -> int | None:
    """The newest complete checkpoint's step, or None."""
    if not (folder / CHECKPOINTS).is_dir():
        return None
    with Checkpoints(folder, read_only=True) as found:
        return found.latest


def vocabulary_hash(target_ids: np.ndarray) -> str:
    """SHA-256 of a draft vocabulary."""
    return hashlib.sha256(np.ascontiguousarray(target_ids, "<i8").tobytes()).hexdigest()


def _locked(folder: Path) -> IO[bytes]:
    """A file in the folder that one process holds; the system lets go of it when that process ends, however it does."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / LOCK).open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        file.close()
        raise ConfigError(str(folder), "in use by another process", "no other one", "wait, or stop it") from e
    return file


def _half_written(path: Path) -> list[str]:
    """Names of saves that were cut off: a step's folder has another name until it is complete."""
    return sorted(p.name for p in path.iterdir() if not p.name.isdigit()) if path.is_dir() else []


def _check_same(old: object, new: object, where: str, fix: str) -> None:
    if old != new:
        raise ConfigError(where, new, f"{old!r}, with which the run began", fix)


def _plain(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as JSON gives it back: lists for tuples."""
    return json.loads(json.dumps(record))
