"""The server's command line, start and end."""

import dataclasses
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from kimijax.engine.request import Request
from kimijax.errors import CheckpointError, ConfigError, TokenizerError
from kimijax.loader import NANO
from kimijax.serve import config, shutdown, startup

from . import golden, toy_tokenizer
from .serving import MakeServer, Server, say, servers

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[MakeServer]:
    yield from servers(tmp_path)


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
        "--latent-norm-eps 0",
        "--latent-norm-eps nan",
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


def test_the_printed_example_is_a_request_that_works(serve: MakeServer) -> None:
    server = serve()
    line = startup.example(config.ServerConfig(host="0.0.0.0"), 31234, server.service)
    assert line.startswith("curl http://127.0.0.1:31234/v1/chat/completions -H 'Content-Type: application/json' -d '")
    assert server("/v1/chat/completions", line.split(" -d '")[1].removesuffix("'").encode()).status == 200
    assert "http://[::1]:5/v1" in startup.example(config.ServerConfig(host="::"), 5, server.service)


def run_server(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "kimijax.serve", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory that a server takes: a tiny K2, INT4 experts, in three shards, with a tokenizer."""
    model = golden.with_quantization(golden.FAMILIES["kimi_k2"] | {"vocab_size": 520}, "int4")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    golden.write_tensors(golden.stored_tensors(model, dtype="bfloat16", quantization="int4", extras=False), folder, 3)
    (folder / "config.json").write_text(json.dumps(model))
    return toy_tokenizer.write(folder)


def test_a_sound_checkpoint_passes(checkpoint: Path) -> None:
    settings = config.ServerConfig(model_path=str(checkpoint))
    for tp in (1, 2, 8):
        found = startup.check_files(dataclasses.replace(settings, tp=tp))
        assert found.target.max_positions == found.engine.context_length == 1024
        assert (found.draft, found.speculation) == (None, None)


@pytest.mark.parametrize("tp", [3, 9])
def test_a_number_of_devices_that_does_not_divide_the_model(checkpoint: Path, tp: int) -> None:
    with pytest.raises(ConfigError, match=rf"^--tp: found {tp}, expected a"):
        startup.check_files(config.ServerConfig(model_path=str(checkpoint), tp=tp))


def test_faulty_checkpoints_are_refused_from_their_headers(checkpoint: Path) -> None:
    settings = config.ServerConfig(model_path=str(checkpoint))
    text = (checkpoint / "config.json").read_text()
    model = json.loads(text)
    for change, error, message in (
        ({"vocab_size": 600}, CheckpointError, r"embed_tokens\.weight: found \[520, 64\], expected \[600, 64\]"),
        ({"num_hidden_layers": 4}, CheckpointError, r"missing.*\n.*model\.layers\.3\."),
        ({"vocab_size": 128}, TokenizerError, "the tokenizer has 517 ids"),
        ({"rms_norm_eps": 0}, ConfigError, r"rms_norm_eps: found 0"),
    ):
        (checkpoint / "config.json").write_text(json.dumps(model | change))
        with pytest.raises(error, match=message):
            startup.check_files(settings)
    (checkpoint / "config.json").write_text(text)
    (checkpoint / "generation_config.json").write_text('{"repetition_penalty": 1.2}')
    with pytest.raises(ConfigError, match=r"repetition_penalty: found 1\.2"):
        startup.check_files(settings)


def test_devices_too_small_for_the_weights(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config.ServerConfig(model_path=str(checkpoint), max_running_requests=4)
    monkeypatch.setattr(startup.checkpoint, "check", functools.partial(startup.checkpoint.check, free=lambda _: 10**5))
    with pytest.raises(ConfigError, match="host memory"):
        startup.check_files(settings)
    monkeypatch.undo()
    monkeypatch.setattr(startup, "plan_memory", functools.partial(startup.plan_memory, free=lambda _: 5 * 10**6))
    with pytest.raises(ConfigError, match=r"^memory: found '0.01 GB free .*--max-running-requests \d+ fits"):
        startup.check_files(settings)


def test_latent_norm_eps_reaches_the_model(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    given: dict[str, Any] = {}

    def load(path: str, **options: Any) -> Any:
        given.update(options)
        raise CheckpointError("far enough")

    monkeypatch.setattr("kimijax.load", load)
    settings = config.parse_args(["--model", str(checkpoint), "--latent-norm-eps", "1e-6"])
    assert settings.latent_norm_eps == 1e-6
    with pytest.raises(CheckpointError, match="far enough"):
        startup.load_service(settings, startup.check_files(settings))
    assert given["latent_norm_eps"] == 1e-6


def test_addresses_that_cannot_be_taken() -> None:
    with pytest.raises(ConfigError, match="--host"):
        startup.bind("no.such.host.invalid", 0)
    with startup.bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        second = socket.socket()
        second.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        second.bind(("127.0.0.1", port))  # both are bound, as far as the system allows; one can listen
        with second:
            startup.listen(taken)
            with pytest.raises(ConfigError, match=f"--port: found {port}"):
                startup.listen(second)
        socket.create_connection(("127.0.0.1", port)).close()
        with pytest.raises(ConfigError, match=f"--port: found {port}"):
            startup.bind("127.0.0.1", port)


def test_port_in_use_and_missing_model_are_one_line_and_code_2(tmp_path: Path) -> None:
    with startup.bind("127.0.0.1", 0) as taken:
        startup.listen(taken)
        port = str(taken.getsockname()[1])
        for arguments, found in (("--port", port), port), (("--model", str(tmp_path / "nowhere")), "nowhere"):
            run = run_server(*arguments)
            assert run.returncode == 2
            assert run.stdout == ""
            assert run.stderr.count("\n") == 1
            assert found in run.stderr


def test_a_missing_shard_ends_the_server_before_its_port_answers(checkpoint: Path) -> None:
    shard = sorted(checkpoint.glob("*.safetensors"))[1]
    shard.unlink()
    port = free_port()
    command = [sys.executable, "-m", "kimijax.serve", "--model", str(checkpoint), "--port", str(port)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), timeout=20)
            time.sleep(0.05)
        out, errors = process.communicate()
    assert process.returncode == 2
    assert out == ""
    assert "kimijax.serve: error: " in errors
    assert f"{shard.name}: holds" in errors
    assert "Traceback" not in errors


def serve_fake(folder: str, port: str, timeout: str) -> None:
    """A server whose answers take 5 ms a token; runs until SIGTERM, in the main thread of some process."""

    def slow(request: Request) -> list[int]:
        time.sleep(0.005)
        return say("x" * 60)

    server = Server(Path(folder), slow)
    listener = startup.bind("127.0.0.1", int(port))
    startup.listen(listener)
    settings = uvicorn.Config(server.app, log_config=None, lifespan="off", ws="none")
    shutdown.DrainingServer(settings, server.state, float(timeout)).run(sockets=[listener])
    server.close()


def connect(port: int) -> socket.socket:
    """Waits for a server that is about to start."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=20)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def post(port: int, body: dict[str, Any]) -> socket.socket:
    data = json.dumps(body).encode()
    connection = connect(port)
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


def stop_while_busy(port: int, process: int, *, late: bool) -> tuple[str, list[str]]:
    """Send SIGTERM while one stream and one other request run and two wait; returns the stream's end, and the rest.

    `late`: also send a request after the signal; its reply comes last.
    """
    bodies = [{"prompt": "a", "stream": True, "max_tokens": 60}] + [{"prompt": "b", "max_tokens": 30}] * 3
    streaming, *others = [post(port, body) for body in bodies]
    started = b""
    while b"data: " not in started:
        part = streaming.recv(65536)
        assert part
        started += part
    os.kill(process, signal.SIGTERM)
    if late:
        time.sleep(0.2)
        others.append(post(port, {"prompt": "late"}))
    return read_all(streaming), [read_all(c) for c in others]


def free_port() -> int:
    with startup.bind("127.0.0.1", 0) as free:
        return free.getsockname()[1]


def statuses(replies: list[str]) -> list[str]:
    return [reply.split()[1] for reply in replies]


def test_sigterm_lets_requests_finish_and_exits_0(tmp_path: Path) -> None:
    port = free_port()
    code = f"from tests.test_serve_process import serve_fake; serve_fake({str(tmp_path)!r}, '{port}', '20')"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        stream, replies = stop_while_busy(port, process.pid, late=True)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
    assert '"finish_reason":"length"' in stream
    assert "data: [DONE]" in stream
    assert statuses(replies) == ["200", "200", "200", "503"]


def test_requests_that_do_not_finish_in_time_are_cut(tmp_path: Path) -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        clients = pool.submit(stop_while_busy, port, os.getpid(), late=False)
        started = time.monotonic()
        serve_fake(str(tmp_path), str(port), "0.1")
        stream, replies = clients.result()
    assert time.monotonic() - started < 10
    assert "shutting down" in stream
    assert "data: [DONE]" in stream
    assert "503" in statuses(replies)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.slow
@pytest.mark.skipif(not (NANO / "config.json").is_file(), reason="kimi-nano has not been trained into this checkout")
def test_nano_answers_the_printed_line_and_the_openai_client(tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")
    command = [sys.executable, "-m", "kimijax.serve", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = next(text.strip() for text in process.stdout if text.strip().startswith("curl "))
            answer = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=True)
            assert json.loads(answer.stdout)["choices"][0]["message"]["content"]
            question = [{"role": "user", "content": "What is json.dumps?"}]
            with openai.OpenAI(base_url=line.split()[1].removesuffix("/chat/completions"), api_key="none") as client:
                stream = client.chat.completions.create(
                    model="kimi-nano", messages=question, stream=True, temperature=0
                )
                assert "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            process.send_signal(signal.SIGTERM)
            assert process.wait(40) == 0
        finally:
            process.kill()
