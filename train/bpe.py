"""Byte-level BPE: learn merges from text and write them in tiktoken form.

The algorithm is byte-pair encoding (Sennrich et al. 2016, arXiv:1508.07909) over UTF-8 bytes. Text is first cut by a
split pattern; merges never cross a cut. Ranks 0..255 are the single bytes, rank r >= 256 is the (r - 255)-th merge
learned, so that tiktoken's rule "merge the adjacent pair of lowest rank first" replays the training exactly.
"""

import base64
import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import regex

N_BYTES = 256


def count_pieces(texts: Iterable[str], pattern: str) -> Counter[bytes]:
    """Counts of the pieces into which `pattern` cuts `texts`, as UTF-8.

    `pattern` must match everywhere: tiktoken would silently lose what it leaves out, so that raises ValueError.
    """
    # V1 gives `&&` its meaning of set intersection, as in the Rust expressions that tiktoken runs.
    splitter = regex.compile(pattern, regex.V1)
    counts: Counter[str] = Counter()
    for text in texts:
        pieces = splitter.findall(text)
        if sum(map(len, pieces)) != len(text):
            raise ValueError(f"pattern: leaves characters out of {text[:80]!r}; it must match every character")
        counts.update(pieces)
    return Counter({piece.encode(): n for piece, n in counts.items()})


def train_bpe(pieces: Counter[bytes], n_ranks: int) -> list[bytes]:
    """Learn `n_ranks` byte strings from piece counts; the list index is the rank.

    Ties between equally frequent pairs go to the pair of lower ranks, so equal counts give equal ranks on any machine.
    Raises ValueError when `n_ranks` < 256 or when the text has no pair left to merge.
    """
    if n_ranks < N_BYTES:
        raise ValueError(f"n_ranks: found {n_ranks}, expected at least {N_BYTES}, one for each byte")
    ranks = [bytes([value]) for value in range(N_BYTES)]
    known = set(ranks)
    words = [(list(piece), n) for piece, n in sorted(pieces.items())]
    pair_counts: Counter[tuple[int, int]] = Counter()
    pair_words: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for index, (word, n) in enumerate(words):
        for pair in itertools.pairwise(word):
            pair_counts[pair] += n
            pair_words[pair].add(index)
    heap = [(-n, pair) for pair, n in pair_counts.items()]
    heapq.heapify(heap)
    while len(ranks) < n_ranks:
        if not heap:
            raise ValueError(f"n_ranks: the text gives only {len(ranks)} ranks, {n_ranks} asked; give more text")
        negative, pair = heapq.heappop(heap)
        count = pair_counts[pair]
        if count <= 0:
            continue
        if -negative != count:  # the entry is from before an update: put the pair back with its present count
            heapq.heappush(heap, (-count, pair))
            continue
        merged = ranks[pair[0]] + ranks[pair[1]]
        if merged in known:
            raise AssertionError(f"{merged!r} was merged twice: the order of the merges would be ambiguous")
        known.add(merged)
        ranks.append(merged)
        changed: set[tuple[int, int]] = set()
        for index in pair_words.pop(pair):
            _merge_word(words, index, pair, len(ranks) - 1, pair_counts, pair_words, changed)
        for other in changed:
            if pair_counts[other] > 0:
                heapq.heappush(heap, (-pair_counts[other], other))
        pair_counts[pair] = 0
    return ranks


def _merge_word(
    words: list[tuple[list[int], int]],
    index: int,
    pair: tuple[int, int],
    new: int,
    pair_counts: Counter[tuple[int, int]],
    pair_words: defaultdict[tuple[int, int], set[int]],
    changed: set[tuple[int, int]],
) -> None:
    """Replace `pair` by `new` in one word, left to right, and keep the pair statistics true."""
    word, n = words[index]
    out: list[int] = []
    position = 0
    while position < len(word):
        if position + 1 < len(word) and (word[position], word[position + 1]) == pair:
            out.append(new)
            position += 2
        else:
            out.append(word[position])
            position += 1
    for old in itertools.pairwise(word):
        pair_counts[old] -= n
    for fresh in itertools.pairwise(out):
        pair_counts[fresh] += n
        pair_words[fresh].add(index)
        # A pair whose count only fell keeps its stale, larger heap entry, which is corrected when popped.
        if new in fresh:
            changed.add(fresh)
    words[index] = (out, n)


def tiktoken_text(ranks: Sequence[bytes]) -> str:
    """The content of a `tiktoken.model` file: one line `base64 rank` for each byte string, in rank order."""
    return "".join(f"{base64.b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(ranks))


def read_tiktoken(path: Path) -> dict[bytes, int]:
    """The ranks of a `tiktoken.model` file, as tiktoken's `mergeable_ranks`."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        piece, _, rank = line.partition(" ")
        if not rank.isdecimal():
            raise ValueError(f"{path}:{number}: found {line!r}, expected 'base64 rank'")
        ranks[base64.b64decode(piece, validate=True)] = int(rank)
    return ranks


def bpe_segment(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Encode one piece by the rule itself, without tiktoken: merge the leftmost pair of lowest rank, repeat."""
    parts = [bytes([value]) for value in piece]
    while len(parts) > 1:
        joined = [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
        if not joined:
            break
        _, i = min(joined)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [ranks[part] for part in parts]
