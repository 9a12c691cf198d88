"""One mesh, one table from logical axes to mesh axes, and a translator that refuses collisions.

Parameters and activations name their dimensions by logical axes; only this table knows where they live. The default
table is tensor-parallel: heads, expert and MLP width, and vocabulary are split; everything else is replicated.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from .errors import ConfigError

MESH_AXES = ("data", "tensor")

TENSOR_PARALLEL: dict[str, str | None] = {
    "batch": "data",
    "vocab": "tensor",
    "heads": "tensor",
    "ffn": "tensor",
    "experts": None,
    "hidden": None,
    "gate_up": None,  # the pair (gate, up)
    "q_rank": None,
    "latent": None,
    "head_dim": None,
    "groups": "tensor",  # INT4 scales along a split input axis
    "words": "tensor",  # INT4 words along a split input axis
    "replicated": None,
}


def make_mesh(devices: Sequence[Any] | None = None, *, data: int = 1) -> Mesh:
    """A mesh over `devices` (`jax.Device`s; default: all): `data` replicas of a tensor-parallel group."""
    devices = list(jax.devices() if devices is None else devices)
    if data < 1 or len(devices) % data:
        raise ConfigError("data", data, f"a divisor of the {len(devices)} devices")
    grid = np.asarray(devices).reshape(data, len(devices) // data)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto, AxisType.Auto))


def partition(axes: Sequence[str], table: dict[str, str | None] | None = None) -> PartitionSpec:
    """Mesh axes of an array whose dimensions are the logical `axes`.

    Raises:
      ConfigError: an axis is not in the table, or two dimensions would land on one mesh axis.
    """
    table = TENSOR_PARALLEL if table is None else table
    for axis in axes:
        if axis not in table:
            raise ConfigError("logical axis", axis, "one of " + ", ".join(sorted(table)))
    mesh_axes = [table[a] for a in axes]
    used = [m for m in mesh_axes if m is not None]
    if len(used) != len(set(used)):
        raise ConfigError("logical axes", tuple(axes), f"at most one dimension on a mesh axis, not {mesh_axes}")
    return PartitionSpec(*mesh_axes)


def named_sharding(mesh: Mesh, axes: Sequence[str], shape: Sequence[int] | None = None) -> NamedSharding:
    """`partition` on a mesh; with `shape`, also checks that every split dimension divides evenly."""
    spec = partition(axes)
    for axis, mesh_axis, size in zip(axes, spec, shape or (), strict=False):
        if mesh_axis is not None and size % mesh.shape[mesh_axis]:
            n = mesh.shape[mesh_axis]
            raise ConfigError(f"mesh axis {mesh_axis}", n, f"a divisor of {axis} ({size})", "use fewer devices")
    return NamedSharding(mesh, spec)


def parameter_sharding(mesh: Mesh | None, axes: Sequence[str], shape: Sequence[int]) -> Sharding:
    """`named_sharding` on a mesh; this process's first device where there is none."""
    return SingleDeviceSharding(jax.local_devices()[0]) if mesh is None else named_sharding(mesh, axes, shape)


def shard(x: jax.Array, *axes: str) -> jax.Array:
    """Constrain an activation to the table's placement; does nothing where no mesh is set (`jax.set_mesh`)."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, partition(axes))


def n_replicas() -> int:
    """Into how many parts the current mesh splits a batch; 1 where no mesh is set."""
    mesh, axis = jax.sharding.get_abstract_mesh(), TENSOR_PARALLEL["batch"]
    return 1 if mesh.empty or axis is None else mesh.shape[axis]
