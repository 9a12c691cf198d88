"""The engine with a drafter: the target's own text, whatever is guessed, cached, preempted, cut or broken.

Right texts come from passes over whole sequences (`greedy_text`), the engine without drafts, and `Speculator`.
"""

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import pytest

from kimijax.acceptance import Acceptance
from kimijax.engine.device import MAX_ENDS
from kimijax.engine.engine import Engine
from kimijax.engine.request import Phase, Request, Sampling
from kimijax.speculator import Generation

from .engine_cases import (
    TINY,
    Answer,
    check,
    few_pages,
    greedy_text,
    quickly_compiled,
    serve,
    serve_all,
    serve_one,
    step_often,
    tiny,
)
from .tiny_speculation import DRAFT_IDS, LIMITS, PROMPTS, VOCAB, settings, speculator, tiny_drafter, tiny_target

GREEDY = Sampling(temperature=0.0, max_tokens=20)
SEEDED = Sampling(temperature=1.0, seed=11, max_tokens=20)
# Two more share the first tokens of others: up to the middle of a page, and as a whole.
TEXTS = [*PROMPTS, [*PROMPTS[1][:14], 7, 8, 9], PROMPTS[4][:12]]


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with quickly_compiled():
        yield


def right(prompts: Sequence[Sequence[int]], n: int = 20) -> list[Answer]:
    return [Answer(greedy_text(tuple(p), n), "length") for p in prompts]


def acceptance(requests: Sequence[Request]) -> Acceptance:
    return sum((r.acceptance for r in requests), Acceptance())


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("paged", "block", "small pages", "page of 16")]


@pytest.mark.parametrize("kind", ["plain", "chain", "tree", *SLOW])
def test_greedy_text_is_the_targets_own(kind: str) -> None:
    """Any batch, chunk, pool and order of arrival, with the prefix cache and without; and again, on what is cached."""
    for n in range(1, 9):
        assert serve_all(tiny(kind), TEXTS[:n], GREEDY) == right(TEXTS[:n])
    variants = [{"chunk_size": 5}, {"chunk_size": 3, "burst": 1}, {"max_batch": 3}, few_pages(kind)]
    for sizes in variants:
        for prefix_cache in (True, False):
            engine = tiny(kind, prefix_cache=prefix_cache, **sizes)
            for _ in range(2):
                assert serve_all(engine, TEXTS, GREEDY) == right(TEXTS), sizes
            assert (engine.stats().n_preempted > 0) == ("n_pages" in sizes)
            assert (engine.stats().n_cached_tokens > 0) == prefix_cache
    engine = tiny(kind, **few_pages(kind, chunk_size=7))
    arrivals = [(at, engine.make_request(p, GREEDY)) for at, p in zip((4, 0, 1, 9, 2, 3, 0, 12), TEXTS, strict=True)]
    answers = serve(engine, arrivals)
    assert [answers[r.id] for _, r in arrivals] == right(TEXTS)
    if kind != "plain":  # otherwise this shows nothing: guesses pass and fail
        assert all(0.1 < share < 0.95 for share in engine.stats().acceptance.by_position)


@pytest.mark.parametrize("kind", ["plain", "chain", "tree", *SLOW])
def test_a_seeded_text_depends_on_its_seed_alone(kind: str) -> None:
    """Not on drafts, neighbours, their seeds, the order of arrival, what is cached, or on being computed again."""
    prompt = TEXTS[1]
    text = serve_one(tiny("plain"), prompt, SEEDED)
    assert text.tokens != greedy_text(tuple(prompt), 20)
    sorts = [
        GREEDY,
        Sampling(max_tokens=9),
        Sampling(seed=3, top_p=0.9, max_tokens=5),
        Sampling(seed=11, top_k=4, temperature=2.0, max_tokens=14),
    ]

    def again(steps: Sequence[int], position: int = 0, first: int = 0, **sizes: Any) -> Answer:
        engine = tiny(kind, **sizes)
        requests = [engine.make_request(TEXTS[first + i], sorts[i % 4]) for i in range(len(steps) - 1)]
        requests.insert(position, engine.make_request(prompt, SEEDED, id="seeded"))
        answers = serve(engine, list(zip(steps, requests, strict=True)))
        for r in requests:
            if r.sampling is GREEDY:
                assert answers[r.id].tokens == greedy_text(r.prompt, 20)
        assert (engine.stats().n_preempted > 0) == ("n_pages" in sizes)
        return answers["seeded"]

    assert again([0]) == text
    assert again([0] * 8) == text
    assert again([5, 0, 0, 4, 1, 7, 2, 3], position=6) == text
    assert again([0, 1, 2, 3, 4, 5, 6, 30], position=7) == text
    assert again([2, 0, 1, 0, 3], burst=1, chunk_size=3) == text
    assert again([0, 0], position=1, first=4, **few_pages(kind)) == text  # it gives way to a long one
    engine = tiny(kind)
    unseeded = dataclasses.replace(SEEDED, seed=None)
    other = dataclasses.replace(SEEDED, seed=12)
    twice = serve_all(engine, [prompt] * 6, [SEEDED, unseeded, other, unseeded, SEEDED, other])
    assert twice[0] == twice[4] == text
    assert twice[2] == twice[5]
    assert len({tuple(a.tokens) for a in twice}) == 4
    assert serve_one(engine, prompt, SEEDED) == text  # on its own cached tokens


def test_several_choices_of_one_prompt() -> None:
    """Seeds of their own: different texts, the same ones in each run; one that ends early stops no other."""
    each = [dataclasses.replace(SEEDED, seed=7 + i) for i in range(4)]
    texts = [serve_one(tiny("plain"), TEXTS[5], s).tokens for s in each]
    assert len({tuple(t) for t in texts}) == 4
    end = next(t for t in texts[2][3:] if all(t not in other for i, other in enumerate(texts) if i != 2))
    cut = texts[2].index(end) + 1
    ending = [dataclasses.replace(s, stop_token_ids=(end,)) for s in each]
    for kind in ("plain", "chain", "tree"):
        answers = serve_all(tiny(kind), [TEXTS[5]] * 4, ending)
        assert answers[2] == Answer(texts[2][:cut], "stop")
        assert [answers[i] for i in (0, 1, 3)] == [Answer(texts[i], "length") for i in (0, 1, 3)]


def rows_of(samplings: Sequence[Sampling]) -> Any:
    rows = [{"temperature": s.temperature, "seed": s.seed or 0, "coupled": int(s.seed is not None)} for s in samplings]
    return settings([{"top_p": s.top_p, **row} for s, row in zip(samplings, rows, strict=True)])


def offline(prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> list[Generation]:
    limits = [s.max_tokens or 0 for s in samplings]
    return speculator().generate(prompts, rows_of(samplings), limits, k=3)


def test_acceptance_is_what_is_measured_offline() -> None:
    """The engine's counters, for each request and in all, are those of `Speculator` for the same prompts; with other
    requests around, chunks of another size and cached prefixes too."""
    sorts = [GREEDY, dataclasses.replace(SEEDED, top_p=0.95), dataclasses.replace(GREEDY, max_tokens=LIMITS[2])]
    samplings = [dataclasses.replace(sorts[i % 3], seed=i if i % 3 == 1 else None) for i in range(6)]
    found = offline(PROMPTS, samplings)
    measured = sum((g.acceptance for g in found), Acceptance())
    assert 0.1 < measured.rate < 0.9
    engine = tiny("chain", chunk_size=5)
    total = Acceptance()
    for arrivals in ([0, 0, 0, 0, 0, 0], [0, 3, 1, 0, 7, 2]):  # the second time on what the first has cached
        requests = [engine.make_request(p, s) for p, s in zip(PROMPTS, samplings, strict=True)]
        answers = serve(engine, list(zip(arrivals, requests, strict=True)))
        for request, generation in zip(requests, found, strict=True):
            assert answers[request.id].tokens == list(generation.tokens)
            assert request.acceptance == generation.acceptance
        total += measured
        assert engine.stats().acceptance == total
    assert all(r.cached_at_start for r in requests if len(r.prompt) > TINY.page_size)
    assert engine.stats().n_without_guesses == 0


def ends_unseen() -> tuple[list[int], list[int], int]:
    """A prompt, more stop ids than a program knows, and where its text meets the one that is left out."""
    for first in range(VOCAB):
        text = greedy_text((first, 1), 20)
        for at in range(6, 14):
            others = [t for t in range(text[at]) if t not in text[:at]][:MAX_ENDS]
            if text[at] not in text[:at] and len(others) == MAX_ENDS:
                return [first, 1], [*others, text[at]], at
    raise AssertionError("no text meets a high enough id")


@pytest.mark.parametrize("kind", ["plain", "chain", "tree"])
def test_an_end_that_the_host_alone_sees(kind: str) -> None:
    """The program goes on behind it; the text does not, nor do the counters: what is after the end is no round."""
    prompt, stops, at = ends_unseen()
    text = greedy_text(tuple(prompt), at + 1)
    for neighbour in (False, True):
        engine = tiny(kind)
        few, many = (
            engine.make_request(prompt, dataclasses.replace(GREEDY, stop_token_ids=tuple(ids)))
            for ids in (stops[-1:], stops)
        )
        other = engine.make_request(PROMPTS[4], GREEDY)
        serve(engine, [(0, few)])
        answers = serve(engine, [(0, many), (0, other)] if neighbour else [(0, many)])
        assert answers[many.id] == Answer(text, "stop")
        assert few.output == text
        assert many.acceptance == few.acceptance
        assert engine.stats().acceptance == acceptance([few, many, other])
        assert (few.acceptance.rounds > 1) == (kind != "plain")


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_counters_after_cancelled_requests(kind: str) -> None:
    """A request that is cancelled leaves the rounds behind whose tokens were delivered, whoever runs beside it."""
    for neighbour in (False, True):
        engine = tiny(kind, burst=1)
        request = engine.make_request(PROMPTS[1], GREEDY, id="cancelled")
        other = engine.make_request(PROMPTS[4], GREEDY, id="other")
        engine.add(request)
        if neighbour:
            engine.add(other)
        while len(request.output) < 8:
            engine.step()
            check(engine)
        assert request.in_flight
        engine.cancel("cancelled")
        check(engine)
        before = request.acceptance
        assert len(request.output) == 1 + before.rounds + sum(before.accepted)
        while engine.has_work:
            engine.step()
        engine.step()
        assert request.acceptance == before
        assert engine.stats().acceptance == before + other.acceptance
        if neighbour:
            assert other.output == greedy_text(tuple(PROMPTS[4]), 20)


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_an_end_anywhere_in_a_block_is_the_last(kind: str) -> None:
    """An end token, a stop id of the request, and max_tokens, at each position of the text; whichever comes first."""
    prompt = PROMPTS[1]
    text = greedy_text(tuple(prompt), 20)
    engine = tiny(kind)
    requests: list[Request] = []
    wanted: list[Answer] = []
    for i in range(20):
        if text[i] not in text[:i]:
            stop = dataclasses.replace(GREEDY, stop_token_ids=(text[i],), max_tokens=20 if i % 2 else i + 1)
            requests.append(engine.make_request(prompt, stop))
            wanted.append(Answer(text[: i + 1], "stop"))
        requests.append(engine.make_request(prompt, dataclasses.replace(GREEDY, max_tokens=i + 1)))
        wanted.append(Answer(text[: i + 1], "length"))
    answers = serve(engine, [(0, r) for r in requests])
    assert [answers[r.id] for r in requests] == wanted
    assert {len(a.tokens) for a in wanted} == set(range(1, 21))


def test_the_context_ends_with_the_last_token_that_fits() -> None:
    for kind in ("chain", "tree"):
        for n in (57, 58, 59):
            prompt = (PROMPTS[4] * 2)[:n]
            answer = serve_one(tiny(kind), prompt, dataclasses.replace(GREEDY, max_tokens=None))
            assert answer == Answer(greedy_text(tuple(prompt), 60 - n), "length")


@pytest.mark.slow
def test_programs_of_one_row_guess_what_those_of_eight_do() -> None:
    """They store their rows another way; up to the context's end, and on what is cached."""
    one, eight = tiny("one row"), tiny("chain")
    prompts = [*TEXTS, *((PROMPTS[4] * 2)[:n] for n in (40, 45, 50, 57, 59, 45))]
    for prompt in prompts:
        for sampling in (dataclasses.replace(GREEDY, max_tokens=None), SEEDED):
            requests = [engine.make_request(prompt, sampling) for engine in (one, eight)]
            answers = [serve(engine, [(0, r)])[r.id] for engine, r in zip((one, eight), requests, strict=True)]
            assert answers[0] == answers[1]
            assert requests[0].acceptance == requests[1].acceptance
    assert one.stats().acceptance.rounds > 100


def test_a_draft_row_of_another_next_token_is_not_shared() -> None:
    """Prompts that part right behind a page: the page's last draft row belongs to the token after it."""
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 9], [1, 2, 3, 4, 5], [1, 2, 3, 4]]
    cached, plain = tiny("chain"), tiny("chain", prefix_cache=False)
    begun: list[int] = []
    for prompt in prompts:
        requests = [engine.make_request(prompt, GREEDY) for engine in (cached, plain)]
        for engine, request in zip((cached, plain), requests, strict=True):
            assert serve(engine, [(0, request)])[request.id] == right([prompt])[0]
        assert requests[0].acceptance == requests[1].acceptance
        assert requests[0].acceptance.rounds > 2
        begun.append(requests[0].cached_at_start)
    assert begun == [0, 3, 4, 3]
    assert cached.stats().n_cached_tokens == sum(begun)
    assert cached.stats().acceptance == plain.stats().acceptance
    assert plain.stats().n_cached_tokens == 0


def test_several_prompts_share_a_step() -> None:
    """16 tokens of prompts: the first three, and the first rows of the fourth; all three decode at once."""
    engine = tiny("chain")
    requests = [engine.make_request(PROMPTS[i], GREEDY) for i in (0, 5, 0, 4)]
    for request in requests:
        engine.add(request)
    engine.step()
    assert [r.phase for r in requests] == [Phase.DECODE] * 3 + [Phase.PREFILL]
    assert requests[3].cached == 16 - 2 - 8 - 2
    while engine.has_work:
        engine.step()
        check(engine)
    assert [r.output for r in requests] == [greedy_text(r.prompt, 20) for r in requests]


def broken(token: int | None = None, kind: str = "chain") -> Engine:
    """A target with a token whose embedding is not a number; or, without one, a drafter none of whose logits is."""
    models = tiny_target.__wrapped__(), tiny_drafter.__wrapped__()
    weight = models[1].fc if token is None else models[0].embed
    weight.set_value(weight.get_value().at[slice(None) if token is None else token].set(jnp.nan))
    return tiny(kind, weights=models)


@pytest.mark.parametrize("kind", ["chain", pytest.param("paged", marks=pytest.mark.slow)])
def test_logits_that_are_no_number_end_one_request(kind: str) -> None:
    """And neither its neighbours nor those that get its pages and its place afterwards."""
    used = [{*p, *greedy_text(tuple(p), 20)} for p in TEXTS]
    bad = min(range(VOCAB), key=lambda token: sum(token in tokens for tokens in used))
    engine, good = broken(bad, kind), [p for p, tokens in zip(TEXTS, used, strict=True) if bad not in tokens]
    assert len(good) > 3
    for _ in range(3):
        poison = engine.make_request([4, bad, 5, 6, 7], GREEDY, id="broken")
        requests = [engine.make_request(p, GREEDY) for p in good]
        answers = serve(engine, [(0, r) for r in (requests[0], poison, *requests[1:])])
        assert answers["broken"].reason == "abort"
        assert answers["broken"].tokens == []
        assert "not a number" in (answers["broken"].error or "")
        assert [answers[r.id] for r in requests] == right(good)
    engine.cancel("broken")
    assert engine.stats().n_output_tokens == 3 * 20 * len(good)


def test_a_drafter_that_is_no_number_costs_no_token(caplog: pytest.LogCaptureFixture) -> None:
    """The text is right, the counter counts, and the log says it once."""
    engine = broken()
    with caplog.at_level(logging.ERROR):
        assert serve_all(engine, TEXTS, GREEDY) == right(TEXTS)
    said = [r.message for r in caplog.records if "the drafter's logits are not a number" in r.message]
    assert len(said) == 1
    stats = engine.stats()
    assert stats.n_without_guesses > 20
    assert stats.acceptance.rounds == 0


def test_recovery_gives_a_new_state_to_both_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round raises after it took the state, with requests in the queue; nothing of the old state is found again."""
    engine = tiny("chain", max_batch=2)
    program = engine._programs._rounds
    for i, p in enumerate(TEXTS[:4]):
        engine.add(engine.make_request(p, GREEDY, id=str(i)))
    engine.step()
    with monkeypatch.context() as patch:

        def raises_at_the_end(*args: Any, **static: Any) -> None:
            program(*args, **static)
            raise RuntimeError("injected")

        patch.setattr(engine._programs, "_rounds", raises_at_the_end)
        with pytest.raises(RuntimeError, match="injected"):
            step_often(engine, 4)
    aborted = {o.request_id for o in engine.recover() if o.finish_reason == "abort"}
    assert aborted == {"0", "1"}
    outputs: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).extend(output.tokens)
        check(engine)
    assert outputs == {str(i): greedy_text(tuple(TEXTS[i]), 20) for i in (2, 3)}
    answers = serve_all(engine, TEXTS[:2], GREEDY)
    assert answers == right(TEXTS[:2])


def test_tokens_that_the_drafter_has_not_are_drawn_all_the_same() -> None:
    answers = serve_all(tiny("chain"), TEXTS, dataclasses.replace(SEEDED, max_tokens=26))
    assert {t for a in answers for t in a.tokens} - set(DRAFT_IDS)
