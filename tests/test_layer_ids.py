"""Every producer's layer numbers become the streams that it really captures; what has two meanings is refused."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimijax.errors import ConfigError
from kimijax.layer_ids import CONVENTIONS, layer_ids, read_wiring
from kimijax.wiring import Wiring, WiringError

Ids = list[int]
KIMI = Wiring((2, 30, 58), 61, 7168)


def read(config: Mapping[str, Any], layers: int = 61, hidden: int = 7168, **options: Any) -> tuple[int, ...]:
    wiring = read_wiring(config, target_layers=layers, target_hidden=hidden, **options)
    assert (wiring.target_layers, wiring.target_hidden) == (layers, hidden)
    return wiring.taps


def top(*ids: int, **more: Any) -> dict[str, Any]:
    return {"eagle_aux_hidden_state_layer_ids": list(ids), **more}


def nested(*ids: int, **more: Any) -> dict[str, Any]:
    return {"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(ids)}, **more}


def speculators(*ids: int, **more: Any) -> dict[str, Any]:
    return top(*ids, speculators_model_type="eagle3", speculators_config={"algorithm": "eagle3"}, **more)


def refused(config: Mapping[str, Any], kind: type[ConfigError] = WiringError, **options: Any) -> str:
    with pytest.raises(kind) as error:
        read(config, **options)
    return str(error.value)


wirings = st.integers(1, 80).flatmap(
    lambda n: st.builds(
        Wiring,
        st.sets(st.integers(0, n), min_size=1, max_size=6).map(lambda taps: tuple(sorted(taps))),
        st.just(n),
        st.integers(1, 8192),
    )
)


# ---- what the producers capture, written down a second time as their loops ------------------------------------------
# A fake target: the embedding is 0 and layer k adds 10^k, so that a stream's digits are the layers it has passed.


def streams(n: int) -> Ids:
    """hidden_states as a plain loop collects them: index i enters layer i."""
    out = [0]
    for k in range(n):
        out.append(out[-1] + 10**k)
    return out


def appended_before_each_layer(ids: Ids, n: int) -> Ids:
    h, kept = 0, Ids()
    for k in range(n):
        if k in ids:
            kept.append(h)
        h += 10**k
    return kept


def hooked_after_each_layer(ids: Ids, n: int) -> Ids:
    h, kept = 0, Ids()
    for k in range(n):
        h += 10**k
        if k in ids:
            kept.append(h)
    return kept


def sglang(ids: Ids, n: int) -> Ids:
    return appended_before_each_layer([i + 1 for i in ids] if ids[0] == 1 else ids, n)


def sglang_before(ids: Ids, n: int) -> Ids:
    return appended_before_each_layer([i + 1 for i in ids], n)


def indexed(ids: Ids, n: int) -> Ids:
    return [streams(n)[i + 1] for i in ids]


CAPTURES: dict[str, Callable[[Ids, int], Ids]] = {
    "input_of_layer": appended_before_each_layer,
    "output_of_layer": hooked_after_each_layer,
    "eagle": appended_before_each_layer,
    "sglang": sglang,
    "sglang_before_2026_05": sglang_before,
    "vllm": appended_before_each_layer,
    "speculators": appended_before_each_layer,
    "specforge": hooked_after_each_layer,
    "torchspec": hooked_after_each_layer,
    "torchspec_vllm": appended_before_each_layer,
    "modelopt": indexed,
    "modelopt_vllm": appended_before_each_layer,
    "tensorrt_llm": hooked_after_each_layer,
    "angelslim": indexed,
    "angelslim_early": indexed,
    "deepspec": hooked_after_each_layer,
}


def test_every_convention_has_a_capture_loop() -> None:
    assert CAPTURES.keys() == CONVENTIONS.keys()


@pytest.mark.parametrize("name", CAPTURES)
@given(n=st.integers(4, 16), data=st.data())
def test_taps_are_the_streams_that_the_producer_captures(name: str, n: int, data: st.DataObject) -> None:
    ids = sorted(data.draw(st.sets(st.integers(0, n - 2), min_size=3, max_size=3)))
    taps = CONVENTIONS[name].read(tuple(ids), n)
    assert [streams(n)[t] for t in taps] == CAPTURES[name](ids, n)


@pytest.mark.parametrize("ids", [None, [2, 4, 5], [1, 3, 4]])
def test_eight_layers_give_the_same_streams_in_every_spelling(ids: Ids | None) -> None:
    config = {} if ids is None else nested(*ids)
    assert [streams(8)[t] for t in read(config, 8, 64)] == [11, 1111, 11111]


# ---- the table, with Kimi's ids -------------------------------------------------------------------------------------

R2 = (2, 30, 58)
KIMI_IDS: list[tuple[str, Ids, tuple[int, ...]]] = [
    ("input_of_layer", [2, 30, 58], R2),
    ("output_of_layer", [1, 29, 57], R2),
    ("eagle", [2, 30, 58], R2),
    ("sglang", [1, 29, 57], R2),
    ("sglang", [2, 30, 58], R2),
    ("sglang", [3, 31, 59], (3, 31, 59)),
    ("sglang_before_2026_05", [1, 29, 57], R2),
    ("sglang_before_2026_05", [2, 30, 58], (3, 31, 59)),
    ("vllm", [2, 30, 58], R2),
    ("vllm", [1, 29, 57], (1, 29, 57)),
    ("vllm", [2, 30, 58, 61], (2, 30, 58, 61)),
    ("speculators", [2, 30, 58], R2),
    ("speculators", [2, 30, 58, 61], R2),
    ("specforge", [1, 29, 57], R2),
    ("torchspec", [1, 29, 57], R2),
    ("torchspec_vllm", [2, 30, 58], R2),
    ("modelopt", [1, 29, 57], R2),
    ("modelopt_vllm", [2, 30, 58, 61], R2),
    ("tensorrt_llm", [1, 29, 57], R2),
    ("angelslim", [1, 29, 57], R2),
    ("deepspec", [-1, 29, 57], (0, 30, 58)),
    ("deepspec", [1, 15, 30, 44, 57], (2, 16, 31, 45, 58)),
]


@pytest.mark.parametrize(("name", "ids", "taps"), KIMI_IDS)
@pytest.mark.parametrize("place", [top, nested])
def test_named_convention(place: Callable[..., dict[str, Any]], name: str, ids: Ids, taps: tuple[int, ...]) -> None:
    assert read(place(*ids), convention=name) == taps


@pytest.mark.parametrize("name", [n for n in CONVENTIONS if n not in ("angelslim_early", "deepspec")])
def test_without_ids_all_producers_mean_the_same(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert read({"hidden_size": 7168}, convention=name) == R2
    assert f"no layer ids: taps (2, 30, 58) by the default of {name}" in caplog.text


def test_early_angelslim_counted_the_embedding() -> None:
    """1, m//2 - 1 and m - 4 of m = len(hidden_states) = 62, and each read one place later."""
    assert read({}, convention="angelslim_early") == (2, 31, 59)


def test_deepspec_has_no_default() -> None:
    assert "deepspec has no default" in refused({}, ConfigError, convention="deepspec")


@pytest.mark.parametrize(
    ("config", "taps"),
    [
        ({}, R2),
        ({"eagle_aux_hidden_state_layer_ids": None, "eagle_config": None}, R2),
        (nested(1, 29, 57), R2),
        (nested(2, 30, 58), R2),
        (top(2, 30, 58), R2),
        (top(1, 29, 57), R2),
        (top(2, 30, 58) | nested(1, 29, 57), R2),  # two numberings of the same streams do not contradict each other
        (speculators(2, 30, 58), R2),
        (speculators(2, 30, 58, 61), R2),
        (speculators(5, 20, 40), (5, 20, 40)),  # the producer is known, so any ids are
        (speculators(2, 30, 58, 61, num_aux_hidden_states=4), (2, 30, 58, 61)),
        (top(2, 30, 58, 61, num_aux_hidden_states=3), R2),
        ({"aux_hidden_states_layer_ids": [4, 20, 40]}, (5, 21, 41)),  # AngelSlim's own key
        ({"aux_hidden_states_layer_ids": [1, 29, 57]} | top(2, 30, 58), R2),
        ({"eagle3_layers_to_capture": [4, 20, 40]}, (5, 21, 41)),  # TensorRT-LLM's option
        (top(20, 40, 61), (20, 40, 61)),  # the last layer's output has the id 60: only one reading is in range
    ],
)
def test_read_without_being_told(config: dict[str, Any], taps: tuple[int, ...]) -> None:
    assert read(config) == taps


def test_last_stream_is_fused_where_three_are_listed() -> None:
    assert read(speculators(24, 30, 36), 36, 64) == (24, 30, 36)


def test_width_of_the_fusion_layer_decides() -> None:
    ids = top(2, 30, 58, 61)
    assert read(ids, fc_width=3 * 7168) == R2
    assert read(ids, fc_width=4 * 7168) == (2, 30, 58, 61)
    assert read(speculators(2, 30, 58, 61), fc_width=4 * 7168) == (2, 30, 58, 61)
    assert "4 ids" in refused({}, ConfigError, fc_width=4 * 7168)
    assert "a multiple of the target's width 7168" in refused(ids, ConfigError, fc_width=10000)
    assert "fuses 2" in refused(top(2, 30, 58), fc_width=2 * 7168)
    assert "found 4, but fc.weight takes 21504 inputs" in refused(
        top(2, 30, 58, num_aux_hidden_states=4), fc_width=21504
    )


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_ambiguous_ids_show_every_reading() -> None:
    """The streams of an engine that was off by one: nothing in the file tells whether training saw them too."""
    message = refused(nested(3, 31, 59))
    assert (
        "config.eagle_config.eagle_aux_hidden_state_layer_ids: found [3, 31, 59] for a target of 61 layers" in message
    )
    lines = message.splitlines()
    inputs = next(line for line in lines if "taps (3, 31, 59)" in line)
    outputs = next(line for line in lines if "taps (4, 32, 60)" in line)
    assert {"input_of_layer", "eagle", "sglang", "vllm", "speculators"} <= set(inputs.split(": ")[1].split(", "))
    assert {"output_of_layer", "sglang_before_2026_05", "specforge", "tensorrt_llm", "angelslim"} <= set(
        outputs.split(": ")[1].split(", ")
    )
    assert "--layer-id-convention" in lines[-1]


@pytest.mark.parametrize(
    "ids",
    [
        (0, 3, 31),  # the embedding in front, or the first layer's output
        (1, 9, 33),  # starts with 1, but is nobody's default
        (2, 30, 58, 61),  # four streams, or three and the last hidden state
        (2, 31, 58),
    ],
)
def test_more_ambiguous_ids(ids: Ids) -> None:
    assert "has no single meaning" in refused(top(*ids))


@pytest.mark.parametrize("ids", [(58, 30, 2), (2, 30, 30), (2, 30, 99), (-1, 30, 58)])
def test_ids_without_a_meaning(ids: Ids) -> None:
    message = refused(top(*ids))
    assert "means nothing" in message
    assert "refused, expected" in message


def test_negative_ids_are_only_deepspecs() -> None:
    assert "DeepSpec means the embedding by -1" in refused(top(-1, 29, 57), convention="specforge")


def test_producer_against_published_default() -> None:
    """A SpecForge draft repacked for speculators, its ids unchanged: the file says inputs, the ids say outputs."""
    message = refused(speculators(1, 29, 57))
    assert "is the published default 2, n//2, n-3 as output_of_layer (read as speculators)" in message
    assert read(speculators(1, 29, 57), convention="specforge") == R2


def test_naming_a_convention_against_the_published_default_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert read(nested(2, 30, 58), convention="sglang_before_2026_05") == (3, 31, 59)
    assert "is the published default 2, n//2, n-3 as input_of_layer" in caplog.text
    caplog.clear()
    assert read(nested(2, 30, 58), convention="vllm") == R2
    assert "published default" not in caplog.text


def test_two_lists_that_contradict_each_other() -> None:
    message = refused(top(2, 30, 58) | nested(3, 31, 59), convention="vllm")
    assert "config.eagle_aux_hidden_state_layer_ids [2, 30, 58] means taps (2, 30, 58)" in message
    assert "config.eagle_config.eagle_aux_hidden_state_layer_ids [3, 31, 59] means taps (3, 31, 59)" in message
    assert "contradict" in refused({"aux_hidden_states_layer_ids": [4, 20, 40]} | speculators(6, 20, 40))


def test_sglang_cannot_capture_the_last_output() -> None:
    assert "does not capture tap 61" in refused(top(20, 40, 61), convention="sglang")
    assert "does not capture tap 61" in refused(top(20, 40, 60), convention="sglang_before_2026_05")


def test_a_key_of_one_producer_is_not_read_as_anothers() -> None:
    message = refused({"aux_hidden_states_layer_ids": [1, 29, 57]}, ConfigError, convention="vllm")
    assert "layer_id_convention: found 'vllm', expected angelslim" in message
    assert read({"aux_hidden_states_layer_ids": [1, 29, 57]}, convention="angelslim") == R2


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (top(), "config.eagle_aux_hidden_state_layer_ids"),
        (top(2, True, 58), "config.eagle_aux_hidden_state_layer_ids"),
        ({"eagle_aux_hidden_state_layer_ids": "2,30,58"}, "config.eagle_aux_hidden_state_layer_ids"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "config.eagle_config.use_aux_hidden_state"),
        ({"dflash_config": {"target_layer_ids": [1, 9, 17]}}, "config.dflash_config"),
        (top(2, 30, 58, target_layer_ids=[1, 29, 57]), "config.target_layer_ids"),
        (top(2, 30, 58, hidden_size=4096), "config.hidden_size"),
        (top(2, 30, 58, hidden_size=7168, target_hidden_size=4096), "config.target_hidden_size"),
        (
            speculators(2, 30, 58, transformer_layer_config={"hidden_size": 4096}),
            "config.transformer_layer_config.hidden_size",
        ),
    ],
)
def test_fields_that_are_refused(config: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(config)
    assert error.value.field == field


def test_a_narrower_draft_that_names_its_targets_width() -> None:
    assert read(top(2, 30, 58, hidden_size=2048, target_hidden_size=7168)) == R2


def test_unknown_convention_lists_the_known_ones() -> None:
    message = refused(top(2, 30, 58), ConfigError, convention="llama.cpp")
    assert all(name in message for name in CONVENTIONS)


# ---- kimijax's own record -------------------------------------------------------------------------------------------


def own(wiring: Wiring = KIMI, **more: Any) -> dict[str, Any]:
    return {"kimijax": {"wiring": wiring.to_json(), "probe": {}}, **more}


def test_own_record_needs_no_convention() -> None:
    odd = Wiring((0, 3, 31), 61, 7168)
    assert read(own(odd)) == (0, 3, 31)
    assert read(own(odd, **top(0, 3, 31))) == (0, 3, 31)
    assert read(own(KIMI, **nested(1, 29, 57)), fc_width=21504) == R2


def test_own_record_against_everything_else() -> None:
    assert "leave it out" in refused(own(), ConfigError, convention="vllm")
    assert "found [3, 31, 59], but config.kimijax.wiring says taps (2, 30, 58)" in refused(own(**top(3, 31, 59)))
    assert "made for 61, the target has 27" in refused(own(), layers=27)
    assert "made for 7168, the target has 2048" in refused(own(), hidden=2048)
    assert "found 7168, expected 21504" in refused(own(), ConfigError, fc_width=7168)
    assert "found 4, but fc.weight takes" in refused(own(num_aux_hidden_states=4))


# ---- export ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("vllm", R2),
        ("speculators", R2),
        ("eagle", R2),
        ("specforge", (1, 29, 57)),
        ("sglang_before_2026_05", (1, 29, 57)),
    ],
)
def test_kimis_ids_for_other_software(name: str, ids: tuple[int, ...]) -> None:
    assert layer_ids(KIMI, name) == ids


def test_sglangs_ids_also_suit_its_older_releases() -> None:
    ids = layer_ids(KIMI, "sglang")
    assert CONVENTIONS["sglang_before_2026_05"].read(ids, 61) == CONVENTIONS["sglang"].read(ids, 61) == R2


@pytest.mark.parametrize("name", CONVENTIONS)
@given(wiring=wirings)
def test_exported_ids_are_read_back(name: str, wiring: Wiring) -> None:
    try:
        ids = layer_ids(wiring, name)
    except WiringError:
        c = CONVENTIONS[name]
        first, last = wiring.taps[0], wiring.taps[-1]
        assert (
            (first == 0 and c.numbering == "output")
            or (last == wiring.target_layers and not c.captures_last)
            or (first == 1 and c.numbering == "first_id")
        )
        return
    config = top(*ids, num_aux_hidden_states=len(ids))
    assert read(config, wiring.target_layers, wiring.target_hidden, convention=name) == wiring.taps


@pytest.mark.parametrize(
    ("taps", "name"),
    [((0, 3), "specforge"), ((1, 3), "sglang"), ((3, 61), "sglang"), ((3, 61), "sglang_before_2026_05")],
)
def test_taps_that_a_convention_cannot_express(taps: tuple[int, ...], name: str) -> None:
    with pytest.raises(WiringError, match=f"{name} cannot express"):
        layer_ids(Wiring(taps, 61, 8), name)
