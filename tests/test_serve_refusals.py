"""Bad requests, hang-ups, a full queue and failed steps hurt one request only."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .asgi import Reply, call
from .fake_engine import SMALL
from .serving import TEXT, MakeServer, Server, say, servers, wait_for


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[MakeServer]:
    yield from servers(tmp_path)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
BAD_FIELDS: list[tuple[str, Any, str]] = [
    ("logit_bias", {"517": 1}, "logit_bias"),
    ("logit_bias", {"-1": 1}, "logit_bias"),
    ("logit_bias", {"AI": 1}, "logit_bias"),
    ("logit_bias", {"05": 1}, "logit_bias"),
    ("logit_bias", {"5": "1"}, "logit_bias"),
    ("logit_bias", {"5": 100.5}, "logit_bias"),
    ("logit_bias", {"5": True}, "logit_bias"),
    ("logit_bias", {str(i): 1 for i in range(301)}, "logit_bias"),
    ("logit_bias", [1], "logit_bias"),
    ("frequency_penalty", 2.5, "frequency_penalty"),
    ("frequency_penalty", "1", "frequency_penalty"),
    ("min_tokens", -1, "min_tokens"),
    ("min_tokens", 0.5, "min_tokens"),
    ("bad_words", "word", "bad_words"),
    ("bad_words", [" "], "bad_words"),
    ("bad_words", ["a"] * 17, "bad_words"),
    ("bad_words", ["abcdefghijklmnopq"], "bad_words"),  # 17 tokens
    ("priority", 2**31, "priority"),
    ("priority", 0.5, "priority"),
    ("response_format", {"type": "xml"}, "response_format.type"),
    ("response_format", {"type": "json_schema"}, "response_format"),
    ("response_format", {"type": "json_object", "json_schema": {"name": "a", "schema": {}}}, "response_format"),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a"}}, "response_format.json_schema.schema"),
    ("structured_outputs", {}, "structured_outputs"),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}, "structured_outputs"),
    ("stop_token_ids", [10**6], "stop_token_ids"),
    ("stop_token_ids", [-3], "stop_token_ids"),
    ("stop_token_ids", ["a"], "stop_token_ids"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("repetition_penalty", 2.5, "repetition_penalty"),
    ("presence_penalty", -3, "presence_penalty"),
    ("temperature", -1, "temperature"),
    ("temperature", "1", "temperature"),
    ("temperature", True, "temperature"),
    ("top_p", 0, "top_p"),
    ("top_p", 1.5, "top_p"),
    ("top_k", -2, "top_k"),
    ("top_k", 1.5, "top_k"),
    ("min_p", 2, "min_p"),
    ("seed", -1, "seed"),
    ("seed", 2**63, "seed"),
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", -5, "max_tokens"),
    ("n", 0, "n"),
    ("n", 5, "n"),  # more than run and wait at once
    ("n", 10**6, "n"),
    ("stop", "", "stop"),
    ("stop", ["a", 1], "stop"),
    ("stop", ["a"] * 17, "stop"),
    ("stream", 1, "stream"),
    ("stream_options", {"include_usage": True}, "stream_options"),
    ("ignore_eos", "no", "ignore_eos"),
    ("temprature", 1, "temprature"),
]
BAD_CHAT_FIELDS: list[tuple[str, Any, str]] = [
    ("messages", [], "messages"),
    ("messages", "hi", "messages"),
    ("messages", [{"role": "robot", "content": ""}], "messages"),
    ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "messages"),
    ("messages", [1], "messages[0]"),
    ("max_completion_tokens", 0, "max_completion_tokens"),
    ("tools", [TOOL], "tools"),
    ("tool_choice", "required", "tool_choice"),
    ("logprobs", 0, "logprobs"),
    ("top_logprobs", 1, "top_logprobs"),  # without logprobs
    ("top_logprobs", 21, "top_logprobs"),
    ("reasoning_effort", "high", "reasoning_effort"),
    ("chat_template_kwargs", {"thinking": "no"}, "chat_template_kwargs.thinking"),
    ("chat_template_kwargs", {"tools": []}, "chat_template_kwargs.tools"),
    ("chat_template_kwargs", {"thinkin": False}, "chat_template_kwargs.thinkin"),
]
BAD_COMPLETION_FIELDS: list[tuple[str, Any, str]] = [
    ("prompt", "", "prompt"),
    ("prompt", [], "prompt"),
    ("prompt", [1, "a"], "prompt"),
    ("prompt", [[]], "prompt"),
    ("prompt", [True], "prompt"),
    ("prompt", {"text": "a"}, "prompt"),
    ("prompt", [517], "prompt"),
    ("prompt", [-1], "prompt"),
    ("echo", True, "echo"),
    ("logprobs", 21, "logprobs"),
    ("logprobs", True, "logprobs"),
    ("best_of", 2, "best_of"),
]


def assert_refused(reply: Reply, param: str | None, status: int = 400) -> None:
    assert reply.status == status, reply.body
    error = reply.json["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 400
    if param is not None:
        assert error["message"].startswith(param.split("[")[0].split(".")[0]), error


def test_bad_values_are_refused_by_name_and_hurt_nobody_else(serve: MakeServer) -> None:
    server = serve()
    good = server.chat().json["choices"]
    for field, value, param in BAD_FIELDS + BAD_CHAT_FIELDS:
        assert_refused(server.chat(**{field: value}), param)
        if field != "stream_options":
            assert_refused(server.chat(**{"stream": True, field: value}), param)
        assert server.chat().json["choices"] == good
    good = server.complete().json["choices"]
    for field, value, param in BAD_FIELDS + BAD_COMPLETION_FIELDS:
        assert_refused(server.complete(**{field: value}), param)
        assert server.complete().json["choices"] == good
    assert_refused(server("/v1/chat/completions", {}), "messages")
    assert_refused(server("/v1/completions", {}), "prompt")
    assert_refused(server.chat(max_tokens=1, max_completion_tokens=2), "max_completion_tokens")
    assert server.chat(max_tokens=1, max_completion_tokens=1).status == 200


def test_a_misspelt_field_gets_a_hint(serve: MakeServer) -> None:
    assert "did you mean 'temperature'" in serve().chat(temprature=1).json["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"temperature=1",
        b'{"messages": [{"role": "user", "content": "hi"}]',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "hi"}]} {}',
        b"[" * 100_000,
        b"[]",
        b"null",
    ],
    ids=["empty", "form", "cut", "surrogate", "latin-1", "nan", "trailing", "deep", "list", "null"],
)
def test_bodies_that_are_no_request(serve: MakeServer, body: bytes) -> None:
    server = serve()
    assert_refused(server("/v1/chat/completions", body, chunk_size=1000), None)
    assert server.chat().status == 200


def test_transport_errors_have_openais_form(serve: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    assert_refused(server("/v1/chat/completions", b"{}", content_type="text/plain"), None, 415)
    assert_refused(server("/v1/embeddings", {}), None, 404)
    assert_refused(server.get("/v1/completions"), None, 405)
    monkeypatch.setattr("kimijax.serve.app.MAX_BODY_BYTES", 100)
    assert_refused(server.complete("x" * 100), None, 413)


def test_another_models_name(serve: MakeServer) -> None:
    server = serve()
    for reply in (server.chat(model="gpt-9"), server.get("/v1/models/gpt-9")):
        assert_refused(reply, "model", 404)
        assert reply.json["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("n_prompt", [62, 63, 64, 65])
def test_prompts_around_the_context_length(serve: MakeServer, n_prompt: int) -> None:
    server = serve()
    reply = server.complete([1] * n_prompt, max_tokens=100)
    if n_prompt < SMALL.context_length:
        choice = reply.json["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (TEXT[: 64 - n_prompt], "length")
    else:
        assert_refused(reply, "prompt")
    assert_refused(server.chat("x" * 64), "messages")


@pytest.mark.parametrize("stream", [True, False])
def test_hang_up_frees_everything_within_a_step(serve: MakeServer, stream: bool) -> None:
    gate = threading.Semaphore(0)
    server = serve(lambda request: say("x" * 1000), gate=gate)

    def leave(reply: Reply) -> bool:
        both_run = len(server.engine.running) == 2
        if not both_run:
            gate.release()
        return both_run

    body = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "stream": stream}
    reply = server("/v1/chat/completions", body, hang_up=leave)
    assert not reply.finished
    gate.release()  # the step that may be under way; no further one is needed
    wait_for(lambda: not server.engine.has_work)
    stats = server.runner.stats()
    assert (stats.n_running, stats.n_waiting) == (0, 0)
    assert stats.free_pages == stats.total_pages
    gate.release(1000)
    assert server.chat(max_tokens=1).status == 200


async def submitted(server: Server, n: int, *tasks: asyncio.Task[Reply]) -> None:
    """Waits until so many requests are before the engine, or one of the tasks is done: the engine refuses at once what
    is too much, if it is not in a step."""
    while len(server.runner._live) < n and not any(task.done() for task in tasks):
        await asyncio.sleep(0.001)


def test_queue_limit(serve: MakeServer) -> None:
    gate = threading.Semaphore(0)
    server = serve(gate=gate)

    async def five() -> list[Reply]:
        body = {"prompt": "hi"}
        tasks = [asyncio.create_task(call(server.app, "POST", "/v1/completions", body)) for _ in range(5)]
        await submitted(server, 5, *tasks)
        gate.release(10**6)
        return await asyncio.gather(*tasks)

    replies = asyncio.run(five())
    assert sorted(r.status for r in replies) == [200] * 4 + [503]
    refused = next(r for r in replies if r.status == 503)
    assert refused.json["error"]["type"] == "service_unavailable"
    assert int(refused.headers["retry-after"]) >= 1


def test_request_that_half_fits_the_queue_leaves_nothing_behind(serve: MakeServer) -> None:
    gate = threading.Semaphore(0)
    server = serve(gate=gate)

    async def both() -> tuple[Reply, Reply]:
        first = asyncio.create_task(call(server.app, "POST", "/v1/completions", {"prompt": "hi", "n": 2}))
        await submitted(server, 2)
        second = asyncio.create_task(call(server.app, "POST", "/v1/completions", {"prompt": "hi", "n": 3}))
        await submitted(server, 5, second)
        gate.release(10**6)
        return await first, await second

    first, second = asyncio.run(both())
    assert (first.status, second.status) == (200, 503)
    wait_for(lambda: len(server.engine.cancelled) >= 2)  # those of the second request's answers that were taken
    wait_for(lambda: not server.engine.has_work)


def test_failed_step_is_a_500_and_the_next_request_works(serve: MakeServer) -> None:
    server = serve()
    server.engine.failures.append(RuntimeError("injected"))
    reply = server.chat()
    assert reply.status == 500
    assert reply.json["error"]["type"] == "server_error"
    server.engine.failures.append(RuntimeError("injected"))
    events = server.chat(stream=True).events
    assert events[-1]["error"]["type"] == "server_error"
    assert server.chat().json["choices"][0]["message"]["content"] == TEXT
    assert server.get("/health").status == 200
