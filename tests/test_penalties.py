"""Logits processors against an oracle that recomputes every position from its whole text, alone and under drafts."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kimijax.errors import RequestError
from kimijax.penalties import (
    NO_ID,
    History,
    ProcessorRows,
    Rules,
    Widths,
    chain_before,
    process,
    process_draft,
)
from kimijax.sampling import Purpose, SamplingRows, distribution, draw_from, is_greedy
from kimijax.speculation import NO_TOKEN, Proposal, verify

from .tiny_speculation import GREEDY, settings

VOCAB = 40  # not a multiple of 32
OWN = jnp.asarray([i for i in range(VOCAB) if i % 3], jnp.int32)  # a drafter's reduced vocabulary
WIDTHS = Widths(bias=4, stops=3, words=4, word_length=3)
K = 3
run = jax.jit(process)
run_draft = jax.jit(process_draft)
check = jax.jit(verify, static_argnames="n_tokens")


class Text(NamedTuple):
    """One row: its rules, stop ids, and what came before the block."""

    rules: Rules
    stop_ids: tuple[int, ...] = ()
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()


def oracle(
    logits: np.ndarray, text: Text, guesses: Sequence[int] = (), allowed: np.ndarray | None = None
) -> np.ndarray:
    """Logits [V] of the position after all these tokens, one id at a time; all NaN if none is left."""
    r, output = text.rules, [*text.output, *guesses]
    x = logits.astype(np.float64)
    for token in range(len(x)):
        count = output.count(token)
        if count or token in text.prompt:
            x[token] = x[token] / r.repetition_penalty if x[token] > 0 else x[token] * r.repetition_penalty
        x[token] -= r.frequency_penalty * count + (r.presence_penalty if count else 0.0)
        x[token] += r.logit_bias.get(token, 0.0)
    if len(output) < r.min_tokens:
        x[list(text.stop_ids)] = -np.inf
    for word in r.bad_words:
        start = list(word[:-1])
        if not start or output[-len(start) :] == start:
            x[word[-1]] = -np.inf
    if allowed is not None:
        x[~allowed] = -np.inf
    return x if (x > -np.inf).any() else x * np.nan


def rows_of(texts: Sequence[Text], allowed: np.ndarray | None = None, widths: Widths = WIDTHS) -> ProcessorRows:
    return ProcessorRows.of([t.rules for t in texts], [t.stop_ids for t in texts], widths, len(texts), allowed)


@jax.jit
def _history(prompts: jax.Array, outputs: jax.Array, n: jax.Array) -> History:
    return History.empty(len(prompts), VOCAB, WIDTHS.word_length).with_prompt(prompts).with_output(outputs, n)


def history_of(texts: Sequence[Text]) -> History:
    prompts, outputs = (np.full((len(texts), 8), NO_ID, np.int32) for _ in range(2))
    for i, text in enumerate(texts):
        prompts[i, : len(text.prompt)], outputs[i, : len(text.output)] = text.prompt, text.output
    return _history(prompts, outputs, np.asarray([len(t.output) for t in texts], np.int32))


def packed(allowed: np.ndarray) -> np.ndarray:
    """bool [B, N, V] as grammars pack it: id i is bit i % 32 of word i // 32."""
    words = np.zeros((*allowed.shape[:2], -(-allowed.shape[-1] // 32)), np.uint32)
    for i in range(allowed.shape[-1]):
        words[..., i // 32] |= allowed[..., i].astype(np.uint32) << np.uint32(i % 32)
    return words


def test_a_penalty_counts_the_guesses_before_it() -> None:
    """Constant logits, frequency_penalty 1, guesses 0 0 0: each round passes one and replaces the next."""
    logits = jnp.tile(jnp.asarray([2.0, 1.5, 0, -1], jnp.float32), (1, K + 1, 1))
    rows = ProcessorRows.of([Rules(frequency_penalty=1.0)], [()], Widths(), 1)
    history, text = History.empty(1, 4, 0), []
    guesses = jnp.zeros((1, K), jnp.int32)
    for _ in range(2):
        block = run(logits, rows, history, chain_before(guesses))
        at = np.asarray([len(text)], np.int32)
        found = check(block, Proposal(guesses, None), settings([GREEDY]), at, n_tokens=4)
        assert int(found.accepted[0]) == 1
        committed = found.accepted + 1
        history = history.with_output(found.tokens, committed)
        text += found.tokens[0, : int(committed[0])].tolist()
    assert text == [0, 1, 0, 1]
    assert history.output.tolist() == [[2, 2, 0, 0]]
    assert history.n_output.tolist() == [4]


ids = st.integers(0, VOCAB - 1)
few_ids = st.integers(0, 5)  # repeated often
rules_of_a_row = st.builds(
    Rules,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -0.5]),
    presence_penalty=st.sampled_from([0.0, 1.2, -2.0]),
    logit_bias=st.dictionaries(ids, st.sampled_from([-100.0, -1.0, 2.5, 100.0]), max_size=WIDTHS.bias),
    min_tokens=st.integers(0, 8),
    bad_words=st.lists(
        st.lists(few_ids, min_size=1, max_size=WIDTHS.word_length).map(tuple), max_size=WIDTHS.words
    ).map(tuple),
)
texts_of_a_batch = st.lists(
    st.builds(
        Text,
        rules_of_a_row,
        st.sets(ids, max_size=WIDTHS.stops).map(lambda x: tuple(sorted(x))),
        st.lists(ids, max_size=8).map(tuple),
        st.lists(few_ids, max_size=5).map(tuple),
    ),
    min_size=3,
    max_size=3,
)


@given(texts_of_a_batch, st.lists(few_ids, min_size=K, max_size=K), st.integers(0, 2**32), st.booleans())
def test_every_position_equals_the_oracle(texts: list[Text], guesses: list[int], seed: int, masked: bool) -> None:
    """Of the target's block, and of the drafter's steps in its own vocabulary."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((3, K + 1, VOCAB)) * 3).astype(np.float32)
    allowed = rng.random((3, K + 1, VOCAB)) < 0.5
    allowed[0] = True
    rows = rows_of(texts, packed(allowed) if masked else None)
    block = jnp.tile(jnp.asarray(guesses, jnp.int32), (3, 1))
    found = np.asarray(run(logits, rows, history_of(texts), chain_before(block)))
    for b, i in itertools.product(range(3), range(K + 1)):
        right = oracle(logits[b, i], texts[b], guesses[:i], allowed[b, i] if masked else None)
        np.testing.assert_allclose(found[b, i], right, rtol=1e-5, atol=1e-5, err_msg=f"row {b}, position {i}")
    own = np.asarray(OWN)
    step = rows_of(texts, packed(allowed[:, 2:3]) if masked else None)
    draft = np.asarray(run_draft(logits[:, 2, own], step, history_of(texts), block[:, :2], OWN))
    kept = (found[:, 2, own] > -np.inf).any(axis=-1)
    np.testing.assert_array_equal(draft[kept], found[kept, 2][:, own])
    assert np.isnan(draft[~kept]).all()  # it has no token that the rules leave


def test_rows_that_ask_for_nothing_keep_every_bit() -> None:
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((2, K + 1, VOCAB)) * 1e4).astype(np.float32)
    logits[1, 0, :3] = [-0.0, -np.inf, 1e-40]
    rules = Rules(1.5, 1.0, 1.0, {3: 5.0}, 9, ((1, 2), (3,)))
    texts = [Text(rules, (1,), (3, 4), (1, 1)), Text(Rules(), (1,), (3, 4), (1, 1))]
    before = chain_before(jnp.ones((2, K), jnp.int32))
    allowed = np.ones((2, K + 1, VOCAB), np.bool_)
    found = np.asarray(run(logits, rows_of(texts, packed(allowed)), history_of(texts), before))
    np.testing.assert_array_equal(found[1].view(np.int32), logits[1].view(np.int32))
    assert (found[0] != logits[0]).any()


def test_stops_are_ruled_out_up_to_the_last_early_position() -> None:
    """Two tokens are output, four are the least: of a block, positions 0 and 1 are early."""
    text = Text(Rules(min_tokens=4), (7, 9), (), (1, 2))
    before = chain_before(jnp.asarray([[1, 2, 3]], jnp.int32))
    found = np.asarray(run(np.zeros((1, K + 1, VOCAB), np.float32), rows_of([text]), history_of([text]), before))
    assert [np.flatnonzero(np.isneginf(x)).tolist() for x in found[0]] == [[7, 9], [7, 9], [], []]


def test_bad_words_end_inside_a_block_and_never_begin_in_the_prompt() -> None:
    """(1, 2, 3) is begun by output 1 and guess 2; (8, 9) by the prompt alone, (9,) always."""
    rules = Rules(bad_words=((1, 2, 3), (8, 4), (9,)))
    texts = [Text(rules, (), (8,), (1,)), Text(rules, (), (1, 2, 8), ())]
    before = chain_before(jnp.asarray([[2, 5, 8], [2, 1, 2]], jnp.int32))
    found = np.asarray(run(np.zeros((2, K + 1, VOCAB), np.float32), rows_of(texts), history_of(texts), before))
    out = [[np.flatnonzero(np.isneginf(x)).tolist() for x in row] for row in found]
    assert out == [[[9], [3, 9], [9], [4, 9]], [[9], [9], [9], [3, 9]]]


def test_a_tree_s_siblings_do_not_see_each_other() -> None:
    """Nodes: the root's children 4 and 5, and a child of 5; each counts its own ancestors."""
    before = jnp.asarray([[[NO_ID] * 2, [4, NO_ID], [5, NO_ID], [5, 6]]], jnp.int32)
    text = Text(Rules(frequency_penalty=1.0, bad_words=((5, 6, 7),)))
    found = np.asarray(run(np.zeros((1, 4, VOCAB), np.float32), rows_of([text]), history_of([text]), before))[0]
    assert [{int(i): float(x[i]) for i in np.flatnonzero(x)} for x in found] == [
        {},
        {4: -1.0},
        {5: -1.0},
        {5: -1.0, 6: -1.0, 7: -np.inf},
    ]


def test_a_position_with_nothing_left_draws_no_token() -> None:
    """The mask leaves ids that only padding of the vocabulary has; the position before is not affected."""
    logits = np.zeros((2, 2, VOCAB), np.float32)
    logits[..., 32:] = -np.inf
    allowed = np.ones((2, 2, VOCAB), np.bool_)
    allowed[:, 1, :32] = False
    guess = jnp.zeros((2, 1), jnp.int32)
    texts = [Text(Rules(logit_bias={0: 100.0}))] * 2
    block = run(logits, rows_of(texts, packed(allowed)), history_of(texts), chain_before(guess))
    for sampling in (settings([GREEDY] * 2), settings([GREEDY, {}])):
        found = check(block, Proposal(guess, None), sampling, np.zeros(2, np.int32), n_tokens=VOCAB)
        assert found.tokens.tolist() == [[0, NO_TOKEN]] * 2


def test_history_takes_what_was_committed_and_no_more() -> None:
    history = History.empty(3, 6, 4).with_prompt(jnp.asarray([[5, NO_ID], [NO_ID] * 2, [0, 5]], jnp.int32))
    tokens = jnp.asarray([[1, 2, 1, 4], [3, 3, 3, 3], [2, NO_TOKEN, NO_TOKEN, NO_TOKEN]], jnp.int32)
    history = history.with_output(tokens, jnp.asarray([3, 0, 1], jnp.int32))
    history = history.with_output(tokens, jnp.asarray([1, 2, 0], jnp.int32))
    assert history.output.tolist() == [[0, 3, 1, 0, 0, 0], [0, 0, 0, 2, 0, 0], [0, 0, 1, 0, 0, 0]]
    assert history.prompt.tolist() == [[False] * 5 + [True], [False] * 6, [True, *[False] * 4, True]]
    assert history.tail.tolist() == [[2, 1, 1], [NO_ID, 3, 3], [NO_ID, NO_ID, 2]]
    assert history.n_output.tolist() == [4, 2, 1]


def test_a_pool_s_rows_are_taken_and_put_back() -> None:
    """Places 3 and 0, and padding, which lies past the last."""
    pool = History.empty(4, 6, 2).with_output(jnp.asarray([[0], [1], [2], [3]], jnp.int32), jnp.ones(4, jnp.int32))
    places = jnp.asarray([3, 0, 4], jnp.int32)
    rows = pool.take(places)
    assert rows.tail[:2].tolist() == [[3], [0]]
    rows = rows.with_output(jnp.full((3, 1), 5, jnp.int32), jnp.asarray([1, 0, 1], jnp.int32))
    pool = pool.put(places, rows)
    assert pool.tail.tolist() == [[0], [1], [2], [5]]
    assert [np.flatnonzero(row).tolist() for row in np.asarray(pool.output)] == [[0], [1], [2], [3, 5]]
    assert pool.n_output.tolist() == [1, 1, 1, 2]


SMALL = 5
LENGTH = 4
END = 4
PROMPT = (1,)


class Tables(NamedTuple):
    """A target and a drafter whose logits depend on the last token alone: [V, V], and [V, 4] of ids 0, 1, 2, 4."""

    target: jax.Array
    drafter: jax.Array

    @staticmethod
    def random(seed: int) -> "Tables":
        rng = np.random.default_rng(seed)
        target = (rng.standard_normal((SMALL, SMALL)) * 1.5).astype(np.float32)
        drafter = target[:, SMALL_OWN] + (rng.standard_normal((SMALL, 4)) * 0.7).astype(np.float32)
        return Tables(jnp.asarray(target), jnp.asarray(drafter))


SMALL_OWN = np.asarray([0, 1, 2, 4], np.int32)


class Rounds(NamedTuple):
    tokens: jax.Array  # int32 [B, LENGTH]
    history: History
    drafted: jax.Array  # int32, and
    accepted: jax.Array  # int32: guesses of all rows and rounds


@functools.partial(jax.jit, static_argnames="k")
def answer(tables: Tables, rows: ProcessorRows, sampling: SamplingRows, history: History, *, k: int) -> Rounds:
    """LENGTH tokens of each row by rounds of k guesses. No token ends it, so that texts are easy to enumerate."""
    b = sampling.temperature.shape[0]
    every = jnp.arange(b)[:, None]
    own = jnp.asarray(SMALL_OWN)

    def draft(last: jax.Array, history: History) -> Proposal:
        guesses, q = jnp.zeros((b, 0), jnp.int32), []
        for i in range(k):
            before = last if i == 0 else guesses[:, -1]
            logits = process_draft(tables.drafter[jnp.maximum(before, 0)], rows, history, guesses, own)
            p = distribution(logits, sampling)
            drawn = draw_from(p, sampling, history.n_output + i, Purpose.DRAFT)
            drawn = jnp.where(is_greedy(sampling), jnp.argmax(logits, axis=-1), drawn)
            guess = jnp.where(jnp.isnan(logits).any(axis=-1), NO_TOKEN, own[drawn])
            guesses, q = jnp.concatenate([guesses, guess[:, None]], axis=1), [*q, p]
        return Proposal(guesses, jnp.stack(q, axis=1) if k else None, own if k else None)

    def step(state: Any) -> Any:
        last, made = state
        history = made.history
        proposal = draft(last, history)
        read = jnp.maximum(jnp.concatenate([last[:, None], proposal.tokens], axis=1), 0)
        block = process(tables.target[read], rows, history, chain_before(proposal.tokens))
        found = verify(block, proposal, sampling, history.n_output, SMALL)
        committed = jnp.minimum(found.accepted + 1, LENGTH - history.n_output)
        offset = jnp.arange(k + 1, dtype=jnp.int32)[None]
        places = jnp.where(offset < committed[:, None], history.n_output[:, None] + offset, LENGTH)
        newest = jnp.take_along_axis(found.tokens, jnp.maximum(committed - 1, 0)[:, None], axis=1)[:, 0]
        busy = committed > 0
        return jnp.where(busy, newest, last), Rounds(
            made.tokens.at[every, places].set(found.tokens, mode="drop"),
            history.with_output(found.tokens, committed),
            made.drafted + k * busy.sum(),
            made.accepted + jnp.where(busy, found.accepted, 0).sum(),
        )

    start = Rounds(jnp.full((b, LENGTH), NO_TOKEN, jnp.int32), history, jnp.int32(0), jnp.int32(0))
    first = jnp.full(b, PROMPT[-1], jnp.int32)
    return jax.lax.while_loop(lambda s: (s[1].history.n_output < LENGTH).any(), step, (first, start))[1]


SMALL_WIDTHS = Widths(bias=2, stops=1, words=2, word_length=3)
RULES = {
    "nothing": Rules(),
    "penalties": Rules(repetition_penalty=1.4, frequency_penalty=0.8, presence_penalty=-0.6),
    "bias": Rules(logit_bias={0: 1.5, 3: -2.0}),
    "min_tokens": Rules(min_tokens=3),
    "bad words": Rules(bad_words=((2,), (0, 1))),
    "all": Rules(1.3, 0.9, 0.4, {2: 1.0}, 2, ((0, 1, 3), (3, 0))),
}


def small(rules: Sequence[Rules], allowed: np.ndarray | None = None) -> tuple[ProcessorRows, History]:
    n = len(rules)
    history = History.empty(n, SMALL, SMALL_WIDTHS.word_length).with_prompt(jnp.full((n, 1), PROMPT[0], jnp.int32))
    return ProcessorRows.of(rules, [(END,)] * n, SMALL_WIDTHS, n, allowed), history


def test_greedy_text_is_that_of_plain_decoding() -> None:
    """Every rule beside every other, for ten targets; drafts are accepted and rejected."""
    rules = list(RULES.values())
    drafted = accepted = changed = 0
    for seed in range(10):
        tables = Tables.random(seed)
        rows, history = small(rules)
        plain = []
        for rule in rules:
            text: list[int] = []
            for _ in range(LENGTH):
                logits = np.asarray(tables.target)[(*PROMPT, *text)[-1]]
                text.append(int(oracle(logits, Text(rule, (END,), PROMPT, tuple(text))).argmax()))
            plain.append(text)
        changed += sum(text != plain[0] for text in plain)
        made = answer(tables, rows, settings([GREEDY] * len(rules)), history, k=2)
        assert made.tokens.tolist() == plain, f"seed {seed}"
        assert made.history.output.tolist() == [[text.count(i) for i in range(SMALL)] for text in plain]
        drafted, accepted = drafted + int(made.drafted), accepted + int(made.accepted)
    assert changed > 20
    assert 0.2 * drafted < accepted < 0.9 * drafted


N_TEXTS = 20_000


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("name", [name for name in RULES if name != "nothing"])
def test_texts_follow_the_exact_distribution(name: str, k: int) -> None:
    """All texts of four tokens, enumerated by the oracle; temperature 0.8 and top_k 4 on top of the rules."""
    tables, rule, temperature, top_k = Tables.random(3), RULES[name], 0.8, 4
    right: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for text, p in right.items():
            logits = np.asarray(tables.target)[(*PROMPT, *text)[-1]]
            x = oracle(logits, Text(rule, (END,), PROMPT, text)) / temperature
            e = np.where(x >= np.sort(x)[-top_k], np.exp(x - x.max()), 0.0)
            longer |= {(*text, i): p * e[i] / e.sum() for i in range(SMALL) if e[i] > 0}
        right = longer
    rows, history = small([rule] * N_TEXTS)
    sampling = settings([{"temperature": temperature, "top_k": top_k}] * N_TEXTS)
    made = answer(tables, rows, sampling, history, k=k)
    found: dict[tuple[int, ...], int] = {}
    for text in map(tuple, np.asarray(made.tokens).tolist()):
        found[text] = found.get(text, 0) + 1
    assert found.keys() <= right.keys()
    often = [text for text, p in right.items() if p * N_TEXTS >= 5]
    counts = [found.get(text, 0) for text in often]
    expected = [right[text] * N_TEXTS for text in often]
    counts, expected = [*counts, N_TEXTS - sum(counts)], [*expected, N_TEXTS - sum(expected)]
    if expected[-1] < 5:
        counts, expected = [*counts[:-2], sum(counts[-2:])], [*expected[:-2], sum(expected[-2:])]
    assert len(counts) > 20
    assert stats.chisquare(counts, expected).pvalue > 0.01
    if k:
        assert 0.3 < int(made.accepted) / int(made.drafted) < 0.95


OFF = Rules()


@pytest.mark.parametrize(
    ("rules", "field"),
    [
        (Rules(repetition_penalty=0), "repetition_penalty"),
        (Rules(repetition_penalty=float("nan")), "repetition_penalty"),
        (Rules(frequency_penalty=2.5), "frequency_penalty"),
        (Rules(presence_penalty=True), "presence_penalty"),
        (Rules(logit_bias={VOCAB: 1.0}), "logit_bias"),
        (Rules(logit_bias={-1: 1.0}), "logit_bias"),
        (Rules(logit_bias={1: 101.0}), "logit_bias"),
        (Rules(logit_bias=dict.fromkeys(range(5), 1.0)), "logit_bias"),
        (Rules(min_tokens=-1), "min_tokens"),
        (Rules(min_tokens=1), "min_tokens"),  # with more stop ids than fit
        (Rules(bad_words=((),)), "bad_words"),
        (Rules(bad_words=((VOCAB,),)), "bad_words"),
        (Rules(bad_words=((1,),) * 5), "bad_words"),
        (Rules(bad_words=((1, 2, 3, 4),)), "bad_words"),
    ],
)
def test_bad_rules_are_refused_by_name(rules: Rules, field: str) -> None:
    with pytest.raises(RequestError, match=field):
        rules.check(VOCAB, (1, 2, 3, 4), WIDTHS)


def test_rules_that_fit_pass() -> None:
    Rules(2.0, -2.0, 2, {0: -100, VOCAB - 1: 100.0}, 5, ((1, 2, 3),)).check(VOCAB, (1, 2, 3), WIDTHS)
    assert OFF.are_off
    assert not Rules(min_tokens=1).are_off
    OFF.check(VOCAB, tuple(range(10)), Widths())  # stop ids take room only where they are ruled out


def test_rules_wider_than_their_rows_are_no_rules_left_out() -> None:
    text = Text(Rules(bad_words=((1, 2), (3,))))
    with pytest.raises(ValueError, match="do not fit"):
        rows_of([text], widths=Widths(words=1, word_length=2))
    with pytest.raises(ValueError, match="bad words of 3 tokens"):
        process(jnp.zeros((1, 1, VOCAB)), rows_of([text]), History.empty(1, VOCAB, 2), jnp.zeros((1, 1, 0), jnp.int32))
