"""Byte-level BPE: its merges against a naive trainer, its encoding against tiktoken."""

import itertools
from collections import Counter
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from kimijax.tokenizer import SPLIT_PATTERN
from kimijax.train import bpe

TEXTS = [
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 22), add(333, 4444))\n",
    "The `json` module encodes Python objects as JSON. It's what you want, isn't it?",
    "aaaaaaa aaaa aaa banana bananas  \t\n\n Ünïcödé 数学 and 日本語 don't cross.",
] * 3


def naive_train(pieces: Counter[bytes], n_ranks: int) -> list[bytes]:
    """BPE by its definition: count all pairs again after each merge."""
    ranks = [bytes([value]) for value in range(256)]
    words = [([bytes([value]) for value in piece], n) for piece, n in sorted(pieces.items())]
    index = {piece: rank for rank, piece in enumerate(ranks)}
    while len(ranks) < n_ranks:
        counts: Counter[tuple[int, int]] = Counter()
        for word, n in words:
            for left, right in itertools.pairwise(word):
                counts[index[left], index[right]] += n
        a, b = min(counts, key=lambda pair: (-counts[pair], pair))
        merged = ranks[a] + ranks[b]
        index[merged] = len(ranks)
        ranks.append(merged)
        for word, _ in words:
            i = 0
            while i + 1 < len(word):
                if index[word[i]] == a and index[word[i + 1]] == b:
                    word[i : i + 2] = [merged]
                i += 1
    return ranks


def test_merges_equal_the_naive_trainer() -> None:
    pieces = bpe.count_pieces(TEXTS, SPLIT_PATTERN)
    assert bpe.train_bpe(pieces, 330) == naive_train(pieces, 330)


@given(st.lists(st.text(alphabet="ab c", min_size=1, max_size=12), min_size=1, max_size=5))
def test_merges_equal_the_naive_trainer_on_repetitive_text(texts: list[str]) -> None:
    pieces = bpe.count_pieces(texts, SPLIT_PATTERN)
    pairs = {piece[i : i + 2] for piece in pieces for i in range(len(piece) - 1)}
    n_ranks = 256 + min(len(pairs), 3)
    try:
        expected = naive_train(pieces, n_ranks)
    except ValueError:  # the naive trainer has run out of pairs: min() of nothing
        with pytest.raises(ValueError, match="give more text"):
            bpe.train_bpe(pieces, n_ranks)
    else:
        assert bpe.train_bpe(pieces, n_ranks) == expected


@settings(max_examples=40)
@given(st.text(max_size=60))
def test_tiktoken_replays_the_training(text: str) -> None:
    """tiktoken on the written ranks, the rule applied by hand, and the text itself agree, also on unseen text."""
    ranks = bpe.train_bpe(bpe.count_pieces(TEXTS, SPLIT_PATTERN), 340)
    table = {piece: rank for rank, piece in enumerate(ranks)}
    encoding = tiktoken.Encoding("test", pat_str=SPLIT_PATTERN, mergeable_ranks=table, special_tokens={})
    for sample in (text, *TEXTS[:3]):
        pieces = list(bpe.count_pieces([sample], SPLIT_PATTERN))
        assert [encoding.encode_ordinary(p.decode()) for p in pieces] == [bpe.bpe_segment(p, table) for p in pieces]
        assert encoding.decode(encoding.encode_ordinary(sample)) == sample


def test_merges_do_not_cross_the_split() -> None:
    """The most frequent neighbours, a digit group and a letter, never become one token."""
    ranks = bpe.train_bpe(bpe.count_pieces(["12ab12ab12ab x12ab"] * 5, SPLIT_PATTERN), 258)
    assert ranks[256:] == [b"12", b"ab"]


def test_file_form_round_trips(tmp_path: Path) -> None:
    ranks = bpe.train_bpe(bpe.count_pieces(TEXTS, SPLIT_PATTERN), 300)
    path = tmp_path / "tiktoken.model"
    path.write_text(bpe.tiktoken_text(ranks))
    assert list(bpe.read_tiktoken(path)) == ranks
    assert list(bpe.read_tiktoken(path).values()) == list(range(300))


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="n_ranks: found 255, expected at least 256"):
        bpe.train_bpe(Counter({b"ab": 1}), 255)
    with pytest.raises(ValueError, match="gives only 257 ranks, 300 asked"):
        bpe.train_bpe(Counter({b"ab": 1}), 300)
    with pytest.raises(ValueError, match="leaves characters out"):
        bpe.count_pieces(["a b"], r"\w+")
    path = tmp_path / "tiktoken.model"
    path.write_text("YQ== 0\nYg==\n")
    with pytest.raises(ValueError, match=r"tiktoken\.model:2: found 'Yg=='"):
        bpe.read_tiktoken(path)
