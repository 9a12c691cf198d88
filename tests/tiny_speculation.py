"""A tiny target, and drafters made for it by hand so that part of what they propose is accepted.

The target's layers add little to the embedding, so that its next token follows mostly from its last one. The drafter's
attention finds a row's own token and copies its embedding, as the target's residual stream does; noise on every weight
makes it wrong now and then, and lets features, positions and other rows matter.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kimijax.config import TargetConfig, parse_config
from kimijax.draft_config import DraftConfig, LlamaAttentionConfig, mla_attention
from kimijax.drafter import Drafter, declare_drafter, initialise_drafter
from kimijax.model import Target, declare_target, initialise
from kimijax.names import parameters
from kimijax.sampling import SamplingRows
from kimijax.speculator import Speculator
from kimijax.wiring import Wiring

from .golden import FAMILIES

VOCAB = 32
LAYER_STRENGTH = 0.35  # of what a layer adds
DRAFT_IDS = tuple(i for i in range(VOCAB) if i % 8 != 5)  # a reduced vocabulary
PROMPTS = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (3, 20, 16, 1, 33, 9)]
LIMITS = (20, 20, 7, 20, 20, 1)

GREEDY: Mapping[str, float] = {"temperature": 0.0}


def settings(rows: Sequence[Mapping[str, float]]) -> SamplingRows:
    """One row for each: fields of SamplingRows, those left out at 1.0 or off, the seed the row's number."""

    def column(name: str, default: float) -> list[Any]:
        return [r.get(name, default) for r in rows]

    seeds = [int(r.get("seed", i)) for i, r in enumerate(rows)]
    top_k = [int(x) for x in column("top_k", 0)]
    coupled = [bool(x) for x in column("coupled", 0)]
    return SamplingRows.of(
        column("temperature", 1.0), top_k, column("top_p", 1.0), column("min_p", 0.0), seeds, coupled
    )


def target_config(vocab: int = VOCAB) -> TargetConfig:
    """Two layers, the second with experts; the smaller vocabulary comes with the first alone."""
    n_layers = 2 if vocab == VOCAB else 1
    return dataclasses.replace(parse_config(FAMILIES["deepseek_v3"]), n_layers=n_layers, vocab_size=vocab)


@functools.cache
def tiny_target(vocab: int = VOCAB, strength: float = LAYER_STRENGTH, seed: int = 0) -> Target:
    target = initialise(declare_target(target_config(vocab), dtype=jnp.dtype(jnp.float32), int4=False), seed)
    for path, param in parameters(target).items():
        if path[-1] in ("o", "down"):
            param.set_value(param.get_value() * strength)
    target.lm_head.set_value(target.lm_head.get_value() * 3.0)
    return target


def wiring(target: Target) -> Wiring:
    n = target.config.n_layers
    return Wiring(tuple(range(n + 1)), n, target.config.hidden)


@functools.cache
def tiny_drafter(kind: str = "llama", vocab: int = VOCAB, noise: float = 0.15, window: int | None = None) -> Drafter:
    """kind: llama (reduced vocabulary), or mla (full; random, hardly anything it proposes is accepted)."""
    target = tiny_target(vocab)
    t, d = target.config, target.config.hidden
    ids = [i for i in DRAFT_IDS if i < vocab] if kind == "llama" else list(range(vocab))
    llama = LlamaAttentionConfig(n_heads=4, n_kv_heads=4, head_dim=d // 4, rope_theta=10000.0)
    mla = mla_attention(t, hidden=d, mlp_width=32, norm_eps=t.norm_eps, max_positions=512)
    config = DraftConfig(
        attention=llama if kind == "llama" else mla,
        vocab_size=vocab,
        draft_vocab_size=len(ids),
        hidden=d,
        target_hidden=d,
        n_taps=t.n_layers + 1,
        mlp_width=32,
        norm_eps=t.norm_eps,
        max_positions=512,
        fc_norm=kind == "mla",
        norm_output=kind == "mla",
        norm_before_residual=kind == "llama",
        window=window,
    )
    drafter = declare_drafter(config, wiring(target), dtype=jnp.dtype(jnp.float32))
    initialise_drafter(drafter, target, ids, seed=1)
    if kind == "llama":
        _copy_own_token(drafter, target, ids, noise)
    return drafter


def _copy_own_token(drafter: Drafter, target: Target, ids: list[int], noise: float) -> None:
    d = target.config.hidden
    own = np.concatenate([np.eye(d), np.zeros((d, d))], axis=1).reshape(4, d // 4, 2 * d)
    exact = {"q": 1.6 * own, "k": 1.6 * own, "v": 4.0 * own, "o": np.eye(d).reshape(d, 4, d // 4)}
    exact["lm_head"] = np.asarray(target.lm_head.get_value())[ids]
    for path, param in parameters(drafter).items():
        value = np.asarray(param.get_value())
        if path[-1] in exact:
            value = exact[path[-1]] + noise * value * np.abs(exact[path[-1]]).max()
        elif value.ndim > 1:
            value = noise * value
        param.set_value(jnp.asarray(value, jnp.float32))


@functools.cache
def speculator(
    kind: str = "llama",
    *,
    vocab: int = VOCAB,
    batch: int = 4,
    context: int = 64,
    chunk: int = 16,
    stop_ids: tuple[int, ...] = (),
    n_tokens: int = 0,
    noise: float = 0.15,
) -> Speculator:
    return Speculator(
        tiny_target(vocab),
        tiny_drafter(kind, vocab, noise),
        n_tokens=n_tokens or vocab,
        stop_ids=stop_ids,
        batch=batch,
        context_length=context,
        chunk=chunk,
    )


@functools.cache
def plain_logits(ids: tuple[int, ...], vocab: int = VOCAB) -> np.ndarray:
    """float32 [T, V] of one pass over a whole sequence, no cache."""
    return np.asarray(whole(vocab)(np.asarray([(*ids, *(0,) * (64 - len(ids)))], np.int32)))[0, : len(ids)]


@functools.cache
def whole(vocab: int = VOCAB) -> Any:
    graph, state = nnx.split(tiny_target(vocab))
    run = jax.jit(lambda state, ids: nnx.merge(graph, state)(ids).logits)
    return functools.partial(run, state)
