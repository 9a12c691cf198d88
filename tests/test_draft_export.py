"""Exported drafts: round trips of every form, what engines read of them, and what they would not apply."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kimijax.draft_checkpoint import load_draft
from kimijax.draft_config import load_draft_config, parse_draft_config
from kimijax.draft_export import Verifier, draft_config_json, save_draft
from kimijax.drafter import Borrowed, declare_drafter, initialise_drafter
from kimijax.errors import ConfigError
from kimijax.names import parameters
from kimijax.safetensors_io import read_header
from kimijax.wiring import Wiring

from . import draft_reference as ref
from .test_draft_checkpoint import loaded, stored, without
from .test_drafter import EAGLE31, SCALED3, WINDOW, WIRING, YARN, tiny_target

VERIFIER = Verifier("a/target", ("DeepseekV3ForCausalLM",))
F32 = np.dtype(np.float32)

ROUND_TRIPS: list[tuple[str, ref.Config, dict[str, Any]]] = [
    ("sglang", ref.LLAMA, {**EAGLE31, "rope_scaling": SCALED3}),
    ("sglang", ref.MLA, EAGLE31),
    ("vllm", ref.LLAMA, {**WINDOW, "rope_scaling": YARN, "norm_before_residual": True, "norm_before_fc": True}),
    ("vllm", ref.MLA, {"norm_before_residual": True, "draft_vocab_size": 40}),
    ("speculators", ref.LLAMA, {**WINDOW, "norm_before_residual": True, "norm_before_fc": True, "norm_output": True}),
]


@pytest.mark.parametrize(("form", "base", "changes"), ROUND_TRIPS)
def test_round_trip(form: Any, base: ref.Config, changes: dict[str, Any], tmp_path: Path) -> None:
    """Written and read again: the same config and the same values, under the form's names, all of the tensors."""
    config = {**base, **changes}
    tensors = ref.random_tensors(config)
    drafter = loaded(tmp_path / "in", config, tensors)
    out = tmp_path / "out"
    save_draft(
        drafter,
        out,
        form,
        with_embedding=True,
        verifier=VERIFIER if form == "speculators" else None,
        record={"wiring": WIRING.to_json()},
        files={"note.txt": b"!"},
    )
    assert load_draft_config(out, WIRING) == drafter.config
    layer = "midlayer." if form == "sglang" else "layers.0."
    right = {name.replace("midlayer.", layer): value for name, value in tensors.items()}
    found = stored(out)
    assert found.keys() == right.keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value, right[name])
    again = load_draft(out, WIRING, tiny_target(tensors), dtype=jnp.float32)
    for path, param in parameters(again).items():
        np.testing.assert_array_equal(param.get_value(), parameters(drafter)[path].get_value())
    np.testing.assert_array_equal(again.target_ids.get_value(), drafter.target_ids.get_value())
    assert {f.name for f in out.iterdir()} == {"config.json", "model.safetensors", "note.txt"}
    assert [f.name for f in tmp_path.iterdir() if f.name.endswith(".part")] == []


def test_written_configs_say_what_engines_read(tmp_path: Path) -> None:
    tensors = ref.random_tensors(ref.LLAMA)
    drafter = loaded(tmp_path / "in", ref.LLAMA, tensors)
    written = {}
    for form in ("sglang", "vllm", "speculators"):
        save_draft(drafter, tmp_path / form, form, verifier=VERIFIER, dtype=jnp.bfloat16)
        written[form] = json.loads((tmp_path / form / "config.json").read_text())
        assert written[form]["eagle_aux_hidden_state_layer_ids"] == [2, 5, 7]
        assert written[form]["torch_dtype"] == "bfloat16"
        names = {t.name for t in read_header(tmp_path / form / "model.safetensors")}
        assert ("embed_tokens.weight" in names) == (form == "speculators")
        assert {"d2t", "t2d", "lm_head.weight"} <= names
    assert written["sglang"]["architectures"] == ["LlamaForCausalLMEagle3"]
    assert written["vllm"]["architectures"] == ["Eagle3LlamaForCausalLM"]
    assert written["sglang"]["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 5, 7]
    assert "model_type" not in written["speculators"]
    assert written["speculators"]["norm_before_residual"] is False
    assert written["speculators"]["speculators_config"]["verifier"]["name_or_path"] == "a/target"


def test_a_borrowed_head_is_declared_as_such(tmp_path: Path) -> None:
    """A null draft_vocab_size makes engines take the target's head; speculators has no such thing."""
    config = {**ref.LLAMA, "draft_vocab_size": None}
    tensors = without(ref.random_tensors(config), "lm_head.weight")
    drafter = loaded(tmp_path / "in", config, tensors)
    save_draft(drafter, tmp_path / "out", "sglang")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["draft_vocab_size"] is None
    assert isinstance(load_draft(tmp_path / "out", WIRING, tiny_target(tensors)).lm_head, Borrowed)
    with pytest.raises(ConfigError, match=r'speculators: lm_head: found "the target.s".*with_head=True'):
        save_draft(drafter, tmp_path / "no", "speculators", verifier=VERIFIER)
    save_draft(drafter, tmp_path / "yes", "speculators", verifier=VERIFIER, with_head=True)
    np.testing.assert_array_equal(stored(tmp_path / "yes")["lm_head.weight"], drafter.lm_head.get_value())


REFUSED: list[tuple[str, ref.Config, dict[str, Any], tuple[int, ...], str]] = [
    ("speculators", ref.MLA, {}, (2, 5, 7), "speculators: attention"),
    ("speculators", ref.LLAMA, {"fc_norm": True, "norm_before_fc": True}, (2, 5, 7), "fc_norm with norm_before_fc"),
    ("speculators", ref.LLAMA, {"hidden_size": 48, "target_hidden_size": 64}, (2, 5, 7), "speculators: hidden"),
    ("sglang", ref.LLAMA, {"norm_before_residual": True}, (2, 5, 7), "SGLang does not read it"),
    ("sglang", ref.MLA, {"q_lora_rank": None}, (2, 5, 7), "sglang: q_lora_rank"),
    ("vllm", ref.MLA, {"q_lora_rank": None}, (2, 5, 7), "vLLM's loader fails"),
    ("vllm", ref.MLA, {"norm_before_fc": True}, (2, 5, 7), "vllm: norm_before_fc"),
    ("sglang", ref.LLAMA, {}, (1, 5, 7), "SGLang reads ids that begin with 1"),
    ("vllm", ref.LLAMA, {}, (2, 5, 10), "taps below 10"),
    ("vllm", ref.LLAMA, {}, (0, 5, 7), "a first tap above 0"),
    ("sglang", ref.LLAMA, {"hidden_size": 192, "target_hidden_size": 64}, (2, 5, 7), "SGLang then takes them for feat"),
    ("sglang", ref.LLAMA, {**WINDOW, "sliding_window": 1}, (2, 5, 7), "sglang: window: found 1"),
    ("gguf", ref.LLAMA, {}, (2, 5, 7), "form: found 'gguf'"),
]


@pytest.mark.parametrize(("form", "base", "changes", "taps", "message"), REFUSED)
def test_what_engines_would_not_apply_is_not_written(
    form: Any, base: ref.Config, changes: dict[str, Any], taps: tuple[int, ...], message: str
) -> None:
    wiring = Wiring(taps, target_layers=10, target_hidden=64)
    config = parse_draft_config({**base, **changes}, wiring)
    with pytest.raises(ConfigError, match=message):
        draft_config_json(config, wiring, form, dtype=F32, verifier=VERIFIER)


def test_an_embedding_that_sglang_would_replace_is_not_written(tmp_path: Path) -> None:
    config, f32 = parse_draft_config(ref.LLAMA, WIRING), jnp.dtype(jnp.float32)
    drafter = declare_drafter(config, WIRING, dtype=f32, own_embed=True)
    initialise_drafter(drafter, tiny_target({}), range(40), 0)
    with pytest.raises(ConfigError, match='sglang: embedding: found "one of the draft\'s own"'):
        save_draft(drafter, tmp_path / "a", "sglang")
    save_draft(drafter, tmp_path / "b", "vllm")
    np.testing.assert_array_equal(stored(tmp_path / "b")["embed_tokens.weight"], drafter.embed.get_value())


def test_nothing_is_overwritten_or_left_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = loaded(tmp_path / "in", ref.LLAMA, ref.random_tensors(ref.LLAMA))
    with pytest.raises(ValueError, match="in use"):
        save_draft(drafter, tmp_path / "in", "sglang")
    with pytest.raises(ValueError, match="verifier: found None"):
        save_draft(drafter, tmp_path / "out", "speculators")

    def broken(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("kimijax.draft_export.write_file", broken)
    with pytest.raises(OSError, match="disk full"):
        save_draft(drafter, tmp_path / "out", "sglang")
    assert {f.name for f in tmp_path.iterdir()} == {"in"}


def test_sglang_is_told_of_the_window_by_a_flag(caplog: pytest.LogCaptureFixture) -> None:
    config = parse_draft_config({**ref.LLAMA, **WINDOW}, WIRING)
    draft_config_json(config, WIRING, "sglang", dtype=F32)
    assert "--speculative-draft-window-size 3" in caplog.text
