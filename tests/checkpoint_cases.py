"""What the checkpoint tests share: the parameters a checkpoint must load as, and ways to spoil a directory."""

from collections.abc import Callable, Mapping
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import pytest

from kimijax import checkpoint
from kimijax.config import TargetConfig, load_config, parse_config
from kimijax.errors import CheckpointError
from kimijax.model import Tables
from kimijax.names import Path, parameters
from kimijax.safetensors_io import FilePool, read_header

from .golden import FAMILIES, text_config, write_tensors

Tensors = dict[str, np.ndarray]


def loaded(model: Tables) -> dict[Path, Any]:
    """A loaded model's arrays by path."""
    return {path: param.get_value() for path, param in parameters(model).items()}


def expected(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[Path, np.ndarray]:
    """The parameters of a model from its Hugging Face tensors, written out a second time, as plainly as possible.

    Args:
      config: the `config.json`.
      tensors: float tensors by name, with or without the wrapper's prefix.
    """
    w = {name.removeprefix("language_model."): value for name, value in tensors.items()}
    t = text_config(dict(config))
    n, nope, v = t["num_attention_heads"], t["qk_nope_head_dim"], t["v_head_dim"]
    out: dict[Path, np.ndarray] = {
        ("embed",): w["model.embed_tokens.weight"],
        ("norm",): w["model.norm.weight"],
        ("lm_head",): w["lm_head.weight"],
    }

    def mlp(at: str) -> dict[str, np.ndarray]:
        gate, up = w[f"{at}.gate_proj.weight"], w[f"{at}.up_proj.weight"]
        return {"gate_up": np.stack([gate, up]), "down": w[f"{at}.down_proj.weight"]}

    for i in range(t["num_hidden_layers"]):
        at = f"model.layers.{i}"
        part: dict[Path, np.ndarray] = {
            ("input_norm",): w[f"{at}.input_layernorm.weight"],
            ("post_norm",): w[f"{at}.post_attention_layernorm.weight"],
            ("attention", "kv_a"): w[f"{at}.self_attn.kv_a_proj_with_mqa.weight"],
            ("attention", "kv_a_norm"): w[f"{at}.self_attn.kv_a_layernorm.weight"],
        }
        if t["q_lora_rank"] is None:
            q = w[f"{at}.self_attn.q_proj.weight"]
            part["attention", "q"] = q.reshape(n, -1, q.shape[1])
        else:
            q = w[f"{at}.self_attn.q_b_proj.weight"]
            part["attention", "q_a"] = w[f"{at}.self_attn.q_a_proj.weight"]
            part["attention", "q_a_norm"] = w[f"{at}.self_attn.q_a_layernorm.weight"]
            part["attention", "q_b"] = q.reshape(n, -1, q.shape[1])
        kv = w[f"{at}.self_attn.kv_b_proj.weight"]
        heads = [kv[h * (nope + v) : (h + 1) * (nope + v)] for h in range(n)]
        part["attention", "k_up"] = np.stack([h[:nope] for h in heads])
        part["attention", "v_up"] = np.stack([h[nope:] for h in heads])
        o = w[f"{at}.self_attn.o_proj.weight"]
        part["attention", "o"] = np.stack(np.split(o, n, axis=1), axis=1)
        if i < t["first_k_dense_replace"]:
            part |= {("mlp", k): a for k, a in mlp(f"{at}.mlp").items()}
        else:
            experts = [mlp(f"{at}.mlp.experts.{e}") for e in range(t["n_routed_experts"])]
            part |= {("mlp", "experts", k): np.stack([x[k] for x in experts]) for k in ("gate_up", "down")}
            part |= {("mlp", "shared", k): a for k, a in mlp(f"{at}.mlp.shared_experts").items()}
            part["mlp", "router"] = w[f"{at}.mlp.gate.weight"]
            if t["scoring_func"] == "sigmoid":
                part["mlp", "router_bias"] = w[f"{at}.mlp.gate.e_score_correction_bias"]
        out |= {("layers", i, *path): a for path, a in part.items()}
    return out


def rewrite(directory: FilePath, change: Callable[[Tensors], Tensors], shards: int = 3) -> Tensors:
    """Rewrites a directory's files with changed tensors, and returns those."""
    tensors: Tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        with FilePool() as pool:
            tensors |= {t.name: pool.read(t) for t in read_header(file)}
        file.unlink()
    tensors = change(tensors)
    write_tensors(tensors, directory, shards)
    return tensors


def fails(directory: FilePath, **options: Any) -> str:
    """The message with which loading fails; no array is read before it does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "read_leaves", lambda *_, **__: pytest.fail("arrays were read"))
        with pytest.raises(CheckpointError) as error:
            checkpoint.load(directory, load_config(directory), **options)
    return str(error.value)


def config_of(family: str) -> TargetConfig:
    """The configuration of a golden family."""
    return parse_config(FAMILIES[family])
