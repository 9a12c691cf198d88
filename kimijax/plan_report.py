"""Plans as tables and lines for people; see `plan`."""

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE
from rich.table import Table

from .errors import ConfigError
from .plan_compile import PARTS, CompiledProgram, Sizes, Temporary
from .plan_cuda import CudaProgram
from .plan_gpus import Gpu
from .plan_roofline import Roofline
from .plan_weights import Plan
from .sharding import PRESETS, Preset, abstract_mesh, n_parts


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=SIMPLE)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    return table


def weights_table(plan: Plan) -> Table:
    """Components: parameters, bytes in the files and on a device."""
    table = Table(title=f"{plan.model_type}: file bytes from {plan.source}", show_footer=True)
    table.add_column("component", "text model")
    footers = {
        "parameters": f"{plan.params:,}",
        "file GB": f"{plan.text_bytes / 1e9:,.2f}",
        "GB/device": f"{plan.device.weight_bytes / 1e9:,.2f}",
        "replicated": f"{plan.device.replicated_bytes / 1e9:,.2f}",
    }
    for header, footer in footers.items():
        table.add_column(header, footer, justify="right", no_wrap=True)
    for c in plan.components:
        held = c.sharded_bytes / plan.device.devices + c.replicated_bytes
        sizes = (c.file_bytes, held, c.replicated_bytes)
        table.add_row(c.name, f"{c.params:,}", *(f"{s / 1e9:,.2f}" for s in sizes))
    for s in plan.skipped:
        table.add_row(f"{s.name} (skipped)", f"{s.params:,}", f"{s.file_bytes / 1e9:,.2f}", "", "")
    return table


def axes_table(plan: Plan) -> Table:
    """Where each logical axis of parameters and activations may live, and into how many parts the preset splits it."""
    d = plan.device
    mesh = abstract_mesh(d.devices, preset=d.preset)
    table = Table(title=f"mesh: {d.devices} devices on the axis {PRESETS[d.preset]}")
    for header in ("logical axis", "mesh axes", "parts"):
        table.add_column(header, no_wrap=True)
    for axis, names in plan.mesh_axes.items():
        table.add_row(axis, ", ".join(names) or "none: on every device", str(n_parts(axis, mesh)))
    return table


def presets_table(plans: Mapping[Preset, Plan | ConfigError], beside: Mapping[Preset, int]) -> Table:
    """What each preset leaves for the cache. `beside`: bytes on a device beside the target's weights."""
    columns = ("preset", "weights", "experts", "split", "repeated", "cache of 1k tokens", "tokens in all", "on each")
    table = _table("each device under each preset, GB; tokens whose cache fits", *columns)
    for preset, plan in plans.items():
        if isinstance(plan, ConfigError):
            table.add_row(preset, "-", *[""] * 6)
            continue
        d = plan.device
        sizes = (d.weight_bytes, d.expert_bytes, d.other_sharded_bytes, d.replicated_bytes)
        tokens = d.cache_tokens_beside(beside[preset])
        cells = [f"{n / 1e9:,.2f}" for n in sizes] + [f"{d.cache_bytes_per_token / 1e6:,.4f}"]
        table.add_row(preset, *cells, f"{tokens:,}", f"{tokens // d.cache_groups:,}")
    return table


def summary(plan: Plan) -> list[str]:
    """What the tables do not say, a line each."""
    d = plan.device
    loaded = f"{plan.dtype}, routed experts as INT4" if plan.int4 else plan.dtype
    lines = [
        f"files: {plan.total_bytes:,} bytes = {plan.total_bytes / 1e9:,.2f} GB",
        f"loaded as {loaded}: {d.weight_bytes / 1e9:,.2f} GB on each of {d.devices} device(s)",
        f"active parameters a token: {plan.active_params:,}",
        f"cache: {plan.cache_bytes_per_token:,} bytes a token ({plan.dtype}), "
        f"{plan.cache_bytes_per_token * plan.max_positions / 1e9:,.2f} GB for {plan.max_positions:,} tokens",
    ]
    lines += [f"not counted: {what}" for what in plan.uncounted]
    what = f"{d.devices} device(s) of {d.memory_bytes / 1e9:,.0f} GB, {d.usable_bytes / 1e9:,.1f} GB of each usable"
    if d.fits:
        lines.append(
            f"{what}: the rest holds at most {d.cache_tokens:,} cached tokens in all, in latent pages alone: "
            "activations and compiled programs take some of it"
        )
    else:
        lines.append(f"{what}: DOES NOT FIT, the weights alone need {d.weight_bytes / 1e9:,.2f} GB of each")
    return lines


def roofline_table(found: Roofline, gpu: Gpu, devices: int, preset: Preset) -> Table:
    """Floors of steps on a GPU."""
    title = f"floor of a step on {devices} x {gpu.name}, {preset}, requests of {found.cached:,} tokens; ms"
    columns = ("batch", "k", "experts", "GB read", "reading", "computing", "collectives", "waiting", "all")
    table = _table(title, *columns, "tok/s, all pass", "pays from")
    for s in found.steps:
        seconds = s.seconds(gpu)
        cells = [f"{s.draft_tokens}", f"{s.experts:.1f}", f"{s.read / 1e9:.2f}", f"{s.read / gpu.bandwidth * 1e3:.2f}"]
        cells += [f"{s.flops / gpu.bf16 * 1e3:.2f}", f"{s.collectives}"]
        cells += [f"{s.collectives * gpu.collective_seconds * 1e3:.2f}", f"{seconds * 1e3:.2f}"]
        pays = f"{found.break_even(s, gpu):.2f}" if s.draft_tokens else ""
        table.add_row(str(s.batch), *cells, f"{s.batch * (s.draft_tokens + 1) / seconds:,.0f}", pays)
    return table


def roofline_notes(gpu: Gpu) -> list[str]:
    """What the floors assume."""
    rates = f"{gpu.bandwidth / 1e12:.3g} TB/s, {gpu.bf16 / 1e12:.4g} TFLOP/s"
    wait = f"{gpu.collective_seconds * 1e6:.0f} µs a collective over {'NVLink' if gpu.has_nvlink else 'PCIe'} (assumed)"
    return [
        f"{gpu.name}: {rates}, {wait}; all = the longer of reading and computing, and waiting for each other",
        "experts: distinct ones a layer, tokens choosing independently and evenly; of whole experts the busiest "
        "device's are read",
        "pays from: the mean length of accepted drafts and bonus from which a step with drafts pays",
    ]


def programs_table(programs: Sequence[CompiledProgram], n_layers: int, sizes: Sizes) -> Table:
    """What the compiler says of each program."""
    title = f"compiled, {n_layers} layers: batch {sizes.batch}, context {sizes.context:,}, k = {sizes.draft_tokens}, "
    columns = ("program", "lower s", "compile s", "arguments GB", "temporaries GB")
    table = _table(f"{title}chunk {sizes.chunk}; collectives", *columns, *PARTS, "MB moved")
    for p in programs:
        cells = [f"{p.lower_seconds:.1f}", f"{p.compile_seconds:.1f}", f"{p.arguments / 1e9:.2f}"]
        cells.append(f"{p.temporaries / 1e9:.3f}")
        cells += [str(p.collectives_of(part).total()) for part in PARTS]
        table.add_row(p.name, *cells, f"{p.collective_bytes() / 1e6:.1f}")
    return table


def program_lines(programs: Sequence[CompiledProgram]) -> list[str]:
    """Collectives of a layer, and what the temporary arrays are."""
    lines: list[str] = []
    for p in programs:
        copy, other = p.largest_copy, p.largest_other
        told = [f"{t.nbytes / 1e6:.0f} MB {t.shape}{_of(t)}" for t in (other, copy) if t is not None]
        layer = ", ".join(f"{n} {kind}" for kind, n in p.layer_collectives().items())
        lines.append(f"{p.name}: {layer} a layer; largest temporaries: {', '.join(told) or 'none of 1 MiB'}")
    return lines


def _of(t: Temporary) -> str:
    return "" if t.weight is None else f", a copy of {t.weight}"


def cuda_lines(found: CudaProgram, gpu: Gpu) -> list[str]:
    """Launches of a decoding step."""
    p = found.program
    lines = [
        f"{gpu.label}, {found.n_layers} layers, decode: {p.arguments / 1e9:.2f} GB of arguments, "
        f"{p.temporaries / 1e6:.1f} MB of temporaries, compiled in {p.compile_seconds:.0f} s",
        *program_lines([p]),
    ]
    for what, counts in (("the program", found.thunks), ("one MoE layer", found.per_layer)):
        told = ", ".join(f"{n:.4g} {kind}" for kind, n in found.launches(counts).items())
        lines.append(f"{what}: {told}")
    return lines
