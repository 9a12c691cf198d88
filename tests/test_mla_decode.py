"""Attention over the paged latent cache: every implementation against a model in float64 that knows no pages."""

import functools
import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh, PartitionSpec

pytestmark = pytest.mark.slow  # the interpreter takes half a minute

# By name: the package's attribute of that name is the function.
mla = importlib.import_module("kimijax.pallas_kernels.mla_decode")
plans = importlib.import_module("kimijax.pallas_kernels.mla_decode.plan")
shapes = importlib.import_module("kimijax.pallas_kernels.mla_decode.shapes")

RANK, ROPE, SCALE = 32, 16, 0.2
IMPLEMENTATIONS = ("reference", "interpret")


class Batch(NamedTuple):
    """Operands, with NaN wherever nothing may look."""

    q: np.ndarray  # [B, T, N, C]
    pages: np.ndarray  # [P, page, C]
    table: np.ndarray  # int32 [B, n]
    length: np.ndarray  # int32 [B]

    def operands(self, dtype: Any = jnp.float32) -> tuple[jax.Array, ...]:
        q, pages = (jnp.asarray(one, dtype) for one in self[:2])
        return q, pages, jnp.asarray(self.table, jnp.int32), jnp.asarray(self.length, jnp.int32)


def make(
    lengths: list[int], tokens: int, heads: int, page: int, n: int, *, rank: int = RANK, rope: int = ROPE, seed: int = 0
) -> Batch:
    """A batch whose rows have as many pages as they need, in random order, the others -1."""
    rng = np.random.default_rng([seed, tokens, heads, page])
    batch = len(lengths)
    free = rng.permutation(batch * n + 2)
    table = np.full((batch, n), -1)
    pages = np.full((batch * n + 2, page, rank + rope), np.nan)
    for b, length in enumerate(lengths):
        end = min(length + tokens, n * page)
        for i in range(-(-end // page)):
            at, free = free[0], free[1:]
            table[b, i] = at
            live = min(page, end - i * page)
            pages[at, :live] = rng.standard_normal((live, rank + rope))
    q = rng.standard_normal((batch, tokens, heads, rank + rope))
    return Batch(q, pages, table, np.asarray(lengths))


def trees(batch: int, tokens: int, seed: int = 0) -> np.ndarray:
    """Ancestors in random trees whose node 0 is the root: bool [B, T, T]."""
    rng = np.random.default_rng(seed)
    seen = np.broadcast_to(np.eye(tokens, dtype=bool), (batch, tokens, tokens)).copy()
    for b in range(batch):
        for t in range(1, tokens):
            seen[b, t] |= seen[b, rng.integers(t)]
    return seen


def model(batch: Batch, rank: int = RANK, tree: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The definition, one query at a time in float64: out [B, T, N, R], log of the sum [B, T, N]."""
    q, pages, table, length = batch
    out, lse = np.zeros((*q.shape[:3], rank)), np.full(q.shape[:3], -np.inf)
    page = pages.shape[1]
    for b, t, n in np.ndindex(*q.shape[:3]):
        seen = list(range(length[b]))
        seen += [length[b] + u for u in range(q.shape[1]) if (u <= t if tree is None else tree[b, t, u])]
        rows = [pages[table[b, s // page], s % page] for s in seen if s // page < table.shape[1]]
        rows = [row for row, s in zip(rows, seen, strict=False) if table[b, s // page] >= 0]
        if not rows:
            continue
        score = np.stack(rows) @ q[b, t, n] * SCALE
        e = np.exp(score - score.max())
        out[b, t, n], lse[b, t, n] = e @ np.stack(rows)[:, :rank] / e.sum(), score.max() + np.log(e.sum())
    return out, lse


@functools.partial(jax.jit, static_argnames=("rank", "implementation", "plan"))
def decode(
    *operands: jax.Array, implementation: str, plan: Any = None, rank: int = RANK, tree: Any = None
) -> jax.Array:
    return mla.mla_decode(*operands, rank=rank, scale=SCALE, implementation=implementation, tree=tree, plan=plan)


@functools.partial(jax.jit, static_argnames=("implementation", "plan", "parts"))
def parts_of(*operands: jax.Array, implementation: str, parts: int, plan: Any = None, tree: Any = None) -> Any:
    """out [parts, ...] and log of the sum [parts, ...] of what each of some devices has."""
    q, pages, table, length = operands
    n_pages, page, width = pages.shape
    size = page // parts

    def one(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        kind = {"rank": RANK, "scale": SCALE, "implementation": implementation, "tree": tree, "plan": plan}
        return mla.mla_decode_part(q, part[0], table, length, page_size=page, first=part[1], **kind)

    split = pages.reshape(n_pages, parts, size, width).swapaxes(0, 1)
    return jax.lax.map(one, (split, jnp.arange(parts, dtype=jnp.int32) * size))


def plan(rows: int = 16, block: int = 16, splits: int = 1) -> Any:
    return mla.Plan(rows, block, splits, 4, 2)


# Lengths about 0, 1, both sides of a page's end, and the window's; blocks within a page, a page each, and over several.
EDGES = [
    pytest.param(1, 8, 16, plan(16, 16, 3), id="T1 N8 page 16, a page a block"),
    pytest.param(1, 8, 16, plan(16, 32, 2), id="T1 N8 page 16, blocks of two pages"),
    pytest.param(1, 16, 64, plan(16, 32, 1), id="T1 N16 page 64, one split"),
    pytest.param(2, 64, 64, plan(64, 16, 5), id="T2 N64 page 64, tiles of 64"),
    pytest.param(3, 8, 128, plan(32, 64, 4), id="T3 N8 page 128, a tile not full"),
    pytest.param(8, 8, 64, None, id="T8 N8 page 64, plan of the shapes"),
]


@pytest.mark.parametrize(("tokens", "heads", "page", "cut"), EDGES)
def test_edges(tokens: int, heads: int, page: int, cut: Any) -> None:
    n = 3
    lengths = [0, 1, page - tokens, page - 1, page, page + 1, 2 * page - tokens + 1, n * page - tokens]
    batch = make(lengths, tokens, heads, page, n)
    expected, _ = model(batch)
    for implementation in IMPLEMENTATIONS:
        found = decode(*batch.operands(), implementation=implementation, plan=cut)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6, err_msg=implementation)


@pytest.mark.parametrize("tokens", [5, 6, 7])
def test_tokens(tokens: int) -> None:
    batch = make([0, 9, 40], tokens, 8, 16, 4)
    expected, _ = model(batch)
    for implementation in IMPLEMENTATIONS:
        found = decode(*batch.operands(), implementation=implementation, plan=plan(32, 16, 2))
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6, err_msg=implementation)


@pytest.mark.parametrize("tokens", [1, 8, 32])
def test_tree(tokens: int) -> None:
    batch, tree = make([0, 13, 50], tokens, 8, 16, 6), trees(3, tokens)
    expected, _ = model(batch, tree=tree)
    assert tokens == 1 or not np.allclose(expected, model(batch)[0])  # a chain is something else
    for implementation in IMPLEMENTATIONS:
        found = decode(*batch.operands(), implementation=implementation, plan=plan(16, 16, 2), tree=jnp.asarray(tree))
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6, err_msg=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_row_sees_nothing(implementation: str) -> None:
    batch = make([5, 20], 2, 8, 16, 3)
    batch.table[0] = -1
    found = decode(*batch.operands(), implementation=implementation, plan=plan(16, 16, 2))
    np.testing.assert_array_equal(found[0], 0.0)
    np.testing.assert_allclose(found, model(batch)[0], rtol=0, atol=2e-6)
    _, lse = parts_of(*batch.operands(), implementation=implementation, parts=1, plan=plan(16, 16, 1))
    assert np.all(np.isneginf(lse[0, 0]))
    assert np.all(np.isfinite(lse[0, 1]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("splits", [1, 3])
def test_log_of_the_sum(splits: int, implementation: str) -> None:
    batch = make([0, 17, 46], 2, 8, 16, 3)
    out, lse = parts_of(*batch.operands(), implementation=implementation, parts=1, plan=plan(16, 16, splits))
    expected, expected_lse = model(batch)
    np.testing.assert_allclose(out[0], expected, rtol=0, atol=2e-6)
    np.testing.assert_allclose(lse[0], expected_lse, rtol=0, atol=2e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("is_tree", [False, True])
def test_parts_are_the_whole(is_tree: bool, implementation: str) -> None:
    """Four devices with four positions of each page: some see nothing of a short row."""
    batch = make([0, 3, 16, 31, 44], 4, 8, 16, 3)
    tree = trees(5, 4) if is_tree else None
    out, lse = parts_of(
        *batch.operands(),
        implementation=implementation,
        parts=4,
        plan=plan(32, 16, 2),
        tree=None if tree is None else jnp.asarray(tree),
    )
    assert np.any(np.isneginf(lse))
    whole, whole_lse = mla.merge_parts(out, lse)
    expected, expected_lse = model(batch, tree=tree)
    np.testing.assert_allclose(whole, expected, rtol=0, atol=2e-6)
    np.testing.assert_allclose(whole_lse, expected_lse, rtol=0, atol=2e-6)


def test_parts_on_devices() -> None:
    """Eight devices hold two positions of each page, and end with one head each."""
    batch = make([0, 9, 40], 2, 8, 16, 4)
    mesh = jax.make_mesh((8,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    spec, whole = PartitionSpec, PartitionSpec()

    def local(q: jax.Array, pages: jax.Array, table: jax.Array, length: jax.Array) -> jax.Array:
        first = jax.lax.axis_index("context") * pages.shape[1]
        kind = {"rank": RANK, "scale": SCALE, "implementation": "interpret", "plan": plan(16, 16, 1)}
        found = mla.mla_decode_part(q, pages, table, length, page_size=16, first=first, **kind)
        return mla.merge_over_devices(*found, "context")

    placed = whole, spec(None, "context"), whole, whole
    run = jax.shard_map(local, mesh=mesh, in_specs=placed, out_specs=spec(None, None, "context"), check_vma=False)
    np.testing.assert_allclose(jax.jit(run)(*batch.operands()), model(batch)[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_at_real_widths(implementation: str) -> None:
    """What 16-bit operands give in float64, but for the rounding of the weights and of the result to bfloat16."""
    batch = make([70, 1], 2, 8, 64, 2, rank=shapes.RANK, rope=shapes.ROPE)
    q, pages, *rest = batch.operands(jnp.bfloat16)
    rounded = Batch(np.asarray(q, np.float64), np.asarray(pages, np.float64), batch.table, batch.length)
    expected, _ = model(rounded, shapes.RANK)
    found = decode(q, pages, *rest, implementation=implementation, rank=shapes.RANK, plan=plan(16, 32, 2))
    assert found.dtype == jnp.bfloat16
    bound = 2.0**-8 * (np.abs(expected) + np.sqrt(2) * np.nanmax(np.abs(rounded.pages)))
    assert np.all(np.abs(np.asarray(found, np.float64) - expected) < bound)


def test_a_row_does_not_depend_on_the_others() -> None:
    """To the bit, and whatever their lengths: the plan is made from shapes."""
    batch = make([37, 5, 60], 2, 8, 16, 4)
    alone = decode(*batch.operands(), implementation="interpret", plan=plan(16, 16, 3))[0]
    beside = Batch(batch.q, batch.pages, batch.table, np.asarray([37, 60, 0]))
    beside.pages[np.isnan(batch.pages)] = 0.5  # the others see rows now that nobody has written
    found = decode(*beside.operands(), implementation="interpret", plan=plan(16, 16, 3))[0]
    np.testing.assert_array_equal(found, alone)


@examples(max_examples=10)
@given(st.data())
def test_random_tables(data: st.DataObject) -> None:
    """Kernels and reference on random lengths, page orders and padding, in every sort of plan."""
    page, cut = data.draw(st.sampled_from([(16, plan(16, 32, 3)), (32, plan(16, 16, 8))]))
    n, tokens = 5, 2
    lengths = data.draw(st.lists(st.integers(0, n * page - tokens), min_size=3, max_size=3))
    batch = make(lengths, tokens, 8, page, n, seed=data.draw(st.integers(0, 99)))
    dropped = data.draw(st.integers(0, n))
    batch.table[0, dropped:] = -1
    expected, _ = model(batch)
    for implementation in IMPLEMENTATIONS:
        found = decode(*batch.operands(), implementation=implementation, plan=cut)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6, err_msg=implementation)


def test_refusals() -> None:
    q, pages, table, length = make([3], 2, 8, 16, 2).operands()
    run = functools.partial(mla.mla_decode, rank=RANK, scale=SCALE, implementation="interpret")
    with pytest.raises(NotImplementedError, match=r"implementation 'mosaic': this build has reference, pallas, interp"):
        run(q, pages, table, length, implementation="mosaic")
    with pytest.raises(NotImplementedError, match="'pallas': pages of float32, expected bfloat16, float16"):
        run(q, pages, table, length, implementation="pallas")
    with pytest.raises(NotImplementedError, match="rank 24, expected a power of two from 16; 'reference' takes any"):
        run(q, pages, table, length, rank=24)
    with pytest.raises(NotImplementedError, match="T=33 new tokens, expected 1 to 32"):
        run(jnp.zeros((1, 33, 8, 48)), pages, table, length)
    with pytest.raises(ValueError, match=r"pages is float32\[4, 16, 48\], expected bfloat16"):
        run(q.astype(jnp.bfloat16), pages, table, length)
    with pytest.raises(ValueError, match=r"tree is bool\[1, 2, 3\], expected bool\[1, 2, 2\]"):
        run(q, pages, table, length, tree=jnp.zeros((1, 2, 3), jnp.bool))
    part = functools.partial(mla.mla_decode_part, rank=RANK, scale=SCALE, implementation="reference")
    with pytest.raises(ValueError, match="pages of 16 positions, expected a divisor of page_size=24"):
        part(q, pages, table, length, page_size=24, first=jnp.int32(0))
    with pytest.raises(ValueError, match=r"first is int32\[1\], expected int32\[\]"):
        part(q, pages, table, length, page_size=64, first=jnp.zeros(1, jnp.int32))
    for fields in ((24, 16, 1, 4, 2), (16, 8, 1, 4, 2), (16, 16, 0, 4, 2), (16, 16, 129, 4, 2), (16, 16, 1, 3, 2)):
        with pytest.raises(ValueError, match="mla_decode plan"):
            mla.Plan(*fields)


@pytest.mark.parametrize("chip", mla.CHIPS, ids=lambda chip: chip.kind)
@pytest.mark.parametrize("case", shapes.CASES, ids=lambda case: case.name)
def test_plan(case: Any, chip: Any) -> None:
    """Queries and two blocks fit into shared memory, and a window that is long enough fills the chip at least half."""
    cut = mla.plan_for(case.batch, case.tokens * case.heads, case.pages, case.page // case.parts, chip)
    row = (shapes.RANK + shapes.ROPE) * 2
    assert (cut.rows + 2 * cut.block) * row < chip.shared_memory
    programs = case.batch * cut.splits * -(-case.tokens * case.heads // cut.rows)
    blocks = case.context // case.parts // cut.block
    assert programs >= chip.processors / 2 or cut.splits == blocks // plans.LEAST_BLOCKS, programs
    assert cut.splits == 1 or programs <= 2 * chip.processors, programs


LOWERED = ("tp8 B16", "tp8 B256", "tp8 B16 verify tree", "dcp8 B16")


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA RTX PRO 6000 Blackwell Server Edition"])
@pytest.mark.parametrize("case", [case for case in shapes.CASES if case.name in LOWERED], ids=lambda case: case.name)
def test_lowers_for_cuda(case: Any, kind: str) -> None:
    """Without a GPU or its plugin: two kernels a call, one where there is nothing to merge."""
    device = AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    operands = dict(case.operands(jnp.bfloat16))
    if case.is_tree:
        operands["tree"] = jax.ShapeDtypeStruct((case.batch, case.tokens, case.tokens), jnp.bool)
    if case.parts > 1:
        operands["first"] = jax.ShapeDtypeStruct((), jnp.int32)
        op = functools.partial(mla.mla_decode_part, page_size=case.page)
    else:
        op = mla.mla_decode
    op = functools.partial(op, rank=shapes.RANK, scale=shapes.SCALE, implementation="pallas")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        chip = mla.chip_here()
        text = jax.jit(op).trace(**operands).lower(lowering_platforms=("cuda",)).as_text()
    assert kind.startswith(chip.kind)
    cut = mla.plan_for(case.batch, case.tokens * case.heads, case.pages, case.page // case.parts, chip)
    assert text.count("custom_call @__gpu$xla.gpu.triton") == (2 if cut.splits > 1 else 1)
