"""Writing a feature set, file by file: what is complete is listed in the manifest, and nothing else counts.

A file is written under another name, synced, hashed and renamed; then the manifest that lists it replaces the old one.
So a run that is killed at any moment, or that finds the disk full, leaves complete files and goes on with the next one.
The plan of the files is a function of the documents and of `shard_mb`: an interrupted run and a clean one write the
same.
"""

import dataclasses
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kimijax.errors import ConfigError
from kimijax.fingerprint import check_contract
from kimijax.safetensors_io import DTYPES, sync_directory, write_file

from .feature_files import check_documents
from .feature_manifest import (
    FLOATS,
    MANIFEST,
    PREFIXES,
    FeatureError,
    Manifest,
    Shard,
    Split,
    SplitRecord,
    documents_hash,
    first_not_finite,
    last_name,
    plan_shards,
    tap_name,
)
from .packing import Documents
from .run_record import file_hash

_KEPT_FREE = 64 * 10**6  # bytes that stay free: manifests, logs, the file system's own


@dataclass(frozen=True)
class Planned:
    """A file that is to be written: documents `first` to `stop` - 1 of a split."""

    split: Split
    index: int
    first: int
    stop: int
    tokens: int

    @property
    def file(self) -> str:
        return f"{PREFIXES[self.split]}-{self.index:05d}.safetensors"


class ShardArrays:
    """Room for the states of one file, filled document by document, in any order."""

    def __init__(self, manifest: Manifest, tokens: int) -> None:
        w = manifest.contract.wiring
        shape, dtype = (tokens, w.target_hidden), DTYPES[FLOATS[manifest.dtype]]
        self.taps = {tap: np.empty(shape, dtype) for tap in w.taps}
        self.last = np.empty(shape, dtype)
        self.filled = 0  # tokens stored so far

    def put(self, start: int, taps: Mapping[int, np.ndarray], last: np.ndarray) -> None:
        """Stores the states [T, D] of the tokens from row `start` of the file on, rounded to nearest even."""
        rows = slice(start, start + len(last))
        for tap, array in self.taps.items():
            array[rows] = taps[tap]
        self.last[rows] = last
        self.filled += len(last)


class FeatureWriter:
    """The files of a feature set that are still to be written."""

    def __init__(self, folder: Path, manifest: Manifest, documents: Mapping[Split, Documents]) -> None:
        """Begins a folder, or goes on with one.

        Args:
          folder: made if need be.
          manifest: what the set is to be, without shards.
          documents: of each split.
        Raises:
          ConfigError, WiringError: the folder holds a set that is to be something else.
        """
        self.folder, self._documents = folder, documents
        self.planned = [
            Planned(split, i, first, stop, int(d.offsets[stop] - d.offsets[first]))
            for split, d in documents.items()
            for i, (first, stop) in enumerate(plan_shards(d.offsets, manifest.token_bytes, manifest.shard_mb))
        ]
        folder.mkdir(parents=True, exist_ok=True)
        for part in folder.glob(".*.part"):  # of a session that was killed
            part.unlink()
        if (folder / MANIFEST).is_file():
            old = Manifest.read(folder)
            _check_same(old, manifest, documents, folder)
            manifest = old
        self.manifest = manifest
        self.missing = [p for p in self.planned if not self._is_complete(p)]

    @property
    def missing_bytes(self) -> int:
        """What the missing files will take."""
        m = self.manifest
        return sum(sum(t.nbytes for t in m.layout(p.stop - p.first, p.tokens)) + 4096 for p in self.missing)

    def check_disk(self) -> None:
        """Prints what is needed and what is free. ConfigError: it does not fit."""
        tokens = sum(p.tokens for p in self.missing)
        free = shutil.disk_usage(self.folder).free
        done = len(self.planned) - len(self.missing)
        _say(
            f"features: {len(self.missing)} of {len(self.planned)} files to write ({done} complete), {tokens:,} tokens "
            f"of {self.manifest.token_bytes:,} bytes: {_gb(self.missing_bytes)}; free in {self.folder}: {_gb(free)}"
        )
        if self.missing_bytes > max(0, free - _KEPT_FREE):
            raise ConfigError(
                "features: free disk space",
                _gb(free),
                f"at least {_gb(self.missing_bytes + _KEPT_FREE)} in {self.folder}",
                'free some, use another --out, lower corpus.limit, or set features.source = "online": it stores none',
            )

    def write(self, planned: Planned, arrays: ShardArrays) -> None:
        """Writes a file and lists it in the manifest.

        Raises:
          FeatureError: a number that is not finite, or a disk that is full.
          ValueError: states that were not put in once each.
        """
        m, documents = self.manifest, self._documents[planned.split]
        if arrays.filled != planned.tokens:
            raise ValueError(f"{planned.file}: found states of {arrays.filled} tokens, expected {planned.tokens}")
        self._check_finite(planned, arrays)
        ends = documents.offsets[planned.first : planned.stop + 1]
        rows = slice(int(ends[0]), int(ends[-1]))
        tensors = m.layout(planned.stop - planned.first, planned.tokens)
        data = [
            (ends - ends[0]).astype(np.int64),
            documents.tokens[rows].astype(np.int32),
            *arrays.taps.values(),
            arrays.last,
            documents.mask[rows].astype(np.uint8),
        ]
        path, part = self.folder / planned.file, self.folder / f".{planned.file}.part"
        try:
            write_file(part, tensors, data)
            size, digest = part.stat().st_size, file_hash(part)
            part.replace(path)
            sync_directory(self.folder)
            shard = Shard(planned.file, planned.first, planned.stop, planned.tokens, size, digest)
            self.manifest = self._with(planned.split, shard)
            self.manifest.write(self.folder)
        except OSError as e:
            part.unlink(missing_ok=True)
            free = _gb(shutil.disk_usage(self.folder).free)
            raise FeatureError(
                f"{path}: cannot be written: {e.strerror} ({free} free); what is complete is kept: make room and run "
                "the same command again"
            ) from e

    def _with(self, split: Split, shard: Shard) -> Manifest:
        """The manifest with a file added, or put in the place of one that was damaged."""
        record = self.manifest.splits[split]
        shards = {s.first: s for s in record.shards} | {shard.first: shard}
        record = dataclasses.replace(record, shards=tuple(shards[first] for first in sorted(shards)))
        return dataclasses.replace(self.manifest, splits={**self.manifest.splits, split: record})

    def _is_complete(self, planned: Planned) -> bool:
        """Whether the file is listed, and is what is listed."""
        listed = {s.first: s for s in self.manifest.splits[planned.split].shards}
        shard, path = listed.get(planned.first), self.folder / planned.file
        if shard is None:
            return False
        if (shard.file, shard.stop) != (planned.file, planned.stop):
            raise FeatureError(f"{self.folder / MANIFEST}: {shard.file} is not planned so; make the features again")
        found = path.is_file() and path.stat().st_size == shard.bytes and file_hash(path) == shard.sha256
        if not found:
            _say(f"features: {path} is {'damaged' if path.is_file() else 'missing'}, and is made again")
        return found

    def _check_finite(self, planned: Planned, arrays: ShardArrays) -> None:
        offsets = self._documents[planned.split].offsets
        names = {tap_name(tap): array for tap, array in arrays.taps.items()}
        for name, array in {**names, last_name(self.manifest.last): arrays.last}.items():
            row = first_not_finite(array)
            if row is not None:
                at = int(np.searchsorted(offsets, int(offsets[planned.first]) + row, side="right")) - 1
                raise FeatureError(
                    f"{planned.file}: {name}: a NaN or infinity in document {at} ({planned.split}), expected finite "
                    "states; nothing of this file was written: look at that document and at the target's weights"
                )


def empty_splits(documents: Mapping[Split, Documents]) -> dict[Split, SplitRecord]:
    """Splits of these documents, of which nothing is written yet."""
    return {s: SplitRecord(documents_hash(d), len(d.offsets) - 1, len(d.tokens)) for s, d in documents.items()}


def _check_same(old: Manifest, new: Manifest, documents: Mapping[Split, Documents], folder: Path) -> None:
    """Refuses to go on with a set that is to be something else."""
    path, fix = folder / MANIFEST, f"use another --out, or remove {folder} and begin anew"
    check_contract(old.contract, new.contract, artefact_name=f"features {folder}", running_name="target")
    for name in ("dtype", "computed_in", "last", "origin", "shard_mb"):
        if vars(old)[name] != vars(new)[name]:
            raise ConfigError(f"features: {name}", vars(new)[name], f"{vars(old)[name]}, as in {path}", fix)
    for split, d in documents.items():
        check_documents(old.splits[split], d, path, split)


def _gb(n: int) -> str:
    return f"{n / 1e9:,.2f} GB" if n >= 10**9 else f"{n / 1e6:.1f} MB"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
