"""The embedded model under load: nothing leaks, and speculation, caches and preemption change no text.

Where texts differ, the gap of the two logits is shown: rounding may decide between two that are as good as the same.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from kimijax.engine.engine import Engine
from kimijax.engine.request import Request, Sampling

from .engine_cases import check, serve_all, variant
from .nano_cases import gap, n_tokens_and_ends, nano_engine, prompts

TIE = 2e-3  # logits nearer than this may swap by rounding
GREEDY = Sampling(temperature=0.0, max_tokens=24)
# k drafts, branches, tokens verified; then whether every batch size has programs of its own.
SHAPES = [
    (0, 1, 0, 8),
    *((k, 1, 0, 2 if k == 3 else 8) for k in range(1, 8)),
    (3, 3, 8, 8),
    (4, 2, 9, 8),
    (5, 4, 16, 8),
]


@pytest.mark.slow
def test_greedy_text_is_the_same_whatever_is_drafted(capsys: pytest.CaptureFixture[str]) -> None:
    """k = 0 ... 7 and trees; batches of 1 to 8, chunks of 5 to 64 tokens, the prefix cache on and off; 200 prompts."""
    texts = prompts(200)
    base = variant(nano_engine(), stop_ids=n_tokens_and_ends()[1], prefix_cache=False)
    right = [a.tokens for a in serve_all(base, texts, GREEDY, most_steps=10_000)]
    request = base.make_request(texts[0], GREEDY)
    for k, width, n_verified, factor in SHAPES:
        begun, gaps, n_run = time.perf_counter(), list[float](), 0
        own = nano_engine(k, width, n_verified, factor)
        for i in range(25):
            sizes = {"max_batch": 1 + i % 8, "chunk_size": (64, 16, 5)[i % 3], "prefix_cache": i // 8 % 2 == 0}
            engine = variant(own, stop_ids=n_tokens_and_ends()[1], **sizes)
            some = [*range(i, 200, 25), i, i + 25]  # two come twice: the second time their prompts are cached
            for a, at in zip(serve_all(engine, [texts[j] for j in some], GREEDY), some, strict=True):
                n_run += 1
                if a.tokens != right[at]:
                    gaps.append(gap(dataclasses.replace(request, prompt=tuple(texts[at])), right[at], a.tokens))
        with capsys.disabled():
            seconds = time.perf_counter() - begun
            print(
                f"\nk {k}, {width} branches: {len(gaps)} of {n_run} texts differ, gaps {gaps}; {seconds:.0f} s", end=""
            )
        assert all(g < TIE for g in gaps), gaps
        jax.clear_caches()  # all kinds' programs together have more memory maps than a process may have


def load(engine: Engine, texts: Sequence[Sequence[int]], seed: int) -> list[Request]:
    """Requests of every sort, the same in each run."""
    rng = np.random.default_rng(seed)
    n_tokens, _ = n_tokens_and_ends()
    common = sorted({t for text in texts[:50] for t in text})
    requests: list[Request] = []
    for i, text in enumerate(texts):
        kind = rng.random()
        fields: dict[str, Any] = {"temperature": 0.0} if rng.random() < 0.5 else {"temperature": 1.0, "seed": i}
        if kind < 0.2:
            fields["stop_token_ids"] = tuple(int(t) for t in rng.choice(common, 4 if kind < 0.15 else 30))
        elif kind < 0.25:
            fields |= {"frequency_penalty": 0.8, "logit_bias": {int(rng.integers(n_tokens)): 3.0}}
        elif kind < 0.3:
            fields["logprobs"] = 2
        sampling = Sampling(max_tokens=int(rng.integers(1, 40)), priority=int(rng.choice([-1, 0, 0, 0, 1])), **fields)
        requests.append(engine.make_request(text, sampling, id=f"{seed}-{i}"))
    return requests


def run(engine: Engine, requests: Sequence[Request], seed: int, *, cancels: bool) -> dict[str, list[int]]:
    """Requests come a few at a time; some are cancelled, at any moment. What was delivered of each."""
    rng = np.random.default_rng(seed + 1)
    found: dict[str, list[int]] = {r.id: [] for r in requests}
    waiting = list(reversed(requests))
    alive: list[str] = []
    while waiting or engine.has_work:
        while waiting and len(alive) < 24 and rng.random() < 0.8:
            engine.add(waiting.pop())
            alive.append(f"{seed}-{len(requests) - len(waiting) - 1}")
        for output in engine.step():
            assert output.error is None
            found[output.request_id] += output.tokens
            if output.finish_reason is not None:
                alive.remove(output.request_id)
        if cancels and alive and rng.random() < 0.06:
            engine.cancel(alive.pop(rng.integers(len(alive))))
        check(engine)
    return found


SOAKS: Mapping[str, tuple[int, int, int]] = {"chain": (3, 1, 0), "tree": (3, 3, 8)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOAKS)
def test_soak(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """1,000 requests with cancels, stop ids, seeds, priorities and rules, in a pool that is always full."""
    begun, seed = time.perf_counter(), len(kind)
    texts = [prompts(1000)[i] for i in np.random.default_rng(seed).permutation(1000)]
    ends = n_tokens_and_ends()[1]
    engine = variant(nano_engine(*SOAKS[kind], batch_factor=2), stop_ids=ends, n_pages=16, chunk_size=32)
    requests = load(engine, texts, seed)
    found = run(engine, requests, seed, cancels=True)
    plain = variant(nano_engine(batch_factor=2), stop_ids=ends, prefix_cache=False)
    replayed = load(plain, texts, seed)
    right = run(plain, replayed, seed, cancels=False)
    gaps: list[float] = []
    n_cancelled = 0
    for r, again in zip(requests, replayed, strict=True):
        tokens, own = found[r.id], right[r.id]
        assert tokens == r.output
        if r.finish_reason is None:
            n_cancelled += 1
            own = own[: len(tokens)]
        else:
            assert tokens != own or r.finish_reason == again.finish_reason
        if tokens != own:
            gaps.append(gap(r, own, tokens))
    s = engine.stats()
    with capsys.disabled():
        print(
            f"\n{kind}: {len(gaps)} of {len(requests)} texts differ, gaps {gaps}; {n_cancelled} cancelled; {s}; ",
            end="",
        )
        print(f"{s.acceptance.length:.2f} tokens a round; {time.perf_counter() - begun:.0f} s", end="")
    assert n_cancelled > 30
    assert s.n_preempted > 50
    assert s.n_cached_tokens > 1000
    assert (s.n_running, s.n_waiting, s.free_pages) == (0, 0, s.total_pages)
    assert s.acceptance.rounds == sum(r.acceptance.rounds for r in requests)
    engine._scheduler.clear()  # refuses where a page is still held
    assert all(g < TIE for g in gaps), gaps
