"""Import of hidden states that other trainers wrote, where they write files.

`specforge`: a `.ckpt` or `.ckpt.gz` a conversation, by torch.save: `input_ids` [T], `loss_mask` [T],
`aux_hidden_state` [1, T, taps * D] and `hidden_state` [1, T, D], the last one *after* the final norm. `speculators`:
`hs_I.safetensors` with `token_ids` [T] and `hidden_states` [T, taps + 1, D], the last one *before* the final norm; the
loss masks lie in the Arrow data set beside them, and are read here from a JSON-lines file. TorchSpec has no files: it
streams its states through memory.

Nothing in such files says which layers they are from: that is told, by the layer ids and whose numbering they are. A
last state after the norm cannot be turned back: the manifest says which one it is, and training goes by that.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from kimijax.config import load_config
from kimijax.errors import CheckpointError, ConfigError
from kimijax.fingerprint import Contract, fingerprint_target
from kimijax.layer_ids import find_convention
from kimijax.loader import load_tokenizer, model_directory
from kimijax.safetensors_io import FilePool, new_directory, read_header
from kimijax.wiring import Wiring, WiringError

from .feature_manifest import FLOATS, Last, Manifest, Split, documents_hash
from .feature_writer import FeatureWriter, ShardArrays, empty_splits
from .features import FOLDER, check_ids
from .packing import Documents
from .torch_files import TorchFile

LAYOUTS = ("specforge", "speculators")
_STREAMED = "TorchSpec sends hidden states through Mooncake's memory and keeps no files of them"
_MASKS = (
    "where speculators is installed, datasets.load_from_disk(FOLDER).select_columns(['input_ids', 'loss_mask'])"
    ".to_json('masks.jsonl') writes one"
)


class ImportedFileError(CheckpointError):
    """A foreign feature file that is damaged, or not what its layout says."""


class Sample(NamedTuple):
    """One document of a foreign file. The states are None where only the tokens were asked for."""

    tokens: np.ndarray  # int64 [T]
    mask: np.ndarray  # uint8 [T]
    taps: np.ndarray | None  # [T, taps, D], in the order of the ids
    last: np.ndarray | None  # [T, D]


@dataclass(frozen=True)
class Source:
    """Where foreign files are, and how one is read: `read(index, states)`."""

    files: tuple[Path, ...]
    last: Last
    read: Callable[[int, bool], Sample]


@dataclass(frozen=True)
class ImportOptions:
    """What an import is told.

    Attributes:
      layout: who wrote the files, one of LAYOUTS.
      source: the folder with the files, searched with its subfolders.
      model: the target that the states are of, a checkpoint's folder or nano.
      layer_ids: of the streams, in the order of the files; where the producer lists the last state too, with it.
      convention: whose numbering they are, a name in `kimijax.layer_ids.CONVENTIONS`.
      masks: JSON lines with `input_ids` and `loss_mask`, for speculators.
      heldout: files kept for evaluation, drawn by a hash of their names.
      dtype: of what is stored, bfloat16 or float32.
      shard_mb: size of a file.
    """

    layout: str
    source: Path
    model: str
    layer_ids: tuple[int, ...]
    convention: str
    masks: Path | None = None
    heldout: int = 64
    dtype: str = "bfloat16"
    shard_mb: int = 1024


def import_features(options: ImportOptions, out: Path, stop: Callable[[], bool] = lambda: False) -> bool:
    """Writes `out/corpus` (documents and prompts) and `out/features` from foreign files; a second run goes on.

    Args:
      options: what is imported.
      out: the run's folder.
      stop: asked after every document.
    Returns:
      Whether everything is written.
    Raises:
      ConfigError, WiringError: a layout, convention or number that cannot be, ids that mean no taps of this target.
      ImportedFileError, FeatureError: files that are damaged, of another width, or of token ids the target lacks.
    """
    o = options
    if o.dtype not in FLOATS:
        raise ConfigError("dtype", o.dtype, " or ".join(FLOATS))
    directory = model_directory(o.model)
    config = load_config(directory)
    wiring = read_ids(o.layer_ids, o.convention, config.n_layers, config.hidden)
    source = _open(o, wiring)
    tokenizer, _ = load_tokenizer(directory, config)
    fingerprint = None if tokenizer is None else tokenizer.fingerprint
    contract = Contract(wiring, fingerprint_target(directory, config), fingerprint)
    split_files, documents = _documents(source, o.heldout)
    check_ids(documents, config)
    _write_documents(out / "corpus", documents, o.layout)
    manifest = Manifest(contract, o.dtype, "unknown", source.last, o.layout, o.shard_mb, empty_splits(documents))
    writer = FeatureWriter(out / FOLDER, manifest, documents)
    writer.check_disk()
    for planned in list(writer.missing):
        arrays = ShardArrays(writer.manifest, planned.tokens)
        offsets = documents[planned.split].offsets
        for i in range(planned.first, planned.stop):
            sample = source.read(split_files[planned.split][i], True)
            if sample.taps is None or sample.last is None:
                raise ValueError(f"{source.files[split_files[planned.split][i]]}: read without its states")
            rows = int(offsets[i] - offsets[planned.first])
            arrays.put(rows, {tap: sample.taps[:, t] for t, tap in enumerate(wiring.taps)}, sample.last)
            if stop():
                _say(f"import: stopped before {planned.file}; run the same command again to go on")
                return False
        writer.write(planned, arrays)
    _say(f"import: {len(source.files)} files of {o.layout}, taps {wiring.taps}, last state {source.last}")
    return True


def read_ids(ids: tuple[int, ...], convention: str, n_layers: int, hidden: int) -> Wiring:
    """The wiring that layer ids mean by a named convention. ConfigError, WiringError: they cannot be meant so."""
    c = find_convention(convention)
    if not ids:
        raise ConfigError("layer_ids", list(ids), "the ids that the features were made with", "they are in no file")
    fault = c.fault(ids, n_layers)
    if fault:
        raise WiringError("layer_ids", f"found {list(ids)} for a target of {n_layers} layers, expected {fault}")
    return Wiring(c.read(ids, n_layers), n_layers, hidden)


def _open(o: ImportOptions, wiring: Wiring) -> Source:
    if o.layout == "torchspec":
        expected = "specforge or speculators"
        raise ConfigError("layout", o.layout, expected, f"{_STREAMED}: make features of its conversations here")
    if o.layout not in LAYOUTS:
        raise ConfigError("layout", o.layout, " or ".join(LAYOUTS))
    if not o.source.is_dir():
        raise ConfigError("source", str(o.source), "a folder with feature files")
    if o.layout == "specforge":
        if o.masks is not None:
            raise ConfigError("masks", str(o.masks), "none: the files of specforge have their masks")
        return _specforge(o.source, wiring)
    if o.masks is None:
        raise ConfigError("masks", None, "a JSON-lines file with input_ids and loss_mask", _MASKS)
    return _speculators(o.source, o.masks, wiring)


def _specforge(folder: Path, wiring: Wiring) -> Source:
    files = tuple(sorted(p for p in folder.rglob("*") if p.name.endswith((".ckpt", ".ckpt.gz"))))
    if not files:
        raise ConfigError("source", str(folder), "a folder with *.ckpt or *.ckpt.gz files")
    names = ["aux_hidden_state", "hidden_state", "input_ids", "loss_mask"]

    def read(index: int, states: bool) -> Sample:
        path = files[index]
        with TorchFile(path) as file:
            if file.names != names:
                raise ImportedFileError(f"{path}: found tensors {file.names}, expected {names}")
            tokens, mask = (_vector(path, name, file.read(name)) for name in ("input_ids", "loss_mask"))
            if len(mask) != len(tokens):
                raise ImportedFileError(f"{path}: loss_mask: found {len(mask)} rows, expected {len(tokens)}")
            if not states:
                return Sample(tokens, mask, None, None)
            t, d = len(tokens), wiring.target_hidden
            aux = _matrix(path, "aux_hidden_state", file.read("aux_hidden_state"), (t, wiring.fused_width))
            last = _matrix(path, "hidden_state", file.read("hidden_state"), (t, d))
            return Sample(tokens, mask, aux.reshape(t, len(wiring.taps), d), last)

    return Source(files, "post_norm", read)


def _speculators(folder: Path, masks: Path, wiring: Wiring) -> Source:
    found = {p: p.stem.removeprefix("hs_") for p in folder.rglob("hs_*.safetensors")}
    numbers = {p: int(n) for p, n in found.items() if n.isdigit()}
    if not numbers or len(set(numbers.values())) != len(found):
        raise ConfigError("source", str(folder), "a folder with files hs_0.safetensors, hs_1.safetensors, ...")
    files = tuple(sorted(numbers, key=lambda p: numbers[p]))
    lines = _read_masks(masks)

    def read(index: int, states: bool) -> Sample:
        path = files[index]
        infos = {info.name: info for info in read_header(path)}
        if set(infos) != {"token_ids", "hidden_states"}:
            raise ImportedFileError(f"{path}: found tensors {sorted(infos)}, expected hidden_states and token_ids")
        if numbers[path] >= len(lines):
            raise ImportedFileError(f"{path}: {masks} has {len(lines)} lines, expected one for number {numbers[path]}")
        said, mask = lines[numbers[path]]
        with FilePool() as pool:
            tokens = _vector(path, "token_ids", pool.read(infos["token_ids"]))
            if not np.array_equal(tokens, said):
                raise ImportedFileError(f"{path}: token_ids: not those of line {numbers[path] + 1} of {masks}")
            if not states:
                return Sample(tokens, mask, None, None)
            h = pool.read(infos["hidden_states"])
        shape = (len(tokens), len(wiring.taps) + 1, wiring.target_hidden)
        h = _matrix(path, "hidden_states", h, shape)
        return Sample(tokens, mask, h[:, :-1], h[:, -1])

    return Source(files, "pre_norm", read)


def _read_masks(path: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Token ids int64 [T] and mask uint8 [T] of every line."""
    if not path.is_file():
        raise ConfigError("masks", str(path), "a JSON-lines file with input_ids and loss_mask", _MASKS)
    out: list[tuple[np.ndarray, np.ndarray]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        where = f"{path}: line {number}"
        try:
            data: Any = json.loads(line)
            tokens, mask = (np.asarray(list(data[name])) for name in ("input_ids", "loss_mask"))
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as e:
            raise ConfigError(where, repr(e), "an object with input_ids and loss_mask", _MASKS) from e
        if len(tokens) != len(mask):
            raise ConfigError(where, f"{len(tokens)} input_ids and {len(mask)} of loss_mask", "as many of both", _MASKS)
        out.append((_vector(path, f"line {number}: input_ids", tokens), _vector(path, "loss_mask", mask)))
    return out


def _vector(path: Path, name: str, array: np.ndarray) -> np.ndarray:
    """Token ids or a mask, int64 [T] or [1, T]; a mask as uint8 of 0 and 1."""
    flat = array[0] if array.ndim == 2 and array.shape[0] == 1 else array
    if flat.ndim != 1 or not len(flat) or not (np.issubdtype(flat.dtype, np.integer) or flat.dtype == np.bool_):
        raise ImportedFileError(f"{path}: {name}: found {array.dtype} {list(array.shape)}, expected integers [T]")
    if not name.endswith("loss_mask"):
        return flat.astype(np.int64)
    if np.any((flat != 0) & (flat != 1)):
        raise ImportedFileError(f"{path}: {name}: found values other than 0 and 1")
    return flat.astype(np.uint8)


def _matrix(path: Path, name: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """States of a given shape, with or without a batch axis of one."""
    found = array[0] if array.ndim == len(shape) + 1 and array.shape[0] == 1 else array
    floats = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32))
    if found.shape != shape or found.dtype not in floats:
        raise ImportedFileError(
            f"{path}: {name}: found {array.dtype} {list(array.shape)}, expected floats {list(shape)}: by the layer ids "
            "and the target's width"
        )
    return found


def _documents(source: Source, heldout: int) -> tuple[dict[Split, list[int]], dict[Split, Documents]]:
    """Which files are trained on, which are kept, and their tokens. Files without a masked token are left out."""
    samples: list[Sample] = []
    used: list[int] = []
    for i in range(len(source.files)):
        sample = source.read(i, False)
        if sample.mask.any():
            samples.append(Sample(sample.tokens.astype(np.int32), sample.mask, None, None))
            used.append(i)
    if len(used) < len(source.files):
        _say(f"import: {len(source.files) - len(used)} files without a token to learn from are left out")
    if not 0 < heldout < len(used):
        raise ConfigError(
            "heldout", heldout, f"from 1 to {len(used) - 1}: there are {len(used)} documents to learn from"
        )

    def draw(n: int) -> str:
        return hashlib.sha256(source.files[used[n]].name.encode()).hexdigest()

    kept = set(sorted(range(len(used)), key=draw)[:heldout])
    members: dict[Split, list[int]] = {
        "train": [n for n in range(len(used)) if n not in kept],
        "heldout": sorted(kept),
    }
    documents: dict[Split, Documents] = {split: _join([samples[n] for n in m]) for split, m in members.items()}
    return {split: [used[n] for n in m] for split, m in members.items()}, documents


def _join(samples: Sequence[Sample]) -> Documents:
    offsets = np.concatenate([[0], np.cumsum([len(s.tokens) for s in samples])]).astype(np.int64)
    return Documents(np.concatenate([s.tokens for s in samples]), np.concatenate([s.mask for s in samples]), offsets)


def _write_documents(folder: Path, documents: dict[Split, Documents], layout: str) -> None:
    """The documents as the stage corpus leaves them, so that vocab, fit and evaluate read them there."""
    prefixes: dict[Split, str] = {"train": "", "heldout": "heldout_"}
    if (folder / "tokens.npy").is_file():
        for split, prefix in prefixes.items():
            found = documents_hash(Documents.load(folder, prefix))
            if found != documents_hash(documents[split]):
                expected = f"the documents of the files to import, or no such folder ({split} differ)"
                raise ConfigError("corpus", str(folder), expected, "use another --out")
        return
    with new_directory(folder) as part:
        for split, prefix in prefixes.items():
            d = documents[split]
            np.save(part / f"{prefix}tokens.npy", d.tokens)
            np.save(part / f"{prefix}mask.npy", d.mask)
            np.save(part / f"{prefix}offsets.npy", d.offsets)
        lines = "".join(json.dumps(p) + "\n" for p in _prompts(documents["heldout"], layout))
        (part / "prompts.jsonl").write_text(lines, encoding="utf-8")
        counts = {s: {"documents": len(d.offsets) - 1, "tokens": len(d.tokens)} for s, d in documents.items()}
        (part / "report.json").write_text(json.dumps({"imported": layout, **counts}, indent=1) + "\n", encoding="utf-8")


def _prompts(documents: Documents, layout: str) -> Iterator[dict[str, Any]]:
    """The held-out documents up to their first answer."""
    for i, (start, end) in enumerate(zip(documents.offsets[:-1], documents.offsets[1:], strict=True)):
        first = int(documents.mask[start:end].argmax())
        if first:
            ids = documents.tokens[start : start + first].tolist()
            yield {"id": f"{layout}-{i}", "dataset": layout, "ids": ids}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
