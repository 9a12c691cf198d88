"""The table from logical to mesh axes: what it refuses, and where arrays end up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from kimijax.errors import ConfigError
from kimijax.sharding import MESH_AXES, TENSOR_PARALLEL, make_mesh, named_sharding, partition, shard


def test_mesh_has_every_device_once() -> None:
    mesh = make_mesh()
    assert dict(mesh.shape) == {"data": 1, "tensor": 8}
    mesh = make_mesh(data=2)
    assert dict(mesh.shape) == {"data": 2, "tensor": 4}
    assert set(mesh.devices.flat) == set(jax.devices())
    assert make_mesh(jax.devices()[:3]).shape["tensor"] == 3


@pytest.mark.parametrize("data", [0, -1, 3, 16])
def test_uneven_meshes_are_refused(data: int) -> None:
    with pytest.raises(ConfigError, match=f"data: found {data}, expected a divisor of the 8 devices"):
        make_mesh(data=data)


def test_partition_reads_the_table() -> None:
    assert partition(("experts", "gate_up", "ffn", "hidden")) == P(None, None, "tensor", None)
    assert partition(("batch", "replicated", "vocab")) == P("data", None, "tensor")
    assert partition(()) == P()
    assert partition(("experts", "hidden", "ffn"), TENSOR_PARALLEL | {"experts": "tensor", "ffn": None}) == P(
        "tensor", None, None
    )
    assert set(TENSOR_PARALLEL.values()) <= {None, *MESH_AXES}


def test_unknown_axis_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"logical axis: found 'head', expected one of batch, .*heads"):
        partition(("hidden", "head"))


@pytest.mark.parametrize("axes", [("heads", "ffn"), ("vocab", "hidden", "heads"), ("ffn", "ffn"), ("groups", "words")])
def test_two_dimensions_on_one_mesh_axis_are_refused(axes: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="at most one dimension on a mesh axis"):
        partition(axes)


def test_a_table_may_make_axes_collide() -> None:
    axes = ("experts", "ffn")
    assert partition(axes) == P(None, "tensor")
    with pytest.raises(ConfigError, match="mesh axis"):
        partition(axes, TENSOR_PARALLEL | {"experts": "tensor"})


def test_uneven_split_is_refused() -> None:
    mesh = make_mesh()
    assert named_sharding(mesh, ("vocab", "hidden"), (128, 7)).spec == P("tensor", None)
    with pytest.raises(ConfigError, match=r"mesh axis tensor: found 8, expected a divisor of vocab \(129\)"):
        named_sharding(mesh, ("vocab", "hidden"), (129, 64))
    named_sharding(make_mesh(jax.devices()[:3]), ("vocab", "hidden"), (129, 64))


def test_shard_places_an_activation() -> None:
    x = np.arange(4 * 16, dtype=np.float32).reshape(4, 16)
    assert shard(jnp.asarray(x), "batch", "ffn").sharding.num_devices == 1  # no mesh: as it was
    mesh = make_mesh(data=2)
    with jax.set_mesh(mesh):
        out = jax.jit(lambda x: shard(x * 2, "batch", "ffn"))(x)
    assert out.sharding.is_equivalent_to(named_sharding(mesh, ("batch", "ffn")), 2)
    assert {s.data.shape for s in out.addressable_shards} == {(2, 4)}
    np.testing.assert_array_equal(out, x * 2)
