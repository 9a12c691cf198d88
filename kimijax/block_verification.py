"""Block verification (arXiv:2403.10444): accepting a block of guesses as a whole, at least as many as one by one.

Token by token, a guess that the target likes less than the drafter is lost even if those after it would make up for
it. Here the weights of the guesses so far are carried on,

    w[0] = 1,  w[i] = min(1, w[i-1] p(x[i]) / q(x[i]))

with p and q after the guesses before x[i]. Ending with exactly the first i of n guesses leaves the mass

    m[i] = sum over x of max(0, w[i] p(x) - q(x)),   p and q of the token after them,

and i is the largest number whose own draw u[i] lies below h[i]: h[n] = w[n], and before it
h[i] = m[i] / (m[i] + 1 - w[i]). The token after i < n guesses is drawn from max(0, w[i] p - q), normalised, after all n
from p. The tokens are distributed as p draws them, and no rule that keeps that accepts more in expectation.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from .sampling import Purpose, SamplingRows, key_at
from .verification import Proposal, acceptance_draws, leading, of_guesses


@dataclass(frozen=True)
class BlockRule:
    """A `verification.Rule`.

    That i is the largest number says something about the guesses behind it, and about their draws: all were rejected. A
    next round that drew with the same numbers would not draw from q any more. So each block has seeds of its own, made
    of the request's and of the position where the block begins, which no two blocks of a request share. Coupled rows
    keep their seeds: their guesses are to be drawn with the numbers of their tokens.
    """

    def draws(self, rows: SamplingRows, position: jax.Array) -> SamplingRows:
        def own(words: jax.Array, at: jax.Array) -> jax.Array:
            return jax.random.key_data(key_at(words, at, Purpose.BLOCK))

        seed = jnp.asarray(rows.seed)
        return dataclasses.replace(rows, seed=jnp.where(rows.coupled[:, None], seed, jax.vmap(own)(seed, position)))

    def accept(
        self, p: jax.Array, proposal: Proposal, usable: jax.Array, draws: SamplingRows, position: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        b, k, v = p.shape
        weights, chances = block_chances(p, proposal, usable)
        passed = usable & (acceptance_draws(draws, position, k) < chances)
        numbers = jnp.arange(1, k + 1, dtype=jnp.int32)[None]
        n = jnp.where(passed & (numbers <= leading(usable)[:, None]), numbers, 0).max(axis=1)
        i = jnp.minimum(n, k - 1)
        rows = jnp.arange(b)
        return n, jnp.maximum(weights[rows, i][:, None] * p[rows, i] - proposal.over_tokens(i, v), 0.0)


BLOCK = BlockRule()


def block_chances(p: jax.Array, proposal: Proposal, usable: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What the draws are held against.

    Args:
      p: float32 [B, k, V], the target's distribution that guess i is for.
      proposal: the guesses.
      usable: bool [B, k]; the guesses before the first that is not are the n of the block.
    Returns:
      w[0] ... w[k-1] and h[1] ... h[k], float32 [B, k] each; h beyond n means nothing.
    """
    b, k, v = p.shape
    n = leading(usable)
    p_guess, q_guess = of_guesses(p, proposal), proposal.chances()
    weight = jnp.ones(b, jnp.float32)
    weights, chances = [weight], []
    for i in range(1, k + 1):
        q = q_guess[:, i - 1]
        weight = jnp.where(q > 0, jnp.minimum(weight * p_guess[:, i - 1] / jnp.where(q > 0, q, 1.0), 1.0), 0.0)
        if i == k:
            chances.append(weight)
            break
        weights.append(weight)
        q_next = proposal.over_tokens(jnp.full(b, i, jnp.int32), v)
        mass = jnp.maximum(weight[:, None] * p[:, i] - q_next, 0.0).sum(axis=-1)
        total = mass + (1.0 - weight)
        # Nothing left over and nothing lost: p and q agree from here on, and so does whatever the rest decides.
        early = jnp.where(total > 0, mass / jnp.where(total > 0, total, 1.0), 1.0)
        chances.append(jnp.where(n == i, weight, early))
    return jnp.stack(weights, axis=1), jnp.stack(chances, axis=1)
