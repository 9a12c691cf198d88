"""Where a training run's arrays lie: rows and the drafter by the one table, the drafter over `data` too with fsdp.

With `fsdp` a parameter and its optimiser state are also split over `data`, along the largest dimension that is whole so
far and that the number of groups divides (the first of several); a parameter without one is repeated. The compiler
gathers a parameter where it is used and adds gradients up where they are kept (ZeRO-3, arXiv:1910.02054).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from kimijax.drafter import Drafter
from kimijax.errors import ConfigError
from kimijax.sharding import (
    AnyMesh,
    Preset,
    abstract_mesh,
    is_even,
    make_mesh,
    n_parts,
    parameter_sharding,
    partition,
    preset_on,
    split_axes,
)

from .draft_recipe import FitTable


def fit_mesh(fit: FitTable, n_devices: int, preset: Preset = "tp") -> Mesh | None:
    """The mesh of a run: `data_parallel` groups of devices, each of which holds the whole drafter; None: one device.

    Args:
      fit: how many groups.
      n_devices: of the run; those of all processes where there are several.
      preset: how a group's devices lie.
    Raises:
      ConfigError: more devices than there are, or not all of several processes; a number that the groups do not
        divide, or rows that do not divide among those who take them.
    """
    devices, n_processes = jax.devices(), jax.process_count()
    if n_devices > len(devices):
        fix = "use fewer, or start on a machine that has them"
        raise ConfigError("target.devices", n_devices, f"at most {len(devices)}, the devices there are", fix)
    if n_processes > 1 and n_devices < len(devices):
        fix = "every process takes part in every update: use all devices, or start fewer processes"
        expected = f"{len(devices)}, the devices of all {n_processes} processes"
        raise ConfigError("target.devices", n_devices, expected, fix)
    if n_devices % fit.data_parallel:
        fix = "groups of devices are of one size"
        raise ConfigError("fit.data_parallel", fit.data_parallel, f"a divisor of target.devices ({n_devices})", fix)
    if n_devices == 1:
        return None
    mesh = make_mesh(devices[:n_devices], data=fit.data_parallel, preset=preset)
    parts = n_parts("batch", mesh)
    if fit.rows % parts:
        fix = f"fit.data_parallel is {fit.data_parallel}, target.preset {preset}"
        raise ConfigError("fit.rows", fit.rows, f"a multiple of the {parts} parts of the mesh that take rows", fix)
    return mesh


def check_mesh(drafter: Drafter, mesh: Mesh | None, fit: FitTable) -> None:
    """Refuses a run's mesh that does not divide a declared drafter, before anything is read onto it.

    Raises:
      ConfigError: names the dimension, and the numbers of groups that would do on as many devices.
    """
    if mesh is None or (fault := next(_uneven(drafter, mesh), None)) is None:
        return
    axis, size = fault
    parts = " x ".join(f"{name} ({mesh.shape[name]})" for name in split_axes(axis, mesh))
    fault = f"the drafter's {axis} ({size}) cannot be split over {parts}"

    def would_do(groups: int) -> bool:
        other = abstract_mesh(mesh.size, data=groups, preset=preset_on(mesh))
        return fit.rows % n_parts("batch", other) == 0 and next(_uneven(drafter, other), None) is None

    do = [str(n) for n in range(1, mesh.size + 1) if mesh.size % n == 0 and would_do(n)]
    if do:
        expected = f"{' or '.join(do)} for {mesh.size} devices and {fit.rows} rows"
        raise ConfigError("fit.data_parallel", fit.data_parallel, expected, fault)
    fix = f"{fault}, and no other fit.data_parallel would do with {fit.rows} rows"
    raise ConfigError("target.devices", mesh.size, "a number that divides the drafter", fix)


def _uneven(drafter: Drafter, mesh: AnyMesh) -> Iterator[tuple[str, int]]:
    """Logical axes, with their sizes, that do not come out even."""
    for _, variable in nnx.to_flat_state(nnx.state(drafter)):
        axes, shape = variable.get_metadata()["axes"], variable.get_value().shape
        yield from ((a, n) for a, n in zip(axes, shape, strict=True) if not is_even(a, n, mesh))


def row_share(mesh: Mesh | None) -> tuple[int, int]:
    """Which share of an update's rows this process brings, and of how many: processes that hold the same group of
    devices bring the same.

    Raises:
      ConfigError: groups that lie across processes otherwise than whole or in whole processes.
    """
    if mesh is None:
        return 0, 1
    rows = mesh.devices.reshape(n_parts("batch", mesh), -1)  # the first two axes split rows
    mine = [i for i, group in enumerate(rows) if any(d.process_index == jax.process_index() for d in group)]
    count, rest = divmod(len(rows), len(mine))
    if rest or mine[0] % len(mine) or mine != list(range(mine[0], mine[0] + len(mine))):
        expected = f"a divisor or a multiple of the {jax.process_count()} processes"
        raise ConfigError("fit.data_parallel", mesh.shape["data"], expected, "a group is whole processes, or in one")
    return mine[0] // len(mine), count


def split_over_data(spec: PartitionSpec, shape: Sequence[int], groups: int) -> PartitionSpec:
    """`spec` with one more dimension split over `data`, see the module; as it is where no dimension divides."""
    axes = [*spec, *[None] * (len(shape) - len(spec))]
    free = [i for i, axis in enumerate(axes) if axis is None and shape[i] % groups == 0]
    if not free:
        return spec
    axes[max(free, key=lambda i: (shape[i], -i))] = "data"
    return PartitionSpec(*axes)


def state_shardings(params: nnx.State, mesh: Mesh | None, *, fsdp: bool) -> nnx.State:
    """Placement of every variable, as a tree of the same form.

    Args:
      params: variables that name their logical axes; shapes suffice.
      mesh: of the run.
      fsdp: split over `data` too.
    Raises:
      ConfigError: a dimension that does not divide among the devices that the table splits it over.
    """

    def one(variable: nnx.Variable[Any]) -> nnx.Variable[Any]:
        shape = variable.get_value().shape
        sharding = parameter_sharding(mesh, variable.get_metadata()["axes"], shape)
        if fsdp and isinstance(sharding, NamedSharding):
            spec = split_over_data(sharding.spec, shape, sharding.mesh.shape["data"])
            sharding = NamedSharding(sharding.mesh, spec)
        return variable.replace(sharding)

    return nnx.from_flat_state([(path, one(variable)) for path, variable in nnx.to_flat_state(params)])


def optimizer_shardings(
    optimizer: optax.GradientTransformation, params: nnx.State, placed: nnx.State, mesh: Mesh | None
) -> optax.OptState:
    """Placement of the optimiser's state: what belongs to a parameter lies where it does, counts are repeated.

    Args:
      optimizer: whose state it is.
      params: shapes suffice.
      placed: their placement.
      mesh: of the run.
    """
    return optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, params),
        placed,
        transform_non_params=lambda _: repeated(mesh),
    )


def repeated(mesh: Mesh | None) -> Sharding:
    """The placement of what every device holds whole."""
    if mesh is None:
        return SingleDeviceSharding(jax.local_devices()[0])
    return NamedSharding(mesh, PartitionSpec())


def place_rows(x: np.ndarray, mesh: Mesh | None) -> jax.Array:
    """Micro-batches [A, B, ...] of this process's rows (`row_share`) as one array, its rows split over the groups."""
    if mesh is None:
        return jax.device_put(x, repeated(None))
    sharding = NamedSharding(mesh, partition(("replicated", "batch"), mesh))
    return jax.make_array_from_process_local_data(sharding, x)
