"""What is reported of a drafter's training: sums since the last report, and what they mean."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from kimijax.acceptance import simulated_length

from .ttt import StepSums

PLAIN_CHAIN = 3  # draft tokens of the chain that published acceptance lengths are of


class StepMetrics(NamedTuple):
    """What an update returns, on the device."""

    loss: jax.Array  # float32, mean over the micro-batches
    gradient_norm: jax.Array  # float32, before clipping
    update_norm: jax.Array  # float32, of the change of the parameters
    sums: StepSums  # over all rows
    masked_rows: jax.Array  # int32, rows that hold documents but no position that counts


class Progress:
    """Sums over the updates since the last report; saved with a checkpoint, so that a resumed run reports the same."""

    def __init__(self, n_steps: int) -> None:
        self.updates, self.loss, self.masked_rows = 0, 0.0, 0
        self.tokens = 0  # of the whole run, padding not counted
        self.sums = {name: np.zeros(n_steps, np.float64) for name in StepSums._fields}

    def add(self, step: int, metrics: StepMetrics, tokens: int, rows: Sequence[int]) -> None:
        """Count an update.

        Args:
          step: its number, from 1.
          metrics: what it returned.
          tokens: of its rows, padding not counted.
          rows: of the plan, for the message.
        Raises:
          FloatingPointError: something is not finite: the state after this update must not be saved.
        """
        host: StepMetrics = jax.device_get(metrics)
        found = {name: float(value) for name, value in host._asdict().items() if name in _FINITE}
        if not all(math.isfinite(value) for value in found.values()):
            values = ", ".join(f"{name} {value}" for name, value in found.items())
            raise FloatingPointError(
                f"step {step}: {values}, on rows {list(rows)} of the plan; the last checkpoint is kept: resume with a "
                "lower fit.learning_rate or fit.clip_norm, and check the features of these rows if it comes again"
            )
        self.updates, self.tokens = self.updates + 1, self.tokens + tokens
        self.loss, self.masked_rows = self.loss + found["loss"], self.masked_rows + int(host.masked_rows)
        for name, values in host.sums._asdict().items():
            self.sums[name] += np.asarray(values, np.float64)

    def take(self) -> dict[str, float]:
        """The report of the updates so far, which begins the next one."""
        report = {
            "loss": self.loss / self.updates,
            **summary(self.sums),
            "rows_without_loss": float(self.masked_rows),
        }
        self.updates, self.loss, self.masked_rows = 0, 0.0, 0
        for values in self.sums.values():
            values[:] = 0.0
        return report

    def to_json(self) -> dict[str, Any]:
        sums = {name: values.tolist() for name, values in self.sums.items()}
        return {**{name: self.__dict__[name] for name in _COUNTS}, "sums": sums}

    @classmethod
    def from_json(cls, record: Mapping[str, Any], n_steps: int) -> "Progress":
        """Reads `to_json`'s record."""
        progress = cls(n_steps)
        progress.updates, progress.loss, progress.masked_rows, progress.tokens = (record[name] for name in _COUNTS)
        progress.sums = {name: np.asarray(record["sums"][name], np.float64) for name in StepSums._fields}
        return progress


_FINITE = ("loss", "gradient_norm", "update_norm")
_COUNTS = ("updates", "loss", "masked_rows", "tokens")


def summary(sums: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Rates of each unrolled step and the acceptance lengths that they promise, by name.

    `loss/j`, `acc/j` (the draft's first choice is the target's: what a greedy request accepts) and `accept/j`
    (1 - total variation: what one at temperature 1 accepts) are means over the positions that count, 0 where there are
    none. Lengths are of a chain of k tokens, tokens a round: `with_bonus` counts the target's own token.

    Args:
      sums: of each field of `StepSums`, [steps].
    """
    n = len(sums["valid"])
    counted = np.maximum(sums["valid"], 1.0)
    rates = {name: (sums[of] / counted).tolist() for name, of in _RATES.items()}
    out = {f"{name}/{j}": rates[name][j] for name in rates for j in range(n)}
    for kind, name in (("greedy", "acc"), ("sampled", "accept")):
        for k in sorted({min(PLAIN_CHAIN, n), n}):
            out[f"length/{kind}_k{k}"] = simulated_length(rates[name][:k], bonus=False)
            out[f"length/{kind}_k{k}_with_bonus"] = simulated_length(rates[name][:k], bonus=True)
    return out | {"valid_rows": float(sums["valid"][0])}


_RATES = {"loss": "loss", "acc": "correct", "accept": "accepted"}
