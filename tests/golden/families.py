"""Tiny models of every family: complete `config.json` dicts in the format in which each family is published.

Only the sizes are small; every other field (YaRN, eps, routing, field names, nesting, serialisation noise) is the
published one. All widths of one model differ, so that a transposed or mis-sliced matrix cannot fit by accident, and
each is a multiple of 8 where an 8-way tensor-parallel split cuts it. YaRN's original context is 32 tokens: a sequence
of 160 lies far beyond it, and with 16 rotary dims beta_fast 1 and 32 give different frequencies.
"""

import copy
from typing import Any, Literal

Config = dict[str, Any]
Quantization = Literal["int4", "fp8"]

ORIGINAL_CONTEXT = 32


def _yarn(factor: float, beta_fast: float, mscale: float = 1.0) -> Config:
    return {
        "beta_fast": beta_fast,
        "beta_slow": 1.0,
        "factor": factor,
        "mscale": mscale,
        "mscale_all_dim": mscale,
        "original_max_position_embeddings": ORIGINAL_CONTEXT,
        "type": "yarn",
    }


def _text(model_type: str, **fields: Any) -> Config:
    """The fields that all families share, then those of one; a later value wins."""
    remote = "DeepseekV2" if model_type == "deepseek_v2" else "DeepseekV3"
    return {
        "architectures": [f"{remote}ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": f"configuration_deepseek.{remote}Config",
            "AutoModel": f"modeling_deepseek.{remote}Model",
            "AutoModelForCausalLM": f"modeling_deepseek.{remote}ForCausalLM",
        },
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "kv_lora_rank": 48,
        "model_type": model_type,
        "moe_intermediate_size": 32,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 8,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 0,
        "pretraining_tp": 1,
        "q_lora_rank": 40,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.48.3",
        "use_cache": True,
        "v_head_dim": 24,
        "vocab_size": 128,
        **fields,
    }


# What transformers 4.56 added to text_config when the published wrapper config was saved. None of it means anything.
_K25_NOISE: Config = {
    "_name_or_path": "",
    "add_cross_attention": False,
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "decoder_start_token_id": None,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "dtype": "bfloat16",
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None,
    "finetuning_task": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "is_decoder": False,
    "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "length_penalty": 1.0,
    "max_length": 20,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_scores": False,
    "prefix": None,
    "problem_type": None,
    "pruned_heads": {},
    "remove_invalid_values": False,
    "repetition_penalty": 1.0,
    "return_dict": True,
    "return_dict_in_generate": False,
    "sep_token_id": None,
    "suppress_tokens": None,
    "task_specific_params": None,
    "temperature": 1.0,
    "tf_legacy_loss": False,
    "tie_encoder_decoder": False,
    "tokenizer_class": None,
    "top_k": 50,
    "top_p": 1.0,
    "torchscript": False,
    "transformers_version": "4.56.2",
    "typical_p": 1.0,
    "use_bfloat16": False,
}


def _kimi_k25() -> Config:
    text = _text(
        "kimi_k2",
        aux_loss_alpha=0.001,
        bos_token_id=120,
        eos_token_id=121,
        max_position_embeddings=64 * ORIGINAL_CONTEXT,
        moe_intermediate_size=256,  # one INT4 group of 32 inputs for each of 8 devices
        num_hidden_layers=4,
        pad_token_id=127,
        rms_norm_eps=1e-05,
        rope_scaling=_yarn(64.0, beta_fast=32.0),
        rope_theta=50000.0,
        seq_aux=True,
        **_K25_NOISE,
    )
    del text["torch_dtype"]  # newer transformers say dtype
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "configuration_kimi_k25.KimiK25Config",
            "AutoModel": "modeling_kimi_k25.KimiK25ForConditionalGeneration",
            "AutoModelForCausalLM": "modeling_kimi_k25.KimiK25ForConditionalGeneration",
        },
        "bos_token_id": 120,
        "dtype": "bfloat16",
        "eos_token_id": 121,
        "ignore_index": -100,
        "media_placeholder_token_id": 125,
        "model_type": "kimi_k25",
        "pad_token_id": 127,
        "text_config": text,
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "vision_config": {
            "_attn_implementation": "flash_attention_2",
            "init_pos_emb_height": 64,
            "init_pos_emb_time": 4,
            "init_pos_emb_width": 64,
            "merge_kernel_size": [2, 2],
            "merge_type": "sd2_tpool",
            "mm_hidden_size": 32,
            "mm_projector_type": "patchmerger",
            "patch_size": 14,
            "pos_emb_type": "divided_fixed",
            "projector_hidden_act": "gelu",
            "projector_ln_eps": 1e-05,
            "text_hidden_size": 64,
            "video_attn_type": "spatial_temporal",
            "vt_hidden_size": 32,
            "vt_intermediate_size": 48,
            "vt_num_attention_heads": 2,
            "vt_num_hidden_layers": 2,
        },
    }


FAMILIES: dict[str, Config] = {
    "kimi_k25": _kimi_k25(),
    "kimi_k2_thinking": _text(
        "kimi_k2",
        aux_loss_alpha=0.001,
        bos_token_id=120,
        eos_token_id=122,
        max_position_embeddings=64 * ORIGINAL_CONTEXT,
        rms_norm_eps=1e-05,
        rope_scaling=_yarn(64.0, beta_fast=1.0),
        rope_theta=50000.0,
        seq_aux=True,
    ),
    "kimi_k2": _text(
        "kimi_k2",
        aux_loss_alpha=0.001,
        bos_token_id=120,
        eos_token_id=121,
        max_position_embeddings=32 * ORIGINAL_CONTEXT,
        rms_norm_eps=1e-06,
        rope_scaling=_yarn(32.0, beta_fast=1.0),
        rope_theta=50000.0,
        seq_aux=True,
    ),
    "deepseek_v3": _text(
        "deepseek_v3",
        first_k_dense_replace=3,
        max_position_embeddings=40 * ORIGINAL_CONTEXT,
        n_group=8,
        n_routed_experts=32,
        num_hidden_layers=5,
        num_nextn_predict_layers=1,
        rms_norm_eps=1e-06,
        rope_scaling=_yarn(40, beta_fast=32),
        rope_theta=10000,
        routed_scaling_factor=2.5,
        topk_group=4,
    ),
    "moonlight": _text(
        "deepseek_v3",
        aux_loss_alpha=0.001,
        bos_token_id=120,
        eos_token_id=122,
        max_position_embeddings=1024,
        n_shared_experts=2,
        q_lora_rank=None,
        rms_norm_eps=1e-05,
        rope_scaling=None,
        rope_theta=50000.0,
        routed_scaling_factor=2.446,
        seq_aux=True,
    ),
    "deepseek_v2_lite": _text(
        "deepseek_v2",
        aux_loss_alpha=0.001,
        max_position_embeddings=40 * ORIGINAL_CONTEXT,
        n_shared_experts=2,
        norm_topk_prob=False,
        q_lora_rank=None,
        rms_norm_eps=1e-06,
        rope_scaling=_yarn(40, beta_fast=32, mscale=0.707),
        rope_theta=10000,
        routed_scaling_factor=1.0,
        scoring_func="softmax",
        seq_aux=True,
        topk_method="greedy",
    ),
}

# The form in which each family's weights are published; None is plain bf16.
PUBLISHED_QUANTIZATION: dict[str, Quantization | None] = {
    "kimi_k25": "int4",
    "kimi_k2_thinking": "int4",
    "kimi_k2": "fp8",
    "deepseek_v3": "fp8",
    "moonlight": None,
    "deepseek_v2_lite": None,
}

_QUANTIZATION_CONFIG: dict[Quantization, Config] = {
    "int4": {
        "config_groups": {
            "group_0": {
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": None,
                    "block_structure": None,
                    "dynamic": False,
                    "group_size": 32,
                    "num_bits": 4,
                    "observer": "minmax",
                    "observer_kwargs": {},
                    "strategy": "group",
                    "symmetric": True,
                    "type": "int",
                },
            }
        },
        "format": "pack-quantized",
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        ],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    },
    "fp8": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}


def text_config(config: Config) -> Config:
    """The text model's part of a `config.json`: the nested one of a wrapper, else the whole."""
    return config.get("text_config", config)


def with_quantization(config: Config, quantization: Quantization | None) -> Config:
    """A copy of `config` that says how the weights are quantised, where the family says it (None: not quantised)."""
    config = copy.deepcopy(config)
    text = text_config(config)
    text.pop("quantization_config", None)
    if quantization is not None:
        text["quantization_config"] = copy.deepcopy(_QUANTIZATION_CONFIG[quantization])
    return config
