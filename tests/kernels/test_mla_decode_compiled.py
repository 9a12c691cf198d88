"""Attention over the latent cache compiled for real chips with none present: registers, spills, memory, instructions.

XLA's compiler takes a chip's description in place of the chip and writes the PTX that it made; ptxas and nvdisasm make
and read the machine code. Each chip's cases are compiled in a process of their own, since JAX reads its flags once.
`python tests/kernels/test_mla_decode_compiled.py` prints a table of all cases.
"""

import collections
import functools
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TOOLS = {
    name: next(Path(sysconfig.get_paths()["purelib"]).glob(f"nvidia/*/bin/{name}"), None)
    for name in ("ptxas", "nvdisasm")
}
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None or None in TOOLS.values(),
        reason="needs jax-cuda13-plugin and the nvidia-cuda-nvcc and nvidia-cuda-nvdisasm wheels",
    ),
]
LAYERS = "three layers"  # a program that calls the op for each


@dataclass(frozen=True)
class Target:
    """A chip as XLA's compiler takes it."""

    kind: str
    capability: tuple[int, int]
    processors: int
    shared_memory: int  # bytes a program can have
    processor_memory: int  # bytes of shared memory of a multiprocessor
    threads: int  # of a multiprocessor
    bandwidth: float  # bytes a second
    l2: int
    clock: float  # GHz
    memory: int
    issue: float  # the largest share of issue slots, see `Kernel.issue_share`

    @property
    def bytes_per_clock(self) -> float:
        """Of a multiprocessor's share of the memory."""
        return self.bandwidth / self.processors / (self.clock * 1e9)

    @property
    def text(self) -> str:
        major, minor = self.capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {self.processor_memory} threads_per_core_limit: {self.threads}
  core_count: {self.processors} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {int(self.bandwidth)} l2_cache_size: {self.l2} clock_rate_ghz: {self.clock}
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


# An H200 gets a block faster than any other chip does. A tile of 16 rows leaves it two thirds of its issue slots; 64
# rows, be they one tile or two, need all of them.
TARGETS = {
    "sm_90a": Target(
        kind="NVIDIA H200",
        capability=(9, 0),
        processors=132,
        shared_memory=232448,
        processor_memory=233472,
        threads=2048,
        bandwidth=4.8e12,
        l2=52428800,
        clock=1.98,
        memory=151397597184,
        issue=0.40,
    ),
    "sm_120a": Target(
        kind="NVIDIA RTX PRO 6000 Blackwell",
        capability=(12, 0),
        processors=188,
        shared_memory=101376,
        processor_memory=102400,
        threads=1536,
        bandwidth=1.792e12,
        l2=134217728,
        clock=2.6,
        memory=103079215104,
        issue=0.30,
    ),
}

SCRIPT = """
import functools, importlib, json, sys, warnings
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
warnings.simplefilter("ignore")
mla = importlib.import_module("kimijax.pallas_kernels.mla_decode")
shapes = importlib.import_module("kimijax.pallas_kernels.mla_decode.shapes")
topology = topologies.get_topology_desc(platform="cuda", target_config=sys.argv[1], topology="1x1x1")
mesh = topologies.make_mesh(topology, (1,), ("x",))
where = NamedSharding(mesh, PartitionSpec())
kind = {"rank": shapes.RANK, "scale": shapes.SCALE, "implementation": "pallas"}
def compiled(name, function, operands):
    function.__name__ = name
    operands = [jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=where) for one in operands]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        done = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).compile()
    print(json.dumps([name, done.memory_analysis().temp_size_in_bytes]), flush=True)
for case in shapes.CASES:
    name, operands = "_".join(case.name.split()), list(case.operands(jnp.bfloat16).values())
    if case.is_tree:
        operands.append(jax.ShapeDtypeStruct((case.batch, case.tokens, case.tokens), jnp.bool))
    def whole(q, pages, table, length, tree=None):
        return mla.mla_decode(q, pages, table, length, tree=tree, **kind)
    def part(q, pages, table, length, first):
        return mla.mla_decode_part(q, pages, table, length, first=first, page_size=case.page, **kind)
    if case.parts > 1:
        operands.append(jax.ShapeDtypeStruct((), jnp.int32))
    compiled(name, part if case.parts > 1 else whole, operands)
case = next(case for case in shapes.CASES if case.is_tree)
q, pages, table, length = case.operands(jnp.bfloat16).values()
tree = jax.ShapeDtypeStruct((case.batch, case.tokens, case.tokens), jnp.bool)
def layers(q, one, two, three, table, length, tree):
    for pages in (one, two, three):
        out = mla.mla_decode(q, pages, table, length, tree=tree, **kind)
        q = jnp.concatenate([out, q[..., shapes.RANK:]], axis=-1)
    return out
compiled("three_layers", layers, [q, pages, pages, pages, table, length, tree])
"""


@dataclass(frozen=True)
class Kernel:
    """A kernel's machine code."""

    name: str
    registers: int
    spilled: int  # bytes stored and loaded
    shared_memory: int
    threads: int
    programs: int
    loop: int  # instructions of one step over a block of cached rows; 0 where there is no loop
    wide_copies: int  # instructions that copy 16 bytes to shared memory, asynchronously

    def issue_share(self, block: int, target: Target) -> float:
        """Issue slots that a step needs, of those in the time that the chip's memory takes for its block: each of four
        schedulers issues one warp's instruction a clock. With several tiles the others read the block from the L2."""
        clocks = block * 576 * 2 / target.bytes_per_clock
        return self.loop * self.threads / 32 / 4 / clocks


class Programs:
    """All cases compiled for a chip."""

    def __init__(self, arch: str, folder: Path) -> None:
        self.arch, self.target, self.folder = arch, TARGETS[arch], folder
        # Of the passes of XLA's emitters only the PTX: writing all of them takes most of a minute for each kernel.
        flags = f"--xla_dump_to={folder} --xla_dump_emitter_re=ptx"
        root = str(Path(__file__).resolve().parents[2])
        environment = dict(
            os.environ, JAX_PLATFORMS="cpu", XLA_FLAGS=flags, PYTHONPATH=os.pathsep.join([root, *sys.path])
        )
        command = [sys.executable, "-c", SCRIPT, self.target.text]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        self.temporaries = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))

    def launches(self, case: str) -> list[str]:
        """What the program launches, in order."""
        [path] = self.folder.glob(f"*jit_{'_'.join(case.split())}.thunk_sequence.txt")
        return [line for line in path.read_text().splitlines() if line.strip()]

    @functools.cache  # noqa: B019
    def kernels(self, case: str) -> dict[str, Kernel]:
        """By name; those that XLA made itself left out."""
        name = "_".join(case.split())
        paths = self.folder.glob(f"*jit_{name}.*ptx")
        found = [self._kernel(one, case) for one in paths if ".entry mla_decode" in one.read_text()]
        return {kernel.name: kernel for kernel in found}

    def _kernel(self, ptx: Path, case: str) -> Kernel:
        cubin = ptx.with_suffix(".cubin")
        command = [str(TOOLS["ptxas"]), "-v", f"-arch={self.arch}", str(ptx), "-o", str(cubin)]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        command = [str(TOOLS["nvdisasm"]), "-c", str(cubin)]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        [name] = re.findall(r"Compiling entry function '(\w+)'", log)
        launch = next(line for line in self.launches(case) if f" {name} " in line)
        grid = re.findall(r"grid: \[(\d+), (\d+), (\d+)\]", launch)[0]
        return Kernel(
            name,
            int(re.findall(r"Used (\d+) registers", log)[0]),
            sum(int(one) for one in re.findall(r"(\d+) bytes spill", log)),
            int(re.findall(r"shared_memory: (\d+)", launch)[0]),
            int(re.findall(r"threads: \[(\d+),", launch)[0]),
            int(grid[0]) * int(grid[1]) * int(grid[2]),
            longest_loop(code),
            code.count("LDGSTS.E.BYPASS.128"),
        )


def longest_loop(code: str) -> int:
    """Instructions of the longest loop that has a tensor core's products."""
    labels, listing, longest = {}, [], 0
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(listing)
        elif one := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]+)(.*)", line):
            listing.append((one[1], one[2]))
    for i, (name, operands) in enumerate(listing):
        target = re.search(r"(\.L_x_\d+)", operands)
        if name == "BRA" and target and labels.get(target[1], i) < i:
            body = collections.Counter(name for name, _ in listing[labels[target[1]] : i + 1])
            if body["HMMA"] + body["HGMMA"]:
                longest = max(longest, body.total())
    return longest


def module(name: str) -> Any:
    return importlib.import_module(f"kimijax.pallas_kernels.mla_decode{name}")


CASES = module(".shapes").CASES


def plan_of(case: Any, target: Target) -> tuple[Any, Any]:
    """The plan, and the tile that it was made from."""
    op = module("")
    chip = next(chip for chip in op.CHIPS if target.kind.startswith(chip.kind))
    plan = op.plan_for(case.batch, case.tokens * case.heads, case.pages, case.page // case.parts, chip)
    return plan, next(tile for tile in chip.tiles if tile.rows == plan.rows)


@pytest.fixture(scope="module", params=TARGETS)
def programs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels(case: Any, programs: Programs) -> None:
    target, kernels = programs.target, programs.kernels(case.name)
    plan, tile = plan_of(case, target)
    assert set(kernels) == {"mla_decode", *(["mla_decode_merge"] if plan.splits > 1 else [])}
    for name, kernel in kernels.items():
        assert kernel.spilled == 0, f"{name}: {kernel.spilled} bytes spilled, {kernel.registers} registers"
        assert kernel.shared_memory <= target.shared_memory, f"{name}: {kernel.shared_memory} bytes of shared memory"
    found = kernels["mla_decode"]
    # As many programs as the plan counts on have room: a KiB of each is the system's.
    registers = found.registers * found.threads * tile.programs
    assert registers <= 65536, f"{tile.programs} programs take {registers} registers"
    memory = (found.shared_memory + 1024) * tile.programs
    assert memory <= target.processor_memory, f"{tile.programs} programs take {memory} bytes of shared memory"
    # Two blocks at once, so that one is under way while the other is multiplied.
    least = (plan.rows + 2 * plan.block) * 576 * 2
    assert found.shared_memory >= least, f"{found.shared_memory} bytes of shared memory hold less than two blocks"
    assert found.wide_copies, "cached rows are not copied 16 bytes at a time"
    share = found.issue_share(plan.block, target)
    limit = target.issue * {16: 1.0, 32: 1.5, 64: 2.75}[plan.rows]
    assert 0 < share <= limit, f"{found.loop} instructions a block of {plan.block}: {share:.2f} of the issue slots"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_temporaries(case: Any, programs: Programs) -> None:
    """The splits' results, and nothing that grows with the window."""
    plan, _ = plan_of(case, programs.target)
    parts = case.batch * plan.splits * case.tokens * case.heads * (512 + 1) * 4 if plan.splits > 1 else 0
    found = programs.temporaries["_".join(case.name.split())]
    assert found <= parts + 8192, f"{found} bytes of temporaries, of which the splits need {parts}"


def test_two_kernels_a_layer(programs: Programs) -> None:
    """What XLA makes of table, lengths and tree is there once for all layers; and there are no copies."""
    launches = programs.launches(LAYERS)
    own = [line for line in launches if " mla_decode" in line]
    assert len(own) == 6, "\n".join(launches)
    # First what the layers share: the ends of rows, two kernels, and the bits of trees; then a concatenation a layer.
    first = next(i for i, line in enumerate(launches) if " mla_decode" in line)
    assert first <= 3, "\n".join(launches)
    assert len(launches) <= first + 6 + 2, "\n".join(launches)
    assert not [line for line in launches if "kCopy" in line], "\n".join(launches)


def table() -> None:
    """Print what the tests look at."""
    columns = (
        "chip",
        "case",
        "grid",
        "smem",
        "regs",
        "spilled",
        "loop",
        "block",
        "issue share",
        "kernels",
        "temporaries",
    )
    print(" | ".join(columns))
    for arch in TARGETS:
        with tempfile.TemporaryDirectory() as folder:
            programs = Programs(arch, Path(folder))
            for case in CASES:
                kernels, (plan, _) = programs.kernels(case.name), plan_of(case, programs.target)
                one = kernels["mla_decode"]
                share = f"{one.issue_share(plan.block, programs.target):.2f}"
                spilled = sum(kernel.spilled for kernel in kernels.values())
                row = (arch, case.name, one.programs, one.shared_memory, one.registers, spilled, one.loop, plan.block)
                rest = share, len(kernels), programs.temporaries["_".join(case.name.split())]
                print(" | ".join(str(value) for value in (*row, *rest)), flush=True)
            print(LAYERS, len(programs.launches(LAYERS)), "launches", flush=True)
            print("\n".join(programs.launches(LAYERS)))


if __name__ == "__main__":
    table()
