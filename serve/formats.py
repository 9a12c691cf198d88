"""How answers look on the wire: OpenAI's two response formats, whole and in chunks."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from kimijax import __version__
from kimijax.text_stream import Delta, PlacedLogprobs
from kimijax.tokenizer import Tokenizer

from .answer import Usage
from .logprobs import chat_entries, completion_lists
from .prepare import Job
from .service import Service

FINGERPRINT = f"kimijax-{__version__}"


@dataclass
class Text:
    """What has been said so far in one choice."""

    reasoning: list[str] = field(default_factory=list[str])
    content: list[str] = field(default_factory=list[str])
    reasoning_logprobs: list[PlacedLogprobs] = field(default_factory=list[PlacedLogprobs])
    content_logprobs: list[PlacedLogprobs] = field(default_factory=list[PlacedLogprobs])
    finish_reason: str | None = None

    def add(self, delta: Delta) -> None:
        self.reasoning.append(delta.reasoning)
        self.content.append(delta.text)
        self.reasoning_logprobs.extend(delta.reasoning_logprobs)
        self.content_logprobs.extend(delta.text_logprobs)
        self.finish_reason = delta.finish_reason


@dataclass(frozen=True)
class Format(ABC):
    """The envelope, and what fills it."""

    id: str
    model: str
    tokenizer: Tokenizer
    """Says what the tokens of log-probabilities are."""
    logprobs: int | None = None
    """How many alternatives to each token are listed; None where no log-probabilities were asked for."""
    fingerprint: str = FINGERPRINT
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, service: Service, job: Job) -> Self:
        fingerprint = f"{FINGERPRINT}-simulated" if service.is_simulated else FINGERPRINT
        return cls(job.id, service.name, service.tokenizer, job.logprobs, fingerprint)

    @property
    @abstractmethod
    def kind(self) -> str:
        """`object` of a whole response."""

    @property
    def chunk_kind(self) -> str:
        """`object` of a chunk."""
        return self.kind

    @abstractmethod
    def opening(self, index: int) -> list[dict[str, Any]]:
        """Choices of the chunks that a choice begins with."""

    @abstractmethod
    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Choices of the chunks for a delta of text, one a chunk; none when nothing is new."""

    @abstractmethod
    def choice(self, index: int, text: Text) -> dict[str, Any]:
        """One choice of a whole response."""

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return self._envelope(self.kind, choices) | {"usage": usage.json()}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._envelope(self.chunk_kind, choices)

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


class ChatFormat(Format):
    """/v1/chat/completions; reasoning stands in `reasoning_content`, where Kimi's own service has it.

    As `logprobs.content` lists the tokens of the message's content, `logprobs.reasoning_content` lists those of its
    reasoning, where there is some.
    """

    @property
    def kind(self) -> str:
        return "chat.completion"

    @property
    def chunk_kind(self) -> str:
        return "chat.completion.chunk"

    def opening(self, index: int) -> list[dict[str, Any]]:
        return [self._choice(index, {"role": "assistant", "content": ""})]

    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        if delta.reasoning:
            found = self._logprobs((), delta.reasoning_logprobs)
            out.append(self._choice(index, {"reasoning_content": delta.reasoning}, found))
        if delta.text:
            out.append(self._choice(index, {"content": delta.text}, self._logprobs(delta.text_logprobs)))
        if delta.done:
            out.append(self._choice(index, {}, finish_reason=delta.finish_reason))
        return out

    def _choice(
        self,
        index: int,
        delta: dict[str, str],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(
        self, content: Sequence[PlacedLogprobs], reasoning: Sequence[PlacedLogprobs] = ()
    ) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        found: dict[str, Any] = {"content": chat_entries(self.tokenizer, content), "refusal": None}
        if reasoning:
            found["reasoning_content"] = chat_entries(self.tokenizer, reasoning)
        return found

    def choice(self, index: int, text: Text) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(text.content)}
        if reasoning := "".join(text.reasoning):
            message["reasoning_content"] = reasoning
        logprobs = self._logprobs(text.content_logprobs, text.reasoning_logprobs)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": text.finish_reason}


class CompletionFormat(Format):
    """/v1/completions."""

    @property
    def kind(self) -> str:
        return "text_completion"

    def opening(self, index: int) -> list[dict[str, Any]]:
        return []

    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        if not (delta.text or delta.done):
            return []
        return [self._choice(index, delta.text, delta.text_logprobs, delta.finish_reason)]

    def choice(self, index: int, text: Text) -> dict[str, Any]:
        return self._choice(index, "".join(text.content), text.content_logprobs, text.finish_reason)

    def _choice(
        self, index: int, text: str, placed: Sequence[PlacedLogprobs], finish_reason: str | None
    ) -> dict[str, Any]:
        asked = self.logprobs
        found = None if asked is None else completion_lists(self.tokenizer, placed, top=asked > 0)
        return {"index": index, "text": text, "logprobs": found, "finish_reason": finish_reason}
