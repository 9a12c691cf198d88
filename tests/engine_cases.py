"""Engines for tests: how one is driven, checked at every step, and made anew around programs that are compiled already.

`TINY` engines serve the models of `tiny_speculation`; each kind is compiled once. Another schedule, pool or set of
weights is another engine around the same programs (`variant`), which costs a copy of the empty state.
"""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx

from kimijax.drafter import Drafter
from kimijax.engine import engine as engine_module
from kimijax.engine.config import EngineConfig
from kimijax.engine.engine import Engine
from kimijax.engine.request import Phase, Request, Sampling, StepOutput, TokenLogprobs
from kimijax.engine.scheduler import Scheduler
from kimijax.model import Target
from kimijax.speculative_options import SpeculativeOptions

from .tiny_speculation import VOCAB, plain_logits, tiny_drafter, tiny_target


class OneSize(EngineConfig):
    """Sizes whose programs are compiled for a full batch alone."""

    def batch_sizes(self, n_groups: int = 1) -> tuple[int, ...]:
        return (self.max_batch,)


TINY = OneSize(max_batch=8, context_length=60, page_size=4, chunk_size=16, burst=8)
K = 3
FEW_ROWS = 80  # fewer than eight requests fill, and more than one does
KINDS: Mapping[str, SpeculativeOptions | None] = {
    "plain": None,
    "chain": SpeculativeOptions("EAGLE3", K, 1, K + 1, adaptive=False),
    "tree": SpeculativeOptions("EAGLE3", K, 3, 9, adaptive=False),
    "paged": SpeculativeOptions("EAGLE3", K, 1, K + 1, adaptive=False),
    "small pages": SpeculativeOptions("EAGLE3", K, 2, 7, adaptive=False),
    "page of 16": SpeculativeOptions("EAGLE3", K, 4, 9, adaptive=False),
    "one row": SpeculativeOptions("EAGLE3", K, 1, K + 1, adaptive=False),
    "block": SpeculativeOptions("EAGLE3", K, 1, K + 1, adaptive=False, block_verification=True),
}


# Where they are not TINY's.
SIZES: Mapping[str, Mapping[str, Any]] = {
    "paged": {"decode_view": "paged"},
    "one row": {"max_batch": 1},
    "small pages": {"page_size": 1},
    "page of 16": {"page_size": 16, "context_length": 64},
}


@contextlib.contextmanager
def quickly_compiled() -> Iterator[None]:
    """XLA leaves out most of what makes programs fast: half of the time that these tests take is compilation."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@functools.cache
def engine(kind: str) -> Engine:
    """One of `KINDS`, the same each time: the owner of its programs."""
    options, config = KINDS[kind], dataclasses.replace(TINY, **SIZES.get(kind, {}))
    drafter = None if options is None else tiny_drafter()
    return Engine(tiny_target(), config, drafter=drafter, speculation=options, n_tokens=VOCAB)


def tiny(kind: str, *, stop_ids: Sequence[int] = (), **sizes: Any) -> Engine:
    """A new engine of one of `KINDS`; sizes as for `variant`."""
    return variant(engine(kind), stop_ids=stop_ids, **sizes)


def few_pages(kind: str, **sizes: Any) -> dict[str, Any]:
    """Sizes with which requests of a full batch have to give way."""
    return {"n_pages": FEW_ROWS // engine(kind).config.page_size, **sizes}


def variant(
    base: Engine, *, stop_ids: Sequence[int] = (), weights: tuple[Target, Drafter | None] | None = None, **sizes: Any
) -> Engine:
    """An engine with its own schedule, state and counters around `base`'s programs.

    sizes: fields of EngineConfig that the schedule goes by, at most `base`'s: the programs' shapes stay.
    """
    p, rules = copy.copy(base._programs), copy.copy(base._rules)
    p.config = dataclasses.replace(base.config, burst=sizes.get("burst", base.config.burst))
    if weights is not None:
        p.leaves = jax.tree.leaves(nnx.state(weights))
    rules._base = p
    config = dataclasses.replace(base.config, **sizes)
    fakes = {"Programs": lambda *_: p, "RulePrograms": lambda _: rules}
    empty = mock.patch.object(p, "new_state", return_value=empty_state(base))
    with mock.patch.multiple(engine_module, **fakes), empty:
        target, drafter = p._models
        options: dict[str, Any] = {"n_tokens": base.n_tokens, "stop_ids": stop_ids, "speculation": base.speculation}
        engine = Engine(target, config, drafter=drafter, **options)
    reach = max(p.reach(k, 1) for k in p.draft_counts)
    n_pages = config.n_pages or p.n_pages
    engine._scheduler = Scheduler(config, n_pages, drafter=p.has_drafter, reach=reach, room=p.room)
    engine.config = dataclasses.replace(config, max_batch=base.config.max_batch)  # the batch sizes are the programs'
    return engine


@functools.cache
def _pristine(base: Engine) -> Any:
    return base._programs.new_state()


def empty_state(base: Engine) -> Any:
    """A state before any request, without compiling what makes one again."""
    return jax.tree.map(lambda x: jnp.array(x, copy=True), _pristine(base))


@dataclass
class Answer:
    """What came out for one request."""

    tokens: list[int]
    reason: str | None = None
    error: str | None = field(default=None, compare=False)
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs], compare=False)

    def take(self, output: StepOutput) -> None:
        assert self.reason is None, "output after the end"
        assert output.tokens or output.error
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        self.reason, self.error = output.finish_reason, output.error


def serve(
    engine: Engine,
    arrivals: Sequence[tuple[int, Request]],
    *,
    before_step: Callable[[int], None] | None = None,
    most_steps: int = 400,
) -> dict[str, Answer]:
    """Run to the end, checking all that holds between steps; each request is added before the step of its number."""
    answers = {request.id: Answer([]) for _, request in arrivals}
    last = max(at for at, _ in arrivals)
    for step in range(most_steps):
        for at, request in arrivals:
            if at == step:
                engine.add(request)
        if before_step is not None:
            before_step(step)
        if step > last and not engine.has_work:
            break
        for output in engine.step():
            answers[output.request_id].take(output)
        check(engine)
    assert not engine.has_work, "the engine does not come to an end"
    stats = engine.stats()
    assert (stats.n_running, stats.n_waiting, stats.free_pages) == (0, 0, stats.total_pages)
    for _, request in arrivals:
        assert answers[request.id].tokens == request.output
    return answers


def check(engine: Engine) -> None:
    """Pages, places and queues add up, and nobody else reads the rows that the step under way may write."""
    engine.check_integrity()
    s = engine._scheduler
    for r in s.running:
        assert r.cached + r.in_flight >= r.cached >= 0
        if r.phase is Phase.DECODE:
            assert r.lease is not None
            s.prefix_of(r).check_write(
                r.lease, r.cached, min(r.cached + r.in_flight, len(r.pages) * s.config.page_size)
            )


def serve_all(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling], **options: Any
) -> list[Answer]:
    """All at once, in order."""
    each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else sampling
    requests = [engine.make_request(p, s, id=f"r{i}") for i, (p, s) in enumerate(zip(prompts, each, strict=True))]
    answers = serve(engine, [(0, r) for r in requests], **options)
    return [answers[r.id] for r in requests]


def step_often(engine: Engine, n: int) -> None:
    for _ in range(n):
        engine.step()


def serve_one(engine: Engine, prompt: Sequence[int], sampling: Sampling) -> Answer:
    return serve_all(engine, [prompt], sampling)[0]


@functools.cache
def greedy_text(prompt: tuple[int, ...], n: int) -> list[int]:
    """The tiny target's n most probable tokens, one after the other, each from a pass over the whole sequence."""
    text = list(prompt)
    for _ in range(n):
        text.append(int(plain_logits(tuple(text))[-1].argmax()))
    return text[len(prompt) :]
