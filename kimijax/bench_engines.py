"""The engines that one benchmark compares: without a drafter, with a fixed number of drafts, with the adaptive one."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from .draft_loading import DraftFiles, LoadedDraft
from .draft_tree import TreeShape
from .engine.config import EngineConfig
from .engine.engine import Engine
from .engine.flight import StepPlan
from .engine.request import Request
from .errors import ConfigError
from .model import Target
from .speculative_options import ALGORITHM, DEFAULT_STEPS, SpeculativeOptions

PLAIN, PLAIN_WITH_DRAFTER, ADAPTIVE = "0", "0 + drafter", "adaptive"


@dataclass(frozen=True)
class Variant:
    """One engine of a comparison.

    Attributes:
      name: "0" (an engine without a drafter), a number of drafts, "adaptive", "tree DEPTH,TOPK,TOKENS", or
        "0 + drafter": plain decoding that keeps the drafter's state up, which is what "adaptive" does at its worst.
      options: None without a drafter.
    """

    name: str
    options: SpeculativeOptions | None = None

    @property
    def never_drafts(self) -> bool:
        return self.name == PLAIN_WITH_DRAFTER


@dataclass(frozen=True)
class Drafting:
    """What is compared, as the user set it.

    Attributes:
      counts: numbers of drafts, and "adaptive"; None: not set.
      trees: shapes.
      block_verification, simulate_acc_len: as in `SpeculativeOptions`, of all chains.
    """

    counts: tuple[str, ...] | None = None
    trees: tuple[TreeShape, ...] = ()
    block_verification: bool = False
    simulate_acc_len: float | None = None

    def variants(self, files: DraftFiles | None) -> list[Variant]:
        """The engines to compare, the plain one first.

        Args:
          files: the draft; None: there is none.
        Raises:
          ConfigError: drafts without a draft, or numbers that contradict each other.
        """
        if files is None and self.simulate_acc_len is None:
            for name, value in (
                ("k", self.counts),
                ("tree", self.trees),
                ("block_verification", self.block_verification),
            ):
                if value not in (None, (), False) and value != (PLAIN,):
                    raise ConfigError(name, value, "no such setting without a draft", "name one: --draft DIR or nano")
            return [Variant(PLAIN)]
        recommended = (files.recommended_steps if files is not None else None) or DEFAULT_STEPS
        counts = (str(recommended), ADAPTIVE) if self.counts is None else self.counts
        fixed = [int(k) for k in counts if k not in (PLAIN, ADAPTIVE)]
        out = [Variant(PLAIN), *(Variant(str(k), self._chain(k)) for k in fixed)]
        out += [Variant(f"tree {t.depth},{t.top_k},{t.budget + 1}", self._tree(t)) for t in self.trees]
        if ADAPTIVE in counts:
            most = max(fixed, default=recommended)
            out += [Variant(PLAIN_WITH_DRAFTER, self._chain(most)), Variant(ADAPTIVE, self._chain(most, adaptive=True))]
        return out

    def _chain(self, k: int, *, adaptive: bool = False) -> SpeculativeOptions:
        return SpeculativeOptions(ALGORITHM, k, 1, k + 1, adaptive, self.block_verification, self.simulate_acc_len)

    def _tree(self, shape: TreeShape) -> SpeculativeOptions:
        return SpeculativeOptions(ALGORITHM, shape.depth, shape.top_k, shape.budget + 1, adaptive=False)


class MeasuredEngine(Engine):
    """An engine whose prompts can be computed apart from decoding, so that each is timed alone."""

    def compute_prompts(self) -> None:
        """Compute all prompts that wait and find a place."""
        while self._prefill():
            pass
        jax.block_until_ready(self._state)


class _UndraftedEngine(MeasuredEngine):
    """Its drafter sees all tokens and is never asked for one."""

    def _choose(self, requests: Sequence[Request], rules: bool, longest: int) -> StepPlan:
        n_rounds = 1 if rules or self._scheduler.wants_prefill else self._programs.most_rounds(0)
        return StepPlan(0, n_rounds, prepare=False)


@dataclass(frozen=True)
class Models:
    """What all engines of a comparison share."""

    target: Target
    draft: LoadedDraft | None
    n_tokens: int | None
    stop_ids: tuple[int, ...]


def make_engine(models: Models, sizes: EngineConfig, variant: Variant) -> MeasuredEngine:
    """An engine, ready to be measured; one that chooses has compiled and timed its programs, as a server's has."""
    if variant.options is None:
        return MeasuredEngine(models.target, sizes, n_tokens=models.n_tokens, stop_ids=models.stop_ids)
    assert models.draft is not None
    make = functools.partial(
        _UndraftedEngine if variant.never_drafts else MeasuredEngine,
        models.target,
        sizes,
        drafter=models.draft.drafter,
        recorded=models.draft.recorded,
        n_tokens=models.n_tokens,
        stop_ids=models.stop_ids,
    )
    engine = make(speculation=variant.options)
    if variant.options.adaptive:
        engine.warm_up()
    return engine
