"""Stage `vocab`: the draft vocabulary, the tokens that the target most often writes.

A drafter with a reduced vocabulary can never propose the tokens that are left out: each of them in an answer ends a
chain. What is kept is decided by the training documents alone, and its coverage of the held-out ones is reported.
"""

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kimijax.errors import ConfigError

from .draft_recipe import DraftRecipe
from .draft_target import DraftTarget
from .feature_manifest import documents_hash
from .features import check_ids, load_splits
from .packing import Documents

FOLDER = "vocab"  # within a run's folder
IDS, REPORT = "target_ids.npy", "report.json"
FORMAT = 1
_SHOWN = 50  # tokens left out that the report lists


def token_counts(documents: Documents, vocab_size: int) -> np.ndarray:
    """int64 [V]: how often each token occurs where the mask is 1."""
    return np.bincount(documents.tokens[documents.mask > 0], minlength=vocab_size).astype(np.int64)


def choose(counts: np.ndarray, size: int, always: Sequence[int]) -> np.ndarray:
    """The draft vocabulary: `always`, then the most frequent ids, of equally frequent ones the lower.

    Args:
      counts: int64 [n], of every id that may be chosen.
      size: of the vocabulary.
      always: ids that are in it however rare they are.
    Returns:
      int64 [size], ascending.
    Raises:
      ConfigError: a size that is larger than the number of ids, or too small for `always`.
    """
    if size > len(counts):
        raise ConfigError("vocab.size", size, f"at most {len(counts)}, the ids that the target's tokenizer has")
    if size < len(set(always)):
        raise ConfigError("vocab.size", size, f"at least {len(set(always))}, the tokens that end an answer")
    rank = counts.copy()
    rank[list(always)] = np.iinfo(np.int64).max
    order = np.lexsort((np.arange(len(rank)), -rank))
    return np.sort(order[:size]).astype(np.int64)


def build_vocab(recipe: DraftRecipe, out: Path) -> None:
    """Writes `out/vocab`; from the same documents, the same bytes.

    Args:
      recipe: `vocab.size` 0 keeps every id of the target.
      out: the run's folder, with its documents.
    Raises:
      ConfigError: a size that does not fit, no answers in the documents, or token ids that the target does not have.
    """
    source, documents = DraftTarget.of(recipe), load_splits(recipe, out)
    check_ids(documents, source.config)
    v, n = source.config.vocab_size, source.tokenizer.vocab_size
    counts = token_counts(documents["train"], v)
    if not counts.sum():
        fix = "run the stage corpus or generate with conversations that have answers"
        raise ConfigError("documents (train): tokens of assistant turns", 0, "at least one", fix)
    if recipe.vocab.size > v:
        raise ConfigError("vocab.size", recipe.vocab.size, f"at most {v}, the target's vocabulary")
    everything = recipe.vocab.size in (0, v)
    ids = np.arange(v) if everything else choose(counts[:n], recipe.vocab.size, source.stop_ids)
    kept = np.zeros(v, np.bool_)
    kept[ids] = True
    heldout = token_counts(documents["heldout"], v)
    missed = sorted(np.flatnonzero(~kept & (counts > 0)).tolist(), key=lambda i: (-counts[i], i))
    report: dict[str, Any] = {
        "format": FORMAT,
        "size": len(ids),
        "documents": {name: documents_hash(d) for name, d in documents.items()},
        "target_ids": hashlib.sha256(ids.astype(np.int64).tobytes()).hexdigest(),
        "train": _coverage(counts, kept),
        "heldout": _coverage(heldout, kept),
        "kept_but_never_seen": int((kept & (counts == 0)).sum()),
        "most_frequent_left_out": [
            {"id": i, "text": source.tokenizer.decode([i]), "count": int(counts[i])} for i in missed[:_SHOWN]
        ],
    }
    _write(out / FOLDER, ids.astype(np.int64), report)
    for name in ("train", "heldout"):
        print(f"vocab: {len(ids)} ids, {100 * report[name]['coverage']:.2f} % of {name} answers", file=sys.stderr)


def load_vocab(out: Path, size: int | None = None) -> np.ndarray:
    """int64 [Vd], ascending: what `build_vocab` wrote.

    Args:
      out: the run's folder.
      size: Vd as the recipe asks for it now; None: whatever was chosen.
    Raises:
      ConfigError: it is missing, not what its report says, or of another size.
    """
    path, report = out / FOLDER / IDS, out / FOLDER / REPORT
    if not path.is_file() or not report.is_file():
        raise ConfigError(str(path.parent), "no draft vocabulary", f"{IDS} and {REPORT}", "run the stage vocab")
    try:
        ids = np.load(path)
        said = json.loads(report.read_text(encoding="utf-8"))["target_ids"]
    except (ValueError, KeyError, TypeError, EOFError) as e:
        raise ConfigError(str(path.parent), repr(e), "what the stage vocab writes", "run it again") from e
    found = hashlib.sha256(ids.tobytes()).hexdigest()
    if ids.dtype != np.int64 or found != said:
        raise ConfigError(str(path), f"{ids.dtype}, sha256 {found[:12]}", f"int64, {said[:12]}", "run the stage again")
    if size is not None and len(ids) != size:
        raise ConfigError("vocab.size", size, f"{len(ids)}, the ids of {path}", "run the stage vocab for another size")
    return ids


def _coverage(counts: np.ndarray, kept: np.ndarray) -> dict[str, float | int]:
    """How much of the answers the vocabulary covers."""
    total = int(counts.sum())
    inside = int(counts[kept].sum())
    return {
        "tokens": total,
        "inside": inside,
        "coverage": inside / total if total else 0.0,
        "distinct": int((counts > 0).sum()),
        "distinct_inside": int((counts[kept] > 0).sum()),
    }


def _write(folder: Path, ids: np.ndarray, report: dict[str, Any]) -> None:
    """Both files, each renamed into place once it is complete; the report, which has the ids' hash, last."""
    folder.mkdir(parents=True, exist_ok=True)
    text = (json.dumps(report, indent=1, ensure_ascii=False) + "\n").encode()
    for name, write in ((IDS, lambda f: np.save(f, ids)), (REPORT, lambda f: f.write(text))):
        part = folder / f".{name}.part"
        with part.open("wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        part.replace(folder / name)
