"""Bytes of a model before any weight is read: in the files, and on each of N devices under a preset.

Shapes come from the model's own declaration and its sharding table; file bytes from the safetensors headers where the
directory has them, else from the published form that `config.json` describes (bf16, with INT4 experts or fp8 blocks
where it says so).
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path as FilePath
from typing import Any

import jax.numpy as jnp
from flax import nnx

from .checkpoint import CheckpointIndex, inspect, with_int4
from .config import Int4Config, TargetConfig, load_config, read_json
from .errors import CheckpointError, ConfigError
from .file_sizes import COMPONENTS, Skipped, component, header_bytes, published_bytes, published_vision
from .memory import split_sizes
from .model import declare_target
from .names import Path, name_table, parameters
from .quant import NIBBLES_PER_WORD
from .safetensors_io import INDEX_FILE
from .sharding import TABLE, Preset, abstract_mesh, n_parts

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
    """One of `devices` equal devices, and what it holds of the weights and of the cache.

    The latent cache has no head axis. `tp` and `ep` therefore repeat it on every device, `dp-attention` keeps a request
    on one device, and `dcp` keeps a part of every page on each.
    """

    devices: int
    preset: Preset
    memory_bytes: int
    usable_bytes: int  # memory_bytes times the fraction that JAX may take
    weight_bytes: int
    expert_bytes: int  # of the weights: the device's part of the routed experts
    other_sharded_bytes: int
    replicated_bytes: int
    cache_bytes_per_token: int  # of a token, on each device that holds it or a part of it
    cache_groups: int  # devices that hold different tokens: all of them under dp-attention, else 1

    def cache_tokens_beside(self, nbytes: int) -> int:
        """Tokens whose latents would fill what the weights and `nbytes` more leave of each device, in all."""
        free = max(0, self.usable_bytes - self.weight_bytes - nbytes)
        return free // self.cache_bytes_per_token * self.cache_groups

    @property
    def cache_tokens(self) -> int:
        """Whose latents alone would fill the rest, over all requests; 0 where the weights do not fit."""
        return self.cache_tokens_beside(0)

    @property
    def cache_tokens_on_each(self) -> int:
        """As many of them as one device has a part in."""
        return self.cache_tokens // self.cache_groups

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
        d = self.device
        derived = {"cache_tokens": d.cache_tokens, "cache_tokens_on_each": d.cache_tokens_on_each, "fits": d.fits}
        device = asdict(d) | derived
        sums = {"params": self.params, "text_bytes": self.text_bytes, "total_bytes": self.total_bytes}
        full = {"full_context_cache_bytes": self.cache_bytes_per_token * self.max_positions}
        return {**asdict(self), **sums, **full, "device": device}


def make_plan(
    path: str | FilePath,
    *,
    memory_bytes: int = 141_000_000_000,
    devices: int = 8,
    preset: Preset = "tp",
    fraction: float = JAX_FRACTION,
    dtype: str = "bfloat16",
    unpack_int4: bool = False,
) -> Plan:
    """Plans for a checkpoint directory, or for a `config.json` alone.

    Args:
      path: the directory or the JSON file.
      memory_bytes: of one device.
      devices: of the group that serves.
      preset: how they lie.
      fraction: of a device's memory that JAX may take, for weights, cache and everything else.
      dtype: of the float parameters as loaded, and of the cache: bfloat16 or float32 (what a CPU loads by default).
      unpack_int4: INT4 experts become floats of `dtype` when they are loaded, as they do on a CPU.
    Raises:
      ConfigError: the config or a setting is not supported, or a split dimension is no multiple of `devices`.
      CheckpointError: files are missing or faulty, or their tensors are not those of the config.
    """
    found = make_plans(
        path,
        (preset,),
        memory_bytes=memory_bytes,
        devices=devices,
        fraction=fraction,
        dtype=dtype,
        unpack_int4=unpack_int4,
    )[preset]
    if isinstance(found, ConfigError):
        raise found
    return found


def make_plans(
    path: str | FilePath,
    presets: Iterable[Preset],
    *,
    memory_bytes: int,
    devices: int,
    fraction: float = JAX_FRACTION,
    dtype: str = "bfloat16",
    unpack_int4: bool = False,
) -> dict[Preset, Plan | ConfigError]:
    """`make_plan` for several presets, whose files are read once; in place of a plan the reason why there is none."""
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
    declared = parameters(declare_target(config, dtype=jnp.dtype(dtype), int4=int4))
    cache = config.n_layers * config.latent_dim * jnp.dtype(dtype).itemsize

    def planned(preset: Preset) -> Plan | ConfigError:
        try:
            components = _components(declared, devices, preset, file_bytes)
        except ConfigError as error:
            return error
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
            device=_device(components, cache, memory_bytes, devices, preset, fraction),
        )

    return {preset: planned(preset) for preset in presets}


def _check_settings(memory_bytes: int, devices: int, fraction: float, dtype: str) -> None:
    for field, value in (("devices", devices), ("memory", memory_bytes)):
        if value <= 0:
            raise ConfigError(field, value, "a positive number")
    if not 0 < fraction <= 1:
        raise ConfigError("fraction", fraction, "a number above 0, at most 1")
    if dtype not in DTYPES:
        raise ConfigError("dtype", dtype, " or ".join(DTYPES))


def _components(
    declared: Mapping[Path, nnx.Param], devices: int, preset: Preset, file_bytes: Counter[str]
) -> tuple[Component, ...]:
    """The declaration's parameters and their bytes on devices, by component."""
    params, sharded, replicated = Counter[str](), Counter[str](), Counter[str]()
    for path, param in declared.items():
        struct, name = param.get_value(), component(path)
        if not str(path[-1]).endswith("_scale"):
            params[name] += struct.size * (NIBBLES_PER_WORD if str(path[-1]).endswith("_packed") else 1)
        split = _is_split(path, struct.shape, param.get_metadata()["axes"], devices, preset)
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


def _is_split(path: Path, shape: tuple[int, ...], axes: tuple[str, ...], devices: int, preset: Preset) -> bool:
    """Whether the sharding table splits a parameter over the devices; refuses a split that does not come out even."""
    sizes = split_sizes(axes, shape, preset)
    for axis, size in sizes.items():
        if size % devices:
            where = ".".join(map(str, path))
            raise ConfigError(
                "devices", devices, f"a divisor of {axis} ({size}) of {where}", "use fewer devices, or another preset"
            )
    return bool(sizes)


def _device(
    components: tuple[Component, ...], cache: int, memory: int, devices: int, preset: Preset, fraction: float
) -> Device:
    experts = sum(c.sharded_bytes for c in components if c.name == "routed experts") // devices
    others = sum(c.sharded_bytes for c in components if c.name != "routed experts") // devices
    replicated = sum(c.replicated_bytes for c in components)
    mesh = abstract_mesh(devices, preset=preset)
    return Device(
        devices=devices,
        preset=preset,
        memory_bytes=memory,
        usable_bytes=int(memory * fraction),
        weight_bytes=experts + others + replicated,
        expert_bytes=experts,
        other_sharded_bytes=others,
        replicated_bytes=replicated,
        cache_bytes_per_token=-(-cache // n_parts("positions", mesh)),
        cache_groups=n_parts("pages", mesh),
    )


def _index(path: FilePath) -> CheckpointIndex | None:
    """The headers of a directory that has safetensors files, or claims to."""
    if not path.is_dir() or not (any(path.glob("*.safetensors")) or (path / INDEX_FILE).exists()):
        return None
    index = inspect(path)
    if index.problems:
        raise CheckpointError("\n".join([f"{path}: the headers cannot be counted", *index.problems]))
    return index
