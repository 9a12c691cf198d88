"""INT4 experts and routing compiled for real chips with none present: registers, spills, shared memory, instructions.

XLA's compiler takes a chip's description (`TARGETS`) in place of the chip, and writes the PTX that it made; ptxas and
nvdisasm make and read the machine code. Each chip's cases are compiled in a process of their own, since JAX reads its
flags once.
"""

import collections
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

TOOLS = {
    name: next(Path(sysconfig.get_paths()["purelib"]).glob(f"nvidia/*/bin/{name}"), None)
    for name in ("ptxas", "nvdisasm")
}
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None or None in TOOLS.values(),
    reason="needs jax-cuda13-plugin and the nvidia-cuda-nvcc and nvidia-cuda-nvdisasm wheels",
)

ROOT = Path(__file__).resolve().parents[2]
# Instructions a weight in the loop over K at decode sizes. An H200 can issue 3.5 in the time it takes to read one.
LIMIT = 2.8


@dataclass(frozen=True)
class Target:
    """A chip as XLA's compiler takes it."""

    kind: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int  # bytes a program can have
    multiprocessor_memory: int  # bytes of shared memory
    threads: int  # of a multiprocessor
    bandwidth: int  # bytes a second
    l2: int
    clock: float  # GHz
    memory: int

    @property
    def text(self) -> str:
        major, minor = self.capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {self.multiprocessor_memory} threads_per_core_limit: {self.threads}
  core_count: {self.multiprocessors} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth} l2_cache_size: {self.l2} clock_rate_ghz: {self.clock}
  device_memory_size: {self.memory} shared_memory_per_block_optin: {self.shared_memory}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: ACCELERATED_FEATURES }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{self.kind}"
"""


TARGETS = {
    "sm_90a": Target("NVIDIA H200", (9, 0), 132, 232448, 233472, 2048, 4_800_000_000_000, 52428800, 1.98, 151397597184),
    "sm_120a": Target(
        "NVIDIA RTX PRO 6000 Blackwell",
        (12, 0),
        188,
        101376,
        102400,
        1536,
        1_792_000_000_000,
        134217728,
        2.6,
        103079215104,
    ),
}

SCRIPT = """
import functools, json, sys, warnings
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
warnings.simplefilter("ignore")
from kimijax.pallas_kernels.int4_experts import int4_experts
from kimijax.pallas_kernels.route import route, router_logits
topology = topologies.get_topology_desc(platform="cuda", target_config=sys.argv[1], topology="1x1x1")
mesh = topologies.make_mesh(topology, (1,), ("x",))
where = NamedSharding(mesh, PartitionSpec())
def array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)
def compiled(name, function, *args):
    function.__name__ = name
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        done = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).compile()
    print(json.dumps([name, done.memory_analysis().temp_size_in_bytes]), flush=True)
k = 8
for name, e, d, f, partial, t in json.loads(sys.argv[2]):
    if name.startswith("route"):
        rule = functools.partial(route, n_chosen=k, scoring="sigmoid", renormalise=True, scale=2.827,
            block=8 if 8 < t <= 64 else None, implementation="pallas")
        compiled(name, lambda *a: rule(*a), array(jnp.float32, t, e), array(jnp.float32, e))
        continue
    run = functools.partial(int4_experts, implementation="pallas", partial=partial)
    if name.startswith("layer"):
        def layer(normed, residual, router, bias, *params):
            routed = route(router_logits(normed, router), bias, n_chosen=k, scoring="sigmoid", renormalise=True,
                scale=2.827, implementation="pallas")
            return residual + run(normed, routed.chosen, routed.weights, *params)
        row = array(jnp.bfloat16, t, d)
        compiled(name, layer, row, row, array(jnp.bfloat16, e, d), array(jnp.float32, e),
            array(jnp.int32, e, 2, f, d // 8), array(jnp.int32, e, d, f // 8),
            array(jnp.bfloat16, e, 2, f, d // 32), array(jnp.bfloat16, e, d, f // 32))
        continue
    compiled(name, lambda *a: run(*a), array(jnp.bfloat16, t, d), array(jnp.int32, t, k), array(jnp.float32, t, k),
        array(jnp.int32, e, 2, f, d // 8), array(jnp.int32, e, d, f // 8),
        array(jnp.bfloat16, e, 2, f, d // 32), array(jnp.bfloat16, e, d, f // 32))
"""

PARTS = {"whole": (384, 7168, 2048, False), "tp8": (384, 7168, 256, False), "ep8": (48, 7168, 2048, True)}
DECODE, PREFILL = (1, 2, 4, 8, 16, 64), (256, 512, 2048)
CASES = [f"{part}_{t}" for part in PARTS for t in DECODE + PREFILL]
ROUTES = [f"route_{t}" for t in (1, 8, 16, 64, 2048)]
LAYERS = [f"layer_{part}_{t}" for part in ("whole", "tp8") for t in (1, 4, 8)]


@dataclass(frozen=True)
class Kernel:
    """A kernel's machine code."""

    name: str
    registers: int
    spilled: int  # bytes stored
    shared_memory: int
    threads: int
    loops: list[collections.Counter[str]]  # instructions of each loop with tensor core products, shortest first

    def instructions_per_weight(self, rows: int, block: int = 256) -> float | None:
        """Of the loop over K, each pass of which takes `block` inputs of `rows`; None where it is unrolled."""
        return self.loops[0].total() / (rows * block / self.threads) if self.loops else None


@pytest.fixture(scope="module", params=TARGETS)
def programs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> "Programs":
    return Programs(TARGETS[request.param], request.param, tmp_path_factory.mktemp(request.param))


class Programs:
    """All cases compiled for a chip."""

    def __init__(self, target: Target, arch: str, folder: Path) -> None:
        self.target, self.arch, self.folder = target, arch, folder
        cases = [(f"{part}_{t}", *PARTS[part], t) for part in PARTS for t in DECODE + PREFILL]
        cases += [(name, 384, 7168, 0, False, int(name.split("_")[1])) for name in ROUTES]
        cases += [(name, *PARTS[name.split("_")[1]], int(name.split("_")[2])) for name in LAYERS]
        # Of the passes of XLA's emitters only the PTX: writing all of them takes most of a minute for each kernel.
        flags = f"--xla_dump_to={folder} --xla_dump_emitter_re=ptx"
        environment = dict(os.environ, JAX_PLATFORMS="cpu", XLA_FLAGS=flags)
        command = [sys.executable, "-c", SCRIPT, target.text, json.dumps(cases)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-3000:]
        self.read: dict[str, dict[str, Kernel]] = {}
        self.temporaries = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))

    def thunks(self, case: str) -> str:
        """What the program launches, in order."""
        [path] = self.folder.glob(f"*jit_{case}.thunk_sequence.txt")
        return path.read_text()

    def kernels(self, case: str) -> dict[str, Kernel]:
        """By name; those that XLA made itself left out."""
        if case in self.read:
            return self.read[case]
        found = self.read[case] = {}
        for path in self.folder.glob(f"*jit_{case}.*ptx"):
            if re.search(r"\.entry (int4_|route|work_list)", path.read_text()):
                kernel = self.kernel(path, self.thunks(case))
                found[kernel.name] = kernel
        return found

    def kernel(self, ptx: Path, thunks: str) -> Kernel:
        cubin = ptx.with_suffix(".cubin")
        command = [str(TOOLS["ptxas"]), "-v", f"-arch={self.arch}", str(ptx), "-o", str(cubin)]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        command = [str(TOOLS["nvdisasm"]), "-c", str(cubin)]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        [name] = re.findall(r"Compiling entry function '(\w+)'", log)
        [launch] = {line for line in thunks.splitlines() if f" {name} " in line}
        return Kernel(
            name,
            int(re.findall(r"Used (\d+) registers", log)[0]),
            int(re.findall(r"(\d+) bytes spill stores", log)[0]),
            int(re.findall(r"shared_memory: (\d+)", launch)[0]),
            int(re.findall(r"threads: \[(\d+),", launch)[0]),
            loops(code),
        )


def loops(code: str) -> list[collections.Counter[str]]:
    """Instructions by name of each loop that has a tensor core's products, shortest first."""
    labels, listing = {}, []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(listing)
        elif one := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]+)(.*)", line):
            listing.append((one[1], one[2]))
    found = []
    for i, (name, operands) in enumerate(listing):
        target = re.search(r"(\.L_x_\d+)", operands)
        if name == "BRA" and target and labels.get(target[1], i) < i:
            body = collections.Counter(name for name, _ in listing[labels[target[1]] : i + 1])
            if body["HMMA"] + body["HGMMA"]:
                found.append(body)
    return sorted(found, key=lambda body: body.total())


@pytest.mark.parametrize("case", CASES + ROUTES)
def test_nothing_spills_and_shared_memory_suffices(programs: Programs, case: str) -> None:
    kernels = programs.kernels(case)
    assert len(kernels) == (1 if case in ROUTES else 2), f"kernels: {list(kernels)}"
    for kernel in kernels.values():
        assert kernel.spilled == 0, f"{kernel.name}: {kernel.spilled} bytes spilt, {kernel.registers} registers"
        found, limit = kernel.shared_memory, programs.target.shared_memory
        assert found <= limit, f"{kernel.name}: {found} bytes of shared memory, the chip has {limit}"


# A device with some of the experts takes blocks of 16 rows at 64 tokens, as others do at prefill sizes.
@pytest.mark.parametrize("case", [f"{part}_{t}" for part in PARTS for t in DECODE if (part, t) != ("ep8", 64)])
def test_instructions_per_weight_at_decode_sizes(programs: Programs, case: str) -> None:
    for kernel in programs.kernels(case).values():
        found = kernel.instructions_per_weight(128)  # 64 rows of gate and of up, or 128 of down
        # a device with 256 inputs of down has one block of them: without a loop where no slots are looped over
        assert found is not None or (kernel.name == "int4_down" and case.startswith("tp8"))
        assert found is None or found <= LIMIT, f"{kernel.name}: {found:.2f} instructions a weight, limit {LIMIT}"


@pytest.mark.parametrize("case", LAYERS)
def test_a_layer_is_few_kernels(programs: Programs, case: str) -> None:
    """Router, route, gate and up, down; then the residual, which takes the sum over splits of slots into its kernel."""
    launches = re.findall(r": k\w+ +\[[^]]*\] (\S+)", programs.thunks(case))
    own = [name for name in launches if re.match(r"int4_|route", name)]
    assert own == ["route", "int4_gate_up", "int4_down_direct"], launches
    router, residual = launches[: launches.index("route")], launches[launches.index("int4_down_direct") + 1 :]
    assert len(router) == 1, f"{len(router)} kernels before the routing: {launches}"
    assert len(residual) == 1, f"{len(residual)} kernels after the experts: {launches}"


@pytest.mark.parametrize("case", CASES)
def test_no_temporary_is_as_large_as_the_weights(programs: Programs, case: str) -> None:
    part, t = case.split("_")
    experts, hidden, width, _ = PARTS[part]
    rows = int(t) * 8
    found = programs.temporaries[case]
    # rows of h and of the result, the sums of splits, and down's copies of h
    limit = rows * 4 * (hidden + 14 * 2 * width) + rows * 2 * width * hidden // 64 + 2**20
    assert found <= limit, f"{found} bytes of temporaries, limit {limit}"
    assert found < 3 * experts * width * hidden // 2, f"{found} bytes of temporaries: as much as the layer's weights"
