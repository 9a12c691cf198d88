"""Packing: every document comes out once, whole and apart from the others."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimijax.errors import ConfigError
from kimijax.train import packing


def documents_of(lengths: list[int]) -> packing.Documents:
    """Documents whose tokens are all different, so that a token tells where it is from."""
    n = sum(lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return packing.Documents(np.arange(1, n + 1, dtype=np.uint16), (np.arange(n) % 3 == 0).astype(np.uint8), offsets)


def spans_of(rows: packing.Rows, size: int) -> list[list[int]]:
    """The token runs of all rows, cut where the segment changes; a row's last token has its predecessor's segment."""
    runs: list[list[int]] = []
    for r in range(len(rows)):
        segments, ids = rows.segments[r], rows.ids[r]
        for segment in range(segments.max() + 1):
            at = np.flatnonzero(segments == segment)
            assert (np.diff(at) == 1).all()  # one run
            tokens = ids[at].tolist()
            if at[-1] == size - 2 and ids[-1]:
                tokens.append(int(ids[-1]))
            runs.append(tokens)
    return runs


LENGTHS = st.lists(st.integers(2, 40), min_size=1, max_size=60)


@given(LENGTHS, st.integers(4, 24), st.integers(0, 3))
def test_no_document_is_lost_split_or_mixed(lengths: list[int], row_tokens: int, seed: int) -> None:
    documents, size = documents_of(lengths), row_tokens + 1
    rows = packing.pack(documents, row_tokens, 0.5, np.random.default_rng(seed))
    # Expected: the documents, those longer than a row in pieces of a row.
    expected = []
    for start, stop in zip(documents.offsets[:-1], documents.offsets[1:], strict=True):
        expected += [documents.tokens[a : min(a + size, stop)].tolist() for a in range(start, stop, size)]
    # A piece of one token at the very end of a row has no input of its own: it is neither predicted nor predicting.
    found = sorted(run for run in spans_of(rows, size))
    joined = sorted(token for run in found for token in run)
    assert joined == sorted(token for span in expected for token in span)
    spans = {span[0]: span for span in expected}
    for run in found:
        left = run
        while left:  # a one-token piece, if any, is the tail of the run before it
            span = spans.pop(left[0])
            assert left[: len(span)] == span
            left = left[len(span) :]
            assert len(left) <= 1
    assert not spans


@given(LENGTHS, st.integers(4, 24), st.floats(0, 1))
def test_weights_and_positions(lengths: list[int], row_tokens: int, prompt_weight: float) -> None:
    documents = documents_of(lengths)
    rows = packing.pack(documents, row_tokens, prompt_weight, np.random.default_rng(0))
    first = set((documents.offsets[:-1] + 1).tolist())
    for r in range(len(rows)):
        for t in range(row_tokens):
            token, target = int(rows.ids[r, t]), int(rows.ids[r, t + 1])
            if token == 0:  # padding
                assert rows.segments[r, t] == -1
                assert rows.weight[r, t] == 0
                continue
            new = t == 0 or rows.segments[r, t] != rows.segments[r, t - 1]
            assert rows.positions[r, t] == (0 if new else rows.positions[r, t - 1] + 1)
            if target != token + 1 or target in first:  # what follows belongs to another document, or is padding
                assert rows.weight[r, t] == 0
            else:
                full = documents.mask[target - 1] > 0
                assert rows.weight[r, t] == np.float32(1.0 if full else prompt_weight)


def test_the_order_is_the_generators() -> None:
    documents = documents_of([5, 9, 3, 12, 7] * 4)

    def ids(seed: int | None) -> np.ndarray:
        return packing.pack(documents, 16, 0.1, None if seed is None else np.random.default_rng(seed)).ids

    assert np.array_equal(ids(1), ids(1))
    assert not np.array_equal(ids(1), ids(2))
    assert ids(None)[0, 0] == 1  # without a generator: as stored


def test_rows_are_filled_well() -> None:
    lengths = np.random.default_rng(0).integers(8, 120, 400).tolist()
    rows = packing.pack(documents_of(lengths), 256, 0.1, np.random.default_rng(0))
    assert (rows.segments >= 0).mean() > 0.97


def test_arrays_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    good = documents_of([4, 6])
    np.save(tmp_path / "tokens.npy", good.tokens)
    np.save(tmp_path / "offsets.npy", good.offsets)
    np.save(tmp_path / "mask.npy", good.mask[:-1])
    with pytest.raises(ConfigError, match=r"mask\.npy: found 9, expected 10, one a token; remove"):
        packing.Documents.load(tmp_path)
    np.save(tmp_path / "mask.npy", good.mask)
    # An empty document, tokens of no document at the end and at the beginning, and none at all.
    for wrong in ([0, 6, 6, 10], [0, 4], [4, 10], []):
        np.save(tmp_path / "offsets.npy", np.array(wrong, np.int64))
        with pytest.raises(ConfigError, match=r"offsets\.npy: found .*expected numbers that rise from 0 to 10"):
            packing.Documents.load(tmp_path)
    np.save(tmp_path / "offsets.npy", good.offsets.astype(np.float64))
    with pytest.raises(ConfigError, match=r"offsets\.npy: found 'float64 \[3\]', expected integers"):
        packing.Documents.load(tmp_path)
    (tmp_path / "offsets.npy").write_bytes(b"half")
    with pytest.raises(ConfigError, match=r"offsets\.npy: found .*expected an array of documents"):
        packing.Documents.load(tmp_path)
    with pytest.raises(ConfigError, match=r"heldout_tokens\.npy: found .*No such file"):
        packing.Documents.load(tmp_path, "heldout_")
    np.save(tmp_path / "offsets.npy", good.offsets)
    assert np.array_equal(packing.Documents.load(tmp_path).offsets, [0, 4, 10])
