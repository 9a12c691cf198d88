"""What a round costs, by batch and number of drafts: measured at warm-up, followed while serving. No clock in here."""

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low

_RECENT = 7  # times whose median counts: a pause of the machine is nobody's cost
_STEADY = 10  # rounds of one k after which a change of its time is the machine's, and all k of the bucket have it


@dataclass
class _Run:
    """Rounds of one k on end."""

    k: int
    recent: deque[float]  # the estimate before them, and then their times
    n: int = 0


class StepCosts[Bucket: Hashable]:
    """Seconds of a round for each bucket (a batch size, or that and a window length) and k.

    The entry of the k in use follows the median of its latest times in a running mean. One that was away moves faster
    at first, and alone; once it is steady, a change is taken for the machine's (longer contexts, other load, clock
    rate) and moves the whole bucket.
    """

    def __init__(self, measured: Mapping[tuple[Bucket, int], Sequence[float]], weight: float = 0.1) -> None:
        """Args:
          measured: seconds of each (bucket, k) at warm-up, repeated; the median counts.
          weight: of the latest times in the running mean.

        Raises:
          ValueError: no measurement, a time that is not positive, a bucket without k = 0 or with other k than the rest.
        """
        self._seconds: dict[Bucket, dict[int, float]] = {}
        for (bucket, k), times in sorted(measured.items(), key=lambda item: item[0][1]):
            if not times or not all(0 < t < float("inf") for t in times):
                raise ValueError(f"costs of bucket {bucket}, k = {k}: found {list(times)}, expected positive seconds")
            self._seconds.setdefault(bucket, {})[k] = median(times)
        found = {tuple(of_k) for of_k in self._seconds.values()}
        if len(found) != 1 or min(self.ks, default=-1) != 0:
            raise ValueError(f"costs: found k {sorted(found)}, expected the same for every bucket, 0 among them")
        self._weight = weight
        self._runs: dict[Bucket, _Run] = {}

    @property
    def ks(self) -> tuple[int, ...]:
        """Measured k, ascending, from 0."""
        return tuple(next(iter(self._seconds.values()), ()))

    def seconds(self, bucket: Bucket, k: int) -> float:
        return self._seconds[bucket][k]

    def relative(self, bucket: Bucket) -> dict[int, float]:
        """Costs in plain steps."""
        of_k = self._seconds[bucket]
        return {k: seconds / of_k[0] for k, seconds in of_k.items()}

    def observe(self, bucket: Bucket, k: int, seconds: float) -> None:
        """Take in a round's time. ValueError: one that is not positive."""
        if not 0 < seconds < float("inf"):
            raise ValueError(f"found a round of {seconds} seconds, expected a positive time")
        of_k = self._seconds[bucket]
        old = of_k[k]
        run = self._runs.get(bucket)
        if run is None or run.k != k:
            run = self._runs[bucket] = _Run(k, deque([old], maxlen=_RECENT))
        run.n += 1
        run.recent.append(seconds)
        of_k[k] += max(self._weight, 1 / (run.n + 3)) * (median_low(run.recent) - old)
        if run.n > _STEADY:
            for other in of_k:
                if other != k:
                    of_k[other] *= of_k[k] / old
