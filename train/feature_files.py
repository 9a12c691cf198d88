"""Reading the target's hidden states: documents by number, from files that are verified before they are used.

The format is `feature_manifest`'s; `feature_writer` writes it. A file is used only if it is, to the byte, the one that
the manifest lists, has the declared tensors and the documents' own token ids, and every number in it is finite.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import NamedTuple, cast

import numpy as np

from kimijax.errors import CheckpointError, ConfigError
from kimijax.fingerprint import Contract, check_contract
from kimijax.safetensors_io import DTYPES, FilePool, TensorInfo, read_header

from .feature_manifest import (
    MANIFEST,
    FeatureError,
    Last,
    Manifest,
    Shard,
    Split,
    SplitRecord,
    documents_hash,
    first_not_finite,
    last_name,
    tap_name,
)
from .packing import Documents
from .run_record import file_hash

_MAPPED = 128  # files that are kept mapped: each holds a file descriptor, of which a process often has only 1024
_REMAKE = "remove the file and run the stage features again, which makes this file anew"


class Document(NamedTuple):
    """One document and the target's states at each of its tokens. The arrays are read-only views of the file."""

    tokens: np.ndarray  # int32 [T]
    mask: np.ndarray  # uint8 [T], 1 where a token is the assistant's
    taps: dict[int, np.ndarray]  # tap -> [T, D], in the wiring's order
    last: np.ndarray  # [T, D], before or after the final norm: see `FeatureSet.last`


class _Open(NamedTuple):
    """A verified file, mapped."""

    offsets: np.ndarray
    tensors: dict[str, np.ndarray]


class FeatureSet:
    """One split of a feature set. Made by `open`; documents may be read by several threads at once.

    A file is verified when the first of its documents is asked for: by its hash, and then its numbers.
    """

    def __init__(self, folder: Path, manifest: Manifest, split: Split, documents: Documents | None) -> None:
        """Reads headers and offsets of all files; see `open`."""
        self.folder, self.manifest, self.split = folder, manifest, split
        self._documents = documents
        record = manifest.splits[split]
        self._shards = record.shards
        ends = [0, *(shard.stop for shard in self._shards)]
        found = sum(s.stop - s.first for s in self._shards)
        if any(s.first < e or s.stop <= s.first for s, e in zip(self._shards, ends[:-1], strict=True)):
            raise FeatureError(f"{folder / MANIFEST}: {split}: the files do not follow each other; make them again")
        if (found, ends[-1]) != (record.n_documents, record.n_documents) or not self._shards:
            raise FeatureError(
                f"{folder}: {split}: found {found} of {record.n_documents} documents, expected all; "
                "run the stage features again: it goes on where it stopped"
            )
        self._infos: list[dict[str, TensorInfo]] = []
        lengths: list[np.ndarray] = []
        for shard in self._shards:
            infos = _check_header(folder / shard.file, shard, manifest)
            with FilePool() as pool:
                offsets = pool.read(infos["offsets"])
            _check_offsets(folder / shard.file, offsets, shard)
            self._infos.append(infos)
            lengths.append(np.diff(offsets))
        self.lengths = np.concatenate(lengths)
        self._stops = np.array([shard.stop for shard in self._shards])
        self._locks = [Lock() for _ in self._shards]
        self._is_verified = [False] * len(self._shards)
        self._mapped: OrderedDict[int, _Open] = OrderedDict()  # the last used at the end
        self._mapped_lock = Lock()

    @classmethod
    def open(
        cls,
        folder: Path,
        running: Contract,
        *,
        split: Split = "train",
        documents: Documents | None = None,
        dtype: str | None = None,
    ) -> "FeatureSet":
        """A complete split of a folder.

        Args:
          folder: where the manifest lies.
          running: what the features are about to be used with.
          split: train or heldout.
          documents: what they are to be made from, token for token; None: whatever the files hold.
          dtype: of the states, bfloat16 or float32; None: whatever the files hold.
        Raises:
          ConfigError, WiringError: no manifest, another format, contract, dtype or other documents.
          FeatureError: files that are missing, incomplete or malformed.
        """
        manifest = Manifest.read(folder)
        check_contract(manifest.contract, running, artefact_name=f"features {folder}", running_name="target")
        if dtype is not None and manifest.dtype != dtype:
            raise ConfigError("features.dtype", dtype, f"{manifest.dtype}, as in {folder / MANIFEST}")
        if documents is not None:
            check_documents(manifest.splits[split], documents, folder / MANIFEST, split)
        return cls(folder, manifest, split, documents)

    @property
    def n_documents(self) -> int:
        return len(self.lengths)

    @property
    def last(self) -> Last:
        """Whether `Document.last` is before the target's final norm or after it."""
        return self.manifest.last

    def document(self, index: int) -> Document:
        """Document `index` of the split.

        Raises:
          IndexError: there is no such document.
          FeatureError: its file is damaged, or holds other tokens than the documents.
        """
        if not 0 <= index < self.n_documents:
            raise IndexError(f"document {index} of {self.n_documents}")
        at = int(np.searchsorted(self._stops, index, side="right"))
        offsets, tensors = self._verified(at)
        local = index - self._shards[at].first
        rows = slice(int(offsets[local]), int(offsets[local + 1]))
        taps = {tap: tensors[tap_name(tap)][rows] for tap in self.manifest.contract.wiring.taps}
        return Document(tensors["tokens"][rows], tensors["mask"][rows], taps, tensors[last_name(self.last)][rows])

    def __iter__(self) -> Iterator[Document]:
        return (self.document(i) for i in range(self.n_documents))

    def verify(self) -> None:
        """Verifies every file now, instead of each when it is first used. FeatureError names the first that is at
        fault."""
        for at in range(len(self._shards)):
            self._verified(at)

    def _verified(self, at: int) -> _Open:
        """File `at`, verified once. The one unused for longest is let go; its map ends with the last view of it."""
        with self._locks[at]:
            with self._mapped_lock:
                ready = self._mapped.pop(at, None)
            if ready is None:
                if not self._is_verified[at]:
                    self._verify(at)
                    self._is_verified[at] = True
                tensors = _map(self.folder / self._shards[at].file, self._infos[at])
                ready = _Open(np.array(tensors["offsets"]), tensors)
            with self._mapped_lock:
                self._mapped[at] = ready
                if len(self._mapped) > _MAPPED:
                    self._mapped.popitem(last=False)
            return ready

    def _verify(self, at: int) -> None:
        shard, path = self._shards[at], self.folder / self._shards[at].file
        found = file_hash(path)
        if found != shard.sha256:
            raise FeatureError(
                f"{path}: found sha256 {found[:12]}, expected {shard.sha256[:12]} by {MANIFEST}: damaged, or another "
                f"file under this name; {_REMAKE}"
            )
        tensors = _map(path, self._infos[at])
        offsets = np.array(tensors["offsets"])
        if self._documents is not None:
            _check_tokens(path, tensors, self._documents, shard)
        for name, array in tensors.items():
            row = first_not_finite(array) if array.ndim == 2 else None
            if row is not None:
                document = shard.first + int(np.searchsorted(offsets, row, side="right")) - 1
                raise FeatureError(
                    f"{path}: {name}: found a NaN or infinity in document {document}, expected finite numbers; "
                    f"{_REMAKE}"
                )


def check_documents(record: SplitRecord, documents: Documents, where: Path, split: Split) -> None:
    """Refuses documents that the features of a split were not made from. ConfigError shows both."""
    found = documents_hash(documents)
    if found != record.documents:
        sizes = (len(documents.offsets) - 1, len(documents.tokens))
        raise ConfigError(
            f"{where}: {split}: documents (sha256, number, tokens)",
            (record.documents[:12], record.n_documents, record.n_tokens),
            f"{(found[:12], *sizes)}, the documents at hand",
            "the documents have changed since the features were made: make these again, in another folder",
        )


def _check_header(path: Path, shard: Shard, manifest: Manifest) -> dict[str, TensorInfo]:
    """The file's tensors. FeatureError: they are not the declared ones, or the file is cut or of another size."""
    try:
        infos = {info.name: info for info in read_header(path)}
    except CheckpointError as e:
        raise FeatureError(f"{e}; {_REMAKE}") from e
    specs = manifest.layout(shard.stop - shard.first, shard.tokens)
    faults = [f"{name}: no such tensor is declared" for name in sorted(infos.keys() - {t.name for t in specs})]
    for t in specs:
        info = infos.get(t.name)
        if info is None:
            faults.append(f"{t.name}: missing")
        elif (DTYPES[info.dtype], info.shape) != (t.dtype, t.shape):
            faults.append(f"{t.name}: found {info.dtype} {list(info.shape)}, expected {t.dtype} {list(t.shape)}")
    size = path.stat().st_size
    if not faults and size != shard.bytes:
        faults.append(f"found {size} bytes, expected {shard.bytes}")
    if faults:
        raise FeatureError(f"{path}: not the file that {MANIFEST} declares: {'; '.join(faults)}; {_REMAKE}")
    return infos


def _check_offsets(path: Path, offsets: np.ndarray, shard: Shard) -> None:
    if offsets[0] != 0 or offsets[-1] != shard.tokens or np.any(np.diff(offsets) <= 0):
        raise FeatureError(f"{path}: offsets: expected to rise from 0 to {shard.tokens}; {_REMAKE}")


def _check_tokens(path: Path, tensors: Mapping[str, np.ndarray], documents: Documents, shard: Shard) -> None:
    """Refuses a file of other documents. They are compared in full: two files may have changed places."""
    ends = documents.offsets[shard.first : shard.stop + 1]
    rows = slice(int(ends[0]), int(ends[-1]))
    for name, found, right in (
        ("offsets", tensors["offsets"], ends - ends[0]),
        ("tokens", tensors["tokens"], documents.tokens[rows]),
        ("mask", tensors["mask"], documents.mask[rows]),
    ):
        if not np.array_equal(found, right):
            raise FeatureError(
                f"{path}: {name}: not those of documents {shard.first} to {shard.stop - 1} of the corpus; {_REMAKE}"
            )


def _map(path: Path, infos: Mapping[str, TensorInfo]) -> dict[str, np.ndarray]:
    """The file's tensors as read-only views of one memory map: a document costs the pages it lies on."""
    data = np.memmap(path, np.uint8, mode="r")
    return {
        name: cast(np.ndarray, data[info.begin : info.begin + info.nbytes]).view(DTYPES[info.dtype]).reshape(info.shape)
        for name, info in infos.items()
    }
