"""`python -m kimijax.serve --check`: what a command line comes to, without loading a weight.

It prints every setting and where it came from, the memory that serving takes, and what decoding steps read. Files that
are not there yet (weights, tokenizer) and devices that this machine lacks are told of; everything else that would keep
a server from starting is an error.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import kimijax
from kimijax.errors import ConfigError
from kimijax.loader import Placement, model_name, place
from kimijax.plan_roofline import Roofline, roofline
from kimijax.plan_weights import Plan
from kimijax.safetensors_io import INDEX_FILE
from kimijax.serving_plan import MemoryPlan, plan_memory
from kimijax.sharding import preset_of

from .config import DEFAULT_COMPILATION_CACHE, ServerConfig
from .speculation_flags import FLAGS, NOT_SETTINGS, flag_name
from .startup import DTYPES, Resolved, check_weights, resolve

_SPECULATION = {flag: name for name, flag in FLAGS.items() if name not in NOT_SETTINGS}


def check(config: ServerConfig) -> str:
    """The report.

    Raises:
      ConfigError, CheckpointError, TokenizerError, TemplateError: what would keep a server from starting.
    """
    n_devices, preset = len(jax.devices()), preset_of(config.preset, config.tp)
    here = config.tp <= n_devices
    if here:
        placement = place(DTYPES[config.dtype], config.tp, config.preset)
    else:  # another machine's, which has accelerators: no host has so many CPU devices
        placement = Placement(None, jnp.dtype(DTYPES[config.dtype] or jnp.bfloat16), unpack_int4=False)
    found = resolve(config, placement)
    has_weights = any(found.directory.glob("*.safetensors")) or (found.directory / INDEX_FILE).is_file()
    if here and has_weights:
        check_weights(config, found)
    try:
        memory, weights = plan_memory(
            found.directory,
            found.engine,
            found.drafter,
            found.speculation,
            placement,
            config.tp,
            preset=preset,
            here=here,
        )
    except ConfigError as error:
        if error.field != "devices":
            raise
        raise ConfigError("--tp", config.tp, "a number that divides the model", str(error)) from error
    memory.check()
    bytes_read = roofline(
        found.target, weights, found.drafter, found.speculation, placement, cached=found.engine.context_length // 2
    )
    notes: list[str] = []
    if not here:
        notes.append(f"{config.tp} devices are planned for, and this machine has {n_devices}: it could not serve this")
    if not has_weights:
        notes.append(f"{found.directory} has no safetensors files yet: sizes are those of the published form")
    if found.tokenizer is None:
        notes.append(f"{found.directory} has no tokenizer files yet: a server needs them")
    elif found.chat is None:
        notes.append(f"{found.directory} has no chat template: only /v1/completions would answer")
    if found.draft is not None and found.draft.probe is None:
        notes.append(f"{found.draft.directory} has no probe: a server runs the short doctor on it when it starts")
    if found.speculation is not None and found.speculation.is_simulated:
        notes.append("acceptance is simulated: what is served would be no model's output")
    sections = [
        [f"kimijax {kimijax.__version__}, jax {jax.__version__}: the settings are sound; no weights were loaded"],
        _titled("settings", _settings(config, found)),
        _titled("speculation", [str(found.speculation) if found.speculation else "none: plain decoding"]),
        _titled(f"memory on {_where(memory, here)}", _memory(memory, weights)),
        _titled(
            f"what a decoding step reads on each device, requests of {bytes_read.cached:,} tokens", _steps(bytes_read)
        ),
        _titled("notes", notes) if notes else [],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _titled(title: str, lines: Iterable[str]) -> list[str]:
    return [title, *(f"  {line}" for line in lines)]


def _settings(config: ServerConfig, found: Resolved) -> list[str]:
    """Flag, value, and where it came from."""
    rows: list[tuple[str, str, str]] = []
    for f in dataclasses.fields(config):
        if not f.metadata or f.name == "check":
            continue
        value, source = vars(config)[f.name], "set" if f.name in config.given else "default"
        if f.name in _SPECULATION and found.speculation is not None:
            name = _SPECULATION[f.name]
            value, source = vars(found.speculation)[name], found.speculation.sources[name]
            if source == "set" and f.name not in config.given:
                source = "set by another flag"
        elif value is None or value == "auto":
            value, source = _filled(f.name, found)
        rows.append((flag_name(f.name), _shown(value), source))
    return _aligned(rows)


def _filled(name: str, found: Resolved) -> tuple[Any, str]:
    """What stands for a setting that was not set, and why."""
    engine, room = found.engine, 0 if found.speculation is None else found.speculation.room
    limits = [found.target.max_positions] + ([] if found.draft is None else [found.draft.config.max_positions])
    values: dict[str, tuple[Any, str]] = {
        "context_length": (engine.context_length, f"default, of at most {min(limits):,} positions"),
        "max_total_tokens": (engine.pages(room) * engine.page_size, "a full context for every running request"),
        "latent_norm_eps": (found.target.latent_norm_eps, "the model's"),
        "served_model_name": (model_name(found.directory), "the model's"),
        "dtype": (found.placement.dtype, "auto"),
        "compilation_cache_dir": (DEFAULT_COMPILATION_CACHE, "default"),
    }
    told: str | None = jax.config.jax_compilation_cache_dir
    if told is not None:
        values["compilation_cache_dir"] = told, "JAX"
    if found.draft is not None:
        values["speculative_draft_model_path"] = found.draft.directory, "set by another flag"
    return values.get(name, (None, "default"))


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "-" if value is None else str(value)


def _where(memory: MemoryPlan, here: bool) -> str:
    if here and jax.default_backend() == "cpu":
        return "the host"
    return f"each of {memory.devices} device(s)"


def _memory(memory: MemoryPlan, weights: Plan) -> list[str]:
    rows = [(name, f"{size / 1e9:,.3f} GB", "") for name, size in memory.items]
    rows.append(("all", f"{memory.total / 1e9:,.3f} GB", "activations and compiled programs come on top"))
    free = "unknown" if memory.available is None else f"{memory.available / 1e9:,.3f} GB"
    rows.append(("free", free, ""))
    loaded = f"{weights.dtype}, routed experts as INT4" if weights.int4 else weights.dtype
    cache = f"{memory.cached_tokens:,} cached tokens of {memory.cache_bytes_per_token:,} bytes"
    return [*_aligned(rows), f"weights as {loaded}; {cache}"]


def _steps(found: Roofline) -> list[str]:
    head = ("requests", "drafts each", "tokens", "experts a layer", "GB", "pays from length")
    rows: list[Sequence[str]] = [head]
    for s in found.steps:
        pays = f"{found.break_even(s):.2f}" if s.draft_tokens else ""
        row = (s.batch, s.draft_tokens, s.tokens, f"{s.experts:.1f}", f"{s.read / 1e9:,.4f}", pays)
        rows.append([str(cell) for cell in row])
    return [
        *_aligned(rows),
        "assumes that tokens choose experts independently, E (1 - (1 - K / E)^tokens) of them, where real text shares",
        "more; and that reading is all: fixed costs of a step lower the length from which on drafting pays",
    ]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
