"""What a model's parameters take on the devices, and the refusal of a model that cannot fit before it is read."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, Protocol

from flax import nnx
from jax.sharding import NamedSharding, Sharding

from .errors import ConfigError
from .names import Path
from .sharding import PRESETS, TABLE, Preset, group_size, preset_on

_MEMINFO = FilePath("/proc/meminfo")
_CGROUP = FilePath("/sys/fs/cgroup")  # version 2; absent under version 1 and on other systems than Linux


class Device(Protocol):
    """What is used of a `jax.Device`."""

    @property
    def platform(self) -> str: ...

    def memory_stats(self) -> dict[str, Any] | None: ...


type FreeMemory = Callable[[Device], int | None]  # bytes a device can still hold; None: nobody says


@dataclass(frozen=True)
class Footprint:
    """Bytes of a model's parameters under a preset."""

    sharded: int  # on the devices together, split over them
    replicated: int  # on each device
    divisor: int  # of every split dimension: the most devices that the model can be split over, and a multiple of all

    @staticmethod
    def of(declared: Mapping[Path, nnx.Param], preset: Preset = "tp") -> "Footprint":
        """Of a declaration: parameters whose values have shape and dtype, and whose metadata name the axes."""
        sharded = replicated = divisor = 0
        for param in declared.values():
            value = param.get_value()
            sizes = split_sizes(param.get_metadata()["axes"], value.shape, preset)
            nbytes = value.size * value.dtype.itemsize
            sharded, replicated = (sharded + nbytes, replicated) if sizes else (sharded, replicated + nbytes)
            divisor = math.gcd(divisor, *sizes.values())
        return Footprint(sharded, replicated, divisor or 1)

    def on_each(self, devices: int) -> int:
        """Bytes on each of `devices`."""
        return -(-self.sharded // devices) + self.replicated

    def fewest_devices(self, memory: int) -> int | None:
        """The smallest group that divides the model and whose devices need `memory` bytes at most; None: no group."""
        fitting = (n for n in range(1, self.divisor + 1) if self.divisor % n == 0 and self.on_each(n) <= memory)
        return next(fitting, None)


def split_sizes(axes: Sequence[str], shape: Sequence[int], preset: Preset) -> dict[str, int]:
    """Logical axis -> size of the dimensions that a preset splits."""
    return {axis: size for axis, size in zip(axes, shape, strict=True) if PRESETS[preset] in TABLE[axis]}


def free_memory(device: Device) -> int | None:
    """Bytes that can still be allocated on a device.

    Accelerators: what the backend's allocator may take in all (JAX gives it 75 % of a GPU unless told otherwise) less
    what arrays hold now; None where the backend keeps no such count. CPU devices: what the host can give, which they
    share; None where the system does not tell, which is everywhere but on Linux.
    """
    if device.platform == "cpu":
        return _host_memory()
    stats = device.memory_stats()
    if stats is None or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def _host_memory(meminfo: FilePath = _MEMINFO, cgroup: FilePath = _CGROUP) -> int | None:
    """Bytes the host can give without swapping, and no more than the limit of the container (cgroup version 2)."""
    if not meminfo.is_file():
        return None
    kilobytes = _table(meminfo)["MemAvailable:"]
    limit = cgroup / "memory.max"
    if not limit.is_file() or limit.read_text().strip() == "max":
        return kilobytes * 1024
    stat = _table(cgroup / "memory.stat")
    cached = stat["active_file"] + stat["inactive_file"]  # file pages make room when memory is asked for
    used = int((cgroup / "memory.current").read_text()) - cached
    return min(kilobytes * 1024, max(0, int(limit.read_text()) - used))


def _table(file: FilePath) -> dict[str, int]:
    """First word -> second word of each line."""
    return {words[0]: int(words[1]) for words in map(str.split, file.read_text().splitlines())}


def check_memory(
    declared: Mapping[Path, nnx.Param], shardings: Mapping[Path, Sharding], free: FreeMemory = free_memory
) -> None:
    """Refuses parameters that cannot lie on this process's devices.

    The weights alone are counted: cache and activations come on top, so a model that passes may still be too large to
    serve (`kimijax.plan` tells). CPU devices share the host's memory and each distinct shard lies there once. Nothing
    is checked where `free` says None.

    Args:
      declared: the parameters as they will be kept: unpacked INT4 counts as unpacked.
      shardings: of each, by the same paths.
      free: bytes that a device can hold.
    Raises:
      ConfigError: what the devices have, what they need, and how many devices would do.
    """
    need: dict[Device, int] = {}
    host = 0
    for path, param in declared.items():
        value, sharding = param.get_value(), shardings[path]
        nbytes = math.prod(sharding.shard_shape(value.shape)) * value.dtype.itemsize
        places = sharding.addressable_devices_indices_map(value.shape)
        host += nbytes * len({str(index) for index in places.values()})
        for device in places:
            need[device] = need.get(device, 0) + nbytes
    for device, nbytes in need.items():
        on_host = device.platform == "cpu"
        wanted, has = host if on_host else nbytes, free(device)
        if has is not None and wanted > has:
            raise _host_error(wanted, has) if on_host else _device_error(declared, shardings, nbytes, has)


def _host_error(need: int, free: int) -> ConfigError:
    fix = "load on GPUs, on a host with more memory, in bfloat16, or close what else fills the memory"
    return ConfigError("host memory", f"{_gb(free)} available", f"{_gb(need)} for the weights alone", fix)


def _device_error(
    declared: Mapping[Path, nnx.Param], shardings: Mapping[Path, Sharding], need: int, free: int
) -> ConfigError:
    sharding = next(iter(shardings.values()))
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    footprint = Footprint.of(declared, "tp" if mesh is None else preset_on(mesh))
    devices = 1 if mesh is None else group_size(mesh)
    enough = footprint.fewest_devices(free)
    if enough is None:
        most = footprint.divisor
        fix = f"use larger devices: split over {most}, the most that divide the model, {_gb(footprint.on_each(most))}"
        fix += " are needed on each"
    else:
        fix = f"use {enough} devices, which need {_gb(footprint.on_each(enough))} on each"
    found = f"{devices} device{'s' * (devices > 1)} with {_gb(free)} free on each"
    return ConfigError("devices", found, f"{_gb(need)} on each for the weights alone", fix)


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.2f} GB"
