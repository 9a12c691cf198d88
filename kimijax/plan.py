"""What a model needs before any weight is read: `python -m kimijax.plan --model DIR_OR_CONFIG`.

Bytes in the files and on each of N devices under every preset, and the tokens that the rest holds (`plan_weights`).
With `--gpu` the time below which a step cannot be (`plan_roofline`), with `--compile` what the compiler makes of the
engine's programs over as many virtual devices (`plan_compile`), with `--cuda` what XLA's GPU compiler makes of them
(`plan_cuda`). How to read all of it: docs/plan.md.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path as FilePath
from typing import Any

import jax.numpy as jnp
from rich.console import Console

from .checkpoint import with_int4
from .config import TargetConfig, load_config
from .draft_config import load_draft_config
from .draft_loading import declare_stand_in
from .draft_record import read_record
from .drafter import Drafter, declare_drafter
from .errors import CheckpointError, ConfigError
from .loader import Placement
from .memory import Footprint
from .names import parameters
from .plan_compile import CompiledProgram, Sizes, ask_for_devices, compile_programs, cpu_mesh
from .plan_cuda import MISSING, SMALL, CudaProgram, compile_for, is_available
from .plan_gpus import GPUS, Gpu, find_gpu
from .plan_report import (
    axes_table,
    cuda_lines,
    presets_table,
    program_lines,
    programs_table,
    roofline_notes,
    roofline_table,
    summary,
    weights_table,
)
from .plan_roofline import Roofline, roofline
from .plan_weights import DTYPES as DTYPES
from .plan_weights import JAX_FRACTION as JAX_FRACTION
from .plan_weights import Plan as Plan
from .plan_weights import make_plan as make_plan
from .plan_weights import make_plans
from .sharding import PRESETS, Preset, preset_of
from .wiring import Wiring

STAND_IN = "stand-in"
BATCHES = (1, 4, 8, 16, 32, 64)
DRAFT_COUNTS = (0, 1, 3, 5, 7)


@dataclass(frozen=True)
class FullPlan:
    """All that was asked for."""

    preset: Preset
    plans: dict[Preset, Plan | ConfigError]
    draft_bytes: dict[Preset, int]  # of the drafter, on each device; empty: none was named
    gpu: Gpu | None
    steps: Roofline | None
    sizes: Sizes
    n_layers: int  # that were compiled
    programs: tuple[CompiledProgram, ...]
    cuda_gpu: Gpu | None
    cuda: CudaProgram | None  # None beside `cuda_gpu`: no such compiler is installed

    @property
    def plan(self) -> Plan:
        """Of the preset that was asked for. ConfigError: it does not divide the model."""
        found = self.plans[self.preset]
        if isinstance(found, ConfigError):
            raise found
        return found

    def beside(self, preset: Preset) -> int:
        """Bytes on a device beside weights and cache: the drafter, and temporaries where they are known."""
        temporaries = max((p.temporaries for p in self.programs), default=0) if preset == self.preset else 0
        return self.draft_bytes.get(preset, 0) + temporaries

    def to_json(self) -> dict[str, Any]:
        """The preset's plan, and a key for each further part."""
        out = self.plan.to_json()
        presets: dict[str, dict[str, Any]] = {}
        for preset, x in self.plans.items():
            if isinstance(x, ConfigError):
                presets[preset] = {"error": str(x)}
            else:
                tokens = x.device.cache_tokens_beside(self.beside(preset))
                presets[preset] = {**x.to_json()["device"], "cache_tokens_beside_all": tokens}
        out |= {"presets": presets, "draft_bytes": self.draft_bytes}
        if self.gpu is not None and self.steps is not None:
            rows = [asdict(s) | {"seconds": s.seconds(self.gpu)} for s in self.steps.steps]
            out["roofline"] = {"gpu": asdict(self.gpu), "cached": self.steps.cached, "steps": rows}
        if self.programs:
            rows = [p.to_json() for p in self.programs]
            out["compiled"] = {"layers": self.n_layers, "sizes": asdict(self.sizes), "programs": rows}
        if self.cuda_gpu is not None:
            out["cuda"] = {"skipped": MISSING} if self.cuda is None else _cuda_json(self.cuda)
        return out


def _cuda_json(found: CudaProgram) -> dict[str, Any]:
    launches = {"program": found.launches(found.thunks), "layer": found.launches(found.per_layer)}
    return {"layers": found.n_layers, "program": found.program.to_json(), "launches": launches}


def read_drafter(draft: str | None, target: TargetConfig, dtype: Any) -> Drafter:
    """A draft declared from its configuration alone, no weights read; None, or stand-in: a head of the published size.

    Args:
      draft: its directory, or its `config.json`.
      target: the model that it is for.
      dtype: of the declaration.
    Raises:
      ConfigError: it cannot be that target's.
    """
    if draft is None or draft == STAND_IN:
        return declare_stand_in(target, dtype)
    path = FilePath(draft)
    record = read_record(path.parent if path.suffix == ".json" else path)
    wiring = Wiring.default(target.n_layers, target.hidden) if record is None else record.contract.wiring
    wiring.check_target(target.n_layers, target.hidden)
    config = load_draft_config(path, wiring)
    if config.vocab_size != target.vocab_size:
        raise ConfigError("draft vocab_size", config.vocab_size, f"{target.vocab_size}, the target's")
    embeds = config.hidden != config.target_hidden
    return declare_drafter(config, wiring, dtype=jnp.dtype(dtype), own_embed=embeds)


def on_layers(drafter: Drafter, n_layers: int) -> Drafter:
    """The same head on a target with fewer layers: its taps are spread over them."""
    wiring, n = drafter.wiring, len(drafter.wiring.taps)
    if wiring.target_layers == n_layers:
        return drafter
    if n_layers + 1 < n:
        raise ConfigError("layers", n_layers, f"at least {n - 1}: the drafter reads {n} residual streams")
    taps = tuple(i * n_layers // max(1, n - 1) for i in range(n))
    c = drafter.config
    moved = Wiring(taps, n_layers, wiring.target_hidden)
    return declare_drafter(c, moved, dtype=drafter.dtype, own_embed=c.hidden != c.target_hidden)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser("python -m kimijax.plan", description="What a model needs, before it is loaded.")
    p.add_argument("--model", required=True, help="checkpoint directory, or a config.json")
    p.add_argument("--json", action="store_true", help="print JSON instead of tables")
    p.add_argument("--devices", type=int, default=8, help="of the group that serves (default: %(default)s)")
    p.add_argument("--preset", default="tp", help=f"how they lie: {', '.join(PRESETS)} (default: %(default)s)")
    p.add_argument("--memory-gb", type=float, help="of one device, in 10^9 bytes (default: the GPU's, or H200's 141)")
    fraction = "of a device's memory that JAX may take, for weights, cache and everything else; the default is what it "
    fraction += "takes of a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise (default: %(default)s)"
    p.add_argument("--fraction", type=float, default=JAX_FRACTION, help=fraction)
    p.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the loaded floats; CPUs load float32")
    p.add_argument("--unpack-int4", action="store_true", help="INT4 experts become floats, as they do on CPUs")
    p.add_argument("--draft", help=f"a draft's directory or config.json, or {STAND_IN}: a head of the published size")
    names = ", ".join(GPUS)
    p.add_argument("--gpu", help=f"print the floor of a step on it: {names}")
    p.add_argument("--batch", type=int, nargs="+", default=BATCHES, help="requests, for --gpu (default: %(default)s)")
    k = "k of a chain, for --gpu (default: %(default)s); the largest is compiled"
    p.add_argument("--draft-tokens", type=int, nargs="+", default=DRAFT_COUNTS, help=k)
    p.add_argument("--context", type=int, default=4096, help="tokens of each request (default: %(default)s)")
    p.add_argument("--compile", action="store_true", help="compile the engine's programs over virtual devices")
    p.add_argument("--cuda", metavar="GPU", help="compile a decoding step with XLA's GPU compiler (extra aot)")
    p.add_argument("--compile-batch", type=int, default=8, help="requests of what is compiled (default: %(default)s)")
    p.add_argument("--compile-drafts", type=int, default=3, help="k of what is compiled (default: %(default)s)")
    p.add_argument("--chunk", type=int, default=512, help="prompt tokens of what is compiled (default: %(default)s)")
    p.add_argument("--layers", type=int, help="compile so many layers only")
    return p


def full_plan(args: argparse.Namespace) -> FullPlan:
    """What the command line asks for.

    Raises:
      ConfigError, CheckpointError: the model or the settings cannot be planned for.
    """
    gpu = None if args.gpu is None else find_gpu(args.gpu)
    cuda_gpu = None if args.cuda is None else find_gpu(args.cuda)
    preset = preset_of(args.preset, args.devices)
    memory = int(args.memory_gb * 1e9) if args.memory_gb is not None else (gpu or GPUS["H200"]).memory
    plans = make_plans(
        args.model,
        PRESETS,
        memory_bytes=memory,
        devices=args.devices,
        fraction=args.fraction,
        dtype=args.dtype,
        unpack_int4=args.unpack_int4,
    )
    sizes = Sizes(args.compile_batch, args.context, args.chunk, args.compile_drafts)
    empty = FullPlan(preset, plans, {}, gpu, None, sizes, 0, (), cuda_gpu, None)
    plan = empty.plan
    target = load_config(args.model)
    target = with_int4(target) if plan.int4 else target
    drafter = read_drafter(args.draft, target, args.dtype)
    draft_bytes: dict[Preset, int] = {}
    if args.draft is not None:
        draft_bytes = {p: Footprint.of(parameters(drafter), p).on_each(args.devices) for p in PRESETS}
    steps = None
    if gpu is not None:
        where = Placement(None, jnp.dtype(args.dtype), unpack_int4=args.unpack_int4)
        counts = sorted({0, *args.draft_tokens})
        steps = roofline(
            target, plan, drafter, None, where, cached=args.context, batches=args.batch, draft_counts=counts
        )
    n_layers = args.layers or target.n_layers
    if not 1 <= n_layers <= target.n_layers:
        raise ConfigError("layers", n_layers, f"1 to {target.n_layers}, the model's")
    shorter = replace(target, n_layers=n_layers)
    programs, cuda = (), None
    form: dict[str, Any] = {"dtype": jnp.dtype(args.dtype), "int4": plan.int4}
    if args.compile:
        head = on_layers(drafter, n_layers)
        mesh = cpu_mesh(args.devices, preset)
        programs = compile_programs(shorter, head, sizes, mesh, with_drafts=args.draft is not None, **form)
    if cuda_gpu is not None and is_available():
        if n_layers <= SMALL:
            raise ConfigError("layers", n_layers, f"more than {SMALL}: what a layer adds is told by two stacks")
        cuda = compile_for(cuda_gpu, shorter, sizes, args.devices, preset, **form)
    return replace(empty, draft_bytes=draft_bytes, steps=steps, n_layers=n_layers, programs=programs, cuda=cuda)


def show(found: FullPlan, console: Console) -> None:
    """All parts, as tables and lines."""
    plan, d = found.plan, found.plan.device
    console.print(weights_table(plan))
    console.print(axes_table(plan))
    console.print(presets_table(found.plans, {p: found.beside(p) for p in PRESETS}))
    lines = [f"{p}: cannot be: {x}" for p, x in found.plans.items() if isinstance(x, ConfigError)]
    lines += summary(plan)
    if found.draft_bytes:
        lines.append(f"drafter: {found.draft_bytes[found.preset] / 1e9:,.2f} GB on each device")
    _lines(console, lines)
    if found.gpu is not None and found.steps is not None:
        console.print(roofline_table(found.steps, found.gpu, d.devices, d.preset))
        _lines(console, roofline_notes(found.gpu))
    if found.programs:
        console.print(programs_table(found.programs, found.n_layers, found.sizes))
        tokens, beside = d.cache_tokens_beside(found.beside(found.preset)), found.beside(found.preset)
        told = f"beside {beside / 1e9:,.2f} GB of drafter and temporaries the rest holds {tokens:,} tokens in all"
        _lines(console, [*program_lines(found.programs), told])
    if found.cuda_gpu is not None:
        _lines(console, [MISSING] if found.cuda is None else cuda_lines(found.cuda, found.cuda_gpu))


def _lines(console: Console, lines: list[str]) -> None:
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code (2: the model or the settings cannot be planned for)."""
    args = parser().parse_args(argv)
    try:
        found = full_plan(args)
        if args.json:
            print(json.dumps(found.to_json(), indent=2))
        else:
            show(found, Console(width=None if sys.stdout.isatty() else 130))
    except (ConfigError, CheckpointError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    ask_for_devices(parser().parse_args().devices)
    sys.exit(main())
