"""Conversations from JSON lines: both forms, and every bad line refused for what is bad in it."""

import json
from pathlib import Path
from typing import Any

import pytest

from kimijax.errors import ConfigError
from kimijax.train import conversations

from .corpus_cases import said, write_lines


def read(row: Any) -> conversations.Conversation:
    return conversations.parse(row if isinstance(row, bytes) else json.dumps(row).encode(), "set", 7)


def test_openai_messages() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    found = read(said("hi", "yo", id="x1", tools=[tool], source="elsewhere"))
    assert found == conversations.Conversation("x1", "set", (*said("hi", "yo")["messages"],), (tool,))
    assert read(said("hi", "yo", id=12)).id == "12"
    assert read(said("hi", "yo")).id == "set-7"
    assert conversations.Conversation.from_line(found.to_line().encode()) == found


def test_sharegpt_is_the_same_conversation() -> None:
    turns = [("system", "s"), ("human", "hi"), ("gpt", "yo"), ("user", "more"), ("assistant", "no")]
    found = read({"conversations": [{"from": who, "value": text} for who, text in turns]})
    roles = ("system", "user", "assistant", "user", "assistant")
    expected = [{"role": role, "content": text} for role, (_, text) in zip(roles, turns, strict=True)]
    assert found == read({"messages": expected})
    assert found.turns == (2, 4)


def test_what_follows_the_last_answer_is_left_out() -> None:
    assert read(said("hi", "yo", "more")) == read(said("hi", "yo"))


def test_tool_calls_with_their_results() -> None:
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "functions.f:0", "content": ""},
        {"role": "assistant", "content": [{"type": "text", "text": "yo"}], "reasoning": "because"},
    ]
    found = read({"messages": messages})
    assert found.turns == (1, 3)
    assert found.messages[3] == {"role": "assistant", "content": "yo", "reasoning_content": "because"}


def test_equal_texts_are_equal_whatever_the_id() -> None:
    a, b = read(said("hi", "yo", id="a")), read(said("hi", "yo", id="b"))
    other = read(said("hi", "no"))
    assert a.text == b.text != other.text
    assert a.prompt_text == other.prompt_text != read(said("ho", "yo")).prompt_text


ROLES = {"user": "q", "assistant": "a", "system": "s", "tool": "t"}


def order(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": ROLES[role]} for role in roles]}


BAD: list[tuple[Any, str, str]] = [
    (b'{"messages": [', "json", "line: found 'Expecting value"),
    (b'{"messages": "\xff"}', "json", "line: found .*utf-8"),
    (b"[1]", "json", "line: found .1., expected a JSON object"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "a"}]}', "json", "UTF-8"),
    ({"text": "hi"}, "form", "either `messages` or `conversations`"),
    ({**said("hi", "yo"), "conversations": []}, "form", "either `messages` or `conversations`"),
    ({"messages": []}, "form", "messages: found .., expected a list with at least one"),
    ({"messages": "hi"}, "form", "messages: found 'hi'"),
    (said("hi", "yo", tools={"a": 1}), "form", "tools: found"),
    (said("hi", "yo", id=["x"]), "form", "id: found"),
    (said("hi", "yo", id=True), "form", "id: found True"),
    ({"messages": ["hi"]}, "message", r"messages\[0\]: found 'hi'"),
    ({"messages": [{"role": "narrator", "content": "hi"}]}, "message", r"messages\[0\].role: found 'narrator'"),
    ({"messages": [{"role": "user", "content": 5}]}, "message", r"messages\[0\].content: found 5"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "message", "found a part of type"),
    ({"conversations": ["hi"]}, "message", r"conversations\[0\]: found 'hi'"),
    ({"conversations": [{"from": "human", "value": None}]}, "message", r"conversations\[0\].value: found None"),
    ({"conversations": [{"from": "bing", "value": "hi"}]}, "role", r"conversations\[0\].from: found 'bing'"),
    (order("user"), "no assistant turn", r"found \['user'\]"),
    (said("hi", " \n"), "empty turn", r"messages\[1\].content"),
    (said("", "yo"), "empty turn", r"messages\[0\].content"),
    (order("assistant", "user"), "role order", r"messages\[0\].role: found 'assistant after nothing'"),
    (order("user", "user", "assistant"), "role order", r"messages\[1\].role: found 'user after user'"),
    (order("user", "assistant", "assistant"), "role order", "found 'assistant after assistant'"),
    (order("user", "system", "assistant"), "role order", "found 'system after user'"),
    (order("user", "assistant", "tool", "assistant"), "message", "tool_call_id"),
]


@pytest.mark.parametrize(("row", "kind", "message"), BAD)
def test_bad_lines_are_refused_by_field(row: Any, kind: str, message: str) -> None:
    with pytest.raises(conversations.BadLine, match=message) as e:
        read(row)
    assert e.value.kind == kind


def test_an_unanswered_tool_call_is_out_of_order() -> None:
    call = {"id": "functions.f:0", "function": {"name": "f", "arguments": "{}"}}
    row = said("hi", "yo", "more", "no")
    row["messages"][1]["tool_calls"] = [call]
    with pytest.raises(conversations.BadLine, match="user after assistant with tool calls"):
        read(row)


def test_a_source_reads_lines_by_number(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "some.jsonl", [said("a", "b"), b"", said("c", "d")])
    source = conversations.Source(str(path))
    assert source.dataset == "some"
    assert [number for number, _ in source.lines()] == [1, 3]
    with pytest.raises(ConfigError, match=r"corpus.conversations: found '.*none.jsonl'"):
        conversations.Source(str(tmp_path / "none.jsonl"))


def test_the_built_in_questions_are_good_lines() -> None:
    source = conversations.Source("nano")
    first = [line for _, line in source.lines()]
    assert first == [line for _, line in source.lines()]
    found = [conversations.parse(line, source.dataset, number) for number, line in enumerate(first[:500], start=1)]
    assert len({c.text for c in found}) == 500
    assert max(len(c.turns) for c in found) == 2
    assert source.dataset == conversations.NANO_CONVERSATIONS
