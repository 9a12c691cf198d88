"""The speculation settings of a server, resolved once: what is missing is filled and said, what contradicts is refused.

The three numbers have the names under which other servers know them: `num_steps` drafts one after the other,
`eagle_topk` branches at each, `num_draft_tokens` tokens verified together, the last accepted one included. A chain
(`eagle_topk` 1) of k drafts is therefore k, 1, k + 1. Other servers change one of them without an error: 1 step with 16
draft tokens becomes 2 tokens verified.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from .errors import ConfigError
from .wiring import Wiring, check_algorithm

DEFAULT_STEPS = 3  # published Kimi drafters are served with chains of 3

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SpeculativeOptions:
    """Settings that agree with each other and with the draft."""

    algorithm: str
    num_steps: int
    eagle_topk: int
    num_draft_tokens: int

    @property
    def draft_tokens(self) -> int:
        """k: tokens that the drafter proposes in each round."""
        return self.num_draft_tokens - 1

    @classmethod
    def resolve(
        cls,
        *,
        draft: str | Path | None,
        algorithm: str | None = None,
        num_steps: int | None = None,
        eagle_topk: int | None = None,
        num_draft_tokens: int | None = None,
        recorded_steps: int | None = None,
        wiring: Wiring | None = None,
        fc_width: int | None = None,
    ) -> "SpeculativeOptions | None":
        """The settings to serve with; None where nothing asks for speculation.

        Args:
          draft: the draft's directory.
          algorithm, num_steps, eagle_topk, num_draft_tokens: as the user set them; None: not set.
          recorded_steps: the chain's length that the draft's files recommend or were measured with.
          wiring: of the draft, for errors that name its fusion layer.
          fc_width: inputs of its fusion layer.
        Raises:
          ConfigError: a setting without a draft, another algorithm, numbers out of range or that contradict each other,
            or a tree.
        """
        given = {"num_steps": num_steps, "eagle_topk": eagle_topk, "num_draft_tokens": num_draft_tokens}
        given = {name: value for name, value in given.items() if value is not None}
        if draft is None:
            if algorithm is None and not given:
                return None
            name, value = ("algorithm", algorithm) if algorithm is not None else next(iter(given.items()))
            fix = "name the draft (--speculative-draft-model-path), or leave the setting out"
            raise ConfigError(f"speculative_{name}", value, "no such setting without a draft", fix)
        check_algorithm(algorithm, draft, wiring=wiring, fc_width=fc_width)
        for name, value in given.items():
            least = 2 if name == "num_draft_tokens" else 1
            if value < least:
                raise ConfigError(f"speculative_{name}", value, f"{least} or more")
        topk = given.get("eagle_topk", 1)
        if topk > 1:
            _refuse_tree(topk, num_steps, num_draft_tokens)
        if num_steps is not None:
            steps = num_steps
        elif num_draft_tokens is not None:
            steps = num_draft_tokens - 1
        else:
            steps = recorded_steps or DEFAULT_STEPS
        tokens = steps + 1 if num_draft_tokens is None else num_draft_tokens
        if tokens != steps + 1:
            raise ConfigError(
                "speculative_num_draft_tokens",
                tokens,
                f"num_steps + 1 = {steps + 1} for a chain (eagle_topk 1): {steps} drafts and the token before them",
                f"set --speculative-num-draft-tokens {steps + 1}, or --speculative-num-steps {tokens - 1}",
            )
        out = cls("EAGLE3", steps, topk, tokens)
        names = ("num_steps", "eagle_topk", "num_draft_tokens")
        filled = [f"{name} {vars(out)[name]}" for name in names if name not in given]
        if filled:
            log.info("speculation: not set, and so taken as %s", ", ".join(filled))
        return out


def _refuse_tree(topk: int, steps: int | None, tokens: int | None) -> None:
    """A tree is not implemented; one that cannot exist is refused for that first."""
    if steps is not None and tokens is not None:
        size = topk + topk * topk * (steps - 1)
        if tokens - 1 > size:
            found, expected = f"{tokens}, {tokens - 1} of them drafts", f"at most {size + 1}"
            fix = f"a tree of {steps} steps with {topk} branches has {size} drafts"
            raise ConfigError("speculative_num_draft_tokens", found, expected, fix)
    fix = "only chains are implemented: they are the fastest on this family of models"
    raise ConfigError("speculative_eagle_topk", topk, "1", fix)
