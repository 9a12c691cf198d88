"""Kimi's byte-level BPE: text to token ids and back, and the decoder of a stream.

Two files of a checkpoint folder make a tokenizer: `tiktoken.model` (one "base64-bytes rank" a line) and
`tokenizer_config.json` (the names of some of the 256 special slots that follow the ranks). The split pattern and the
slicing of long text are those of the Kimi-K2 family; the merging itself is the `tiktoken` package.

Ids, for n ranks: 0 .. n-1 are byte strings, n .. n+255 are special tokens (a slot without a name in the file is called
`<|reserved_token_ID|>`), and ids from n+256 on are padding rows of the model's vocabulary: they decode to nothing.
"""

import base64
import binascii
import codecs
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiktoken

from .errors import RequestError, TokenizerError

N_SPECIAL = 256

# Runs of Han characters; words by letter case, without Han ("&&" is set intersection), with an English contraction;
# digits in threes; punctuation with the newlines after it; white space. The order of the alternatives matters.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

# The reference cuts long text before merging, because the merge of one very long piece takes quadratic time. The cuts
# decide which tokens come out, so the same numbers are used here.
SLICE_CHARS = 400_000
RUN_CHARS = 25_000

# Tokens that end an answer in every checkpoint of the family, whichever of them its configs call "eos".
END_TOKENS = ("<|im_end|>", "[EOS]", "[EOT]")


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Read a `tiktoken.model`. TokenizerError: a bad line, a repeated token, a gap in the ranks, a missing byte."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            encoded, rank = line.split()
            token, value = base64.b64decode(encoded, validate=True), int(rank)
        except (ValueError, binascii.Error) as e:
            raise TokenizerError(f"{path}, line {number}: found {line[:60]!r}, expected base64 bytes and a rank") from e
        if token in ranks:
            raise TokenizerError(f"{path}, line {number}: {token!r} already has rank {ranks[token]}")
        ranks[token] = value
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise TokenizerError(f"{path}: the {len(ranks)} ranks are not 0 .. {len(ranks) - 1} without gap or repetition")
    missing = [i for i in range(256) if bytes([i]) not in ranks]
    if missing:
        raise TokenizerError(f"{path}: a byte-level vocabulary holds every single byte; missing: {missing[:8]}")
    return ranks


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds one object; TokenizerError naming the file otherwise."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise TokenizerError(f"{path}: cannot be read as JSON ({e})") from e
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: found {type(value).__name__}, expected a JSON object")
    return value


def _read_specials(path: Path, n_ranks: int) -> tuple[dict[str, int], frozenset[int]]:
    """Return (name -> id of all 256 slots, ids hidden from shown text) from a `tokenizer_config.json`.

    Hidden are the slots that the file marks `special` and those that it does not name; tool-call and thinking marks
    are ordinary added tokens there, since an output parser needs to see them.
    """
    added = read_json_object(path).get("added_tokens_decoder")
    if not isinstance(added, dict):
        raise TokenizerError(f"{path}: `added_tokens_decoder` is missing or no object; it names the special tokens")
    names = {i: f"<|reserved_token_{i}|>" for i in range(n_ranks, n_ranks + N_SPECIAL)}
    hidden = set(names)
    for key, entry in added.items():
        here = f"{path}: added_tokens_decoder[{key!r}]"
        if not (isinstance(key, str) and key.isdecimal() and int(key) in names):
            raise TokenizerError(
                f"{here}: expected an id from {n_ranks} to {n_ranks + N_SPECIAL - 1}, the {N_SPECIAL} slots after the "
                f"{n_ranks} ranks; do `tiktoken.model` and this file belong together?"
            )
        content = entry.get("content") if isinstance(entry, dict) else None
        special = entry.get("special", True) if isinstance(entry, dict) else None
        if not (isinstance(content, str) and content) or not isinstance(special, bool):
            raise TokenizerError(
                f"{here}: found {entry!r}, expected `content` (a string) and `special` (true or false)"
            )
        names[int(key)] = content
        if not special:
            hidden.discard(int(key))
    specials = {name: i for i, name in names.items()}
    if len(specials) != N_SPECIAL:
        twice = sorted({n for n in names.values() if list(names.values()).count(n) > 1})
        raise TokenizerError(f"{path}: added_tokens_decoder gives the same name to two ids: {twice}")
    return specials, frozenset(hidden)


def _slices(text: str) -> Iterator[str]:
    """Cut text as the reference does: every SLICE_CHARS, and inside a run of RUN_CHARS of (or without) white space."""
    for start in range(0, len(text), SLICE_CHARS):
        part = text[start : start + SLICE_CHARS]
        if len(part) <= RUN_CHARS:
            yield part
            continue
        cut = 0
        for run in re.finditer(r"\s+|\S+", part):
            for end in range(run.start() + RUN_CHARS, run.end(), RUN_CHARS):
                yield part[cut:end]
                cut = end
        yield part[cut:]


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text <-> token ids. Immutable; safe to use from several threads.

    Invariants: `ranks` are 0 .. n_ranks-1 and hold every single byte; `special_ids` are exactly the 256 ids after them.
    """

    ranks: Mapping[bytes, int] = field(repr=False)
    special_ids: Mapping[str, int] = field(repr=False)
    hidden_ids: frozenset[int] = field(repr=False)
    eos_ids: frozenset[int] = frozenset()

    @classmethod
    def from_dir(cls, path: str | Path, eos_ids: Iterable[int] = ()) -> "Tokenizer":
        """Read the tokenizer of a checkpoint folder.

        `eos_ids`: the end ids of the folder's config.json and generation_config.json; they become stop ids beside the
        end tokens known by name. TokenizerError if a file is missing or malformed, or an end id has no token.
        """
        folder = Path(path)
        for name in ("tiktoken.model", "tokenizer_config.json"):
            if not (folder / name).is_file():
                raise TokenizerError(
                    f"{folder}: found no {name}; a Kimi checkpoint has tiktoken.model and tokenizer_config.json "
                    "(tokenizer.json is not read): copy both there"
                )
        ranks = _read_ranks(folder / "tiktoken.model")
        specials, hidden = _read_specials(folder / "tokenizer_config.json", len(ranks))
        ends = frozenset(eos_ids)
        size = len(ranks) + N_SPECIAL
        if bad := sorted(i for i in ends if not 0 <= i < size):
            raise TokenizerError(
                f"{folder}: end-of-text ids {bad} have no token; the tokenizer has ids 0 .. {size - 1}"
            )
        return cls(ranks, specials, hidden, ends)

    @functools.cached_property
    def _bpe(self) -> tiktoken.Encoding:
        return tiktoken.Encoding(
            "kimi", pat_str=SPLIT_PATTERN, mergeable_ranks=dict(self.ranks), special_tokens=dict(self.special_ids)
        )

    @functools.cached_property
    def _bytes_of(self) -> list[bytes]:
        table = [b""] * self.vocab_size
        for token, rank in self.ranks.items():
            table[rank] = token
        for name, i in self.special_ids.items():
            table[i] = name.encode()
        return table

    @functools.cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Matches any control token's text; where one name begins another, the longer one."""
        return re.compile("|".join(re.escape(n) for n in sorted(self.special_ids, key=lambda n: (-len(n), n))))

    @property
    def n_ranks(self) -> int:
        return len(self.ranks)

    @property
    def vocab_size(self) -> int:
        """Ids that have a token: ranks and special slots. A model's vocabulary may be larger: mask the rest."""
        return len(self.ranks) + N_SPECIAL

    @functools.cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer: the known end tokens, and the ends that the checkpoint's configs name."""
        return self.eos_ids | {self.special_ids[n] for n in END_TOKENS if n in self.special_ids}

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of split pattern, ranks and special names: equal if and only if text maps to the same ids."""
        digest = hashlib.sha256(SPLIT_PATTERN.encode())
        for token in self._bytes_of:
            digest.update(len(token).to_bytes(4, "little") + token)
        return digest.hexdigest()

    def encode(self, text: str) -> list[int]:
        """Encode plain text: the text of a control token stays text and gives no control token.

        A lone surrogate, which JSON can spell but UTF-8 cannot, becomes U+FFFD.
        """
        ids: list[int] = []
        for part in _slices(text):
            ids += self._bpe.encode_ordinary(part)
        return ids

    def encode_with_specials(self, text: str) -> list[int]:
        """Encode trusted text: control tokens written out in it become their ids.

        For template text and raw completion prompts. Unlike the reference, which slices first, a control token is never
        cut in two by the slicing of long text.
        """
        ids: list[int] = []
        done = 0
        for match in self.special_pattern.finditer(text):
            ids += self.encode(text[done : match.start()])
            ids.append(self.special_ids[match[0]])
            done = match.end()
        return ids + self.encode(text[done:])

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; a control token's are its name, a padding id's are empty. ValueError if negative."""
        if token_id < 0:
            raise ValueError(f"token_id: found {token_id}, expected an id >= 0")
        return self._bytes_of[token_id] if token_id < self.vocab_size else b""

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Decode ids to text; bytes that are no UTF-8 become U+FFFD. `skip_special` leaves out `hidden_ids`."""
        kept = (i for i in ids if not (skip_special and i in self.hidden_ids))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", errors="replace")


class IncrementalDetokenizer:
    """Turns a growing list of token ids into text deltas that never have to be taken back.

    Held back are bytes that may still become a character and text that may still become a stop string. The stop that
    is *completed* first ends the text (of two completed by the same character, the longer); the text ends before it.
    So the joined deltas, with `flush()`, are the same however the ids are cut into calls.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), skip_special: bool = True) -> None:
        """`stop`: stop strings, RequestError if one is empty. `skip_special`: leave the tokenizer's hidden ids out."""
        if isinstance(stop, str):
            raise TypeError("stop: found one string, expected a sequence of strings")
        if not all(stop):
            raise RequestError("stop", "found an empty stop string; expected non-empty strings")
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._skipped = tokenizer.hidden_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._reach = max(map(len, self._stop), default=0)
        self.finished = False
        """True once a stop string is complete, or after flush()."""
        self.stop_reason: str | None = None
        """The stop string that ended the text, if one did."""
        self.n_tokens = 0
        """Ids consumed so far, hidden ones included; the last one counted is the one that completed the stop string."""
        self.n_shown = 0
        """Characters returned so far."""
        self.start: int | None = None
        """The character of the whole text that holds the first byte of the latest id; None for an id without text."""
        self._n_decoded = 0
        self._unstoppable = 0  # a stop string has to end after this many characters

    def feed(self, ids: Iterable[int], *, may_stop: bool = True) -> str:
        """Consume ids and return the text that is now certain. Ids after the end are not consumed and give "".

        `may_stop`: whether these ids can complete a stop string; if not, a later id can complete one that they begin.
        """
        out: list[str] = []
        for token_id in ids:
            if self.finished:
                break
            self.n_tokens += 1
            self.start = None
            if token_id not in self._skipped:
                new = self._decode(self._tokenizer.token_bytes(token_id))
                if not may_stop:
                    self._unstoppable = self._n_decoded
                out.append(self._advance(new))
        return "".join(out)

    def _decode(self, data: bytes) -> str:
        """The characters that one id's bytes complete."""
        if not data:
            return ""
        first = self._utf8.decode(data[:1])
        # The byte is in the last character so far, be that complete or not.
        incomplete = bool(self._utf8.getstate()[0])
        self.start = self._n_decoded + len(first) + incomplete - 1
        new = first + self._utf8.decode(data[1:])
        self._n_decoded += len(new)
        return new

    def flush(self) -> str:
        """End of the ids: return what was held back, an incomplete character as U+FFFD. Later calls give ""."""
        if self.finished:
            return ""
        out = self._advance(self._utf8.decode(b"", final=True))
        self.n_shown += len(self._held)
        out += self._held
        self._held, self.finished = "", True
        return out

    def _advance(self, new: str) -> str:
        """Append decoded text and return the part that no stop string can touch any more."""
        if not self._stop or not new:
            self.n_shown += len(new)
            return new
        text = self._held + new
        free = self._unstoppable - self.n_shown  # `text` begins at character n_shown
        found = [(at + len(s), at, s) for s in self._stop if (at := text.find(s, max(0, free - len(s) + 1))) >= 0]
        if found:
            _, at, self.stop_reason = min(found)
            self._held, self.finished = "", True
            self.n_shown += at
            return text[:at]
        keep = next(
            (i for i in range(max(0, len(text) - self._reach + 1), len(text)) if self._may_stop(text[i:])), len(text)
        )
        self._held = text[keep:]
        self.n_shown += keep
        return text[:keep]

    def _may_stop(self, tail: str) -> bool:
        return any(s.startswith(tail) for s in self._stop)
