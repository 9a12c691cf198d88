"""Writes a tiny model as a checkpoint directory, in any of the published forms; all hold exactly the same numbers."""

import json
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from .families import FAMILIES, Config, Quantization, text_config, with_quantization
from .weights import Weights, extra_weights, grid, hf_weights, is_grid, is_routed_expert

WIDTHS = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def stored_tensors(
    config: Config, *, dtype: Literal["float32", "bfloat16"], quantization: Quantization | None, extras: bool
) -> Weights:
    """The tensors of a checkpoint as they lie in its files.

    int4: `weight_packed` int32 [out, in/8], `weight_scale` bf16 [out, in/32], `weight_shape` int32 [2] for routed
    experts. fp8: `weight` e4m3 and `weight_scale_inv` float32 [ceil(out/128), ceil(in/128)] for all linear maps.
    Everything else, and all of it without quantisation: `dtype`; the router's bias always float32.
    """
    tensors = hf_weights(config) | (extra_weights(config) if extras else {})
    out: Weights = {}
    for name, value in tensors.items():
        base = name.removesuffix("weight")
        if quantization == "int4" and is_routed_expert(name):
            g = grid(config, name, (value.shape[0], value.shape[1]))
            out[base + "weight_packed"] = g.int4_packed
            out[base + "weight_scale"] = g.int4_scale.astype(ml_dtypes.bfloat16)
            out[base + "weight_shape"] = np.array(value.shape, np.int32)
        elif quantization == "fp8" and is_grid(name):
            g = grid(config, name, (value.shape[0], value.shape[1]))
            out[name] = g.fp8_values.astype(ml_dtypes.float8_e4m3fn)
            out[base + "weight_scale_inv"] = g.block_scale
        elif name.endswith("e_score_correction_bias"):
            out[name] = value
        else:
            out[name] = value.astype(WIDTHS[dtype])
    return {name: np.ascontiguousarray(value) for name, value in out.items()}


def write_tensors(tensors: Weights, directory: Path, shards: int) -> None:
    """`model-0000k-of-0000n.safetensors` and their index; shards of about equal size, in the tensors' order."""
    total = sum(a.nbytes for a in tensors.values())
    files: list[Weights] = [{} for _ in range(shards)]
    done = 0
    for name, array in tensors.items():
        files[min(done * shards // total, shards - 1)][name] = array
        done += array.nbytes
    weight_map = {}
    for i, part in enumerate(files):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def write_checkpoint(
    family: str,
    directory: Path,
    *,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    quantization: Quantization | None = None,
    shards: int = 3,
    extras: bool = True,
) -> Path:
    """A checkpoint directory of `family`: config.json, generation_config.json, safetensors shards and index.

    Args:
      family: a key of FAMILIES.
      directory: created if needed.
      dtype: of everything that is neither quantised nor the router's bias.
      quantization: the form of the quantised tensors; config.json says it where that family does.
      shards: number of safetensors files.
      extras: also write what a published checkpoint carries and a text model skips (`extra_shapes`).
    Returns:
      `directory`.
    """
    config = with_quantization(FAMILIES[family], quantization)
    text = text_config(config)
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(stored_tensors(config, dtype=dtype, quantization=quantization, extras=extras), directory, shards)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    # As published for K2.5: the end-of-turn id is here, while config.json's eos_token_id is another one.
    eos = 122 if family == "kimi_k25" else text["eos_token_id"]
    generation = {"max_length": text["max_position_embeddings"], "eos_token_id": eos}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2))
    return directory
