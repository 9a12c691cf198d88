"""A server that starts again compiles nothing."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SMALL = ("--max-running-requests", "1", "--context-length", "256")


@dataclass(frozen=True)
class Start:
    seconds: float  # from the command to "Ready"
    log: str
    programs: frozenset[str]  # files in the cache folder


def start(folder: Path, log: Path, *flags: str) -> Start:
    """One start of the embedded model, up to the line that says so."""
    command = [sys.executable, "-m", "kimijax.serve", "--model-path", "nano", "--port", "0", *flags]
    began = time.monotonic()
    with (
        log.open("w") as err,
        subprocess.Popen(
            [*command, "--compilation-cache-dir", str(folder)],
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
        ) as server,
    ):
        assert server.stdout is not None
        ready = next((line for line in server.stdout if line.startswith("Ready")), None)
        seconds = time.monotonic() - began
        server.send_signal(signal.SIGTERM)
        server.stdout.read()
    assert ready is not None, log.read_text()
    assert server.returncode == 0
    # JAX keeps a file with the time of last use beside each program
    kept = frozenset(f.name for f in folder.iterdir() if not f.name.endswith("-atime"))
    return Start(seconds, log.read_text(), kept)


@pytest.mark.slow
def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    """Also none of the many small programs outside the engine; and the log tells the stages, two lines each."""
    first, second = (start(tmp_path / "cache", tmp_path / f"log{i}", *SMALL) for i in range(2))
    assert first.programs
    assert second.programs == first.programs
    print(f"first start {first.seconds:.1f} s, second {second.seconds:.1f} s")
    for run in (first, second):
        stages = re.findall(r"startup: (loading weights|compiling|warming up|ready)[: ]", run.log)
        assert stages == ["loading weights"] * 2 + ["compiling"] * 2 + ["warming up"] * 2 + ["ready"]
        assert re.search(r"compiling: [\d.]+ s, \d+ programs", run.log)
