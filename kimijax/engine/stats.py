"""What the engine counts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..acceptance import Acceptance
from .adaptive import Status


@dataclass(frozen=True)
class EngineStats:
    """Counters. The moment's first, then those that only grow."""

    n_running: int
    n_waiting: int
    free_pages: int  # and those that hold prefixes which nobody uses
    total_pages: int
    n_prompt_tokens: int = 0  # of admitted requests
    n_cached_tokens: int = 0  # of these, found in the prefix cache
    n_output_tokens: int = 0
    n_preempted: int = 0
    accepted: Mapping[int, Sequence[int]] = field(default_factory=dict[int, Sequence[int]])  # k -> see `acceptance`
    n_without_guesses: int = 0  # rounds whose drafter's logits were not a number
    speculation: Status | None = None  # lately, where the number of drafts is chosen
    simulated: bool = False  # acceptance is pretended: the tokens are no output

    @property
    def acceptance(self) -> Acceptance:
        """Exact counts of all rounds with drafts, from how many of them accepted 0, 1, ... k."""
        return sum((Acceptance.of_counts(counts) for counts in self.accepted.values()), Acceptance())
