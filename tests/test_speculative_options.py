"""The speculation settings: every contradiction is an error that names the fix, and nothing is changed silently."""

import logging
from typing import Any

import pytest

from kimijax.draft_tree import TreeShape
from kimijax.errors import ConfigError
from kimijax.speculative_options import SpeculativeOptions
from kimijax.wiring import Wiring

KIMI = Wiring.default(61, 7168)


def chain(k: int) -> SpeculativeOptions:
    return SpeculativeOptions("EAGLE3", k, 1, k + 1)


def tree(steps: int, topk: int, tokens: int) -> SpeculativeOptions:
    return SpeculativeOptions("EAGLE3", steps, topk, tokens)


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ({}, chain(3)),
        ({"algorithm": "eagle3"}, chain(3)),
        ({"recorded_steps": 5}, chain(5)),
        ({"num_steps": 2, "recorded_steps": 5}, chain(2)),
        ({"num_draft_tokens": 7}, chain(6)),
        ({"num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4}, chain(3)),
        ({"eagle_topk": 4}, tree(3, 4, 8)),
        ({"eagle_topk": 2, "num_steps": 1}, tree(1, 2, 3)),  # such a tree has two drafts
        ({"eagle_topk": 2, "num_steps": 9}, tree(9, 2, 10)),  # one at least in each step
        ({"eagle_topk": 4, "num_draft_tokens": 3, "recorded_steps": 5}, tree(2, 4, 3)),
        ({"eagle_topk": 4, "num_steps": 3, "num_draft_tokens": 37}, tree(3, 4, 37)),
    ],
)
def test_what_is_missing_is_filled(given: dict[str, Any], right: SpeculativeOptions) -> None:
    found = SpeculativeOptions.resolve(draft="D", **given)
    assert found == right
    assert right.adaptive
    assert not right.block_verification
    assert (right.tree is None) == right.is_chain == (right.draft_tokens == right.num_steps and right.eagle_topk == 1)


def test_a_tree_has_a_shape() -> None:
    assert tree(3, 4, 37).tree == TreeShape(depth=3, top_k=4, budget=36)
    assert chain(3).tree is None


def test_what_is_filled_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kimijax.speculative_options"):
        SpeculativeOptions.resolve(draft="D", num_steps=2)
        SpeculativeOptions.resolve(draft="D", recorded_steps=5)
    assert caplog.messages == [
        "speculation: not set, and so taken as eagle_topk 1 (a chain), num_draft_tokens 3 (num_steps + 1)",
        "speculation: not set, and so taken as eagle_topk 1 (a chain), num_steps 5 (the draft's files), "
        "num_draft_tokens 6 (num_steps + 1)",
    ]


def test_each_setting_knows_where_it_came_from() -> None:
    found = SpeculativeOptions.resolve(draft="D", eagle_topk=2, adaptive=False, recorded_steps=2)
    assert found is not None
    assert found.sources == {
        "algorithm": "the draft",
        "num_steps": "the draft's files",
        "eagle_topk": "set",
        "num_draft_tokens": "default of trees",
        "adaptive": "set",
        "block_verification": "default",
        "simulate_acc_len": "default",
    }
    assert found.sources.keys() == found.to_json().keys()


@pytest.mark.parametrize("algorithm", [None, "NONE", "none"])
def test_nothing_asks_for_speculation(algorithm: str | None) -> None:
    assert SpeculativeOptions.resolve(draft=None, algorithm=algorithm, recorded_steps=3) is None


def test_simulation_needs_no_draft() -> None:
    found = SpeculativeOptions.resolve(draft=None, algorithm="EAGLE3", simulate_acc_len=3.5)
    assert found == SpeculativeOptions("EAGLE3", 3, 1, 4, simulate_acc_len=3.5)
    assert "SIMULATED acceptance length 3.5, no real output" in str(found)
    assert "SIMULATED" not in str(chain(3))
    for length in (1, 4):
        assert SpeculativeOptions.resolve(draft="D", simulate_acc_len=length) is not None


def test_the_line_for_logs() -> None:
    found = SpeculativeOptions.resolve(draft="D", num_steps=2, adaptive=False, block_verification=True)
    assert str(found) == "EAGLE3, chain of 2 drafts, always all, block verification"
    assert str(tree(3, 4, 9)) == "EAGLE3, tree of 8 drafts (3 steps, 4 branches), as many as pay"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"num_steps": 1, "num_draft_tokens": 16},
            r"speculative_num_draft_tokens: found 16, expected num_steps \+ 1 = 2 for a chain .*"
            "set --speculative-num-draft-tokens 2, or --speculative-num-steps 15",
        ),
        ({"num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 8}, "found 8, expected num_steps . 1 = 4"),
        (
            {"num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 64},
            "speculative_num_draft_tokens: found '64, 63 of them drafts', expected 4 ... 37; a tree of 3 steps with 4 "
            "branches has 36 drafts",
        ),
        ({"num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 3}, "found '3, 2 of them drafts', expected 4 ... 37"),
        (
            {"eagle_topk": 2, "block_verification": True},
            "speculative_use_block_verification: found True, expected false with 2 branches; .*eagle-topk 1",
        ),
        ({"eagle_topk": 2, "simulate_acc_len": 2.0}, "speculative_simulate_acc_len: found 2.0, expected none with 2"),
        ({"num_steps": 0}, "speculative_num_steps: found 0, expected 1 or more"),
        ({"eagle_topk": 0}, "speculative_eagle_topk: found 0, expected 1 or more"),
        ({"num_draft_tokens": 1}, "speculative_num_draft_tokens: found 1, expected 2 or more"),
        (
            {"num_steps": 3, "simulate_acc_len": 4.5},
            "speculative_simulate_acc_len: found 4.5, expected 1 ... 4: .*--speculative-num-steps",
        ),
        ({"simulate_acc_len": 0.5}, "speculative_simulate_acc_len: found 0.5"),
        ({"simulate_acc_len": float("nan")}, "speculative_simulate_acc_len: found nan, expected a finite number"),
        ({"algorithm": "NEXTN"}, "speculative_algorithm: found 'NEXTN', expected EAGLE3"),
        (
            {"algorithm": "EAGLE", "wiring": KIMI, "fc_width": KIMI.fused_width},
            "speculative_algorithm: found 'EAGLE', expected EAGLE3; D is an EAGLE-3 draft: its fc takes 21504",
        ),
        ({"draft": None, "algorithm": "EAGLE", "simulate_acc_len": 2.0}, "speculative_algorithm: found 'EAGLE'"),
        ({"draft": None, "num_steps": 3}, "speculative_num_steps: found 3, expected no such setting without a draft"),
        ({"draft": None, "adaptive": False}, "speculative_adaptive: found False, expected no such setting without"),
        ({"draft": None, "algorithm": "EAGLE3"}, "speculative_algorithm: found 'EAGLE3', expected no such setting"),
        ({"algorithm": "NONE"}, "speculative_draft_model_path: found 'D', expected no such setting beside .* NONE"),
        (
            {"draft": None, "algorithm": "NONE", "eagle_topk": 1},
            "speculative_eagle_topk: found 1, expected no such setting beside --speculative-algorithm NONE; leave it",
        ),
    ],
)
def test_contradictions_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeOptions.resolve(**{"draft": "D", **given})
