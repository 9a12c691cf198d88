"""The stage `evaluate`: what it reports is what the served program does, and greedy text is checked on the way."""

import dataclasses
import hashlib
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from kimijax.acceptance import Acceptance
from kimijax.errors import ConfigError
from kimijax.sampling import SamplingRows
from kimijax.speculator import Generation
from kimijax.train import draft_recipe
from kimijax.train import evaluate as stage

from .tiny_speculation import speculator, tiny_drafter, tiny_target

VOCAB = 8
RECIPE = draft_recipe.EvaluateTable(draft_tokens=3, prompts=3, max_tokens=14, temperatures=(0.0, 1.0), seed=5)
STOP = 6


def prompts(n: int = 5) -> list[stage.Prompt]:
    rng = np.random.default_rng(0)
    return [stage.Prompt(f"p{i}", "ab"[i % 2], tuple(rng.integers(0, VOCAB, 2 + 4 * i).tolist())) for i in range(n)]


@pytest.fixture(scope="module")
def evaluation() -> stage.Evaluation:
    models = tiny_target(VOCAB), tiny_drafter(vocab=VOCAB)
    return stage.evaluate(RECIPE, prompts(), *models, n_tokens=VOCAB, stop_ids=(STOP,), updates=40, batch=3)


def test_reported_acceptance_is_the_served_programs(evaluation: stage.Evaluation) -> None:
    """The same prompts, one after the other through a batch of another size: every counter is the same."""
    made = speculator(vocab=VOCAB, stop_ids=(STOP,))
    for found, temperature in zip(evaluation.measured, (0.0, 1.0), strict=True):
        served: dict[str, list[Generation]] = {"a": [], "b": []}
        for prompt in prompts():
            seed = int.from_bytes(hashlib.sha256(f"5:{prompt.id}".encode()).digest()[:8])
            rows = SamplingRows.of([temperature], [0], [1.0], [0.0], [seed])
            served[prompt.dataset] += made.generate([prompt.ids], rows, [14], k=3)
        assert [d.dataset for d in found.datasets] == ["a", "b"]
        for result in found.datasets:
            own = served[result.dataset]
            rounds = [r.accepted for g in own for r in g.rounds]
            assert result.acceptance == Acceptance.of(rounds, 3)
            assert result.tokens == sum(len(g.tokens) for g in own)
            assert result.prompts == len(own)
        assert found.total == Acceptance.of([r.accepted for g in served["a"] + served["b"] for r in g.rounds], 3)
        assert 1.2 < found.total.length < 3.9
    assert evaluation.measured[0].ties == 0
    assert evaluation.measured[1].ties is None


def test_the_file_holds_it_all(evaluation: stage.Evaluation, tmp_path: Path) -> None:
    path = tmp_path / stage.FOLDER / stage.FILE
    with pytest.raises(ConfigError, match="run the stage evaluate"):
        stage.read(tmp_path)
    path.parent.mkdir()
    data = json.loads(json.dumps(evaluation.to_json(), allow_nan=False))
    path.write_text(json.dumps(data))
    assert stage.read(tmp_path) == evaluation
    assert data["updates"] == 40
    first = evaluation.measured[0].total
    assert data["measured"][0]["total"]["length"] == first.length
    assert data["measured"][0]["total"]["conditional"] == list(first.conditional)
    data["measured"][0]["datasets"][0]["acceptance"]["rounds"] += 1
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="the sum of its data sets"):
        stage.read(tmp_path)
    path.write_text('{"format": 2}')
    with pytest.raises(ConfigError, match="format"):
        stage.read(tmp_path)


def test_the_table_names_every_data_set(evaluation: stage.Evaluation) -> None:
    lines = stage.table(evaluation).splitlines()
    assert len(lines) == 1 + 3 + 1 + 3
    assert [line.split()[1] for line in lines[1:3]] == ["a", "b"]
    assert f"{evaluation.measured[0].total.length:.3f}" in lines[3]
    assert "ties that rounding decided otherwise: 0" in lines[4]


def answer(*tokens: int) -> Generation:
    return Generation(tokens, "length", ())


def test_only_a_tie_excuses_another_text() -> None:
    """Tokens 2 and 3 have the same row of the head; 4 has another."""
    target = tiny_target(VOCAB, seed=4)
    head = np.array(target.lm_head.get_value())
    head[3] = head[2]
    target.lm_head.set_value(jnp.asarray(head))
    some = prompts(2)
    same = [answer(0, 1, 2), answer(5)]
    assert stage.count_ties(target, some, same, same, VOCAB) == 0
    assert stage.count_ties(target, some, [answer(0, 3, 7), answer(5)], [answer(0, 2, 6), answer(5)], VOCAB) == 1
    with pytest.raises(RuntimeError, match="prompt p1: with drafts token 0 of the answer is 4, without 2"):
        stage.count_ties(target, some, [same[0], answer(4)], [same[0], answer(2)], VOCAB)
    with pytest.raises(RuntimeError, match="answers of 1 and 2 tokens"):
        stage.count_ties(target, some, [same[0], answer(5)], [same[0], answer(5, 6)], VOCAB)


def test_some_prompts_of_each_data_set(tmp_path: Path) -> None:
    recipe = draft_recipe.load_draft_recipe("nano")
    recipe = dataclasses.replace(recipe, evaluate=dataclasses.replace(recipe.evaluate, prompts=2))
    with pytest.raises(ConfigError, match="run the stage corpus"):
        stage.load_prompts(recipe, tmp_path)
    (tmp_path / "generated").mkdir()
    (tmp_path / "generated" / "report.json").write_text("{}")
    lines = [json.dumps({"id": p.id, "dataset": p.dataset, "ids": list(p.ids)}) for p in prompts(7)]
    (tmp_path / "generated" / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    assert [p.id for p in stage.load_prompts(recipe, tmp_path)] == ["p0", "p1", "p2", "p3"]


def test_what_cannot_be_evaluated_is_refused() -> None:
    models = tiny_target(VOCAB), tiny_drafter(vocab=VOCAB)
    with pytest.raises(ConfigError, match="hold out more"):
        stage.evaluate(RECIPE, [], *models, n_tokens=VOCAB, stop_ids=())
    long = dataclasses.replace(RECIPE, max_tokens=600)
    with pytest.raises(ConfigError, match="512, the drafter's"):
        stage.evaluate(long, prompts(), *models, n_tokens=VOCAB, stop_ids=())
