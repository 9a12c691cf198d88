"""Exported drafts in the unmodified draft classes of other engines: kimijax computes what they computed.

The golden files hold the outputs of speculators, vLLM and SGLang on the drafts of `golden.engine_cases`. Each draft is
made again here, byte for byte, and run as it is served: a prompt, then a chain fed its own features.
"""

from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from kimijax.draft_checkpoint import load_draft
from kimijax.drafter import draft_cache

from .golden import HERE, engine_drafts, engine_trace
from .golden.engine_cases import CASES, PROMPT, ROWS, TAPS, Case, digest, inputs
from .test_drafter import LIMIT, Programs, relative_error
from .test_model import run_forward

ARRAYS = ("features", "feedback", "logits")


@pytest.fixture(scope="module")
def golden() -> Mapping[str, np.ndarray]:
    out: dict[str, np.ndarray] = {}
    for engine in sorted({case.engine for case in CASES}):
        with np.load(HERE / f"engines_{engine}.npz") as file:
            out |= {name: file[name] for name in file.files}
    return out


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_an_engine_computes_what_we_do(case: Case, golden: Mapping[str, np.ndarray], tmp_path: Path) -> None:
    export = engine_drafts.write(case, tmp_path)
    assert digest(export) == golden[f"{case.key}/sha256"], "the export has changed: run make_engine_golden again"
    drafter = engine_drafts.load(case, export)
    assert drafter.config.window == case.window
    given = inputs()
    taps = np.split(given.taps[None, :PROMPT], len(TAPS), axis=2)
    features = drafter.fuse({tap: jnp.asarray(x) for tap, x in zip(TAPS, taps, strict=True)})
    cache = draft_cache(drafter.config, 1, PROMPT + case.chain, drafter.dtype)
    ids = jnp.asarray(given.ids, jnp.int32)
    hidden, cache = drafter.decode(ids[None, :PROMPT], features, jnp.zeros(1, jnp.int32), cache)
    feedback = [hidden.feedback[0, row] for row in ROWS]
    kept = [drafter.logits(hidden.normed)[0, row] for row in ROWS]
    state = hidden.feedback[:, -1]
    for j in range(case.chain):
        out, cache = drafter.step(ids[PROMPT + j][None], state, jnp.asarray([PROMPT + j], jnp.int32), cache)
        state = out.feedback
        feedback.append(state[0])
        kept.append(out.logits[0])
    found = (features[0, list(ROWS)], jnp.stack(feedback), jnp.stack(kept))
    for name, value in zip(ARRAYS, found, strict=True):
        right = golden[f"{case.key}/{name}"]
        assert value.shape == right.shape
        assert relative_error(value, right.astype(np.float64)) < LIMIT, name
    target_ids = drafter.to_target(jnp.arange(drafter.config.draft_vocab_size))
    np.testing.assert_array_equal(target_ids, golden[f"{case.key}/target_ids"])


def test_a_request_served_by_vllm(tmp_path: Path) -> None:
    """vLLM's engine with our target and draft: the tokens it generated and what it drafted in every round are ours."""
    with np.load(HERE / "engines_trace.npz") as file:
        golden = {name: file[name] for name in file.files}
    export = engine_drafts.write_trace(tmp_path)
    assert digest(export) == str(golden["sha256"]), "the export has changed: run make_engine_golden again"
    target = engine_drafts.load_trace_target(tmp_path)
    drafter = load_draft(export, engine_drafts.TRACE_WIRING, target, dtype=jnp.float32)
    prompt, ids = len(engine_trace.PROMPT), np.concatenate([engine_trace.PROMPT, golden["output"]])
    logits, taps, _ = run_forward(target, ids, engine_trace.TAPS)
    np.testing.assert_array_equal(np.asarray(logits)[0, prompt - 1 : -1].argmax(axis=1), golden["output"])
    programs = Programs(drafter)
    features = programs.fuse(taps)
    cache, done = draft_cache(drafter.config, 1, len(ids) + engine_trace.STEPS, drafter.dtype), 0
    assert (golden["accepted"] > 1).any(), "no round that accepts several tokens"
    for at, drafts in zip(golden["position"].tolist(), golden["drafts"].tolist(), strict=True):
        # What was accepted is run again with the target's features, over the rows that the draft's own had written.
        fed, scores, cache = programs.decode(ids[None, done + 1 : at + 2], features[:, done : at + 1], [done], cache)
        found = [int(drafter.to_target(scores[0, -1].argmax()))]
        state, done = fed[:, -1], at + 1
        for j in range(1, engine_trace.STEPS):
            out, cache = programs.step([found[-1]], state, [at + j], cache)
            state = out.feedback
            found.append(int(drafter.to_target(out.logits[0].argmax())))
        assert found == drafts, f"round at position {at}"


def test_every_output_of_the_files_is_compared(golden: Mapping[str, np.ndarray]) -> None:
    names = {f"{case.key}/{name}" for case in CASES for name in (*ARRAYS, "sha256", "target_ids")}
    assert names == set(golden)
