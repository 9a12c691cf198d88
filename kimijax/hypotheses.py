"""The ways in which an EAGLE-3 draft can be run, one `Reading` each, and what to change to get from one to another.

A draft's files do not say all of it, and engines differ: which residual streams feed it and in which order, whether its
fusion layer runs, what `d2t` holds, which norms act, which state is fed back, which token and position a row has. The
doctor measures readings of one draft; this module lists the plausible ones.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, cast

from .draft_config import DraftConfig
from .errors import ConfigError
from .layer_ids import CONVENTIONS, RECORD_KEY, layer_id_lists, read_wiring
from .wiring import Wiring, default_taps, taps_fault

Feedback = Literal["pre_norm", "post_norm"]
Tokens = Literal["next", "same"]
Positions = Literal["t", "t+1", "steps+1"]
D2T = Literal["offset", "absolute", "identity"]
Tables = Literal["target", "file"]

_IDS = "eagle_aux_hidden_state_layer_ids"
LAST_NORMED = -1  # of `Reading.bypass`: the target's last hidden state after its final norm


@dataclass(frozen=True)
class Reading:
    """One way of running a draft.

    Attributes:
      taps: the residual stream at each column block of fc, in the order of the blocks; an engine's are ascending.
      bypass: None: the streams go through fc. Else fc is skipped and the head is fed this tap alone, or `LAST_NORMED`.
      d2t: what the tensor of that name holds: `offset` (target id = i + d2t[i]), `absolute` (d2t[i]); `identity`: it is
        not read, and target id = i.
      feedback: the state that the next draft step is fed: before the final norm or after it.
      fc_norm, norm_before_fc, norm_before_residual: see `DraftConfig`.
      tokens: row t embeds the token after position t (`next`) or the one at it (`same`).
      positions: rotary position of row t in draft step j: `t`: t + j; `t+1`: t + j + 1; `steps+1`: one more only in the
        steps after the first, so that they disagree with the rows that they attend to.
      embedding: the target's table or the one in the draft's files.
    """

    taps: tuple[int, ...]
    bypass: int | None = None
    d2t: D2T = "offset"
    feedback: Feedback = "pre_norm"
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    tokens: Tokens = "next"
    positions: Positions = "t"
    embedding: Tables = "target"

    def config(self, base: DraftConfig) -> DraftConfig:
        """The head that runs so."""
        return dataclasses.replace(
            base,
            fc_norm=self.fc_norm,
            norm_before_fc=self.norm_before_fc,
            norm_before_residual=self.norm_before_residual,
            norm_output=self.feedback == "post_norm",
        )

    def differences(self, other: "Reading") -> tuple[str, ...]:
        """Names of the fields that differ and have an effect: nothing of fc where both skip it."""
        mine, theirs = vars(self), vars(other)
        fields = [f for f in mine if mine[f] != theirs[f]]
        if self.bypass is not None and other.bypass is not None:
            fields = [f for f in fields if f not in ("taps", "fc_norm", "norm_before_fc")]
        return tuple(fields)

    def describe(self, base: "Reading | None" = None) -> str:
        """In words; with `base` only what differs from it."""
        fields = vars(self) if base is None else self.differences(base)
        skipped = ("taps", "fc_norm", "norm_before_fc") if self.bypass is not None else ()
        return ", ".join(_phrase(self, f) for f in fields if f not in skipped) or "the same"

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "taps": list(self.taps)}


def _phrase(reading: Reading, field: str) -> str:
    """One field's value as the table shows it."""
    r = reading
    if field == "taps":
        return f"taps {r.taps}" + ("" if _ascending(r.taps) else " in that order")
    if field == "bypass":
        return "through fc" if r.bypass is None else f"fc skipped, fed {stream_name(r.bypass)}"
    if field == "positions":
        return {"t": "positions t + j", "t+1": "positions + 1", "steps+1": "positions + 1 in draft steps"}[r.positions]
    if field == "tokens":
        return f"row t with {'the token after it' if r.tokens == 'next' else 'its own token'}"
    if field == "d2t":
        return {"offset": "d2t as offsets", "absolute": "d2t as ids", "identity": "draft ids as target ids"}[r.d2t]
    value = vars(r)[field]
    if field == "embedding":
        return "the target's embedding" if value == "target" else "the files' embedding"
    return f"{field} {('on' if value else 'off') if isinstance(value, bool) else value}"


def stream_name(tap: int) -> str:
    return "the normed last hidden state" if tap == LAST_NORMED else f"tap {tap} alone"


def _ascending(taps: Sequence[int]) -> bool:
    return all(a < b for a, b in pairwise(taps))


def wiring_candidates(
    lists: Sequence[tuple[int, ...]], configured: tuple[int, ...] | None, n_layers: int, count: int
) -> list[tuple[int, ...]]:
    """Plausible taps of a draft that fuses `count` streams, the most plausible first.

    Every convention's reading of the ids in the file, the published default; and of each of them the faults that have
    been seen: all taps shifted by one, the embedding in front and the last stream lost (and the reverse), slots rotated
    or reversed.

    Args:
      lists: the ids in the file.
      configured: as the strict reader understands them.
      n_layers: of the target.
      count: column blocks of fc.
    """
    roots = [] if configured is None else [configured]
    for ids in lists:
        roots += [c.read(ids, n_layers, count) for c in CONVENTIONS.values()]
    if n_layers >= 7:
        roots.append(default_taps(n_layers))
    roots = [taps for taps in dict.fromkeys(roots) if len(taps) == count and not taps_fault(taps, n_layers)]
    if not roots:
        roots = [tuple(range(n_layers - count + 1, n_layers + 1))]
    found = list(roots)
    for taps in roots:
        found += [tuple(t + shift for t in taps) for shift in (-1, 1)]
        found.append((0, *taps[:-1]))
        ends = (taps[-1] + 1, *range(max(n_layers - 3, 0), n_layers + 1))
        found += [(*taps[1:], end) for end in dict.fromkeys(ends) if end > taps[-1]]
        found += [taps[i:] + taps[:i] for i in range(1, count)]
        found.append(taps[::-1])
    valid = [taps for taps in dict.fromkeys(found) if all(0 <= t <= n_layers for t in taps)]
    return [taps for taps in valid if len(set(taps)) == count]


def flag_variants(reading: Reading, available: Mapping[str, tuple[Any, ...]]) -> Iterator[Reading]:
    """The reading with one other field changed at a time, to each of its available values."""
    for field, values in available.items():
        for value in values:
            if value != vars(reading)[field]:
                yield dataclasses.replace(reading, **{field: value})


def slot_variants(reading: Reading, streams: Sequence[int]) -> Iterator[Reading]:
    """The reading with one column block of fc fed another stream."""
    for slot in range(len(reading.taps)):
        for tap in streams:
            if tap not in reading.taps:
                yield dataclasses.replace(reading, taps=(*reading.taps[:slot], tap, *reading.taps[slot + 1 :]))


_ASSUMED: dict[str, dict[str, tuple[str, Any]]] = {
    "fc": {"on": ("bypass", None), "off": ("bypass", LAST_NORMED)},
    "d2t": {name: ("d2t", name) for name in ("offset", "absolute", "identity")},
    "feedback": {"pre": ("feedback", "pre_norm"), "post": ("feedback", "post_norm")},
    "positions": {"0": ("positions", "t"), "+1": ("positions", "t+1"), "steps+1": ("positions", "steps+1")},
    "tokens": {name: ("tokens", name) for name in ("next", "same")},
    "embedding": {name: ("embedding", name) for name in ("target", "file")},
    **{f: {"on": (f, True), "off": (f, False)} for f in ("fc_norm", "norm_before_fc", "norm_before_residual")},
}


def assume(base: Reading, settings: Sequence[str], n_layers: int) -> Reading:
    """`base` with what another stack does differently.

    Args:
      base: as the files are read here.
      settings: KEY=VALUE; `taps=0,3,31` in the order of fc's blocks, `fc=off` (fed the normed last hidden state) or
        `fc=TAP`, and the keys and values of `Reading`.
      n_layers: of the target.
    Raises:
      ConfigError: an unknown key or value.
    """
    for setting in settings:
        key, _, value = setting.partition("=")
        field = f"assume.{key}"
        if key == "taps":
            parts = value.split(",")
            taps = tuple(int(p) for p in parts if p.isdecimal())
            if len(taps) != len(base.taps) or len(parts) != len(taps) or any(t > n_layers for t in taps):
                raise ConfigError(field, value, f"{len(base.taps)} taps from 0 to {n_layers}, separated by commas")
            base = dataclasses.replace(base, taps=taps)
        elif key == "fc" and value.isdecimal() and int(value) <= n_layers:
            base = dataclasses.replace(base, bypass=int(value))
        elif key not in _ASSUMED:
            raise ConfigError("assume", setting, "KEY=VALUE with KEY one of " + ", ".join(("taps", *_ASSUMED)))
        elif value not in _ASSUMED[key]:
            raise ConfigError(field, value, "one of " + ", ".join(_ASSUMED[key]))
        else:
            name, chosen = _ASSUMED[key][value]
            base = dataclasses.replace(base, **{name: chosen})
    return base


def fixes(
    data: Mapping[str, Any], trained: Reading, run: Reading, *, wiring: Wiring, fc_width: int | None
) -> list[str]:
    """What to change in a draft's files or flags so that it is run as `trained` instead of as `run`, a line each.

    Args:
      data: its parsed `config.json`.
      trained: as it should be run.
      run: as it is run; without taps where the layer ids have no single meaning.
      wiring: any, of the target and of as many taps.
      fc_width: inputs of fc, where the files have it.
    """
    lines: list[str] = []
    for field in trained.differences(run):
        if field == "taps":
            lines += _taps_fixes(data, trained.taps, wiring, fc_width)
        elif field == "bypass":
            lines += _bypass_fixes(data, trained)
        elif field in ("fc_norm", "norm_before_fc", "norm_before_residual"):
            lines.append(f'config.json: set "{field}": {str(vars(trained)[field]).lower()}')
        elif field == "feedback":
            lines.append(f'config.json: set "norm_output": {str(trained.feedback == "post_norm").lower()}')
        else:
            lines.append(OTHER_FIXES[field, vars(trained)[field]])
    return lines


OTHER_FIXES: dict[tuple[str, str], str] = {
    ("d2t", "offset"): "tensor d2t: it holds offsets, target id = i + d2t[i]: read it so",
    ("d2t", "absolute"): "tensor d2t: it holds target ids: subtract 0, 1, 2, ... from it to make them offsets",
    ("d2t", "identity"): "tensor d2t: draft id i is target id i: write zeros, or remove d2t from a full vocabulary",
    ("tokens", "next"): "feed row t the token after position t, as every engine does",
    ("tokens", "same"): "no setting helps: the draft learned row t with its own token; train it with the next one",
    ("positions", "t"): "give row t rotary position t in the first step and t + j in step j",
    ("positions", "t+1"): "nothing: a shift of all positions has no effect on rotary attention",
    ("positions", "steps+1"): "no setting helps: the draft's later training steps ran one position ahead of serving "
    "(row t in step j at t + j + 1); train it with t + j",
    ("embedding", "target"): "tensor embed_tokens.weight: remove it, the draft was trained with the target's",
    ("embedding", "file"): "load with own_embed=True: the draft was trained with the embedding in its files",
}


def _bypass_fixes(data: Mapping[str, Any], trained: Reading) -> list[str]:
    if trained.bypass is not None:
        fed = stream_name(trained.bypass)
        return [f"no setting helps: the draft works without its fc, fed {fed}: it is no EAGLE-3 draft"]
    eagle = data.get("eagle_config")
    lines = ["run it as EAGLE3 (--speculative-algorithm EAGLE3): under an older algorithm's name fc is skipped"]
    if isinstance(eagle, Mapping) and cast(Mapping[str, Any], eagle).get("use_aux_hidden_state") is False:
        lines.insert(0, 'config.json: set "use_aux_hidden_state": true in eagle_config')
    return lines


def _taps_fixes(data: Mapping[str, Any], taps: tuple[int, ...], like: Wiring, fc_width: int | None) -> list[str]:
    """A flag that makes the file be read right, if there is one, and the change of the file."""
    lines: list[str] = []
    if not _ascending(taps):
        order = sorted(range(len(taps)), key=lambda slot: taps[slot])
        lines.append(
            f"tensor fc.weight: put its {len(taps)} column blocks of {like.target_hidden} in the order {order}: "
            f"they were trained for taps {taps}, and every engine captures in ascending order"
        )
        taps = tuple(sorted(taps))
    if not data:  # a drafter in memory
        return [*lines, f"feed it the taps {taps}"]
    wiring = Wiring(taps, like.target_layers, like.target_hidden)
    flags = [name for name in CONVENTIONS if _reads(data, wiring, fc_width, name)]
    if _reads(data, wiring, fc_width, None):
        return [*lines, "leave --layer-id-convention out: the file is read right without it"]
    if flags:
        lines.append(f"--layer-id-convention {flags[0]}")
    if RECORD_KEY in data:
        return [*lines, f'config.json: set "taps": {list(taps)} in {RECORD_KEY}.wiring, and the layer ids alike']
    lists = layer_id_lists(data)
    keys = [key.removeprefix("config.") for key in lists] or [_IDS]
    for name in (None, "input_of_layer"):
        if _reads(with_ids(data, taps), wiring, fc_width, name):
            flag = "" if name is None else f", with --layer-id-convention {name}"
            either = "or " if flags else ""
            return [*lines, f"{either}config.json: set {' and '.join(keys)} to {list(taps)}, the layers entered{flag}"]
    return lines


def with_ids(data: Mapping[str, Any], taps: Sequence[int]) -> dict[str, Any]:
    """A config with the taps in place of its layer ids, wherever it has some."""
    out, placed = dict(data), False
    for key in list(layer_id_lists(data)):
        path = key.removeprefix("config.").split(".")
        if len(path) == 2:
            out[path[0]] = {**out[path[0]], path[1]: list(taps)}
        else:
            out[path[0]] = list(taps)
        placed = True
    return out if placed else {**out, _IDS: list(taps)}


def _reads(data: Mapping[str, Any], wiring: Wiring, fc_width: int | None, convention: str | None) -> bool:
    """Whether the strict reader understands the file as these taps."""
    try:
        found = read_wiring(
            data,
            target_layers=wiring.target_layers,
            target_hidden=wiring.target_hidden,
            convention=convention,
            fc_width=fc_width,
        )
    except ConfigError:
        return False
    return found == wiring
