"""Stage generate on a random model: exact tokens, one answer a turn, and the same files after any stop."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kimijax.engine.config import EngineConfig
from kimijax.errors import ConfigError
from kimijax.generate import LLM
from kimijax.loading import load
from kimijax.tokenizer import Tokenizer
from kimijax.train import answers, conversations, corpus, draft_recipe, generate, packing, regeneration

from .corpus_cases import CALLS, END_THINK, HEAD, LETTERS, THINK, E, recipe, said, user, write_lines, write_target

QUESTIONS = [said(f"q{i}", f"a{i}") for i in range(6)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def engine(target: Path) -> LLM:
    """The model with few and small programs, compiled once for all tests."""
    sizes = EngineConfig(max_batch=2, context_length=128, page_size=16, chunk_size=32, burst=4)
    return load(target, engine=sizes, dtype=jnp.float32)


@pytest.fixture(autouse=True)
def shared_engine(engine: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(generate, "load_engine", lambda target: engine)
    yield
    engine.engine.check_integrity()
    assert engine.engine.stats().free_pages == engine.engine.stats().total_pages
    assert not engine.engine.has_work


def begin(out: Path, model: Path, lines: list[Any], **changes: dict[str, Any]) -> draft_recipe.DraftRecipe:
    """A finished corpus in `out`, and its recipe."""
    out.mkdir(exist_ok=True)
    made = recipe(model, write_lines(out.parent / "set.jsonl", lines), **changes)
    corpus.build(made, out)
    return made


def never() -> bool:
    return False


def after(n: int, out: Path) -> Callable[[], bool]:
    """Stops once there are n answers."""
    return lambda: len(lines_of(out, answers.ANSWERS)) >= n


def lines_of(out: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "generated" / name).read_bytes().splitlines()]


def final_files(out: Path) -> dict[str, bytes]:
    """All that the stage makes, but for the answers, which come in any order."""
    return {p.name: p.read_bytes() for p in (out / "generated").iterdir() if p.name != answers.ANSWERS}


def documents(out: Path, prefix: str = "") -> list[tuple[list[int], list[int]]]:
    d = packing.Documents.load(out / "generated", prefix)
    spans = zip(d.offsets[:-1], d.offsets[1:], strict=True)
    return [(d.tokens[a:b].tolist(), d.mask[a:b].tolist()) for a, b in spans]


@pytest.mark.parametrize(
    ("max_tokens", "positions", "context", "page"),
    [(64, 256, 64, 64), (65, 256, 128, 64), (250, 256, 256, 64), (250, 255, 252, 4), (255, 255, 255, 1)],
)
def test_the_engine_holds_the_longest_document(
    target: Path, max_tokens: int, positions: int, context: int, page: int
) -> None:
    made = generate.engine_config(recipe(target, Path("x"), target={"max_tokens": max_tokens}), positions)
    assert (made.context_length, made.page_size, made.max_batch) == (context, page, 2)


def test_documents_are_prompts_as_fed_and_tokens_as_drawn(target: Path, engine: LLM, tmp_path: Path) -> None:
    out = tmp_path / "run"
    made = begin(out, target, QUESTIONS, generate={"max_tokens": 40}, corpus={"heldout": 2})
    assert generate.generate(made, out, never)
    drawn = {a["id"]: a for a in lines_of(out, answers.ANSWERS)}
    assert sorted(drawn) == [f"set-{i}" for i in range(1, 7)]
    retokenised, tokenizer = 0, Tokenizer.from_dir(target)
    for name, prefix in (("conversations.jsonl", ""), ("heldout.jsonl", "heldout_")):
        kept = [json.loads(line) for line in (out / "corpus" / name).read_bytes().splitlines()]
        good = [row for row in kept if drawn[row["id"]]["reason"] == "stop"]
        for row, (ids, mask), anew in zip(good, documents(out, prefix), lines_of(out, name), strict=True):
            answer, question = drawn[row["id"]], row["messages"][0]["content"]
            assert answer["prompt"] == [*user(question), *HEAD, THINK, END_THINK]
            assert ids == answer["prompt"] + answer["ids"]
            assert mask == [0] * len(answer["prompt"]) + [1] * len(answer["ids"])
            assert answer["ids"][-1] == E
            seed = generate.answer_seed(0, row["id"], 0)
            alone = engine.generate(answer["prompt"], temperature=1.0, top_p=1.0, top_k=0, seed=seed, max_tokens=40)
            assert list(alone.token_ids) == answer["ids"]
            assert (anew["id"], anew["messages"][0]) == (row["id"], row["messages"][0])
            assert anew["messages"][1]["content"] == alone.text
            retokenised += tokenizer.encode(alone.text) != answer["ids"][:-1]
    assert retokenised, "no answer whose text has other tokens than were drawn: the test shows nothing"
    report = json.loads((out / "generated" / "report.json").read_text())
    assert (report["turns"], report["answered"] + report["failed"]) == (6, 6)
    n = [len(a["ids"]) for a in drawn.values() if a["reason"] == "stop"]
    assert report["mean_answer_tokens"] == round(sum(n) / len(n), 2)
    assert (out / "generated" / "prompts.jsonl").read_bytes() == (out / "corpus" / "prompts.jsonl").read_bytes()


def test_a_stop_while_an_early_prompt_still_runs_changes_nothing(target: Path, tmp_path: Path) -> None:
    made = begin(clean := tmp_path / "clean", target, QUESTIONS, generate={"seed": 2})
    assert generate.generate(made, clean, never)
    begin(out := tmp_path / "stopped", target, QUESTIONS)
    assert not generate.generate(made, out, after(4, out))
    done = [a["id"] for a in lines_of(out, answers.ANSWERS)]
    asked = [json.loads(line)["id"] for line in (out / "corpus" / "conversations.jsonl").read_bytes().splitlines()]
    assert set(done) != set(asked[: len(done)]), "no earlier prompt was running at the stop: choose another seed"
    assert not (out / "generated" / "report.json").exists()
    assert not (out / "generated" / "tokens.npy").exists()
    assert generate.generate(made, out, never)
    assert sorted(a["id"] for a in lines_of(out, answers.ANSWERS)) == [f"set-{i}" for i in range(1, 7)]
    assert final_files(out) == final_files(clean)


@pytest.mark.parametrize("n", [1, 5, 9])
def test_a_stop_between_the_turns_of_a_conversation_changes_nothing(target: Path, tmp_path: Path, n: int) -> None:
    lines = [said(f"q{i}", "a", f"r{i}", "b") for i in range(6)]
    made = begin(clean := tmp_path / "clean", target, lines, target={"max_tokens": 128})
    assert generate.generate(made, clean, never)
    begin(out := tmp_path / "stopped", target, lines, target={"max_tokens": 128})
    assert not generate.generate(made, out, after(n, out))
    done = {(a["id"], a["turn"]): a["reason"] for a in lines_of(out, answers.ANSWERS)}
    assert any(done[id, turn] == "stop" and turn == 0 and (id, 1) not in done for id, turn in done)
    assert generate.generate(made, out, never)
    assert final_files(out) == final_files(clean)


@pytest.mark.parametrize("kept", [0, 1, 40, -1])
def test_what_a_killed_process_leaves_of_a_line_is_cut_off(target: Path, tmp_path: Path, kept: int) -> None:
    """`kept` bytes of the third answer: none, one, some, and all but the line's end."""
    made = begin(clean := tmp_path / "clean", target, QUESTIONS)
    assert generate.generate(made, clean, never)
    whole = (clean / "generated" / answers.ANSWERS).read_bytes().splitlines(keepends=True)
    begin(out := tmp_path / "killed", target, QUESTIONS)
    generate.generate(made, out, lambda: True)
    (out / "generated" / answers.ANSWERS).write_bytes(b"".join(whole[:2]) + whole[2][:kept])
    assert generate.generate(made, out, never)
    assert final_files(out) == final_files(clean)
    assert sorted(a["id"] for a in lines_of(out, answers.ANSWERS)) == [f"set-{i}" for i in range(1, 7)]


def test_a_kill_while_the_files_are_written_is_made_good(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = begin(clean := tmp_path / "clean", target, QUESTIONS)
    assert generate.generate(made, clean, never)
    begin(out := tmp_path / "killed", target, QUESTIONS)

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    for name in ("write_json_lines", "write_report"):
        with monkeypatch.context() as patch:
            patch.setattr(generate, name, kill)
            with pytest.raises(KeyboardInterrupt):
                generate.generate(made, out, never)
        assert not (out / "generated" / "report.json").exists()
    assert generate.generate(made, out, never)
    assert final_files(out) == final_files(clean)


def test_batch_and_engine_do_not_change_the_answers(target: Path, tmp_path: Path) -> None:
    files: list[dict[str, bytes]] = []
    for batch in (1, 2):
        made = begin(out := tmp_path / f"{batch}", target, QUESTIONS, generate={"batch": batch})
        assert generate.generate(made, out, never)
        files.append(final_files(out))
    assert files[0] == files[1]


def test_a_finished_stage_is_not_run_again(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = begin(out := tmp_path / "run", target, QUESTIONS)
    assert generate.generate(made, out, never)
    files = final_files(out)
    monkeypatch.setattr(generate, "load_engine", None)  # would raise
    assert generate.generate(made, out, never)
    assert final_files(out) == files


@pytest.mark.parametrize(
    ("table", "field", "value"),
    [
        ("generate", "seed", 1),
        ("generate", "temperature", 0.5),
        ("generate", "max_tokens", 25),
        ("target", "max_tokens", 63),
        ("target", "dtype", "bfloat16"),
        ("corpus", "thinking", True),
    ],
)
def test_other_settings_are_refused_by_name(target: Path, tmp_path: Path, table: str, field: str, value: Any) -> None:
    made = begin(out := tmp_path / "run", target, QUESTIONS)
    assert not generate.generate(made, out, lambda: True)
    other = recipe(target, out.parent / "set.jsonl", **{table: {field: value}})
    corpus.build(other, out)
    name = "corpus.inputs" if table == "corpus" or (table, field) == ("target", "max_tokens") else f"{table}.{field}"
    with pytest.raises(ConfigError, match=f"{name}: .*with which the answers of .*generated were begun"):
        generate.generate(other, out, never)


def test_another_target_is_refused(target: Path, tmp_path: Path) -> None:
    made = begin(out := tmp_path / "run", target, QUESTIONS)
    assert not generate.generate(made, out, lambda: True)
    path = write_target(tmp_path / "tuned")
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["rope_theta"] = 12345.0
    (path / "config.json").write_text(json.dumps(config))
    moved = dataclasses.replace(made, target=dataclasses.replace(made.target, model=str(path)))
    settings = json.loads((out / "generated" / answers.SETTINGS).read_text())
    corpus.build(moved, out)
    built = json.loads((out / "corpus" / "report.json").read_text())["inputs"]
    (out / "generated" / answers.SETTINGS).write_text(json.dumps(settings | {"corpus.inputs": built}))
    with pytest.raises(ConfigError, match=r"target.fingerprint"):
        generate.generate(moved, out, never)


def test_turns_are_asked_with_the_answers_before_them(target: Path, tmp_path: Path) -> None:
    lines = [said(f"q{i}", "a", f"r{i}", "b") for i in range(12)]
    made = begin(out := tmp_path / "run", target, lines, target={"max_tokens": 128})
    assert generate.generate(made, out, never)
    drawn = {(a["id"], a["turn"]): a for a in lines_of(out, answers.ANSWERS)}
    failed = {(f["id"], f["turn"]): f["reason"] for f in lines_of(out, generate.FAILED)}
    tokenizer = Tokenizer.from_dir(target)
    pairs = 0
    for (id, turn), answer in drawn.items():
        if turn == 1:
            first = drawn[id, 0]
            i = int(id.removeprefix("set-")) - 1
            history = [*user(f"q{i}"), *HEAD, THINK, END_THINK, *tokenizer.encode(first["text"]), E]
            assert answer["prompt"] == [*history, *user(f"r{i}"), *HEAD, THINK, END_THINK]
            pairs += answer["reason"] == "stop"
        elif answer["reason"] != "stop":
            assert failed[id, 0] == answer["reason"]
            assert answer["reason"] in ("length", "empty")
            assert failed[id, 1] == "not asked"
    assert pairs >= 2
    bad = {key for key, answer in drawn.items() if answer["reason"] != "stop"}
    assert set(failed) == bad | {(id, 1) for id, turn in bad if turn == 0}
    masked = sum(sum(mask) for prefix in ("", "heldout_") for _, mask in documents(out, prefix))
    assert masked == sum(len(a["ids"]) for a in drawn.values() if a["reason"] == "stop")


def test_only_last_turns_of_whole_conversations(target: Path, tmp_path: Path) -> None:
    lines = [said(f"q{i}", "a", f"r{i}", "b") for i in range(12)]
    made = begin(out := tmp_path / "run", target, lines, target={"max_tokens": 128}, corpus={"turns": "last"})
    assert generate.generate(made, out, never)
    drawn = {(a["id"], a["turn"]): a for a in lines_of(out, answers.ANSWERS)}
    whole = [a for a in drawn.values() if a["turn"] == 1 and a["reason"] == "stop"]
    found = documents(out) + documents(out, "heldout_")
    assert sorted(ids for ids, _ in found) == sorted(a["prompt"] + a["ids"] for a in whole)
    report = json.loads((out / "generated" / "report.json").read_text())
    assert report["answered"] == 2 * len(found) > 0
    assert (report["turns"], report["failed"]) == (24, 24 - 2 * len(found))


def test_thinking_is_part_of_the_answer(target: Path, tmp_path: Path) -> None:
    made = begin(out := tmp_path / "run", target, [said(f"q{i}", "a") for i in range(12)], corpus={"thinking": True})
    assert generate.generate(made, out, never)
    reasons = {f["id"]: f["reason"] for f in lines_of(out, generate.FAILED)}
    for answer in lines_of(out, answers.ANSWERS):
        assert answer["prompt"][-1] == THINK
        if END_THINK not in answer["ids"]:  # it ended before it said anything, or was cut
            assert reasons[answer["id"]] in ("empty", "length")
    good = [a for a in lines_of(out, answers.ANSWERS) if a["reason"] == "stop"]
    assert any(a["reasoning"] for a in good)
    assert "empty" in reasons.values()
    assert {a["id"] for a in good}.isdisjoint(reasons)


def test_prompts_without_room_are_kept_apart(target: Path, tmp_path: Path) -> None:
    lines = [*QUESTIONS, *(said(f"q{i}", "a", "p" * 60, "b") for i in range(6, 12))]
    made = begin(out := tmp_path / "run", target, lines)
    assert generate.generate(made, out, never)
    failed = [f for f in lines_of(out, generate.FAILED) if f["reason"] == "prompt"]
    assert failed
    assert {f["turn"] for f in failed} == {1}
    assert all("target.max_tokens is 64" in f["error"] for f in failed)


def test_no_good_answer_at_all_is_an_error(target: Path, tmp_path: Path) -> None:
    made = begin(out := tmp_path / "run", target, QUESTIONS, generate={"max_tokens": 1})
    with pytest.raises(ConfigError, match="found 'no training answer'"):
        generate.generate(made, out, never)
    assert not (out / "generated" / "report.json").exists()


def test_a_broken_model_is_told_from_a_bad_answer(
    target: Path, engine: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = begin(out := tmp_path / "run", target, QUESTIONS)
    real, broken = engine.engine.step, list[str]()

    def step() -> list[Any]:
        made = real()
        if made and not broken:  # the first of the batch has a logit that is not a number
            broken.append(made[0].request_id)
            engine.engine.cancel(made[0].request_id)
            made[0] = made[0]._replace(tokens=(), finish_reason="abort", error="not a number")
        return made

    monkeypatch.setattr(engine.engine, "step", step)
    assert generate.generate(made, out, never)
    (failed,) = [f for f in lines_of(out, generate.FAILED) if f["reason"] == "abort"]
    assert failed["error"] == "not a number"


def test_the_stage_needs_its_switch_and_a_corpus(target: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "set.jsonl", QUESTIONS)
    with pytest.raises(ConfigError, match="run the stage corpus"):
        generate.generate(recipe(target, file), tmp_path, never)
    with pytest.raises(ConfigError, match=r"generate.enabled: found False"):
        generate.generate(recipe(target, file, generate={"enabled": False}), tmp_path, never)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "report.json").write_text('{"imported": "specforge"}')
    with pytest.raises(ConfigError, match="found 'documents imported from specforge', expected conversations"):
        generate.generate(recipe(target, file), tmp_path, never)


def test_seeds_differ_by_seed_conversation_and_turn() -> None:
    seeds = {generate.answer_seed(s, f"c{c}", t) for s in range(4) for c in range(50) for t in range(5)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert generate.answer_seed(0, "nano-1", 0) == generate.answer_seed(0, "nano-1", 0)


# ---- the file of answers, and conversations with tools -----------------------------------------------------------


def test_damaged_or_foreign_answers_are_refused(tmp_path: Path) -> None:
    good = answers.Answer("a", 0, "stop", (1, 2), (3,), "text", "why").to_line()
    for content, message in (
        (b"{}\n" + good, r"answers.jsonl, line 1: found \"'id'\""),
        (good + b"half\n" + good, "answers.jsonl, line 2"),
        (good + good, r"line 2: found \('a', 0\), expected one answer a turn"),
    ):
        (tmp_path / answers.SETTINGS).write_text("{}")
        (tmp_path / answers.ANSWERS).write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            answers.AnswerFile(tmp_path, {})
    for damaged in ("", "[1]", "{"):
        (tmp_path / answers.SETTINGS).write_text(damaged)
        with pytest.raises(ConfigError, match=r"answers.json: found .*expected the settings of the answers"):
            answers.AnswerFile(tmp_path, {})
    (tmp_path / answers.SETTINGS).unlink()
    with pytest.raises(ConfigError, match=r"answers.json: found 'no such file'"):
        answers.AnswerFile(tmp_path, {})


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with answers.AnswerFile(tmp_path, {"a": 1}), pytest.raises(ConfigError, match="in use by another process"):
        answers.AnswerFile(tmp_path, {"a": 1})
    with answers.AnswerFile(tmp_path, {"a": 1}) as file:
        answer = answers.Answer("a", 0, "stop", (1, 2), (3,), "täxt", "why")
        file.add(answer)
        assert file.get("a", 0) == answer
        assert file.get("a", 1) is None
        with pytest.raises(ValueError, match="a, turn 0: has an answer already"):
            file.add(answer)
    with answers.AnswerFile(tmp_path, {"a": 1}) as file:
        assert file.get("a", 0) == answer
        assert len(file) == 1


def with_tools() -> conversations.Conversation:
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "functions.f:0", "content": "5"},
        {"role": "assistant", "content": "five"},
        {"role": "user", "content": "so"},
        {"role": "assistant", "content": "no"},
    ]
    return conversations.Conversation("c", "set", tuple(messages))


def test_results_of_tools_stay_with_the_calls_of_the_file() -> None:
    given = with_tools()
    state = regeneration.Regeneration(given, CALLS)
    state.take(answers.Answer("c", 0, "stop", (), (*LETTERS, CALLS, E), text="calls something else"))
    assert state.open
    assert state.messages == list(given.messages[:3])
    state.take(answers.Answer("c", 1, "stop", (), (*LETTERS, E), text="anew", reasoning="why"))
    assert state.messages[3:] == [
        {"role": "assistant", "content": "anew", "reasoning_content": "why"},
        {"role": "user", "content": "so"},
    ]
    state.take(answers.Answer("c", 2, "stop", (), (E,), text="end"))
    assert not state.open
    assert state.regenerated.messages == (*state.messages[:5], {"role": "assistant", "content": "end"})
    assert len(state.regenerated.turns) == 3


def test_a_call_whose_result_nobody_knows_ends_the_conversation() -> None:
    state = regeneration.Regeneration(with_tools(), CALLS)
    state.take(answers.Answer("c", 0, "stop", (), (E,), text="x"))
    state.take(answers.Answer("c", 1, "stop", (), (CALLS, E), text="calls again"))
    assert not state.open
    assert state.unasked == "turn 1 calls tools, whose results nobody knows"
    assert len(state.good) == 2
    assert state.regenerated.messages[-1]["content"] == "calls again"


def test_tokens_are_of_the_targets_width(target: Path, tmp_path: Path) -> None:
    made = begin(out := tmp_path / "run", target, QUESTIONS)
    assert generate.generate(made, out, never)
    assert packing.Documents.load(out / "generated").tokens.dtype == np.uint16
