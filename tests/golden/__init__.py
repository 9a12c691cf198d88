"""Golden files: what `transformers` and `compressed-tensors` compute for tiny models. README.md has the details."""

from pathlib import Path

import numpy as np

from .checkpoint import stored_tensors, write_checkpoint, write_tensors
from .families import FAMILIES, PUBLISHED_QUANTIZATION, text_config, with_quantization
from .weights import extra_weights, hf_weights, token_ids

__all__ = [
    "FAMILIES",
    "PUBLISHED_QUANTIZATION",
    "extra_weights",
    "hf_weights",
    "load_golden",
    "load_int4_golden",
    "stored_tensors",
    "text_config",
    "token_ids",
    "with_quantization",
    "write_checkpoint",
    "write_tensors",
]

HERE = Path(__file__).resolve().parent


def load_golden(family: str) -> dict[str, np.ndarray]:
    """The golden arrays of a family; T = 160 tokens, L layers, M MoE layers, K experts chosen.

    ids int32 [T]; logits float32 [T, V]; tap_positions int32 [P]; taps float32 [L+1, P, D], where tap i is the
    residual stream entering layer i and tap L is before the final norm; moe_layers int32 [M]; experts uint8
    [M, T, K], ascending; expert_weights float32 [M, T, K] in the same order, routed_scaling_factor included.
    `long_ids` [608] is a second sequence: long_positions int32 [Q], long_logits float32 [Q, V], long_experts uint8
    [M, 608, K].
    """
    with np.load(HERE / f"{family}.npz") as file:
        return {name: file[name] for name in file.files}


def load_int4_golden() -> dict[str, np.ndarray]:
    """The arrays of `int4.npz`: `CASE/FIELD` as README.md lists them; bf16 numbers are uint16 bit patterns."""
    with np.load(HERE / "int4.npz") as file:
        return {name: file[name] for name in file.files}
