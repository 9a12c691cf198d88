"""What the weights take on each device is told before anything is read, and too little memory is refused."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from kimijax import checkpoint, memory
from kimijax.config import load_config
from kimijax.errors import ConfigError
from kimijax.memory import Footprint
from kimijax.model import declare_target
from kimijax.names import parameters
from kimijax.sharding import MESH_AXES, make_mesh

from .checkpoint_cases import config_of, loaded
from .golden import write_checkpoint


@dataclass(frozen=True)
class Client:
    def process_index(self) -> int:
        return 0


@dataclass(frozen=True)
class Gpu:
    """As much of a `jax.Device` as shardings look at."""

    id: int
    stats: tuple[tuple[str, int], ...] | None
    platform: str = "gpu"
    device_kind: str = "GPU"
    process_index: int = 0
    client: Client = Client()

    def memory_stats(self) -> dict[str, int] | None:
        return None if self.stats is None else dict(self.stats)


def gpus(n: int, limit: int, in_use: int = 0) -> Mesh:
    devices = [Gpu(i, (("bytes_limit", limit), ("bytes_in_use", in_use))) for i in range(n)]
    return Mesh(np.array(devices, object).reshape(1, 1, 1, 1, n), MESH_AXES)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint no array of which may be read."""
    directory = write_checkpoint("kimi_k25", tmp_path / "c", quantization="int4")
    monkeypatch.setattr(checkpoint, "read_leaves", lambda *_, **__: pytest.fail("arrays were read"))
    return directory


def footprint(*, int4: bool, dtype: Any = jnp.bfloat16) -> Footprint:
    config = checkpoint.with_int4(config_of("kimi_k25")) if int4 else config_of("kimi_k25")
    return Footprint.of(parameters(declare_target(config, dtype=jnp.dtype(dtype), int4=int4)))


def refusal(directory: Path, **options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        checkpoint.load(directory, load_config(directory), **options)
    return error.value


def test_footprint_is_what_a_load_keeps(tmp_path: Path) -> None:
    directory = write_checkpoint("kimi_k25", tmp_path / "c", quantization="int4")
    for int4 in (True, False):
        model = checkpoint.load(directory, load_config(directory), mesh=make_mesh(), unpack_int4=not int4)
        held = sum(a.addressable_shards[0].data.nbytes for a in loaded(model).values())
        assert footprint(int4=int4).on_each(8) == held
    assert footprint(int4=False).sharded > 2 * footprint(int4=True).sharded


def test_too_small_gpus_are_refused_with_the_number_that_would_do(directory: Path) -> None:
    need = footprint(int4=True)
    free = need.on_each(8)
    assert need.fewest_devices(free) == 8
    error = refusal(directory, mesh=gpus(4, free + 1000, 1000))  # what is in use is not free
    assert error.field == "devices"
    gb = "{:.2f} GB".format
    for text in (
        f"found '4 devices with {gb(free / 1e9)} free on each'",
        f"expected {gb(need.on_each(4) / 1e9)} on each for the weights alone",
        f"use 8 devices, which need {gb(free / 1e9)} on each",
    ):
        assert text in str(error)


def test_gpus_just_large_enough_are_taken(directory: Path) -> None:
    for n in (1, 4, 8):
        free = footprint(int4=True).on_each(n)
        with pytest.raises(pytest.fail.Exception, match="arrays were read"):
            checkpoint.load(directory, load_config(directory), mesh=gpus(n, free))
        refusal(directory, mesh=gpus(n, free - 1))


def test_unpacked_experts_count_as_unpacked(directory: Path) -> None:
    free = footprint(int4=True, dtype=jnp.float32).on_each(8)
    refusal(directory, mesh=gpus(8, free), unpack_int4=True)
    refusal(directory, mesh=gpus(8, footprint(int4=False).on_each(8)), unpack_int4=True, dtype=jnp.float32)


def test_replicated_weights_that_fit_nowhere(directory: Path) -> None:
    need = footprint(int4=True)
    assert need.fewest_devices(need.replicated) is None
    error = refusal(directory, mesh=gpus(8, need.replicated))
    assert f"use larger devices: split over {need.divisor}, the most that divide the model" in str(error)


def test_groups_divide_the_model() -> None:
    need = Footprint(sharded=1200, replicated=10, divisor=12)
    assert [need.fewest_devices(m) for m in (1210, 1209, 250, 211, 209, 110, 109)] == [1, 2, 6, 6, 12, 12, None]


def test_cpu_devices_share_the_host(directory: Path) -> None:
    """Eight of them hold one copy of what is replicated."""
    need = footprint(int4=False, dtype=jnp.float32)
    total = need.sharded + need.replicated
    options = {"unpack_int4": True, "dtype": jnp.float32}
    for mesh in (None, make_mesh()):
        error = refusal(directory, mesh=mesh, free=lambda _: total - 1, **options)
        assert error.field == "host memory"
        assert f"{total / 1e9:.2f} GB for the weights alone" in str(error)
        with pytest.raises(pytest.fail.Exception, match="arrays were read"):
            checkpoint.load(directory, load_config(directory), mesh=mesh, free=lambda _: total, **options)


def test_nothing_is_checked_where_nobody_knows(directory: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="arrays were read"):
        checkpoint.load(directory, load_config(directory), free=lambda _: None)
    for stats in (None, (("bytes_in_use", 5),)):
        assert memory.free_memory(Gpu(0, stats)) is None
    assert memory.free_memory(Gpu(0, (("bytes_limit", 7), ("bytes_in_use", 5)))) == 2


def test_host_memory_is_what_linux_and_the_container_give(tmp_path: Path) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    assert memory._host_memory(meminfo, cgroup) is None  # no Linux
    meminfo.write_text("MemTotal:       9000 kB\nMemAvailable:   5000 kB\nHugePages_Total:       0\n")
    assert memory._host_memory(meminfo, cgroup) == 5_120_000
    cgroup.mkdir()
    (cgroup / "memory.current").write_text("1000000\n")
    (cgroup / "memory.stat").write_text("anon 700000\nactive_file 200000\ninactive_file 100000\n")
    for limit, free in (("max", 5_120_000), ("3000000", 2_300_000), ("9000000", 5_120_000), ("600000", 0)):
        (cgroup / "memory.max").write_text(limit + "\n")
        assert memory._host_memory(meminfo, cgroup) == free


def test_the_real_host_has_memory() -> None:
    free = memory.free_memory(jax.devices()[0])
    assert free is None or free > 0
