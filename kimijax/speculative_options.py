"""The speculation settings of a server, resolved once: what is missing is filled and said, what contradicts is refused.

The three numbers have the names under which other servers know them: `num_steps` drafts one after the other,
`eagle_topk` branches at each, `num_draft_tokens` tokens verified together, the last accepted one included. A chain
(`eagle_topk` 1) of k drafts is therefore k, 1, k + 1. Other servers change one of them without an error: 1 step with 16
draft tokens becomes 2 tokens verified.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .draft_tree import TreeShape
from .errors import ConfigError
from .wiring import Wiring, check_algorithm

ALGORITHM, OFF = "EAGLE3", "NONE"
DEFAULT_STEPS = 3  # published Kimi drafters are served with chains of 3
DEFAULT_TREE_TOKENS = 8  # what SGLang verifies of a tree, the root included, where nothing is set

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SpeculativeOptions:
    """Settings that agree with each other and with the draft. `resolve` makes them.

    Attributes:
      algorithm: EAGLE3.
      num_steps: drafts one after the other.
      eagle_topk: branches at each; 1 is a chain.
      num_draft_tokens: tokens verified together, the last accepted one included.
      adaptive: each step takes as many drafts as pay, none where none do; false: always all of them.
      block_verification: accept drafts of a chain as a block (arXiv:2403.10444): at temperatures above 0 more pass.
      simulate_acc_len: accept at random so that rounds have this mean length, whatever the model says: a measurement
        of speed whose tokens are no output.
      sources: where each of the fields above has its value from.
    """

    algorithm: str
    num_steps: int
    eagle_topk: int
    num_draft_tokens: int
    adaptive: bool = True
    block_verification: bool = False
    simulate_acc_len: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict[str, str], compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.is_chain:
            _check_chain(self)
        else:
            _check_tree(self)
        length = self.simulate_acc_len
        if length is not None and not 1 <= length <= self.num_steps + 1:  # not so for nan
            expected = f"1 ... {self.num_steps + 1}: a round of {self.num_steps} drafts gives one token at least and "
            expected += f"{self.num_steps + 1} at most"
            raise ConfigError("speculative_simulate_acc_len", length, expected, "or raise --speculative-num-steps")

    @property
    def draft_tokens(self) -> int:
        """k: tokens that the drafter proposes in each round."""
        return self.num_draft_tokens - 1

    @property
    def is_chain(self) -> bool:
        return self.eagle_topk == 1

    @property
    def tree(self) -> TreeShape | None:
        """The tree's shape; None for a chain."""
        return None if self.is_chain else TreeShape(self.num_steps, self.eagle_topk, self.draft_tokens)

    @property
    def room(self) -> int:
        """Rows from a request's length on that a round may write in a cache."""
        tree = self.tree
        return self.draft_tokens + 1 if tree is None else tree.room

    @property
    def is_simulated(self) -> bool:
        return self.simulate_acc_len is not None

    def __str__(self) -> str:
        """One line for logs and banners."""
        k = self.draft_tokens
        what = f"chain of {k} drafts"
        if not self.is_chain:
            what = f"tree of {k} drafts ({self.num_steps} steps, {self.eagle_topk} branches)"
        how = ["as many as pay" if self.adaptive else "always all"]
        how += ["block verification"] if self.block_verification else []
        how += [f"SIMULATED acceptance length {self.simulate_acc_len:g}, no real output"] if self.is_simulated else []
        return f"{self.algorithm}, {what}, {', '.join(how)}"

    def to_json(self) -> dict[str, Any]:
        """The fields that decide what is run."""
        return {name: value for name, value in vars(self).items() if name != "sources"}

    @classmethod
    def resolve(
        cls,
        *,
        draft: str | Path | None,
        algorithm: str | None = None,
        num_steps: int | None = None,
        eagle_topk: int | None = None,
        num_draft_tokens: int | None = None,
        adaptive: bool | None = None,
        block_verification: bool | None = None,
        simulate_acc_len: float | None = None,
        recorded_steps: int | None = None,
        wiring: Wiring | None = None,
        fc_width: int | None = None,
    ) -> "SpeculativeOptions | None":
        """The settings to serve with; None where nothing asks for speculation, or the algorithm is NONE.

        Args:
          draft: the draft's directory; not needed to simulate.
          algorithm, num_steps, eagle_topk, num_draft_tokens, adaptive, block_verification, simulate_acc_len: as the
            user set them; None: not set.
          recorded_steps: the chain's length that the draft's files recommend or were measured with.
          wiring: of the draft, for errors that name its fusion layer.
          fc_width: inputs of its fusion layer.
        Raises:
          ConfigError: a setting without a draft, another algorithm, numbers out of range or that contradict each other.
        """
        set_by_user: dict[str, Any] = {
            "num_steps": num_steps,
            "eagle_topk": eagle_topk,
            "num_draft_tokens": num_draft_tokens,
            "adaptive": adaptive,
            "block_verification": block_verification,
            "simulate_acc_len": simulate_acc_len,
        }
        given = {name: value for name, value in set_by_user.items() if value is not None}
        if algorithm is not None and algorithm.upper() == OFF:
            _refuse_beside_off(draft, given)
            return None
        if draft is None and simulate_acc_len is None:
            if algorithm is None and not given:
                return None
            name, value = ("algorithm", algorithm) if algorithm is not None else next(iter(given.items()))
            fix = "name the draft (--speculative-draft-model-path), or leave the setting out"
            raise ConfigError(f"speculative_{name}", value, "no such setting without a draft", fix)
        if draft is None:
            check_algorithm(algorithm, "none needed to simulate")
        else:
            check_algorithm(algorithm, draft, wiring=wiring, fc_width=fc_width)
        for name in (n for n in _NUMBERS if n in given):
            _check_number(name, given[name])
        filled = _fill(given, recorded_steps)
        sources = {"algorithm": "the draft" if algorithm is None else "set"}
        sources |= dict.fromkeys(given, "set") | {name: why for name, (_, why) in filled.items()}
        values = {**given, **{name: value for name, (value, _) in filled.items()}}
        out = cls(ALGORITHM, **values, sources=sources)
        numbers = [f"{n} {value} ({why})" for n, (value, why) in filled.items() if n in _NUMBERS]
        if numbers:
            log.info("speculation: not set, and so taken as %s", ", ".join(numbers))
        return out


_NUMBERS = {"num_steps": 1, "eagle_topk": 1, "num_draft_tokens": 2}  # the least of each


def _refuse_beside_off(draft: str | Path | None, given: Mapping[str, Any]) -> None:
    """Nothing may be set for a speculation that is switched off."""
    beside = [("draft_model_path", draft)] if draft is not None else list(given.items())
    if beside:
        name, value = beside[0]
        fix = "leave it out, or set --speculative-algorithm EAGLE3"
        raise ConfigError(f"speculative_{name}", value, "no such setting beside --speculative-algorithm NONE", fix)


def _fill(given: Mapping[str, Any], recorded_steps: int | None) -> dict[str, tuple[Any, str]]:
    """Value and reason of what is not set; whether all agree is checked where they are put together."""
    out: dict[str, tuple[Any, str]] = {}
    topk, steps, tokens = (given.get(name) for name in ("eagle_topk", "num_steps", "num_draft_tokens"))
    if topk is None:
        topk = 1
        out["eagle_topk"] = topk, "a chain"
    if steps is None:
        own = (recorded_steps, "the draft's files") if recorded_steps else (DEFAULT_STEPS, "default")
        if tokens is None:
            steps, why = own
        elif topk == 1:
            steps, why = tokens - 1, "num_draft_tokens - 1"
        else:
            steps, why = min(own[0], tokens - 1), own[1]
        out["num_steps"] = steps, why
    if tokens is None:
        if topk == 1:
            out["num_draft_tokens"] = steps + 1, "num_steps + 1"
        else:
            most = _tree_size(steps, topk) + 1
            out["num_draft_tokens"] = max(steps + 1, min(most, DEFAULT_TREE_TOKENS)), "default of trees"
    for name, value in (("adaptive", True), ("block_verification", False), ("simulate_acc_len", None)):
        if name not in given:
            out[name] = value, "default"
    return out


def _check_numbers(o: SpeculativeOptions) -> None:
    if o.algorithm != ALGORITHM:
        raise ConfigError("speculative_algorithm", o.algorithm, ALGORITHM)
    for name in _NUMBERS:
        _check_number(name, vars(o)[name])
    length = o.simulate_acc_len
    if length is not None and not math.isfinite(length):
        raise ConfigError("speculative_simulate_acc_len", length, "a finite number")


def _check_number(name: str, value: object) -> None:
    least = _NUMBERS[name]
    if type(value) is not int or value < least:
        raise ConfigError(f"speculative_{name}", value, f"{least} or more")


def _check_chain(o: SpeculativeOptions) -> None:
    steps, tokens = o.num_steps, o.num_draft_tokens
    if tokens != steps + 1:
        raise ConfigError(
            "speculative_num_draft_tokens",
            tokens,
            f"num_steps + 1 = {steps + 1} for a chain (eagle_topk 1): {steps} drafts and the token before them",
            f"set --speculative-num-draft-tokens {steps + 1}, or --speculative-num-steps {tokens - 1}",
        )


def _tree_size(steps: int, topk: int) -> int:
    """Drafts of a whole tree: each of `topk` nodes of a level has `topk` children."""
    return topk + topk * topk * (steps - 1)


def _check_tree(o: SpeculativeOptions) -> None:
    steps, topk, tokens = o.num_steps, o.eagle_topk, o.num_draft_tokens
    size = _tree_size(steps, topk)
    if not steps <= tokens - 1 <= size:
        found, expected = f"{tokens}, {tokens - 1} of them drafts", f"{steps + 1} ... {size + 1}"
        fix = f"a tree of {steps} steps with {topk} branches has {size} drafts, and at least one a step is verified"
        raise ConfigError("speculative_num_draft_tokens", found, expected, fix)
    if o.block_verification:
        fix = "block verification is for chains: leave it out, or set --speculative-eagle-topk 1"
        raise ConfigError("speculative_use_block_verification", True, f"false with {topk} branches", fix)
    if o.is_simulated:
        fix = "simulation is for chains: leave it out, or set --speculative-eagle-topk 1"
        raise ConfigError("speculative_simulate_acc_len", o.simulate_acc_len, f"none with {topk} branches", fix)
