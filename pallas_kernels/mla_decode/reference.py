"""`mla_decode` in plain jax.numpy: gathers the pages that the table names, whatever is live of them."""

import jax
import jax.numpy as jnp

from .plan import Sizes


def attend(
    q: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    length: jax.Array,
    end: jax.Array,
    tree: jax.Array | None,
    first: jax.Array | None,
    s: Sizes,
    dtype: jnp.dtype,
    *,
    with_lse: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """The same as `triton.attend`."""
    batch = q.shape[0]
    start = jnp.int32(0) if first is None else first[0]
    slot = jnp.arange(s.table, dtype=jnp.int32)[:, None] * s.page
    position = (slot + start + jnp.arange(s.part, dtype=jnp.int32)[None]).reshape(1, -1)  # [1, S]
    ahead = position - length[:, None]  # [B, S], of the rows that were valid before
    is_live = position < end[:, None]
    token = jnp.arange(s.tokens, dtype=jnp.int32)[None, :, None]
    if tree is None:
        visible = ahead[:, None] <= token
    else:
        visible = (ahead < 0)[:, None] | (((tree[..., None] >> jnp.clip(ahead, 0, 31)[:, None]) & 1) == 1)
    visible = (visible & is_live[:, None])[:, :, None]  # [B, T, 1, S]

    rows = pages[jnp.clip(table, 0, pages.shape[0] - 1)].reshape(batch, -1, pages.shape[2])
    rows = jnp.where(is_live[..., None], rows, jnp.zeros((), rows.dtype))  # 0 times NaN is NaN
    score = jnp.einsum("btnc,bsc->btns", q, rows, preferred_element_type=jnp.float32) * jnp.float32(s.scale)
    score = jnp.where(visible, score, -jnp.inf)
    top = jnp.max(score, axis=-1, keepdims=True, initial=-1e30)
    e = jnp.exp(score - top)
    total = e.sum(axis=-1, keepdims=True)
    latent = rows[..., : s.rank]
    out = jnp.einsum("btns,bsr->btnr", e.astype(rows.dtype), latent, preferred_element_type=jnp.float32)
    out = (out / jnp.where(total > 0, total, 1.0)).astype(dtype)
    lse = jnp.where(total > 0, top + jnp.log(total), -jnp.inf)[..., 0]
    return out, lse if with_lse else None
