"""The line that the server logs every so many steps: load, speed, acceptance, and what speculation gains now."""

import logging
import time
from collections.abc import Callable

from kimijax.acceptance import Acceptance
from kimijax.draft_loading import AcceptanceWatch, LoadedDraft
from kimijax.engine.stats import EngineStats

LOOK_INTERVAL = 64  # steps between two looks at the acceptance, logged or not

log = logging.getLogger(__name__)


class StatusLog:
    """A `runner.Watch`: counts steps, and logs."""

    def __init__(
        self, interval: int, draft: LoadedDraft | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Args:
        interval: steps between two lines; 0: none, but what is wrong is logged all the same.
        draft: whose recorded acceptance the served one is compared with.
        clock: seconds.
        """
        self._interval, self._clock = interval, clock
        self._watch = None if draft is None else AcceptanceWatch(draft)
        self._steps = 0
        self._since = clock()
        self._before: EngineStats | None = None

    def __call__(self, stats: EngineStats) -> None:
        self._steps += 1
        if self._watch is not None and self._steps % LOOK_INTERVAL == 0:
            warning = self._watch.look(stats.acceptance)
            if warning:
                log.warning(warning)
        if self._interval and self._steps % self._interval == 0:
            now = self._clock()
            log.info(line(self._before, stats, now - self._since))
            self._before, self._since = stats, now


def line(before: EngineStats | None, now: EngineStats, seconds: float) -> str:
    """What happened since `before` (None: the start), `seconds` ago."""
    tokens = now.n_output_tokens - (0 if before is None else before.n_output_tokens)
    parts = [
        f"{now.n_running} running, {now.n_waiting} waiting",
        f"{now.total_pages - now.free_pages} of {now.total_pages} pages in use",
        f"{tokens / seconds:.1f} tokens/s" if seconds > 0 else f"{tokens} tokens",
    ]
    prompt = now.n_prompt_tokens - (0 if before is None else before.n_prompt_tokens)
    if prompt:
        cached = now.n_cached_tokens - (0 if before is None else before.n_cached_tokens)
        parts.append(f"{cached / prompt:.0%} of prompt tokens from the cache")
    preempted = now.n_preempted - (0 if before is None else before.n_preempted)
    if preempted:
        parts.append(f"{preempted} preempted")
    rounds = now.acceptance - (Acceptance() if before is None else before.acceptance)
    if rounds.rounds:
        shares = " ".join(f"{p:.2f}" for p in rounds.by_position)
        what = "SIMULATED acceptance length" if now.simulated else "acceptance length"
        parts.append(f"{what} {rounds.length:.2f} ({shares})")
    if now.speculation is not None:
        parts.append(str(now.speculation))
    return ", ".join(parts)
