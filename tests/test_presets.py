"""However the devices share the work, an engine gives the same text, and no more is sent than the preset needs."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import pytest
from flax import nnx
from jax.sharding import Mesh

from kimijax.drafter import Drafter, borrow
from kimijax.engine.engine import Engine
from kimijax.engine.request import Sampling
from kimijax.errors import ConfigError
from kimijax.model import Target
from kimijax.sharding import Preset, make_mesh, named_sharding
from kimijax.speculative_options import SpeculativeOptions

from .engine_cases import TINY, quickly_compiled, serve_all, step_often, tiny
from .tiny_speculation import PROMPTS, VOCAB, tiny_drafter, tiny_target

N = 4  # devices
SAMPLINGS = [
    Sampling(max_tokens=18, temperature=0.0),
    Sampling(max_tokens=18, temperature=1.0, seed=7),
    Sampling(max_tokens=18, temperature=0.8, top_p=0.9, seed=3),
]
LONG = Sampling(max_tokens=200, temperature=0.0, ignore_eos=True)
RULES = Sampling(max_tokens=12, temperature=0.0, logprobs=2, repetition_penalty=1.3)
CHAIN = SpeculativeOptions("EAGLE3", 3, 1, 4, adaptive=False)
TREE = SpeculativeOptions("EAGLE3", 3, 2, 7, adaptive=False)


class Case(NamedTuple):
    preset: Preset
    head: str | None  # of the drafter
    options: SpeculativeOptions | None
    rules: bool = False


CASES = [
    Case("ep", None, None, rules=True),
    Case("dp-attention", "llama", CHAIN, rules=True),
    Case("dcp", "mla", CHAIN),
]
SLOW = [
    Case("tp", "llama", CHAIN),
    Case("dp-attention", "mla", TREE, rules=True),
    Case("tp", "mla", TREE, rules=True),
    Case("ep", "llama", TREE, rules=True),
    Case("ep", "mla", CHAIN),
    Case("dcp", "llama", TREE, rules=True),
    Case("dcp", None, None, rules=True),
]
ALL = [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]


def placed[M: nnx.Module](model: M, mesh: Mesh) -> M:
    """A copy on a mesh."""
    graph, state = nnx.split(model)

    def one(v: nnx.Variable[Any]) -> nnx.Variable[Any]:
        x = v.get_value()
        return v.replace(jax.device_put(x, named_sharding(mesh, v.get_metadata()["axes"], x.shape)))

    return nnx.merge(graph, nnx.from_flat_state([(path, one(v)) for path, v in nnx.to_flat_state(state)]))


def on_mesh(preset: Preset, head: str | None) -> tuple[Target, Drafter | None, Mesh]:
    mesh = make_mesh(jax.devices()[:N], preset=preset)
    target = placed(tiny_target(), mesh)
    if head is None:
        return target, None, mesh
    drafter = placed(tiny_drafter(head), mesh)
    borrow(drafter, target)
    return target, drafter, mesh


def make_engine(case: Case, **sizes: Any) -> Engine:
    target, drafter, mesh = on_mesh(case.preset, case.head)
    config = dataclasses.replace(TINY, **sizes)
    return Engine(target, config, drafter=drafter, speculation=case.options, n_tokens=VOCAB, mesh=mesh)


@functools.cache
def expected() -> tuple[list[list[int]], list[list[int]]]:
    """On one device, without drafts: of all prompts and samplings, and with rules."""
    with quickly_compiled():
        engine = tiny("plain")
        prompts = [p for p in PROMPTS for _ in SAMPLINGS]
        plain = serve_all(engine, prompts, SAMPLINGS * len(PROMPTS))
        ruled = serve_all(engine, PROMPTS, RULES)
    return [a.tokens for a in plain], [a.tokens for a in ruled]


@pytest.mark.parametrize("case", ALL, ids=lambda c: f"{c.preset}-{c.head}-{'tree' if c.options is TREE else 'chain'}")
def test_text_is_that_of_one_device(case: Case) -> None:
    """Greedy, seeded and under rules, in pools so small that requests give way; twice, to begin on cached prefixes."""
    plain, ruled = expected()
    prompts = [p for p in PROMPTS for _ in SAMPLINGS]
    with quickly_compiled():
        n_groups = N if case.preset == "dp-attention" else 1
        engine = make_engine(case, n_pages=24 * max(n_groups, 2))
        for _ in range(2):
            answers = serve_all(engine, prompts, SAMPLINGS * len(PROMPTS))
            assert [a.tokens for a in answers] == plain
        assert engine.stats().n_preempted or case.preset == "dp-attention"
        if case.rules:
            assert [a.tokens for a in serve_all(engine, PROMPTS, RULES)] == ruled
    if case.head == "llama":
        assert sum(sum(rounds[1:]) for rounds in engine.stats().accepted.values()) > 0


def test_requests_are_spread_over_attention_groups() -> None:
    with quickly_compiled():
        engine = make_engine(Case("dp-attention", None, None))
        requests = [engine.make_request(range(9), LONG, id=str(i)) for i in range(4)]
        for r in requests:
            engine.add(r)
        step_often(engine, 3)
        s = engine._scheduler
        # The same prompt goes where it is cached, as long as there is room.
        assert len({s.group_of(r) for r in requests}) == 2
        others = [engine.make_request([i] * 9, LONG, id=f"other {i}") for i in range(4)]
        for r in others:
            engine.add(r)
        step_often(engine, 3)
        assert sorted(s.group_of(r) for r in (*requests, *others)) == [0, 0, 1, 1, 2, 2, 3, 3]
        state = engine._state.cache.layers[0]
        assert {x.data.shape[0] for x in state.addressable_shards} == {state.shape[0] // N}


def test_the_cache_is_split_by_position() -> None:
    engine = make_engine(Case("dcp", "mla", CHAIN))
    for layer in (*engine._state.cache.layers, *engine._state.draft.layers):  # type: ignore[union-attr]
        assert {x.data.shape for x in layer.addressable_shards} == {(layer.shape[0], 1, layer.shape[2])}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"decode_view": "dense"}, "decode_view: found 'dense', expected paged: preset dp-attention splits the cache"),
        ({"max_batch": 6}, "max_batch: found 6, expected a multiple of the 4 groups of devices"),
        ({"n_pages": 66}, "n_pages: found 66, expected a multiple of the 4 groups"),
        ({"n_pages": 32}, "n_pages: found 32, expected at least 60: .* in each of 4 groups"),
    ],
)
def test_sizes_that_groups_cannot_share_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(Case("dp-attention", None, None), **sizes)


def test_a_page_that_devices_cannot_share_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mesh axis context: found 4, expected a divisor of positions \(6\)"):
        make_engine(Case("dcp", None, None), page_size=6)
