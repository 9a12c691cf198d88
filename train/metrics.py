"""Metrics of a run: JSON lines, TensorBoard events and a line on stderr."""

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import jax

from .config import PretrainConfig

METRICS = "metrics.jsonl"


class MetricsLog:
    """One line a report to stderr, to `metrics.jsonl` and to TensorBoard."""

    def __init__(self, out: Path, step: int, tokens: int) -> None:
        """Opens the files to append to.

        Args:
          out: folder of `metrics.jsonl` and `tensorboard`.
          step: after which the run goes on; later events, of a session that was killed, are struck out.
          tokens: trained on until then.
        """
        from tensorboardX import SummaryWriter  # imported here: it takes a second that no other stage needs

        # Of processes that train together, one writes.
        self._file = self._board = None
        if jax.process_index() == 0:
            out.mkdir(parents=True, exist_ok=True)
            _drop_torn_line(out / METRICS)
            self._file = (out / METRICS).open("a", encoding="utf-8")
            self._board = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)
        self._last = (time.monotonic(), step, tokens)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None and self._board is not None:
            self._file.close()
            self._board.close()

    def step(self, step: int, steps: int, tokens: int, values: Mapping[str, float]) -> None:
        """Report a training step; refuses to go on from a loss that is not finite.

        Args:
          step: steps done.
          steps: of the whole run.
          tokens: trained on so far, by the run.
          values: by name, `loss` among them.
        """
        if not math.isfinite(values["loss"]):
            raise FloatingPointError(f"step {step}: loss {values['loss']}; lower the learning rate and resume")
        now, (then, last_step, last_tokens) = time.monotonic(), self._last
        elapsed = now - then
        left = (steps - step) * elapsed / max(1, step - last_step)
        self._last = (now, step, tokens)
        rate = (tokens - last_tokens) / elapsed
        self.write(step, {**values, "tokens_per_second": rate, "minutes_left": left / 60})

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Report values of a step."""
        if self._file is None or self._board is None:
            return
        self._file.write(json.dumps({"step": step, "time": time.time(), **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        print(f"step {step}  " + "  ".join(f"{k} {v:.4g}" for k, v in values.items()), file=sys.stderr, flush=True)


def _drop_torn_line(path: Path) -> None:
    """Remove a last line that has no end: a disk was full when it was written."""
    if path.is_file():
        whole = path.read_bytes()
        if not whole.endswith(b"\n"):
            os.truncate(path, whole.rfind(b"\n") + 1)


def series(folder: Path, name: str) -> list[tuple[int, float]]:
    """What was reported under a name, by step; of a step that was done twice, after a kill, the later report.

    Args:
      folder: of `metrics.jsonl`.
      name: of the value.
    """
    rows = map(json.loads, (folder / METRICS).read_text(encoding="utf-8").splitlines())
    return sorted({row["step"]: float(row[name]) for row in rows if name in row}.items())


def training_seconds(out: Path, config: PretrainConfig) -> float:
    """Time that the run's steps took, over all sessions, from its metrics; evaluations between them are included."""
    seconds, previous = 0.0, 0
    for line in (out / METRICS).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "tokens_per_second" not in row:
            continue
        steps = row["step"] - previous
        if not 0 < steps <= config.log_every:  # the first report after steps that were lost with a killed session
            steps = config.log_every
        seconds += steps * config.rows * config.row_tokens / row["tokens_per_second"]
        previous = row["step"]
    return seconds
