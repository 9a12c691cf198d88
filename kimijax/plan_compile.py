"""The engine's own programs, compiled for devices that need not be there from a model that is only declared.

Nothing is allocated: weights and state are shapes with placements. On virtual CPU devices the partitioning is the one
that GPUs get, and so are the collectives; the temporary arrays are not. A CPU multiplies bfloat16 matrices by a single
row in float32 and wants some of them in another order: `hlo.Temporary.weight` names such copies. Two settings keep them
from adding up over the layers, as they would not on a GPU: the schedule is the one that needs the least memory, and
what does not change from round to round is not computed ahead of all rounds.
"""

import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from .config import TargetConfig
from .drafter import Borrowed, Drafter
from .engine.config import EngineConfig
from .engine.device import DeviceState
from .engine.programs import Programs
from .errors import ConfigError
from .model import Target, declare_target
from .plan_hlo import Collective, Module, Temporary
from .sharding import AnyMesh, Preset, make_mesh, n_parts, named_sharding
from .speculative_options import ALGORITHM, SpeculativeOptions

_HOISTING = "while-loop-invariant-code-motion,while-loop-expensive-invariant-code-motion"
CPU_OPTIONS = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED", "xla_disable_hlo_passes": _HOISTING}
DUMP_TEXT = {"xla_dump_hlo_as_text": True}


@dataclass(frozen=True)
class Sizes:
    """Of the programs that are compiled: the largest of an engine's."""

    batch: int = 8  # requests that decode together
    context: int = 4096  # tokens of a request
    chunk: int = 512  # prompt tokens of a prefill program
    draft_tokens: int = 3  # k

    def engine(self) -> EngineConfig:
        """Pages are read layer by layer, as everywhere but on CPUs."""
        return EngineConfig(
            max_batch=self.batch, context_length=self.context, chunk_size=self.chunk, decode_view="paged"
        )

    def options(self, k: int) -> SpeculativeOptions:
        """A chain of k drafts."""
        return SpeculativeOptions(ALGORITHM, k, 1, k + 1, adaptive=False)


@dataclass(frozen=True)
class CompiledProgram:
    """What the compiler says of one program. Bytes are those of one device."""

    name: str
    lower_seconds: float
    compile_seconds: float
    arguments: int  # weights and state; what the drafter borrows is counted once
    temporaries: int
    outputs: int  # that take no argument's place
    collectives: tuple[Collective, ...]
    largest: tuple[Temporary, ...]  # of the temporaries, from 1 MiB on

    def layer_collectives(self) -> Counter[str]:
        """Of the last layer of the target, by kind."""
        layers = [c.layer for c in self.collectives if c.layer is not None]
        return Counter(c.kind for c in self.collectives if layers and c.layer == max(layers))

    def collectives_of(self, part: str) -> Counter[str]:
        """Of the `layers`, the `drafter`, in `branches` that only some requests need, or of the `rest`, by kind."""
        return Counter(c.kind for c in self.collectives if _part(c) == part)

    def collective_bytes(self) -> int:
        """Of all but those in branches."""
        return sum(c.nbytes for c in self.collectives if _part(c) != "branches")

    @property
    def largest_copy(self) -> Temporary | None:
        """The largest copy of a weight."""
        return next((t for t in self.largest if t.weight is not None), None)

    @property
    def largest_other(self) -> Temporary | None:
        """The largest array that is none."""
        return next((t for t in self.largest if t.weight is None), None)

    def to_json(self) -> dict[str, Any]:
        """Figures alone: collectives are counted by kind, temporaries are the ten largest."""
        fields = {k: v for k, v in vars(self).items() if k not in ("collectives", "largest")}
        kinds = {part: dict(self.collectives_of(part)) for part in PARTS}
        counted = {**kinds, "layer": dict(self.layer_collectives()), "bytes": self.collective_bytes()}
        return fields | {"collectives": counted, "largest": [asdict(t) for t in self.largest[:10]]}


PARTS = ("layers", "drafter", "rest", "branches")


def _part(c: Collective) -> str:
    if c.in_branch:
        return "branches"
    if c.layer is not None:
        return "layers"
    return "drafter" if c.in_drafter else "rest"


class DeclaredPrograms(Programs):
    """The engine's programs of models that are only declared: to be lowered, never run."""

    def __init__(
        self, target: Target, drafter: Drafter | None, sizes: Sizes, options: SpeculativeOptions | None, mesh: Mesh
    ) -> None:
        self.declared = declared(target, mesh), None if drafter is None else declared(drafter, mesh)
        self.on = mesh
        super().__init__(*self.declared, sizes.engine(), options, target.config.vocab_size, mesh, "reference")

    def weight_names(self) -> Callable[[str], str | None]:
        """From the programs' arguments to dotted paths, the layer's number as *."""
        _, state = nnx.split(self.declared)
        paths = [path for path, _ in nnx.to_flat_state(state)]
        assert len(paths) == len(self.leaves)
        owners = ("", "drafter.")
        names = [owners[int(str(path[0]))] + ".".join(map(str, path[1:])) for path in paths]
        return {f"leaves[{i}]": re.sub(r"\.\d+\.", ".*.", name) for i, name in enumerate(names)}.get

    def borrowed_bytes(self) -> int:
        """Of the target's arrays that the drafter names too, on one device."""
        drafter = self.declared[1]
        if drafter is None:
            return 0
        lent = [v.get_value() for v in (drafter.embed, drafter.lm_head) if isinstance(v, Borrowed)]
        return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in lent)

    def state(self) -> DeviceState:
        """Shapes and placement of the engine's state."""
        c = self.config
        empty = jax.eval_shape(lambda: DeviceState.empty(*self.declared, self.n_pages, c.page_size, c.max_batch))
        where = jax.tree.broadcast(self._placed(self.on), empty)
        return jax.tree.map(_struct, empty, where)

    def rounds_traced(self, k: int) -> Any:
        """The program of rounds with k drafts, for the largest batch and window."""
        b, table = self.config.max_batch, self.windows[-1] // self.config.page_size
        args = (_ints(b), _ints(b, table), np.int32(1), np.bool_(True))
        return self._rounds.trace(self.leaves, self.state(), *args, k=k)

    def prefill_traced(self) -> Any:
        """The program of the longest chunk, one for each group of devices, behind a full window."""
        n, c = self.n_groups, self.config
        args = (_ints(n, c.chunk_lengths[-1] + 1), _ints(n), _ints(n, self.windows[-1] // c.page_size))
        return self._prefill.trace(self.leaves, self.state(), *args, first=False)


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _struct(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def declared[M: nnx.Module](module: M, mesh: Mesh) -> M:
    """A declaration whose shapes know where they will lie."""

    def put(variable: nnx.Variable[Any]) -> nnx.Variable[Any]:
        value = variable.get_value()
        return variable.replace(_struct(value, named_sharding(mesh, variable.get_metadata()["axes"], value.shape)))

    graph, state = nnx.split(module)
    return nnx.merge(graph, nnx.from_flat_state([(path, put(v)) for path, v in nnx.to_flat_state(state)]))


def ask_for_devices(n: int) -> None:
    """Has the CPU backend, which must not have started, begin with `n` devices, and no other backend start."""
    jax.config.update("jax_platforms", "cpu")
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", n)


def cpu_mesh(devices: int, preset: Preset) -> Mesh:
    """A mesh of virtual devices.

    Raises:
      ConfigError: the CPU backend has started with fewer.
    """
    found = jax.devices("cpu")
    if len(found) < devices:
        fix = "set jax_num_cpu_devices before any array is made, or compile in a process of its own"
        raise ConfigError("devices", devices, f"at most the {len(found)} devices of the CPU backend", fix)
    return make_mesh(found[:devices], preset=preset)


def check_sizes(sizes: Sizes, mesh: AnyMesh) -> None:
    """ConfigError: a batch that the groups of devices cannot share, or a context of no whole pages."""
    sizes.engine().pages(sizes.draft_tokens + 1, n_parts("pages", mesh))


def compile_programs(
    config: TargetConfig,
    drafter: Drafter,
    sizes: Sizes,
    mesh: Mesh,
    *,
    with_drafts: bool,
    dtype: Any = jnp.bfloat16,
    int4: bool = True,
    names: Sequence[str] = ("decode", "verify", "prefill"),
) -> tuple[CompiledProgram, ...]:
    """Decoding without drafts, a round of drafting and verifying, and a chunk of prefill.

    Args:
      config: the target.
      drafter: declared; its layers and the target's borrow from each other as in an engine.
      sizes: of the programs.
      mesh: of CPU devices.
      with_drafts: decoding and prefill fill the drafter's cache, too; else there is no drafter but in `verify`.
      dtype: of floats.
      int4: whether routed experts stay packed.
      names: which programs.
    """
    target = declare_target(config, dtype=jnp.dtype(dtype), int4=int4)
    check_sizes(sizes, mesh)
    drafting = DeclaredPrograms(target, drafter, sizes, sizes.options(sizes.draft_tokens), mesh)
    plain = drafting if with_drafts else DeclaredPrograms(target, None, sizes, None, mesh)
    makers = {
        "decode": (plain, lambda: plain.rounds_traced(0)),
        "verify": (drafting, lambda: drafting.rounds_traced(sizes.draft_tokens)),
        "prefill": (plain, plain.prefill_traced),
    }
    return tuple(_compiled(name, *makers[name]) for name in names)


def _compiled(name: str, programs: DeclaredPrograms, trace: Any) -> CompiledProgram:
    start = time.perf_counter()
    with on_mesh(programs.on):
        lowered = trace().lower()
    found = compile_lowered(name, lowered, programs.weight_names(), lower_seconds=time.perf_counter() - start)
    return replace(found, arguments=found.arguments - programs.borrowed_bytes())


def on_mesh(mesh: Mesh) -> AbstractContextManager[Any]:
    """In which programs are traced."""
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def compile_lowered(
    name: str,
    lowered: jax.stages.Lowered,
    weights: Callable[[str], str | None],
    *,
    lower_seconds: float = 0.0,
    options: Mapping[str, Any] = CPU_OPTIONS,
) -> CompiledProgram:
    """Compile, and read what was made.

    Args:
      name: of the result.
      lowered: the program.
      weights: see `plan_hlo.Module`.
      lower_seconds: spent so far.
      options: of the compiler.
    """
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        compiled = lowered.compile(compiler_options={**options, **DUMP_TEXT, "xla_dump_to": folder})
        seconds = time.perf_counter() - start
        assignment = only_file(folder, "*-buffer-assignment.txt").read_text()
    return program_of(name, compiled, assignment, weights, lower_seconds=lower_seconds, compile_seconds=seconds)


def program_of(
    name: str,
    compiled: jax.stages.Compiled,
    assignment: str,
    weights: Callable[[str], str | None],
    *,
    lower_seconds: float,
    compile_seconds: float,
) -> CompiledProgram:
    """What a compiled program and the text of its buffer assignment say."""
    memory: Any = compiled.memory_analysis()
    module = Module(compiled.as_text() or "", weights)
    return CompiledProgram(
        name=name,
        lower_seconds=lower_seconds,
        compile_seconds=compile_seconds,
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        collectives=module.collectives,
        largest=module.temporaries(assignment),
    )


def only_file(folder: str, pattern: str) -> Path:
    """The one file that XLA wrote under a name. RuntimeError: none, as where a cache had the program already."""
    files = list(Path(folder).glob(pattern))
    if len(files) != 1:
        raise RuntimeError(f"XLA wrote {len(files)} files {pattern}, expected one: is the program from a cache?")
    return files[0]
