"""Log-probabilities of a block's tokens, each from its own position."""

import jax
import numpy as np

from kimijax.logprobs import logprobs

find = jax.jit(logprobs, static_argnames="n")


def test_each_position_has_its_own() -> None:
    """Rows that committed three, one and no tokens; padding of the vocabulary counts for nothing."""
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((3, 3, 20)) * 3).astype(np.float32)
    logits[..., 18:] = -np.inf
    logits[0, 0, [4, 9]] = 20.0  # a tie
    tokens = np.asarray([[4, 1, 17], [2, -1, -1], [-1, -1, -1]], np.int32)
    found = find(logits, tokens, np.asarray([True, False, False]), n=3)
    x = logits.astype(np.float64)
    right = x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
    for b, i in np.ndindex(3, 3):
        if tokens[b, i] < 0:
            assert np.isnan(found.chosen[b, i])
            assert np.isnan(found.top[b, i]).all()
            assert found.top_ids[b, i].tolist() == [-1] * 3
            continue
        order = np.argsort(-right[b, i], kind="stable")[:3]
        np.testing.assert_allclose(found.chosen[b, i], right[b, i, tokens[b, i]], atol=1e-5)
        assert found.top_ids[b, i].tolist() == order.tolist()
        np.testing.assert_allclose(found.top[b, i], right[b, i, order], atol=1e-5)
    assert found.top_ids[0, 0, :2].tolist() == [4, 9]


def test_nobody_asks() -> None:
    logits, tokens = np.zeros((2, 2, 5), np.float32), np.ones((2, 2), np.int32)
    found = find(logits, tokens, np.zeros(2, np.bool_), n=2)
    assert np.isnan(found.chosen).all()
    assert (np.asarray(found.top_ids) == -1).all()


def test_only_the_token_s_own() -> None:
    logits, tokens = np.zeros((1, 2, 4), np.float32), np.asarray([[3, 0]], np.int32)
    found = find(logits, tokens, np.ones(1, np.bool_), n=0)
    np.testing.assert_allclose(found.chosen, [[-np.log(4)] * 2], rtol=1e-6)
    assert found.top_ids.shape == (1, 2, 0)
