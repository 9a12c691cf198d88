"""A decoding step between its start and the reading of its results."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..logprobs import Logprobs
from ..rounds import Record
from .adaptive import Adaptive
from .request import Phase, Request, TokenLogprobs

Bucket = tuple[int, int]  # batch size, window


class StepPlan(NamedTuple):
    """Of a decoding step."""

    k: int
    n_rounds: int
    prepare: bool  # the next step may have drafts


@dataclass(frozen=True)
class Flight:
    """A decoding step under way."""

    requests: tuple[Request, ...]
    rows: np.ndarray  # int [n], of each of them
    record: Record
    logprobs: Logprobs | None
    k: int
    most: int  # tokens that it may add to a request
    least: int  # tokens that it adds to a request that it does not end
    fresh: frozenset[str]  # requests whose first round has no guesses
    bucket: Bucket
    begun: float
    alone: bool  # nothing else ran between the step before and this one

    @property
    def is_alive(self) -> bool:
        """Whether anything of it is wanted."""
        return any(r.phase is not Phase.FINISHED for r in self.requests)

    def teach(self, adaptive: Adaptive[Bucket, str], accepted: np.ndarray, seconds: float) -> None:
        """Say what the step cost and what became of its drafts.

        Args:
          adaptive: who listens.
          accepted: int [rounds, n] of the requests, -1 where there were none.
          seconds: that it took, with whatever ran before it.
        """
        k = self.k
        if not self.alone:  # the time is not this step's alone
            seconds = adaptive.costs.seconds(self.bucket, k) * len(accepted)
        greedy = np.asarray([r.is_greedy for r in self.requests], np.bool_)
        by_group: dict[str, list[int]] = {}
        for group, own in zip(_GROUPS, (greedy, ~greedy), strict=True):
            of_group = accepted[:, own]
            numbers = [0] * of_group.size if k == 0 else of_group[of_group >= 0].tolist()
            if numbers:
                by_group[group] = numbers
        if by_group:
            n_rounds = len(accepted)
            adaptive.observe(self.bucket, k, max(seconds / n_rounds, 1e-9), by_group, n_rounds)


_GROUPS = ("greedy", "sampled")  # kinds of requests whose drafts fare differently


def groups_of(requests: Sequence[Request]) -> dict[str, int]:
    """How many requests there are of each kind."""
    n = sum(r.is_greedy for r in requests)
    counts = zip(_GROUPS, (n, len(requests) - n), strict=True)
    return {group: count for group, count in counts if count}


def token_logprobs(found: Sequence[np.ndarray], i: int, tokens: Sequence[int], request: Request) -> list[TokenLogprobs]:
    """Of one row's tokens; none where they were not asked for."""
    n = request.sampling.logprobs
    if n is None:
        return []
    chosen, ids, top = (x[i] for x in found)
    out: list[TokenLogprobs] = []
    for at, token in enumerate(tokens):
        best = zip(ids[at, :n].tolist(), top[at, :n].tolist(), strict=True)
        out.append(TokenLogprobs(token, float(chosen[at]), tuple(best)))
    return out
