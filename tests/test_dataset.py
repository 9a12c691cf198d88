"""Rows of a drafter's training: what is in them, in which order, and that each document is used once an epoch."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from kimijax.errors import ConfigError
from kimijax.train import dataset, packing

T = 16


class Source:
    """Documents whose every number says where it belongs: token = 100 * document + position."""

    def __init__(self, lengths: list[int], *, states: bool = True) -> None:
        self.lengths, self._states = lengths, states

    def document(self, index: int) -> dataset.Document:
        tokens = 100 * index + np.arange(self.lengths[index])
        states = np.repeat(tokens[:, None], 3, axis=1).astype(np.float32)
        taps = {2: states + 0.25, 5: states + 0.5} if self._states else {}
        return dataset.Document(tokens, tokens % 2 == 0, taps, states + 0.75 if self._states else None)


LENGTHS = [5, 16, 3, 9, 1, 7, 12, 2, 11, 6, 15, 4, 8, 10, 13, 14, 5, 5, 5]


def rows(lengths: list[int] = LENGTHS, **arguments: Any) -> dataset.Rows:
    settings: dict[str, Any] = {"rows": 3, "row_tokens": T, "seed": 7} | arguments
    return dataset.Rows(Source(lengths), **settings)


def documents_of(batch: dataset.RowBatch[np.ndarray]) -> list[int]:
    """The documents in a batch, one entry for each first token."""
    first = (batch.segments >= 0) & (batch.positions == 0)
    return (batch.ids[first] // 100).tolist()


def test_a_row_holds_whole_documents_and_their_states() -> None:
    found = rows()
    for index in range(len(found)):
        batch = found[index]
        for at in np.ndindex(batch.ids.shape[:2]):
            segments = batch.segments[at]
            used = segments >= 0
            # Ids say which document and position each token is: both are right, and documents are in one piece.
            assert (batch.ids[at] % 100 == batch.positions[at])[used].all()
            for d in range(segments.max() + 1):
                owner = set(batch.ids[at][segments == d] // 100)
                assert len(owner) == 1
                assert (segments == d).sum() == LENGTHS[owner.pop()]
            expected = np.where(used, batch.ids[at], 0)[:, None]
            assert (batch.mask[at] == (used & (batch.ids[at] % 2 == 0))).all()
            assert batch.last is not None
            for states, offset in ((batch.taps[2], 0.25), (batch.taps[5], 0.5), (batch.last, 0.75)):
                assert (states[at][used] == (expected + offset)[used]).all()
                assert (states[at][~used] == 0).all()


@pytest.mark.parametrize(("accumulate", "n_rows"), [(1, 3), (2, 2), (1, 64), (1, 1)])
def test_every_document_once_an_epoch(accumulate: int, n_rows: int) -> None:
    """Also where the last batch is not full; its empty rows come last and hold nothing."""
    found = rows(rows=n_rows, accumulate=accumulate, epochs=3)
    assert len(found) == 3 * found.per_epoch
    assert found.per_epoch == -(-len(found.plan) // (n_rows * accumulate))
    for epoch in range(3):
        batches = [found[epoch * found.per_epoch + i] for i in range(found.per_epoch)]
        counts = [found.n_tokens(epoch * found.per_epoch + i) for i in range(found.per_epoch)]
        assert counts == [int((batch.segments >= 0).sum()) for batch in batches]
        seen = Counter(d for batch in batches for d in documents_of(batch))
        assert seen == Counter(range(len(LENGTHS)))
        filled = [bool((r >= 0).any()) for batch in batches for r in batch.segments.reshape(-1, T)]
        assert filled == sorted(filled, reverse=True)
        assert sum(filled) == len(found.plan)


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    first, again, other = rows(epochs=2), rows(epochs=2), rows(epochs=2, seed=8)
    order = [documents_of(first[i]) for i in range(len(first))]
    assert order == [documents_of(again[i]) for i in range(len(again))]
    assert order != [documents_of(other[i]) for i in range(len(other))]
    assert order[: first.per_epoch] != order[first.per_epoch :]
    assert first.plan == again.plan  # the epochs differ in order alone
    kept = rows(shuffle=False)
    assert [kept.chosen(i).tolist() for i in range(2)] == [[[0, 1, 2]], [[3, 4, 5]]]


def test_micro_batches_are_parts_of_the_big_batch() -> None:
    big, parts = rows(rows=4), rows(rows=2, accumulate=2)
    for i in range(len(big)):
        assert (big[i].ids.reshape(-1, T) == parts[i].ids.reshape(-1, T)).all()


def test_processes_share_every_micro_batch() -> None:
    whole = rows(rows=4, accumulate=2)
    shares = [rows(rows=4, accumulate=2, process=(p, 2)) for p in range(2)]
    for i in range(len(whole)):
        together = np.concatenate([share[i].ids for share in shares], axis=1)
        assert (together == whole[i].ids).all()
    # A share without any document has the arrays of the others.
    last = rows([4, 4, 4, 4], rows=4, process=(1, 2))[0]
    assert not (last.segments >= 0).any()
    assert last.taps.keys() == {2, 5}
    assert last.taps[2].shape == (1, 2, T, 3)
    with pytest.raises(ConfigError, match=r"fit.rows: found 3, expected a multiple of the 2 processes"):
        rows(process=(0, 2))


def test_reading_ahead_changes_nothing_and_can_be_resumed() -> None:
    found = rows(epochs=2)
    batches = dataset.read_ahead(found)
    straight = [documents_of(batch) for batch in batches]
    assert straight == [documents_of(found[i]) for i in range(len(found))]
    batches = dataset.read_ahead(found)
    for _ in range(3):
        next(batches)
    state = batches.get_state()
    resumed = dataset.read_ahead(found)
    resumed.set_state(state)
    assert [documents_of(batch) for batch in resumed] == straight[3:]


def test_a_document_that_cannot_be_read_ends_the_run() -> None:
    class Damaged(Source):
        def document(self, index: int) -> dataset.Document:
            raise OSError(f"features-00000: document {index}")

    batches = dataset.read_ahead(dataset.Rows(Damaged(LENGTHS), rows=3, row_tokens=T, seed=0))
    with pytest.raises(OSError, match="features-00000"):
        next(batches)


def test_documents_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"fit.row_tokens: found 16, expected at least 17; document 1"):
        dataset.plan_rows([3, 17, 4], T, 0)
    with pytest.raises(ConfigError, match="documents: found 0"):
        dataset.plan_rows([], T, 0)


def test_tokens_alone() -> None:
    offsets = np.array([0, 3, 7], np.int64)
    source = dataset.TokenDocuments(
        packing.Documents(np.arange(7, dtype=np.uint16), np.array([0, 1, 1, 0, 0, 1, 1], np.uint8), offsets)
    )
    batch = dataset.Rows(source, rows=1, row_tokens=T, seed=0, shuffle=False)[0]
    assert batch.taps == {}
    assert batch.last is None
    assert sorted(batch.ids[batch.mask].tolist()) == [1, 2, 5, 6]
