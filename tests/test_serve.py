"""The HTTP server over an engine without a model, and the process around it."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from kimijax.chat import ChatTemplate
from kimijax.config import GenerationDefaults
from kimijax.engine.request import Request
from kimijax.engine.runner import EngineRunner
from kimijax.errors import ConfigError
from kimijax.generate import NANO
from kimijax.serve import app, config, service, shutdown, startup

from . import toy_tokenizer
from .asgi import Reply, call
from .fake_engine import SMALL, FakeEngine

ROOT = Path(__file__).resolve().parents[1]
TEXT = "A 世a😀b"
TEMPLATE = (NANO / "chat_template.jinja").read_text()
END, THINK, END_THINK = (
    toy_tokenizer.N_RANKS + toy_tokenizer.NAMES.index(n) for n in ("<|im_end|>", "<think>", "</think>")
)


def say(text: str) -> list[int]:
    return list(text.encode())


class Server:
    """An application with all that is behind it."""

    def __init__(self, folder: Path, script: Callable[[Request], list[int]], **engine: Any) -> None:
        tokenizer = toy_tokenizer.load(folder)
        self.engine = FakeEngine(script, end=END, vocab_size=tokenizer.vocab_size, **engine)
        self.runner = EngineRunner(self.engine).start()
        self.service = service.Service(
            name="toy",
            engine=self.engine,
            runner=self.runner,
            tokenizer=tokenizer,
            chat=ChatTemplate(TEMPLATE, tokenizer),
            defaults=GenerationDefaults(temperature=0.25, top_k=7),
            chat_kwargs={"thinking": False},
            created=1,
        )
        self.state = service.ServerState(watchdog_timeout=0.2)
        self.state.ready(self.service)
        self.app = app.create_app(self.state)

    def __call__(self, path: str, body: Any, **options: Any) -> Reply:
        return asyncio.run(call(self.app, "POST", path, body, **options))

    def get(self, path: str) -> Reply:
        return asyncio.run(call(self.app, "GET", path))

    def chat(self, content: str = "hi", **fields: Any) -> Reply:
        return self("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})

    def complete(self, prompt: Any = "hi", **fields: Any) -> Reply:
        return self("/v1/completions", {"prompt": prompt, **fields})

    def close(self) -> None:
        if self.engine.gate is not None:
            self.engine.gate.release(10**6)
        self.runner.stop()
        assert self.engine.free_pages == self.engine.config.total_pages
        assert not self.engine.running


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def make(script: Callable[[Request], list[int]] = lambda request: say(TEXT), **engine: Any) -> Server:
        made.append(Server(tmp_path, script, **engine))
        return made[-1]

    yield make
    for server in made:
        server.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# ---- answers --------------------------------------------------------------------------------------------------------


def test_chat_answer(serve: Callable[..., Server]) -> None:
    reply = serve().chat(model="toy")
    assert reply.status == 200
    body = reply.json
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "toy"
    message = {"role": "assistant", "content": TEXT}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    n_prompt = len("hi") + len("userassistant") + 7  # three marks of the turn, two of the answer, two of empty thought
    n_answer = len(say(TEXT)) + 1
    assert body["usage"] == {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_answer,
        "total_tokens": n_prompt + n_answer,
    }


@pytest.mark.parametrize("per_step", [1, 2, 3, 50])
def test_chat_stream(serve: Callable[..., Server], per_step: int) -> None:
    events = serve(per_step=per_step).chat(stream=True, stream_options={"include_usage": True}).events
    assert len({e["id"] for e in events}) == 1
    assert {e["object"] for e in events} == {"chat.completion.chunk"}
    *chunks, last = events
    choices = [e["choices"][0] for e in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {}
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]
    texts = [c["delta"].get("content", "") for c in choices]
    assert "".join(texts) == TEXT
    assert not any("\ufffd" in t for t in texts)
    assert all(e["usage"] is None for e in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(say(TEXT)) + 1


def test_stream_without_usage_and_with_continuous_usage(serve: Callable[..., Server]) -> None:
    server = serve()
    assert all("usage" not in e for e in server.chat(stream=True).events)
    events = server.chat(stream=True, stream_options={"continuous_usage_stats": True}).events
    counts = [e["usage"]["completion_tokens"] for e in events]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == len(say(TEXT)) + 1


@pytest.mark.parametrize("per_step", [1, 4])
def test_reasoning_is_apart(serve: Callable[..., Server], per_step: int) -> None:
    server = serve(lambda request: [*say("so 世"), END_THINK, *say("42")], per_step=per_step)
    thinking: dict[str, Any] = {"chat_template_kwargs": {"thinking": True}}
    message = server.chat(**thinking).json["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "42", "reasoning_content": "so 世"}
    deltas = [e["choices"][0]["delta"] for e in server.chat(stream=True, stop="o", **thinking).events]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "so 世"  # a stop string binds the answer only
    assert "".join(d.get("content", "") for d in deltas) == "42"
    # Off by the server's default here: nothing is split, and what looks like a mark is text.
    assert server.chat().json["choices"][0]["message"]["content"] == "so 世</think>42"


@pytest.mark.parametrize(
    ("prompt", "n_prompts", "n_tokens"),
    [("h世", 1, 4), (["h", "ij"], 2, 3), ([1, 2, 3], 1, 3), ([[1], [2, 3]], 2, 3), ("x<|im_end|>", 1, 2)],
)
def test_completion_takes_each_form_of_prompt(
    serve: Callable[..., Server], prompt: Any, n_prompts: int, n_tokens: int
) -> None:
    body = serve().complete(prompt).json
    assert body["object"] == "text_completion"
    wanted = {"text": TEXT, "logprobs": None, "finish_reason": "stop"}
    assert body["choices"] == [{"index": i, **wanted} for i in range(n_prompts)]
    assert body["usage"]["prompt_tokens"] == n_tokens


def test_completion_stream(serve: Callable[..., Server]) -> None:
    events = serve().complete("hi", stream=True).events
    assert "".join(e["choices"][0]["text"] for e in events) == TEXT
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_choices_draw_differently_and_can_be_repeated(serve: Callable[..., Server]) -> None:
    server = serve(lambda request: say(f"seed {request.seed}"))
    choices = server.chat(n=3, seed=5).json["choices"]
    assert [c["message"]["content"] for c in choices] == ["seed 5", "seed 6", "seed 7"]
    events = server.chat(n=3, seed=2**63 - 1, stream=True).events
    texts = dict.fromkeys(range(3), "")
    for choice in (e["choices"][0] for e in events):
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert list(texts.values()) == [f"seed {2**63 - 1}", "seed 0", "seed 1"]
    assert [c["text"] for c in server.complete(["a", "b"], n=2, seed=1).json["choices"]] == ["seed 1", "seed 2"] * 2


def test_settings_reach_the_engine(serve: Callable[..., Server]) -> None:
    seen: list[Request] = []

    def script(request: Request) -> list[int]:
        seen.append(request)
        return say(TEXT)

    server = serve(script)
    server.chat(top_k=-1, top_p=0.5, min_p=0.25, max_completion_tokens=1, stop_token_ids=[65], ignore_eos=True)
    sampling = seen[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.25, 0.5, 0, 0.25)
    assert (sampling.max_tokens, sampling.stop_token_ids, sampling.ignore_eos) == (1, (65,), True)
    server.chat(temperature=0, max_tokens=2)
    sampling = seen[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0, 7, 2)
    server.chat()
    assert seen[-1].sampling.max_tokens is None
    server.complete()
    assert seen[-1].sampling.max_tokens == 16


def test_ends_of_an_answer(serve: Callable[..., Server]) -> None:
    server = serve()

    def end(**fields: Any) -> tuple[str, str, int]:
        body = server.chat(**fields).json
        choice = body["choices"][0]
        return choice["message"]["content"], choice["finish_reason"], body["usage"]["completion_tokens"]

    assert end(max_tokens=3) == ("A \ufffd", "length", 3)
    assert end(stop="世") == ("A ", "stop", 5)
    assert end(stop=["zzz", "a"]) == ("A 世", "stop", 6)
    assert end(stop_token_ids=[ord("a")]) == ("A 世", "stop", 6)
    room = SMALL.context_length - server.chat().json["usage"]["prompt_tokens"]
    text, reason, count = end(ignore_eos=True)
    assert (text, reason, count) == (TEXT, "length", room)
    assert end(ignore_eos=True, max_tokens=10**9) == (text, "length", room)  # cut to what the context holds
    wait_for(lambda: not server.engine.has_work)
    # Only the answer that ended in a stop string had to be taken out of the engine.
    assert len(server.engine.cancelled) == 2


def test_harmless_values_of_what_is_not_implemented(serve: Callable[..., Server]) -> None:
    shared = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "user": "u", "seed": None}
    chat = {
        "logprobs": False,
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "store": False,
        "metadata": {"a": "b"},
        "response_format": {"type": "text"},
    }
    server = serve()
    assert server.chat(**shared, **chat).status == 200
    assert server.complete(**shared, echo=False, logprobs=None, best_of=1, suffix="").status == 200


# ---- what is refused ------------------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
BAD_FIELDS: list[tuple[str, Any, str]] = [
    ("logit_bias", {"517": 1}, "logit_bias"),
    ("logit_bias", {"-1": 1}, "logit_bias"),
    ("logit_bias", {"AI": 1}, "logit_bias"),
    ("stop_token_ids", [10**6], "stop_token_ids"),
    ("stop_token_ids", [-3], "stop_token_ids"),
    ("stop_token_ids", ["a"], "stop_token_ids"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("presence_penalty", 0.5, "presence_penalty"),
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
    ("logprobs", True, "logprobs"),
    ("logprobs", 0, "logprobs"),
    ("response_format", {"type": "json_object"}, "response_format"),
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
    ("logprobs", 0, "logprobs"),
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


def test_bad_values_are_refused_by_name_and_hurt_nobody_else(serve: Callable[..., Server]) -> None:
    server = serve()
    good = server.chat().json["choices"]
    for field, value, param in BAD_FIELDS + BAD_CHAT_FIELDS:
        assert_refused(server.chat(**{field: value}), param)
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


def test_a_misspelt_field_gets_a_hint(serve: Callable[..., Server]) -> None:
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
def test_bodies_that_are_no_request(serve: Callable[..., Server], body: bytes) -> None:
    server = serve()
    assert_refused(server("/v1/chat/completions", body, chunk_size=1000), None)
    assert server.chat().status == 200


def test_transport_errors_have_openais_form(serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    assert_refused(server("/v1/chat/completions", b"{}", content_type="text/plain"), None, 415)
    assert_refused(server("/v1/embeddings", {}), None, 404)
    assert_refused(server.get("/v1/completions"), None, 405)
    monkeypatch.setattr("kimijax.serve.app.MAX_BODY_BYTES", 100)
    assert_refused(server.complete("x" * 100), None, 413)


def test_another_models_name(serve: Callable[..., Server]) -> None:
    server = serve()
    for reply in (server.chat(model="gpt-9"), server.get("/v1/models/gpt-9")):
        assert_refused(reply, "model", 404)
        assert reply.json["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("n_prompt", [62, 63, 64, 65])
def test_prompts_around_the_context_length(serve: Callable[..., Server], n_prompt: int) -> None:
    server = serve()
    reply = server.complete([1] * n_prompt, max_tokens=100)
    if n_prompt < SMALL.context_length:
        choice = reply.json["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (TEXT[: 64 - n_prompt], "length")
    else:
        assert_refused(reply, "prompt")
    assert_refused(server.chat("x" * 64), "messages")


# ---- hang-ups, queue, failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_hang_up_frees_everything_within_a_step(serve: Callable[..., Server], stream: bool) -> None:
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


def test_queue_limit(serve: Callable[..., Server]) -> None:
    gate = threading.Semaphore(0)
    server = serve(gate=gate)

    async def five() -> list[Reply]:
        body = {"prompt": "hi"}
        tasks = [asyncio.create_task(call(server.app, "POST", "/v1/completions", body)) for _ in range(5)]
        await asyncio.sleep(0.05)
        gate.release(10**6)
        return await asyncio.gather(*tasks)

    replies = asyncio.run(five())
    assert sorted(r.status for r in replies) == [200] * 4 + [503]
    refused = next(r for r in replies if r.status == 503)
    assert refused.json["error"]["type"] == "service_unavailable"
    assert int(refused.headers["retry-after"]) >= 1


def test_request_that_half_fits_the_queue_leaves_nothing_behind(serve: Callable[..., Server]) -> None:
    gate = threading.Semaphore(0)
    server = serve(gate=gate)

    async def both() -> tuple[Reply, Reply]:
        first = asyncio.create_task(call(server.app, "POST", "/v1/completions", {"prompt": "hi", "n": 2}))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(call(server.app, "POST", "/v1/completions", {"prompt": "hi", "n": 3}))
        await asyncio.sleep(0.05)
        gate.release(10**6)
        return await first, await second

    first, second = asyncio.run(both())
    assert (first.status, second.status) == (200, 503)
    wait_for(lambda: not server.engine.has_work)
    assert len([i for i in server.engine.cancelled if i.endswith(("-0", "-1", "-2"))]) >= 2


def test_failed_step_is_a_500_and_the_next_request_works(serve: Callable[..., Server]) -> None:
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


def test_dead_engine_shows_in_health(serve: Callable[..., Server]) -> None:
    server = serve()
    server.engine.failures.append(RuntimeError("injected"))
    server.engine.recover_fails = True
    assert server.chat().status == 500
    server.runner.stop()
    assert server.get("/health").status == 503
    assert "the device is gone" in server.get("/ready").json["status"]
    assert server.chat().status == 503
    server.engine.running.clear()
    server.engine.free_pages = server.engine.config.total_pages


def test_stuck_engine_shows_in_health(serve: Callable[..., Server]) -> None:
    gate = threading.Semaphore(0)
    server = serve(gate=gate)

    async def watch() -> tuple[Reply, Reply]:
        task = asyncio.create_task(call(server.app, "POST", "/v1/completions", {"prompt": "hi"}))
        while server.runner.last_step_age() < server.state.watchdog_timeout:
            await asyncio.sleep(0.01)
        health = await call(server.app, "GET", "/health")
        gate.release(10**6)
        return health, await task

    health, reply = asyncio.run(watch())
    assert health.status == 503
    assert "in one step" in health.json["status"]
    assert reply.status == 200
    assert server.get("/health").status == 200


def test_life_of_a_server(serve: Callable[..., Server]) -> None:
    server = serve()
    health = server.get("/health").json
    assert (health["status"], health["phase"], health["free_pages"]) == ("ok", "ready", SMALL.total_pages)
    card = {"id": "toy", "object": "model", "created": 1, "owned_by": "kimijax", "max_model_len": 64}
    assert server.get("/v1/models").json == {"object": "list", "data": [card]}
    assert server.get("/v1/models/toy").json == card
    for state, phase in ((service.ServerState(1), "loading"), (server.state, "draining")):
        if phase == "draining":
            state.phase = service.Phase.DRAINING
        application = app.create_app(state)
        asked = [asyncio.run(call(application, "GET", p)) for p in ("/health", "/ready", "/v1/models")]
        asked.append(asyncio.run(call(application, "POST", "/v1/completions", {"prompt": "hi"})))
        assert [r.status for r in asked] == [200, 503, 503, 503]
        assert asked[0].json["phase"] == phase
    assert (
        "retry-after"
        in asyncio.run(call(app.create_app(service.ServerState(1)), "POST", "/v1/completions", {})).headers
    )


def test_openapi_lists_the_fields(serve: Callable[..., Server]) -> None:
    schema = serve().get("/openapi.json").json
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    model = schema["components"]["schemas"][body["$ref"].rsplit("/", 1)[1]]
    assert {"messages", "temperature", "stream_options"} <= set(model["properties"])
    assert "StreamOptions" in schema["components"]["schemas"]


# ---- command line ---------------------------------------------------------------------------------------------------


def test_flags_of_both_dialects() -> None:
    sglang = (
        "--model-path m --context-length 128 --max-running-requests 3 --max-queued-requests 4 --page-size 32 --tp 2"
    )
    vllm = "--model m --max-model-len 128 --max-num-seqs 3 --max-num-queued-reqs 4 --block-size 32 -tp 2"
    parsed = config.parse_args(sglang.split())
    assert parsed == config.parse_args(vllm.split())
    engine = parsed.engine_config(model_limit=4096)
    assert (engine.context_length, engine.max_batch, engine.max_queued, engine.page_size) == (128, 3, 4, 32)
    assert config.parse_args([]) == config.ServerConfig()
    assert config.parse_args(["--default-chat-template-kwargs", '{"a": 1}']).default_chat_template_kwargs == {"a": 1}


@pytest.mark.parametrize(
    "line",
    [
        "--modle-path m",
        "--model",
        "--model a --model-path b",
        "--port 70000",
        "--port x",
        "--tp 0",
        "--max-queued-requests -1",
        "--shutdown-timeout nan",
        "--dtype int8",
        "--page 32",  # no abbreviations
        "--default-chat-template-kwargs [1]",
        "--gpu-memory-utilization 0.9",
    ],
)
def test_wrong_flags_are_one_line_and_code_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        config.parse_args(line.split())
    assert stopped.value.code == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert line.split()[-2 if " " in line else 0].lstrip("-").split("-")[0] in text


@pytest.mark.parametrize("flags", ["--context-length 100", "--context-length 8192", "--max-total-tokens 64"])
def test_sizes_that_do_not_fit_the_model(flags: str) -> None:
    with pytest.raises(ConfigError, match=flags.split()[0]):
        config.parse_args(flags.split()).engine_config(model_limit=4096)


def test_default_context_is_what_a_small_model_has() -> None:
    assert config.ServerConfig(page_size=64).engine_config(model_limit=1000).context_length == 960
    assert config.ServerConfig(max_total_tokens=4096).engine_config(model_limit=2048).total_pages == 64


def test_the_printed_example_is_a_request_that_works(serve: Callable[..., Server]) -> None:
    server = serve()
    line = startup.example(config.ServerConfig(host="0.0.0.0"), 31234, server.service)
    assert line.startswith("curl http://127.0.0.1:31234/v1/chat/completions -H 'Content-Type: application/json' -d '")
    assert server("/v1/chat/completions", line.split(" -d '")[1].removesuffix("'").encode()).status == 200
    assert "http://[::1]:5/v1" in startup.example(config.ServerConfig(host="::"), 5, server.service)


# ---- the process ----------------------------------------------------------------------------------------------------


def run_server(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "kimijax.serve", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_port_in_use_and_missing_model_end_before_loading(tmp_path: Path) -> None:
    with startup.bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port: found {port}"):
            startup.bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match="--host"):
        startup.bind("no.such.host.invalid", 0)
    run = run_server("--model", str(tmp_path / "nowhere"), "--port", "0")
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.count("\n") == 1
    assert "nowhere" in run.stderr


def serve_fake(folder: str, port: str, timeout: str) -> None:
    """Run in a process of its own: a server whose answers have no end and take 10 ms a token."""

    def slow(request: Request) -> list[int]:
        time.sleep(0.01)
        return say("x" * 60)

    server = Server(Path(folder), slow)
    listener = startup.bind("127.0.0.1", int(port))
    settings = uvicorn.Config(server.app, log_config=None, lifespan="off", ws="none")
    shutdown.DrainingServer(settings, server.state, float(timeout)).run(sockets=[listener])
    server.close()


def post(port: int, body: dict[str, Any]) -> socket.socket:
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    head = (
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
    )
    connection.sendall("\r\n".join([*head, "", ""]).encode() + data)
    return connection


def read_all(connection: socket.socket) -> str:
    parts = []
    with connection:
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts).decode()


@pytest.mark.parametrize("timeout", [20, 0.2])
def test_sigterm_drains_or_cuts_and_exits_0(tmp_path: Path, timeout: float) -> None:
    with startup.bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    code = f"from tests.test_serve import serve_fake; serve_fake({str(tmp_path)!r}, '{port}', '{timeout}')"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.05)
        bodies = [{"prompt": "a", "stream": True, "max_tokens": 60}] + [{"prompt": "b", "max_tokens": 30}] * 3
        streaming, *others = [post(port, body) for body in bodies]
        started = b""
        while b"data: " not in started:  # the first two run now, the others are queued
            part = streaming.recv(65536)
            assert part
            started += part
        process.send_signal(signal.SIGTERM)
        time.sleep(0.15)
        if timeout > 1:
            late = read_all(post(port, {"prompt": "late"}))
            assert " 503 " in late.splitlines()[0]
        replies = [read_all(c) for c in others]
        ending = read_all(streaming)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
    if timeout > 1:
        assert [r.splitlines()[0].split()[1] for r in replies] == ["200"] * 3
        assert '"finish_reason":"length"' in ending
    else:
        assert "503" in [r.splitlines()[0].split()[1] for r in replies]
        assert "shutting down" in ending
    assert ending.rstrip("\r\n0").endswith("[DONE]")


@pytest.mark.slow
@pytest.mark.skipif(not (NANO / "config.json").is_file(), reason="kimi-nano has not been trained into this checkout")
def test_nano_answers_the_printed_line_and_the_openai_client(tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")
    command = [sys.executable, "-m", "kimijax.serve", "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = next(text.strip() for text in process.stdout if text.strip().startswith("curl "))
        answer = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=True)
        assert json.loads(answer.stdout)["choices"][0]["message"]["content"]
        client = openai.OpenAI(base_url=line.split()[1].removesuffix("/chat/completions"), api_key="none")
        stream = client.chat.completions.create(
            model="kimi-nano", messages=[{"role": "user", "content": "What is json.dumps?"}], stream=True, temperature=0
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) == 0
    finally:
        process.kill()
        process.wait()
