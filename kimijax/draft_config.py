"""Configuration of an EAGLE-3 drafter (arXiv:2503.01840), read strictly from the forms in which drafts are published.

Four forms are read: SGLang's and vLLM's Llama-style heads, DeepSeek-style heads with latent attention (MLA), and
speculators' nested form. As for the target, every key is read, checked to have the one value that is implemented, or
known to be harmless; any other is refused by name. Which streams of the target feed the head is not decided here: the
wiring says, and this configuration must fit it.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import NOISE as TARGET_NOISE
from .config import TargetConfig, parse_config, read_json
from .config_reader import Reader
from .errors import ConfigError
from .wiring import Wiring


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's change of the rotary frequencies: slow pairs are slowed by `factor`, with a ramp in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class LlamaYarn:
    """YaRN (arXiv:2309.00071) as Llama models apply it: cos and sin are multiplied by 0.1 ln(factor) + 1."""

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True)
class LlamaAttentionConfig:
    """Grouped-query attention with rotary positions on halves (pairs (i, i + head_dim / 2))."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope_theta: float
    scaling: Llama3Scaling | LlamaYarn | None = None


@dataclass(frozen=True)
class DraftConfig:
    """A one-layer EAGLE-3 head.

    `attention` is Llama's, or for an MLA head the sizes of its attention as those of a one-layer target of the same
    width. The four flags say which norms act where: `fc_norm` one norm for each tap before fc (EAGLE-3.1),
    `norm_before_fc` one norm over all taps together, `norm_before_residual` the residual starts from the normed
    features, `norm_output` the next step is fed the output of the final norm (EAGLE-3.1) and not its input.

    Raises:
      ConfigError: sizes that do not fit together.
    """

    attention: LlamaAttentionConfig | TargetConfig
    vocab_size: int  # the target's
    draft_vocab_size: int  # of the head; fewer than vocab_size: a reduced vocabulary
    hidden: int
    target_hidden: int
    n_taps: int
    mlp_width: int
    norm_eps: float
    max_positions: int
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    window: int | None = None  # a query sees keys less than this many positions back, itself included

    def __post_init__(self) -> None:
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ConfigError("draft_vocab_size", self.draft_vocab_size, f"1 to vocab_size ({self.vocab_size})")
        if self.n_taps < 1:
            raise ConfigError("n_taps", self.n_taps, "at least 1")
        if self.window is not None and self.window < 1:
            raise ConfigError("window", self.window, "None or at least 1")
        a = self.attention
        if isinstance(a, TargetConfig):
            if a.hidden != self.hidden:
                raise ConfigError("attention.hidden", a.hidden, f"hidden ({self.hidden})")
        elif a.n_heads % a.n_kv_heads or a.head_dim % 2:
            found = (a.n_heads, a.n_kv_heads, a.head_dim)
            raise ConfigError("n_heads, n_kv_heads, head_dim", found, "heads that divide into groups, an even head_dim")

    @property
    def fused_width(self) -> int:
        """Inputs of fc: all taps side by side."""
        return self.n_taps * self.target_hidden

    @property
    def is_mla(self) -> bool:
        return isinstance(self.attention, TargetConfig)

    @property
    def is_reduced(self) -> bool:
        """Whether draft ids differ from target ids."""
        return self.draft_vocab_size < self.vocab_size

    @property
    def cache_width(self) -> int:
        """Values cached for each token: the latent and the roped key, or keys and values of all heads."""
        a = self.attention
        return a.latent_dim if isinstance(a, TargetConfig) else 2 * a.n_kv_heads * a.head_dim

    def check_wiring(self, wiring: Wiring) -> None:
        """Refuse a wiring of another width. ConfigError names both widths."""
        found = (len(wiring.taps), wiring.target_hidden)
        if found != (self.n_taps, self.target_hidden):
            expected = f"{(self.n_taps, self.target_hidden)}, which makes the {self.fused_width} inputs of fc"
            fix = "use the wiring that the draft was trained with, on the target that it was trained for"
            raise ConfigError("wiring (taps, target_hidden)", found, expected, fix)


def mla_attention(
    config: TargetConfig, *, hidden: int, mlp_width: int, norm_eps: float, max_positions: int
) -> TargetConfig:
    """The attention sizes of a target as those of a one-layer dense model, free of what attention does not read.

    The latent norms get the eps of the others, as in vLLM and SGLang.
    """
    return dataclasses.replace(
        config,
        model_type="deepseek_v3",
        text_type="deepseek_v3",
        hidden=hidden,
        n_layers=1,
        n_dense_layers=1,
        dense_width=mlp_width,
        moe=None,
        norm_eps=norm_eps,
        latent_norm_eps=norm_eps,
        quantization=None,
        n_mtp_layers=0,
        has_vision=False,
        max_positions=max_positions,
        bos_token_id=None,
        eos_token_ids=(),
        pad_token_id=None,
    )


_LLAMA = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_MLA = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM", "DeepSeekForCausalLMEagle3")
_SPECULATORS = ("Eagle3DraftModel", "Eagle3Speculator")
# Drafts of EAGLE-1 and EAGLE-2: they take the last hidden state alone, and have no fusion layer.
_OLDER = ("LlamaForCausalLMEagle", "EagleLlamaForCausalLM", "EagleDeepSeekMTPModel", "EagleDeepseekV3ForCausalLM")

_NOISE = TARGET_NOISE | frozenset(
    """base_model_ep_plan base_model_tp_plan bos_token_id embed_requires_grad enable_sp_ulysses eos_token_id
    has_no_defaults_at_init kimijax max_window_layers pad_token_id""".split()
)
# A draft with latent attention carries the target's MoE fields, but its MLP is dense.
_MOE = frozenset(
    """first_k_dense_replace n_routed_experts n_shared_experts moe_intermediate_size num_experts_per_tok n_group
    topk_group topk_method scoring_func norm_topk_prob routed_scaling_factor moe_layer_freq num_nextn_predict_layers
    max_window_layers kimijax""".split()
)
_FIXED: dict[str, tuple[object, ...]] = {
    "num_hidden_layers": (1,),
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "bias": (False,),  # of fc
    "tie_word_embeddings": (False,),
    "logit_scale": (1.0,),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (None,),
}
# ModelOpt writes null for what its configuration does not have.
_EAGLE_FIXED: dict[str, tuple[object, ...]] = {
    "use_input_layernorm_in_first_layer": (True, None),
    "use_last_layernorm": (True, None),
    "use_mtp_layernorm": (False, None),
    "next_layer_regular": (True, None),
    "parallel_draft_step": (1, None),
    "parallel_draft_heads_num_layers": (1, None),
}
# speculators writes only what differs from transformers' LlamaConfig: a missing key means these values.
_LLAMA_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}


def load_draft_config(path: str | Path, wiring: Wiring) -> DraftConfig:
    """The configuration of a draft directory (or of its `config.json`); see `parse_draft_config`."""
    path = Path(path)
    return parse_draft_config(read_json(path if path.suffix == ".json" else path / "config.json"), wiring)


def parse_draft_config(data: Mapping[str, Any], wiring: Wiring) -> DraftConfig:
    """The configuration of a parsed `config.json`.

    Args:
      data: of any of the published forms; the ids of layers in it are read by the wiring's importers, not here.
      wiring: what feeds the head. It decides how many taps there are: a list of ids in the file may hold one more.
    Raises:
      ConfigError: names the first field that is missing, mistyped, unknown, not supported or at odds with the wiring.
    """
    r = Reader(data, "config")
    kind = _kind(r)
    if kind == "speculators":
        config = _parse_speculators(r, wiring)
    elif kind == "mla":
        config = _parse_mla(r, wiring)
    else:
        r.one_of("model_type", ("llama", "kimi_k2", "deepseek_v3"), "llama")  # SpecForge gives its Llama heads Kimi's
        config = _parse_llama(r, r, _features(r, wiring, r.positive("hidden_size")))
        r.finish(_NOISE)
    config.check_wiring(wiring)
    return config


def _kind(r: Reader) -> str:
    """llama, mla or speculators, by the architecture's name."""
    names: list[Any] = r.get("architectures", list)
    known = {**dict.fromkeys(_LLAMA, "llama"), **dict.fromkeys(_MLA, "mla")}
    known |= dict.fromkeys(_SPECULATORS, "speculators")
    if r.data.get("draft_vocab_size") is not None:
        known["LlamaForCausalLM"] = "llama"  # the EAGLE reference's own drafts; only EAGLE-3 has a draft vocabulary
    name = names[0] if len(names) == 1 else None
    if name in known:
        return known[name]
    fix = "this is a draft of EAGLE-1 or EAGLE-2: train or fetch an EAGLE-3 draft" if name in _OLDER else ""
    raise ConfigError("config.architectures", names, "one of " + ", ".join(known), fix)


def _features(r: Reader, wiring: Wiring, hidden: int) -> dict[str, Any]:
    """Fields that say what feeds the head and which norms it has."""
    eagle = Reader(r.get("eagle_config", (dict, type(None)), None) or {}, f"{r.where}.eagle_config")
    for reader in (r, eagle):
        ids: list[Any] | None = reader.get("eagle_aux_hidden_state_layer_ids", (list, type(None)), None)
        if ids is not None and not all(type(i) is int for i in ids):
            raise ConfigError(f"{reader.where}.eagle_aux_hidden_state_layer_ids", ids, "a list of layer ids")
    eagle.one_of("use_aux_hidden_state", (True, None), None, "the head takes one hidden state, not several: EAGLE-1")
    for key, allowed in _EAGLE_FIXED.items():
        eagle.one_of(key, allowed, allowed[0])
    inside = eagle.get("norm_before_fc", (bool, type(None)), None)
    outside = r.get("norm_before_fc", (bool, type(None)), None)
    if None not in (inside, outside) and inside != outside:
        raise ConfigError(f"{eagle.where}.norm_before_fc", inside, f"the same as {r.where}.norm_before_fc ({outside})")
    eagle.finish(frozenset({"has_lm_head"}))
    fc_norm = r.get("fc_norm", (bool, type(None)), None)
    legacy = r.get("use_aux_norm", (bool, type(None)), None)
    count = r.get("num_aux_hidden_states", (int, type(None)), None)
    if count not in (None, len(wiring.taps)):
        raise ConfigError(f"{r.where}.num_aux_hidden_states", count, f"the number of the wiring's taps {wiring.taps}")
    return {
        "n_taps": len(wiring.taps),
        "target_hidden": r.get("target_hidden_size", (int, type(None)), None) or hidden,
        "fc_norm": bool(fc_norm or legacy),
        "norm_before_fc": bool(inside or outside),
        "norm_before_residual": r.get("norm_before_residual", bool, False),
        "norm_output": r.get("norm_output", bool, False),
    }


def _draft_vocabulary(r: Reader, vocab_size: int) -> int:
    """Size of the head's vocabulary; null or no key: the target's."""
    sizes = [r.get(key, (int, type(None)), None) for key in ("draft_vocab_size", "truncated_vocab_size")]
    found = {s for s in sizes if s is not None} or {vocab_size}
    if len(found) > 1:
        raise ConfigError(f"{r.where}.truncated_vocab_size", sizes[1], f"the same as draft_vocab_size ({sizes[0]})")
    return found.pop()


def _parse_llama(r: Reader, outer: Reader, features: dict[str, Any]) -> DraftConfig:
    """A Llama head, its layer described by `r`; `outer` has the draft vocabulary."""
    for key, allowed in _FIXED.items():
        r.one_of(key, allowed, allowed[0])
    hidden, n_heads, vocab_size = (r.positive(k) for k in ("hidden_size", "num_attention_heads", "vocab_size"))
    head_dim = r.get("head_dim", (int, type(None)), None)
    if head_dim is None and hidden % n_heads:
        raise ConfigError(f"{r.where}.head_dim", head_dim, f"a number, as {n_heads} heads do not divide {hidden}")
    theta, scaling = _parse_rope(r)
    return DraftConfig(
        attention=LlamaAttentionConfig(
            n_heads=n_heads,
            n_kv_heads=r.positive("num_key_value_heads", n_heads),
            head_dim=head_dim or hidden // n_heads,
            rope_theta=theta,
            scaling=scaling,
        ),
        vocab_size=vocab_size,
        draft_vocab_size=_draft_vocabulary(outer, vocab_size),
        hidden=hidden,
        mlp_width=r.positive("intermediate_size"),
        norm_eps=r.get("rms_norm_eps", float),
        max_positions=r.positive("max_position_embeddings"),
        window=_parse_window(r),
        **features,
    )


def _parse_window(r: Reader) -> int | None:
    """The attention window. `layer_types` decides, as in vLLM and speculators; without it a width is ambiguous."""
    width: int | None = r.get("sliding_window", (int, type(None)), None)
    used: bool | None = r.get("use_sliding_window", (bool, type(None)), None)
    types: list[Any] | None = r.get("layer_types", (list, type(None)), None)
    if types is None:
        if width is not None and used is not False:
            fix = 'add layer_types: ["sliding_attention"] to apply the window, ["full_attention"] to ignore it'
            raise ConfigError(f"{r.where}.sliding_window", width, "null, or a layer_types that says if it applies", fix)
        return None
    if types not in (["full_attention"], ["sliding_attention"]):
        raise ConfigError(f"{r.where}.layer_types", types, "['full_attention'] or ['sliding_attention']")
    sliding = types == ["sliding_attention"]
    if used not in (None, sliding):
        raise ConfigError(f"{r.where}.use_sliding_window", used, f"{sliding}, as layer_types is {types}")
    if sliding and width is None:
        raise ConfigError(f"{r.where}.sliding_window", width, "the width of the window")
    return width if sliding else None


def _parse_rope(r: Reader) -> tuple[float, Llama3Scaling | LlamaYarn | None]:
    """RoPE base and scaling from `rope_theta` + `rope_scaling`, or from transformers-5 `rope_parameters`."""
    theta = r.get("rope_theta", float, None)
    scaling = r.get("rope_scaling", (dict, type(None)), None)
    parameters = r.get("rope_parameters", (dict, type(None)), None)
    if parameters is not None and scaling not in (None, parameters):
        raise ConfigError(f"{r.where}.rope_scaling", scaling, f"the same as rope_parameters {parameters!r}")
    key = "rope_scaling" if parameters is None else "rope_parameters"
    s = Reader((scaling if parameters is None else parameters) or {}, f"{r.where}.{key}")
    inner = s.get("rope_theta", float, theta)
    if inner is None or theta not in (None, inner):
        raise ConfigError(f"{r.where}.rope_theta", theta, "a number, the same wherever it is given")
    if not s.data:
        return inner, None
    kind = s.one_of("rope_type" if "rope_type" in s.data else "type", ("default", "llama3", "yarn"))
    s.seen.add("type")
    found: Llama3Scaling | LlamaYarn | None = None
    if kind == "llama3":
        low, high = s.get("low_freq_factor", float), s.get("high_freq_factor", float)
        original = s.positive("original_max_position_embeddings")
        found = Llama3Scaling(s.get("factor", float), low, high, original)
    elif kind == "yarn":
        fast, slow = s.get("beta_fast", float, 32.0), s.get("beta_slow", float, 1.0)
        found = LlamaYarn(s.get("factor", float), s.positive("original_max_position_embeddings"), fast, slow)
    s.finish()
    return inner, found


def _parse_speculators(r: Reader, wiring: Wiring) -> DraftConfig:
    r.one_of("speculators_model_type", ("eagle3",))
    layer: dict[str, Any] = r.get("transformer_layer_config", dict)
    base = {} if "rope_parameters" in layer else {"rope_theta": 10000.0}
    inner = Reader({**_LLAMA_DEFAULTS, **base, **layer}, f"{r.where}.transformer_layer_config")
    inner.one_of("model_type", ("llama",), fix="layers with norms on queries and keys (qwen3) are not implemented")
    if "norm_before_residual" not in r.data:
        fix = "vLLM takes true and speculators false: add the value that the draft was trained with"
        raise ConfigError(f"{r.where}.norm_before_residual", "no such key", "true or false", fix)
    r.one_of("tie_word_embeddings", (False,), False)
    meta = Reader(r.get("speculators_config", dict, {}), f"{r.where}.speculators_config")
    meta.one_of("algorithm", ("eagle3",), "eagle3")
    config = _parse_llama(inner, r, _features(r, wiring, inner.positive("hidden_size")))
    inner.finish(_NOISE | {"model_type"})
    r.finish(_NOISE | {"speculators_version"})
    return config


def _parse_mla(r: Reader, wiring: Wiring) -> DraftConfig:
    hidden = r.positive("hidden_size")
    features = _features(r, wiring, hidden)
    for key in ("num_hidden_layers", "bias", "logit_scale", "quantization_config"):
        r.one_of(key, _FIXED[key], _FIXED[key][0])
    draft_vocab_size = _draft_vocabulary(r, r.positive("vocab_size"))
    # What is left is the configuration of a dense one-layer model of the target's family.
    mine = r.seen - {"hidden_size", "vocab_size", "num_hidden_layers", "architectures"}
    rest = {key: value for key, value in r.data.items() if key not in mine | _MOE}
    target = parse_config({**rest, "first_k_dense_replace": 1})
    sizes: dict[str, Any] = {
        "hidden": hidden,
        "mlp_width": target.dense_width,
        "norm_eps": target.norm_eps,
        "max_positions": target.max_positions,
    }
    attention = mla_attention(target, **sizes)
    return DraftConfig(attention, target.vocab_size, draft_vocab_size, **sizes, **features)
