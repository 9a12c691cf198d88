"""The form of an answer: response_format and vLLM's structured_outputs reach the engine as constraints."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kimijax.engine.request import Request

from .serving import END, END_THINK, MakeServer, say, servers

INTEGER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[MakeServer]:
    yield from servers(tmp_path)


def schema(value: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": value, **more}}


def wanting(text: str) -> Any:
    """A script of an engine that wants to say `text`, and prose after it."""
    return lambda request: say(text + " and so on")


@pytest.mark.parametrize("per_step", [1, 4, 50])
@pytest.mark.parametrize("stream", [True, False])
def test_answers_fit_their_schema(serve: MakeServer, per_step: int, stream: bool) -> None:
    server = serve(wanting('{"a": 42}'), per_step=per_step)
    reply = server.chat(response_format=schema(INTEGER, strict=True, description="a number"), stream=stream)
    if stream:
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in reply.events)
        reason = reply.events[-1]["choices"][0]["finish_reason"]
    else:
        text, reason = (c := reply.json["choices"][0])["message"]["content"], c["finish_reason"]
    assert (json.loads(text), reason) == ({"a": 42}, "stop")


@pytest.mark.parametrize(
    ("form", "wanted", "text"),
    [
        ({"response_format": {"type": "json_object"}}, '{"b": [1, "x"]}', '{"b": [1, "x"]}'),
        ({"response_format": {"type": "text"}}, "hi", "hi and so on"),
        ({"response_format": {"type": "text"}, "structured_outputs": {"regex": "[0-9]{3}"}}, "2026", "202"),
        ({"structured_outputs": {"json": INTEGER}}, '{"a": 1}', '{"a": 1}'),
        ({"structured_outputs": {"json": json.dumps(INTEGER)}}, '{"a": 1}', '{"a": 1}'),
        ({"structured_outputs": {"json_object": True}}, "{}", "{}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "no"),
        ({"structured_outputs": {"grammar": 'start: "x"+ "y"'}}, "xxy", "xxy"),
    ],
)
def test_forms_of_both_routes(serve: MakeServer, form: dict[str, Any], wanted: str, text: str) -> None:
    server = serve(wanting(wanted))
    assert server.chat(**form).json["choices"][0]["message"]["content"] == text
    assert server.complete(max_tokens=30, **form).json["choices"][0]["text"] == text


def test_each_choice_has_a_constraint_of_its_own(serve: MakeServer) -> None:
    def script(request: Request) -> list[int]:
        return say(json.dumps({"a": request.seed}))

    server = serve(script, per_step=2)
    choices = server.chat(n=3, seed=9, response_format=schema(INTEGER)).json["choices"]
    assert [json.loads(c["message"]["content"]) for c in choices] == [{"a": 9}, {"a": 10}, {"a": 11}]


def test_the_form_binds_after_thinking(serve: MakeServer) -> None:
    """Where the prompt opens it; in plain completions the marks are text, which the form binds from the start."""
    seen: list[Request] = []

    def script(request: Request) -> list[int]:
        seen.append(request)
        return [*say("so?"), END_THINK, *say("no way")]

    server = serve(script, per_step=3)
    form: dict[str, Any] = {"structured_outputs": {"choice": ["yes", "no"]}}
    message = server.chat(**form, chat_template_kwargs={"thinking": True}).json["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("so?", "no")
    seen.clear()
    server = serve(lambda request: seen.append(request) or say("no"))
    assert server.complete("x<think>", **form).json["choices"][0]["text"] == "no"
    assert seen[0].prompt[-1] == END_THINK - 1


def test_stop_ids_of_the_request_end_it(serve: MakeServer) -> None:
    server = serve(lambda request: [*say("12"), END])
    form: dict[str, Any] = {"structured_outputs": {"regex": "[0-9]+"}}
    assert server.chat(**form, stop_token_ids=[END + 1]).json["choices"][0]["finish_reason"] == "stop"
    found = server.chat(**form, ignore_eos=True, stop_token_ids=[END]).json["choices"][0]
    assert (found["message"]["content"], found["finish_reason"]) == ("12", "stop")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": schema({"type": "number", "multipleOf": "x"})}, "response_format"),
        ({"response_format": schema({"type": "object", "if": {}})}, "response_format"),  # llguidance has no such rule
        ({"response_format": schema({"enum": []})}, "response_format"),
        ({"response_format": schema({}), "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 2}, "min_tokens"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "response_format"),
        ({"response_format": {"type": "json_object"}, "stop_token_ids": [10**6]}, "stop_token_ids"),
    ],
)
def test_forms_that_cannot_be_honoured_are_refused_by_name(
    serve: MakeServer, fields: dict[str, Any], param: str
) -> None:
    server = serve()
    for ask in (server.chat, server.complete):
        for stream in (True, False):
            reply = ask(**fields, stream=stream)
            assert (reply.status, reply.json["error"]["param"]) == (400, param), reply.body
            assert reply.json["error"]["message"].startswith(f"{param}: ")
    assert server.chat().status == 200
