"""How answers look on the wire: OpenAI's two response formats, whole and in chunks."""

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from kimijax import __version__
from kimijax.text_stream import Delta

from .answer import Usage

FINGERPRINT = f"kimijax-{__version__}"


@dataclass
class Text:
    """What has been said so far in one choice."""

    reasoning: list[str] = field(default_factory=list[str])
    content: list[str] = field(default_factory=list[str])
    finish_reason: str | None = None

    def add(self, delta: Delta) -> None:
        self.reasoning.append(delta.reasoning)
        self.content.append(delta.text)
        self.finish_reason = delta.finish_reason


@dataclass(frozen=True)
class Format(ABC):
    """The envelope, and what fills it."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

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
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }


class ChatFormat(Format):
    """/v1/chat/completions; reasoning stands in `reasoning_content`, where Kimi's own service has it."""

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
            out.append(self._choice(index, {"reasoning_content": delta.reasoning}))
        if delta.text:
            out.append(self._choice(index, {"content": delta.text}))
        if delta.done:
            out.append(self._choice(index, {}, delta.finish_reason))
        return out

    def _choice(self, index: int, delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

    def choice(self, index: int, text: Text) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(text.content)}
        if reasoning := "".join(text.reasoning):
            message["reasoning_content"] = reasoning
        return {"index": index, "message": message, "logprobs": None, "finish_reason": text.finish_reason}


class CompletionFormat(Format):
    """/v1/completions."""

    @property
    def kind(self) -> str:
        return "text_completion"

    def opening(self, index: int) -> list[dict[str, Any]]:
        return []

    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        return [self._choice(index, delta.text, delta.finish_reason)] if delta.text or delta.done else []

    def choice(self, index: int, text: Text) -> dict[str, Any]:
        return self._choice(index, "".join(text.content), text.finish_reason)

    def _choice(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
