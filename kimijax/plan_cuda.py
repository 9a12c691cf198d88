"""A decoding step compiled by XLA's GPU compiler for a named GPU, with no GPU, driver or CUDA library there.

It needs the packages of the extra `aot`, of jaxlib's own version. They are for an environment of their own: where they
are installed and no GPU is, JAX warns at every start that it found none.

Told are the launches of a step, which all-reduce XLA picks and how the step falls into CUDA graphs ("command buffers").
Autotuning, speed and what runs of NCCL do are not to be had this way.
"""

import importlib.util
import re
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh

from .config import TargetConfig
from .model import declare_target
from .plan_compile import (
    DUMP_TEXT,
    CompiledProgram,
    DeclaredPrograms,
    Sizes,
    check_sizes,
    on_mesh,
    only_file,
    program_of,
)
from .plan_gpus import Gpu
from .sharding import Preset, make_mesh

PLUGIN = "jax_plugins.xla_cuda13"
MISSING = (
    "skipped: compiling for a GPU needs XLA's CUDA compiler, which is not installed; in an environment of its own, "
    "pip install 'kimijax[aot]'"
)
SMALL = 3  # layers of the smaller stack: what is more in the other is its further layers'
_THUNK = re.compile(r"^( *)\d+: (k[A-Za-z]+)")
_NCCL = ("kAllReduce", "kAllGather", "kReduceScatter", "kAllToAll", "kCollectivePermute")


@dataclass(frozen=True)
class CudaProgram:
    """A program for a GPU, and what it launches. Counts are of the text: loops once, all branches."""

    program: CompiledProgram
    n_layers: int
    thunks: Mapping[str, int]  # of the whole program, by XLA's kind
    per_layer: Mapping[str, float]  # of one more MoE layer

    def launches(self, counts: Mapping[str, float]) -> dict[str, float]:
        """Kernels, copies, collectives by who runs them, loops, and CUDA graphs."""
        return {
            "kernels": counts.get("kCustomKernel", 0) + counts.get("kKernel", 0) + counts.get("kGemm", 0),
            "copies": counts.get("kCopy", 0),
            "one-shot collectives": counts.get("kCollectiveKernel", 0),
            "NCCL collectives": sum(counts.get(kind, 0) for kind in _NCCL),
            "loops": counts.get("kWhile", 0),
            "CUDA graphs": counts.get("kCommandBuffer", 0),
        }


def is_available() -> bool:
    """Whether the compiler is installed."""
    try:
        return importlib.util.find_spec(PLUGIN) is not None
    except ModuleNotFoundError:  # no package of plug-ins at all
        return False


def compile_for(
    gpu: Gpu,
    config: TargetConfig,
    sizes: Sizes,
    devices: int,
    preset: Preset,
    *,
    dtype: Any = jnp.bfloat16,
    int4: bool = True,
) -> CudaProgram:
    """The engine's program of decoding without drafts.

    Args:
      gpu: of each device.
      config: the target; at least SMALL + 1 layers.
      sizes: of the program.
      devices: of the group.
      preset: how they lie.
      dtype: of floats.
      int4: whether routed experts stay packed.
    """
    topology: Any = topologies.get_topology_desc(
        platform="cuda", target_config=target_description(gpu), topology=f"1x1x{devices}"
    )
    mesh = make_mesh(topology.devices, preset=preset)
    check_sizes(sizes, mesh)
    whole, thunks = _decode(config, sizes, mesh, dtype, int4)
    _, fewer = _decode(replace(config, n_layers=SMALL), sizes, mesh, dtype, int4)
    more = config.n_layers - SMALL
    per_layer = {kind: (n - fewer[kind]) / more for kind, n in thunks.items()}
    return CudaProgram(whole, config.n_layers, thunks, per_layer)


def _decode(
    config: TargetConfig, sizes: Sizes, mesh: Mesh, dtype: Any, int4: bool
) -> tuple[CompiledProgram, Counter[str]]:
    """The program and its thunks."""
    target = declare_target(config, dtype=jnp.dtype(dtype), int4=int4)
    programs = DeclaredPrograms(target, None, sizes, None, mesh)
    start = time.perf_counter()
    with on_mesh(mesh):
        lowered = programs.rounds_traced(0).lower(lowering_platforms=("cuda",))
    lower_seconds = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        compiled = lowered.compile(compiler_options={**DUMP_TEXT, "xla_dump_to": folder})
        seconds = time.perf_counter() - start
        assignment = only_file(folder, "*-buffer-assignment.txt").read_text()
        thunks = only_file(folder, "*.thunk_sequence_after_thunk_passes.txt").read_text()
    names = programs.weight_names()
    found = program_of("decode", compiled, assignment, names, lower_seconds=lower_seconds, compile_seconds=seconds)
    return found, count_thunks(thunks)


def count_thunks(text: str) -> Counter[str]:
    """By kind, from the text of XLA's thunk sequence."""
    return Counter(match[2] for line in text.splitlines() if (match := _THUNK.match(line)))


def target_description(gpu: Gpu) -> str:
    """What XLA's compiler must know of a GPU, in its own text form."""
    major, minor = gpu.compute_capability
    # XLA takes its own all-reduce kernels only where it is told of NVLink, NCCL's elsewhere.
    links = "device_interconnect_info { active_links: 18 }" if gpu.has_nvlink else ""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_memory}
  threads_per_core_limit: {gpu.sm_threads}
  core_count: {gpu.n_sms}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(gpu.bandwidth)}
  l2_cache_size: {gpu.l2}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory}
  shared_memory_per_block_optin: {gpu.block_shared_memory}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: ACCELERATED_FEATURES }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  {links}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.label}"
"""
