"""Log-probabilities that go out with tokens: the target's own, before processors, temperature and filters."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Logprobs(NamedTuple):
    """Of N positions of B rows, natural logarithms."""

    chosen: jax.Array  # float32 [B, N], NaN where there is no token
    top_ids: jax.Array  # int32 [B, N, n], most probable first, the lower id of a tie; -1 where there is no token
    top: jax.Array  # float32 [B, N, n]


def logprobs(logits: jax.Array, tokens: jax.Array, wanted: jax.Array, n: int) -> Logprobs:
    """Log-probabilities of tokens and of the n most probable ones, each from the logits that it was drawn from.

    Entry i of a block belongs to logits i whether a guess was accepted there or the target drew the token itself.

    Args:
      logits: float32 [B, N, V], -inf at ids of no token.
      tokens: int32 [B, N], negative where none was committed.
      wanted: bool [B], rows that ask for them; if none does, nothing is computed and all entries say "no token".
      n: most that any row asks for, at most V.
    """
    b, width, _ = logits.shape

    def found() -> Logprobs:
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        chosen = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[..., None], axis=-1)
        top, ids = jax.lax.top_k(logits, n)
        real = (tokens >= 0)[..., None]
        return Logprobs(
            jnp.where(real, chosen - total, jnp.nan)[..., 0],
            jnp.where(real, ids, -1),
            jnp.where(real, top - total, jnp.nan),
        )

    def nothing() -> Logprobs:
        empty = jnp.full((b, width, n), jnp.nan, jnp.float32)
        return Logprobs(jnp.full((b, width), jnp.nan, jnp.float32), jnp.full((b, width, n), -1, jnp.int32), empty)

    return jax.lax.cond(wanted.any(), found, nothing)
