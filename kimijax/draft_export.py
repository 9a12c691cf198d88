"""Writes a drafter in the forms that other engines load: the inverse of `draft_checkpoint.load_draft`.

What an engine would silently not apply is refused, so that an exported draft never means less than the one trained.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, Literal

import jax
import numpy as np

from .checkpoint_writer import Unit, json_bytes, stream_units, units_of
from .config import TargetConfig
from .draft_checkpoint import draft_table
from .draft_config import DraftConfig, Llama3Scaling, LlamaAttentionConfig, LlamaYarn, parse_draft_config
from .drafter import Drafter
from .errors import ConfigError
from .names import Path, parameters
from .safetensors_io import TensorSpec, new_directory, write_file, write_synced
from .wiring import Wiring

DraftFormat = Literal["sglang", "vllm", "speculators"]
_LAYERS: dict[DraftFormat, str] = {"sglang": "midlayer", "vllm": "layers.0", "speculators": "layers.0"}
_ARCHITECTURES: dict[DraftFormat, str] = {
    "sglang": "LlamaForCausalLMEagle3",
    "vllm": "Eagle3LlamaForCausalLM",  # a name that SGLang refuses: it would load no layer from these files
    "speculators": "Eagle3DraftModel",
}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verifier:
    """The target, as a speculators config names it."""

    name_or_path: str
    architectures: tuple[str, ...]


def save_draft(
    drafter: Drafter,
    directory: str | FilePath,
    form: DraftFormat,
    *,
    dtype: Any = None,
    with_embedding: bool = False,
    with_head: bool = False,
    verifier: Verifier | None = None,
    speculative_tokens: int = 3,
    record: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Writes `model.safetensors`, `config.json` and `files`; all of them or none.

    Args:
      drafter: filled; every shard must be on this process's devices.
      directory: must not exist, or be empty.
      form: "sglang" (`midlayer.` names) and "vllm" (`layers.0.`) write a Llama head as LlamaForCausalLMEagle3 and
        Eagle3LlamaForCausalLM, an MLA head as Eagle3DeepseekV2ForCausalLM; "speculators" its nested config.
      dtype: float dtype to write; None: as the parameters are.
      with_embedding: also write the embedding if it is the target's. One of the draft's own is always written, and
        "speculators" always gets one: where the files have none, speculators 0.9 trains on uninitialised memory.
      with_head: likewise the head.
      verifier: the target, for "speculators".
      speculative_tokens: what a speculators config proposes.
      record: written as key `kimijax` of the config: wiring, fingerprint, probe.
      files: further files by name.
    Raises:
      ConfigError: a head that the engines of that form would not run as it is.
      ValueError: the directory is in use, or `verifier` is missing.
    """
    directory, config = FilePath(directory), drafter.config
    arrays: dict[Path, jax.Array] = {path: param.get_value() for path, param in parameters(drafter).items()}
    _check_tables(config, form, own_embed=("embed",) in arrays, has_head=with_head or ("lm_head",) in arrays)
    if with_embedding or form == "speculators":
        arrays["embed",] = drafter.embed.get_value()
    if with_head:
        arrays["lm_head",] = drafter.lm_head.get_value()
    dtype, has_head = np.dtype(drafter.dtype if dtype is None else dtype), ("lm_head",) in arrays
    data = draft_config_json(
        config,
        drafter.wiring,
        form,
        dtype=dtype,
        has_head=has_head,
        verifier=verifier,
        speculative_tokens=speculative_tokens,
    )
    if record is not None:
        data["kimijax"] = dict(record)
    if parse_draft_config(data, drafter.wiring) != config:
        raise ValueError(f"config: {config} cannot be written as {form}")
    table = draft_table(config, own_embed=("embed",) in arrays, own_head=has_head, layer=_LAYERS[form])
    units = [*units_of(arrays, table, False, dtype, ""), *_vocabulary_units(drafter)]
    with new_directory(directory) as part:
        specs = [spec for unit in units for spec in unit.specs]
        write_file(part / "model.safetensors", specs, stream_units(units, arrays))
        for name, content in {**(files or {}), "config.json": json_bytes(data)}.items():
            write_synced(part / name, lambda f, content=content: f.write(content))


def _vocabulary_units(drafter: Drafter) -> list[Unit]:
    """`d2t` (offsets) and `t2d` (mask) of a reduced vocabulary."""
    if not drafter.config.is_reduced:
        return []
    ids = np.asarray(drafter.target_ids.get_value()).astype(np.int64)
    mask = np.zeros(drafter.config.vocab_size, np.bool_)
    mask[ids] = True
    tensors = {"d2t": ids - np.arange(ids.shape[0]), "t2d": mask}
    return [Unit((TensorSpec(n, a.dtype, a.shape),), (), lambda _, a=a: (a,)) for n, a in tensors.items()]


def draft_config_json(
    config: DraftConfig,
    wiring: Wiring,
    form: DraftFormat,
    *,
    dtype: np.dtype,
    has_head: bool = True,
    verifier: Verifier | None = None,
    speculative_tokens: int = 3,
) -> dict[str, Any]:
    """The `config.json` of a form; see `save_draft`.

    The ids of the taps are written where each engine looks for them: SGLang in `eagle_config`, vLLM at the top level or
    there, llama.cpp at the top level only. SGLang (since its change of 2026-05, for targets of the DeepSeek family) and
    vLLM both read id i as the residual stream entering layer i, which is what a tap is.
    """
    if form not in _LAYERS:
        raise ConfigError("form", form, "one of " + ", ".join(_LAYERS))
    _check_engines(config, wiring, form)
    a, ids = config.attention, list(wiring.taps)
    outer: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[form]],
        # SGLang takes the target's head where this is null, and leaves its own at random where it is not.
        "draft_vocab_size": config.draft_vocab_size if has_head else None,
        "target_hidden_size": config.target_hidden,
        "num_aux_hidden_states": config.n_taps,
        "eagle_aux_hidden_state_layer_ids": ids,
        "fc_norm": config.fc_norm,
        "norm_before_fc": config.norm_before_fc,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "tie_word_embeddings": False,
        "torch_dtype": dtype.name,
    }
    layer: dict[str, Any] = {
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "intermediate_size": config.mlp_width,
        "max_position_embeddings": config.max_positions,
        "num_attention_heads": a.n_heads,
        "num_hidden_layers": 1,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": a.rope_theta,
        "vocab_size": config.vocab_size,
        "attention_bias": False,
    }
    layer |= _mla_fields(a) if isinstance(a, TargetConfig) else _llama_fields(a, config.window)
    if form == "speculators":
        if verifier is None:
            raise ValueError("verifier: found None, expected the target's name: a speculators config names it")
        return outer | _speculators_fields(layer, verifier, speculative_tokens)
    if isinstance(a, TargetConfig):
        outer["architectures"] = ["Eagle3DeepseekV2ForCausalLM"]
    return outer | layer | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}}


def _check_tables(config: DraftConfig, form: DraftFormat, *, own_embed: bool, has_head: bool) -> None:
    """Refuses tables that the form's engines would take from elsewhere."""
    if form == "sglang" and own_embed and config.hidden == config.target_hidden:
        expected, fix = "the target's: SGLang puts it in place of the draft's", "write it as vllm or speculators"
        raise ConfigError("sglang: embedding", "one of the draft's own", expected, fix)
    if form == "speculators" and not has_head:
        raise ConfigError("speculators: lm_head", "the target's", "one in the files", "pass with_head=True")


def _check_engines(config: DraftConfig, wiring: Wiring, form: DraftFormat) -> None:
    """Refuses what the form's engines would ignore (read in SGLang 0.5.23, vLLM 0.32 and speculators 0.9)."""
    a = config.attention

    def refuse(field: str, found: object, expected: str, fix: str = "") -> None:
        raise ConfigError(f"{form}: {field}", found, expected, fix)

    if form == "speculators" and config.is_mla:
        refuse("attention", "latent (MLA)", "a Llama head", "write it as sglang or vllm")
    if form == "speculators" and config.fc_norm and config.norm_before_fc:
        refuse("fc_norm with norm_before_fc", True, "one of them at most: speculators refuses both")
    if form == "speculators" and config.hidden != config.target_hidden:
        refuse("hidden", config.hidden, f"the target's width {config.target_hidden}", "write it as sglang or vllm")
    if form == "sglang" and config.norm_before_residual:
        refuse("norm_before_residual", True, "False: SGLang does not read it", "write it as vllm or speculators")
    if form == "sglang" and config.fused_width == config.hidden:
        refuse("hidden", config.hidden, "another width than the fused taps': SGLang then takes them for features")
    if config.is_mla and config.norm_before_fc:
        refuse("norm_before_fc", True, "False: the engines' MLA heads do not have it", "train with fc_norm")
    if config.is_mla and config.window is not None:
        refuse("window", config.window, "None: the engines' MLA heads have no window")
    if isinstance(a, TargetConfig) and a.q_lora_rank is None:
        refuse("q_lora_rank", None, "a rank: SGLang has no other MLA head, and vLLM's loader fails on one without")
    if wiring.taps[0] == 1 and form != "speculators":
        refuse("taps", wiring.taps, "a first tap that is not 1: SGLang reads ids that begin with 1 as layers' outputs")
    if wiring.taps[0] == 0 and form != "sglang":
        refuse(
            "taps", wiring.taps, "a first tap above 0: vLLM's DeepSeek target fails on one that no layer has added to"
        )
    if wiring.taps[-1] == wiring.target_layers:
        refuse(
            "taps", wiring.taps, f"taps below {wiring.target_layers}: engines do not capture the last layer's output"
        )
    if form == "sglang" and config.window is not None:
        if config.window == 1:
            refuse(
                "window", 1, "at least 2: SGLang's flag says how far back a query sees, itself apart, and takes no 0"
            )
        # SGLang hands the flag to kernels that see that many keys *and* the query's own, as FlashAttention counts.
        flag = f"--speculative-draft-window-size {config.window - 1}"
        log.warning("SGLang does not read the draft's window from its config: serve this draft with %s", flag)


def _llama_fields(a: LlamaAttentionConfig, window: int | None) -> dict[str, Any]:
    scaling: dict[str, Any] | None = None
    if isinstance(a.scaling, Llama3Scaling):
        scaling = {
            "rope_type": "llama3",
            "factor": a.scaling.factor,
            "low_freq_factor": a.scaling.low_freq_factor,
            "high_freq_factor": a.scaling.high_freq_factor,
            "original_max_position_embeddings": a.scaling.original_max_positions,
        }
    elif isinstance(a.scaling, LlamaYarn):
        scaling = {
            "rope_type": "yarn",
            "factor": a.scaling.factor,
            "original_max_position_embeddings": a.scaling.original_max_positions,
            "beta_fast": a.scaling.beta_fast,
            "beta_slow": a.scaling.beta_slow,
        }
    out = {
        "model_type": "llama",
        "num_key_value_heads": a.n_kv_heads,
        "head_dim": a.head_dim,
        "mlp_bias": False,
        "rope_scaling": scaling,
        "sliding_window": window,
        "use_sliding_window": window is not None,
    }
    return out | {"layer_types": ["full_attention" if window is None else "sliding_attention"]}


def _mla_fields(a: TargetConfig) -> dict[str, Any]:
    y = a.yarn
    return {
        "model_type": "kimi_k2",  # vLLM knows it; transformers alone does not
        "num_key_value_heads": a.n_heads,
        "q_lora_rank": a.q_lora_rank,
        "kv_lora_rank": a.kv_lora_rank,
        "qk_nope_head_dim": a.nope_dim,
        "qk_rope_head_dim": a.rope_dim,
        "v_head_dim": a.v_dim,
        "rope_scaling": None
        if y is None
        else {
            "type": "yarn",
            "factor": y.factor,
            "original_max_position_embeddings": y.original_max_positions,
            "beta_fast": y.beta_fast,
            "beta_slow": y.beta_slow,
            "mscale": y.mscale,
            "mscale_all_dim": y.mscale_all_dim,
        },
    }


def _speculators_fields(layer: dict[str, Any], verifier: Verifier, speculative_tokens: int) -> dict[str, Any]:
    """What a speculators config has beside the head's own fields. No model_type: transformers would refuse it."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": speculative_tokens}
    return {
        "speculators_model_type": "eagle3",
        "embed_requires_grad": False,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "accept_tolerance": 0.0, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": verifier.name_or_path, "architectures": list(verifier.architectures)},
        },
    }
