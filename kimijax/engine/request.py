"""One request as the engine sees it: token ids, sampling settings, and the state of its generation."""

import enum
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np

from ..acceptance import Acceptance
from ..errors import RequestError, check_integer, check_number
from ..penalties import Rules, Widths
from .prefix import Lease

MAX_LOGPROBS = 20  # alternatives a token, as the OpenAI API has it
WIDEST = Widths(bias=300, stops=16, words=32, word_length=16)  # of the rules that programs are compiled for
MAX_TEMPERATURE = 1e4  # flat by any measure; larger values only risk overflow

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Filters apply to the tempered distribution: top_k, then top_p, then min_p.

    temperature 0 is greedy (lowest id on ties) whatever the filters say; top_k 0, top_p 1 and min_p 0 are off.
    A request with a seed draws the same tokens whatever else the engine does, with drafts and without: its randomness
    depends on (seed, position) only. The fields from repetition_penalty on are described in `penalties.Rules`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None  # None: as many as the context holds; more than that is cut to it
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None  # alternatives to each token, 0 for the token's own alone; None: none at all
    priority: int = 0  # lower values are admitted first and give way last

    @property
    def rules(self) -> Rules:
        """The logits processors."""
        return Rules(
            self.repetition_penalty,
            self.frequency_penalty,
            self.presence_penalty,
            self.logit_bias,
            self.min_tokens,
            self.bad_words,
        )

    def check(self, vocab_size: int) -> None:
        """Raises RequestError naming the first field of the wrong type or out of range."""
        check_number("temperature", self.temperature, 0, MAX_TEMPERATURE)
        check_number("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise RequestError("top_p", f"found {self.top_p}, expected 0 < top_p <= 1")
        check_integer("top_k", self.top_k, 0, 2**31 - 1)
        check_number("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            check_integer("seed", self.seed, 0, 2**63 - 1)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, None)
        for token in self.stop_token_ids:
            check_integer("stop_token_ids", token, 0, vocab_size - 1)
        if self.logprobs is not None:
            check_integer("logprobs", self.logprobs, 0, min(MAX_LOGPROBS, vocab_size))
        check_integer("priority", self.priority, -(2**31), 2**31 - 1)


class Constraint(Protocol):
    """What may come next in a request's output, such as the words of a grammar. Committed tokens alone move it."""

    def masks(self, guesses: Sequence[int]) -> np.ndarray:
        """Allowed ids along a draft: uint32 [len(guesses) + 1, ceil(V / 32)], bit i of word w is id 32 w + i.

        Row 0 holds for the next token, row i for the one after the first i guesses. Rows behind a guess that is not
        allowed, or negative, decide nothing and may hold anything. Leaves the state as it was.
        """
        ...

    def commit(self, tokens: Sequence[int]) -> None:
        """These tokens came next in the output. Raises ConstraintError for one that was not allowed."""
        ...


class ConstraintError(RuntimeError):
    """A token was committed that its constraint does not allow: a mask was not applied."""


class Phase(enum.Enum):
    """Where a request is in its life; it only moves forward, save that a preempted one waits again."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(frozen=True)
class TokenLogprobs:
    """Of one token of the output, natural logarithms of the target's own distribution, before any processor."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (id, log-probability) of the most probable ids, the first first


@dataclass(eq=False)
class Request:
    """A request and its progress. The scheduler owns the mutable fields."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int  # the sampling's, or one drawn for this request
    stop_ids: frozenset[int]  # end of generation; part of the output, not of its text
    limit: int  # output tokens at most, context included
    constraint: Constraint | None = None
    output: list[int] = field(default_factory=list[int])
    phase: Phase = Phase.WAITING
    cached: int = 0  # tokens whose rows are in `lease.pages`, as far as the host knows
    in_flight: int = 0  # tokens that steps under way may add to these at most
    in_flight_least: int = 0  # and at least, if none of them ends the request
    lease: Lease | None = None  # pages, while it runs
    place: int = -1  # of its state on the device, while it runs
    arrival: int = 0  # its number among the requests that came
    finish_reason: FinishReason | None = None
    was_admitted: bool = False  # at some time; it may wait again
    cached_at_start: int = 0  # tokens that were not computed when it was first admitted
    accepted: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # k -> rounds by accepted drafts

    @property
    def n_tokens(self) -> int:
        """Prompt and output together."""
        return len(self.prompt) + len(self.output)

    @property
    def pages(self) -> list[int]:
        """In order of position; none while it waits."""
        return [] if self.lease is None else self.lease.pages

    @property
    def acceptance(self) -> Acceptance:
        """Exact counts of its rounds with drafts."""
        return sum((Acceptance.of_counts(counts) for counts in self.accepted.values()), Acceptance())

    @functools.cached_property
    def is_greedy(self) -> bool:
        """Whether it takes the most probable token each time."""
        return self.sampling.temperature == 0 or self.sampling.top_k == 1

    @functools.cached_property
    def needs_rules(self) -> bool:
        """Whether its tokens take more than temperature and filters: processors, a constraint, log-probabilities."""
        return self.constraint is not None or self.sampling.logprobs is not None or not self.sampling.rules.are_off

    def token(self, position: int) -> int:
        n = len(self.prompt)
        return self.prompt[position] if position < n else self.output[position - n]

    def tokens(self, start: int, stop: int) -> list[int]:
        """Ids at positions start ... stop - 1."""
        n = len(self.prompt)
        return [*self.prompt[start:stop], *self.output[max(start - n, 0) : max(stop - n, 0)]]

    def extend(self, tokens: Sequence[int]) -> None:
        """Record generated tokens up to the request's end."""
        if self.finish_reason is not None or not tokens:
            return
        output, room = self.output, self.limit - len(self.output)
        if len(tokens) >= room:
            tokens = tokens[:room]
            self.finish_reason = "length"
        if not self.stop_ids.isdisjoint(tokens):
            tokens = tokens[: next(i for i, t in enumerate(tokens) if t in self.stop_ids) + 1]
            self.finish_reason = "stop"
        output.extend(tokens)

    def append(self, token: int) -> bool:
        """`extend` by one; True when it ended the request."""
        self.extend((token,))
        return self.finish_reason is not None


class StepOutput(NamedTuple):
    """What one engine step produced for one request."""

    request_id: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None  # why the request was given up; finish_reason is then "abort"
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token where they were asked for
