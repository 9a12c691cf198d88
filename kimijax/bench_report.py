"""The report of `python -m kimijax.bench`: one JSON object with everything, and a table of the most of it."""

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import jax
from rich.table import Table

from . import __version__
from .bench_engines import PLAIN
from .bench_prompts import Prompts, Workload
from .bench_runs import BatchResult
from .engine.config import EngineConfig


def report(
    results: Sequence[BatchResult], work: Workload, prompts: Prompts, engine: EngineConfig, facts: dict[str, Any]
) -> dict[str, Any]:
    """The JSON object. With one result, its figures also stand at the top level, so that the line can be a row beside
    other programs' lines."""
    row = {
        "peer": "kimijax",
        "version": __version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "data": prompts.name,
        "n_prompts": len(prompts.ids),
        "prompt_len": work.prompt_len if not prompts.is_text else round(sum(map(len, prompts.ids)) / len(prompts.ids)),
        "gen_len": work.gen_len,
        "temperature": work.temperature,
        "ignore_eos": work.ignore_eos or not prompts.is_text,
        "context_length": engine.context_length,
        "burst": engine.burst,
        **facts,
        "by_batch": [asdict(r) for r in results],
    }
    return row | asdict(results[0]) if len(results) == 1 else row


def render(row: dict[str, Any]) -> Table:
    """The report as a table: medians and, in brackets, the least and the most of all runs."""
    shape = (
        f"prompt {row['prompt_len']} ({row['data']}), output {row['gen_len']}, context {row['context_length']}, "
        f"burst {row['burst']}"
    )
    machine = f"load before {row['loadavg_before']}, host matmul after {row['probe_gflops']} GFLOP/s"
    table = Table(title=f"{row['model']}: {row['dtype']} on {row['device']}\n{shape}")
    compares = any(r["k"] != PLAIN for r in row["by_batch"])
    names = ("batch", "compile s", "prefill tok/s", "decode tok/s", "peak RSS MB")
    if compares:
        names = ("batch", "drafts", "tok/s", "x plain", "length", "by position")
    for name in names:
        table.add_column(name, justify="right", no_wrap=name != "by position")
    notes = [f"loaded in {row['load_s']} s; {machine}"]
    if row.get("simulated_acceptance_length") is not None:
        notes.append(f"SIMULATED acceptance length {row['simulated_acceptance_length']}: no real output")
    for r in row["by_batch"]:
        table.add_row(str(r["batch"]), *(_compared(r) if compares else _alone(r)))
        notes += _notes(r)
    table.caption = "\n".join(notes)
    return table


def _spread(s: dict[str, Any], digits: int) -> str:
    return f"{s['median']:,.{digits}f} ({s['min']:,.{digits}f}-{s['max']:,.{digits}f})"


def _alone(r: dict[str, Any]) -> tuple[str, ...]:
    speeds = (_spread(r["prefill_tok_s"], 0), _spread(r["decode_tok_s"], 0))
    return (str(r["compile_s"]), *speeds, f"{r['peak_rss_mb']:,}")


def _compared(r: dict[str, Any]) -> tuple[str, ...]:
    speed, ratio = f"{r['decode_tok_s']['median']:,.0f}", "" if r["ratio"] is None else _spread(r["ratio"], 2)
    spec = r["speculation"]
    if spec is None or not spec["acceptance"]["rounds"]:
        return r["k"], speed, ratio, "", ""
    a = spec["acceptance"]
    return r["k"], speed, ratio, f"{a['length']:.2f}", " ".join(f"{p:.2f}" for p in a["by_position"])


def _notes(r: dict[str, Any]) -> list[str]:
    """Lines under the table."""
    name, spec = f"batch {r['batch']}" + ("" if r["k"] == PLAIN else f", {r['k']} drafts"), r["speculation"]
    notes: list[str] = []
    has_chance = r["k"] != PLAIN and spec is not None and spec["n_different"] is None
    if r["k"] == PLAIN:
        ids = " ".join(map(str, r["ids"]))
        notes.append(f"{name}, row 0: {ids}" + ("" if r["repeatable"] else " (NOT REPEATABLE)"))
    elif not r["repeatable"] and not has_chance:
        notes.append(f"{name}: NOT REPEATABLE")
    if spec is not None and spec["n_different"]:
        notes.append(f"{name}: {spec['n_different']} ANSWERS DIFFER from plain decoding's")
    if spec is not None and spec["estimate"] is not None:
        e = spec["estimate"]
        notes.append(
            f"{name}: estimated {e['speed_up']:.2f} times plain decoding with {e['k']} drafts; {e['drafts']} pay from "
            f"an acceptance length of {e['break_even']:.2f} on, expected are {e['length']:.2f}"
        )
    return notes
