"""Stage corpus: what is drawn, held out, or left out and counted; and the folder is all or nothing."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kimijax.chat import ChatTemplate
from kimijax.errors import ConfigError, TemplateError, TokenizerError
from kimijax.tokenizer import Tokenizer
from kimijax.train import corpus, document_files, packing, turns

from .corpus_cases import END_THINK, HEAD, THINK, VOCAB, E, recipe, said, user, write_lines, write_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def questions(n: int, text: str = "q") -> list[dict[str, Any]]:
    return [said(f"{text}{i}", f"a{i}") for i in range(n)]


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def asked(folder: Path, name: str) -> list[str]:
    return [row["messages"][0]["content"] for row in rows(folder, name)]


def documents(folder: Path, prefix: str = "") -> list[tuple[list[int], list[int]]]:
    """(ids, mask) of each document."""
    d = packing.Documents.load(folder, prefix)
    return [(d.tokens[a:b].tolist(), d.mask[a:b].tolist()) for a, b in zip(d.offsets[:-1], d.offsets[1:], strict=True)]


def test_documents_masks_and_prompts(target: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "set.jsonl", questions(6))
    report = corpus.build(recipe(target, file, corpus={"heldout": 2}), tmp_path)
    folder = tmp_path / "corpus"
    kept, held = asked(folder, "conversations.jsonl"), asked(folder, "heldout.jsonl")
    assert sorted(kept + held) == [f"q{i}" for i in range(6)]
    assert kept == sorted(kept)  # in the file's order
    for prefix, names in (("", kept), ("heldout_", held)):
        for (ids, mask), question in zip(documents(folder, prefix), names, strict=True):
            prompt = [*user(question), *HEAD, THINK, END_THINK]
            assert ids == [*prompt, *f"a{question[1:]}".encode(), E]
            assert mask == [0] * len(prompt) + [1] * 3
    tokenizer = Tokenizer.from_dir(target)
    template = ChatTemplate.from_dir(target, tokenizer)
    for (id, dataset, ids), question in zip(document_files.read_prompts(folder), held, strict=True):
        messages = [{"role": "user", "content": question}]
        assert ids == list(template.encode(messages, thinking=False).ids)
        assert (id, dataset) == (f"set-{int(question[1:]) + 1}", "set")
    assert report.train.documents == 4
    assert report.heldout.loss_tokens == 6
    assert report.prompts == 2
    assert report.sources[str(file)]["train"] == 4
    assert corpus.CorpusReport.of(json.loads((folder / "report.json").read_text())) == report
    assert packing.Documents.load(folder).tokens.dtype == np.uint16


def test_nothing_that_asks_the_same_lands_on_both_sides(target: Path, tmp_path: Path) -> None:
    """Not in one file, not across files, not under other answers or ids."""
    first = [*questions(20), *(said(f"q{i}", f"other {i}", id=f"again {i}") for i in range(20))]
    second = [said(f"q{i}", f"third {i}") for i in range(20)]
    files = [write_lines(tmp_path / name, lines) for name, lines in (("a.jsonl", first), ("b.jsonl", second))]
    report = corpus.build(recipe(target, *files, corpus={"heldout": 5}), tmp_path)
    kept, held = (asked(tmp_path / "corpus", name) for name in ("conversations.jsonl", "heldout.jsonl"))
    assert not set(kept) & set(held)
    assert len(held) == 10
    assert len(set(held[:5])) == len(set(held[5:])) == 5
    assert sorted(held[:5]) == sorted(held[5:])  # the hash is of what is asked, so both files hold the same out
    assert len(kept) == 30 + 15
    assert [report.sources[str(f)]["asked_in_heldout"] for f in files] == [5, 0]


def test_drawing_is_by_seed_and_nested(target: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "set.jsonl", questions(40))

    def drawn(**fields: Any) -> tuple[set[str], set[str]]:
        corpus.build(recipe(target, file, corpus=fields), tmp_path)
        kept, held = (asked(tmp_path / "corpus", name) for name in ("conversations.jsonl", "heldout.jsonl"))
        return set(kept), set(held)

    small = drawn(limit=10, heldout=3)
    assert [len(side) for side in small] == [7, 3]
    larger = drawn(limit=20, heldout=3)
    assert small[0] < larger[0]
    assert small[1] == larger[1]
    assert drawn(limit=10, heldout=3, seed=1) != small
    assert drawn(limit=10, heldout=3) == small


def test_bad_lines_are_counted_by_kind_and_the_first_is_shown(target: Path, tmp_path: Path) -> None:
    named = said("n", "m")
    named["messages"][1]["name"] = "bob"
    lines = [
        *questions(3),
        said("q0", "a0", id="copy"),
        b"{",
        b"[]",
        said("x", ""),
        said("y", "z", id="set-1"),
        named,
        said("p" * 60, "too long a question"),
        said("p" * 43, "no room for two tokens"),
        said("p" * 40, "cut but some is left"),
    ]
    file = write_lines(tmp_path / "set.jsonl", lines)
    report = corpus.build(recipe(target, file), tmp_path)
    assert {kind: row["count"] for kind, row in report.skipped.items()} == {
        "cannot be rendered": 1,
        "duplicate": 1,
        "empty turn": 1,
        "id": 1,
        "json": 2,
        "longer than target.max_tokens": 1,
        "no answer within target.max_tokens": 1,
    }
    assert report.skipped["json"]["first"].startswith(f"{file}, line 5: line: found")
    assert report.skipped["duplicate"]["first"].startswith(f"{file}, line 4: conversation: found")
    assert report.skipped["id"]["first"] == f"{file}, line 8: id: found 'set-1', expected one that no earlier line has"
    assert (
        "found a prompt of 80 tokens, expected fewer than 64"
        in report.skipped["longer than target.max_tokens"]["first"]
    )
    assert report.cut == 1
    # The conversation without room for its answer is kept: the next stage may be given a shorter one.
    assert report.train.conversations + report.heldout.conversations == 3 + 2
    folder = tmp_path / "corpus"
    (cut,) = [mask for ids, mask in documents(folder) + documents(folder, "heldout_") if len(ids) == 64]
    assert cut == [0] * 60 + [1] * 4


def test_files_that_count_from_zero_are_both_used(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write_lines(tmp_path / "one.jsonl", [said(f"one{i}", "a", id=i) for i in range(3)])
    two = write_lines(tmp_path / "two.jsonl", [said(f"two{n}", "a", id=i) for n, i in enumerate((0, 1, 2, 2, 3))])
    report = corpus.build(recipe(target, one, two), tmp_path)
    found = rows(tmp_path / "corpus", "conversations.jsonl") + rows(tmp_path / "corpus", "heldout.jsonl")
    assert sorted(row["id"] for row in found) == ["0", "1", "2", "3", "two-0", "two-1", "two-2"]
    prompts = {id: dataset for id, dataset, _ in document_files.read_prompts(tmp_path / "corpus")}
    held = {row["id"]: row["dataset"] for row in rows(tmp_path / "corpus", "heldout.jsonl")}
    assert prompts == held
    assert sorted(held.values()) == ["one", "two"]
    assert {kind: row["count"] for kind, row in report.skipped.items()} == {"id": 1}  # within a file they must differ
    assert "left out: 1 id; the first of each is in " in capsys.readouterr().err


def test_int32_tokens_for_a_large_vocabulary(tmp_path: Path) -> None:
    with document_files.DocumentWriter(tmp_path, heldout=False, vocab_size=163840) as writer:
        writer.document(turns.Document((163839, 5, 6), ((1, 3),)))
        writer.document(turns.Document((7, 8), ((0, 1),)))
        counts = writer.finish()
    found = packing.Documents.load(tmp_path)
    assert found.tokens.dtype == np.int32
    assert found.tokens.tolist() == [163839, 5, 6, 7, 8]
    assert found.mask.tolist() == [0, 1, 1, 1, 0]
    assert found.offsets.tolist() == [0, 3, 5]
    assert (counts.documents, counts.tokens, counts.loss_tokens, counts.loss_share) == (2, 5, 3, 0.6)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "conversations.jsonl",
        "mask.npy",
        "offsets.npy",
        "tokens.npy",
    ]


def test_built_again_only_for_other_inputs(target: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "set.jsonl", questions(6))
    out = tmp_path / "run"
    first = corpus.build(recipe(target, file), out)
    born = (out / "corpus").stat().st_ino
    assert corpus.build(recipe(target, file, generate={"batch": 9}), out) == first
    assert (out / "corpus").stat().st_ino == born
    moved = write_lines(tmp_path / "moved.jsonl", questions(6))
    inputs = {first.inputs}
    for changed in (
        recipe(target, file, corpus={"heldout": 2}),
        recipe(target, file, target={"max_tokens": 63}),
        recipe(target, file, corpus={"thinking": True}),
        recipe(target, moved),  # ids carry the file's name
    ):
        inputs.add(corpus.build(changed, out).inputs)
    assert len(inputs) == 5
    write_lines(file, questions(7))
    assert corpus.build(recipe(target, file), out).inputs not in inputs
    assert [p.name for p in out.iterdir()] == ["corpus"]


def test_a_killed_or_failing_build_leaves_no_half_folder(target: Path, tmp_path: Path) -> None:
    thoughtful = said("hi", "yo", "so", "no")
    for message in thoughtful["messages"][1::2]:
        message["reasoning_content"] = "why"
    file = write_lines(tmp_path / "set.jsonl", [*questions(4), thoughtful])
    out = tmp_path / "run"
    with pytest.raises(ConfigError, match=r"corpus.turns: found 'all', .*set.jsonl, line 5"):
        corpus.build(recipe(target, file, corpus={"turns": "all", "thinking": True}), out)
    assert not list(out.iterdir())
    (out / ".corpus.part").mkdir()  # what a kill leaves
    (out / ".corpus.part" / "tokens.npy").write_text("half")
    corpus.build(recipe(target, file, corpus={"turns": "auto", "thinking": True}), out)
    assert [p.name for p in out.iterdir()] == ["corpus"]
    assert not [p for p in (out / "corpus").iterdir() if p.name.startswith(".")]
    n_turns = sum(
        sum(m["role"] == "assistant" for m in r["messages"]) for r in rows(out / "corpus", "conversations.jsonl")
    )
    assert len(documents(out / "corpus")) == n_turns


def test_too_few_conversations_are_refused_with_the_reasons(target: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "set.jsonl", [*questions(2), b"{"])
    with pytest.raises(
        ConfigError, match=r"corpus.heldout: found 2, expected fewer than the 2 usable .*\n  json: 1, .*line 3"
    ):
        corpus.build(recipe(target, file, corpus={"heldout": 2}), tmp_path)
    empty = write_lines(tmp_path / "empty.jsonl", [b"{", b"{"])
    with pytest.raises(ConfigError, match="fewer than the 0 usable"):
        corpus.build(recipe(target, empty), tmp_path)
    long = write_lines(tmp_path / "long.jsonl", [said("p" * (70 + i), "a") for i in range(4)])
    with pytest.raises(ConfigError, match=r"the 4 usable conversations of .*, 0 of which fit target.max_tokens"):
        corpus.build(recipe(target, long), tmp_path)
    rest = write_lines(tmp_path / "rest.jsonl", [said("q", "a"), *(said("p" * (70 + i), "a") for i in range(4))])
    with pytest.raises(ConfigError, match=r"conversations to train on.*\n  longer than target.max_tokens: 4"):
        corpus.build(recipe(target, rest), tmp_path)


def test_settings_that_cannot_be_honoured(target: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "set.jsonl", questions(6))
    (tmp_path / "other").mkdir()
    again = write_lines(tmp_path / "other" / "set.jsonl", questions(6))
    with pytest.raises(ConfigError, match=r"corpus.limit: found 3, expected 0 or above corpus.heldout"):
        corpus.build(recipe(target, file, corpus={"limit": 3, "heldout": 3}), tmp_path)
    with pytest.raises(ConfigError, match=r"corpus.conversations: .* files of different names"):
        corpus.build(recipe(target, file, again), tmp_path)
    with pytest.raises(ConfigError, match=r"corpus.conversations: found '.*none.jsonl'"):
        corpus.build(recipe(target, tmp_path / "none.jsonl"), tmp_path)


def test_targets_that_cannot_be_trained_with(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    file = write_lines(tmp_path / "set.jsonl", questions(6))
    template = (target / "chat_template.jinja").read_text()
    (target / "chat_template.jinja").write_text(template.replace("'<think></think>' if instant else", "'!' ~"))
    with pytest.raises(TemplateError, match="target: the chat template cannot be trained with"):
        corpus.build(recipe(target, file), tmp_path)
    (target / "chat_template.jinja").unlink()
    with pytest.raises(TokenizerError, match="chat template"):
        corpus.build(recipe(target, file), tmp_path)


def test_documents_are_where_the_recipe_makes_them(target: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "set.jsonl", questions(6))
    given, anew = recipe(target, file, generate={"enabled": False}), recipe(target, file)
    with pytest.raises(ConfigError, match="run the stage corpus"):
        document_files.documents_folder(given, tmp_path)
    corpus.build(given, tmp_path)
    assert document_files.documents_folder(given, tmp_path) == tmp_path / "corpus"
    with pytest.raises(ConfigError, match="run the stage generate"):
        document_files.documents_folder(anew, tmp_path)
    document_files.write_report(tmp_path / "corpus", {"imported": "specforge"})  # with states: not answered anew
    assert document_files.documents_folder(anew, tmp_path) == tmp_path / "corpus"
    assert VOCAB < 2**16
