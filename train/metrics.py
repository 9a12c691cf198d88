"""Metrics of a run: JSON lines, TensorBoard events and a line on stderr."""

import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from .config import PretrainConfig

METRICS = "metrics.jsonl"


class MetricsLog:
    """One line a report to stderr, to `metrics.jsonl` and to TensorBoard."""

    def __init__(self, out: Path, step: int) -> None:
        """`step`: where the run goes on; events after it, of a session that was killed, are struck out."""
        from tensorboardX import SummaryWriter  # imported here: it takes a second that no other stage needs

        out.mkdir(parents=True, exist_ok=True)
        self._file = (out / METRICS).open("a", encoding="utf-8")
        self._board = SummaryWriter(str(out / "tensorboard"), purge_step=step)
        self._last = (time.monotonic(), step)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        self._board.close()

    def step(self, step: int, config: PretrainConfig, values: Mapping[str, float]) -> None:
        """Report a training step; refuses to go on from a loss that is not finite."""
        if not math.isfinite(values["loss"]):
            raise FloatingPointError(f"step {step}: loss {values['loss']}; lower the learning rate and resume")
        now, last_step = time.monotonic(), self._last[1]
        elapsed = now - self._last[0]
        tokens = (step - last_step) * config.rows * config.row_tokens
        left = (config.steps - step) * elapsed / max(1, step - last_step)
        self._last = (now, step)
        self.write(step, {**values, "tokens_per_second": tokens / elapsed, "minutes_left": left / 60})

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Report values of a step."""
        self._file.write(json.dumps({"step": step, "time": time.time(), **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        print(f"step {step}  " + "  ".join(f"{k} {v:.4g}" for k, v in values.items()), file=sys.stderr, flush=True)


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
