"""Faults that once made a drafter slow without a word, each of which now ends in an error, through the entry
points that a server and a trainer use. `pytest -s tests/test_history.py` prints the messages."""

from types import MappingProxyType

import pytest

from kimijax.errors import ConfigError
from kimijax.fingerprint import Contract, TargetFingerprint, check_contract
from kimijax.layer_ids import read_wiring
from kimijax.probe import Probe, ProbeAcceptance, served_acceptance_warning
from kimijax.speculative_options import SpeculativeOptions
from kimijax.wiring import Wiring, WiringError

KIMI = Wiring.default(61, 7168)
TARGET = TargetFingerprint(MappingProxyType({"n_layers": 61, "hidden": 7168}), MappingProxyType({}))


def test_the_fusion_layer_skipped_by_the_algorithms_name() -> None:
    """An EAGLE-3 draft served as EAGLE: elsewhere its fc is left out, and the server runs."""
    with pytest.raises(ConfigError) as error:
        SpeculativeOptions.resolve(
            draft="drafts/kimi-k2.5-eagle3", algorithm="EAGLE", num_steps=3, wiring=KIMI, fc_width=KIMI.fused_width
        )
    print(f"\n{error.value}")
    assert str(error.value) == (
        "speculative_algorithm: found 'EAGLE', expected EAGLE3; drafts/kimi-k2.5-eagle3 is an EAGLE-3 draft: "
        "its fc takes 21504 = 3 x 7168"
    )


def test_features_of_other_slots_in_training_than_in_serving() -> None:
    """Trained on the embedding and layers 3 and 31, served on 3, 31 and 59: every column block of fc saw another
    stream."""
    trained = Contract(Wiring((0, 3, 31), 61, 7168), TARGET, None)
    served = Contract(Wiring((3, 31, 59), 61, 7168), TARGET, None)
    with pytest.raises(WiringError) as error:
        check_contract(trained, served, artefact_name="draft D", running_name="target T")
    print(f"\n{error.value}")
    assert "draft D was not made for target T, 1 difference" in str(error.value)
    assert "(0, 3, 31)" in str(error.value)
    assert "(3, 31, 59)" in str(error.value)
    assert "give both the same taps" in str(error.value)


def test_layer_ids_that_two_engines_read_differently() -> None:
    """How (3, 31, 59) came to be served: ids that an engine took for layers' outputs, and another for inputs."""
    config = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_aux_hidden_state_layer_ids": [3, 31, 58]}
    with pytest.raises(WiringError) as error:
        read_wiring(config, target_layers=61, target_hidden=7168, fc_width=21504)
    print(f"\n{error.value}")
    assert "taps (3, 31, 58): input_of_layer" in str(error.value)
    assert "taps (4, 32, 59): output_of_layer" in str(error.value)
    assert "--layer-id-convention" in str(error.value)


def test_a_draft_that_is_accepted_far_less_than_in_training() -> None:
    """74.7 % of first drafts right in training, 0.6 accepted in serving, and nothing compared the two."""
    measured = ProbeAcceptance(draft_tokens=1, temperature=0.0, by_position=(0.747,))
    probe = Probe(seed=0, separation={2: 0.3}, sequences=(), acceptance=measured)
    assert served_acceptance_warning(probe, 0.7) == ""
    warning = served_acceptance_warning(probe, 0.6)
    print(f"\n{warning}")
    assert "60.0% of the rounds, below 0.85 of the 74.7% that were recorded with this draft" in warning
    assert "kimijax.doctor" in warning


def test_steps_and_draft_tokens_that_contradict_each_other() -> None:
    """One step and sixteen draft tokens: elsewhere two tokens are verified, or sixteen that one step cannot fill."""
    with pytest.raises(ConfigError) as error:
        SpeculativeOptions.resolve(draft="D", num_steps=1, eagle_topk=1, num_draft_tokens=16)
    print(f"\n{error.value}")
    assert "found 16, expected num_steps + 1 = 2" in str(error.value)
    assert "set --speculative-num-draft-tokens 2, or --speculative-num-steps 15" in str(error.value)
