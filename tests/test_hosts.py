"""A server of two processes, four devices each: it answers as one device does, and ends whole when one is lost."""

import functools
import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kimijax
from kimijax.engine.remote import LOST_AFTER
from kimijax.serve import hosts

from . import golden, several_hosts, toy_tokenizer
from .two_processes import Group, free_port, processes, run_processes

SERVE = "import sys; from kimijax.serve.__main__ import main; sys.exit(main(sys.argv[1:]))"
PROMPT = "abc"
ASKED: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 0.9, "seed": 3})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny K2 with INT4 experts and a tokenizer."""
    model = golden.with_quantization(golden.FAMILIES["kimi_k2"] | {"vocab_size": 520}, "int4")
    folder = tmp_path_factory.mktemp("checkpoint")
    golden.write_tensors(golden.stored_tensors(model, dtype="bfloat16", quantization="int4", extras=False), folder, 3)
    (folder / "config.json").write_text(json.dumps(model))
    return toy_tokenizer.write(folder)


class Service:
    """The two processes of a server that is ready."""

    def __init__(self, group: Group, port: int) -> None:
        self.group, self._url = group, f"http://127.0.0.1:{port}"

    def post(self, **body: Any) -> tuple[int, Any]:
        """Status and body of an answer to PROMPT."""
        data = json.dumps({"prompt": PROMPT, **body}).encode()
        return self._open(
            urllib.request.Request(f"{self._url}/v1/completions", data, {"content-type": "application/json"})
        )

    def get(self, path: str) -> tuple[int, Any]:
        return self._open(urllib.request.Request(self._url + path))

    def _open(self, request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=100) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)


@contextmanager
def service(folder: Path, tmp_path: Path, *more: str) -> Iterator[Service]:
    port = free_port()
    sizes = "--tp 8 --max-running-requests 1 --context-length 256 --chunked-prefill-size 32 --page-size 32"
    args = ["--model-path", str(folder), "--port", str(port), *sizes.split(), *more]
    with processes(SERVE, 2, 4, [*args, "--shutdown-timeout", "90", "--compilation-cache-dir", str(tmp_path)]) as group:
        deadline = time.monotonic() + 300
        while "Ready" not in group.stdout(0):
            assert time.monotonic() < deadline, group.told()
            assert all(p.poll() is None for p in group.processes), group.told()
            time.sleep(0.05)
        yield Service(group, port)


def expected(folder: Path) -> list[str]:
    """What one device answers."""
    llm = kimijax.load(folder, engine=kimijax.EngineConfig(max_batch=1, context_length=256, page_size=32))
    return [llm.generate(PROMPT, max_tokens=12, **asked).text for asked in ASKED]


def while_answering(server: Service, act: Callable[[], object]) -> tuple[int, Any]:
    """Status and body of a long answer during which something happens."""
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(server.post, max_tokens=200, ignore_eos=True)
        while server.get("/health")[1]["running"] == 0:
            time.sleep(0.01)
        act()
        return asking.result(100)


def test_two_hosts_answer_as_one_device_and_end_together(checkpoint: Path, tmp_path: Path) -> None:
    right = expected(checkpoint)
    with service(checkpoint, tmp_path) as server:
        answers = [server.post(max_tokens=12, **asked) for asked in ASKED]
        assert [body["choices"][0]["text"] for _, body in answers] == right
        status, info = server.get("/server_info")
        assert [(h["id"], h["devices"]) for h in info["hosts"]] == [(0, 4), (1, 4)]
        assert "Hosts: host 0" in server.group.stdout(0)
        first, second = server.group.processes
        killed: list[float] = []

        def kill() -> None:
            second.kill()
            killed.append(time.monotonic())

        status, body = while_answering(server, kill)
        assert status == 500
        # A collective that fails for it may be the first to tell.
        assert any(text in body["error"]["message"] for text in ("host 1 (", "a step failed"))
        assert server.get("/health")[0] == 503
        assert first.wait(LOST_AFTER + hosts.GRACE) == 1
        assert time.monotonic() - killed[0] < hosts.GRACE + 1  # a killed process breaks its connection at once
        assert "the service ends: host 1" in server.group.stderr(0)


@pytest.mark.parametrize(
    ("own", "texts"),
    [
        (["--preset tp", "--preset ep"], ["'tensor': 8", "'expert': 8"]),
        pytest.param(
            ["--context-length 256", "--context-length 128"],
            ["context_length=256", "context_length=128"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_hosts_with_other_flags_are_refused(checkpoint: Path, own: Sequence[str], texts: Sequence[str]) -> None:
    args = ["--model-path", str(checkpoint), "--port", "0", "--tp", "8"]
    with processes(SERVE, 2, 4, args, own=[flags.split() for flags in own]) as group:
        assert group.wait(60) == [2, 2]
        for i in range(2):
            assert "expected what host 0" in group.stderr(i)
            assert all(text in group.stderr(i) for text in texts), group.told()


def test_a_fault_of_one_host_ends_both_with_its_reason(checkpoint: Path, tmp_path: Path) -> None:
    args = ["--port", "0", "--tp", "8"]
    own = [["--model-path", str(checkpoint)], ["--model-path", str(tmp_path)]]
    with processes(SERVE, 2, 4, args, own=own) as group:
        assert group.wait(60) == [2, 2]
        for i in range(2):
            assert "checkpoint directory with a config.json" in group.stderr(i), group.told()


@pytest.mark.slow
def test_the_others_end_when_host_0_is_killed(checkpoint: Path, tmp_path: Path) -> None:
    with service(checkpoint, tmp_path) as server:
        first, second = server.group.processes
        begun = time.monotonic()
        first.kill()
        # JAX's coordinator dies with host 0, and JAX ends its clients by a signal if it is first to notice.
        assert second.wait(LOST_AFTER + hosts.GRACE) in (1, -signal.SIGABRT)
        assert time.monotonic() - begun < LOST_AFTER
        told = server.group.stderr(1)
        assert "host 0 is lost" in told or "JAX distributed service detected fatal errors" in told, told


@pytest.mark.slow
@pytest.mark.parametrize("asked", [0, 1])
def test_a_signal_to_any_host_ends_all_in_order(checkpoint: Path, tmp_path: Path, asked: int) -> None:
    with service(checkpoint, tmp_path) as server:
        status, body = while_answering(server, server.group.processes[asked].terminate)
        assert status == 200, body  # what was running could finish
        assert server.group.wait(30) == [0, 0], server.group.told()


@pytest.fixture(scope="module")
def right() -> Callable[[str | None], list[list[int]]]:
    """What one device answers, with a draft or without."""
    return functools.cache(lambda draft: several_hosts.answers(several_hosts.load(draft=draft)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "draft", "mode"),
    [
        ("tp", None, "lead"),
        ("tp", "nano", "spmd"),
        ("ep", "nano", "lead"),
        ("dcp", "nano", "lead"),
        ("dp-attention", None, "spmd"),
        ("dp-attention", "nano", "lead"),
    ],
)
def test_presets_over_two_processes_answer_as_one_device(
    preset: str, draft: str | None, mode: str, right: Callable[[str | None], list[list[int]]]
) -> None:
    script = Path(several_hosts.__file__)
    args = ["--devices", "8", "--preset", preset, "--mode", mode, *([] if draft is None else ["--draft", draft])]
    done = run_processes(script, 2, 4, args, timeout=600)
    assert [p.returncode for p in done] == [0, 0], [p.stderr for p in done]
    for process in done if mode == "spmd" else done[:1]:
        line = next(line for line in process.stdout.splitlines() if line.startswith("[["))
        assert json.loads(line) == right(draft)
