"""Where a training run's arrays lie: rows over `data`, the drafter over `tensor` by the one table, or over both (fsdp).

With `fsdp` a parameter and its optimiser state are also split over `data`, along the largest dimension that is whole so
far and that the number of groups divides (the first of several); a parameter without one is repeated. The compiler
gathers a parameter where it is used and adds gradients up where they are kept (ZeRO-3, arXiv:1910.02054).
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from kimijax.errors import ConfigError
from kimijax.sharding import make_mesh, parameter_sharding

from .draft_recipe import FitTable


def fit_mesh(fit: FitTable, n_devices: int, devices: Sequence[Any] | None = None) -> Mesh | None:
    """The mesh of a run: `data_parallel` groups of devices, each of which holds the whole drafter; None: one device.

    Args:
      fit: how many groups.
      n_devices: of the run.
      devices: to choose from; default all.
    Raises:
      ConfigError: more devices than there are, or a number that the groups do not divide.
    """
    devices = list(jax.devices() if devices is None else devices)
    if n_devices > len(devices):
        fix = "use fewer, or start on a machine that has them"
        raise ConfigError("target.devices", n_devices, f"at most {len(devices)}, the devices there are", fix)
    if n_devices % fit.data_parallel:
        fix = "groups of devices are of one size"
        raise ConfigError("fit.data_parallel", fit.data_parallel, f"a divisor of target.devices ({n_devices})", fix)
    if n_devices == 1:
        return None
    return make_mesh(devices[:n_devices], data=fit.data_parallel)


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
    """Micro-batches [A, B, ...] of this process's rows as one array, its rows split over the groups."""
    if mesh is None:
        return jax.device_put(x, repeated(None))
    return jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec(None, "data")), x)
