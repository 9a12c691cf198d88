"""Configs of published drafts: every form and older spelling, and what is refused because it would change the maths."""

from typing import Any

import pytest

from kimijax.draft_config import Llama3Scaling, LlamaAttentionConfig, LlamaYarn, parse_draft_config
from kimijax.errors import ConfigError

from . import draft_reference as ref
from .test_drafter import SCALED3, WINDOW, WIRING, YARN

# The form that speculators 0.7 wrote for a draft that its issue tracker shows, with the sizes of the tiny draft.
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3DraftModel"],
    "auto_map": {"": "config.Eagle3SpeculatorConfig"},
    "draft_vocab_size": 40,
    "dtype": "bfloat16",
    "eagle_aux_hidden_state_layer_ids": [2, 5, 7, 10],
    "embed_requires_grad": False,
    "fc_norm": False,
    "norm_before_fc": True,
    "norm_before_residual": True,
    "norm_output": True,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
        ],
        "verifier": {"architectures": ["Qwen3MoeForCausalLM"], "name_or_path": "/model/from_s3"},
    },
    "speculators_model_type": "eagle3",
    "speculators_version": "0.8.0.dev0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "layer_types": ["sliding_attention"],
        "max_position_embeddings": 262144,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 6,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "beta_fast": 4,
            "beta_slow": 1,
            "factor": 32,
            "original_max_position_embeddings": 4096,
            "rope_theta": 1000000.0,
            "rope_type": "yarn",
        },
        "sliding_window": 2048,
        "use_cache": True,
        "use_sliding_window": True,
        "vocab_size": 128,
    },
    "transformers_version": "5.13.1",
}


def test_published_fields() -> None:
    """SGLang's form, vLLM's name for it, DeepSeek's form and speculators'."""
    llama = parse_draft_config(ref.LLAMA, WIRING)
    assert (llama.hidden, llama.vocab_size, llama.draft_vocab_size, llama.mlp_width) == (64, 128, 40, 96)
    assert (llama.n_taps, llama.fused_width, llama.cache_width, llama.window) == (3, 192, 64, None)
    assert (llama.fc_norm, llama.norm_before_fc, llama.norm_before_residual, llama.norm_output) == (False,) * 4
    renamed = {**ref.LLAMA, "architectures": ["Eagle3LlamaForCausalLM"]}
    assert parse_draft_config(renamed, WIRING) == llama
    mla = parse_draft_config(ref.MLA, WIRING)
    assert mla.is_mla
    assert (mla.draft_vocab_size, mla.is_reduced, mla.cache_width, mla.norm_eps) == (128, False, 64, 1e-5)
    speculators = parse_draft_config(SPECULATORS, WIRING)
    assert speculators.attention == LlamaAttentionConfig(6, 2, 16, 1e6, LlamaYarn(32.0, 4096, 4.0, 1.0))
    assert (speculators.window, speculators.norm_before_fc, speculators.norm_before_residual) == (2048, True, True)
    assert (speculators.norm_output, speculators.fc_norm, speculators.n_taps) == (True, False, 3)


def test_older_names_of_fields() -> None:
    """A null vocabulary, nebius' name of it, SGLang's first flag of fc_norm, the reference's architecture."""
    assert parse_draft_config({**ref.LLAMA, "draft_vocab_size": None}, WIRING).draft_vocab_size == 128
    named = {**ref.LLAMA, "draft_vocab_size": None, "truncated_vocab_size": 32}
    assert parse_draft_config(named, WIRING).draft_vocab_size == 32
    assert parse_draft_config({**ref.LLAMA, "use_aux_norm": True}, WIRING).fc_norm
    assert parse_draft_config({**ref.LLAMA, "architectures": ["LlamaForCausalLM"]}, WIRING).draft_vocab_size == 40
    kimi = parse_draft_config({**ref.LLAMA, "model_type": "kimi_k2"}, WIRING)
    assert kimi == parse_draft_config(ref.LLAMA, WIRING)
    nulls = {"use_aux_hidden_state": True, "parallel_draft_step": None, "norm_before_fc": True, "has_lm_head": True}
    assert parse_draft_config({**ref.LLAMA, "eagle_config": nulls}, WIRING).norm_before_fc
    absent = {k: v for k, v in ref.LLAMA.items() if k != "head_dim"}
    attention = parse_draft_config({**absent, "num_attention_heads": 8}, WIRING).attention
    assert attention == LlamaAttentionConfig(8, 2, 8, 10000.0)


def test_speculators_leaves_out_llamas_defaults() -> None:
    """transformers writes only what differs from LlamaConfig; a missing key stands for that class's value."""
    layer = {k: v for k, v in SPECULATORS["transformer_layer_config"].items() if k not in ("rms_norm_eps",)}
    del layer["rope_parameters"]
    config = parse_draft_config({**SPECULATORS, "transformer_layer_config": layer}, WIRING)
    assert config.norm_eps == 1e-6
    assert config.attention.rope_theta == 10000.0


def test_rope_forms() -> None:
    """rope_theta beside rope_scaling, and transformers 5's rope_parameters, which hold both."""
    config = parse_draft_config({**ref.LLAMA, "rope_scaling": SCALED3}, WIRING)
    assert config.attention == LlamaAttentionConfig(6, 2, 16, 10000.0, Llama3Scaling(8.0, 1.0, 4.0, 64))
    bare = {k: v for k, v in ref.LLAMA.items() if k not in ("rope_theta", "rope_scaling")}
    assert parse_draft_config({**bare, "rope_parameters": {**SCALED3, "rope_theta": 10000.0}}, WIRING) == config
    plain = {**bare, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    assert parse_draft_config(plain, WIRING) == parse_draft_config(ref.LLAMA, WIRING)


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (ref.LLAMA, {"rms_norm": 1}, "config.rms_norm: found 1, expected no such field"),
        (ref.LLAMA, {"num_hidden_layers": 2}, "config.num_hidden_layers: found 2, expected 1"),
        (ref.LLAMA, {"attention_bias": True}, "config.attention_bias: found True"),
        (ref.LLAMA, {"bias": True}, "config.bias: found True"),
        (ref.LLAMA, {"tie_word_embeddings": True}, "config.tie_word_embeddings: found True"),
        (ref.LLAMA, {"quantization_config": {"quant_method": "fp8"}}, "config.quantization_config"),
        (ref.LLAMA, {"architectures": ["LlamaForCausalLMEagle"]}, "draft of EAGLE-1 or EAGLE-2"),
        (ref.LLAMA, {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None}, "config.architectures: found"),
        (ref.LLAMA, {"model_type": "qwen3"}, "config.model_type: found 'qwen3'"),
        (ref.LLAMA, {"target_hidden_size": 96}, r"wiring \(taps, target_hidden\): found \(3, 64\), expected \(3, 96\)"),
        (ref.LLAMA, {"hidden_size": 96}, r"found \(3, 64\), expected \(3, 96\), which makes the 288 inputs of fc"),
        (ref.LLAMA, {"num_aux_hidden_states": 5}, "config.num_aux_hidden_states: found 5, expected the number of the"),
        (ref.LLAMA, {"eagle_config": {"use_aux_hidden_state": False}}, "one hidden state, not several: EAGLE-1"),
        (ref.LLAMA, {"eagle_config": {"use_last_layernorm": False}}, "config.eagle_config.use_last_layernorm"),
        (ref.LLAMA, {"eagle_config": {"new": 1}}, "config.eagle_config.new: found 1, expected no such field"),
        (ref.LLAMA, {"norm_before_fc": False, "eagle_config": {"norm_before_fc": True}}, "norm_before_fc: found True"),
        (ref.LLAMA, {"truncated_vocab_size": 39}, "config.truncated_vocab_size: found 39, expected the same"),
        (ref.LLAMA, {"sliding_window": 512, "use_sliding_window": True}, "or a layer_types that says if it applies"),
        (ref.LLAMA, {**WINDOW, "use_sliding_window": False}, "config.use_sliding_window: found False, expected True"),
        (ref.LLAMA, {**WINDOW, "sliding_window": None}, "config.sliding_window: found None"),
        (ref.LLAMA, {"layer_types": ["linear_attention"]}, "config.layer_types: found"),
        (ref.LLAMA, {"rope_scaling": {**SCALED3, "rope_type": "linear"}}, "config.rope_scaling.rope_type"),
        (ref.LLAMA, {"rope_scaling": {**YARN, "attention_factor": 1.2}}, "config.rope_scaling.attention_factor"),
        (ref.LLAMA, {"rope_theta": None}, "config.rope_theta"),
        (ref.MLA, {"new": 1}, "config.new: found 1, expected no such field"),
        (ref.MLA, {"num_key_value_heads": 2}, "config.num_key_value_heads: found 2"),
        (ref.MLA, {"rope_interleave": False}, "config.rope_interleave: found False"),
        (SPECULATORS, {"norm_before_residual": ...}, "vLLM takes true and speculators false"),
        (SPECULATORS, {"speculators_model_type": "peagle"}, "config.speculators_model_type: found 'peagle'"),
        (SPECULATORS, {"mask_token_id": 3}, "config.mask_token_id: found 3, expected no such field"),
    ],
)
def test_a_config_that_would_change_the_maths_is_refused(
    base: ref.Config, changes: dict[str, Any], message: str
) -> None:
    data = {key: value for key, value in {**base, **changes}.items() if value is not ...}
    with pytest.raises(ConfigError, match=message):
        parse_draft_config(data, WIRING)
