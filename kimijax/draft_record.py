"""What a draft's directory says of itself, held against the target at hand before any weight is read.

A draft that kimijax exported carries its contract under the key `kimijax` of `config.json`; that of another producer
carries layer ids, which one of the conventions in `layer_ids` explains. `resolve_draft` is the one way from a directory
to the wiring that feeds it: the server, the trainer's evaluation and the doctor all take it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkpoint import inspect
from .config import read_json
from .config_reader import Reader
from .draft_checkpoint import canonical_name
from .draft_config import DraftConfig, parse_draft_config
from .errors import CheckpointError, ConfigError
from .fingerprint import Contract, TargetFingerprint, check_contract
from .layer_ids import RECORD_KEY, read_wiring
from .wiring import Wiring, check_algorithm

FORMAT = 1


@dataclass(frozen=True)
class DraftRecord:
    """What kimijax writes into a draft.

    Attributes:
      contract: the wiring, target and tokenizer that it was made with.
      training: where it comes from, for people: recipe, commit, tokens; nothing depends on it.
    """

    contract: Contract
    training: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **self.contract.to_json(), "training": dict(self.training)}

    @classmethod
    def from_json(cls, data: object, where: str = RECORD_KEY) -> "DraftRecord":
        """Reads `to_json`'s record. ConfigError names a key that is missing, unknown, mistyped or of another format."""
        r = Reader(data, where)
        found = r.get("format", int)
        if found != FORMAT:
            raise ConfigError(f"{where}.format", found, f"{FORMAT}", "export the draft again with this kimijax")
        contract = Contract.from_json(r.data, where, also=frozenset({"format", "training"}))
        return cls(contract, r.get("training", dict))


@dataclass(frozen=True)
class ResolvedDraft:
    """A draft whose files and settings agree with the target; its weights are not read yet."""

    directory: Path
    wiring: Wiring
    config: DraftConfig
    record: DraftRecord | None  # None: another producer's


def read_record(directory: str | Path) -> DraftRecord | None:
    """The record in a draft's `config.json`; None where there is none. ConfigError: one that is damaged."""
    data = read_json(Path(directory) / "config.json")
    return DraftRecord.from_json(data[RECORD_KEY], f"config.{RECORD_KEY}") if RECORD_KEY in data else None


def resolve_draft(
    directory: str | Path,
    target: TargetFingerprint,
    tokenizer: str | None,
    *,
    algorithm: str | None = None,
    convention: str | None = None,
    target_name: str = "the target",
) -> ResolvedDraft:
    """Wiring and configuration of a draft on a target, from `config.json` and the headers of its files.

    Args:
      directory: the draft.
      target: fingerprint of the target that will be tapped, see `fingerprint.fingerprint_target`.
      tokenizer: fingerprint of its tokenizer.
      algorithm: as set by the user; None leaves it to the draft.
      convention: how to read the layer ids of a draft without a record, see `layer_ids.CONVENTIONS`.
      target_name: what errors call the target.
    Raises:
      ConfigError: a draft that is not EAGLE-3, an algorithm that would not run it as one, or a malformed config.
      WiringError: layer ids with no single meaning, or a record that was made with another wiring, target or tokenizer;
        shows both sides.
      CheckpointError: no readable files.
    """
    directory = Path(directory)
    data = read_json(directory / "config.json")
    fc_width = _fc_width(directory)
    layers, hidden = (_integer(target, field) for field in ("n_layers", "hidden"))
    wiring = read_wiring(
        data, target_layers=layers, target_hidden=hidden, convention=convention, fc_width=fc_width, where="config"
    )
    check_algorithm(algorithm, directory, wiring=wiring, fc_width=fc_width)
    config = parse_draft_config(data, wiring)
    record = read_record(directory)
    if record is not None:
        running = Contract(wiring, target, tokenizer)
        check_contract(record.contract, running, artefact_name=f"draft {directory}", running_name=target_name)
    return ResolvedDraft(directory, wiring, config, record)


def _fc_width(directory: Path) -> int:
    """Inputs of the fusion layer, from the header."""
    index = inspect(directory)
    for name, info in index.tensors.items():
        if canonical_name(name) == "fc.weight" and len(info.shape) == 2:
            return info.shape[1]
    raise CheckpointError(
        f"{directory}: fc.weight: found no such matrix, expected the fusion layer of an EAGLE-3 head; a draft without "
        "one takes a single hidden state (EAGLE-1 or EAGLE-2), or its export left the layer out"
    )


def _integer(target: TargetFingerprint, field: str) -> int:
    value = target.config[field]
    if type(value) is not int:
        raise ConfigError(f"target.config.{field}", value, "an integer")
    return value
