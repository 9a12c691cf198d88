"""Log-probabilities in OpenAI's two forms, whole and streamed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kimijax.engine.request import TokenLogprobs
from kimijax.serve import logprobs
from kimijax.text_stream import PlacedLogprobs

from . import toy_tokenizer
from .serving import END, END_THINK, TEXT, MakeServer, say, servers


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[MakeServer]:
    yield from servers(tmp_path)


def joined(entries: list[dict[str, Any]]) -> str:
    return bytes(b for e in entries for b in e["bytes"]).decode()


def test_chat_entries(serve: MakeServer) -> None:
    choice = serve(lambda request: [65, 259]).chat(logprobs=True, top_logprobs=2).json["choices"][0]
    assert choice["message"]["content"] == "Aaa"
    first, second = choice["logprobs"]["content"]  # the end of the turn is no part of the content
    assert first == {
        "token": "A",
        "logprob": -0.25,
        "bytes": [65],
        "top_logprobs": [
            {"token": "A", "logprob": -0.25, "bytes": [65]},
            {"token": "B", "logprob": -0.75, "bytes": [66]},
        ],
    }
    assert (second["token"], second["bytes"]) == ("aa", [97, 97])
    assert [t["token"] for t in second["top_logprobs"]] == ["aa", " b"]
    assert choice["logprobs"]["refusal"] is None


@pytest.mark.parametrize("per_step", [1, 2, 3, 50])
def test_streamed_entries_come_with_their_text(serve: MakeServer, per_step: int) -> None:
    server = serve(per_step=per_step)
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 1, "stop": "zzz"}
    whole = server.chat(**asked).json["choices"][0]["logprobs"]["content"]
    assert joined(whole) == TEXT
    assert [e["token"] for e in whole[2:5]] == ["\ufffd"] * 3  # parts of a character; their bytes say which
    assert all(len(e["top_logprobs"]) == 1 for e in whole)
    streamed: list[dict[str, Any]] = []
    for choice in (e["choices"][0] for e in server.chat(stream=True, **asked).events):
        if text := choice["delta"].get("content"):
            assert joined(choice["logprobs"]["content"]) == text
            streamed += choice["logprobs"]["content"]
        else:
            assert choice["logprobs"] is None
    assert streamed == whole


@pytest.mark.parametrize("per_step", [1, 4, 50])
def test_entries_of_reasoning_are_apart(serve: MakeServer, per_step: int) -> None:
    server = serve(lambda request: [*say("so 世"), END_THINK, *say("42")], per_step=per_step)
    asked: dict[str, Any] = {"chat_template_kwargs": {"thinking": True}, "logprobs": True}
    found = server.chat(**asked).json["choices"][0]["logprobs"]
    assert (joined(found["content"]), joined(found["reasoning_content"])) == ("42", "so 世")
    assert all(e["top_logprobs"] == [] for e in found["content"])
    streamed: dict[str, list[Any]] = {"content": [], "reasoning_content": []}
    for choice in (e["choices"][0] for e in server.chat(stream=True, **asked).events):
        for part, entries in streamed.items():
            entries += (choice["logprobs"] or {}).get(part, [])
    assert streamed == {part: found[part] for part in streamed}


def test_entries_end_where_the_text_does(serve: MakeServer) -> None:
    server = serve(per_step=4)
    ends: list[tuple[dict[str, Any], str]] = [
        ({"stop": "a"}, "A 世"),
        ({"stop": "世a"}, "A "),
        ({"stop_token_ids": [97]}, "A 世"),
    ]
    for fields, text in ends:
        body = server.chat(logprobs=True, **fields).json
        assert joined(body["choices"][0]["logprobs"]["content"]) == text
        assert body["usage"]["completion_tokens"] == 6
    cut = server.chat(logprobs=True, max_tokens=3).json["choices"][0]
    assert cut["message"]["content"] == "A \ufffd"
    assert [e["bytes"] for e in cut["logprobs"]["content"]] == [[65], [32], [0xE4]]


def test_completion_lists(serve: MakeServer) -> None:
    server = serve(lambda request: [65, 0xE4, 0xB8, 0x96, 259])
    found = server.complete(logprobs=2).json["choices"][0]["logprobs"]
    assert found["tokens"] == ["A", "bytes:\\xe4", "bytes:\\xb8", "bytes:\\x96", "aa"]
    assert found["text_offset"] == [0, 1, 1, 1, 2]
    assert found["token_logprobs"][0] == -0.25
    assert found["top_logprobs"][0] == {"A": -0.25, "B": -0.75}
    assert [len(top) for top in found["top_logprobs"]] == [2] * 5
    own = server.complete(logprobs=0).json["choices"][0]["logprobs"]
    assert own == found | {"top_logprobs": None}
    streamed: dict[str, list[Any]] = {name: [] for name in found}
    for event in server.complete(logprobs=2, stream=True).events:
        for name, values in streamed.items():
            values += event["choices"][0]["logprobs"][name]
    assert streamed == found


def test_marks_are_text_in_completions(serve: MakeServer) -> None:
    found = serve(lambda request: [65, END_THINK]).complete(logprobs=0, max_tokens=9).json["choices"][0]
    assert (found["text"], found["logprobs"]["tokens"]) == ("A</think>", ["A", "</think>"])


def test_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    tokenizer = toy_tokenizer.load(tmp_path)
    never = float("-inf")
    placed = [PlacedLogprobs(0, TokenLogprobs(65, never, ((66, -0.5), (END, never))))]
    entry = logprobs.chat_entries(tokenizer, placed)[0]
    assert (entry["logprob"], entry["top_logprobs"][1]["logprob"]) == (-9999.0, -9999.0)
    assert entry["top_logprobs"][1]["token"] == "<|im_end|>"
    lists = logprobs.completion_lists(tokenizer, placed, top=True)
    assert lists["token_logprobs"] == [-9999.0]
    assert lists["top_logprobs"] == [{"B": -0.5, "<|im_end|>": -9999.0, "A": -9999.0}]  # itself, not among the first
