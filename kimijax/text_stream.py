"""From an engine's step outputs to text: detokenised, cut at stop strings, thinking kept apart."""

from collections.abc import Sequence
from dataclasses import dataclass

from .engine.request import FinishReason, Request, StepOutput
from .errors import RequestError
from .tokenizer import IncrementalDetokenizer, Tokenizer


@dataclass(frozen=True)
class Delta:
    """What a step added to one answer."""

    text: str
    reasoning: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def done(self) -> bool:
        return self.finish_reason is not None


class TextStream:
    """The text of one request, from its step outputs: detokenised, cut at stop strings, thinking kept apart.

    Text between `<think>` and `</think>` is reasoning; a prompt that ends in `<think>` starts inside it. Stop strings
    bind the answer only. When one is found the stream is done and the caller cancels the request.
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
        self._content = None if tokenizer is None else IncrementalDetokenizer(tokenizer, stop)
        self._reasoning = None if tokenizer is None else IncrementalDetokenizer(tokenizer)
        self._begin, self._end = names.get("<think>"), names.get("</think>")
        self._thinking = self._begin is not None and request.prompt[-1] == self._begin
        self._started = False  # the answer has begun: a later <think> is its own text
        self._stop_ids = request.stop_ids
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None

    @property
    def completion_tokens(self) -> int:
        """Tokens up to the end, the end token included, those after a stop string not."""
        return len(self.token_ids)

    def feed(self, output: StepOutput) -> Delta:
        """The text that one step adds."""
        text, reasoning, used = "", "", 0
        for token in output.tokens:
            if self.finish_reason is not None:
                break
            used += 1
            part = self._take(token)
            text, reasoning = text + part[0], reasoning + part[1]
        tokens = output.tokens[:used]
        self.token_ids.extend(tokens)
        if self.finish_reason is None and output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            if self._content is not None and self._reasoning is not None:
                reasoning += self._reasoning.flush() if self._thinking else ""
                text += self._content.flush()
        return Delta(text, reasoning, tokens, self.finish_reason, output.error)

    def _take(self, token: int) -> tuple[str, str]:
        """Text and reasoning that one token adds."""
        if self._content is None or self._reasoning is None or token in self._stop_ids:
            return "", ""  # the end of the turn is not part of its text
        if self._thinking:
            if token != self._end:
                return "", self._reasoning.feed([token])
            self._thinking, self._started = False, True
            return "", self._reasoning.flush()
        if token == self._begin and not self._started:
            self._thinking = True
            return "", ""
        self._started = True
        text = self._content.feed([token])
        if self._content.finished:
            self.finish_reason = "stop"
        return text, ""
