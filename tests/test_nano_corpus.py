"""The corpus of kimi-nano: its texts are correct Python, its tokens are the chat form, its output is reproducible."""

import ast
import contextlib
import doctest
import io
import itertools
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from kimijax.tokenizer import Tokenizer
from kimijax.train import nano_corpus, nano_dialogues, nano_english, nano_facts, nano_written

N_RANKS = 600  # a small vocabulary trains faster


@pytest.fixture(scope="session")
def facts() -> list[nano_facts.Fact]:
    return nano_facts.collect_facts()[0]


@pytest.fixture(scope="session")
def ready(facts: list[nano_facts.Fact]) -> dict[str, nano_dialogues.Entry]:
    return {entry.fact.name: entry for entry in nano_dialogues.entries(facts)}


@pytest.fixture(scope="session")
def dialogues(facts: list[nano_facts.Fact]) -> list[nano_written.Dialogue]:
    return nano_dialogues.all_dialogues(facts, seed=0)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nano_corpus.CorpusReport]:
    folder = tmp_path_factory.mktemp("nano") / "corpus"
    return folder, nano_corpus.build(folder, n_ranks=N_RANKS)


# ---- the hand-written texts ----


def sessions() -> dict[str, str]:
    """Every hand-written doctest session by a readable name."""
    found = {f"example {name}": code for name, code in nano_dialogues.read_examples().items()}
    for table in ("tasks", "topics"):
        found |= {f"{table} {block.phrases[0]}": block.code for block in nano_written.read_blocks(table)}
    return {name: code for name, code in found.items() if code.startswith(">>>")}


def test_every_session_gives_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs files, the network or a user is marked SKIP in the text."""
    monkeypatch.chdir(tmp_path)
    parser, output = doctest.DocTestParser(), io.StringIO()
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.DONT_ACCEPT_TRUE_FOR_1)
    for name, code in sessions().items():
        runner.run(parser.get_doctest(code + "\n", {}, name, None, 0), out=output.write)
    assert runner.tries > 700
    assert not runner.failures, output.getvalue()
    assert not list(tmp_path.iterdir()), "a session leaves files behind"


def test_every_program_is_correct_python() -> None:
    for table, has_text in (("tasks", True), ("topics", True), ("errors", True), ("programs", False)):
        for block in nano_written.read_blocks(table, has_text=has_text):
            assert block.phrases[0]
            if block.code and not block.code.startswith(">>>"):
                ast.parse(block.code)


def test_programs_compute() -> None:
    space: dict[str, object] = {}
    for block in nano_written.read_blocks("programs", has_text=False):
        exec(block.code, space)
    checks = {
        "factorial(5)": 120,
        "[fibonacci(n) for n in range(7)]": [0, 1, 1, 2, 3, 5, 8],
        "[n for n in range(20) if is_prime(n)]": [2, 3, 5, 7, 11, 13, 17, 19],
        "primes(11)": [2, 3, 5, 7, 11],
        "gcd(12, 18)": 6,
        "binary_search([1, 3, 5, 7], 5)": 2,
        "bubble_sort([3, 1, 2])": [1, 2, 3],
        "quicksort([3, 1, 2, 3])": [1, 2, 3, 3],
        "flatten([[1], [2, 3]])": [1, 2, 3],
        "digit_sum(123)": 6,
        "is_anagram('listen', 'silent')": True,
        "count_vowels('Python code')": 3,
        "power(2, 10)": 1024,
    }
    assert {code: eval(code, space) for code in checks} == checks


def test_errors_are_raised_as_said() -> None:
    checked = 0
    for block in nano_written.read_blocks("errors"):
        if block.code:
            checked += 1
            space: dict[str, object] = {}
            with contextlib.suppress(ImportError):
                exec(f"import {block.phrases[0].rpartition('.')[0] or 'builtins'}", space)
            with pytest.raises(BaseException) as caught:  # noqa: PT011 (the class is checked below)
                exec(block.code, space)
            assert isinstance(caught.value, eval(block.phrases[0], space)), block.phrases[0]
    assert checked > 15


def test_a_phrase_has_one_entry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tasks.txt").write_text("@ do it; do that\nText.\n\n@ do that\nText.\n")
    monkeypatch.setattr("kimijax.train.nano_written.TEXTS", tmp_path)
    with pytest.raises(ValueError, match=r"tasks\.txt: \['do that'\] is given twice"):
        nano_written.read_blocks("tasks")


def test_tables_name_real_things(ready: dict[str, nano_dialogues.Entry]) -> None:
    assert not [name for name in nano_dialogues.read_examples() if name not in ready]
    assert not [name for name in nano_dialogues.read_summaries() if nano_facts.is_skipped(name)]
    assert len(nano_dialogues.read_modules()) > 80


# ---- what is taken from the interpreter ----


@pytest.mark.parametrize(
    ("doc", "summary"),
    [
        ("Return the sum.\n\nMore text.", "Return the sum"),
        ("f(x) -> value\n\nGet :class:`~a.B` of ``x``, e.g. one. Then more.", "Get `a.B` of `x`, e.g. one"),
        ("S.find(sub) -> int\n\nReturn the lowest\nindex.", "Return the lowest index"),
        ("Short", ""),
        ("x" * 300, ""),
    ],
)
def test_clean_summary(doc: str, summary: str) -> None:
    assert nano_facts.clean_summary(doc) == summary


@pytest.mark.parametrize(
    ("summary", "does", "base"),
    [
        ("Return the sum of x", "returns the sum of x", "get the sum of x"),
        ("Remove and return an item", "removes and returns an item", "remove and return an item"),
        ("Copies data", "copies data", "copy data"),
        (
            "Return True if x is odd, False otherwise",
            "returns True if x is odd, False otherwise",
            "check whether x is odd",
        ),
        ("Recursively delete a tree", "recursively deletes a tree", ""),
        ("A kind of list", "is a kind of list", ""),
        ("Abstract base class", "is an abstract base class", ""),
        ("A Thing is a thing", "", ""),
        ("Gamma function", "", ""),
    ],
)
def test_predicate(summary: str, does: str, base: str) -> None:
    assert nano_english.predicate(summary) == does
    assert nano_english.question_phrase(does) == base


def test_examples_of_docstrings_must_stand_alone() -> None:
    assert nano_facts.doctest_example("Text.\n\n    >>> 1 + 1  # two\n    2\n\n    Text.") == ">>> 1 + 1\n2"
    assert nano_facts.is_self_contained(">>> import math\n>>> [math.sqrt(x) for x in (1, 4)]\n[1.0, 2.0]")
    assert not nano_facts.is_self_contained(">>> undefined(1)\n1")
    assert not nano_facts.is_self_contained(">>> async with x:\n...     pass")


def test_facts_cover_what_people_ask(ready: dict[str, nano_dialogues.Entry]) -> None:
    assert len(ready) > 1000
    assert ready["json.dumps"].what.startswith(
        "`json.dumps` converts a Python object to a JSON string.\n\n```python\n>>>"
    )
    assert ready["math.tan"].what == (
        "`math.tan` returns the tangent of x (measured in radians). Call it as `math.tan(x)`."
    )
    assert ready["str.upper"].signature == "The signature is `str.upper()`."
    assert ready["os.path.join"].arguments == "`os.path.join` takes the arguments `a` and `p`: `os.path.join(a, *p)`."
    assert "os.sched_yield" not in ready


def test_collecting_imports_nothing_odd() -> None:
    """In a fresh interpreter: no window, browser, egg or network module is loaded by looking for facts."""
    code = (
        "import sys; from kimijax.train.nano_facts import *; collect_facts(); source_functions(SOURCE_MODULES);"
        "print([m for m in ('tkinter', 'antigravity', 'this', 'webbrowser', 'turtle', 'idlelib') if m in sys.modules])"
    )
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- conversations ----


def test_one_question_has_one_answer(dialogues: list[nano_written.Dialogue]) -> None:
    answers: dict[str, str] = {}
    for dialogue in dialogues:
        messages = [m for m in dialogue.messages if m["role"] != "system"]
        if len(messages) == 2:
            question = messages[0]["content"].casefold()
            assert answers.setdefault(question, messages[1]["content"]) == messages[1]["content"], question


def test_conversations_are_well_formed(dialogues: list[nano_written.Dialogue]) -> None:
    for dialogue in dialogues:
        roles = [m["role"] for m in dialogue.messages]
        if roles[0] == "system":
            roles = roles[1:]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        for message in dialogue.messages:
            text = message["content"]
            assert text
            assert text == text.strip()
            assert not re.search(r"\{(n|k|m|t|s|p|P|third|base)\}", text), text
            assert text.count("```") in (0, 2), text
            assert not re.search("doctest: | at 0x", text), text


def test_every_fact_is_asked_in_several_ways(dialogues: list[nano_written.Dialogue]) -> None:
    ways = Counter(dialogue.key for dialogue in dialogues)
    assert ways["what json.dumps"] >= 20
    assert min(n for key, n in ways.items() if key.startswith("what ")) >= 3


# ---- the files ----


def test_files_and_report(corpus: tuple[Path, nano_corpus.CorpusReport]) -> None:
    folder, report = corpus
    for prefix in ("", "heldout_"):
        tokens, mask, offsets = (np.load(folder / f"{prefix}{name}.npy") for name in ("tokens", "mask", "offsets"))
        assert (tokens.dtype, mask.dtype, offsets.dtype) == (np.uint16, np.uint8, np.int64)
        assert len(tokens) == len(mask) == offsets[-1]
        assert offsets[0] == 0
        assert (np.diff(offsets) > 0).all()
        assert tokens.max() < N_RANKS + nano_corpus.N_SPECIAL
    assert report.tokens == len(np.load(folder / "tokens.npy"))
    assert report.loss_tokens == int(np.load(folder / "mask.npy").sum())
    assert report.heldout_documents == len((folder / "heldout.jsonl").read_text().splitlines())
    assert json.loads((folder / "report.json").read_text())["sha256"] == report.sha256
    code = 1 - report.conversations / (report.conversations + report.functions)
    assert 0.01 < code < 0.2, "functions are long and few"


def test_project_tokenizer_reads_it(corpus: tuple[Path, nano_corpus.CorpusReport]) -> None:
    tokenizer = Tokenizer.from_dir(corpus[0])
    assert (tokenizer.n_ranks, tokenizer.vocab_size) == (N_RANKS, N_RANKS + nano_corpus.N_SPECIAL)
    # The offsets of the real tokenizer, whose 163,584 ranks come before the same slots.
    real = {"[EOS]": 163585, "<|im_end|>": 163586, "<|im_user|>": 163587, "<|im_middle|>": 163601, "</think>": 163607}
    assert {name: tokenizer.special_ids[name] - N_RANKS for name in real} == {n: i - 163584 for n, i in real.items()}
    assert tokenizer.special_ids["[PAD]"] == N_RANKS + nano_corpus.N_SPECIAL - 1


def test_heldout_documents_are_the_chat_form(corpus: tuple[Path, nano_corpus.CorpusReport]) -> None:
    """Ids decode to the chat form; the mask is 1 from `</think>` to `<|im_end|>` of each answer, and on all of code."""
    folder, _ = corpus
    tokenizer = Tokenizer.from_dir(folder)
    tokens, mask, offsets = (np.load(folder / f"heldout_{name}.npy") for name in ("tokens", "mask", "offsets"))
    rows = [json.loads(line) for line in (folder / "heldout.jsonl").read_text().splitlines()]
    decode = lambda ids: b"".join(tokenizer.token_bytes(int(i)) for i in ids).decode()  # noqa: E731
    for i in [*range(80), *range(len(rows) - 5, len(rows))]:
        ids, learned = tokens[offsets[i] : offsets[i + 1]], mask[offsets[i] : offsets[i + 1]]
        if "code" in rows[i]:
            assert decode(ids) == rows[i]["code"] + "[EOS]"
            assert learned.all()
            continue
        text, answers = "", ""
        for message in rows[i]["messages"]:
            role, body = message["role"], message["content"]
            think = "<think></think>" if role == "assistant" else ""
            text += f"<|im_{role}|>{role}<|im_middle|>{think}{body}<|im_end|>"
            answers += f"</think>{body}<|im_end|>" if role == "assistant" else ""
        assert decode(ids) == text
        assert decode(ids[learned == 1]) == answers


def test_heldout_questions_are_not_trained_but_their_facts_are(corpus: tuple[Path, nano_corpus.CorpusReport]) -> None:
    folder, report = corpus
    tokens, offsets = np.load(folder / "tokens.npy"), np.load(folder / "offsets.npy")
    trained = {tokens[a:b].tobytes() for a, b in itertools.pairwise(offsets)}
    held, starts = np.load(folder / "heldout_tokens.npy"), np.load(folder / "heldout_offsets.npy")
    assert not [i for i in range(len(starts) - 1) if held[starts[i] : starts[i + 1]].tobytes() in trained]
    assert 0.01 < report.heldout_documents / (report.conversations + report.functions) < 0.03


def test_same_inputs_are_not_built_again(
    corpus: tuple[Path, nano_corpus.CorpusReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, report = corpus
    monkeypatch.setattr("kimijax.train.nano_corpus.collect_facts", lambda: pytest.fail("built again"))
    assert nano_corpus.build(folder, n_ranks=N_RANKS) == report
    with pytest.raises(pytest.fail.Exception, match="built again"):
        nano_corpus.build(folder, n_ranks=N_RANKS, seed=1)
    assert nano_corpus.build(folder, n_ranks=N_RANKS) == report, "a nano_corpus.build that fails leaves the old result"
    assert [path.name for path in folder.parent.iterdir()] == ["corpus"]


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"n_ranks: found 65281, expected 256\.\.65280"):
        nano_corpus.build(tmp_path / "c", n_ranks=65281)
    with pytest.raises(ValueError, match=r"code_share: found 0\.9, expected 0\.\.0\.5"):
        nano_corpus.build(tmp_path / "c", code_share=0.9)
    assert not list(tmp_path.iterdir())


def test_special_slots_are_distinct() -> None:
    assert len(set(nano_corpus.SPECIAL_OFFSETS.values())) == len(nano_corpus.SPECIAL_OFFSETS)
    assert max(nano_corpus.SPECIAL_OFFSETS.values()) == nano_corpus.N_SPECIAL - 1
