"""Requests with rules, constraints and log-probabilities in the engine: exact under speculation, and nobody else's.

Right texts are worked out token by token, in NumPy, from passes over whole sequences.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from kimijax.engine.engine import Engine
from kimijax.engine.request import ConstraintError, Request, Sampling
from kimijax.engine.rule_programs import mask_words

from .engine_cases import Answer, check, few_pages, greedy_text, quickly_compiled, serve, serve_all, serve_one, tiny
from .engine_cases import engine as compiled
from .tiny_speculation import PROMPTS, VOCAB, plain_logits

N = 14
GREEDY = Sampling(temperature=0.0, max_tokens=N)
SEEDED = Sampling(temperature=1.0, seed=5, max_tokens=N)
KINDS = ["plain", "chain", pytest.param("tree", marks=pytest.mark.slow)]

Allowed = Callable[[Sequence[int]], set[int]]  # output so far -> ids that may come next


@pytest.fixture(scope="module", autouse=True)
def warm() -> Iterator[None]:
    """All programs of the chain, as a server has them: nothing below compiles more."""
    with quickly_compiled():
        base = compiled("chain")
        base.warm_up()
        n = base.n_compiled()
        yield
        assert base.n_compiled() == n > 0


def everything(_: Sequence[int]) -> set[int]:
    return set(range(VOCAB))


def processed(
    prompt: Sequence[int], output: Sequence[int], s: Sampling, stops: Sequence[int], allowed: set[int]
) -> np.ndarray:
    """The logits of the next token after all rules: float64 [V]."""
    logits = plain_logits((*prompt, *output))[-1].astype(np.float64)
    seen = sorted({*prompt, *output})
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / s.repetition_penalty, logits[seen] * s.repetition_penalty)
    counts = np.bincount(np.asarray(output, int), minlength=VOCAB)
    logits -= s.frequency_penalty * counts + s.presence_penalty * (counts > 0)
    for token, bias in s.logit_bias.items():
        logits[token] += bias
    if len(output) < s.min_tokens:
        logits[list(stops)] = -np.inf
    for *before, last in s.bad_words:
        if list(output[len(output) - len(before) :]) == before:
            logits[last] = -np.inf
    logits[sorted(set(range(VOCAB)) - allowed)] = -np.inf
    return logits


def ruled_text(
    prompt: Sequence[int], s: Sampling, *, stops: Sequence[int] = (), allowed: Allowed = everything
) -> Answer:
    """The greedy text of a request with rules, one token after the other."""
    output: list[int] = []
    while len(output) < (s.max_tokens or 0):
        output.append(int(processed(prompt, output, s, stops, allowed(output)).argmax()))
        if output[-1] in stops:
            return Answer(output, "stop")
    return Answer(output, "length")


def ruled(**fields: Any) -> Sampling:
    return dataclasses.replace(GREEDY, **fields)


@functools.cache
def rules() -> dict[str, Sampling]:
    """What each does is chosen by the plain text of PROMPTS[1], so that it does something."""
    text = greedy_text(tuple(PROMPTS[1]), N)
    return {
        "repetition": ruled(repetition_penalty=1.7),
        "frequency": ruled(frequency_penalty=0.9),
        "presence": ruled(presence_penalty=1.5),
        "bias": ruled(logit_bias={text[2]: -100.0, 7: 2.5}),
        "min_tokens": ruled(min_tokens=8, stop_token_ids=tuple({text[3], text[5]})),
        "bad_words": ruled(bad_words=((text[1],), (text[4], text[5]), (text[6], text[7], text[8]))),
        "all": ruled(
            repetition_penalty=1.2,
            frequency_penalty=-0.2,
            presence_penalty=0.7,
            logit_bias={3: 1.5, 4: -1.0},
            min_tokens=5,
            stop_token_ids=(text[1], text[3]),
            bad_words=((text[2], text[3]),),
        ),
    }


def right(prompt: Sequence[int], s: Sampling) -> Answer:
    return ruled_text(prompt, s, stops=s.stop_token_ids)


def test_the_rules_of_these_tests_do_something() -> None:
    plain = greedy_text(tuple(PROMPTS[1]), N)
    assert all(right(PROMPTS[1], s).tokens != plain for name, s in rules().items() if name != "min_tokens")
    stops = rules()["min_tokens"].stop_token_ids
    assert right(PROMPTS[1], rules()["min_tokens"]) != ruled_text(PROMPTS[1], GREEDY, stops=stops)
    assert right(PROMPTS[1], GREEDY) == Answer(plain, "length")


@pytest.mark.parametrize("kind", KINDS)
def test_rules_bind_every_token_and_no_neighbour(kind: str) -> None:
    """All rules side by side with rows that have none, in full and in small pools, and each alone."""
    sampled = serve_one(tiny("plain"), PROMPTS[2], SEEDED)
    assert sampled.tokens != greedy_text(tuple(PROMPTS[2]), N)
    for sizes in (dict[str, Any](), few_pages(kind), {"chunk_size": 3, "prefix_cache": False}):
        engine = tiny(kind, **sizes)
        requests = [engine.make_request(PROMPTS[1], s, id=name) for name, s in rules().items()]
        requests.insert(3, engine.make_request(PROMPTS[1], GREEDY, id="greedy"))
        requests.insert(5, engine.make_request(PROMPTS[2], SEEDED, id="seeded"))
        answers = serve(engine, list(zip((0, 0, 2, 0, 1, 0, 0, 4, 0), requests, strict=True)))
        for name, s in rules().items():
            assert answers[name] == right(PROMPTS[1], s), name
        assert answers["greedy"] == right(PROMPTS[1], GREEDY)
        assert answers["seeded"] == sampled
        assert (engine.stats().n_preempted > 0) == ("n_pages" in sizes)
        if kind != "plain":
            assert 0.05 < engine.stats().acceptance.rate < 0.95
    for name, s in rules().items():
        for prompt in PROMPTS[:2]:
            assert serve_one(tiny(kind), prompt, s) == right(prompt, s), name


@pytest.mark.parametrize("kind", KINDS)
def test_seeded_texts_with_rules_are_those_without_drafts(kind: str) -> None:
    each = [dataclasses.replace(s, temperature=1.0, seed=i, top_p=0.95) for i, s in enumerate(rules().values())]
    alone = [serve_one(tiny("plain"), PROMPTS[1], s) for s in each]
    assert serve_all(tiny(kind), [PROMPTS[1]] * len(each), each) == alone
    assert serve_all(tiny(kind, **few_pages(kind)), [PROMPTS[1]] * len(each), each[::-1]) == alone[::-1]


def test_a_second_request_of_the_same_name_has_its_own_rules() -> None:
    engine = tiny("chain")
    for s in (rules()["bias"], GREEDY, rules()["frequency"], dataclasses.replace(GREEDY, logprobs=0)):
        assert serve_one(engine, PROMPTS[1], s) == right(PROMPTS[1], s)


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_the_targets_own(kind: str) -> None:
    """One entry for each token of the output, of the target's distribution before any rule or temperature, whether it
    was a guess or not; none behind an end inside a block, and none for those that asked for none."""
    text = greedy_text(tuple(PROMPTS[1]), N)
    wanted = [
        dataclasses.replace(GREEDY, logprobs=3),
        dataclasses.replace(SEEDED, logprobs=2, top_k=20),
        dataclasses.replace(rules()["all"], logprobs=0),
        GREEDY,
        dataclasses.replace(GREEDY, logprobs=1, stop_token_ids=(text[5],)),
        dataclasses.replace(SEEDED, logprobs=20, temperature=0.5, seed=9, max_tokens=5),
    ]
    prompts = [PROMPTS[i] for i in (1, 1, 1, 4, 1, 0)]
    plain = serve_all(tiny("plain"), prompts, wanted)
    for sizes in (dict[str, Any](), few_pages(kind)):
        answers = serve_all(tiny(kind, **sizes), prompts, wanted)
        assert answers == plain
        for prompt, s, answer in zip(prompts, wanted, answers, strict=True):
            if s.logprobs is None:
                assert answer.logprobs == []
                continue
            assert [x.token for x in answer.logprobs] == answer.tokens
            logits = plain_logits((*prompt, *answer.tokens))[len(prompt) - 1 : -1].astype(np.float64)
            own = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            found = [x.logprob for x in answer.logprobs]
            np.testing.assert_allclose(found, own[range(len(own)), answer.tokens], atol=1e-4)
            assert max(found) < 0
            for x, row in zip(answer.logprobs, own, strict=True):
                best = np.argsort(-row)[: s.logprobs]
                assert [i for i, _ in x.top] == best.tolist()
                np.testing.assert_allclose([p for _, p in x.top], row[best], atol=1e-4)
    assert answers[4].tokens == text[: text.index(text[5]) + 1]


class Script:
    """Allows what a function of the output says, and checks that it is told of the output and of nothing else."""

    def __init__(self, allowed: Allowed) -> None:
        self.allowed = allowed
        self.output: list[int] = []
        self.n_guesses = 0  # that it was asked about

    def masks(self, guesses: Sequence[int]) -> np.ndarray:
        self.n_guesses += sum(g >= 0 for g in guesses)
        bits = np.zeros((len(guesses) + 1, 32 * mask_words(VOCAB)), np.uint8)
        text = list(self.output)
        for row, guess in zip(bits, [*guesses, -1], strict=True):
            row[sorted(self.allowed(text))] = 1
            if guess < 0 or not row[guess]:
                break
            text.append(guess)
        return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)

    def commit(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token not in self.allowed(self.output):
                raise ConstraintError(f"token {token} after {self.output}")
            self.output.append(token)


def by_sum(output: Sequence[int]) -> set[int]:
    """Half of all ids, another half after each token."""
    return {i for i in range(VOCAB) if (i + sum(output)) % 3 != 1}


def once_it_was_there(mark: int) -> Allowed:
    """Everything up to a token, and few ids after it, as a schema is switched on by the end of thinking."""

    def allowed(output: Sequence[int]) -> set[int]:
        return set(range(1, VOCAB, 4)) if mark in output else set(range(VOCAB))

    return allowed


@pytest.mark.parametrize("kind", KINDS)
def test_a_constraint_holds_at_every_token_of_a_block(kind: str) -> None:
    """It is moved by the output alone, never by a guess; it may begin inside a block; its neighbours know nothing."""
    text = greedy_text(tuple(PROMPTS[1]), N)
    mark = next(t for i, t in enumerate(text) if i >= 4 and t not in text[:i])
    for sizes in (dict[str, Any](), few_pages(kind)):
        engine = tiny(kind, **sizes)
        scripts = [Script(by_sum), Script(once_it_was_there(mark)), Script(by_sum), Script(everything)]
        samplings = [GREEDY, GREEDY, rules()["all"], dataclasses.replace(GREEDY, logprobs=1)]
        requests = [
            engine.make_request(PROMPTS[1], s, id=str(i), constraint=script)
            for i, (s, script) in enumerate(zip(samplings, scripts, strict=True))
        ]
        requests.insert(1, engine.make_request(PROMPTS[4], GREEDY, id="plain"))
        requests.append(engine.make_request(PROMPTS[1], SEEDED, id="seeded", constraint=Script(by_sum)))
        answers = serve(engine, list(zip((0, 0, 1, 0, 3, 2), requests, strict=True)))
        for i, (s, script) in enumerate(zip(samplings, scripts, strict=True)):
            assert answers[str(i)] == ruled_text(PROMPTS[1], s, stops=s.stop_token_ids, allowed=script.allowed)
        for request in requests:
            if request.constraint is not None:
                assert isinstance(request.constraint, Script)
                assert request.constraint.output == request.output
                assert (request.constraint.n_guesses > 0) == (kind != "plain")
        assert answers["1"].tokens != text
        assert answers["1"].tokens[: text.index(mark) + 1] == text[: text.index(mark) + 1]
        assert answers["plain"].tokens == greedy_text(tuple(PROMPTS[4]), N)
        sampled = serve_one_with(tiny("plain"), Script(by_sum), SEEDED)
        assert answers["seeded"] == sampled
        assert sampled.tokens != answers["0"].tokens


def serve_one_with(engine: Engine, script: Script, sampling: Sampling) -> Answer:
    request = engine.make_request(PROMPTS[1], sampling, constraint=script)
    return serve(engine, [(0, request)])[request.id]


def test_a_constraint_that_fails_or_allows_nothing_ends_its_own_request() -> None:
    class Failing(Script):
        def masks(self, guesses: Sequence[int]) -> np.ndarray:
            if len(self.output) > 3:
                raise ConstraintError("the grammar is at its end")
            return super().masks(guesses)

    def until(n: int) -> Allowed:
        return lambda output: set(range(VOCAB)) if len(output) < n else set()

    for kind in ("plain", "chain"):
        engine = tiny(kind)
        requests = [
            engine.make_request(PROMPTS[1], GREEDY, id=name, constraint=script)
            for name, script in (("failing", Failing(by_sum)), ("nothing", Script(until(3))), ("good", Script(by_sum)))
        ]
        requests.append(engine.make_request(PROMPTS[4], GREEDY, id="plain"))
        answers = serve(engine, [(0, r) for r in requests])
        assert (answers["failing"].reason, answers["nothing"].reason) == ("abort", "abort")
        assert "at its end" in (answers["failing"].error or "")
        assert "no token" in (answers["nothing"].error or "")
        assert answers["nothing"].tokens == greedy_text(tuple(PROMPTS[1]), 3)
        assert answers["good"] == ruled_text(PROMPTS[1], GREEDY, allowed=by_sum)
        assert answers["plain"].tokens == greedy_text(tuple(PROMPTS[4]), N)


def test_a_cancelled_constraint_was_told_what_was_delivered() -> None:
    engine = tiny("chain")
    script, delivered = Script(by_sum), list[int]()
    request = engine.make_request(PROMPTS[1], GREEDY, id="cancelled", constraint=script)
    other = engine.make_request(PROMPTS[0], rules()["frequency"])
    engine.add(request)
    engine.add(other)
    while len(delivered) < 5:
        delivered += [t for o in engine.step() if o.request_id == "cancelled" for t in o.tokens]
        check(engine)
    engine.cancel("cancelled")
    while engine.has_work:
        assert all(o.request_id == other.id for o in engine.step())
        check(engine)
    assert script.output == request.output == delivered
    assert other.output == right(PROMPTS[0], rules()["frequency"]).tokens


def test_a_mixed_load_compiles_nothing() -> None:
    """Prompts of 1 to 40 tokens, batches of 1 to 8, every sort of request, cached prefixes, numbers of drafts that
    change by what they cost; after a warm-up no program is new."""
    engine = tiny("chain", n_pages=60)
    assert engine.speculation is not None
    engine.speculation = dataclasses.replace(engine.speculation, adaptive=True)
    engine.warm_up()
    n = engine.n_compiled()
    samplings = [
        GREEDY,
        dataclasses.replace(SEEDED, max_tokens=7),
        Sampling(top_k=5, top_p=0.9, min_p=0.01, max_tokens=7),
        rules()["all"],
        dataclasses.replace(GREEDY, logprobs=4, max_tokens=3),
        Sampling(temperature=0.5, max_tokens=2),
    ]
    ids = [int(i) for i in np.random.default_rng(0).integers(0, VOCAB, 41)]
    arrivals: list[tuple[int, Request]] = []
    for i in range(1, 41):
        script = Script(by_sum) if i % 7 == 0 else None
        request = engine.make_request(ids[i % 3 : i % 3 + i], samplings[i % 6], constraint=script)
        arrivals.append((i * 2 if i > 20 else i // 4, request))
    serve(engine, arrivals)
    for _, request in arrivals:
        assert request.finish_reason is not None
        if request.sampling is GREEDY and request.constraint is None:
            assert request.output == greedy_text(request.prompt, N)
    stats = engine.stats()
    assert engine.n_compiled() == n
    assert stats.n_cached_tokens > 0
    assert stats.speculation is not None
