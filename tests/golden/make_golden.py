"""Makes `FAMILY.npz` with transformers. From the repository root: `python -m tests.golden.make_golden [FAMILY ...]`.

Needs torch and transformers (README.md has the versions), which the project itself does not. Everything is computed in
float32 with eager attention and eager experts, from position 0. Two settings differ from what transformers would do:

- The q_a and kv_a norms get the config's `rms_norm_eps`, as vLLM and SGLang apply it; transformers builds these two
  norms with 1e-6 whatever the file says.
- The kimi_k25 wrapper is run as its text model alone, under the class that its `text_config` names.

Token sequences are drawn until no expert choice is nearly a tie, so that a float32 implementation must find the same
experts. Before a file is written, the run is compared with the independent NumPy implementation in float64.
"""

import sys
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

from tests import reference
from tests.golden import FAMILIES, HERE, hf_weights, text_config, token_ids
from tests.golden.families import Config
from tests.golden.weights import Weights

LENGTH, LONG_LENGTH = 160, 608
LEAST_MARGIN, LEAST_LONG_MARGIN = 1e-4, 5e-5  # float32 rounding moves a score by about 1e-6
TOLERANCE = 2e-5  # of the largest logit, or of the largest residual


def build(config: Config, weights: Weights) -> Any:
    """The transformers model of `config`, float32 and eager, filled with `weights`."""
    text = {k: v for k, v in text_config(config).items() if k not in ("model_type", "architectures", "auto_map")}
    is_v2 = text_config(config)["model_type"] == "deepseek_v2"
    kind = (transformers.DeepseekV2Config, transformers.DeepseekV2ForCausalLM)
    if not is_v2:
        kind = (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM)
    hf_config = kind[0](**text)
    hf_config._attn_implementation = "eager"
    hf_config._experts_implementation = "eager"
    model = kind[1](hf_config).eval().float()
    model.load_state_dict(fuse_experts(config, weights), strict=True)
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm):
            if norm is not None:
                norm.variance_epsilon = hf_config.rms_norm_eps
    return model


def fuse_experts(config: Config, weights: Weights) -> dict[str, Any]:
    """Checkpoint names to those of transformers 5, which keeps a layer's experts in two tensors."""
    text = text_config(config)
    plain = {k.removeprefix("language_model."): torch.from_numpy(v.copy()) for k, v in weights.items()}
    state = {k: v for k, v in plain.items() if ".mlp.experts." not in k}
    for layer in range(text["first_k_dense_replace"], text["num_hidden_layers"]):
        p = f"model.layers.{layer}.mlp.experts."
        experts = range(text["n_routed_experts"])
        state[p + "gate_up_proj"] = torch.stack(
            [torch.cat([plain[f"{p}{e}.gate_proj.weight"], plain[f"{p}{e}.up_proj.weight"]]) for e in experts]
        )
        state[p + "down_proj"] = torch.stack([plain[f"{p}{e}.down_proj.weight"] for e in experts])
    return state


def run(model: Any, ids: np.ndarray) -> reference.Forward:
    """One forward pass; taps and routing are read by hooks, so that no output convention is in the way."""
    taps: list[np.ndarray] = []
    experts: dict[int, np.ndarray] = {}
    weights: dict[int, np.ndarray] = {}

    def tap(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        taps.append((args[0] if args else kwargs["hidden_states"])[0].numpy().copy())

    def route(layer: int) -> Any:
        def hook(module: Any, args: tuple[Any, ...], output: tuple[Any, ...]) -> None:
            _, chosen_weights, chosen = (o.numpy() for o in output)
            order = np.argsort(chosen, axis=-1)
            experts[layer] = np.take_along_axis(chosen, order, -1)
            weights[layer] = np.take_along_axis(chosen_weights, order, -1)

        return hook

    layers = model.model.layers
    handles = [m.register_forward_pre_hook(tap, with_kwargs=True) for m in (*layers, model.model.norm)]
    handles += [m.mlp.gate.register_forward_hook(route(i)) for i, m in enumerate(layers) if hasattr(m.mlp, "gate")]
    with torch.no_grad():
        logits = model(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits[0].numpy()
    for handle in handles:
        handle.remove()
    return reference.Forward(logits, np.stack(taps), experts, weights, margins={})


def compare(hf: reference.Forward, ours: reference.Forward) -> dict[str, float]:
    """Largest differences, relative to the largest value; raises when they are not rounding errors."""
    errors = {
        "logits": float(np.abs(hf.logits - ours.logits).max() / np.abs(ours.logits).max()),
        "taps": max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(hf.taps, ours.taps, strict=True)),
        "expert_weights": max(float(np.abs(hf.expert_weights[i] - w).max()) for i, w in ours.expert_weights.items()),
    }
    for layer, experts in ours.experts.items():
        if not np.array_equal(experts, hf.experts[layer]):
            raise AssertionError(f"layer {layer}: transformers and the NumPy reference choose different experts")
    if max(errors.values()) > TOLERANCE:
        raise AssertionError(f"transformers and the NumPy reference differ: {errors}")
    return errors


def draw(family: str, weights: Weights, length: int, least_margin: float) -> tuple[np.ndarray, reference.Forward]:
    """The first token sequence whose expert choices are all clear, and its float64 reference."""
    config = FAMILIES[family]
    for attempt in range(500):
        ids = token_ids(f"{family}/{length}/{attempt}", length, text_config(config)["vocab_size"])
        result = reference.forward(config, weights, ids)
        if min(m.min() for m in result.margins.values()) >= least_margin:
            return ids, result
    raise AssertionError(f"{family}: no sequence of {length} tokens has expert margins of {least_margin}")


def make(family: str) -> None:
    config = FAMILIES[family]
    weights = hf_weights(config)
    model = build(config, weights)
    ids, expected = draw(family, weights, LENGTH, LEAST_MARGIN)
    long_ids, long_expected = draw(family, weights, LONG_LENGTH, LEAST_LONG_MARGIN)
    hf, long_hf = run(model, ids), run(model, long_ids)
    errors, long_errors = compare(hf, expected), compare(long_hf, long_expected)
    positions = np.unique(np.r_[0:LENGTH:13, 31, 32, 33, LENGTH - 1]).astype(np.int32)
    long_positions = np.unique(np.r_[0:LONG_LENGTH:16, LONG_LENGTH - 1]).astype(np.int32)
    moe_layers = sorted(hf.experts)
    arrays: dict[str, np.ndarray] = {
        "ids": ids,
        "logits": hf.logits,
        "tap_positions": positions,
        "taps": hf.taps[:, positions],
        "moe_layers": np.array(moe_layers, np.int32),
        "experts": np.stack([hf.experts[i] for i in moe_layers]).astype(np.uint8),
        "expert_weights": np.stack([hf.expert_weights[i] for i in moe_layers]),
        "long_ids": long_ids,
        "long_positions": long_positions,
        "long_logits": long_hf.logits[long_positions],
        "long_experts": np.stack([long_hf.experts[i] for i in moe_layers]).astype(np.uint8),
    }
    np.savez_compressed(HERE / f"{family}.npz", allow_pickle=False, **arrays)
    size = (HERE / f"{family}.npz").stat().st_size
    for what, e, reference_run in (("160", errors, expected), ("608", long_errors, long_expected)):
        figures = ", ".join(f"{k} {v:.1e}" for k, v in e.items())
        margin = min(m.min() for m in reference_run.margins.values())
        print(f"{family} T={what}: {figures}, least margin {margin:.1e}, largest logit {np.abs(hf.logits).max():.1f}")
    print(f"{family}: {size} bytes")


if __name__ == "__main__":
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, numpy {np.__version__}")
    torch.set_num_threads(1)
    for name in sys.argv[1:] or FAMILIES:
        make(name)
