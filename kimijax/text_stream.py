"""From an engine's step outputs to text: detokenised, cut at stop strings, thinking kept apart.

Log-probabilities come with the text that they belong to. A token's entry goes out with the delta that shows the first
character of its text, and so waits with it for the rest of a character, or until it is certain that no stop string has
begun. Tokens without text there, and those that a stop string cuts off, have no entry: an end of turn, a mark of
reasoning, a control token that is not shown. So entries and text agree however the tokens are cut into steps.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .engine.request import FinishReason, Request, StepOutput, TokenLogprobs
from .errors import RequestError
from .tokenizer import IncrementalDetokenizer, Tokenizer


class PlacedLogprobs(NamedTuple):
    """Log-probabilities of a token and where its text begins."""

    start: int  # the character of the whole text, or of the whole reasoning, that holds the token's first byte
    entry: TokenLogprobs


@dataclass(frozen=True)
class Delta:
    """What a step added to one answer."""

    text: str
    reasoning: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token of `tokens`, where they were asked for
    text_logprobs: tuple[PlacedLogprobs, ...] = ()  # of tokens whose text begins in `text`
    reasoning_logprobs: tuple[PlacedLogprobs, ...] = ()  # and in `reasoning`

    @property
    def done(self) -> bool:
        return self.finish_reason is not None


class _Part:
    """One of the two texts of an answer, with the entries that wait for their text."""

    def __init__(self, decoder: IncrementalDetokenizer) -> None:
        self.decoder = decoder
        self._new: list[str] = []
        self._waiting: deque[PlacedLogprobs] = deque()

    def feed(self, token: int, entry: TokenLogprobs | None, *, may_stop: bool) -> None:
        self._new.append(self.decoder.feed([token], may_stop=may_stop))
        if entry is not None and self.decoder.start is not None:
            self._waiting.append(PlacedLogprobs(self.decoder.start, entry))

    def flush(self) -> None:
        self._new.append(self.decoder.flush())

    def take(self) -> tuple[str, tuple[PlacedLogprobs, ...]]:
        """What is new since the last call."""
        text, shown = "".join(self._new), list[PlacedLogprobs]()
        self._new.clear()
        while self._waiting and self._waiting[0].start < self.decoder.n_shown:
            shown.append(self._waiting.popleft())
        return text, tuple(shown)


class TextStream:
    """The text of one request, from its step outputs: detokenised, cut at stop strings, thinking kept apart.

    Text between `<think>` and `</think>` is reasoning; a prompt that ends in `<think>` starts inside it. Stop strings
    bind the answer only, and only from the token after the first `min_tokens` on, as in vLLM. When one is found the
    stream is done and the caller cancels the request.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, request: Request, *, stop: Sequence[str] = (), raw: bool = False
    ) -> None:
        """
        Args:
          tokenizer: None where the checkpoint has none: the stream then counts tokens and its text stays empty.
          request: what is answered.
          stop: strings that end the text.
          raw: a text completion, where think tokens are text like any other.
        """
        if tokenizer is None and stop:
            raise RequestError("stop", "the checkpoint has no tokenizer files to find strings with; use stop_token_ids")
        names = {} if tokenizer is None or raw else tokenizer.special_ids
        self._content = None if tokenizer is None else _Part(IncrementalDetokenizer(tokenizer, stop))
        self._reasoning = None if tokenizer is None else _Part(IncrementalDetokenizer(tokenizer))
        self._begin, self._end = names.get("<think>"), names.get("</think>")
        self._thinking = self._begin is not None and request.prompt[-1] == self._begin
        self._started = False  # the answer has begun: a later <think> is its own text
        self._stop_ids = request.stop_ids
        self._min_tokens = request.sampling.min_tokens
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None

    @property
    def completion_tokens(self) -> int:
        """Tokens up to the end, the end token included, those after a stop string not."""
        return len(self.token_ids)

    def feed(self, output: StepOutput) -> Delta:
        """What one step adds."""
        before = len(self.token_ids)
        for i, token in enumerate(output.tokens):
            if self.finish_reason is not None:
                break
            self.token_ids.append(token)
            self._take(token, output.logprobs[i] if output.logprobs else None)
        used = len(self.token_ids) - before
        ends = self.finish_reason is None and output.finish_reason is not None
        if ends:
            self.finish_reason = output.finish_reason
        text, reasoning, text_logprobs, reasoning_logprobs = "", "", (), ()
        if self._content is not None and self._reasoning is not None:
            if ends:
                (self._reasoning if self._thinking else self._content).flush()
            text, text_logprobs = self._content.take()
            reasoning, reasoning_logprobs = self._reasoning.take()
        return Delta(
            text,
            reasoning,
            output.tokens[:used],
            self.finish_reason,
            output.error,
            output.logprobs[:used],
            text_logprobs,
            reasoning_logprobs,
        )

    def _take(self, token: int, entry: TokenLogprobs | None) -> None:
        """Add one token to the part of the answer that it belongs to."""
        if self._content is None or self._reasoning is None or token in self._stop_ids:
            return  # the end of the turn is not part of its text
        if self._thinking:
            if token != self._end:
                self._reasoning.feed(token, entry, may_stop=True)
                return
            self._thinking, self._started = False, True
            self._reasoning.flush()
            return
        if token == self._begin and not self._started:
            self._thinking = True
            return
        self._started = True
        self._content.feed(token, entry, may_stop=len(self.token_ids) > self._min_tokens)
        if self._content.decoder.finished:
            self.finish_reason = "stop"
