"""From the tokens of one answer to its text, with reasoning apart from content.

Where reasoning begins and ends is read from token ids: text that merely looks like the marks changes nothing.
"""

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass

from kimijax.engine.request import FinishReason, StepOutput
from kimijax.generate import TextStream
from kimijax.tokenizer import IncrementalDetokenizer, Tokenizer

OPEN_MARK, CLOSE_MARK = "<think>", "</think>"


@dataclass(frozen=True)
class Piece:
    """Text that became certain. `done`: nothing follows, for the reason given."""

    reasoning: str
    content: str
    finish_reason: FinishReason | None
    done: bool


class _Part(enum.Enum):
    START = "start"  # the first token decides
    REASONING = "reasoning"
    CONTENT = "content"


class AnswerText:
    """Detokeniser of one answer. Stop strings end its content; inside reasoning they do not count."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, stop: Sequence[str], split: bool) -> None:
        """`split`: whether reasoning is told apart. It is under way when the prompt's last token opens it, and begins
        when the answer's first token does (K2-Thinking's template leaves that to the model)."""
        self._open = tokenizer.special_ids.get(OPEN_MARK)
        self._close = tokenizer.special_ids.get(CLOSE_MARK)
        self._reasoning = IncrementalDetokenizer(tokenizer)
        self._content = TextStream(tokenizer, stop=tuple(stop))
        self._part = _Part.CONTENT
        if split and self._open is not None and self._close is not None:
            self._part = _Part.REASONING if prompt and prompt[-1] == self._open else _Part.START
        self.reasoning_tokens = 0
        """Tokens of reasoning, its marks included."""

    @property
    def completion_tokens(self) -> int:
        return self.reasoning_tokens + self._content.completion_tokens

    @property
    def has_reasoning(self) -> bool:
        return self.reasoning_tokens > 0

    def feed(self, output: StepOutput) -> Piece:
        """Consume the tokens of one step."""
        tokens = output.tokens
        if self._part is _Part.START and tokens:
            self._part = _Part.REASONING if tokens[0] == self._open else _Part.CONTENT
            if self._part is _Part.REASONING:
                self.reasoning_tokens += 1
                tokens = tokens[1:]
        reasoning = ""
        if self._part is _Part.REASONING:
            end = next((i for i, token in enumerate(tokens) if token == self._close), None)
            inside = tokens[:end]
            self.reasoning_tokens += len(inside)
            reasoning = self._reasoning.feed(inside)
            if end is None:
                over = output.finish_reason is not None
                return Piece(reasoning + (self._reasoning.flush() if over else ""), "", output.finish_reason, over)
            self.reasoning_tokens += 1
            reasoning += self._reasoning.flush()
            self._part = _Part.CONTENT
            tokens = tokens[end + 1 :]
        delta = self._content.feed(dataclasses.replace(output, tokens=tokens))
        return Piece(reasoning, delta.text, delta.finish_reason, delta.done)
