"""The speculation settings: every contradiction is an error that names the fix, and nothing is changed silently."""

import logging
from typing import Any

import pytest

from kimijax.errors import ConfigError
from kimijax.speculative_options import SpeculativeOptions
from kimijax.wiring import Wiring

KIMI = Wiring.default(61, 7168)


def chain(k: int) -> SpeculativeOptions:
    return SpeculativeOptions("EAGLE3", k, 1, k + 1)


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ({}, chain(3)),
        ({"algorithm": "eagle3"}, chain(3)),
        ({"recorded_steps": 5}, chain(5)),
        ({"num_steps": 2, "recorded_steps": 5}, chain(2)),
        ({"num_draft_tokens": 7}, chain(6)),
        ({"num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4}, chain(3)),
    ],
)
def test_what_is_missing_is_filled(given: dict[str, Any], right: SpeculativeOptions) -> None:
    assert SpeculativeOptions.resolve(draft="D", **given) == right
    assert right.draft_tokens == right.num_steps


def test_what_is_filled_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kimijax.speculative_options"):
        SpeculativeOptions.resolve(draft="D", num_steps=2)
    assert caplog.messages == ["speculation: not set, and so taken as eagle_topk 1, num_draft_tokens 3"]


def test_nothing_asks_for_speculation() -> None:
    assert SpeculativeOptions.resolve(draft=None, recorded_steps=3) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"num_steps": 1, "num_draft_tokens": 16},
            r"speculative_num_draft_tokens: found 16, expected num_steps \+ 1 = 2 for a chain .*"
            "set --speculative-num-draft-tokens 2, or --speculative-num-steps 15",
        ),
        ({"num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 8}, "found 8, expected num_steps . 1 = 4"),
        ({"num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 64}, "a tree of 3 steps with 4 branches has 36 drafts"),
        ({"num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 37}, "speculative_eagle_topk: found 4, expected 1"),
        ({"eagle_topk": 2}, "only chains are implemented"),
        ({"num_steps": 0}, "speculative_num_steps: found 0, expected 1 or more"),
        ({"num_draft_tokens": 1}, "speculative_num_draft_tokens: found 1, expected 2 or more"),
        ({"algorithm": "NEXTN"}, "speculative_algorithm: found 'NEXTN', expected EAGLE3"),
        ({"draft": None, "num_steps": 3}, "speculative_num_steps: found 3, expected no such setting without a draft"),
        ({"draft": None, "algorithm": "EAGLE3"}, "speculative_algorithm: found 'EAGLE3', expected no such setting"),
    ],
)
def test_contradictions_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeOptions.resolve(**{"draft": "D", **given})
