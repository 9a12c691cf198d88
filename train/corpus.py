"""Stage corpus: conversations of the recipe's files to documents of the target's tokens, and a held-out part.

A conversation is held out by a hash of what it asks, and none that asks the same is trained on, from whatever file: the
target would answer both alike. An id that an earlier file has too gets the name of its own file before it. Files are
read twice, line by line; a few hundred bytes a line are kept in between.
"""

import dataclasses
import hashlib
import json
import shutil
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kimijax.errors import ConfigError
from kimijax.safetensors_io import sync_directory

from .conversations import BadLine, Conversation, Source, parse
from .document_files import (
    PROMPTS,
    REPORT,
    Counts,
    DocumentWriter,
    prompt_row,
    read_report,
    write_json_lines,
    write_report,
)
from .draft_recipe import DraftRecipe
from .draft_target import DraftTarget
from .run_record import file_hash
from .turns import Ids, TurnEncoder, TurnError, join

FORMAT = 1  # raise when the content of the output changes for equal inputs
FOLDER = "corpus"


@dataclass(frozen=True)
class CorpusReport:
    """What `build` wrote, as in `report.json`.

    Attributes:
      format: of the folder.
      inputs: hash of everything the output depends on.
      sources: of each file its sha256, lines, usable conversations, and those drawn for training and held out.
      skipped: by kind, how many conversations were left out and what the first of them was.
      cut: documents that were longer than target.max_tokens, of both sides.
      train, heldout: counts of conversations, documents, tokens and tokens that count in the loss.
      prompts: held-out prompts.
    """

    format: int
    inputs: str
    sources: dict[str, dict[str, Any]]
    skipped: dict[str, dict[str, Any]]
    cut: int
    train: Counts
    heldout: Counts
    prompts: int

    @staticmethod
    def of(report: dict[str, Any]) -> "CorpusReport":
        """From the content of `report.json`."""
        sides = {
            side: Counts(**{k: v for k, v in report[side].items() if k != "loss_share"})
            for side in ("train", "heldout")
        }
        return CorpusReport(**{**report, **sides})

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "train": self.train.to_json(), "heldout": self.heldout.to_json()}


class Skips:
    """Conversations left out, counted by kind."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}

    def add(self, kind: str, why: str) -> None:
        entry = self.found.setdefault(kind, {"count": 0, "first": why})
        entry["count"] += 1

    def to_json(self) -> dict[str, dict[str, Any]]:
        return dict(sorted(self.found.items()))

    def __str__(self) -> str:
        return "".join(f"\n  {kind}: {row['count']}, the first: {row['first']}" for kind, row in self.to_json().items())


@dataclass(frozen=True)
class _Index:
    """The usable lines of a file."""

    lines: np.ndarray  # int64 [n], line numbers, ascending
    renamed: frozenset[int]  # of these, the lines whose ids another file has too
    prompts: np.ndarray  # uint64 [n], hash of what is asked, by which conversations are drawn
    n_lines: int

    @property
    def order(self) -> np.ndarray:
        """Indices in the order of drawing, which is that of the hashes."""
        return np.argsort(self.prompts, kind="stable")

    def candidates(self) -> np.ndarray:
        """Indices to hold out from, in order: the first of those that ask the same."""
        order = self.order
        first = np.ones(len(order), bool)
        first[1:] = self.prompts[order[1:]] != self.prompts[order[:-1]]
        return order[first]

    def training(self, limit: int, held: np.ndarray) -> np.ndarray:
        """Indices to train on, ascending: at most `limit`, where that is not 0, and none of the prompts `held`."""
        order = self.order
        rest = order[~np.isin(self.prompts[order], held)]
        return np.sort(rest[:limit] if limit else rest)


class _Drawn(NamedTuple):
    """What is taken of a file."""

    source: Source
    lines: dict[int, bool]  # line number -> held out
    renamed: frozenset[int]  # see `_Index`


def build(recipe: DraftRecipe, out: Path) -> CorpusReport:
    """Write `out/corpus`, replaced as a whole, unless it already holds the result of the same inputs.

    Raises:
      ConfigError: a file that is missing, or too few conversations in it.
      TokenizerError, TemplateError: the target's files.
    """
    table = recipe.corpus
    if table.limit and table.limit <= table.heldout:
        raise ConfigError("corpus.limit", table.limit, f"0 or above corpus.heldout ({table.heldout}), part of it")
    target = DraftTarget.of(recipe)
    sources = [Source(name) for name in table.conversations]
    _check_datasets(sources)
    hashes = {source.name: source.sha256() for source in sources}
    inputs = _inputs_hash(target, hashes)
    done = read_report(out / FOLDER)
    if done is not None and done.get("inputs") == inputs:
        return CorpusReport.of(done)
    encoder = TurnEncoder(target.chat, target.tokenizer, thinking=table.thinking, name=str(target.directory))
    part = out / f".{FOLDER}.part"
    if part.exists():
        shutil.rmtree(part)
    part.mkdir(parents=True)
    try:
        report = _Builder(recipe, target, encoder, part).run(sources, hashes, inputs)
        write_report(part, report.to_json())
    except BaseException:
        shutil.rmtree(part)
        raise
    if (out / FOLDER).exists():
        shutil.rmtree(out / FOLDER)
    part.replace(out / FOLDER)
    sync_directory(out)
    _say(f"corpus: {report.train.conversations} conversations, {report.train.tokens} tokens, {out / FOLDER}")
    if report.skipped:
        kinds = ", ".join(f"{row['count']} {kind}" for kind, row in report.skipped.items())
        _say(f"corpus: left out: {kinds}; the first of each is in {out / FOLDER / REPORT}")
    return report


class _Builder:
    """One build into an empty folder."""

    def __init__(self, recipe: DraftRecipe, target: DraftTarget, encoder: TurnEncoder, folder: Path) -> None:
        self._recipe, self._target, self._encoder, self._folder = recipe, target, encoder, folder
        self._skips = Skips()
        self._cut = 0

    def run(self, sources: Sequence[Source], hashes: dict[str, str], inputs: str) -> CorpusReport:
        table = self._recipe.corpus
        seen: set[bytes] = set()
        ids: set[bytes] = set()
        indices = [self._index(source, seen, ids) for source in sources]
        heldout = [self._hold_out(source, index) for source, index in zip(sources, indices, strict=True)]
        prompts = np.concatenate([index.prompts[held] for index, held in zip(indices, heldout, strict=True)])
        rows: dict[str, dict[str, Any]] = {}
        drawn: list[_Drawn] = []
        for source, index, held in zip(sources, indices, heldout, strict=True):
            train = index.training(table.limit - table.heldout if table.limit else 0, prompts)
            rows[source.name] = {
                "sha256": hashes[source.name],
                "lines": index.n_lines,
                "usable": len(index.lines),
                "train": len(train),
                "heldout": len(held),
                "asked_in_heldout": int(np.isin(index.prompts, prompts).sum()) - len(held),
            }
            lines = dict.fromkeys(index.lines[train].tolist(), False) | dict.fromkeys(index.lines[held].tolist(), True)
            drawn.append(_Drawn(source, lines, index.renamed))
        counts, n_prompts = self._write(drawn)
        return CorpusReport(
            format=FORMAT,
            inputs=inputs,
            sources=rows,
            skipped=self._skips.to_json(),
            cut=self._cut,
            train=counts[False],
            heldout=counts[True],
            prompts=n_prompts,
        )

    def _index(self, source: Source, seen: set[bytes], ids: set[bytes]) -> _Index:
        """First reading: which lines are usable, and the hashes to draw by."""
        lines, prompts = array("q"), array("Q")
        n_lines, own = 0, set[bytes]()
        renamed: set[int] = set()
        for number, line in source.lines():
            n_lines += 1
            try:
                conversation = parse(line, source.dataset, number)
                _once(seen, conversation.text, "duplicate", "conversation", "one that no earlier line has")
                _once(own, conversation.id, "id", "id", "one that no earlier line has")
                # Data sets count from 0, or have the same names: that is no reason to leave the second one out.
                taken = _key_of(conversation.id) in ids
                name = _renamed(conversation).id if taken else conversation.id
                _once(ids, name, "id", "id", "one that no earlier line has")
            except BadLine as e:
                self._skips.add(e.kind, f"{source.name}, line {number}: {e}")
                continue
            lines.append(number)
            prompts.append(self._key(conversation))
            if taken:
                renamed.add(number)
        return _Index(np.frombuffer(lines, np.int64), frozenset(renamed), np.frombuffer(prompts, np.uint64), n_lines)

    def _hold_out(self, source: Source, index: _Index) -> np.ndarray:
        """Indices of the first conversations, in the order of drawing, that can be evaluated on."""
        candidates, wanted = index.candidates(), self._recipe.corpus.heldout
        n = 2 * wanted
        while True:
            lines = set(index.lines[candidates[:n]].tolist())
            fits = {k for k, line in source.lines() if k in lines and self._fits(parse(line, source.dataset, k))}
            held = [i for i in candidates[:n].tolist() if int(index.lines[i]) in fits][:wanted]
            if len(held) == wanted < len(index.lines):
                return np.asarray(held, np.int64)
            if n >= len(candidates):
                expected = f"fewer than the {len(index.lines)} usable conversations of {source.name}"
                if len(held) < wanted:
                    expected += f", {len(held)} of which fit target.max_tokens"
                raise ConfigError("corpus.heldout", wanted, expected, f"left out were:{self._skips or ' none'}")
            n *= 4

    def _fits(self, conversation: Conversation) -> bool:
        """Whether it has a prompt and an answer within target.max_tokens."""
        limit = self._recipe.target.max_tokens
        try:
            turns = self._encoder.turns(conversation)
        except TurnError:
            return False
        documents = join(turns, "last" if self._recipe.corpus.turns == "last" else "auto")
        return len(turns[0].prompt) < limit and any(d.cut(limit).trains for d in documents)

    def _key(self, conversation: Conversation) -> int:
        text = f"{self._recipe.corpus.seed}\n{conversation.prompt_text}"
        return int.from_bytes(_digest(text)[:8], "little")

    def _write(self, drawn: Sequence[_Drawn]) -> tuple[dict[bool, Counts], int]:
        """Second reading: what was drawn becomes documents. Counts by whether held out, and the number of prompts."""
        size = self._target.config.vocab_size
        with (
            DocumentWriter(self._folder, heldout=False, vocab_size=size) as train,
            DocumentWriter(self._folder, heldout=True, vocab_size=size) as heldout,
        ):
            prompts = self._documents(drawn, train, heldout)
            n_prompts = write_json_lines(self._folder / PROMPTS, prompts)
            counts = {False: train.finish(), True: heldout.finish()}
        if not counts[False].documents:
            names, expected = list(self._recipe.corpus.conversations), "conversations to train on"
            raise ConfigError("corpus.conversations", names, expected, f"left out were:{self._skips}")
        return counts, n_prompts

    def _documents(
        self, drawn: Sequence[_Drawn], train: DocumentWriter, heldout: DocumentWriter
    ) -> Iterator[dict[str, Any]]:
        """Writes what was drawn; yields the held-out prompts."""
        for source, lines, renamed in drawn:
            for number, line in source.lines():
                if number not in lines:
                    continue
                conversation, held = parse(line, source.dataset, number), lines[number]
                if number in renamed:
                    conversation = _renamed(conversation)
                prompt = self._add(conversation, heldout if held else train, f"{source.name}, line {number}")
                if held and prompt is not None:
                    yield prompt_row(conversation, prompt)

    def _add(self, conversation: Conversation, writer: DocumentWriter, where: str) -> Ids | None:
        """Write a conversation. Returns its first prompt; None if it was left out."""
        limit = self._recipe.target.max_tokens
        try:
            turns = self._encoder.turns(conversation)
        except TurnError as e:
            self._skips.add("cannot be rendered", f"{where}: {e}")
            return None
        try:
            documents = join(turns, self._recipe.corpus.turns)
        except TurnError as e:
            fix = f"use auto, which makes it a document of its own ({where})"
            raise ConfigError("corpus.turns", "all", f"a template that keeps earlier turns; here {e}", fix) from e
        if len(turns[0].prompt) >= limit:
            found = f"{where}: found a prompt of {len(turns[0].prompt)} tokens, expected fewer than {limit}"
            self._skips.add("longer than target.max_tokens", found)
            return None
        writer.conversation(conversation)
        for document in documents:
            kept = document.cut(limit)
            if not kept.trains:
                self._skips.add("no answer within target.max_tokens", f"{where}: {len(document.ids)} tokens")
                continue
            self._cut += len(kept.ids) < len(document.ids)
            writer.document(kept)
        return turns[0].prompt


def _check_datasets(sources: Sequence[Source]) -> None:
    """Ids and figures are told apart by the files' names."""
    names = [source.dataset for source in sources]
    if len(set(names)) < len(names):
        raise ConfigError("corpus.conversations", [s.name for s in sources], "files of different names")


def _once(seen: set[bytes], text: str, kind: str, field: str, expected: str) -> None:
    key = _key_of(text)
    if key in seen:
        raise BadLine(kind, field, text, expected)
    seen.add(key)


def _key_of(text: str) -> bytes:
    return _digest(text)[:16]


def _renamed(conversation: Conversation) -> Conversation:
    """With its data set in its id."""
    return dataclasses.replace(conversation, id=f"{conversation.dataset}-{conversation.id}")


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _inputs_hash(target: DraftTarget, hashes: dict[str, str]) -> str:
    """Hash of everything the output depends on: recipe, conversations, tokenizer and template."""
    files = ("tiktoken.model", "tokenizer_config.json", "chat_template.jinja", "config.json")
    found = {name: file_hash(target.directory / name) for name in files if (target.directory / name).is_file()}
    table = dataclasses.asdict(target.recipe.corpus)
    del table["conversations"]  # by content, in order, under the names that ids and figures have
    facts = [FORMAT, table, target.recipe.target.max_tokens, found]
    facts.append([[Source(name).dataset, sha256] for name, sha256 in hashes.items()])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
