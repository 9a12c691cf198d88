"""Writing a feature set, file by file: what is complete is listed in the manifest, and nothing else counts.

A file is written under another name, synced, hashed and renamed; then the manifest that lists it replaces the old one.
So a run that is killed at any moment, or that finds the disk full, leaves complete files and goes on with the next one.
The plan of the files is a function of the documents and of `shard_mb`: an interrupted run and a clean one write the
same, and so do several processes.

Of several processes each writes every n-th file of the plan, and the first one the manifest. The others leave a record
of each complete file beside it, which the first one takes into the manifest, then or in a later run of any number of
processes.
"""

import dataclasses
import functools
import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kimijax.config_reader import Reader, read_json
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
    read_shard,
    tap_name,
)
from .packing import Documents
from .run_record import file_hash

_RECORD = ".shard.json"  # a complete file's record is called `.FILE.shard.json`
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
    """The files of a feature set that are still to be written.

    Attributes:
      planned: all files.
      mine: those that this process writes.
      manifest: with the files that are complete.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        documents: Mapping[Split, Documents],
        process: tuple[int, int] = (0, 1),
    ) -> None:
        """Begins a folder, or goes on with one.

        Args:
          folder: made if need be.
          manifest: what the set is to be, without shards.
          documents: of each split.
          process: index and count; the others' writers are made after the first one's, which tidies up.
        Raises:
          ConfigError, WiringError: the folder holds a set that is to be something else.
        """
        self.folder, self.manifest, self._documents = folder, manifest, documents
        index, n_processes = process
        self._is_first = index == 0
        self.planned = [
            Planned(split, i, first, stop, int(d.offsets[stop] - d.offsets[first]))
            for split, d in documents.items()
            for i, (first, stop) in enumerate(plan_shards(d.offsets, manifest.token_bytes, manifest.shard_mb))
        ]
        self.mine = self.planned[index::n_processes]
        folder.mkdir(parents=True, exist_ok=True)
        is_begun = (folder / MANIFEST).is_file()
        if self._is_first:
            self._tidy(is_begun)
        if is_begun:
            old = Manifest.read(folder)
            _check_same(old, manifest, documents, folder)
            self.manifest = old
        elif self._is_first and n_processes > 1:  # which says what the others' records are of
            manifest.write(folder)
        if self._is_first:
            self.collect()

    def _tidy(self, is_begun: bool) -> None:
        """Removes what a session that was killed left half-written, and records of a set whose manifest is gone."""
        for pattern in (".*.part", *([] if is_begun else [f".*{_RECORD}"])):
            for path in self.folder.glob(pattern):
                path.unlink()

    @functools.cached_property
    def missing(self) -> list[Planned]:
        """Of `mine`, the files that are not complete; those that are listed are read in full to see it."""
        listed = self._listed()
        return [p for p in self.mine if not self._is_complete(p, listed.get((p.split, p.first)))]

    @property
    def is_complete(self) -> bool:
        """Whether all files are listed."""
        return self._listed().keys() >= {(p.split, p.first) for p in self.planned}

    def collect(self) -> None:
        """Takes the records of the other processes' files into the manifest. FeatureError: one that is not planned."""
        records = list(self.folder.glob(f".*{_RECORD}"))
        planned: dict[tuple[str, int, int, int], Split] = {
            (p.file, p.first, p.stop, p.tokens): p.split for p in self.planned
        }
        found: dict[Split, list[Shard]] = {split: [] for split in self.manifest.splits}
        for path in records:
            shard = read_shard(Reader(read_json(path), str(path)))
            split = planned.get((shard.file, shard.first, shard.stop, shard.tokens))
            if split is None:
                raise FeatureError(f"{path}: {shard.file} is not planned so; make the features again")
            found[split].append(shard)
        if records:
            for split, shards in found.items():
                self.manifest = self._with(split, *shards)
            self.manifest.write(self.folder)
        for path in records:
            path.unlink()

    def check_disk(self) -> None:
        """Prints what is needed, by all processes, and what is free. ConfigError: it does not fit."""
        listed, missing = self._listed(), {p.file for p in self.missing}
        left = [p for p in self.planned if p.file in missing or (p.split, p.first) not in listed]
        tokens, m = sum(p.tokens for p in left), self.manifest
        needed = sum(sum(t.nbytes for t in m.layout(p.stop - p.first, p.tokens)) + 4096 for p in left)
        free = shutil.disk_usage(self.folder).free
        done = len(self.planned) - len(left)
        if self._is_first:
            _say(
                f"features: {len(left)} of {len(self.planned)} files to write ({done} complete), {tokens:,} tokens "
                f"of {m.token_bytes:,} bytes: {_gb(needed)}; free in {self.folder}: {_gb(free)}"
            )
        if needed > max(0, free - _KEPT_FREE):
            raise ConfigError(
                "features: free disk space",
                _gb(free),
                f"at least {_gb(needed + _KEPT_FREE)} in {self.folder}",
                'free some, use another --out, lower corpus.limit, or set features.source = "online": it stores none',
            )

    def write(self, planned: Planned, arrays: ShardArrays) -> None:
        """Writes a file, and lists it in the manifest or leaves its record.

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
            if self._is_first:
                self.manifest = self._with(planned.split, shard)
                self.manifest.write(self.folder)
            else:
                self._record(shard)
        except OSError as e:
            part.unlink(missing_ok=True)
            free = _gb(shutil.disk_usage(self.folder).free)
            raise FeatureError(
                f"{path}: cannot be written: {e.strerror} ({free} free); what is complete is kept: make room and run "
                "the same command again"
            ) from e

    def _record(self, shard: Shard) -> None:
        """Leaves the record of a complete file, durably."""
        path = self.folder / f".{shard.file}{_RECORD}"
        part = path.with_name(f"{path.name}.part")
        with part.open("w", encoding="utf-8") as file:
            file.write(json.dumps(vars(shard)))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        sync_directory(self.folder)

    def _with(self, split: Split, *added: Shard) -> Manifest:
        """The manifest with files added, or put in the place of some that were damaged."""
        record = self.manifest.splits[split]
        shards = {s.first: s for s in (*record.shards, *added)}
        record = dataclasses.replace(record, shards=tuple(shards[first] for first in sorted(shards)))
        return dataclasses.replace(self.manifest, splits={**self.manifest.splits, split: record})

    def _listed(self) -> dict[tuple[Split, int], Shard]:
        """The manifest's entries by split and first document."""
        return {(split, s.first): s for split, record in self.manifest.splits.items() for s in record.shards}

    def _is_complete(self, planned: Planned, shard: Shard | None) -> bool:
        """Whether the file is listed, and is what is listed."""
        path = self.folder / planned.file
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
