"""Model configuration, read strictly from a checkpoint's own files into frozen dataclasses.

Every key of a `config.json` is either read here, checked to have the one value that is implemented, or on the explicit
list of serialisation noise. Any other key is refused by name: a field that changes the maths never passes unseen.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .config_reader import Reader, read_json
from .errors import ConfigError
from .generation_config import GenerationDefaults, load_generation_defaults

__all__ = [
    "Fp8BlockConfig",
    "GenerationDefaults",
    "Int4Config",
    "MoEConfig",
    "TargetConfig",
    "YarnConfig",
    "load_config",
    "load_generation_defaults",
    "parse_config",
    "read_json",
]

WRAPPERS = ("kimi_k25",)
TEXT_TYPES = ("kimi_k2", "deepseek_v3", "deepseek_v2")


@dataclass(frozen=True)
class YarnConfig:
    """YaRN context extension (arXiv:2309.00071), with DeepSeek's two mscale fields."""

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True)
class MoEConfig:
    """Routed experts of a layer. `sigmoid`: DeepSeek-V3's biased, group-limited choice; `softmax`: V2-Lite's greedy."""

    n_experts: int
    n_chosen: int
    n_shared: int
    expert_width: int
    n_groups: int
    n_groups_kept: int
    scoring: Literal["sigmoid", "softmax"]
    renormalise: bool
    scale: float

    @property
    def has_bias(self) -> bool:
        return self.scoring == "sigmoid"


@dataclass(frozen=True)
class Int4Config:
    """compressed-tensors `pack-quantized`: symmetric INT4 with one bf16 scale per `group_size` inputs."""

    group_size: int = 32


@dataclass(frozen=True)
class Fp8BlockConfig:
    """DeepSeek-V3's fp8 e4m3 weights with one f32 scale per block of [out, in]."""

    block: tuple[int, int] = (128, 128)


@dataclass(frozen=True)
class TargetConfig:
    """A target of the DeepSeek-V3 family: Kimi-K2.x, K2-Thinking, K2-Instruct, DeepSeek-V3, Moonlight, V2-Lite."""

    model_type: str
    text_type: str
    vocab_size: int
    hidden: int
    n_layers: int
    n_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    dense_width: int
    n_dense_layers: int
    moe: MoEConfig | None
    norm_eps: float
    latent_norm_eps: float
    rope_theta: float
    yarn: YarnConfig | None
    max_positions: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    quantization: Int4Config | Fp8BlockConfig | None
    n_mtp_layers: int = 0
    has_vision: bool = False

    @property
    def qk_dim(self) -> int:
        """Width of a query or key head: the part without position, then the roped part."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """Values cached per token and layer: the normed latent, then the roped key."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def is_wrapped(self) -> bool:
        return self.model_type in WRAPPERS

    def is_moe_layer(self, layer: int) -> bool:
        return self.moe is not None and layer >= self.n_dense_layers


# Keys that transformers writes for every model and that do not touch this architecture's inference maths.
NOISE = frozenset(
    """_name_or_path _attn_implementation _attn_implementation_autoset add_cross_attention architectures
    attention_dropout attn_implementation auto_map aux_loss_alpha bad_words_ids begin_suppress_tokens
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype
    early_stopping encoder_no_repeat_ngram_size ep_size exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id head_dim id2label ignore_index initializer_range is_decoder
    is_encoder_decoder label2id length_penalty max_length media_placeholder_token_id min_length no_repeat_ngram_size
    num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states output_router_logits
    output_scores prefix pretraining_tp problem_type pruned_heads remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate router_aux_loss_coef sep_token_id seq_aux suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers_version
    typical_p unsloth_fixed use_bfloat16 use_cache use_unified_vision_chunk video_placeholder
    image_token_id video_token_id vision_start_token_id vision_end_token_id projection_hidden_size
    projection_layer_norm_eps""".split()
)

# Keys that would change the maths; only these values are implemented (a missing key means the same).
_FIXED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "tie_word_embeddings": (False,),
    "moe_layer_freq": (1,),
    "rope_interleave": (True,),
    "sliding_window": (None,),
    "use_sliding_window": (False,),
    "moe_router_dtype": (None, "float32"),
    "attn_module_list_cfg": (None,),
    "linear_attn_config": (None,),
    "index_topk": (None,),
}


def load_config(path: str | Path, *, latent_norm_eps: float | None = None) -> TargetConfig:
    """The configuration of a checkpoint directory (or of a `config.json` alone).

    Args:
      path: directory holding `config.json` and, optionally, `generation_config.json`; or the JSON file itself.
      latent_norm_eps: eps of the q_a and kv_a norms. None takes `rms_norm_eps`, as vLLM and SGLang do; 1e-6 is what
        transformers and DeepSeek's own code apply whatever the file says.
    Raises:
      ConfigError: names the first field that is missing, mistyped, unknown or not supported.
    """
    path = Path(path)
    file = path if path.suffix == ".json" else path / "config.json"
    config = parse_config(read_json(file), latent_norm_eps=latent_norm_eps)
    eos = load_generation_defaults(file.parent).eos_token_ids
    merged = tuple(dict.fromkeys((*eos, *config.eos_token_ids)))  # generation_config's id first: it is the turn's end
    return dataclasses.replace(config, eos_token_ids=merged)


def parse_config(data: Mapping[str, Any], *, latent_norm_eps: float | None = None) -> TargetConfig:
    """The configuration of a parsed `config.json`; see `load_config`."""
    outer = Reader(data, "config")
    model_type = outer.one_of("model_type", (*WRAPPERS, *TEXT_TYPES))
    if model_type not in WRAPPERS:
        return _parse_text(outer, model_type, data.get("quantization_config"), latent_norm_eps)
    text = outer.get("text_config", dict)
    outer.get("vision_config", dict, None)
    quant, outer_quant = text.get("quantization_config"), outer.get("quantization_config", (dict, type(None)), None)
    if quant and outer_quant and quant != outer_quant:
        raise ConfigError("config.quantization_config", outer_quant, f"the same as text_config's {quant!r}")
    inner = Reader(text, "config.text_config")
    text_type = inner.one_of("model_type", TEXT_TYPES)
    config = _parse_text(inner, text_type, quant or outer_quant, latent_norm_eps)
    for key in ("bos_token_id", "pad_token_id", "eos_token_id"):
        outer.seen.add(key)
    for key, allowed in _FIXED.items():
        outer.one_of(key, allowed, allowed[0])
    outer.finish(NOISE)
    eos = tuple(dict.fromkeys((*outer.token_ids("eos_token_id"), *config.eos_token_ids)))
    return dataclasses.replace(config, model_type=model_type, eos_token_ids=eos, has_vision="vision_config" in data)


def _parse_text(r: Reader, model_type: str, quant: Any, latent_norm_eps: float | None) -> TargetConfig:
    r.seen |= {"model_type", "quantization_config"}
    for key, allowed in _FIXED.items():
        r.one_of(key, allowed, allowed[0])
    n_heads, n_layers = r.positive("num_attention_heads"), r.positive("num_hidden_layers")
    kv_heads = r.positive("num_key_value_heads", n_heads)
    if kv_heads != n_heads:
        raise ConfigError(f"{r.where}.num_key_value_heads", kv_heads, f"num_attention_heads ({n_heads}): MLA has one")
    theta, yarn = _parse_rope(r)
    eps = _eps(f"{r.where}.rms_norm_eps", r.get("rms_norm_eps", float))
    config = TargetConfig(
        model_type=model_type,
        text_type=model_type,
        vocab_size=r.positive("vocab_size"),
        hidden=r.positive("hidden_size"),
        n_layers=n_layers,
        n_heads=n_heads,
        q_lora_rank=_optional_rank(r),
        kv_lora_rank=r.positive("kv_lora_rank"),
        nope_dim=r.positive("qk_nope_head_dim"),
        rope_dim=r.positive("qk_rope_head_dim"),
        v_dim=r.positive("v_head_dim"),
        dense_width=r.positive("intermediate_size"),
        n_dense_layers=r.get("first_k_dense_replace", int, 0),
        moe=_parse_moe(r),
        norm_eps=eps,
        latent_norm_eps=eps if latent_norm_eps is None else _eps("latent_norm_eps", latent_norm_eps),
        rope_theta=theta,
        yarn=yarn,
        max_positions=r.positive("max_position_embeddings"),
        bos_token_id=r.get("bos_token_id", (int, type(None)), None),
        eos_token_ids=r.token_ids("eos_token_id"),
        pad_token_id=r.get("pad_token_id", (int, type(None)), None),
        quantization=_parse_quantization(quant, f"{r.where}.quantization_config"),
        n_mtp_layers=r.get("num_nextn_predict_layers", int, 0),
    )
    r.finish(NOISE)
    _check_dims(config, r.where)
    return config


def _eps(name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(name, value, "a finite number above 0")
    return value


def _check_dims(c: TargetConfig, where: str) -> None:
    if c.rope_dim % 2:
        raise ConfigError(f"{where}.qk_rope_head_dim", c.rope_dim, "an even number: RoPE rotates pairs")
    if c.n_dense_layers < 0 or (c.moe is None and c.n_dense_layers < c.n_layers):
        raise ConfigError(f"{where}.first_k_dense_replace", c.n_dense_layers, "the layers without routed experts")
    if isinstance(c.quantization, Int4Config) and c.moe is not None:
        for field, width in (("hidden_size", c.hidden), ("moe_intermediate_size", c.moe.expert_width)):
            if width % c.quantization.group_size:
                raise ConfigError(
                    f"{where}.{field}", width, f"a multiple of the group size {c.quantization.group_size}"
                )


def _optional_rank(r: Reader) -> int | None:
    rank = r.get("q_lora_rank", (int, type(None)), None)
    if rank is not None and rank <= 0:
        raise ConfigError(f"{r.where}.q_lora_rank", rank, "null or a positive integer")
    return rank


def _parse_moe(r: Reader) -> MoEConfig | None:
    n_experts = r.get("n_routed_experts", (int, type(None)), None)
    method = r.one_of("topk_method", ("noaux_tc", "greedy", None), None)
    scoring = r.one_of("scoring_func", ("sigmoid", "softmax", None), None)
    n_groups = r.get("n_group", (int, type(None)), None) or 1
    n_groups_kept = r.get("topk_group", (int, type(None)), None) or 1
    n_shared = r.get("n_shared_experts", (int, type(None)), None) or 0
    renormalise: bool = r.get("norm_topk_prob", bool, False)
    scale: float = r.get("routed_scaling_factor", float, 1.0)
    if n_experts is None:
        r.seen |= {"num_experts_per_tok", "moe_intermediate_size"}
        return None
    implemented: dict[Any, Literal["sigmoid", "softmax"]] = {
        ("sigmoid", "noaux_tc"): "sigmoid",
        ("softmax", "greedy"): "softmax",
    }
    if (scoring, method) not in implemented:
        raise ConfigError(
            f"{r.where}.scoring_func with topk_method", (scoring, method), "(sigmoid, noaux_tc) or (softmax, greedy)"
        )
    config = MoEConfig(
        n_experts=n_experts,
        n_chosen=r.positive("num_experts_per_tok"),
        n_shared=n_shared,
        expert_width=r.positive("moe_intermediate_size"),
        n_groups=n_groups,
        n_groups_kept=n_groups_kept,
        scoring=implemented[scoring, method],
        renormalise=renormalise,
        scale=scale,
    )
    if config.n_shared < 0:
        raise ConfigError(f"{r.where}.n_shared_experts", config.n_shared, "0 or more")
    if config.n_chosen > n_experts:
        raise ConfigError(f"{r.where}.num_experts_per_tok", config.n_chosen, f"at most n_routed_experts ({n_experts})")
    if config.n_experts % config.n_groups or not 1 <= config.n_groups_kept <= config.n_groups:
        found = (config.n_groups, config.n_groups_kept)
        raise ConfigError(f"{r.where}.n_group and topk_group", found, f"groups that divide {n_experts} experts")
    if 1 < config.n_groups == n_experts:
        raise ConfigError(
            f"{r.where}.n_group", config.n_groups, "groups of 2 experts or more: a group's score sums two"
        )
    if config.n_groups_kept * (n_experts // config.n_groups) < config.n_chosen:
        raise ConfigError(f"{r.where}.topk_group", config.n_groups_kept, f"groups that hold {config.n_chosen} experts")
    if scoring == "softmax" and config.n_groups != 1:
        raise ConfigError(f"{r.where}.n_group", config.n_groups, "1: softmax routing with groups is not implemented")
    return config


def _parse_rope(r: Reader) -> tuple[float, YarnConfig | None]:
    """RoPE base and YaRN from `rope_theta` + `rope_scaling`, or from transformers-5 `rope_parameters`."""
    scaling = r.get("rope_scaling", (dict, type(None)), None)
    parameters = r.get("rope_parameters", (dict, type(None)), None)
    theta = r.get("rope_theta", float, None)
    where = f"{r.where}.rope_scaling"
    if parameters is not None:
        where = f"{r.where}.rope_parameters"
        parameters = dict(parameters)
        new_theta = parameters.pop("rope_theta", theta)
        if theta is not None and new_theta != theta:
            raise ConfigError(f"{where}.rope_theta", new_theta, f"the same as rope_theta ({theta})")
        if scaling is not None and scaling != parameters:
            raise ConfigError(where, parameters, f"the same as rope_scaling {scaling!r}")
        theta, scaling = new_theta, parameters
    if theta is None:
        raise ConfigError(f"{r.where}.rope_theta", "no such key", "a number")
    if not scaling:
        return float(theta), None
    s = Reader(scaling, where)
    names = {s.data[k] for k in ("type", "rope_type") if k in s.data}
    s.seen |= {"type", "rope_type"}
    if names == {"default"}:
        s.finish()
        return float(theta), None
    if names != {"yarn"}:
        raise ConfigError(f"{where}.type", sorted(names), "'yarn' (or no scaling)")
    yarn = YarnConfig(
        factor=s.get("factor", float),
        original_max_positions=s.positive("original_max_position_embeddings"),
        beta_fast=s.get("beta_fast", float),
        beta_slow=s.get("beta_slow", float),
        mscale=s.get("mscale", float),
        mscale_all_dim=s.get("mscale_all_dim", float),
    )
    s.finish()
    return float(theta), yarn


def _parse_quantization(q: Any, where: str) -> Int4Config | Fp8BlockConfig | None:
    if q is None:
        return None
    r = Reader(q, where)
    if r.one_of("quant_method", ("compressed-tensors", "fp8")) == "fp8":
        r.one_of("fmt", ("e4m3",), "e4m3")
        block = r.get("weight_block_size", list)
        if len(block) != 2 or not all(isinstance(b, int) and b > 0 for b in block):
            raise ConfigError(f"{where}.weight_block_size", block, "two positive integers [out, in]")
        r.finish(frozenset({"activation_scheme"}))  # activations stay bf16: the weights are dequantised on load
        return Fp8BlockConfig((block[0], block[1]))
    r.one_of("format", ("pack-quantized",))
    r.one_of("quantization_status", ("compressed",), "compressed")
    r.one_of("kv_cache_scheme", (None,), None)
    groups = r.get("config_groups", dict)
    if len(groups) != 1:
        raise ConfigError(f"{where}.config_groups", sorted(groups), "exactly one group")
    name, group = next(iter(groups.items()))
    g = Reader(group, f"{where}.config_groups.{name}")
    g.one_of("input_activations", (None,), None)
    g.one_of("output_activations", (None,), None)
    w = Reader(g.get("weights", dict), f"{g.where}.weights")
    w.one_of("num_bits", (4,))
    w.one_of("type", ("int",))
    w.one_of("symmetric", (True,))
    w.one_of("strategy", ("group",))
    w.one_of("group_size", (32,))
    w.one_of("dynamic", (False,), False)
    w.one_of("actorder", (None,), None)
    w.one_of("block_structure", (None,), None)
    w.finish(frozenset({"observer", "observer_kwargs", "scale_dtype", "zp_dtype"}))
    # `targets` and `ignore` are not decisive: a tensor is INT4 if and only if its weight_packed is in the files.
    g.finish(frozenset({"targets", "format"}))
    r.finish(frozenset({"ignore", "global_compression_ratio", "sparsity_config", "transform_config", "version"}))
    return Int4Config(group_size=32)
