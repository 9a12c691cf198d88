"""Conversations to learn from: JSON lines of OpenAI messages or of ShareGPT turns, read strictly, line by line.

A line is one JSON object, of either form; which one is told by its key:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}], "tools": [...], "id": "..."}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}], "id": "..."}

`tools` and `id` may be left out; other keys are those of whoever made the file, and are not read. Public data sets
have a few bad lines among millions: a bad line is a `BadLine` of some kind, which a reader counts and leaves out.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimijax.errors import ConfigError, RequestError
from kimijax.messages import normalised

from . import nano_dialogues, nano_facts
from .draft_recipe import NANO_CONVERSATIONS
from .run_record import file_hash

type Message = dict[str, Any]

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
# What may stand before a message; an assistant's turn that calls tools is followed by their results.
_BEFORE = {
    "system": ("nothing", "system"),
    "user": ("nothing", "system", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant with tool calls", "tool"),
}


class BadLine(ValueError):
    """A line that holds no conversation to learn from.

    Attributes:
      kind: one of a few words to count by, such as "empty turn".
    """

    def __init__(self, kind: str, field: str, found: object, expected: str) -> None:
        self.kind = kind
        shown = repr(found)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        super().__init__(f"{field}: found {shown}, expected {expected}")


@dataclass(frozen=True)
class Conversation:
    """Messages that end in an assistant's turn.

    Attributes:
      id: unique among all conversations of a run.
      dataset: the file's name without its ending, or nano.
      messages: in the form of `kimijax.messages.normalised`.
      tools: OpenAI tool declarations; none where empty.
    """

    id: str
    dataset: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def turns(self) -> tuple[int, ...]:
        """Indices of the assistant's messages."""
        return tuple(i for i, m in enumerate(self.messages) if m["role"] == "assistant")

    @property
    def prompt_text(self) -> str:
        """What comes before the first answer, as one string: equal for conversations that ask the same."""
        return _canonical([self.tools, self.messages[: self.turns[0]]])

    @property
    def text(self) -> str:
        """All that is said, as one string: equal for the same conversation under two ids."""
        return _canonical([self.tools, self.messages])

    def to_line(self) -> str:
        """One line of `conversations.jsonl`."""
        row: dict[str, Any] = {"id": self.id, "dataset": self.dataset, "messages": self.messages}
        if self.tools:
            row["tools"] = self.tools
        return json.dumps(row, ensure_ascii=False) + "\n"

    @staticmethod
    def from_line(line: bytes) -> "Conversation":
        """Reads what `to_line` wrote."""
        row = json.loads(line)
        return Conversation(row["id"], row["dataset"], tuple(row["messages"]), tuple(row.get("tools", ())))


@dataclass(frozen=True)
class Source:
    """One entry of `corpus.conversations`: a JSON-lines file, or the built-in questions."""

    name: str

    def __post_init__(self) -> None:
        if self.name != NANO_CONVERSATIONS and not Path(self.name).is_file():
            expected = f"JSON-lines files that exist, or {NANO_CONVERSATIONS}"
            raise ConfigError("corpus.conversations", self.name, expected)

    @property
    def dataset(self) -> str:
        return self.name if self.name == NANO_CONVERSATIONS else Path(self.name).stem

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """(line number from 1, line) of all lines that are not blank."""
        if self.name == NANO_CONVERSATIONS:
            yield from _nano_lines()
            return
        with Path(self.name).open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line

    def sha256(self) -> str:
        """Hash of the content."""
        if self.name != NANO_CONVERSATIONS:
            return file_hash(Path(self.name))
        digest = hashlib.sha256()
        for _, line in _nano_lines():
            digest.update(line)
        return digest.hexdigest()


def parse(line: bytes, dataset: str, number: int) -> Conversation:
    """The conversation of a line, up to its last assistant turn; without an `id` it is called DATASET-NUMBER.

    Raises:
      BadLine: names the field.
    """
    row = _object(line)
    keys = [key for key in ("messages", "conversations") if key in row]
    if len(keys) != 1:
        raise BadLine("form", "line", sorted(row), "either `messages` or `conversations`")
    given = row[keys[0]]
    if not isinstance(given, list) or not given:
        raise BadLine("form", keys[0], given, "a list with at least one message")
    turns = given if keys[0] == "messages" else [_from_sharegpt(turn, i) for i, turn in enumerate(given)]
    tools = row.get("tools") or ()
    if not isinstance(tools, list | tuple):
        raise BadLine("form", "tools", tools, "a list of tools")
    id = row.get("id")
    if id is None:
        id = f"{dataset}-{number}"
    if not isinstance(id, str | int) or isinstance(id, bool) or id == "":
        raise BadLine("form", "id", id, "a string or a whole number")
    try:
        messages = normalised(turns)
    except RequestError as e:
        raise BadLine("message", "messages", str(e), "messages that the server would take") from e
    _check_order(messages)
    _check_content(messages)
    conversation = Conversation(str(id), dataset, tuple(_up_to_last_answer(messages)), tuple(tools))
    try:
        conversation.to_line().encode()
    except UnicodeEncodeError as e:
        raise BadLine("json", "line", e.object[e.start : e.end], "text that UTF-8 can hold, no lone surrogate") from e
    return conversation


def _object(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as e:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise BadLine("json", "line", str(e), "a JSON object in UTF-8") from e
    if not isinstance(row, dict):
        raise BadLine("json", "line", row, "a JSON object")
    return row


def _from_sharegpt(turn: object, i: int) -> Message:
    if not isinstance(turn, dict):
        raise BadLine("message", f"conversations[{i}]", turn, "an object with `from` and `value`")
    speaker, value = turn.get("from"), turn.get("value")
    if not isinstance(speaker, str) or speaker not in _SHAREGPT_ROLES:
        raise BadLine("role", f"conversations[{i}].from", speaker, "one of " + ", ".join(_SHAREGPT_ROLES))
    if not isinstance(value, str):
        raise BadLine("message", f"conversations[{i}].value", value, "a string")
    return {**turn, "role": _SHAREGPT_ROLES[speaker], "content": value}


def _check_order(messages: Sequence[Message]) -> None:
    before = "nothing"
    for i, message in enumerate(messages):
        allowed = _BEFORE[message["role"]]
        if before not in allowed:
            expected = f"it after {' or '.join(allowed)}"
            raise BadLine("role order", f"messages[{i}].role", f"{message['role']} after {before}", expected)
        before = message["role"] + (" with tool calls" if message.get("tool_calls") else "")


def _check_content(messages: Sequence[Message]) -> None:
    for i, message in enumerate(messages):
        if message["role"] in ("user", "assistant") and not message["content"].strip() and "tool_calls" not in message:
            raise BadLine("empty turn", f"messages[{i}].content", message["content"], "a text")


def _up_to_last_answer(messages: Sequence[Message]) -> Sequence[Message]:
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if not answers:
        raise BadLine("no assistant turn", "messages", [m["role"] for m in messages], "an assistant's turn")
    return messages[: answers[-1] + 1]


def _canonical(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _nano_lines() -> Iterator[tuple[int, bytes]]:
    """The questions about Python's library that kimi-nano was trained on, one JSON line each."""
    facts, _ = nano_facts.collect_facts()
    for number, dialogue in enumerate(nano_dialogues.all_dialogues(facts, 0), start=1):
        yield number, json.dumps({"messages": dialogue.messages}, ensure_ascii=False).encode()
