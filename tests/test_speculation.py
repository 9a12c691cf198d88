"""Whole requests through draft and verify: the target's own text and distribution, whatever is proposed beside what."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from kimijax.acceptance import Acceptance
from kimijax.errors import ConfigError, RequestError
from kimijax.sampling import distribution, sample
from kimijax.sharding import make_mesh
from kimijax.speculator import Generation, Speculator
from kimijax.unroll import unroll
from kimijax.wiring import Wiring

from .tiny_speculation import (
    GREEDY,
    LIMITS,
    PROMPTS,
    VOCAB,
    plain_logits,
    settings,
    speculator,
    tiny_drafter,
    tiny_target,
    whole,
)


def generate(
    rows: Sequence[Mapping[str, float]], k: int, kind: str = "llama", *, which: Sequence[int] = range(6), **sizes: Any
) -> list[Generation]:
    made = speculator(kind, **sizes)
    return made.generate([PROMPTS[i] for i in which], settings(rows), [LIMITS[i] for i in which], k=k)


def rounds_of(found: Sequence[Generation]) -> Acceptance:
    return sum((g.acceptance for g in found), Acceptance())


def check_greedy(k: int, kind: str) -> Acceptance:
    """Greedy rows, beside rows that sample and alone, against whole-sequence passes."""
    for rows in ([GREEDY] * 6, [GREEDY, {}, GREEDY, {"top_k": 5}, GREEDY, {}]):
        found = generate(rows, k, kind)
        for i in (0, 2, 4):
            text = (*PROMPTS[i], *found[i].tokens)
            best = plain_logits(text)[len(PROMPTS[i]) - 1 : -1].argmax(axis=1)
            assert found[i].tokens == tuple(best.tolist())
            assert len(found[i].tokens) == LIMITS[i]
            assert found[i].finish_reason == "length"
    return rounds_of(generate([GREEDY] * 6, k, kind))


@pytest.mark.parametrize("k", [0, 3])
def test_greedy_text_is_the_targets_own(k: int) -> None:
    acceptance = check_greedy(k, "llama")
    if k:  # otherwise this shows nothing: guesses pass and fail
        assert all(0.1 < share < 0.95 for share in acceptance.by_position)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mla"])
@pytest.mark.parametrize("k", [1, 2, 4, 7])
def test_greedy_text_with_more_drafts(k: int, kind: str) -> None:
    check_greedy(k, kind)


def test_no_drafts_is_plain_sampling() -> None:
    """k = 0 draws what `sample` draws from the logits of a whole-sequence pass, with the same random numbers."""
    for i, found in enumerate(generate([{"seed": 5, "temperature": 0.8}] * 6, 0)):
        text, n = (*PROMPTS[i], *found.tokens), len(PROMPTS[i])
        logits = jnp.asarray(plain_logits(text)[n - 1 : -1])
        rows = settings([{"seed": 5, "temperature": 0.8}] * len(logits))
        at = jnp.arange(n, n + len(logits), dtype=jnp.int32)
        assert found.tokens == tuple(np.asarray(sample(logits, rows, at, VOCAB)).tolist())


def test_a_seed_gives_the_same_tokens_anywhere() -> None:
    """Alone, in another row beside others, after others, twice at once; another seed gives others."""
    mine = {"seed": 11, "top_p": 0.95}
    alone = generate([mine], 3, which=[1])[0]
    others = generate([{"seed": 3}, {}, mine, GREEDY, {"top_k": 4}, {"seed": 2**40}], 3, which=[0, 2, 1, 3, 4, 5])
    twice = generate([mine, {"seed": 12}, mine, {"seed": 13}], 3, which=[1, 1, 1, 1])
    assert others[2].tokens == alone.tokens
    assert twice[0].tokens == twice[2].tokens == alone.tokens
    assert len({g.tokens for g in twice}) == 3
    assert others[2].rounds == alone.rounds
    assert generate([{**mine, "seed": 11 + 2**32}], 3, which=[1])[0].tokens != alone.tokens


def test_nothing_is_compiled_again() -> None:
    generate([{}] * 6, 3)
    before = speculator().n_compiled()
    generate([{"top_k": 3, "seed": 9}] * 2, 3, which=[4, 3])
    generate([GREEDY] * 5, 3, which=[0, 1, 2, 3, 4])
    assert speculator().n_compiled() == before


def test_guesses_are_the_trained_steps() -> None:
    """Guess j of a round after accepted ones is what the training-time test computes in step j at the row it began."""
    drafter, target = tiny_drafter(), tiny_target()
    found = generate([GREEDY] * 6, 3)
    n_checked = np.zeros(3, int)
    run = jax.jit(lambda ids: target(ids, taps=drafter.wiring.taps).taps)
    steps = jax.jit(
        lambda ids, taps: [
            drafter.to_target(drafter.logits(x).argmax(axis=-1).astype(jnp.int32))
            for x in unroll(drafter, drafter.fuse(taps), ids, *places(ids), 3)
        ]
    )
    for prompt, answer in zip(PROMPTS, found, strict=True):
        ids = np.zeros((1, 64), np.int32)
        ids[0, : len(prompt) + len(answer.tokens)] = *prompt, *answer.tokens
        trained = np.asarray(steps(ids, run(ids)))[:, 0]
        for r in answer.rounds:
            for j in range(min(r.accepted + 1, 3)):
                # Its tokens up to r.position - 1 + j are committed; the round stands at the row two before its guess.
                if r.position + j <= len(prompt) + len(answer.tokens):
                    assert r.guesses[j] == trained[j, r.position - 2]
                    n_checked[j] += 1
    assert (n_checked > 10).all()


def places(ids: Any) -> tuple[jax.Array, jax.Array]:
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32)[None], ids.shape)
    return positions, jnp.zeros_like(positions)


@pytest.mark.parametrize("row", [{}, {"temperature": 1.3, "top_p": 0.9}])
def test_sampled_answers_follow_the_targets_distribution(row: Mapping[str, float]) -> None:
    """All answers of three tokens over 7 ids (an eighth belongs to no token), chi-square against enumeration."""
    vocab, n_tokens, n, batch = 8, 7, 12_288, 2048
    made = speculator(vocab=vocab, n_tokens=n_tokens, batch=batch, context=16, chunk=4, noise=0.3)
    prompt = [3, 1, 4]
    counts = np.zeros((n_tokens,) * 3)
    acceptance = Acceptance()
    for start in range(0, n, batch):
        rows = settings([{**row, "seed": start + i} for i in range(batch)])
        for answer in made.generate([prompt] * batch, rows, [3] * batch, k=2):
            counts[answer.tokens] += 1
            acceptance += answer.acceptance
    assert 0.1 < acceptance.by_position[0] < 0.95
    expected = n * exact_distribution(prompt, row, vocab, n_tokens)
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    right = np.append(expected[common], expected[~common].sum())
    assert stats.chisquare(observed[right > 0], right[right > 0]).pvalue > 0.01


def exact_distribution(prompt: list[int], row: Mapping[str, float], vocab: int, n_tokens: int) -> np.ndarray:
    """float64 [n_tokens, n_tokens, n_tokens], of three tokens after a prompt."""
    prefixes = [x for depth in range(3) for x in itertools.product(range(n_tokens), repeat=depth)]
    ids = np.asarray([(*prompt, *x, *(0,) * (2 - len(x))) for x in prefixes], np.int32)
    logits = whole(vocab)(ids)[jnp.arange(len(ids)), jnp.asarray([len(prompt) + len(x) - 1 for x in prefixes])]
    logits = logits.at[:, n_tokens:].set(-jnp.inf)
    own = np.asarray(jax.jit(distribution)(logits, settings([row] * len(ids))), np.float64)[:, :n_tokens]
    own /= own.sum(axis=1, keepdims=True)
    p = np.ones((n_tokens,) * 3)
    for prefix, last in zip(prefixes, own, strict=True):
        p[prefix] *= last.reshape((-1,) + (1,) * (2 - len(prefix)))
    return p


def test_requests_that_do_not_fit_are_refused() -> None:
    made = speculator()
    with pytest.raises(RequestError, match="at most 64"):
        made.generate([[1] * 40], settings([GREEDY]), [22], k=3)
    with pytest.raises(RequestError, match="at least one token"):
        made.generate([[]], settings([GREEDY]), [5], k=3)
    with pytest.raises(RequestError, match="token id 32"):
        made.generate([[1, 32]], settings([GREEDY]), [5], k=3)
    with pytest.raises(RequestError, match=r"0 \(plain decoding\) or more"):
        made.generate([[1]], settings([GREEDY]), [5], k=-1)
    for n in (1, 3):
        with pytest.raises(RequestError, match=f"found {n} rows of settings, expected 2"):
            made.generate([[1], [2]], settings([GREEDY] * n), [5, 5], k=3)
    with pytest.raises(ConfigError, match="512"):
        speculator(context=2000)
    other = tiny_drafter("mla", noise=0.5)
    other.wiring = Wiring((0, 1, 2), 3, tiny_target().config.hidden)
    with pytest.raises(ConfigError, match="target_layers"):
        Speculator(tiny_target(), other, n_tokens=VOCAB, stop_ids=(), batch=1, context_length=8)


@pytest.mark.slow
def test_one_row_alone_gives_the_same() -> None:
    """A batch of one stores its rows another way."""
    alone = generate([GREEDY, {"seed": 1}], 3, which=[0, 4], batch=1)
    together = generate([GREEDY, {"seed": 1}], 3, which=[0, 4])
    assert alone == together


@pytest.mark.slow
def test_eight_devices_give_the_same() -> None:
    mesh = make_mesh(jax.devices())
    made = Speculator(
        tiny_target(), tiny_drafter(), n_tokens=VOCAB, stop_ids=(), batch=4, context_length=64, chunk=16, mesh=mesh
    )
    rows = settings([GREEDY, {"seed": 1}] * 3)
    assert made.generate(PROMPTS, rows, LIMITS, k=3) == speculator().generate(PROMPTS, rows, LIMITS, k=3)


@pytest.mark.slow
def test_weights_that_are_not_a_number_are_an_error() -> None:
    broken = tiny_drafter("mla", noise=0.7)
    broken.fc.set_value(broken.fc.get_value() * jnp.float32(np.nan))
    made = Speculator(tiny_target(), broken, n_tokens=VOCAB, stop_ids=(), batch=1, context_length=32, chunk=16)
    with pytest.raises(FloatingPointError, match="the drafter's logits"):
        made.generate([PROMPTS[0]], settings([GREEDY]), [5], k=1)
    target = tiny_target(seed=3)
    target.norm.set_value(target.norm.get_value() * jnp.float32(np.nan))
    made = Speculator(target, tiny_drafter(), n_tokens=VOCAB, stop_ids=(), batch=1, context_length=32, chunk=16)
    with pytest.raises(FloatingPointError, match="the target's logits"):
        made.generate([PROMPTS[0]], settings([GREEDY]), [5], k=1)
