"""One request as the engine sees it: token ids, sampling settings, and the state of its generation."""

import enum
from dataclasses import dataclass, field
from typing import Literal

from ..errors import RequestError

MAX_TEMPERATURE = 1e4  # flat by any measure; larger values only risk overflow

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Filters apply to the tempered distribution: top_k, then top_p, then min_p.

    temperature 0 is greedy (lowest id on ties) whatever the filters say; top_k 0, top_p 1 and min_p 0 are off.
    A seeded request draws the same tokens whatever else the engine does: randomness depends on (seed, position) only.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None  # None: as many as the context holds; more than that is cut to it
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def check(self, vocab_size: int) -> None:
        """Raises RequestError naming the first field of the wrong type or out of range."""
        _number("temperature", self.temperature, 0, MAX_TEMPERATURE)
        _number("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise RequestError("top_p", f"found {self.top_p}, expected 0 < top_p <= 1")
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _number("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _integer("seed", self.seed, 0, 2**63 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None)
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, vocab_size - 1)


def _integer(field: str, value: object, least: int, most: int | None) -> None:
    wanted = f"an integer >= {least}" if most is None else f"an integer in {least} ... {most}"
    if type(value) is not int or value < least or (most is not None and value > most):
        raise RequestError(field, f"found {value!r}, expected {wanted}")


def _number(field: str, value: object, least: float, most: float) -> None:
    if type(value) not in (int, float) or not least <= value <= most:  # type: ignore[operator]  # NaN is refused too
        raise RequestError(field, f"found {value!r}, expected a number in {least} ... {most}")


class Phase(enum.Enum):
    """Where a request is in its life; it only moves forward, save that a preempted one waits again."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """A request and its progress. The scheduler owns the mutable fields."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int  # the sampling's, or one drawn for this request
    stop_ids: frozenset[int]  # end of generation; part of the output, not of its text
    limit: int  # output tokens at most, context included
    output: list[int] = field(default_factory=list[int])
    phase: Phase = Phase.WAITING
    cached: int = 0  # tokens whose latents are in `pages`
    pages: list[int] = field(default_factory=list[int])
    finish_reason: FinishReason | None = None

    @property
    def n_tokens(self) -> int:
        """Prompt and output together."""
        return len(self.prompt) + len(self.output)

    def token(self, position: int) -> int:
        n = len(self.prompt)
        return self.prompt[position] if position < n else self.output[position - n]

    def tokens(self, start: int, stop: int) -> list[int]:
        return [self.token(i) for i in range(start, stop)]

    def append(self, token: int) -> bool:
        """Record a generated token; True when it ended the request. Nothing is recorded after the end."""
        if self.finish_reason is not None:
            return True
        self.output.append(token)
        if token in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.output) >= self.limit:
            self.finish_reason = "length"
        return self.finish_reason is not None


@dataclass(frozen=True)
class StepOutput:
    """What one engine step produced for one request."""

    request_id: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None  # why the request was given up; finish_reason is then "abort"
