"""Several processes of one program, with virtual CPU devices each, joined by `jax.distributed` on this machine."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Group:
    """Processes 0 ... n - 1 and what they have written so far."""

    def __init__(self, processes: Sequence["subprocess.Popen[bytes]"], folder: Path) -> None:
        self.processes, self._folder = list(processes), folder

    def stdout(self, i: int) -> str:
        return (self._folder / f"{i}.out").read_text(errors="replace")

    def stderr(self, i: int) -> str:
        return (self._folder / f"{i}.err").read_text(errors="replace")

    def told(self) -> str:
        """Everything, for messages."""
        n = len(self.processes)
        return "\n".join(f"--- process {i}\n{self.stdout(i)}{self.stderr(i)}" for i in range(n))

    def wait(self, timeout: float) -> list[int]:
        """Exit codes. TimeoutError, with all that was written, if one runs for longer than `timeout` seconds."""
        deadline = time.monotonic() + timeout
        try:
            return [p.wait(max(deadline - time.monotonic(), 0.001)) for p in self.processes]
        except subprocess.TimeoutExpired as e:
            codes = [p.poll() for p in self.processes]
            raise TimeoutError(f"exit codes {codes} after {timeout} s\n{self.told()}") from e


@contextmanager
def processes(
    script: str | Path, n: int, devices: int, args: Sequence[str] = (), *, own: Sequence[Sequence[str]] = ()
) -> Iterator[Group]:
    """Start n processes of `script` (a file, or source text) and end those that are left.

    Args:
      script: gets `args`, its own of `own`, and --num-hosts, --host-id and --coordinator.
      n: processes.
      devices: virtual CPU devices of each.
      args: for all.
      own: for each; empty: none.
    """
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f]
    flags.append(f"--xla_force_host_platform_device_count={devices}")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags), "PYTHONPATH": path}
    program = [str(script)] if isinstance(script, Path) else ["-c", script]
    coordinator = f"localhost:{free_port()}"
    started: list[subprocess.Popen[bytes]] = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        try:
            for i in range(n):
                mine = own[i] if own else ()
                hosts = ["--num-hosts", str(n), "--host-id", str(i), "--coordinator", coordinator]
                command = [sys.executable, *program, *args, *mine, *hosts]
                with (folder / f"{i}.out").open("wb") as out, (folder / f"{i}.err").open("wb") as err:
                    started.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=err))
            yield Group(started, folder)
        finally:
            for p in started:
                if p.poll() is None:
                    p.kill()
                p.wait()


def run_processes(
    script: str | Path, n: int, devices: int, args: Sequence[str] = (), timeout: float = 60
) -> list["subprocess.CompletedProcess[str]"]:
    """Run n processes of `script` to their end; see `processes`.

    Raises:
      TimeoutError: one is not over after `timeout` seconds; what all have written is in the message.
    """
    with processes(script, n, devices, args) as group:
        codes = group.wait(timeout)
        return [
            subprocess.CompletedProcess(p.args, code, group.stdout(i), group.stderr(i))
            for i, (p, code) in enumerate(zip(group.processes, codes, strict=True))
        ]
