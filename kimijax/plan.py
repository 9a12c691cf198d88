"""What a model needs before any weight is read: `python -m kimijax.plan --model DIR_OR_CONFIG`.

Parameters and file bytes by component, cache bytes per token, how each logical axis is sharded, and what each of N
devices holds under tensor parallelism. Shapes come from the model's own declaration and its sharding table; file bytes
from the safetensors headers where the directory has them, else from the published form that `config.json` describes
(bf16, with INT4 experts or fp8 blocks where it says so).
"""

import argparse
import json
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
from .config import Int4Config, TargetConfig, load_config, read_json
from .errors import CheckpointError, ConfigError
from .file_sizes import COMPONENTS, Skipped, component, header_bytes, published_bytes, published_vision
from .memory import split_sizes
from .model import declare_target
from .names import Path, name_table, parameters
from .quant import NIBBLES_PER_WORD
from .safetensors_io import INDEX_FILE
from .sharding import TABLE

JAX_FRACTION = 0.75  # of a GPU's memory, that JAX takes unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise
DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class Component:
    """One kind of weights, all layers together."""

    name: str
    params: int
    file_bytes: int
    sharded_bytes: int  # on the devices together, split over them
    replicated_bytes: int  # on each device


@dataclass(frozen=True)
class Device:
    """One of `devices` equal tensor-parallel devices. The latent cache has no head axis: each holds all of it."""

    devices: int
    memory_bytes: int
    usable_bytes: int  # memory_bytes times the fraction that JAX may take
    weight_bytes: int
    expert_bytes: int  # of the weights: the device's part of the routed experts
    other_sharded_bytes: int
    replicated_bytes: int
    cache_tokens: int  # whose latents alone would fill the rest, over all requests; 0 where the weights do not fit

    @property
    def fits(self) -> bool:
        return self.weight_bytes <= self.usable_bytes


@dataclass(frozen=True)
class Plan:
    """The answer. Bytes on devices are those of the parameters as they would be loaded, not as the files hold them."""

    model_type: str
    source: str  # where file bytes come from: "headers" or "config"
    dtype: str  # of float parameters and of the cache on the devices
    int4: bool  # routed experts stay INT4 on the devices
    components: tuple[Component, ...]
    skipped: tuple[Skipped, ...]
    active_params: int  # that one token's forward pass uses, both vocabulary matrices counted whole
    cache_bytes_per_token: int  # latents and roped keys of all layers
    max_positions: int
    uncounted: tuple[str, ...]  # what the files may hold but the config does not give the size of
    mesh_axes: Mapping[str, tuple[str, ...]]  # logical axis -> mesh axes; none: every device holds all of it
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
    path: str | FilePath,
    *,
    memory_bytes: int = 141_000_000_000,
    devices: int = 8,
    fraction: float = JAX_FRACTION,
    dtype: str = "bfloat16",
    unpack_int4: bool = False,
) -> Plan:
    """Plans for a checkpoint directory, or for a `config.json` alone.

    Args:
      path: the directory or the JSON file.
      memory_bytes: of one device.
      devices: in the tensor-parallel group.
      fraction: of a device's memory that JAX may take, for weights, cache and everything else.
      dtype: of the float parameters as loaded, and of the cache: bfloat16 or float32 (what a CPU loads by default).
      unpack_int4: INT4 experts become floats of `dtype` when they are loaded, as they do on a CPU.
    Raises:
      ConfigError: the config or a setting is not supported, or a split dimension is no multiple of `devices`.
      CheckpointError: files are missing or faulty, or their tensors are not those of the config.
    """
    path = FilePath(path)
    _check_settings(memory_bytes, devices, fraction, dtype)
    config, raw = load_config(path), read_json(path if path.suffix == ".json" else path / "config.json")
    index = _index(path)
    stored = isinstance(config.quantization, Int4Config) if index is None else index.int4
    config = with_int4(config) if stored else config
    table = name_table(config, int4=stored)
    if index is None:
        file_bytes, skipped = published_bytes(config, table), published_vision(raw)
    else:
        file_bytes, skipped = header_bytes(index, config, table)
    int4 = stored and not unpack_int4
    components = _components(config, jnp.dtype(dtype), int4, devices, file_bytes)
    cache = config.n_layers * config.latent_dim * jnp.dtype(dtype).itemsize
    return Plan(
        model_type=config.model_type,
        source="config" if index is None else "headers",
        dtype=dtype,
        int4=int4,
        components=components,
        skipped=skipped,
        active_params=sum(c.params for c in components) - _idle_params(config, components),
        cache_bytes_per_token=cache,
        max_positions=config.max_positions,
        uncounted=_uncounted(config) if index is None else (),
        mesh_axes=dict(TABLE),
        device=_device(components, cache, memory_bytes, devices, fraction),
    )


def _check_settings(memory_bytes: int, devices: int, fraction: float, dtype: str) -> None:
    for field, value in (("devices", devices), ("memory", memory_bytes)):
        if value <= 0:
            raise ConfigError(field, value, "a positive number")
    if not 0 < fraction <= 1:
        raise ConfigError("fraction", fraction, "a number above 0, at most 1")
    if dtype not in DTYPES:
        raise ConfigError("dtype", dtype, " or ".join(DTYPES))


def _components(
    config: TargetConfig, dtype: jnp.dtype, int4: bool, devices: int, file_bytes: Counter[str]
) -> tuple[Component, ...]:
    """The declaration's parameters and their bytes on devices, by component."""
    params, sharded, replicated = Counter[str](), Counter[str](), Counter[str]()
    for path, param in parameters(declare_target(config, dtype=dtype, int4=int4)).items():
        struct, name = param.get_value(), component(path)
        if not str(path[-1]).endswith("_scale"):
            params[name] += struct.size * (NIBBLES_PER_WORD if str(path[-1]).endswith("_packed") else 1)
        split = _is_split(path, struct.shape, param.get_metadata()["axes"], devices)
        (sharded if split else replicated)[name] += struct.size * struct.dtype.itemsize
    return tuple(Component(n, params[n], file_bytes[n], sharded[n], replicated[n]) for n in COMPONENTS if params[n])


def _idle_params(config: TargetConfig, components: tuple[Component, ...]) -> int:
    """Parameters of the experts that one token does not choose."""
    if config.moe is None:
        return 0
    routed = sum(c.params for c in components if c.name == "routed experts")
    return routed * (config.moe.n_experts - config.moe.n_chosen) // config.moe.n_experts


def _uncounted(config: TargetConfig) -> tuple[str, ...]:
    if config.n_mtp_layers == 0:
        return ()
    return (f"{config.n_mtp_layers} multi-token-prediction layer(s): in the files, never loaded",)


def _is_split(path: Path, shape: tuple[int, ...], axes: tuple[str, ...], devices: int) -> bool:
    """Whether the sharding table splits a parameter over the devices; refuses a split that does not come out even."""
    sizes = split_sizes(axes, shape, "tp")
    for axis, size in sizes.items():
        if size % devices:
            where = ".".join(map(str, path))
            raise ConfigError("devices", devices, f"a divisor of {axis} ({size}) of {where}", "use fewer devices")
    return bool(sizes)


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


def render_axes(plan: Plan) -> Table:
    """Where each logical axis of parameters and activations lives."""
    table = Table(title=f"mesh: data 1, tensor {plan.device.devices}")
    for header in ("logical axis", "mesh axis"):
        table.add_column(header, no_wrap=True)
    for axis, names in plan.mesh_axes.items():
        table.add_row(axis, ", ".join(names) or "none: on every device")
    return table


def summary(plan: Plan) -> list[str]:
    """What the tables do not say, a line each."""
    d = plan.device
    loaded = f"{plan.dtype}, routed experts as INT4" if plan.int4 else plan.dtype
    lines = [
        f"files: {plan.total_bytes:,} bytes = {plan.total_bytes / 1e9:,.2f} GB",
        f"loaded as {loaded}: {d.weight_bytes / 1e9:,.2f} GB on each of {d.devices} device(s)",
        f"active parameters a token: {plan.active_params:,}",
        f"cache: {plan.cache_bytes_per_token:,} bytes a token ({plan.dtype}), "
        f"{plan.cache_bytes_per_token * plan.max_positions / 1e9:,.2f} GB for {plan.max_positions:,} tokens",
    ]
    lines += [f"not counted: {what}" for what in plan.uncounted]
    what = f"{d.devices} device(s) of {d.memory_bytes / 1e9:,.0f} GB, {d.usable_bytes / 1e9:,.1f} GB of each usable"
    if d.fits:
        lines.append(
            f"{what}: the rest holds at most {d.cache_tokens:,} cached tokens in all, in latent pages alone: "
            "activations and compiled programs take some of it"
        )
    else:
        lines.append(f"{what}: DOES NOT FIT, the weights alone need {d.weight_bytes / 1e9:,.2f} GB of each")
    return lines


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser("python -m kimijax.plan", description="Memory of a model, before it is loaded.")
    p.add_argument("--model", required=True, help="checkpoint directory, or a config.json")
    p.add_argument("--json", action="store_true", help="print JSON instead of tables")
    p.add_argument("--memory-gb", type=float, default=141.0, help="of one device, in 10^9 bytes (default: H200)")
    p.add_argument("--devices", type=int, default=8, help="tensor-parallel devices")
    fraction = "of a device's memory that JAX may take, for weights, cache and everything else; the default is what it "
    fraction += "takes of a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise (default: %(default)s)"
    p.add_argument("--fraction", type=float, default=JAX_FRACTION, help=fraction)
    p.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the loaded floats; CPUs load float32")
    p.add_argument("--unpack-int4", action="store_true", help="INT4 experts become floats, as they do on CPUs")
    return p


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code (2: the model or the settings cannot be planned for)."""
    args = parser().parse_args(argv)
    try:
        plan = make_plan(
            args.model,
            memory_bytes=int(args.memory_gb * 1e9),
            devices=args.devices,
            fraction=args.fraction,
            dtype=args.dtype,
            unpack_int4=args.unpack_int4,
        )
    except (ConfigError, CheckpointError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(plan.to_json(), indent=2))
        return 0
    console = Console()
    console.print(render(plan))
    console.print(render_axes(plan))
    for line in summary(plan):
        console.print(line, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
