"""Streams of text and log-probabilities do not depend on how the tokens are cut into steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimijax.engine.request import Request, Sampling, StepOutput, TokenLogprobs
from kimijax.errors import RequestError
from kimijax.text_request import bad_word_ids
from kimijax.text_stream import Delta, PlacedLogprobs, TextStream
from kimijax.tokenizer import Tokenizer

from . import toy_tokenizer
from .fake_engine import token_logprobs

HIDDEN, IM_END, THINK, END_THINK = 261, 263, 268, 269  # of the toy tokenizer
# Letters of the stop strings, a character in three tokens, one that begins inside a token, tokens of two letters.
IDS = [*b"ENDab ", 0xE4, 0xB8, 0x96, 257, 259, 260, HIDDEN, THINK, END_THINK, IM_END]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return toy_tokenizer.load(tmp_path_factory.mktemp("toy"))


@dataclass
class Answer:
    """What a stream has said in all."""

    text: str = ""
    reasoning: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    text_logprobs: tuple[PlacedLogprobs, ...] = ()
    reasoning_logprobs: tuple[PlacedLogprobs, ...] = ()
    finish_reason: str | None = None
    completion_tokens: int = 0

    def add(self, delta: Delta) -> None:
        before, reasoned = len(self.text), len(self.reasoning)
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.text_logprobs += delta.text_logprobs
        self.reasoning_logprobs += delta.reasoning_logprobs
        self.finish_reason = delta.finish_reason
        # Each entry comes with the text that it belongs to.
        assert all(before <= p.start < len(self.text) for p in delta.text_logprobs)
        assert all(reasoned <= p.start < len(self.reasoning) for p in delta.reasoning_logprobs)


def run(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    cuts: Sequence[int],
    *,
    stop: Sequence[str] = (),
    min_tokens: int = 0,
    thinks: bool = False,
    raw: bool = False,
) -> Answer:
    """What an engine that draws `ids` is read as, when it delivers as many tokens a step as `cuts` says in turn."""
    sampling = Sampling(logprobs=2, min_tokens=min_tokens)
    request = Request("r", (97, THINK) if thinks else (97,), sampling, 0, frozenset({IM_END}), len(ids))
    stream, answer, at = TextStream(tokenizer, request, stop=stop, raw=raw), Answer(), 0
    sizes = list(cuts)
    while answer.finish_reason is None:
        size = sizes.pop(0) if sizes else 1
        new: list[int] = []
        for token in ids[at : at + size]:
            new.append(token)
            if request.append(token):
                break
        logprobs = tuple(token_logprobs(request, at + i, token) for i, token in enumerate(new))
        at += len(new)
        answer.add(stream.feed(StepOutput("r", tuple(new), request.finish_reason, logprobs=logprobs)))
    answer.completion_tokens = stream.completion_tokens
    return answer


cases = {
    "ids": st.lists(st.sampled_from(IDS), min_size=1, max_size=25),
    "cuts": st.lists(st.integers(1, 6), max_size=25),
    "stop": st.lists(st.sampled_from(["END", "ND", "D a", "世", "aab", "E"]), max_size=2),
    "min_tokens": st.sampled_from([0, 0, 2, 6]),
}


@given(**cases, thinks=st.booleans(), raw=st.booleans())
def test_every_chunking_gives_what_single_tokens_give(
    toy: Tokenizer, ids: list[int], cuts: list[int], stop: list[str], min_tokens: int, thinks: bool, raw: bool
) -> None:
    single = run(toy, ids, [], stop=stop, min_tokens=min_tokens, thinks=thinks, raw=raw)
    assert run(toy, ids, cuts, stop=stop, min_tokens=min_tokens, thinks=thinks, raw=raw) == single
    assert len(single.logprobs) == len(single.tokens) == single.completion_tokens
    assert tuple(entry.token for entry in single.logprobs) == single.tokens


@given(**cases)
def test_entries_are_those_of_the_tokens_in_the_text(
    toy: Tokenizer, ids: list[int], cuts: list[int], stop: list[str], min_tokens: int
) -> None:
    """By the rule itself: decode all, cut at the first stop string, list the tokens whose first byte is before it."""
    end = ids.index(IM_END) if IM_END in ids else len(ids)
    shown = [(i, t) for i, t in enumerate(ids[:end]) if t != HIDDEN]
    data, starts, free = b"", list[int](), 0
    for i, token in shown:
        starts.append(len((data + toy.token_bytes(token)[:1]).decode(errors="replace")) - 1)
        data += toy.token_bytes(token)
        if i < min_tokens:
            free = len(data.decode(errors="ignore"))  # a character that is not complete is not there yet
    text = data.decode(errors="replace")
    answer = run(toy, ids, cuts, stop=stop, min_tokens=min_tokens, raw=True)
    if "\ufffd" not in text:
        ends = [(n, -len(s)) for n in range(free + 1, len(text) + 1) for s in stop if text[:n].endswith(s)]
        if ends and answer.finish_reason == "stop":
            text = text[: min(ends)[0] + min(ends)[1]]
        assert answer.text == text
    expected = [(start, token) for start, (_, token) in zip(starts, shown, strict=True) if start < len(answer.text)]
    assert [(p.start, p.entry.token) for p in answer.text_logprobs] == expected


def test_ends_inside_a_block(toy: Tokenizer) -> None:
    """Two tokens are out; the next block holds two letters, the end, and one more token."""
    for limit, text, reason, count in ((5, "abDE", "stop", 5), (4, "abDE", "length", 4), (1000, "abDE", "stop", 5)):
        ids = [*b"abDE", IM_END, *b"a"]
        answer = run(toy, ids[:limit], [2, 4])
        assert (answer.text, answer.finish_reason, answer.completion_tokens) == (text, reason, count)
        assert [p.entry.token for p in answer.text_logprobs] == [*b"abDE"]
        assert len(answer.logprobs) == count
    cut = run(toy, [*b"abDEa", IM_END], [2, 4], stop=["DE"])
    assert (cut.text, cut.finish_reason, cut.completion_tokens) == ("ab", "stop", 4)
    assert [p.entry.token for p in cut.text_logprobs] == [*b"ab"]
    assert cut.tokens == tuple(entry.token for entry in cut.logprobs) == tuple(b"abDE")


def test_entries_wait_for_their_text(toy: Tokenizer) -> None:
    request = Request("r", (97,), Sampling(logprobs=0), 0, frozenset({IM_END}), 1000)
    stream = TextStream(toy, request, stop=["END"])
    seen: list[tuple[str, list[int]]] = []
    for i, token in enumerate([*"x世E".encode(), *b"No", HIDDEN, 259, *b"END"]):
        delta = stream.feed(StepOutput("r", (token,), logprobs=(token_logprobs(request, i, token),)))
        seen.append((delta.text, [p.entry.token for p in delta.text_logprobs]))
    assert seen == [
        ("x", [ord("x")]),
        ("", []),
        ("", []),
        ("世", [0xE4, 0xB8, 0x96]),
        ("", []),
        ("", []),
        ("ENo", [*b"ENo"]),
        ("", []),  # a control token that is not shown
        ("aa", [259]),
        ("", []),
        ("", []),
        ("", []),
    ]
    assert stream.finish_reason == "stop"


def test_the_end_of_unfinished_thinking_is_shown(toy: Tokenizer) -> None:
    answer = run(toy, [*b"so", 0xE4, 0xB8], [3], thinks=True)
    assert (answer.text, answer.reasoning) == ("", "so\ufffd")
    assert [(p.start, p.entry.token) for p in answer.reasoning_logprobs] == [(0, 115), (1, 111), (2, 0xE4), (2, 0xB8)]


def test_a_token_that_a_stop_string_cuts_in_two_has_an_entry(toy: Tokenizer) -> None:
    answer = run(toy, [97, 260, 97], [], stop=["b"])  # 260 is " b"
    assert (answer.text, [p.entry.token for p in answer.text_logprobs]) == ("a ", [97, 260])


def test_stop_strings_bind_after_min_tokens(toy: Tokenizer) -> None:
    ids = [*b"aENDbEND", IM_END]
    for least, text in ((0, "a"), (3, "a"), (4, "aENDb"), (7, "aENDb"), (8, "aENDbEND")):
        answer = run(toy, ids, [3, 2], stop=["END"], min_tokens=least)
        assert (answer.text, answer.finish_reason) == (text, "stop")
    assert run(toy, [THINK, *b"aa", END_THINK, *b"END"], [], stop=["END"], min_tokens=6).text == ""


def test_without_a_tokenizer_entries_come_a_token(toy: Tokenizer) -> None:
    request = Request("r", (97,), Sampling(logprobs=0), 0, frozenset(), 1000)
    entries = (token_logprobs(request, 0, 1), token_logprobs(request, 1, 2))
    delta = TextStream(None, request).feed(StepOutput("r", (1, 2), logprobs=entries))
    assert (delta.logprobs, delta.text_logprobs) == (entries, ())


def test_bad_words_in_tokens(toy: Tokenizer, tmp_path: Path) -> None:
    assert bad_word_ids(toy, []) == ()
    assert bad_word_ids(toy, ["b"]) == ((ord("b"),), (260,))  # " b" is one token
    assert bad_word_ids(toy, ["  b "]) == ((ord("b"),), (260,))
    assert bad_word_ids(toy, ["ad"]) == ((*b"ad",),)  # after a blank, which is a token of its own, it is the same
    assert bad_word_ids(toy, ["b", "b", "ba"]) == ((98,), (260,), (98, 97), (260, 97))
    wrong: list[tuple[Tokenizer | None, list[str]]] = [(toy, [" "]), (toy, [""]), (None, ["a"])]
    for tokenizer, words in wrong:
        with pytest.raises(RequestError, match="bad_words"):
            bad_word_ids(tokenizer, words)
    with pytest.raises(RequestError, match="bad_words"):
        bad_word_ids(toy, "word")
