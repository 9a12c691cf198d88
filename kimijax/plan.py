"""What a model needs before any weight is read: `python -m kimijax.plan --model DIR_OR_CONFIG`.

Parameters and file bytes by component, cache bytes per token, and what each of N devices holds under tensor
parallelism. Shapes come from the model's own declaration and its sharding table; file bytes from the safetensors
headers where the directory has them, else from the published form that `config.json` describes (bf16, with INT4 experts
or fp8 blocks where it says so).
"""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path as FilePath
from typing import Any

import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from .checkpoint import CheckpointIndex, inspect, with_int4
from .config import Fp8BlockConfig, Int4Config, TargetConfig, load_config, read_json
from .errors import CheckpointError, ConfigError
from .model import declare_target
from .names import Path, Piece, name_table, parameters, skip_reason
from .quant import NIBBLES_PER_WORD
from .safetensors_io import DTYPES, INDEX_FILE
from .sharding import partition

COMPONENTS = ("routed experts", "attention", "shared experts", "dense MLP", "embedding", "head", "router", "norms")

_BF16_BYTES, _F32_BYTES, _SHAPE_BYTES = 2, 4, 8  # _SHAPE_BYTES: weight_shape, two int32 a matrix


@dataclass(frozen=True)
class Component:
    """One kind of weights, all layers together."""

    name: str
    params: int
    file_bytes: int
    sharded_bytes: int  # on the devices together, split over them
    replicated_bytes: int  # on each device


@dataclass(frozen=True)
class Skipped:
    """Weights of the files that a text model does not load."""

    name: str
    params: int
    file_bytes: int


@dataclass(frozen=True)
class Device:
    """One of `devices` equal tensor-parallel devices. The latent cache has no head axis: each holds all of it."""

    devices: int
    memory_bytes: int
    usable_bytes: int  # memory_bytes times the fraction that weights and cache may take
    weight_bytes: int
    expert_bytes: int  # of the weights: the device's part of the routed experts
    other_sharded_bytes: int
    replicated_bytes: int
    cache_tokens: int  # in the rest of the usable memory, over all requests; 0 where the weights do not fit

    @property
    def fits(self) -> bool:
        return self.weight_bytes <= self.usable_bytes


@dataclass(frozen=True)
class Plan:
    """The answer. Bytes on devices are those of bf16 weights and of experts that stay INT4 if the files hold INT4."""

    model_type: str
    source: str  # where file bytes come from: "headers" or "config"
    components: tuple[Component, ...]
    skipped: tuple[Skipped, ...]
    active_params: int  # that one token's forward pass uses, both vocabulary matrices counted whole
    cache_bytes_per_token: int  # bf16 latents and roped keys of all layers
    max_positions: int
    uncounted: tuple[str, ...]  # what the files may hold but the config does not give the size of
    device: Device

    @property
    def params(self) -> int:
        return sum(c.params for c in self.components)

    @property
    def text_bytes(self) -> int:
        return sum(c.file_bytes for c in self.components)

    @property
    def total_bytes(self) -> int:
        """Of all tensors in the files, skipped ones too."""
        return self.text_bytes + sum(s.file_bytes for s in self.skipped)

    def to_json(self) -> dict[str, Any]:
        """All fields, and the sums."""
        device = {**asdict(self.device), "fits": self.device.fits}
        sums = {"params": self.params, "text_bytes": self.text_bytes, "total_bytes": self.total_bytes}
        full = {"full_context_cache_bytes": self.cache_bytes_per_token * self.max_positions}
        return {**asdict(self), **sums, **full, "device": device}


def make_plan(
    path: str | FilePath, *, memory_bytes: int = 141_000_000_000, devices: int = 8, fraction: float = 0.9
) -> Plan:
    """Plans for a checkpoint directory, or for a `config.json` alone.

    Args:
      path: the directory or the JSON file.
      memory_bytes: of one device.
      devices: in the tensor-parallel group.
      fraction: of a device's memory that weights and cache may fill.
    Raises:
      ConfigError: the config is not supported, or a split dimension is no multiple of `devices`.
      CheckpointError: files are missing or faulty, or their tensors are not those of the config.
    """
    path = FilePath(path)
    for field, value in (("devices", devices), ("memory", memory_bytes)):
        if value <= 0:
            raise ConfigError(field, value, "a positive number")
    if not 0 < fraction <= 1:
        raise ConfigError("fraction", fraction, "a number above 0, at most 1")
    config, raw = load_config(path), read_json(path if path.suffix == ".json" else path / "config.json")
    index = _index(path)
    int4 = isinstance(config.quantization, Int4Config) if index is None else index.int4
    config = with_int4(config) if int4 else config
    declared = {
        p: (param.get_value(), param.get_metadata()["axes"])
        for p, param in parameters(declare_target(config, dtype=jnp.dtype(jnp.bfloat16), int4=int4)).items()
    }
    table = name_table(config, int4=int4)
    params, sharded, replicated = Counter[str](), Counter[str](), Counter[str]()
    for p, (struct, axes) in declared.items():
        name = component(p)
        if not str(p[-1]).endswith("_scale"):
            params[name] += struct.size * (NIBBLES_PER_WORD if str(p[-1]).endswith("_packed") else 1)
        split = _is_split(p, struct.shape, axes, devices)
        (sharded if split else replicated)[name] += struct.size * struct.dtype.itemsize
    if index is None:
        file_bytes, skipped = _published_bytes(config, table), _published_vision(raw)
    else:
        file_bytes, skipped = _header_bytes(index, config, table)
    components = tuple(
        Component(n, params[n], file_bytes[n], sharded[n], replicated[n]) for n in COMPONENTS if params[n]
    )
    cache = config.n_layers * config.latent_dim * _BF16_BYTES
    idle = 0
    if config.moe is not None:
        idle = params["routed experts"] * (config.moe.n_experts - config.moe.n_chosen) // config.moe.n_experts
    return Plan(
        model_type=config.model_type,
        source="config" if index is None else "headers",
        components=components,
        skipped=skipped,
        active_params=params.total() - idle,
        cache_bytes_per_token=cache,
        max_positions=config.max_positions,
        uncounted=_uncounted(config) if index is None else (),
        device=_device(components, cache, memory_bytes, devices, fraction),
    )


def _uncounted(config: TargetConfig) -> tuple[str, ...]:
    if config.n_mtp_layers == 0:
        return ()
    return (f"{config.n_mtp_layers} multi-token-prediction layer(s): in the files, never loaded",)


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


def _is_split(path: Path, shape: tuple[int, ...], axes: tuple[str, ...], devices: int) -> bool:
    """Whether the sharding table splits a parameter over the devices; refuses a split that does not come out even."""
    for axis, mesh_axis, size in zip(axes, partition(axes), shape, strict=True):
        if mesh_axis is not None:
            if size % devices:
                where = ".".join(map(str, path))
                raise ConfigError("devices", devices, f"a divisor of {axis} ({size}) of {where}", "use fewer devices")
            return True
    return False


def _device(components: tuple[Component, ...], cache: int, memory: int, devices: int, fraction: float) -> Device:
    experts = sum(c.sharded_bytes for c in components if c.name == "routed experts") // devices
    others = sum(c.sharded_bytes for c in components if c.name != "routed experts") // devices
    replicated = sum(c.replicated_bytes for c in components)
    usable = int(memory * fraction)
    weights = experts + others + replicated
    return Device(devices, memory, usable, weights, experts, others, replicated, max(0, usable - weights) // cache)


def _index(path: FilePath) -> CheckpointIndex | None:
    """The headers of a directory that has safetensors files, or claims to."""
    if not path.is_dir() or not (any(path.glob("*.safetensors")) or (path / INDEX_FILE).exists()):
        return None
    index = inspect(path)
    if index.problems:
        raise CheckpointError("\n".join([f"{path}: the headers cannot be counted", *index.problems]))
    return index


def _published_bytes(config: TargetConfig, table: Mapping[Path, tuple[Piece, ...]]) -> Counter[str]:
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


def _published_vision(raw: Mapping[str, Any]) -> tuple[Skipped, ...]:
    """MoonViT-3d and its projector, from `vision_config`; its fields are written with or without `vt_`."""
    vision = raw.get("vision_config")
    if vision is None:
        return ()

    def field(*names: str) -> Any:
        for name in names:
            if name in vision:
                return vision[name]
        raise ConfigError(f"config.vision_config.{names[0]}", "no such key", "a value: the vision tower's size")

    d = field("vt_hidden_size", "hidden_size")
    f = field("vt_intermediate_size", "intermediate_size")
    layers = field("vt_num_hidden_layers", "num_hidden_layers")
    positions = field("init_pos_emb_height", "pos_emb_height") * field("init_pos_emb_width", "pos_emb_width")
    merged = d * math.prod(field("merge_kernel_size"))
    out = field("text_hidden_size", "projection_dim")
    norm = 2 * d
    patch = 3 * field("patch_size") ** 2 * d + d + positions * d
    block = 2 * norm + (3 * d * d + 3 * d) + (d * d + d) + (d * f + f) + (f * d + d)
    projector = norm + (merged * merged + merged) + (merged * out + out)
    params = patch + layers * block + norm + projector
    return (Skipped("vision", params, params * _BF16_BYTES),)


def _header_bytes(
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


def render(plan: Plan) -> Table:
    """The plan as a table."""
    table = Table(title=f"{plan.model_type}: file bytes from {plan.source}", show_footer=True)
    table.add_column("component", "text model")
    footers = {
        "parameters": f"{plan.params:,}",
        "file GB": f"{plan.text_bytes / 1e9:,.2f}",
        "GB/device": f"{plan.device.weight_bytes / 1e9:,.2f}",
        "replicated": f"{plan.device.replicated_bytes / 1e9:,.2f}",
    }
    for header, footer in footers.items():
        table.add_column(header, footer, justify="right", no_wrap=True)
    for c in plan.components:
        held = c.sharded_bytes / plan.device.devices + c.replicated_bytes
        sizes = (c.file_bytes, held, c.replicated_bytes)
        table.add_row(c.name, f"{c.params:,}", *(f"{s / 1e9:,.2f}" for s in sizes))
    for s in plan.skipped:
        table.add_row(f"{s.name} (skipped)", f"{s.params:,}", f"{s.file_bytes / 1e9:,.2f}", "", "")
    return table


def summary(plan: Plan) -> list[str]:
    """What the table does not say, a line each."""
    d = plan.device
    lines = [
        f"files: {plan.total_bytes:,} bytes = {plan.total_bytes / 1e9:,.2f} GB",
        f"active parameters a token: {plan.active_params:,}",
        f"cache: {plan.cache_bytes_per_token:,} bytes a token (bf16), "
        f"{plan.cache_bytes_per_token * plan.max_positions / 1e9:,.2f} GB for {plan.max_positions:,} tokens",
    ]
    lines += [f"not counted: {what}" for what in plan.uncounted]
    what = f"{d.devices} devices of {d.memory_bytes / 1e9:,.0f} GB, {d.usable_bytes / 1e9:,.1f} GB of each usable"
    if d.fits:
        lines.append(f"{what}: {d.weight_bytes / 1e9:,.2f} GB of weights, then {d.cache_tokens:,} cached tokens in all")
    else:
        lines.append(f"{what}: DOES NOT FIT, the weights alone need {d.weight_bytes / 1e9:,.2f} GB of each")
    return lines


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code (2: the model or the settings cannot be planned for)."""
    parser = argparse.ArgumentParser("python -m kimijax.plan", description="Memory of a model, before it is loaded.")
    parser.add_argument("--model", required=True, help="checkpoint directory, or a config.json")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--memory-gb", type=float, default=141.0, help="of one device, in 10^9 bytes (default: H200)")
    parser.add_argument("--devices", type=int, default=8, help="tensor-parallel devices")
    parser.add_argument("--fraction", type=float, default=0.9, help="of a device's memory for weights and cache")
    args = parser.parse_args(argv)
    try:
        memory = int(args.memory_gb * 1e9)
        plan = make_plan(args.model, memory_bytes=memory, devices=args.devices, fraction=args.fraction)
    except (ConfigError, CheckpointError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(plan.to_json(), indent=2))
        return 0
    console = Console()
    console.print(render(plan))
    for line in summary(plan):
        console.print(line, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
