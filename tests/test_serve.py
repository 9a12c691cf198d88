"""What the HTTP server answers, and how it tells of its condition."""

import asyncio
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kimijax
from kimijax.engine.request import Request
from kimijax.penalties import Rules
from kimijax.serve import app, service
from kimijax.speculative_options import SpeculativeOptions

from .asgi import Reply, call
from .fake_engine import SMALL
from .serving import END_THINK, TEXT, MakeServer, say, servers, wait_for


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[MakeServer]:
    yield from servers(tmp_path)


def test_chat_answer(serve: MakeServer) -> None:
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
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("per_step", [1, 2, 3, 50])
def test_chat_stream(serve: MakeServer, per_step: int) -> None:
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


def test_stream_without_usage_and_with_continuous_usage(serve: MakeServer) -> None:
    server = serve()
    assert all("usage" not in e for e in server.chat(stream=True).events)
    events = server.chat(stream=True, stream_options={"continuous_usage_stats": True}).events
    counts = [e["usage"]["completion_tokens"] for e in events]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == len(say(TEXT)) + 1


@pytest.mark.parametrize("per_step", [1, 4])
def test_reasoning_is_apart(serve: MakeServer, per_step: int) -> None:
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
def test_completion_takes_each_form_of_prompt(serve: MakeServer, prompt: Any, n_prompts: int, n_tokens: int) -> None:
    body = serve().complete(prompt).json
    assert body["object"] == "text_completion"
    wanted = {"text": TEXT, "logprobs": None, "finish_reason": "stop"}
    assert body["choices"] == [{"index": i, **wanted} for i in range(n_prompts)]
    assert body["usage"]["prompt_tokens"] == n_tokens


def test_completion_stream(serve: MakeServer) -> None:
    events = serve().complete("hi", stream=True).events
    assert "".join(e["choices"][0]["text"] for e in events) == TEXT
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_choices_draw_differently_and_can_be_repeated(serve: MakeServer) -> None:
    server = serve(lambda request: say(f"seed {request.seed}"))
    choices = server.chat(n=3, seed=5).json["choices"]
    assert [c["message"]["content"] for c in choices] == ["seed 5", "seed 6", "seed 7"]
    events = server.chat(n=3, seed=2**63 - 1, stream=True).events
    texts = dict.fromkeys(range(3), "")
    for choice in (e["choices"][0] for e in events):
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert list(texts.values()) == [f"seed {2**63 - 1}", "seed 0", "seed 1"]
    assert [c["text"] for c in server.complete(["a", "b"], n=2, seed=1).json["choices"]] == ["seed 1", "seed 2"] * 2


def test_a_prompt_and_its_cached_part_count_once(serve: MakeServer) -> None:
    server = serve()
    server.engine.cached_at_start = 2
    for body in (
        server.complete(["ab", "cde"], n=2).json,
        server.complete(["ab", "cde"], n=2, stream=True, stream_options={"include_usage": True}).events[-1],
    ):
        assert body["usage"]["prompt_tokens"] == 5
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
        assert body["usage"]["completion_tokens"] == 4 * (len(say(TEXT)) + 1)


def test_settings_reach_the_engine(serve: MakeServer) -> None:
    seen: list[Request] = []

    def script(request: Request) -> list[int]:
        seen.append(request)
        return say(TEXT)

    server = serve(script)
    server.chat(top_k=-1, top_p=0.5, min_p=0.25, max_completion_tokens=1, stop_token_ids=[65], ignore_eos=True)
    sampling = seen[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.25, 0.5, 0, 0.25)
    assert (sampling.max_tokens, sampling.stop_token_ids, sampling.ignore_eos) == (1, (65,), True)
    bias = {"65": -100, "3": 0.5}
    server.complete(frequency_penalty=-1.5, presence_penalty=2, repetition_penalty=1.25, logit_bias=bias, priority=-3,
                    min_tokens=4, bad_words=["b", "ab"], logprobs=0)  # fmt: skip
    sampling = seen[-1].sampling
    assert sampling.rules == Rules(1.25, -1.5, 2, {65: -100, 3: 0.5}, 4, ((98,), (260,), (97, 98)))
    assert (sampling.priority, sampling.logprobs) == (-3, 0)
    server.chat(logprobs=True, top_logprobs=20)
    assert seen[-1].sampling.logprobs == 20
    server.chat(logprobs=False, top_logprobs=0)
    assert seen[-1].sampling.logprobs is None
    assert not seen[-1].needs_rules
    server.chat(temperature=0, max_tokens=2)
    sampling = seen[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0, 7, 2)
    server.chat()
    assert seen[-1].sampling.max_tokens is None
    server.complete()
    assert seen[-1].sampling.max_tokens == 16


def test_ends_of_an_answer(serve: MakeServer) -> None:
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


def test_values_that_change_nothing(serve: MakeServer) -> None:
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
    shared |= {"repetition_penalty": 1, "min_tokens": 0, "bad_words": [], "priority": 0, "structured_outputs": None}
    server = serve()
    assert server.chat(**shared, **chat).status == 200
    assert server.complete(**shared, echo=False, logprobs=None, best_of=1, suffix="").status == 200


def test_dead_engine_shows_in_health(serve: MakeServer) -> None:
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


def test_stuck_engine_shows_in_health(serve: MakeServer) -> None:
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


def test_life_of_a_server(serve: MakeServer) -> None:
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


def test_openapi_lists_the_fields(serve: MakeServer) -> None:
    schema = serve().get("/openapi.json").json
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    model = schema["components"]["schemas"][body["$ref"].rsplit("/", 1)[1]]
    assert {"messages", "temperature", "stream_options"} <= set(model["properties"])
    assert "StreamOptions" in schema["components"]["schemas"]


def test_server_info_counts(serve: MakeServer) -> None:
    """Without speculation there is nothing about it; with it settings and counters, and simulated output is stamped."""
    server = serve(lambda request: say("ok"))
    server.chat()
    info = server.get("/server_info").json
    assert info["model"] == "toy"
    assert "speculation" not in info
    assert server.chat().json["system_fingerprint"] == f"kimijax-{kimijax.__version__}"
    options = SpeculativeOptions("EAGLE3", 3, 1, 4, simulate_acc_len=2.0)
    server.state.service = dataclasses.replace(server.service, speculation=options)
    found = server.get("/server_info").json["speculation"]
    assert found["settings"]["num_steps"] == 3
    assert found["acceptance"]["rounds"] == 0
    assert found["now"] is None
    assert server.chat().json["system_fingerprint"].endswith("-simulated")
