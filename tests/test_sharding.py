"""The table from logical to mesh axes: what it refuses, and where arrays end up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from kimijax.errors import ConfigError
from kimijax.sharding import (
    MESH_AXES,
    PRESETS,
    TABLE,
    Preset,
    abstract_mesh,
    group_size,
    make_mesh,
    n_parts,
    named_sharding,
    partition,
    placement,
    preset_of,
    preset_on,
    shard,
)


def larger(sizes: dict[str, int]) -> dict[str, int]:
    return {axis: n for axis, n in sizes.items() if n > 1}


def test_mesh_has_every_device_once() -> None:
    mesh = make_mesh()
    assert mesh.axis_names == MESH_AXES
    assert larger(dict(mesh.shape)) == {"tensor": 8}
    mesh = make_mesh(data=2)
    assert larger(dict(mesh.shape)) == {"data": 2, "tensor": 4}
    assert group_size(mesh) == 4
    assert set(mesh.devices.flat) == set(jax.devices())
    assert make_mesh(jax.devices()[:3]).shape["tensor"] == 3


@pytest.mark.parametrize(("preset", "axis"), PRESETS.items())
def test_a_preset_puts_all_devices_of_a_group_on_its_axis(preset: Preset, axis: str) -> None:
    assert larger(dict(make_mesh(preset=preset).shape)) == {axis: 8}
    mesh = abstract_mesh(64, data=2, preset=preset)
    assert larger(dict(mesh.shape)) == {"data": 2, axis: 32}
    assert preset_on(mesh) == preset
    assert preset_on(abstract_mesh(1, preset=preset)) == "tp"


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_may_name_its_devices(preset: Preset) -> None:
    assert preset_of(preset, 8) == preset_of(f"{preset}8", 8) == preset
    with pytest.raises(ConfigError, match=rf"preset: found '{preset}8', expected {preset}4 for 4 devices"):
        preset_of(f"{preset}8", 4)


@pytest.mark.parametrize("name", ["", "pp", "tp-8", "8", "TP", "dp"])
def test_other_presets_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="expected one of tp, ep, dp-attention, dcp"):
        preset_of(name, 8)


@pytest.mark.parametrize("data", [0, -1, 3, 16])
def test_uneven_meshes_are_refused(data: int) -> None:
    with pytest.raises(ConfigError, match=f"data: found {data}, expected a divisor of the 8 devices"):
        make_mesh(data=data)


def test_partition_reads_the_table() -> None:
    up, latents = ("experts", "gate_up", "expert_ffn", "hidden"), ("pages", "positions", "latent")
    expected: dict[Preset, tuple[P, P, P]] = {
        "tp": (P(None, None, "tensor", None), P(None, None, None), P("data", None, "tensor")),
        "ep": (P("expert", None, None, None), P(None, None, None), P("data", None, "expert")),
        "dp-attention": (
            P("attention", None, None, None),
            P("attention", None, None),
            P(("data", "attention"), None, None),
        ),
        "dcp": (P(None, None, "context", None), P(None, "context", None), P("data", None, "context")),
    }
    for preset, specs in expected.items():
        mesh = abstract_mesh(8, data=2, preset=preset)
        found = [partition(axes, mesh) for axes in (up, latents, ("batch", "replicated", "heads"))]
        assert tuple(found) == specs, preset
    assert partition(up, abstract_mesh(1)) == P(None, None, None, None)
    assert partition((), abstract_mesh(8)) == P()
    assert {name for names in TABLE.values() for name in names} == set(MESH_AXES)


def test_every_device_of_a_group_holds_its_part_of_the_vocabulary() -> None:
    for preset in PRESETS:
        assert n_parts("vocab", abstract_mesh(8, preset=preset)) == 8


def test_unknown_axis_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"logical axis: found 'head', expected one of batch, .*heads"):
        partition(("hidden", "head"), abstract_mesh(8))


@pytest.mark.parametrize(
    "axes",
    [("heads", "ffn"), ("vocab", "hidden", "heads"), ("ffn", "ffn"), ("batch", "vocab"), ("positions", "expert_ffn")],
)
def test_two_dimensions_on_one_mesh_axis_are_refused(axes: tuple[str, ...]) -> None:
    """Also where the axis in question has one device on this mesh: another mesh would differ."""
    for mesh in (abstract_mesh(8), abstract_mesh(1)):
        with pytest.raises(ConfigError, match="at most one dimension on a mesh axis"):
            partition(axes, mesh)


def test_uneven_split_is_refused() -> None:
    mesh = make_mesh()
    assert named_sharding(mesh, ("vocab", "hidden"), (128, 7)).spec == P("tensor", None)
    with pytest.raises(ConfigError, match=r"mesh axis tensor: found 8, expected a divisor of vocab \(129\)"):
        named_sharding(mesh, ("vocab", "hidden"), (129, 64))
    named_sharding(make_mesh(jax.devices()[:3]), ("vocab", "hidden"), (129, 64))


def test_rows_that_do_not_come_out_even_are_repeated() -> None:
    mesh = abstract_mesh(8, data=2, preset="dp-attention")
    assert placement(("batch", "hidden"), (16, 5), mesh) == P(("data", "attention"), None)
    assert placement(("batch", "hidden"), (12, 5), mesh) == P(None, None)
    assert placement(("replica", "vocab"), (3, 8), mesh) == P(None, "attention")


def test_shard_places_an_activation() -> None:
    x = np.arange(4 * 16, dtype=np.float32).reshape(4, 16)
    assert shard(jnp.asarray(x), "batch", "ffn").sharding.num_devices == 1  # no mesh: as it was
    mesh = make_mesh(data=2)
    with jax.set_mesh(mesh):
        out = jax.jit(lambda x: shard(x * 2, "batch", "ffn"))(x)
    assert out.sharding.is_equivalent_to(named_sharding(mesh, ("batch", "ffn")), 2)
    assert {s.data.shape for s in out.addressable_shards} == {(2, 4)}
    np.testing.assert_array_equal(out, x * 2)
