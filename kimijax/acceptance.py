"""What speculation gained, counted exactly: the numbers that the trainer, `evaluate` and the server report.

A round verifies up to k drafts and always yields one token more: the target's own. The token that prefill draws belongs
to no round. A round counts as it was verified: where an end token or `max_tokens` cuts the block afterwards, that is
the request's end and not the drafter's fault. Rounds after a request's end are none. Three numbers are easily mixed up:

    acceptance length   tokens a round, the target's own included: 1 + accepted / rounds
    acceptance rate     accepted / drafted
    accuracy            of a drafter in training, fed the true tokens; `simulated_length` makes a length of it
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Acceptance:
    """Counters; they add up over rows, requests and runs, also where k was not the same."""

    rounds: int = 0
    drafted: tuple[int, ...] = ()  # rounds that proposed a token at position i
    accepted: tuple[int, ...] = ()  # rounds that accepted the tokens at positions 0 ... i

    def __post_init__(self) -> None:
        bounds = (self.rounds, *self.drafted)
        if len(self.drafted) != len(self.accepted) or any(a > b for a, b in zip(self.drafted, bounds, strict=False)):
            raise ValueError(f"drafted {self.drafted}: expected one falling count a position, at most {self.rounds}")
        if any(a > d for a, d in zip(self.accepted, self.drafted, strict=True)):
            raise ValueError(f"accepted {self.accepted}: expected at most what was drafted, {self.drafted}")

    @classmethod
    def of(cls, accepted: Iterable[int], k: int) -> "Acceptance":
        """From the number of accepted drafts in each round, all of k drafts."""
        return cls.of_counts(np.bincount(np.fromiter(accepted, np.int64), minlength=k + 1))

    @classmethod
    def of_counts(cls, counts: Sequence[int] | np.ndarray) -> "Acceptance":
        """From the number of rounds that accepted 0, 1, ... k drafts: [k + 1]."""
        at_least = np.cumsum(np.asarray(counts, np.int64)[::-1])[::-1].tolist()
        rounds, accepted = at_least[0], tuple(at_least[1:])
        return cls(rounds, (rounds,) * len(accepted), accepted)

    def __add__(self, other: "Acceptance") -> "Acceptance":
        return Acceptance(
            self.rounds + other.rounds, _sums(self.drafted, other.drafted), _sums(self.accepted, other.accepted)
        )

    def __sub__(self, before: "Acceptance") -> "Acceptance":
        """What was counted since these counters stood at `before`."""
        padded = [(*x, *(0,) * (len(self.drafted) - len(x))) for x in (before.drafted, before.accepted)]
        drafted, accepted = (
            tuple(a - b for a, b in zip(now, then, strict=True))
            for now, then in zip((self.drafted, self.accepted), padded, strict=True)
        )
        return Acceptance(self.rounds - before.rounds, drafted, accepted)

    @property
    def length(self) -> float:
        """Mean tokens a round, the target's own included; not a number without rounds."""
        return 1 + sum(self.accepted) / self.rounds if self.rounds else float("nan")

    @property
    def rate(self) -> float:
        """Share of the drafts that were accepted; not a number without drafts."""
        return _ratio(sum(self.accepted), sum(self.drafted))

    @property
    def by_position(self) -> tuple[float, ...]:
        """For each position the share of the rounds drafting there in which it and all before it were accepted."""
        return tuple(_ratio(a, d) for a, d in zip(self.accepted, self.drafted, strict=True))

    @property
    def conditional(self) -> tuple[float, ...]:
        """For each position the chance that it is accepted if those before it were.

        Not a number if they never were, and where some of the rounds ended before it by a smaller k: how many of those
        accepted all that they had is not counted.
        """
        chances = list(self.by_position[:1])
        for i in range(1, len(self.drafted)):
            same = self.drafted[i] == self.drafted[i - 1]
            chances.append(_ratio(self.accepted[i], self.accepted[i - 1]) if same else float("nan"))
        return tuple(chances)

    def to_json(self) -> dict[str, Any]:
        """Counters and the numbers made of them; what is not a number is null."""
        return {
            "rounds": self.rounds,
            "drafted": list(self.drafted),
            "accepted": list(self.accepted),
            "length": _number(self.length),
            "rate": _number(self.rate),
            "by_position": [_number(x) for x in self.by_position],
            "conditional": [_number(x) for x in self.conditional],
        }


def simulated_length(per_step: Sequence[float], *, bonus: bool) -> float:
    """Acceptance length that independent steps would give: the sum of the cumulative products of their shares.

    Args:
      per_step: chance that step j is accepted if those before it were, such as accuracy or 1 - total variation.
      bonus: count the target's own token too. Published numbers differ in this.
    """
    return float(np.cumprod(np.asarray(per_step, np.float64)).sum()) + (1.0 if bonus else 0.0)


def _sums(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    n = max(len(a), len(b))
    return tuple(x + y for x, y in zip((*a, *(0,) * (n - len(a))), (*b, *(0,) * (n - len(b))), strict=True))


def _ratio(a: float, b: float) -> float:
    return a / b if b else float("nan")


def _number(x: float) -> float | None:
    return None if x != x else x
