"""Engines on the embedded model, prompts for them, and how far two texts are from being the same."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kimijax import checkpoint
from kimijax.config import load_config
from kimijax.draft_checkpoint import load_draft
from kimijax.draft_record import read_record
from kimijax.drafter import Drafter
from kimijax.engine.config import EngineConfig
from kimijax.engine.engine import Engine
from kimijax.engine.request import Request
from kimijax.loader import NANO, NANO_DRAFTER, load_tokenizer
from kimijax.model import Target
from kimijax.sampling import SamplingRows, gumbel
from kimijax.speculative_options import SpeculativeOptions

FIXTURE = Path(__file__).parent / "fixtures" / "nano_prompts.json"
CONTEXT = 128  # tokens of prompt and answer


@functools.cache
def models() -> tuple[Target, Drafter]:
    target = checkpoint.load(NANO, load_config(NANO), dtype=jnp.float32, unpack_int4=True)
    record = read_record(NANO_DRAFTER)
    assert record is not None
    return target, load_draft(NANO_DRAFTER, record.contract.wiring, target, dtype=jnp.float32)


@functools.cache
def n_tokens_and_ends() -> tuple[int, tuple[int, ...]]:
    tokenizer, _ = load_tokenizer(NANO, load_config(NANO))
    assert tokenizer is not None
    return tokenizer.vocab_size, tuple(sorted(tokenizer.stop_ids))


@functools.cache
def nano_engine(k: int = 0, width: int = 1, n_verified: int = 0, batch_factor: int = 8) -> Engine:
    """Of k drafts, 0: without a drafter; a tree of `n_verified` tokens where width is more than 1. For `variant`."""
    target, drafter = models()
    n_tokens, ends = n_tokens_and_ends()
    options = SpeculativeOptions("EAGLE3", k, width, n_verified or k + 1, adaptive=False) if k else None
    sizes = EngineConfig(
        max_batch=8, context_length=CONTEXT, page_size=16, chunk_size=64, burst=8, batch_factor=batch_factor
    )
    own = drafter if k else None
    return Engine(target, sizes, drafter=own, speculation=options, n_tokens=n_tokens, stop_ids=ends)


def prompts(n: int) -> list[list[int]]:
    """The fixture's questions, then beginnings of one with the end of another: many share their first tokens."""
    questions: list[list[int]] = json.loads(FIXTURE.read_text())
    rng = np.random.default_rng(0)
    made = [*questions]
    while len(made) < n:
        first, second = (questions[i] for i in rng.integers(0, len(questions), 2))
        made.append([*first[: rng.integers(1, len(first))], *second[rng.integers(0, len(second) - 1) :]])
    return made[:n]


@functools.cache
def _whole() -> Any:
    graph, state = nnx.split(models()[0])
    run = jax.jit(lambda state, ids: nnx.merge(graph, state)(ids).logits)
    return functools.partial(run, state)


def gap(request: Request, one: Sequence[int], other: Sequence[int]) -> float:
    """How much one logit would have to change for the first token in which two outputs differ to be the other's.

    Infinite where one output goes on behind the other's end, and for requests with rules.
    """
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if at is None or request.needs_rules:
        return float("inf")
    ids = [*request.prompt, *one[:at]]
    row = np.zeros((1, 2 * CONTEXT), np.int32)
    row[0, : len(ids)] = ids
    scores = np.asarray(_whole()(row))[0, len(ids) - 1].astype(np.float64)
    t = request.sampling.temperature
    if not request.is_greedy:
        seed = SamplingRows.of([t], [0], [1.0], [0.0], [request.seed]).seed
        scores += t * np.asarray(gumbel(jnp.asarray(seed), jnp.asarray([len(ids)], jnp.int32), len(scores)))[0]
    return float(abs(scores[one[at]] - scores[other[at]]))
