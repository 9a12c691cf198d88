"""The engine on a tiny model: whatever the schedule, each request gets the tokens that it would get alone.

Right answers are those of the NumPy reference, which recomputes the whole sequence for each token. One set of compiled
programs serves every test here but the last: engines with other chunk sizes, bursts and pools are made around it.
"""

import dataclasses
import functools
import io
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from kimijax import checkpoint
from kimijax.config import load_config
from kimijax.engine.config import EngineConfig
from kimijax.engine.engine import Engine
from kimijax.engine.request import Request, Sampling
from kimijax.errors import RequestError
from kimijax.model import Target
from kimijax.sharding import make_mesh
from kimijax.startup_progress import Report, StartProgress

from . import golden, reference
from .engine_cases import Answer, check, quickly_compiled, serve, serve_one, step_often, variant

FAMILY = golden.FAMILIES["kimi_k2"]
CONFIG = EngineConfig(max_batch=4, context_length=64, page_size=8, chunk_size=16, burst=4)
N_TOKENS = 126  # of 128 ids: the last two belong to no token
IDS = [i for i in golden.load_golden("kimi_k2")["ids"].tolist() if i < N_TOKENS]
PROMPTS = [IDS[:1], IDS[1:8], IDS[8:24], IDS[24:47], IDS[47:87]]  # 1 to 40 tokens; 16 is exactly one chunk
GREEDY = Sampling(temperature=0.0, max_tokens=10, ignore_eos=True)


@functools.cache
def greedy_tokens(prompt: tuple[int, ...], n: int = 10) -> list[int]:
    """The n most probable tokens after a prompt, one after the other; the reference knows nothing of N_TOKENS."""
    sequence = list(prompt)
    for _ in range(n):
        logits = reference.forward(FAMILY, golden.hf_weights(FAMILY), sequence).logits[-1]
        sequence.append(int(np.argmax(logits[:N_TOKENS])))
    return sequence[len(prompt) :]


class Reports(StartProgress):
    """What the engine says while it compiles."""

    def __init__(self) -> None:
        super().__init__(lambda _: None, console=Console(file=io.StringIO()))
        self.lines: list[str] = []

    @contextmanager
    def counting(self, name: str, things: str) -> Generator[Report]:
        assert things == "programs"
        yield lambda what, i, n: self.lines.append(f"{name} {i} of {n}: {what}")


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with quickly_compiled():
        yield


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kimi_k2")
    golden.write_checkpoint("kimi_k2", path, dtype="float32", quantization=None)
    return path


def load(directory: Path, mesh: jax.sharding.Mesh | None = None) -> Target:
    return checkpoint.load(directory, load_config(directory), mesh=mesh, dtype=jnp.float32)


@pytest.fixture(scope="module")
def base(directory: Path) -> Iterator[Engine]:
    """A warm engine. However the tests use its programs, nothing more is compiled."""
    engine = Engine(load(directory), CONFIG, n_tokens=N_TOKENS)
    progress = Reports()
    engine.warm_up(progress)
    assert progress.lines == [
        "compiling 1 of 9: prefill 16 x 0",
        "compiling 2 of 9: prefill 16 x 64",
        "compiling 3 of 9: start",
        "compiling 4 of 9: copy",
        "compiling 5 of 9: rules",
        "compiling 6 of 9: 1 x 64, 0 drafts",
        "compiling 7 of 9: 1 x 64, 0 drafts, rules",
        "compiling 8 of 9: 4 x 64, 0 drafts",
        "compiling 9 of 9: 4 x 64, 0 drafts, rules",
    ]
    assert engine.n_compiled() == 9
    yield engine
    assert engine.n_compiled() == 9


SCHEDULES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "one_by_one": ([0, 60, 120, 180, 240], {}),
    "together": ([0, 0, 0, 0, 0], {}),
    "joining": ([3, 0, 9, 1, 4], {}),
    "small_chunks": ([0, 0, 2, 1, 3], {"chunk_size": 5}),
    "burst_of_1": ([2, 3, 0, 1, 0], {"burst": 1}),
    "batch_of_2": ([0, 1, 0, 2, 0], {"max_batch": 2}),
    "few_pages": ([0, 0, 0, 0, 0], {"n_pages": 9}),
    "few_pages_small_chunks": ([1, 2, 0, 0, 0], {"n_pages": 9, "chunk_size": 5, "burst": 2}),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_greedy_equals_the_reference(schedule: str, base: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, sizes = SCHEDULES[schedule]
    engine = variant(base, **sizes)
    outputs: list[int] = []  # of requests that had to give way
    preempt = engine._scheduler.preempt

    def watched(group: int | None = None) -> Request:
        request = preempt(group)
        outputs.append(len(request.output))
        return request

    monkeypatch.setattr(engine._scheduler, "preempt", watched)
    requests = [engine.make_request(p, GREEDY, id=str(i)) for i, p in enumerate(PROMPTS)]
    answers = serve(engine, list(zip(steps, requests, strict=True)))
    for request in requests:
        assert answers[request.id] == Answer(greedy_tokens(request.prompt), "length"), request.id
    assert bool(outputs) == ("n_pages" in sizes)
    assert engine.stats().n_preempted == len(outputs)
    assert any(outputs) == ("n_pages" in sizes)  # some had to be computed again with their output


def test_end_tokens(base: Engine) -> None:
    prompt = PROMPTS[1]
    right = greedy_tokens(tuple(prompt))
    first = {token: right.index(token) for token in right}  # where a token comes up first
    early, late = sorted(first, key=first.__getitem__)[2:4]
    until_early, until_late = right[: first[early] + 1], right[: first[late] + 1]
    until_end = dataclasses.replace(GREEDY, ignore_eos=False)

    def answer(stop_ids: Sequence[int], sampling: Sampling) -> Answer:
        return serve_one(variant(base, stop_ids=stop_ids), prompt, sampling)

    # the end of the text or of the turn, whichever comes: a model's configuration may name several
    assert answer([late], until_end) == Answer(until_late, "stop")
    assert answer([late, early], until_end) == Answer(until_early, "stop")
    assert answer([early], GREEDY) == Answer(right, "length")  # ignored
    stop_late = dataclasses.replace(GREEDY, stop_token_ids=(late,))
    assert answer([early], stop_late) == Answer(until_late, "stop")  # asked for by the request: not ignored
    assert answer([late], dataclasses.replace(until_end, stop_token_ids=(early,))) == Answer(until_early, "stop")
    exactly = dataclasses.replace(until_end, max_tokens=len(until_early))
    assert answer([early], exactly) == Answer(until_early, "stop")
    too_short = dataclasses.replace(until_end, max_tokens=len(until_early) - 1)
    assert answer([early], too_short) == Answer(until_early[:-1], "length")


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 6])
def test_max_tokens(max_tokens: int, base: Engine) -> None:
    """The first program draws one token, the others bursts of 4: 5 and 6 end with a burst, and just after it."""
    sampling = dataclasses.replace(GREEDY, max_tokens=max_tokens)
    answer = serve_one(variant(base), PROMPTS[2], sampling)
    assert answer == Answer(greedy_tokens(tuple(PROMPTS[2]))[:max_tokens], "length")


@pytest.mark.parametrize("max_tokens", [None, 100, 10**9])
@pytest.mark.parametrize("n", [55, 62, 63])
def test_the_context_s_end(n: int, max_tokens: int | None, base: Engine) -> None:
    """Prompt and answer fill the context of 64 to the last token, and no further; a neighbour is not disturbed."""
    engine = variant(base)
    long = engine.make_request(IDS[:n], dataclasses.replace(GREEDY, max_tokens=max_tokens), id="long")
    other = engine.make_request(PROMPTS[1], GREEDY, id="other")
    answers = serve(engine, [(0, other), (0, long)])
    assert answers["long"] == Answer(greedy_tokens(tuple(IDS[:n]), 64 - n), "length")
    assert answers["other"] == Answer(greedy_tokens(tuple(PROMPTS[1])), "length")
    assert serve_one(variant(base), IDS[:n], dataclasses.replace(GREEDY, max_tokens=max_tokens)) == answers["long"]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt: found no tokens, expected at least one"),
        (IDS[:64], "prompt: found 64 tokens, expected at most 63: the context holds 64"),
        (IDS[:65], "prompt: found 65 tokens, expected at most 63"),
        ([3, 128, 4], r"prompt: found token id 128, expected 0 ... 125"),
        ([3, N_TOKENS], r"prompt: found token id 126, expected 0 ... 125"),
        ([-1], r"prompt: found token id -1"),
        ([10**12], r"prompt: found token id 1000000000000"),
    ],
)
def test_bad_prompts_are_refused(prompt: list[int], message: str, base: Engine) -> None:
    with pytest.raises(RequestError, match=f"^{message}") as caught:
        base.make_request(prompt, GREEDY)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": float("nan")},
        {"top_k": -1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"min_p": float("nan")},
        {"seed": -1},
        {"seed": 2**63},
        {"max_tokens": 0},
        {"max_tokens": -5},
        {"stop_token_ids": (10**6,)},
        {"stop_token_ids": (1, -3)},
    ],
    ids=str,
)
def test_bad_sampling_is_refused_by_name(fields: dict[str, Any], base: Engine) -> None:
    with pytest.raises(RequestError, match="expected") as caught:
        base.make_request([1], Sampling(**fields))
    assert caught.value.field == next(iter(fields))
    assert str(next(iter(fields.values()))).strip("(),").split(", ")[-1] in caught.value.message


def test_cancelling_frees_pages_at_once(base: Engine) -> None:
    """Half way through its prompt, while a step of its is under way, while it waits; what is left runs on."""
    engine = variant(base, max_batch=2, chunk_size=8)
    kept, decoding, prefilling, waiting = (
        engine.make_request(PROMPTS[i], GREEDY, id=name)
        for i, name in ((3, "kept"), (1, "decoding"), (4, "prefilling"), (2, "waiting"))
    )
    total = engine.stats().total_pages
    tokens: list[int] = []

    def step() -> None:
        for output in engine.step():
            assert output.request_id == "kept"
            tokens.extend(output.tokens)
        check(engine)

    engine.add(decoding)
    step()
    assert decoding.pages
    assert decoding.in_flight
    engine.cancel("decoding")
    check(engine)
    assert engine.stats().free_pages == total
    assert not engine.has_work
    engine.add(prefilling)
    step()
    assert 0 < prefilling.cached < len(prefilling.prompt)
    engine.add(kept)
    engine.add(waiting)
    engine.cancel("prefilling")
    assert engine.stats().free_pages == total
    step()
    engine.cancel("waiting")
    engine.cancel("never was")
    while engine.has_work:
        step()
    assert tokens == greedy_tokens(tuple(PROMPTS[3]))
    assert engine.stats().free_pages == total


def test_a_place_is_taken_over_while_its_last_step_is_under_way(base: Engine) -> None:
    """The next request gets the place and the pages of one that was cancelled before its tokens were read."""
    engine = variant(base, max_batch=1, n_pages=8)
    for i in range(3):
        long = dataclasses.replace(GREEDY, max_tokens=20)
        first, second = (engine.make_request(PROMPTS[n], long, id=f"{i}, {n}") for n in (4, 3))
        engine.add(first)
        while not first.in_flight:
            engine.step()
        for _ in range(i):
            engine.step()
        assert first.in_flight
        place = first.place
        engine.add(second)
        engine.cancel(first.id)
        engine.step()
        assert second.place == place
        while engine.has_work:
            engine.step()
            check(engine)
        assert second.output == greedy_tokens(second.prompt, 20)
        assert first.output == greedy_tokens(first.prompt, 20)[: 4 * i]


def test_forty_requests_of_any_mix_compile_nothing(base: Engine) -> None:
    """Prompts of 1 to 40 tokens, batches of 1 to 4, every sort of sampling; only programs of the warm-up run."""
    engine = variant(base)
    sorts = [
        GREEDY,
        Sampling(seed=1, max_tokens=3),
        Sampling(top_k=5, top_p=0.9, min_p=0.01, max_tokens=7),
        Sampling(temperature=0.5, max_tokens=2),
    ]
    arrivals = [(n * 2 if n > 20 else n // 4, engine.make_request(IDS[:n], sorts[n % 4])) for n in range(1, 41)]
    answers = serve(engine, arrivals)
    for _, request in arrivals:
        assert 0 < len(answers[request.id].tokens) <= request.limit
        assert answers[request.id].reason == "length"
        if request.sampling is GREEDY:
            assert answers[request.id].tokens == greedy_tokens(request.prompt)
    assert engine.n_compiled() == 9


def test_pages_of_nobody_stay_as_they_are(base: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding rows of a batch, padding of a chunk and tokens beyond a request's end are written nowhere."""
    engine = variant(base)
    cache = jax.tree.map(lambda x: x + jnp.float32(7), engine._state.cache)
    engine._state = dataclasses.replace(engine._state, cache=cache)
    requests = [engine.make_request(IDS[i : i + 17], GREEDY) for i in range(3)]  # 3 rows in a program of 4
    used: set[int] = set()
    pool = engine._scheduler.prefixes[0].pool
    take = pool.take

    def watched(n: int) -> list[int] | None:
        pages = take(n)
        used.update(pages or ())
        return pages

    monkeypatch.setattr(pool, "take", watched)
    serve(engine, [(0, r) for r in requests])
    untouched = sorted(set(range(CONFIG.total_pages)) - used)
    assert used
    assert CONFIG.total_pages - 1 in untouched  # the last one: what index -1 would mean
    for pages in engine._state.cache.layers:
        assert (np.asarray(pages)[untouched] == 7).all()
        assert (np.asarray(pages)[sorted(used)] != 7).any(axis=(1, 2)).all()
    assert [r.output for r in requests] == [greedy_tokens(r.prompt) for r in requests]


@pytest.mark.parametrize("failing", ["_prefill", "_start", "_rounds"])
def test_recovery_from_a_failed_step(failing: str, base: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program raises after it took the donated state; the next requests are served as if nothing had been."""
    engine = variant(base)
    program = getattr(engine._programs, failing)

    def raises_at_the_end(*args: Any, **static: Any) -> None:
        jax.block_until_ready(program(*args, **static))
        raise RuntimeError("injected")

    for name, prompt in (("running", PROMPTS[3]), ("another", PROMPTS[1])):
        engine.add(engine.make_request(prompt, GREEDY, id=name))
    with monkeypatch.context() as patch:
        patch.setattr(engine._programs, failing, raises_at_the_end)
        with pytest.raises(RuntimeError, match="injected"):
            step_often(engine, 3)
    assert engine._state.cache.layers[0].is_deleted()
    waiting = {r.id for r in engine._scheduler.waiting}
    outputs = engine.recover()
    aborted = {o.request_id for o in outputs if o.finish_reason == "abort" and o.error}
    assert "running" in aborted
    assert aborted | waiting == {"running", "another"}
    assert engine.stats().free_pages == engine.stats().total_pages
    check(engine)
    later = [engine.make_request(p, GREEDY) for p in (PROMPTS[3], PROMPTS[2])]
    for request in later:
        engine.add(request)
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.tokens)
        check(engine)
    right = {r.id: greedy_tokens(r.prompt) for r in later}
    assert tokens == right | {name: greedy_tokens(tuple(PROMPTS[1])) for name in waiting}
    assert [r.cached_at_start for r in later] == [0, 0]  # nothing is found: the rows are gone with the old state


def test_a_seeded_request_draws_the_same_whatever_else_runs(base: Engine) -> None:
    sampling = Sampling(temperature=1.0, seed=11, max_tokens=12)
    prompt = PROMPTS[1]
    right = serve_one(variant(base), prompt, sampling)
    assert right.tokens != greedy_tokens(tuple(prompt), 12)

    def others(engine: Engine, n: int) -> list[Request]:
        sorts = [
            Sampling(max_tokens=9),
            Sampling(seed=3, top_p=0.9, max_tokens=5),
            GREEDY,
            Sampling(seed=11, top_k=4, temperature=2.0, max_tokens=14),
        ]
        return [engine.make_request(IDS[i : i + 2 + 3 * (i % 5)], sorts[i % 4]) for i in range(n)]

    def again(steps: Sequence[int], position: int = 0, **sizes: Any) -> Answer:
        engine = variant(base, **sizes)
        requests = others(engine, len(steps) - 1)
        requests.insert(position, engine.make_request(prompt, sampling, id="seeded"))
        return serve(engine, list(zip(steps, requests, strict=True)))["seeded"]

    assert again([0]) == right
    assert again([0] * 8) == right  # with 7 others
    assert again([0] * 8, position=6) == right
    assert again([5, 0, 0, 4, 1, 7, 2, 3]) == right
    assert again([0, 1, 2, 3, 4, 5, 6, 30], position=7) == right  # after others
    assert again([2, 0, 1, 0, 3], burst=1, chunk_size=3) == right
    assert again([0, 0, 0, 0, 0], position=4, n_pages=8) == right  # preempted and computed again
    engine = variant(base)
    twice = [engine.make_request(prompt, sampling, id=i) for i in "ab"]
    unseeded = [engine.make_request(prompt, dataclasses.replace(sampling, seed=None), id=i) for i in "cd"]
    answers = serve(engine, [(0, r) for r in (*twice, *unseeded)])
    assert answers["a"] == answers["b"] == right
    assert answers["c"].tokens != answers["d"].tokens
    assert unseeded[0].seed != unseeded[1].seed


def test_ids_that_are_no_tokens_are_never_drawn(base: Engine) -> None:
    engine = variant(base)
    flat = Sampling(temperature=1e4, max_tokens=60)
    requests = [engine.make_request([i], dataclasses.replace(flat, seed=i)) for i in range(12)]
    drawn = [t for a in serve(engine, [(0, r) for r in requests]).values() for t in a.tokens]
    assert len(drawn) == 12 * 60
    assert max(drawn) == N_TOKENS - 1
    assert len(set(drawn)) > 120


def test_eight_devices_draw_one_device_s_tokens(directory: Path) -> None:
    mesh = make_mesh()
    assert mesh.shape["tensor"] == 8
    config = EngineConfig(max_batch=1, context_length=32, page_size=8, chunk_size=32, burst=4)
    engine = Engine(load(directory, mesh), config, n_tokens=N_TOKENS, mesh=mesh)
    engine.warm_up()
    n = engine.n_compiled()
    for prompt in (PROMPTS[1], PROMPTS[2]):
        answer = serve_one(engine, prompt, dataclasses.replace(GREEDY, max_tokens=9))
        assert answer == Answer(greedy_tokens(tuple(prompt))[:9], "length")
        assert engine.recover() == []  # nothing failed; but a new cache must lie where the old one did
    assert engine.n_compiled() == n
