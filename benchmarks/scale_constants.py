"""What the plan for a full-size drafter rests on: every number, its unit, and where it is from.

Nothing here was timed on a GPU by this project. Kinds of numbers:

    code        computed by this repository's own functions from the published sizes of Kimi-K2.5 and from its recipe
    data sheet  the manufacturer's
    published   fitted to, or taken from, speeds that others have measured; the table `check` shows how well they fit
    measured    by this project, on a CPU
    assumed     nobody's figure
"""

import dataclasses
import functools
import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from kimijax.config import TargetConfig, load_config
from kimijax.drafter import declare_drafter
from kimijax.errors import ConfigError
from kimijax.fingerprint import Contract, TargetFingerprint
from kimijax.names import parameters
from kimijax.plan import make_plan
from kimijax.plan_gpus import GPUS as PLANNED
from kimijax.train import draft_recipe, feature_manifest

GROUP = 8  # GPUs that hold the target together: one node

# The published config.json of Kimi-K2.5 as far as it decides sizes.
KIMI_K25: dict[str, Any] = {
    "model_type": "kimi_k25",
    "text_config": {
        "model_type": "kimi_k2", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 384, "num_experts_per_tok": 8,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "norm_topk_prob": True, "routed_scaling_factor": 2.827, "vocab_size": 163840, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144, "rope_theta": 50000.0,
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {
                "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32,
            }}},
        },
    },
}  # fmt: skip

RECIPE = "kimi-k2.5"
# What of the recipe has to change for samples of 10,000 tokens: documents up to 20,480 of them, a row each.
OVERRIDES = (
    "target.max_tokens=20480",
    "corpus.limit=600000",
    "generate.max_tokens=16384",
    "generate.batch=32",
    "fit.row_tokens=20480",
)


def _constant(kind: str, unit: str, source: str, default: Any = dataclasses.MISSING) -> Any:
    return dataclasses.field(default=default, metadata={"kind": kind, "unit": unit, "source": source})


@dataclass(frozen=True)
class Constants:
    """The numbers. Of one GPU where it says so, else of the model, the recipe or a node of `GROUP` GPUs.

    Raises:
      ConfigError: a number that is not positive, or a share above 1.
    """

    peak_flops: float = _constant("data sheet", "FLOP/s", "one GPU, bf16, dense, float32 accumulation")
    memory_bandwidth: float = _constant("data sheet", "B/s", "one GPU")
    memory_bytes: float = _constant("data sheet", "B", "one GPU")
    link_bandwidth: float = _constant("assumed", "B/s", "one GPU, one direction: 3/4 of NVLink, 5/8 of PCIe 5 x16")
    collective_latency: float = _constant(
        "published", "s", "of one small all-reduce over 8 GPUs: 8 us, NCCL on PCIe 25"
    )
    decode_efficiency: float = _constant(
        "published", "share", "of memory bandwidth; fitted to InferenceX (H200, B200) and rtx6kpro (RTX PRO 6000)"
    )

    target_flops: float = _constant(
        "code", "FLOP/token", "kimijax.plan: 2 for each parameter a token uses in 61 layers"
    )
    head_flops: float = _constant("code", "FLOP/token", "kimijax.plan: the target's head")
    attention_flops: float = _constant("code", "FLOP/token/cached token", "config: 64 heads, expanded, all layers")
    absorbed_flops: float = _constant("code", "FLOP/token/cached token", "config: the same in the latent space")
    dense_read_bytes: float = _constant("code", "B/step", "kimijax.plan: one GPU, all but experts and embedding")
    expert_read_bytes: float = _constant("code", "B", "kimijax.plan: one GPU, all routed experts")
    weight_bytes: float = _constant("code", "B", "kimijax.plan: one GPU, the target split over 8")
    cache_bytes: float = _constant("code", "B/cached token", "kimijax.plan: latents of all layers, bf16")
    layers: float = _constant("code", "", "config")
    hidden: float = _constant("code", "", "config")
    experts: float = _constant("code", "a layer", "config")
    chosen: float = _constant("code", "a token", "config")
    fusion_params: float = _constant("code", "", "kimijax.drafter: fc, trained, used once a token")
    layer_params: float = _constant("code", "", "kimijax.drafter: the rest of the layer, used in every unrolled step")
    draft_head_params: float = _constant("code", "", "kimijax.drafter: its head, used in every unrolled step")
    feature_bytes: float = _constant("code", "B/token", "kimijax.train.feature_manifest: a token in a feature file")
    ttt_steps: float = _constant("code", "", "recipe: unrolled steps")
    update_tokens: float = _constant("code", "tokens", "recipe: rows x row_tokens x accumulate")
    longest: float = _constant("code", "tokens", "recipe: target.max_tokens, reserved for every running request")
    evaluated_tokens: float = _constant("code", "tokens", "recipe: answers of one data set, greedy ones twice")

    compute_efficiency: float = _constant(
        "published", "share", "of peak FLOP/s; fitted to TorchSpec's run for this model and to InferenceX", 0.30
    )
    check_rate: float = _constant(
        "measured",
        "B/s",
        "one CPU thread: sha256 and search for NaN of bf16 states, one core of an EPYC (Zen 4)",
        1.7e9,
    )
    check_threads: float = _constant("code", "", "kimijax.train.dataset: threads that read files ahead", 2)
    memory_share: float = _constant("assumed", "share", "XLA_PYTHON_CLIENT_MEM_FRACTION; JAX's default is 0.75", 0.92)
    workspace_bytes: float = _constant(
        "assumed", "B", "one GPU: activations and programs beside weights and cache", 4e9
    )
    max_batch: float = _constant("assumed", "requests", "of a node in generation, where memory allows", 256)
    answer_share: float = _constant(
        "assumed", "share", "of the tokens that are answers; the recipe says two thirds", 2 / 3
    )
    length_spread: float = _constant("assumed", "", "mean of squared lengths / square of the mean length", 1.5)
    wasted_share: float = _constant("assumed", "share", "of drawn tokens: answers cut, empty, or without an end", 0.05)
    disk_write: float = _constant(
        "assumed", "B/s", "one node: 2 to 4 NVMe drives striped, or a parallel file system", 1e10
    )
    disk_read: float = _constant("assumed", "B/s", "one node, likewise", 2e10)
    nic_bandwidth: float = _constant("assumed", "B/s", "one node, one 400 Gb/s port at 3/4", 37.5e9)
    data_sets: float = _constant("assumed", "", "held-out sets in `evaluate`", 6)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, share = vars(self)[field.name], field.metadata["unit"] == "share"
            if not (math.isfinite(value) and value > 0) or (share and value > 1):
                raise ConfigError(field.name, value, "a number above 0 and at most 1" if share else "a number above 0")

    @property
    def draft_params(self) -> float:
        """Trained parameters."""
        return self.fusion_params + self.layer_params + self.draft_head_params


# Of one GPU. RTX PRO 6000: 24 us is NCCL's on eight cards without switches; custom all-reduces reach 8.
_OF_THIS_JOB: dict[str, dict[str, float]] = {
    "H200": {"link_bandwidth": 337.5e9, "decode_efficiency": 0.50},
    "B200": {"link_bandwidth": 675e9, "decode_efficiency": 0.42},
    "RTX-PRO-6000": {"link_bandwidth": 40e9, "decode_efficiency": 0.85},
}
# What the plan knows of a GPU, and what this job assumes of it besides.
GPUS: dict[str, dict[str, float]] = {
    name: {
        "peak_flops": PLANNED[name].bf16,
        "memory_bandwidth": PLANNED[name].bandwidth,
        "memory_bytes": float(PLANNED[name].memory),
        "collective_latency": PLANNED[name].collective_seconds,
        **own,
    }
    for name, own in _OF_THIS_JOB.items()
}


@dataclass(frozen=True)
class Published:
    """A speed that others have measured, to hold the model against: 8 GPUs, tensor-parallel, no drafts."""

    gpu: str
    batch: int
    prompt: int  # tokens; 0: short enough not to count
    output: int
    speed: float  # tokens a second, all requests together
    source: str


_X = "SemiAnalysis InferenceX: Kimi-K2.5 INT4, vLLM"
_R = "rtx6kpro: Kimi-K2.6 INT4 (same sizes), vLLM, fp8 cache"
PUBLISHED = (
    Published("H200", 16, 8192, 1024, 16 * 46.6, _X),
    Published("H200", 32, 8192, 1024, 32 * 28.9, _X),
    Published("H200", 64, 8192, 1024, 64 * 16.7, _X),
    Published("B200", 16, 8192, 1024, 16 * 59.2, _X),
    Published("B200", 32, 8192, 1024, 32 * 40.5, _X),
    Published("B200", 64, 8192, 1024, 64 * 26.0, _X),
    Published("RTX-PRO-6000", 32, 0, 512, 958, _R),
    Published("RTX-PRO-6000", 64, 0, 512, 1497, _R),
    Published("RTX-PRO-6000", 128, 0, 512, 2223, _R),
)
# TorchSpec's EAGLE-3 drafter for Kimi-K2.5: 6 G tokens once, two phases of 14 h on 32 H200, features and training
# together; 1,500 GPU-hours are given for the whole project. 600,000 samples; 40,000 steps; 4 unrolled steps.
PUBLISHED_TRAINING = ("H200", 6e9, 2 * 14 * 32.0, "TorchSpec: EAGLE-3 for Kimi-K2.5, 16 + 16 H200")


def constants(gpu: str, given: Mapping[str, float] | None = None) -> Constants:
    """The constants of a GPU.

    Args:
      gpu: of `GPUS`.
      given: values that replace the constants' own.
    Raises:
      ConfigError: an unknown GPU, a constant that there is not or that the code decides, or a value out of range.
    """
    if gpu not in GPUS:
        raise ConfigError("gpu", gpu, "one of " + ", ".join(GPUS))
    free = {f.name for f in dataclasses.fields(Constants) if f.metadata["kind"] != "code"}
    for name in given or {}:
        if name not in free:
            raise ConfigError("constant", name, "one of " + ", ".join(sorted(free)))
    return Constants(**{**GPUS[gpu], **_code_sizes(), **(given or {})})


@functools.cache
def _code_sizes() -> Mapping[str, float]:
    """The constants of kind `code` that have no default."""
    recipe = draft_recipe.load_draft_recipe(RECIPE, OVERRIDES)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(KIMI_K25))
        config, sizes = load_config(path), _target_sizes(path)
    return {**sizes, **_config_sizes(config), **_draft_sizes(config, recipe)}


def _target_sizes(path: Path) -> dict[str, float]:
    plan = make_plan(path, devices=GROUP, dtype="bfloat16")
    by_name = {c.name: c for c in plan.components}
    tables = by_name["embedding"].params + by_name["head"].params
    d, embedding = plan.device, by_name["embedding"]
    dense = d.weight_bytes - d.expert_bytes - embedding.sharded_bytes // GROUP - embedding.replicated_bytes
    return {
        "target_flops": 2 * (plan.active_params - tables),
        "head_flops": 2 * by_name["head"].params,
        "dense_read_bytes": dense,
        "expert_read_bytes": d.expert_bytes,
        "weight_bytes": d.weight_bytes,
        "cache_bytes": plan.cache_bytes_per_token,
    }


def _config_sizes(config: TargetConfig) -> dict[str, float]:
    c = config
    assert c.moe is not None
    return {
        "attention_flops": 2 * c.n_layers * c.n_heads * (c.qk_dim + c.v_dim),
        "absorbed_flops": 2 * c.n_layers * c.n_heads * (c.latent_dim + c.kv_lora_rank),
        "layers": c.n_layers,
        "hidden": c.hidden,
        "experts": c.moe.n_experts,
        "chosen": c.moe.n_chosen,
    }


def _draft_sizes(config: TargetConfig, recipe: draft_recipe.DraftRecipe) -> dict[str, float]:
    wiring = recipe.target.wiring(config)
    draft = recipe.draft.config(config, wiring, recipe.vocab.size)
    sizes = {
        path: p.get_value().size
        for path, p in parameters(declare_drafter(draft, wiring, dtype=jnp.dtype("bfloat16"))).items()
    }
    fusion, head = sizes[("fc",)], sizes[("lm_head",)]
    fingerprint = TargetFingerprint({"n_layers": config.n_layers, "hidden": config.hidden}, {})
    f, dtype = recipe.features, recipe.target.dtype
    contract, origin = Contract(wiring, fingerprint, None), feature_manifest.ORIGIN
    manifest = feature_manifest.Manifest(contract, f.dtype, dtype, "pre_norm", origin, f.shard_mb, {})
    e, fit = recipe.evaluate, recipe.fit
    answered = len(e.temperatures) + sum(t == 0 for t in e.temperatures)
    return {
        "fusion_params": fusion,
        "layer_params": sum(sizes.values()) - fusion - head,
        "draft_head_params": head,
        "feature_bytes": manifest.token_bytes,
        "ttt_steps": fit.ttt_steps,
        "update_tokens": fit.rows * fit.row_tokens * fit.accumulate,
        "longest": recipe.target.max_tokens,
        "evaluated_tokens": e.prompts * e.max_tokens * answered,
    }
