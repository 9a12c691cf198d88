"""What a checkpoint's tensors take in its files, by component: from headers, or as the family is published."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .checkpoint import CheckpointIndex
from .config import Fp8BlockConfig, TargetConfig
from .errors import CheckpointError, ConfigError
from .names import Path, Piece, skip_reason
from .safetensors_io import DTYPES

COMPONENTS = ("routed experts", "attention", "shared experts", "dense MLP", "embedding", "head", "router", "norms")

_BF16_BYTES, _F32_BYTES, _SHAPE_BYTES = 2, 4, 8  # _SHAPE_BYTES: weight_shape, two int32 a matrix


@dataclass(frozen=True)
class Skipped:
    """Weights of the files that a text model does not load."""

    name: str
    params: int
    file_bytes: int


def component(path: Path) -> str:
    """The component that a parameter is counted in; the norms inside attention belong to it."""
    if "attention" in path:
        return "attention"
    if path[0] in ("embed", "lm_head"):
        return "embedding" if path[0] == "embed" else "head"
    if "experts" in path:
        return "routed experts"
    if "shared" in path:
        return "shared experts"
    if str(path[-1]).startswith("router"):
        return "router"
    return "dense MLP" if "mlp" in path else "norms"


def published_bytes(config: TargetConfig, table: Mapping[Path, tuple[Piece, ...]]) -> Counter[str]:
    """File bytes by component of the form in which the family is published."""
    out: Counter[str] = Counter()
    block = config.quantization.block if isinstance(config.quantization, Fp8BlockConfig) else None
    for name, (piece, path) in {p.name: (p, path) for path, pieces in table.items() for p in pieces}.items():
        size, where = math.prod(piece.shape), component(path)
        if name.endswith(".weight_packed"):
            out[where] += size * 4 + _SHAPE_BYTES
        elif name.endswith("e_score_correction_bias"):
            out[where] += size * _F32_BYTES
        elif block and len(piece.shape) == 2 and where not in ("router", "embedding", "head"):
            blocks = math.ceil(piece.shape[0] / block[0]) * math.ceil(piece.shape[1] / block[1])
            out[where] += size + blocks * _F32_BYTES
        else:
            out[where] += size * _BF16_BYTES
    return out


def vision_tensors(raw: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the bf16 tensors of MoonViT-3d and its projector; empty without a `vision_config`.

    Its fields are written with or without `vt_`.
    """
    vision = raw.get("vision_config")
    if vision is None:
        return {}

    def field(*names: str) -> Any:
        for name in names:
            if name in vision:
                return vision[name]
        raise ConfigError(f"config.vision_config.{names[0]}", "no such key", "a value: the vision tower's size")

    d = field("vt_hidden_size", "hidden_size")
    f = field("vt_intermediate_size", "intermediate_size")
    layers = field("vt_num_hidden_layers", "num_hidden_layers")
    positions = field("init_pos_emb_height", "pos_emb_height"), field("init_pos_emb_width", "pos_emb_width")
    merged = d * math.prod(field("merge_kernel_size"))
    text = field("text_hidden_size", "projection_dim")
    patch = field("patch_size")
    out: dict[str, tuple[int, ...]] = {}

    def linear(name: str, *shape: int) -> None:
        out[f"{name}.weight"], out[f"{name}.bias"] = shape, shape[:1]

    linear("mm_projector.pre_norm", d)
    linear("mm_projector.proj.0", merged, merged)
    linear("mm_projector.proj.2", text, merged)
    linear("vision_tower.patch_embed.proj", d, 3, patch, patch)
    out["vision_tower.patch_embed.pos_emb.weight"] = (*positions, d)
    for i in range(layers):
        shapes = {"norm0": (d,), "norm1": (d,), "wqkv": (3 * d, d), "wo": (d, d), "mlp.fc0": (f, d), "mlp.fc1": (d, f)}
        for name, shape in shapes.items():
            linear(f"vision_tower.encoder.blocks.{i}.{name}", *shape)
    linear("vision_tower.encoder.final_layernorm", d)
    return out


def published_vision(raw: Mapping[str, Any]) -> tuple[Skipped, ...]:
    """What the vision tower and its projector take, from `vision_config`."""
    params = sum(math.prod(shape) for shape in vision_tensors(raw).values())
    return (Skipped("vision", params, params * _BF16_BYTES),) if params else ()


def header_bytes(
    index: CheckpointIndex, config: TargetConfig, table: Mapping[Path, tuple[Piece, ...]]
) -> tuple[Counter[str], tuple[Skipped, ...]]:
    """File bytes by component, and what is skipped, from the headers.

    Raises:
      CheckpointError: lists tensors that no parameter takes and parameters that have none.
    """
    stems = {p.stem: component(path) for path, pieces in table.items() for p in pieces}
    out: Counter[str] = Counter()
    params, skipped = Counter[str](), Counter[str]()
    bad: list[str] = []
    seen: set[str] = set()
    for name, t in index.tensors.items():
        stem, reason = name.rpartition(".")[0], skip_reason(name, config)
        if reason is not None:
            params[reason] += t.size
            skipped[reason] += t.size * DTYPES[t.dtype].itemsize
        elif stem in stems:
            seen.add(stem)
            out[stems[stem]] += t.nbytes
        else:
            bad.append(f"{name}: no parameter of the model takes it")
    bad += [f"{stem}: missing" for stem in stems if stem not in seen]
    if bad:
        raise CheckpointError("\n".join([f"{index.directory}: the files are not those of the config", *sorted(bad)]))
    return out, tuple(Skipped(reason, params[reason], skipped[reason]) for reason in sorted(params))
