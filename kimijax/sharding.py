"""One mesh, one table from logical axes to mesh axes, and a translator that refuses collisions.

Parameters and activations name their dimensions by logical axes; only this table knows where they live. Every mesh has
the same five axes, most of them of size 1; their sizes alone say what is split and how:

    data       replicas of everything, each with its own rows of a batch (training)
    attention  rows of a batch and their cache; attention and dense weights repeated, experts whole, vocabulary split
    context    as `tensor`, and the cache by position
    expert     as `tensor`, but experts whole
    tensor     heads, widths, vocabulary

A preset puts all devices of a group on one of the last four.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from .errors import ConfigError

MESH_AXES = ("data", "attention", "context", "expert", "tensor")

type Preset = Literal["tp", "ep", "dp-attention", "dcp"]
PRESETS: dict[Preset, str] = {"tp": "tensor", "ep": "expert", "dp-attention": "attention", "dcp": "context"}

_MODEL = ("context", "expert", "tensor")
TABLE: dict[str, tuple[str, ...]] = {
    "batch": ("data", "attention"),
    "replica": ("data",),  # a batch whose rows the attention groups have exchanged
    "vocab": ("attention", *_MODEL),
    "heads": _MODEL,
    "ffn": _MODEL,  # of dense layers, shared experts and the drafter
    "experts": ("attention", "expert"),
    "expert_ffn": ("context", "tensor"),
    "expert_groups": ("context", "tensor"),  # INT4 scales along a split input axis
    "expert_words": ("context", "tensor"),  # INT4 words along a split input axis
    "pages": ("attention",),
    "positions": ("context",),  # of a page
    "hidden": (),
    "gate_up": (),  # the pair (gate, up)
    "q_rank": (),
    "latent": (),
    "head_dim": (),
    "replicated": (),
}

type AnyMesh = Mesh | AbstractMesh


def preset_of(name: str, devices: int) -> Preset:
    """A preset by its name, which may end in the number of devices: `tp`, `tp8`.

    Raises:
      ConfigError: no preset, or another number of devices.
    """
    base = name.rstrip("0123456789")
    count = name[len(base) :]
    for preset in PRESETS:
        if base == preset:
            if count and int(count) != devices:
                raise ConfigError("preset", name, f"{preset}{devices} for {devices} devices", "or leave out the number")
            return preset
    raise ConfigError("preset", name, "one of " + ", ".join(PRESETS))


def mesh_sizes(devices: int, *, data: int = 1, preset: Preset = "tp") -> tuple[int, ...]:
    """Sizes of MESH_AXES: `data` replicas of a group of devices that lie as the preset says.

    Raises:
      ConfigError: replicas that do not divide the devices.
    """
    if devices < 1 or data < 1 or devices % data:
        raise ConfigError("data", data, f"a divisor of the {devices} devices")
    sizes = dict.fromkeys(MESH_AXES, 1) | {"data": data}
    sizes[PRESETS[preset]] = devices // data
    return tuple(sizes.values())


def make_mesh(devices: Sequence[Any] | None = None, *, data: int = 1, preset: Preset = "tp") -> Mesh:
    """A mesh over `devices` (`jax.Device`s; default: all) with the sizes of `mesh_sizes`."""
    devices = list(jax.devices() if devices is None else devices)
    grid = np.asarray(devices).reshape(mesh_sizes(len(devices), data=data, preset=preset))
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def abstract_mesh(devices: int, *, data: int = 1, preset: Preset = "tp") -> AbstractMesh:
    """The mesh of as many devices, be they there or not: for shapes and sizes."""
    types = (AxisType.Auto,) * len(MESH_AXES)
    return AbstractMesh(mesh_sizes(devices, data=data, preset=preset), MESH_AXES, axis_types=types)


def preset_on(mesh: AnyMesh) -> Preset:
    """The preset that a mesh has; `tp` where its groups are single devices. ConfigError: a mixture of several."""
    found: list[Preset] = [preset for preset, axis in PRESETS.items() if mesh.shape[axis] > 1]
    if len(found) > 1:
        raise ConfigError("mesh", dict(mesh.shape), f"devices on one axis of {', '.join(PRESETS.values())}")
    return found[0] if found else "tp"


def group_size(mesh: AnyMesh) -> int:
    """Devices of one replica: what a parameter can be split over, but for `data`."""
    return mesh.size // mesh.shape["data"]


def split_axes(axis: str, mesh: AnyMesh) -> tuple[str, ...]:
    """The mesh axes, larger than 1, that a logical axis is split over. ConfigError: not in the table."""
    if axis not in TABLE:
        raise ConfigError("logical axis", axis, "one of " + ", ".join(sorted(TABLE)))
    return tuple(name for name in TABLE[axis] if mesh.shape[name] > 1)


def n_parts(axis: str, mesh: AnyMesh) -> int:
    """Into how many parts a logical axis is split."""
    return math.prod(mesh.shape[name] for name in split_axes(axis, mesh))


def partition(axes: Sequence[str], mesh: AnyMesh) -> PartitionSpec:
    """Mesh axes of an array whose dimensions are the logical `axes`.

    Raises:
      ConfigError: an axis is not in the table, or two dimensions would land on one mesh axis, be it of size 1.
    """
    spec = [split_axes(axis, mesh) for axis in axes]
    used = [name for axis in axes for name in TABLE[axis]]
    if len(used) != len(set(used)):
        found = [TABLE[axis] for axis in axes]
        raise ConfigError("logical axes", tuple(axes), f"at most one dimension on a mesh axis, not {found}")
    return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in spec))


def named_sharding(mesh: Mesh, axes: Sequence[str], shape: Sequence[int] | None = None) -> NamedSharding:
    """`partition` on a mesh; with `shape`, also checks that every split dimension divides evenly."""
    spec = partition(axes, mesh)
    for axis, size in zip(axes, shape or (), strict=False):
        parts = n_parts(axis, mesh)
        if size % parts:
            names = " x ".join(split_axes(axis, mesh))
            fix = "use fewer devices, or another preset"
            raise ConfigError(f"mesh axis {names}", parts, f"a divisor of {axis} ({size})", fix)
    return NamedSharding(mesh, spec)


def parameter_sharding(mesh: Mesh | None, axes: Sequence[str], shape: Sequence[int]) -> Sharding:
    """`named_sharding` on a mesh; this process's first device where there is none."""
    return SingleDeviceSharding(jax.local_devices()[0]) if mesh is None else named_sharding(mesh, axes, shape)


def current_mesh() -> AbstractMesh | None:
    """The mesh that is set (`jax.set_mesh`), or being traced under; None: a single device."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def is_even(axis: str, size: int, mesh: AnyMesh) -> bool:
    """Whether `size` elements of a logical axis come out even on a mesh."""
    return size % n_parts(axis, mesh) == 0


def placement(axes: Sequence[str], shape: Sequence[int], mesh: AnyMesh) -> PartitionSpec:
    """`partition` of an activation. Rows that do not come out even, a single one say, every group has whole: it is the
    engine and the trainer that make them even, where it counts."""
    whole = ("batch", "replica")
    uneven = {a for a, n in zip(axes, shape, strict=True) if a in whole and not is_even(a, n, mesh)}
    return partition(["replicated" if a in uneven else a for a in axes], mesh)


def shard(x: jax.Array, *axes: str) -> jax.Array:
    """Constrain an activation to the table's placement; does nothing where no mesh is set."""
    mesh = current_mesh()
    return x if mesh is None else jax.lax.with_sharding_constraint(x, placement(axes, x.shape, mesh))


def n_replicas() -> int:
    """Into how many parts the current mesh splits a batch; 1 where no mesh is set."""
    mesh = current_mesh()
    return 1 if mesh is None else n_parts("batch", mesh)
