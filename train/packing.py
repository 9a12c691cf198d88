"""Documents packed into rows of fixed length: no document is cut unless it is longer than a row, none sees another."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kimijax.errors import ConfigError

OPEN_ROWS = 32  # rows that a document may still go into; more fill better and cost more time
_REMAKE = "remove the folder and make the documents again"


@dataclass(frozen=True)
class Documents:
    """Token documents, concatenated."""

    tokens: np.ndarray  # uint16 or int32 [n]
    mask: np.ndarray  # uint8 [n], 1 where a token is to be predicted with full weight
    offsets: np.ndarray  # int64 [docs + 1]

    @staticmethod
    def load(folder: Path, prefix: str = "") -> "Documents":
        """Arrays written by a corpus builder; `prefix` is "" or "heldout_".

        Raises:
          ConfigError: a file that is missing or no array, or arrays that do not fit together.
        """
        tokens, mask, offsets = (_load(folder / f"{prefix}{name}.npy") for name in ("tokens", "mask", "offsets"))
        if len(mask) != len(tokens):
            raise ConfigError(str(folder / f"{prefix}mask.npy"), len(mask), f"{len(tokens)}, one a token", _REMAKE)
        if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(tokens) or np.any(np.diff(offsets) <= 0):
            found = f"{len(offsets)} numbers, {offsets[:1]} to {offsets[-1:]}"
            expected = f"numbers that rise from 0 to {len(tokens)}, the tokens"
            raise ConfigError(str(folder / f"{prefix}offsets.npy"), found, expected, _REMAKE)
        return Documents(tokens, mask, offsets)


def _load(path: Path) -> np.ndarray:
    try:
        array = np.load(path)
    except (OSError, ValueError, EOFError) as e:
        raise ConfigError(str(path), str(e), "an array of documents", _REMAKE) from e
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ConfigError(str(path), f"{array.dtype} {list(array.shape)}", "integers [n]", _REMAKE)
    return array


@dataclass(frozen=True)
class Rows:
    """Packed rows; a row predicts ids[:, 1:] from ids[:, :-1] within each document."""

    ids: np.ndarray  # int32 [n, T + 1]
    weight: np.ndarray  # float32 [n, T], loss weight of the prediction at each position; 0 across documents
    segments: np.ndarray  # int32 [n, T], document of each input position; -1 for padding
    positions: np.ndarray  # int32 [n, T], position within the document

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, index: np.ndarray) -> "Rows":
        return Rows(self.ids[index], self.weight[index], self.segments[index], self.positions[index])


def pack(documents: Documents, row_tokens: int, prompt_weight: float, rng: np.random.Generator | None) -> Rows:
    """Pack all documents, in the generator's order, into rows of `row_tokens` inputs.

    A document goes into the fullest open row it fits; a document longer than a row is cut into rows of its own.
    """
    size = row_tokens + 1
    spans = _spans(documents.offsets, size)
    if rng is not None:
        spans = spans[rng.permutation(len(spans))]
    rows = [[tuple(spans[i].tolist()) for i in row] for row in plan(np.diff(spans)[:, 0].tolist(), size)]
    return _fill(documents, rows, size, prompt_weight)


def plan(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Which documents go into which row of `size` tokens: each, in the order given, into the fullest open row it fits.

    Args:
      lengths: tokens of each document, at most `size`.
      size: of a row.
    Returns:
      Indices of documents, a list a row.
    """
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (tokens left, row)
    for i, length in enumerate(lengths):
        fits = [(left, r) for left, r in open_rows if left >= length]
        if fits:
            left, r = min(fits)
            open_rows.remove((left, r))
        else:
            left, r = size, len(rows)
            rows.append([])
        rows[r].append(i)
        if left - length > 8:  # shorter documents do not exist
            open_rows.append((left - length, r))
        if len(open_rows) > OPEN_ROWS:
            open_rows.remove(min(open_rows))
    return rows


def _spans(offsets: np.ndarray, size: int) -> np.ndarray:
    """[n, 2] start and stop of every document, long ones cut to `size`."""
    out = []
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        out.extend((a, min(a + size, stop)) for a in range(start, stop, size))
    return np.asarray(out, np.int64)


def _fill(documents: Documents, rows: list[list[tuple[int, int]]], size: int, prompt_weight: float) -> Rows:
    n, t = len(rows), size - 1
    ids = np.zeros((n, size), np.int32)
    weight = np.zeros((n, size), np.float32)
    segments = np.full((n, size), -1, np.int32)
    positions = np.zeros((n, size), np.int32)
    for r, spans in enumerate(rows):
        at = 0
        for d, (start, stop) in enumerate(spans):
            end = at + stop - start
            ids[r, at:end] = documents.tokens[start:stop]
            weight[r, at:end] = np.where(documents.mask[start:stop] > 0, 1.0, prompt_weight)
            weight[r, at] = 0.0  # nothing predicts a document's first token
            segments[r, at:end] = d
            positions[r, at:end] = np.arange(stop - start)
            at = end
    return Rows(ids, weight[:, 1:], segments[:, :t], positions[:, :t])
