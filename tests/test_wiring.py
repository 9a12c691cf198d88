"""The wiring record: which taps are valid, strict reading, widths, and algorithms that do not fit a draft."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimijax.errors import ConfigError
from kimijax.wiring import Wiring, check_algorithm, default_taps

KIMI = Wiring((2, 30, 58), 61, 7168)


# ---- the record -----------------------------------------------------------------------------------------------------


def test_kimis_default_and_its_width() -> None:
    assert Wiring.default(61, 7168) == KIMI
    assert KIMI.fused_width == 3 * 7168 == 21504


@pytest.mark.parametrize(("layers", "taps"), [(7, (2, 3, 4)), (8, (2, 4, 5)), (27, (2, 13, 24)), (61, (2, 30, 58))])
def test_published_rule(layers: int, taps: tuple[int, ...]) -> None:
    assert default_taps(layers) == taps


@pytest.mark.parametrize("layers", [1, 5, 6])
def test_rule_has_no_answer_for_few_layers(layers: int) -> None:
    """2, 3, 3 of six layers would be two streams, and a fusion layer for three."""
    with pytest.raises(ConfigError, match="at least 7 layers"):
        Wiring.default(layers, 64)


@pytest.mark.parametrize(
    ("taps", "message"),
    [
        ((), "one or more integers"),
        ([2, 30, 58], "a tuple"),
        ((2, 30.0, 58), "integers"),
        ((True, 30, 58), "integers"),
        ((-1, 30, 58), "from 0"),
        ((2, 30, 62), "to 61"),
        ((2, 30, 30), "none twice"),
        ((58, 30, 2), "ascending"),
    ],
)
def test_taps_that_are_refused(taps: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        Wiring(taps, 61, 7168)
    assert error.value.field == "wiring.taps"


def test_ends_of_the_range() -> None:
    assert Wiring((0, 61), 61, 8).fused_width == 16


@pytest.mark.parametrize("sizes", [(0, 8), (61, 0), (61.0, 8), (61, True)])
def test_sizes_that_are_refused(sizes: Any) -> None:
    with pytest.raises(ConfigError, match="a positive integer"):
        Wiring((0,), *sizes)


def test_width_check_names_what_is_wrong() -> None:
    KIMI.check_width(21504, "features")
    with pytest.raises(ConfigError, match=r"features: found 7168, expected 21504: 3 taps \(2, 30, 58\) of width 7168"):
        KIMI.check_width(7168, "features")


wirings = st.integers(1, 80).flatmap(
    lambda n: st.builds(
        Wiring,
        st.sets(st.integers(0, n), min_size=1, max_size=6).map(lambda taps: tuple(sorted(taps))),
        st.just(n),
        st.integers(1, 8192),
    )
)


@given(wirings)
def test_json_round_trip(wiring: Wiring) -> None:
    assert Wiring.from_json(json.loads(json.dumps(wiring.to_json()))) == wiring


@given(st.integers(1, 70), st.lists(st.integers(-3, 75), max_size=5))
def test_only_ascending_taps_in_range_are_a_wiring(layers: int, taps: list[int]) -> None:
    valid = bool(taps) and taps == sorted(set(taps)) and taps[0] >= 0 and taps[-1] <= layers
    if valid:
        assert Wiring(tuple(taps), layers, 4).taps == tuple(taps)
    else:
        with pytest.raises(ConfigError):
            Wiring(tuple(taps), layers, 4)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tensor": "attention_output"}, "tensor"),
        ({"convention": "output_of_layer"}, "convention"),
        ({"pre_norm": False}, "pre_norm"),
        ({"pre_norm": 1}, "pre_norm"),
        ({"order": "as listed"}, "order"),
        ({"taps": "2,30,58"}, "taps"),
        ({"taps": [2, 30, 30]}, "taps"),
        ({"target_layers": 30}, "taps"),
        ({"target_hidden": 4096}, "fused_width"),
        ({"fused_width": 7168}, "fused_width"),
        ({"layer_offset": 1}, "layer_offset"),
    ],
)
def test_record_is_read_strictly(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        Wiring.from_json(KIMI.to_json() | change)
    assert error.value.field == f"wiring.{field}"


@pytest.mark.parametrize("key", list(KIMI.to_json()))
def test_record_needs_every_key(key: str) -> None:
    with pytest.raises(ConfigError) as error:
        Wiring.from_json({k: v for k, v in KIMI.to_json().items() if k != key})
    assert error.value.field == f"wiring.{key}"


# ---- the algorithm's name -------------------------------------------------------------------------------------------


def test_settings_that_fit() -> None:
    check_algorithm(None, None)
    check_algorithm(None, "d", wiring=KIMI, fc_width=21504)
    check_algorithm("EAGLE3", "d", wiring=KIMI, fc_width=21504)
    check_algorithm("eagle3", "d")


@pytest.mark.parametrize("name", ["EAGLE", "NEXTN"])
def test_older_algorithm_with_an_eagle3_draft(name: str) -> None:
    with pytest.raises(ConfigError, match="d is an EAGLE-3 draft: its fc takes 21504 = 3 x 7168") as error:
        check_algorithm(name, "d", wiring=KIMI, fc_width=21504)
    assert error.value.field == "speculative_algorithm"


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="only EAGLE-3 drafts"):
        check_algorithm("EAGLE", "d", wiring=KIMI, fc_width=2 * 7168)
    with pytest.raises(ConfigError, match="draft: found None"):
        check_algorithm("EAGLE3", None)
    with pytest.raises(ConfigError, match="looks like an EAGLE-1 or EAGLE-2 draft"):
        check_algorithm("EAGLE3", "d", wiring=KIMI, fc_width=2 * 7168)
    with pytest.raises(ConfigError, match="found 7168, expected 21504"):
        check_algorithm("EAGLE3", "d", wiring=KIMI, fc_width=7168)
