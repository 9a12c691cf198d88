"""The plan for a full-size drafter of Kimi-K2.5, on paper: hours, storage and bandwidth, as Markdown tables.

    python -m benchmarks.scale [--gpus 8,64] [--gpu H200|B200|RTX-PRO-6000] [--samples 600000] [--tokens 6e9]
        [--preset dcp|tp] [--json] [--update docs/scale.md] [--CONSTANT VALUE ...]

No GPU is used, and none was timed: `scale_constants` says where each number is from, `scale_model` what is done with
them. Every constant that this repository does not decide itself has a flag. `--update` writes the tables into a
document, each behind its mark `<!-- table: NAME -->`.
"""

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from kimijax.errors import ConfigError

from .scale_constants import GPUS, GROUP, PUBLISHED, PUBLISHED_TRAINING, Constants, constants
from .scale_model import (
    HOUR,
    Job,
    Preset,
    break_even,
    decode_step,
    fit_flops,
    fit_token,
    forward,
    hours,
    predicted,
    predicted_training,
    requests_that_fit,
    running_context,
    sensitivity,
)

type Cell = str | float | None  # None: does not apply

BATCHES = (8, 16, 32, 64, 128, 256)
_SENSITIVE = 8  # rows shown


@dataclass(frozen=True)
class Table:
    """Rows of text and numbers under their names."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def markdown(self) -> str:
        lines = [self.columns, ("---",) + ("---:",) * (len(self.columns) - 1)]
        lines += [tuple(map(show, row)) for row in self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def to_json(self) -> list[dict[str, Cell]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


@dataclass(frozen=True)
class Question:
    """What is asked: one job on several numbers of GPUs."""

    gpu: str
    gpus: tuple[int, ...]
    samples: int
    tokens: float
    preset: Preset
    given: Mapping[str, float]

    def job(self, gpus: int) -> Job:
        return Job(gpus, self.samples, self.tokens, self.preset)


DEFAULT = Question("H200", (8, 64), 600_000, 6e9, "dcp", {})


def show(x: Cell) -> str:
    """A cell: three digits, or whole numbers."""
    if x is None:
        return "-"
    if isinstance(x, str):
        return x
    if x and not 1e-2 <= abs(x) < 1e7:
        return f"{x:.3g}"
    if x == int(x) or abs(x) >= 100:
        return f"{x:,.0f}"
    return f"{x:.1f}" if abs(x) >= 10 else f"{x:.2f}"


def tables(q: Question) -> dict[str, Table]:
    """All tables by name.

    Raises:
      ConfigError: numbers that are out of range, or GPUs that cannot hold the target.
    """
    c = constants(q.gpu, q.given)
    jobs = [q.job(gpus) for gpus in q.gpus]
    return {
        "hours": _hours(c, jobs),
        "gpus": _gpus(q),
        "decode": _decode(c, jobs[0]),
        "token": _token(c, jobs[0]),
        "storage": _storage(c, jobs),
        "break-even": _break_even(c, jobs),
        "sensitivity": _sensitivity(c, jobs[0]),
        "check": _check(q),
        "constants": _constants(c),
    }


def _hours(c: Constants, jobs: Sequence[Job]) -> Table:
    runs = [(job, "online", hours(c, job, "online")) for job in jobs]
    runs += [(job, "files", hours(c, job, "files")) for job in jobs]
    columns = ("stage, hours", *(f"{job.gpus} GPUs, {source}" for job, source, _ in runs))
    names = [f.name for f in dataclasses.fields(runs[0][2])]
    rows: list[tuple[Cell, ...]] = [(f"`{name}`", *(vars(h)[name] for _, _, h in runs)) for name in names]
    rows.append(("all", *(h.total for _, _, h in runs)))
    rows.append(("GPU-hours", *(h.total * job.gpus for job, _, h in runs)))
    return Table(columns, tuple(rows))


def _gpus(q: Question) -> Table:
    """GPU-hours of each kind, online, as far as a node can generate."""
    rows: list[tuple[Cell, ...]] = []
    for gpu in GPUS:
        own = {name: value for name, value in q.given.items() if name not in GPUS[gpu]}
        c = constants(gpu, own)
        cells: list[Cell] = []
        for preset in get_args(Preset.__value__):
            if not requests_that_fit(c, preset):
                cells += [0, None, None]
                continue
            h = hours(c, Job(GROUP, q.samples, q.tokens, preset), "online")
            cells += [requests_that_fit(c, preset), h.generate, h.total]
        rows.append((f"8 x {gpu}", *cells))
    columns = [f"{what}, {p}" for p in get_args(Preset.__value__) for what in ("requests", "`generate` h", "all h")]
    return Table(("node", *columns), tuple(rows))


def _decode(c: Constants, job: Job) -> Table:
    cached, rows = running_context(c, job), list[tuple[Cell, ...]]()
    for batch in BATCHES:
        cells: list[Cell] = []
        for preset in get_args(Preset.__value__):
            step = decode_step(c, batch, cached, preset)
            fits = "yes" if batch <= requests_that_fit(c, preset) else "no"
            cells += [step * 1e3, batch / step, fits]
        rows.append((str(batch), *cells))
    columns = [f"{what}, {p}" for p in get_args(Preset.__value__) for what in ("step ms", "tokens/s", "fits")]
    return Table(("batch", *columns), tuple(rows))


def _token(c: Constants, job: Job) -> Table:
    context = job.context(c)
    ahead, train = forward(c, context), fit_token(c, context)
    target = c.target_flops + c.attention_flops * context
    draft = fit_flops(c, context)
    rows: tuple[tuple[Cell, ...], ...] = (
        ("target's layers (`features`)", target / 1e9, ahead * 1e6, 1 / ahead),
        ("drafter's update (`fit` on files)", draft / 1e9, train * 1e6, 1 / train),
        ("both (`fit --online`)", (target + draft) / 1e9, (ahead + train) * 1e6, 1 / (ahead + train)),
    )
    return Table(("one token", "GFLOP", "us of a node", "tokens/s of a node"), rows)


def _storage(c: Constants, jobs: Sequence[Job]) -> Table:
    """Sizes, and what disks and network must carry for the GPUs not to wait."""
    context, size = jobs[0].context(c), c.feature_bytes
    write, read = size / forward(c, context), size / fit_token(c, context)
    gb, tb = 1e9, 1e12
    rows: list[tuple[Cell, ...]] = [
        ("a token's features, bytes", *(size for _ in jobs)),
        ("features, TB in all", *(job.tokens * size / tb for job in jobs)),
        ("features, TB a node", *(job.tokens * size / tb / job.nodes for job in jobs)),
        ("`features` writes, GB/s a node", *(write / gb for _ in jobs)),
        ("`features` writes, GB/s in all", *(write / gb * job.nodes for job in jobs)),
        ("`fit` reads, GB/s a GPU", *(read / gb / GROUP for _ in jobs)),
        ("`fit` reads, GB/s a node", *(read / gb for _ in jobs)),
        ("`fit` reads, GB/s in all", *(read / gb * job.nodes for job in jobs)),
        ("share of one 400 Gb/s port, if disks are remote", *(read / c.nic_bandwidth for _ in jobs)),
        ("share of a node's disks, if local", *(read / c.disk_read for _ in jobs)),
        ("share of what one process can check, first epoch", *(read / c.check_rate / c.check_threads for _ in jobs)),
        ("documents (online needs nothing else), GB", *(job.tokens * 5 / gb for job in jobs)),
        ("three checkpoints of `fit`, GB", *(3 * 12 * c.draft_params / gb for _ in jobs)),
    ]
    return Table(("storage and bandwidth", *(f"{job.gpus} GPUs" for job in jobs)), tuple(rows))


def _break_even(c: Constants, jobs: Sequence[Job]) -> Table:
    def cells(beside: bool) -> list[Cell]:
        return [break_even(c, job, beside=beside) for job in jobs]

    gained = [job.tokens * forward(c, job.context(c)) / HOUR * GROUP for job in jobs]
    per_tb = [g / (job.tokens * c.feature_bytes / 1e12) for g, job in zip(gained, jobs, strict=True)]
    rows: list[tuple[Cell, ...]] = [
        ("fewest epochs for which files are faster, as built", *cells(False)),
        ("the same, were files written beside computing", *cells(True)),
        ("updates an epoch", *(job.tokens / c.update_tokens for job in jobs)),
        ("GPU-hours that files save in each epoch after the first", *gained),
        ("the same for each TB stored", *per_tb),
    ]
    return Table(("files or online", *(f"{job.gpus} GPUs" for job in jobs)), tuple(rows))


def _sensitivity(c: Constants, job: Job) -> Table:
    def total(changed: Constants, job: Job) -> float:
        return hours(changed, job, "online").total

    rows = [(f"`{name}`", value, low, high) for name, value, low, high in sensitivity(c, job, total)[:_SENSITIVE]]
    where = f"hours, {job.gpus} GPUs, online"
    return Table(("constant", "value", f"{where}, x 0.8", f"{where}, x 1.25"), tuple(rows))


def _check(q: Question) -> Table:
    """The model beside what others have measured, with the constants as they are given."""
    rows: list[tuple[Cell, ...]] = []
    for p in PUBLISHED:
        own = {name: value for name, value in q.given.items() if name not in GPUS[p.gpu]}
        ours = predicted(constants(p.gpu, own), p)
        what = f"8 x {p.gpu}, {p.batch} requests of {p.prompt} + {p.output} tokens, tokens/s"
        rows.append((what, p.source, p.speed, ours, ours / p.speed))
    gpu, _, spent, source = PUBLISHED_TRAINING
    ours = predicted_training(constants(gpu, {n: v for n, v in q.given.items() if n not in GPUS[gpu]}), q.samples)
    rows.append(("features and training, 6 G tokens, GPU-hours", source, spent, ours, ours / spent))
    return Table(("what", "measured by", "published", "this model", "ratio"), tuple(rows))


def _constants(c: Constants) -> Table:
    rows = [
        (f"`{f.name}`", f"{vars(c)[f.name]:.4g}", *(f.metadata[key] or "-" for key in ("unit", "kind", "source")))
        for f in dataclasses.fields(c)
    ]
    return Table(("constant", "value", "unit", "kind", "source"), tuple(rows))


def updated(text: str, found: Mapping[str, Table]) -> str:
    """A document with its tables made anew: the lines of `|` behind each `<!-- table: NAME -->`.

    Raises:
      ConfigError: a mark with an unknown name.
    """

    def one(match: re.Match[str]) -> str:
        if match[1] not in found:
            raise ConfigError("table", match[1], "one of " + ", ".join(found))
        return f"<!-- table: {match[1]} -->\n{found[match[1]].markdown()}\n"

    return re.sub(r"<!-- table: (\S+) -->\n(?:\|.*\n)*", one, text)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser("python -m benchmarks.scale", description="A full-size drafter's plan, on paper.")
    p.add_argument("--gpus", default=",".join(map(str, DEFAULT.gpus)), help="numbers of GPUs (default: %(default)s)")
    p.add_argument("--gpu", default=DEFAULT.gpu, choices=GPUS, help="default: %(default)s")
    p.add_argument("--samples", type=int, default=DEFAULT.samples, help="conversations (default: %(default)s)")
    p.add_argument("--tokens", type=float, default=DEFAULT.tokens, help="of all of them (default: %(default)g)")
    presets = get_args(Preset.__value__)
    p.add_argument("--preset", default=DEFAULT.preset, choices=presets, help="of generation (default: %(default)s)")
    p.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    p.add_argument("--update", type=Path, metavar="FILE", help="write the tables into this document")
    for f in dataclasses.fields(Constants):
        if f.metadata["kind"] != "code":
            text = f"{f.metadata['unit']}; {f.metadata['kind']}: {f.metadata['source']}"
            p.add_argument(f"--{f.name.replace('_', '-')}", type=float, help=text.replace("%", "%%"))
    return p


def question(args: argparse.Namespace) -> Question:
    """What the command line asks. ConfigError: numbers of GPUs that are none."""
    parts = args.gpus.split(",")
    if not all(part.isdigit() for part in parts):
        raise ConfigError("--gpus", args.gpus, "numbers with commas between them, as in 8,64")
    free = [f.name for f in dataclasses.fields(Constants) if f.metadata["kind"] != "code"]
    given = {name: value for name in free if (value := vars(args)[name]) is not None}
    return Question(args.gpu, tuple(map(int, parts)), args.samples, args.tokens, args.preset, given)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code (2: a number that cannot be)."""
    args = parser().parse_args(arguments)
    try:
        q = question(args)
        found = tables(q)
        if args.update:
            args.update.write_text(updated(args.update.read_text(), found))
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    if args.json:
        asked: dict[str, Any] = {**dataclasses.asdict(q), "tables": {name: t.to_json() for name, t in found.items()}}
        print(json.dumps(asked, indent=1))
    elif not args.update:
        for name, table in found.items():
            print(f"## {name}\n\n{table.markdown()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
