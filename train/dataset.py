"""The rows of a drafter's training: documents packed once, read ahead in threads, in an order that can be resumed.

The plan of rows is a function of (lengths, row size, seed) and the same in every epoch; their order is drawn from
(seed, epoch). Every document is used once an epoch: what is left at the end of an epoch fills its last batch up with
empty rows, which count nowhere but in the divisor of the loss of normaliser "all".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import grain
import numpy as np

from kimijax.errors import ConfigError

from .packing import Documents, plan

# Batches in the making and ready while the device computes; each may hold gigabytes of hidden states.
_THREADS = 2
_AHEAD = 2


class Document(NamedTuple):
    """One document, with the target's hidden states where they are stored."""

    tokens: np.ndarray  # int [T]
    mask: np.ndarray  # uint8 or bool [T], true for tokens of the assistant's turns
    taps: Mapping[int, np.ndarray]  # tap -> [T, D]; none: they are computed online
    last: np.ndarray | None  # [T, D], tap n_layers


class DocumentSource(Protocol):
    """What rows are made of: a feature set, or documents alone."""

    @property
    def lengths(self) -> Sequence[int] | np.ndarray:
        """Tokens of each document."""
        ...

    def document(self, index: int) -> Any:
        """A `Document`, or a tuple of the same fields."""
        ...


@dataclass(frozen=True)
class TokenDocuments:
    """Documents without hidden states, for online training."""

    documents: Documents

    @classmethod
    def load(cls, folder: Path, prefix: str = "") -> Self:
        """See `packing.Documents.load`."""
        return cls(Documents.load(folder, prefix))

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.documents.offsets)

    def document(self, index: int) -> Document:
        start, stop = self.documents.offsets[index : index + 2]
        return Document(self.documents.tokens[start:stop], self.documents.mask[start:stop], {}, None)


class RowBatch[A](NamedTuple):
    """Rows of one update, of NumPy or JAX arrays: A micro-batches of B rows. Without stored states `taps` is empty."""

    ids: A  # int32 [A, B, T]
    mask: A  # bool [A, B, T]
    segments: A  # int32 [A, B, T], document within the row, -1 for padding
    positions: A  # int32 [A, B, T], position within the document
    taps: dict[int, A]  # tap -> [A, B, T, D]
    last: A | None  # [A, B, T, D]


def plan_rows(lengths: Sequence[int] | np.ndarray, row_tokens: int, seed: int) -> list[list[int]]:
    """Documents of each row: packed in an order drawn from the seed.

    Args:
      lengths: tokens of each document.
      row_tokens: of a row.
      seed: of the order.
    Raises:
      ConfigError: no document, or one that is longer than a row.
    """
    sizes = np.asarray(lengths, np.int64)
    if not sizes.size:
        raise ConfigError("documents", 0, "at least one", "run the stage corpus with more conversations")
    longest = int(sizes.argmax())
    if sizes[longest] > row_tokens:
        fix = f"document {longest} is longer than a row: raise fit.row_tokens, or make the corpus with fewer tokens"
        raise ConfigError("fit.row_tokens", row_tokens, f"at least {sizes[longest]}", fix)
    order = np.random.default_rng((seed, 0)).permutation(sizes.size)
    return [[int(order[i]) for i in row] for row in plan(sizes[order].tolist(), row_tokens)]


class Rows:
    """Batches by number, from the first update of the first epoch to the last of the last: a source for grain."""

    def __init__(
        self,
        source: DocumentSource,
        *,
        rows: int,
        row_tokens: int,
        seed: int,
        accumulate: int = 1,
        epochs: int = 1,
        shuffle: bool = True,
        process: tuple[int, int] = (0, 1),
    ) -> None:
        """Plans the rows.

        Args:
          source: the documents.
          rows: of a micro-batch, over all processes.
          row_tokens: of a row, T.
          seed: of the plan and of every epoch's order.
          accumulate: micro-batches of an update, A.
          epochs: passes over the documents.
          shuffle: false: in the plan's order, for evaluation.
          process: index and count; each process gets its own, equal share of every micro-batch.
        Raises:
          ConfigError: documents that do not fit into rows, or rows that do not divide among the processes.
        """
        self._index, count = process
        if rows % count:
            raise ConfigError("fit.rows", rows, f"a multiple of the {count} processes")
        self._source, self._row_tokens, self._seed = source, row_tokens, seed
        self._rows, self._local, self._accumulate = rows, rows // count, accumulate
        self._shuffle = shuffle
        self.plan = plan_rows(source.lengths, row_tokens, seed)
        self._tokens = [sum(int(source.lengths[d]) for d in row) for row in self.plan]
        self.per_epoch = -(-len(self.plan) // (rows * accumulate))
        self._epochs = epochs

    def __len__(self) -> int:
        return self.per_epoch * self._epochs

    def __getitem__(self, index: Any) -> RowBatch[np.ndarray]:
        chosen = self.chosen(int(index))
        share = chosen[:, self._index * self._local : (self._index + 1) * self._local]
        return self._batch([self._row(int(r)) for r in share.reshape(-1)], share.shape)

    def chosen(self, update: int) -> np.ndarray:
        """Rows of the plan that an update takes, int [A, B] over all processes; -1: an empty row."""
        epoch, at = divmod(update, self.per_epoch)
        order = np.arange(len(self.plan))
        if self._shuffle:
            order = np.random.default_rng((self._seed, 1, epoch)).permutation(order)
        size = self._rows * self._accumulate
        part = order[at * size : (at + 1) * size]
        filled = np.full(size, -1)
        filled[: len(part)] = part
        return filled.reshape(self._accumulate, self._rows)

    def n_tokens(self, update: int) -> int:
        """Tokens of an update's rows over all processes, padding not counted."""
        return sum(self._tokens[r] for r in self.chosen(update).reshape(-1) if r >= 0)

    def _row(self, index: int) -> list[Document]:
        if index < 0:
            return []
        return [Document(*self._source.document(d)) for d in self.plan[index]]

    def _batch(self, rows: list[list[Document]], shape: tuple[int, ...]) -> RowBatch[np.ndarray]:
        # A batch of empty rows only (of one process) still has the arrays and dtypes of the others.
        like = next((d for row in rows for d in row), None) or Document(*self._source.document(self.plan[0][0]))
        n, t = len(rows), self._row_tokens
        ids, positions = np.zeros((n, t), np.int32), np.zeros((n, t), np.int32)
        mask, segments = np.zeros((n, t), bool), np.full((n, t), -1, np.int32)
        taps = {tap: np.zeros((n, t, x.shape[-1]), x.dtype) for tap, x in like.taps.items()}
        last = None if like.last is None else np.zeros((n, t, like.last.shape[-1]), like.last.dtype)
        for r, documents in enumerate(rows):
            at = 0
            for d, document in enumerate(documents):
                span = slice(at, at + len(document.tokens))
                ids[r, span], mask[r, span], segments[r, span] = document.tokens, document.mask, d
                positions[r, span] = np.arange(len(document.tokens))
                for tap, x in document.taps.items():
                    taps[tap][r, span] = x
                if last is not None:
                    last[r, span] = document.last
                at = span.stop

        def shaped(x: np.ndarray) -> np.ndarray:
            return x.reshape(*shape, *x.shape[1:])

        taps = {tap: shaped(x) for tap, x in taps.items()}
        last = None if last is None else shaped(last)
        return RowBatch(shaped(ids), shaped(mask), shaped(segments), shaped(positions), taps, last)


def read_ahead(rows: Rows) -> grain.DatasetIterator[RowBatch[np.ndarray]]:
    """Batches in order, made in threads while earlier ones are computed with; its state is the next batch's number."""
    options = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_AHEAD)
    return iter(grain.MapDataset.source(rows).to_iter_dataset(options))
