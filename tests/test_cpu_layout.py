"""Weights as they lie on a CPU: the same products as in the declared form, and models that answer the same."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimijax.attention import masked_softmax
from kimijax.cache import Window
from kimijax.cpu_layout import arrange_for_cpu
from kimijax.draft_attention import LlamaAttention, attend
from kimijax.draft_config import LlamaAttentionConfig
from kimijax.drafter import Borrowed, Drafter, borrow, declare_drafter, draft_cache, initialise_drafter
from kimijax.layers import InputFirst, linear
from kimijax.model import Target, declare_target, initialise
from kimijax.names import parameters
from kimijax.pallas_kernels import ExpertList
from kimijax.sharding import make_mesh

from .tiny_speculation import VOCAB, target_config, tiny_drafter, wiring

RNG = np.random.default_rng(0)


def random(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def models(kind: str) -> tuple[Target, Drafter]:
    """Fresh ones, that a test may change; the target's second layer has 8 experts, 2 of them chosen."""
    config = target_config()
    assert config.moe is not None
    moe = dataclasses.replace(config.moe, n_experts=8, n_chosen=2, n_groups=1, n_groups_kept=1)
    config = dataclasses.replace(config, n_dense_layers=1, moe=moe)
    target = initialise(declare_target(config, dtype=jnp.dtype(jnp.float32), int4=False), seed=0)
    return target, copy.deepcopy(tiny_drafter(kind))


@pytest.mark.parametrize("rows", [(1,), (2,), (1, 1), (3, 5)])
@pytest.mark.parametrize(("shape", "n_inputs"), [((24, 16), 1), ((2, 12, 16), 1), ((24, 4, 4), 2)])
def test_linear_of_inputs_first(rows: tuple[int, ...], shape: tuple[int, ...], n_inputs: int) -> None:
    w, x = random(*shape), random(*rows, *shape[len(shape) - n_inputs :])
    right = np.asarray(x, np.float64).reshape(*rows, 16) @ np.asarray(w, np.float64).reshape(24, 16).T
    right = right.reshape(*rows, *shape[: len(shape) - n_inputs])
    stored = InputFirst.of(w, n_inputs)
    assert stored.matrix.shape == (16, 24)
    for form in (w, stored):
        found = linear(x, form, n_inputs=n_inputs)
        assert found.shape == right.shape
        np.testing.assert_allclose(found, right, atol=1e-5)
    bf16 = jnp.dtype(jnp.bfloat16)
    in_bf16 = linear(x.astype(bf16), stored.astype(bf16), jnp.dtype(jnp.float32), n_inputs=n_inputs)
    assert in_bf16.dtype == jnp.float32
    np.testing.assert_allclose(in_bf16, right, atol=0.2)


def test_some_of_the_inputs() -> None:
    w, x = random(2, 12, 16), random(3, 6)
    np.testing.assert_allclose(linear(x, InputFirst.of(w, 1)[..., 4:10]), linear(x, w[..., 4:10]), atol=1e-5)


def test_a_row_is_the_same_whatever_the_others_are() -> None:
    stored, x, others = InputFirst.of(random(64, 32), 1), random(4, 32), random(4, 32)
    mixed = jnp.concatenate([x[:1], others[1:]])
    np.testing.assert_array_equal(linear(x, stored)[0], linear(mixed, stored)[0])


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("t", [1, 3])
def test_key_heads_apart_equal_all_at_once(n_kv_heads: int, t: int) -> None:
    config = LlamaAttentionConfig(n_heads=4, n_kv_heads=n_kv_heads, head_dim=8, rope_theta=10000.0)
    attention = LlamaAttention(config, 32, jnp.dtype(jnp.float32))
    query, rows = random(2, t, 4, 8), random(2, 10, n_kv_heads * 16)
    visible = jnp.arange(10)[None, None] <= jnp.asarray([[2], [9]])[..., None] - jnp.zeros((2, t, 1), jnp.int32)
    right = attend(query, *attention.expand(rows), attention.scale, visible)
    np.testing.assert_allclose(attention.over(query, rows, visible), right, atol=1e-5)
    # one query head by hand: head 3 reads the last key head
    keys, values = (np.asarray(x, np.float64)[1, :, -1] for x in attention.expand(rows))
    p = np.asarray(masked_softmax(jnp.asarray(keys @ np.asarray(query)[1, 0, 3] * 8**-0.5), visible[1, 0]))
    np.testing.assert_allclose(right[1, 0, 3], p @ values, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "mla"])
def test_models_answer_the_same(kind: str) -> None:
    target, drafter = models(kind)
    ids = jnp.asarray(RNG.integers(0, VOCAB, (2, 5)), jnp.int32)

    def answers(ids: jax.Array) -> list[jax.Array]:
        taps = drafter.wiring.taps
        c, start = target.config, jnp.zeros(2, jnp.int32)
        window = Window(tuple(jnp.zeros((2, 8, c.latent_dim)) for _ in range(c.n_layers)))
        hidden, window = target.decode(ids, start, window, taps=taps)
        one, _ = target.decode(ids[:1, :1], start[:1] + 5, Window(tuple(x[:1] for x in window.layers)))
        cache = draft_cache(drafter.config, 2, 8, jnp.dtype(jnp.float32))
        draft, cache = drafter.decode(ids, drafter.fuse(hidden.taps), start, cache)
        step, _ = drafter.step(ids[:, 0], draft.feedback[:, -1], start + 5, cache)
        return [target.logits(hidden.last), one.last, step.logits]

    before = jax.jit(answers)(ids)
    arrange_for_cpu(target, drafter)
    after = jax.jit(lambda ids: answers(ids))(ids)  # another function: the weights are constants of the first
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(b, a, atol=1e-4 * float(jnp.abs(a).max()))


def test_what_is_arranged() -> None:
    target, drafter = models("llama")
    size = sum(p.get_value().nbytes for p in parameters(target).values())
    arrange_for_cpu(target, drafter)
    values = {path: param.get_value() for path, param in parameters(target).items()}
    found = {path[-1] for path, value in values.items() if isinstance(value, InputFirst)}
    assert found == {"lm_head", "q_a", "q_b", "kv_a", "o", "gate_up", "down"}
    listed = {path for path, value in values.items() if isinstance(value, ExpertList)}
    assert listed == {("layers", 1, "mlp", "experts", name) for name in ("gate_up", "down")}
    now = [p.get_value() for p in parameters(target).values()]
    assert sum(x.nbytes for x in jax.tree.leaves(now)) == size
    arrange_for_cpu(target, drafter)  # again
    again = [p.get_value() for p in parameters(target).values()]
    assert all(a is b for a, b in zip(jax.tree.leaves(now), jax.tree.leaves(again), strict=True))


def test_what_is_borrowed_stays_the_target_s_own() -> None:
    target, trained = models("mla")
    drafter = declare_drafter(trained.config, wiring(target), dtype=jnp.dtype(jnp.float32), own_head=False)
    initialise_drafter(drafter, target, list(range(VOCAB)), seed=1)
    assert isinstance(drafter.lm_head, Borrowed)
    features = random(1, 3, drafter.config.hidden)
    before = drafter.logits(features)
    arrange_for_cpu(target, drafter)
    own, lent = drafter.lm_head.get_value(), target.lm_head.get_value()
    assert isinstance(own, InputFirst)
    assert isinstance(lent, InputFirst)
    assert own.matrix is lent.matrix
    assert drafter.embed.get_value() is target.embed.get_value()
    np.testing.assert_allclose(drafter.logits(features), before, atol=1e-5)
    borrow(drafter, target)  # a loader may do it again


def test_nothing_changes_on_a_mesh_or_in_bfloat16() -> None:
    target, _ = models("llama")
    arrange_for_cpu(target, mesh=make_mesh(jax.devices()[:2]))
    assert all(isinstance(p.get_value(), jax.Array) for p in parameters(target).values())
    for param in parameters(target).values():
        param.set_value(param.get_value().astype(jnp.bfloat16))
    arrange_for_cpu(target)
    assert all(isinstance(p.get_value(), jax.Array) for p in parameters(target).values())
