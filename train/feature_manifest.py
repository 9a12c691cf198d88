"""The file format of the target's hidden states: what lies in a folder of them.

A feature set is a folder with `manifest.json` and safetensors files: `features-00000.safetensors` and so on for
training, `heldout-00000.safetensors` for evaluation. A file holds whole documents, in order: `offsets` int64
[documents + 1], `tokens` int32 [n], `mask` uint8 [n], `tap.I` [n, D] for each tap of the wiring, and the target's last
state, as `last` [n, D] before the final norm or `last_normed` [n, D] after it. The manifest says what the states were
made with (`fingerprint.Contract`) and from (a hash of the documents), and has size and sha256 of each file.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from kimijax.config_reader import Reader, read_json
from kimijax.errors import CheckpointError, ConfigError
from kimijax.fingerprint import Contract
from kimijax.safetensors_io import DTYPES, TensorSpec, sync_directory

from .packing import Documents

FORMAT = 1
MANIFEST = "manifest.json"
ORIGIN = "kimijax"  # of features that the stage of this name computed
Split = Literal["train", "heldout"]
Last = Literal["pre_norm", "post_norm"]
PREFIXES: dict[Split, str] = {"train": "features", "heldout": "heldout"}
FLOATS = {"bfloat16": "BF16", "float32": "F32"}  # features.dtype -> safetensors' name
_BLOCK = 1 << 22  # numbers looked at together


class FeatureError(CheckpointError):
    """A feature file that is missing, damaged, or another one than the manifest or the documents say."""


@dataclass(frozen=True)
class Shard:
    """One file: documents `first` to `stop` - 1 of its split."""

    file: str
    first: int
    stop: int
    tokens: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class SplitRecord:
    """One split: the documents that it is made from, and the files that are complete, in order."""

    documents: str  # `documents_hash`
    n_documents: int
    n_tokens: int
    shards: tuple[Shard, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """What a feature set is.

    Attributes:
      contract: wiring, target and tokenizer.
      dtype: of the states in the files, `bfloat16` or `float32`.
      computed_in: dtype of the target that made them; `unknown` for imported ones.
      last: whether the last state is before the final norm or after it.
      origin: who made them: `kimijax`, or the layout that they were imported from.
      shard_mb: what the files were planned with, in 10^6 bytes.
      splits: by name.
    """

    contract: Contract
    dtype: str
    computed_in: str
    last: Last
    origin: str
    shard_mb: int
    splits: Mapping[Split, SplitRecord]

    def to_json(self) -> dict[str, Any]:
        splits = {name: {**vars(s), "shards": [vars(x) for x in s.shards]} for name, s in self.splits.items()}
        return {
            "format": FORMAT,
            **{k: v for k, v in vars(self).items() if k not in ("contract", "splits")},
            "hidden": self.contract.wiring.target_hidden,
            "contract": self.contract.to_json(),
            "splits": splits,
        }

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """A folder's manifest. ConfigError: none, another format, a field that is missing, unknown or mistyped."""
        path = folder / MANIFEST
        if not path.is_file():
            raise ConfigError(str(path), "no such file", "a feature set", "run the stage features, or import one")
        r = Reader(read_json(path), str(path))
        r.one_of("format", (FORMAT,), fix="the features were written by another version of kimijax: make them again")
        contract = Contract.from_json(r.get("contract", dict), f"{path}.contract")
        r.one_of("hidden", (contract.wiring.target_hidden,))
        manifest = cls(
            contract,
            r.one_of("dtype", tuple(FLOATS)),
            r.get("computed_in", str),
            r.one_of("last", get_args(Last)),
            r.get("origin", str),
            r.positive("shard_mb"),
            _read_splits(Reader(r.get("splits", dict), f"{path}.splits")),
        )
        r.finish()
        return manifest

    def write(self, folder: Path) -> None:
        """Replaces the folder's manifest, atomically and durably."""
        part = folder / f".{MANIFEST}.part"
        with part.open("w", encoding="utf-8") as f:
            f.write(json.dumps(self.to_json(), indent=1) + "\n")
            f.flush()
            os.fsync(f.fileno())
        part.replace(folder / MANIFEST)
        sync_directory(folder)

    def layout(self, documents: int, tokens: int) -> list[TensorSpec]:
        """The tensors of a file, in the order of their bytes: the wider the numbers the earlier, so all are aligned."""
        dtype, d = DTYPES[FLOATS[self.dtype]], self.contract.wiring.target_hidden
        names = [tap_name(tap) for tap in self.contract.wiring.taps] + [last_name(self.last)]
        return [
            TensorSpec("offsets", np.dtype(np.int64), (documents + 1,)),
            TensorSpec("tokens", np.dtype(np.int32), (tokens,)),
            *(TensorSpec(name, dtype, (tokens, d)) for name in names),
            TensorSpec("mask", np.dtype(np.uint8), (tokens,)),
        ]

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes."""
        return sum(t.nbytes for t in self.layout(0, 1)) - 8


def tap_name(tap: int) -> str:
    """A tap's tensor."""
    return f"tap.{tap}"


def last_name(last: Last) -> str:
    """The last state's tensor."""
    return "last" if last == "pre_norm" else "last_normed"


def _read_splits(r: Reader) -> dict[Split, SplitRecord]:
    splits: dict[Split, SplitRecord] = {}
    for name in PREFIXES:
        s = Reader(r.get(name, dict), f"{r.where}.{name}")
        shards: list[Shard] = []
        for i, data in enumerate(s.get("shards", list)):
            shards.append(read_shard(Reader(data, f"{s.where}.shards[{i}]")))
        splits[name] = SplitRecord(
            s.get("documents", str), s.get("n_documents", int), s.get("n_tokens", int), tuple(shards)
        )
        s.finish()
    r.finish()
    return splits


def read_shard(r: Reader) -> Shard:
    """The entry of a file. ConfigError: a field that is missing, unknown or mistyped."""
    first, stop, tokens, size = (r.get(key, int) for key in ("first", "stop", "tokens", "bytes"))
    shard = Shard(r.get("file", str), first, stop, tokens, size, r.get("sha256", str))
    r.finish()
    if Path(shard.file).name != shard.file:
        raise ConfigError(f"{r.where}.file", shard.file, "the name of a file in this folder")
    return shard


def documents_hash(documents: Documents) -> str:
    """sha256 (hex) of token ids, masks and offsets, whatever integers they are stored as."""
    digest = hashlib.sha256()
    for array, dtype in ((documents.offsets, np.int64), (documents.tokens, np.int32), (documents.mask, np.uint8)):
        digest.update(str(len(array)).encode())
        for start in range(0, len(array), _BLOCK):
            digest.update(array[start : start + _BLOCK].astype(dtype).tobytes())
    return digest.hexdigest()


def first_not_finite(array: np.ndarray) -> int | None:
    """The first row of [n, D] that has a NaN or an infinity; None if all are finite."""
    step = max(1, _BLOCK // max(1, array.shape[1]))
    for start in range(0, len(array), step):
        part = array[start : start + step]
        if part.dtype == DTYPES["BF16"]:  # the exponent alone: ml_dtypes' isfinite is ten times slower
            bad = ((part.view(np.uint16) & 0x7F80) == 0x7F80).any(axis=1)
        else:
            bad = ~np.isfinite(part).all(axis=1)
        if bad.any():
            return start + int(bad.argmax())
    return None


def plan_shards(offsets: Sequence[int] | np.ndarray, token_bytes: int, shard_mb: int) -> list[tuple[int, int]]:
    """[first, stop) of each file's documents: as many as fit into `shard_mb`, at least one."""
    limit = shard_mb * 10**6 // token_bytes
    spans: list[tuple[int, int]] = []
    first = 0
    while first < len(offsets) - 1:
        stop = int(np.searchsorted(offsets, int(offsets[first]) + limit, side="right")) - 1
        spans.append((first, max(first + 1, stop)))
        first = spans[-1][1]
    return spans
