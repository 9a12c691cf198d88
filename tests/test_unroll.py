"""The unrolled steps of training against the server's programs, a NumPy reference and an explicit mask."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimijax.chained_attention import chained
from kimijax.drafter import Drafter, declare_drafter, draft_cache
from kimijax.unroll import unroll, valid_rows

from .test_drafter import LIMIT, WIRING, Programs, T, make, random_inputs, relative_error

N_STEPS = 4
KINDS = {
    **{name: (name, {}) for name in ("llama eagle-3.1", "llama window", "mla eagle-3.1")},
    "llama norm_before_residual": ("llama norm_before_residual", {}),
    "mla window": ("mla without q rank", {"window": 3}),
}


def build(directory: Path, kind: str) -> Drafter:
    variant, changes = KINDS[kind]
    loaded, _ = make(directory, variant)
    drafter = declare_drafter(dataclasses.replace(loaded.config, **changes), WIRING, dtype=jnp.dtype(jnp.float32))
    nnx.update(drafter, nnx.state(loaded))
    return drafter


def unroller(drafter: Drafter) -> Callable[..., list[jax.Array]]:
    """Logits [B, T, Vd] of every step from (features, ids, positions, segments), compiled."""
    graph, state = nnx.split(drafter)

    @jax.jit
    def program(state: Any, features: Any, ids: Any, positions: Any, segments: Any) -> list[jax.Array]:
        d = nnx.merge(graph, state)
        return [d.logits(h) for h in unroll(d, features, ids, positions, segments, N_STEPS)]

    return lambda features, ids, *a: program(state, features, jnp.asarray(ids, jnp.int32), *a)


def one_document(n_rows: int = 2, length: int = T) -> tuple[jax.Array, jax.Array]:
    """Positions and segments of rows that hold one document each."""
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (n_rows, length))
    return positions, jnp.zeros((n_rows, length), jnp.int32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_equals_the_servers_step(kind: str, tmp_path: Path) -> None:
    """Forcing the true tokens: decode over true features up to row t, then j steps over the cache, each fed its
    predecessor's output. Every row of every step is compared."""
    drafter = build(tmp_path, kind)
    programs = Programs(drafter)
    ids, taps = random_inputs()
    features = np.asarray(programs.fuse(taps))
    found = unroller(drafter)(features, ids, *one_document())
    rows = T - N_STEPS  # the last rows have no true token for the later steps
    following = ids[:, 1:]
    empty = draft_cache(drafter.config, 2, T, jnp.dtype(jnp.float32))
    feedback, logits, prefix = programs.decode(following[:, :rows], features[:, :rows], [0, 0], empty)
    for t in range(rows):
        cache, fed = prefix, feedback[:, t]
        assert relative_error(found[0][:, t], np.asarray(logits[:, t])) < LIMIT
        for j in range(1, N_STEPS):
            # Rows after t are in the cache, and not seen; each step overwrites one of them.
            out, cache = programs.step(following[:, t + j], fed, [t + j] * 2, cache)
            fed = out.feedback
            assert relative_error(found[j][:, t], np.asarray(out.logits)) < LIMIT


@pytest.mark.parametrize("variant", ["llama eagle-3.1", "llama window", "mla"])
def test_a_step_equals_the_reference(variant: str, tmp_path: Path) -> None:
    """The chain of a NumPy implementation, grown anew from each position."""
    drafter, reference = make(tmp_path, variant)
    ids, taps = random_inputs()
    features = Programs(drafter).fuse(taps)
    found = unroller(drafter)(features, ids, *one_document())
    right = reference.fuse([taps[t][0] for t in WIRING.taps])
    for t in range(T - N_STEPS):
        steps = reference.chain(ids[0, 1 : t + 2], right[: t + 1], ids[0, t + 2 : t + 1 + N_STEPS].tolist())
        for j, (_, logits) in enumerate(steps):
            assert relative_error(found[j][0, t], logits) < LIMIT


def visible(length: int, step: int, window: int | None, segments: Any = None) -> Any:
    """Which keys a query sees, from the attention itself: bool [T, step + 1, T], by (step, index) of the key.

    With queries of zeros all visible keys weigh the same, and with unit vectors as values the output names them.
    """
    positions, one = one_document(1, length)
    segments = one if segments is None else jnp.asarray([segments], jnp.int32)
    values = jnp.eye((step + 1) * length).reshape(1, step + 1, 1, length, -1)
    query, keys = jnp.zeros((1, length, 1, 2)), jnp.zeros((1, 1, length, 2))
    own_keys, own_values = (keys,) * step, tuple(values[:, 1 + i] for i in range(step))
    program = jax.jit(chained, static_argnums=(7, 8))
    out = program(query, keys, values[:, 0], own_keys, own_values, positions, segments, 1.0, window)
    return (np.asarray(out) > 0).reshape(length, step + 1, length)


def test_the_mask_is_the_servers() -> None:
    """Small examples, written out, then every query against the rule."""
    assert np.argwhere(visible(4, 2, None)[1]).tolist() == [[0, 0], [0, 1], [1, 1], [2, 1]]
    assert np.argwhere(visible(5, 3, None)[0]).tolist() == [[0, 0], [1, 0], [2, 0], [3, 0]]
    for window in (None, 1, 3):
        for step in (0, 1, 3):
            found = visible(6, step, window)
            for t, i, s in np.ndindex(found.shape):
                right = s <= t if i == 0 else s == t
                if window is not None:
                    right = right and (t + step) - (s + i) < window
                assert found[t, i, s] == right, (window, step, t, i, s)
    packed = visible(5, 1, None, [0, 0, 0, 1, 1])
    assert np.argwhere(packed[3]).tolist() == [[0, 3], [1, 3]]
    assert not visible(3, 0, None, [0, -1, -1])[1:].any()


def test_positions_are_the_servers(tmp_path: Path) -> None:
    """Queries and keys of step j turn by t + j: the keys that (length 4, step 2, index 1) sees stand at 0, 1, 2, 3."""
    drafter, _ = make(tmp_path, "llama")
    ids, taps = random_inputs()
    features = drafter.fuse({k: jnp.asarray(v[:, :4]) for k, v in taps.items()})
    rotated: list[np.ndarray] = []
    project = drafter.attention.project

    def spy(inputs: Any, positions: jax.Array) -> Any:
        rotated.append(np.asarray(positions[0]))
        return project(inputs, positions)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter.attention, "project", spy)
        unroll(drafter, features, jnp.asarray(ids[:, :4], jnp.int32), *one_document(2, 4), 3)
    at = np.stack(rotated)  # [step, index]
    seen = visible(4, 2, None)[1]
    assert at[2, 1] == 3
    assert at[seen].tolist() == [0, 1, 2, 3]


def test_valid_rows() -> None:
    def rows(answer: list[int], length: int, segments: list[int] | None = None) -> list[list[int]]:
        mask = jnp.zeros((1, length), bool).at[0, jnp.asarray(answer)].set(True)
        of = jnp.zeros((1, length), jnp.int32) if segments is None else jnp.asarray([segments], jnp.int32)
        return [np.flatnonzero(v[0]).tolist() for v in np.asarray(valid_rows(mask, of, 3))]

    assert rows([3, 4, 5, 6], 8) == [[2, 3, 4], [2, 3], [2]]
    assert rows([3, 4, 5, 9, 10, 11, 12], 14) == [[2, 3, 8, 9, 10], [2, 8, 9], [8]]
    # Two documents of 3 and 2 tokens, all of answers: row 1's label would be the neighbour's first token.
    assert rows([0, 1, 2, 3, 4], 5, [0, 0, 0, 1, 1]) == [[0], [], []]
    assert rows([0, 1, 2, 3], 4, [0, -1, -1, -1]) == [[], [], []]
    # An answer that the length limit has cut to one token has nothing to learn from.
    assert rows([7], 8) == [[], [], []]


def test_packed_documents_are_strangers(tmp_path: Path) -> None:
    """Two documents in a row give what they give alone, and the second does not feel a change of the first."""
    drafter, _ = make(tmp_path, "llama")
    ids, taps = random_inputs()
    cut, n = 5, 10
    ids, features = ids[:, :n], Programs(drafter).fuse(taps)[:, :n]
    segments = jnp.asarray([[0] * cut + [1] * cut] * 2, jnp.int32)
    positions = jnp.asarray([[*range(cut), *range(cut)]] * 2, jnp.int32)
    program = unroller(drafter)
    found = program(features, ids, positions, segments)
    changed = program(features.at[:, :cut].multiply(2.0), np.where(np.arange(n) < cut, 3, ids), positions, segments)
    for first in (0, cut):
        document = slice(first, first + cut)
        alone = program(features[:, document], ids[:, document], *one_document(2, cut))
        for j in range(N_STEPS):
            rows = cut - 1 - j  # the others' tokens are the neighbour's
            for b in range(2):
                assert relative_error(found[j][b, document][:rows], np.asarray(alone[j][b, :rows])) < LIMIT
    for j in range(N_STEPS):
        np.testing.assert_array_equal(changed[j][:, cut : n - 1 - j], found[j][:, cut : n - 1 - j])


def explicit(
    query: jax.Array, keys: jax.Array, values: jax.Array, own_keys: Any, own_values: Any, positions: jax.Array,
    segments: jax.Array, scale: float, window: int | None,
) -> jax.Array:  # fmt: skip
    """`chained` with all steps' keys side by side and one mask [T, (j + 1) T]."""
    t, step = query.shape[1], len(own_keys)
    k, v = jnp.concatenate([keys, *own_keys], axis=2), jnp.concatenate([values, *own_values], axis=2)
    group = query.shape[2] // k.shape[1]
    score = jnp.einsum("btnh,bnsh->bnts", query, jnp.repeat(k, group, axis=1)) * jnp.float32(scale)
    same = (segments[:, :, None] == segments[:, None]) & (segments >= 0)[:, None]
    index = jnp.arange(t)
    parts = [same & (index[None] <= index[:, None])[None]]
    parts += [jnp.broadcast_to(jnp.eye(t, dtype=bool)[None], same.shape)] * step
    mask = jnp.concatenate(parts, axis=2)
    if window is not None:
        at = jnp.concatenate([positions + i for i in range(step + 1)], axis=1)
        mask = mask & (positions[:, :, None] + step - at[:, None] < window)
    some = mask.any(axis=-1)[:, None, :, None]
    score = jnp.where(mask[:, None], score, -1e30)
    p = jnp.where(some, jax.nn.softmax(score, axis=-1), 0.0)
    return jnp.einsum("bnts,bnsv->btnv", p, jnp.repeat(v, group, axis=1))


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("step", [0, 3])
def test_attention_and_its_gradient_equal_an_explicit_mask(
    step: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of 4 queries, heads in groups, packed documents, and padding that sees nothing in step 0."""
    monkeypatch.setattr("kimijax.chained_attention.QUERY_BLOCK", 4)
    rng = np.random.default_rng(5)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    b, t, n, m, h, v = 2, 10, 4, 2, 8, 6
    arrays = (
        draw(b, t, n, h), draw(b, m, t, h), draw(b, m, t, v),
        tuple(draw(b, m, t, h) for _ in range(step)), tuple(draw(b, m, t, v) for _ in range(step)),
    )  # fmt: skip
    segments = jnp.asarray([[0] * 10, [0] * 3 + [1] * 4 + [-1] * 3], jnp.int32)
    positions = jnp.asarray([[*range(10)], [*range(3), *range(4), *range(3)]], jnp.int32)
    d_out = draw(b, t, n, v)

    def program(attention: Callable[..., jax.Array]) -> Any:
        def scalar(arrays: Any) -> tuple[jax.Array, jax.Array]:
            out = attention(*arrays, positions, segments, 0.4, window)
            return (out * d_out).sum(), out

        (_, out), gradient = jax.jit(jax.value_and_grad(scalar, has_aux=True))(arrays)
        return out, *jax.tree.leaves(gradient)

    for found, right in zip(program(chained), program(explicit), strict=True):
        assert relative_error(found, np.asarray(right)) < LIMIT
    if step == 0:
        np.testing.assert_array_equal(program(chained)[0][1, 7:], 0.0)
