"""The shapes that Kimi-K2.5 gives `mla_decode`, for tests and benchmarks."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

RANK, ROPE, HEADS = 512, 64, 64  # of Kimi-K2.5, K2, DeepSeek-V3
SCALE = 192**-0.5  # of nope 128 and rope 64; YaRN's factor comes on top
PAGE = 64


@dataclass(frozen=True)
class Case:
    """One bucket of a serving batch on one device."""

    name: str
    batch: int
    tokens: int
    heads: int
    context: int  # positions of the window
    page: int = PAGE
    parts: int = 1  # devices that share the positions of a page
    is_tree: bool = False

    @property
    def pages(self) -> int:
        """n of a table row."""
        return self.context // self.page

    def operands(self, dtype: jnp.dtype, rank: int = RANK, rope: int = ROPE) -> dict[str, jax.ShapeDtypeStruct]:
        """q, pages, table, length of `mla_decode` as shapes; as many pages as the batch can fill, and one."""
        b, n = self.batch, self.pages
        return {
            "q": jax.ShapeDtypeStruct((b, self.tokens, self.heads, rank + rope), dtype),
            "pages": jax.ShapeDtypeStruct((b * n + 1, self.page // self.parts, rank + rope), dtype),
            "table": jax.ShapeDtypeStruct((b, n), jnp.int32),
            "length": jax.ShapeDtypeStruct((b,), jnp.int32),
        }

    @property
    def bytes(self) -> int:
        """Of the cache that a full window reads, in bfloat16."""
        return self.batch * self.context // self.parts * (RANK + ROPE) * 2

    @property
    def flops(self) -> int:
        """Of both products over a full window."""
        rows = self.batch * self.tokens * self.heads
        return 2 * rows * self.context // self.parts * (2 * RANK + ROPE)


# Heads on a device: 8 with tensor parallelism over eight, 16 over four, 64 with data-parallel attention, or with a
# cache that is split by position.
CASES = (
    Case("tp8 B1", 1, 1, 8, 4096),
    Case("tp8 B16", 16, 1, 8, 4096),
    Case("tp8 B64", 64, 1, 8, 4096),
    Case("tp8 B256", 256, 1, 8, 4096),
    Case("tp8 B1 verify 4", 1, 4, 8, 4096),
    Case("tp8 B16 verify 8", 16, 8, 8, 4096),
    Case("tp8 B16 verify tree", 16, 8, 8, 4096, is_tree=True),
    Case("tp8 B1 128k", 1, 1, 8, 131072),
    Case("tp8 B16 verify 4", 16, 4, 8, 4096),
    Case("tp4 B16", 16, 1, 16, 4096),
    Case("dp B2", 2, 1, 64, 4096),
    Case("dp B2 verify 4", 2, 4, 64, 4096),
    Case("dcp8 B16", 16, 1, 64, 32768, parts=8),
    Case("dcp8 B16 verify 4", 16, 4, 64, 32768, parts=8),
    Case("tp8 B16 page 16", 16, 1, 8, 4096, page=16),
    Case("tp8 B16 page 128", 16, 1, 8, 4096, page=128),
)
