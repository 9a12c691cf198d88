"""A probe: short token sequences with what target and drafter must make of them, kept in the draft's folder.

`make_probe` records it where the draft is exported; `replay` runs the sequences once where it is served, and `check`
refuses a target or drafter that does something else. Of every tap it keeps a projection to `WIDTH` values, which keeps
distances (Johnson-Lindenstrauss) and is small; of the drafter its first tokens in two steps.

Tolerances must let pass another dtype or placement and nothing else. Relative distances of features, with kimi-nano:
float32 against bfloat16 at most 0.009, a neighbouring tap 0.26 or more. The probe therefore records how far each tap is
from its nearest neighbour, and a feature may lie up to `SHARE` of that away from what was recorded, about the geometric
middle. A row's first token must be the recorded one if that led by `MARGIN` logits, in `AGREEMENT` of such rows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from .config_reader import Reader
from .drafter import Drafter
from .errors import ConfigError
from .model import Target
from .teacher_forced import on
from .unroll import unroll
from .wiring import WiringError

PROBE_FILE = "probe.json"
FORMAT = 1
WIDTH = 8  # values of a projected feature
POSITIONS = 8  # checked in each sequence
TOP = 3
STEPS = 2
SHARE = 0.2
MARGIN = 0.5
AGREEMENT = 0.9
SERVED_SHARE = 0.85  # of the recorded acceptance of the first draft, below which serving is suspicious


@dataclass(frozen=True)
class ProbeAcceptance:
    """What `evaluate` measured with this draft."""

    draft_tokens: int  # k of the chain
    temperature: float
    by_position: tuple[float, ...]  # share of the rounds in which drafts 0 ... i were all accepted

    def __post_init__(self) -> None:
        if len(self.by_position) != self.draft_tokens or not all(0 <= p <= 1 for p in self.by_position):
            expected = f"{self.draft_tokens} shares from 0 to 1"
            raise ConfigError("probe.acceptance.by_position", list(self.by_position), expected)


@dataclass(frozen=True)
class ProbeSequence:
    """One sequence and what was recorded at some of its positions; P of them."""

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    features: Mapping[int, tuple[tuple[float, ...], ...]]  # tap -> [P, WIDTH]
    tokens: tuple[tuple[tuple[int, ...], ...], ...]  # [STEPS, P, TOP] target ids of the draft, the likeliest first
    margins: tuple[tuple[float, ...], ...]  # [STEPS, P], by how many logits the first leads


@dataclass(frozen=True)
class Probe:
    """All sequences, and how they were made.

    Attributes:
      seed: of the projection, a matrix of random signs.
      separation: relative distance of each tap from the nearer of its neighbours, over all checked positions.
      acceptance: None where nothing was measured.
    """

    seed: int
    separation: Mapping[int, float]
    sequences: tuple[ProbeSequence, ...]
    acceptance: ProbeAcceptance | None

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(self.separation)

    def to_json(self) -> dict[str, Any]:
        a = self.acceptance
        return {
            "format": FORMAT,
            "seed": self.seed,
            "separation": {str(tap): value for tap, value in self.separation.items()},
            "sequences": [
                {
                    "ids": list(s.ids),
                    "positions": list(s.positions),
                    "features": {str(tap): [list(row) for row in rows] for tap, rows in s.features.items()},
                    "tokens": [[list(row) for row in step] for step in s.tokens],
                    "margins": [list(step) for step in s.margins],
                }
                for s in self.sequences
            ],
            "acceptance": None
            if a is None
            else {"draft_tokens": a.draft_tokens, "temperature": a.temperature, "by_position": list(a.by_position)},
        }

    @classmethod
    def from_json(cls, data: object, where: str = "probe") -> "Probe":
        """Reads `to_json`'s record. ConfigError names a key that is missing, unknown, mistyped or of another size."""
        r = Reader(data, where)
        r.one_of("format", (FORMAT,), fix="export the draft again with this kimijax")
        separation = _by_tap(r, "separation")
        for tap, value in separation.items():
            if type(value) is not float or not math.isfinite(value) or value <= 0:
                raise ConfigError(f"{where}.separation.{tap}", value, "a finite number above 0")
        rows: list[Any] = r.get("sequences", list)
        sequences = tuple(_sequence(row, f"{where}.sequences[{i}]", tuple(separation)) for i, row in enumerate(rows))
        if not sequences or not separation:
            raise ConfigError(f"{where}.sequences", len(sequences), "one sequence or more, and one tap or more")
        measured = r.get("acceptance", (dict, type(None)))
        acceptance = None if measured is None else _acceptance(Reader(measured, f"{where}.acceptance"))
        probe = cls(r.get("seed", int), separation, sequences, acceptance)
        r.finish()
        return probe


def _by_tap(r: Reader, key: str) -> dict[int, Any]:
    """An object whose keys are taps."""
    found: dict[str, Any] = r.get(key, dict)
    if not all(name.isdecimal() for name in found):
        raise ConfigError(f"{r.where}.{key}", sorted(found), "an object with a key for each tap")
    return {int(name): value for name, value in found.items()}


def _sequence(data: object, where: str, taps: tuple[int, ...]) -> ProbeSequence:
    r = Reader(data, where)
    ids: list[Any] = r.get("ids", list)
    positions: list[Any] = r.get("positions", list)
    if not all(type(i) is int and i >= 0 for i in ids):
        raise ConfigError(f"{where}.ids", ids, "token ids")
    p = len(positions)
    if not p or not all(type(t) is int and 0 <= t < len(ids) - STEPS for t in positions):
        raise ConfigError(f"{where}.positions", positions, f"positions from 0 to {len(ids) - STEPS - 1}")
    features = _by_tap(r, "features")
    if tuple(features) != taps:
        raise ConfigError(f"{where}.features", sorted(features), f"the taps {taps}")
    sequence = ProbeSequence(
        tuple(ids),
        tuple(positions),
        {tap: _numbers(value, f"{where}.features.{tap}", (p, WIDTH), float) for tap, value in features.items()},
        _numbers(r.get("tokens", list), f"{where}.tokens", (STEPS, p, TOP), int),
        _numbers(r.get("margins", list), f"{where}.margins", (STEPS, p), float),
    )
    r.finish()
    return sequence


def _numbers(value: Any, where: str, shape: tuple[int, ...], kind: type) -> Any:
    """Nested tuples of that shape; finite numbers of that kind."""
    if not shape:
        if type(value) is int and kind is float:
            value = float(value)
        if type(value) is not kind or not math.isfinite(value):
            raise ConfigError(where, value, f"a finite {kind.__name__}")
        return value
    if not isinstance(value, list) or len(value) != shape[0]:
        raise ConfigError(where, value, f"a list of {shape[0]}")
    return tuple(_numbers(item, where, shape[1:], kind) for item in value)


def _acceptance(r: Reader) -> ProbeAcceptance:
    k, temperature = r.positive("draft_tokens"), r.get("temperature", float)
    shares: list[Any] = r.get("by_position", list)
    out = ProbeAcceptance(k, temperature, _numbers(shares, f"{r.where}.by_position", (k,), float))
    r.finish()
    return out


@partial(jax.jit, static_argnums=(0, 1))
def _run(
    graph: Any, taps: tuple[int, ...], state: nnx.State, ids: jax.Array, segments: jax.Array, signs: jax.Array
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
    """Projected taps, and of each step the largest logits and their target ids."""
    parts: tuple[Target, Drafter] = nnx.merge(graph, state)
    target, drafter = parts
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32)[None], ids.shape)
    found = target(ids, segments=segments, taps=sorted({*taps, *drafter.wiring.taps})).taps
    projected = [jnp.matmul(found[tap].astype(jnp.float32), signs, precision="highest") for tap in taps]
    steps = unroll(drafter, drafter.fuse(found), ids, positions, segments, STEPS)
    best = [jax.lax.top_k(drafter.logits(hidden), TOP) for hidden in steps]
    return projected, [logits for logits, _ in best], [drafter.to_target(ids) for _, ids in best]


class _Seen:
    """One run of target and drafter over sequences: projections float32 [n, T, WIDTH] by tap, top ids, logits."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        sequences: Sequence[Sequence[int]],
        taps: Sequence[int],
        seed: int,
        mesh: Mesh | None,
    ) -> None:
        n, t = len(sequences), max(len(s) for s in sequences)
        ids, segments = np.zeros((n, t), np.int32), np.full((n, t), -1, np.int32)
        for i, s in enumerate(sequences):
            ids[i, : len(s)], segments[i, : len(s)] = s, 0
        signs = np.random.default_rng(seed).choice([-1.0, 1.0], (target.config.hidden, WIDTH)).astype(np.float32)
        graph, state = nnx.split((target, drafter))
        wanted = tuple(taps)
        with on(mesh):
            out = _run(graph, wanted, state, jnp.asarray(ids), jnp.asarray(segments), jnp.asarray(signs))
        projected, self.logits, self.tokens = jax.tree.map(np.asarray, out)
        self.projected: dict[int, np.ndarray] = dict(zip(wanted, projected, strict=True))

    def features(self, tap: int, at: Sequence[Sequence[int]]) -> np.ndarray:
        """float32 [n * P, WIDTH] at the positions of each sequence."""
        return np.concatenate([self.projected[tap][i, list(positions)] for i, positions in enumerate(at)])


def make_probe(
    target: Target,
    drafter: Drafter,
    sequences: Sequence[Sequence[int]],
    acceptance: ProbeAcceptance | None = None,
    *,
    seed: int = 0,
    mesh: Mesh | None = None,
) -> Probe:
    """Records a probe.

    Args:
      target: filled.
      drafter: filled.
      sequences: token ids, such as a prompt and the beginning of its answer; each longer than `POSITIONS` + 3.
      acceptance: as `evaluate` measured it.
      seed: of the projection.
      mesh: where both lie.
    Raises:
      ConfigError: no sequence, or one that is too short.
    """
    for s in sequences or [()]:
        if len(s) < POSITIONS + STEPS + 2:
            raise ConfigError("probe sequences", f"{len(s)} tokens", f"{POSITIONS + STEPS + 2} or more in each")
    n, wired = target.config.n_layers, drafter.wiring.taps
    near = {tap: [t for t in (tap - 1, tap + 1) if 0 <= t <= n] for tap in wired}
    taps = sorted({*wired, *(t for ts in near.values() for t in ts)})
    seen = _Seen(target, drafter, sequences, taps, seed, mesh)
    # The later part of each sequence: the first tokens' streams are unlike all others, and alike in all layers.
    at = [np.unique(np.linspace(len(s) // 4, len(s) - STEPS - 1, POSITIONS).astype(int)).tolist() for s in sequences]
    separation = {tap: min(_distance(seen.features(t, at), seen.features(tap, at)) for t in near[tap]) for tap in wired}
    recorded: list[ProbeSequence] = []
    for i, (ids, positions) in enumerate(zip(sequences, at, strict=True)):
        features = {tap: _rounded(seen.projected[tap][i, positions]) for tap in wired}
        tokens = tuple(tuple(tuple(row) for row in step[i, positions].tolist()) for step in seen.tokens)
        margins = tuple(_rounded(step[i, positions, 0] - step[i, positions, 1]) for step in seen.logits)
        recorded.append(ProbeSequence(tuple(int(t) for t in ids), tuple(positions), features, tokens, margins))
    return Probe(seed, separation, tuple(recorded), acceptance)


def _rounded(values: np.ndarray) -> Any:
    """Nested tuples of floats with 6 digits: far finer than any tolerance."""
    if values.ndim > 1:
        return tuple(_rounded(row) for row in values)
    return tuple(float(f"{x:.6g}") for x in values.tolist())


def _distance(found: np.ndarray, right: np.ndarray) -> float:
    """Of features, relative to the right ones: 2-norms over all positions."""
    return float(np.linalg.norm(found - right) / np.linalg.norm(right))


@dataclass(frozen=True)
class ProbeResult:
    """What a replay found.

    Attributes:
      distances, limits: of the features of each tap, relative.
      agreement: by step, share of the confident rows whose first token is the recorded one; None without such rows.
      confident: by step, how many rows are.
      example: recorded and found of the worst tap and of the first token that differs.
    """

    distances: Mapping[int, float]
    limits: Mapping[int, float]
    agreement: tuple[float | None, ...]
    confident: tuple[int, ...]
    example: str

    @property
    def features_match(self) -> bool:
        return all(d <= self.limits[tap] for tap, d in self.distances.items())  # not so for nan

    @property
    def tokens_match(self) -> bool:
        return all(share is None or share >= AGREEMENT for share in self.agreement)

    def summary(self) -> str:
        taps = ", ".join(f"tap {tap} {d:.2g} (limit {self.limits[tap]:.2g})" for tap, d in self.distances.items())
        shares = ", ".join(
            f"step {j} {'none confident' if share is None else f'{share:.0%}'} of {self.confident[j]}"
            for j, share in enumerate(self.agreement)
        )
        return f"distance of features: {taps}; agreement of tokens: {shares} (limit {AGREEMENT:.0%})"


def replay(probe: Probe, target: Target, drafter: Drafter, *, mesh: Mesh | None = None) -> ProbeResult:
    """Runs target and drafter over the probe's sequences, once.

    Raises:
      WiringError: a drafter with other taps, or a target without one of them or some of the token ids.
    """
    c, wired = target.config, drafter.wiring.taps
    if wired != probe.taps:
        raise WiringError("probe.taps", f"recorded with taps {probe.taps}, the drafter is fed {wired}")
    largest = max(t for s in probe.sequences for t in (*s.ids, *(i for step in s.tokens for row in step for i in row)))
    if probe.taps[-1] > c.n_layers or largest >= c.vocab_size:
        found = f"{c.n_layers} layers and {c.vocab_size} tokens"
        raise WiringError("probe", f"recorded with tap {probe.taps[-1]} and token {largest}, the target has {found}")
    seen = _Seen(target, drafter, [s.ids for s in probe.sequences], probe.taps, probe.seed, mesh)
    at = [s.positions for s in probe.sequences]
    distances: dict[int, float] = {}
    lines: dict[int, str] = {}
    for tap in probe.taps:
        right = np.concatenate([np.asarray(s.features[tap], np.float32) for s in probe.sequences])
        found = seen.features(tap, at)
        distances[tap] = _distance(found, right)
        lines[tap] = f"tap {tap}, position {at[0][0]}: recorded {_shown(right[0])}, found {_shown(found[0])}"
    limits = {tap: SHARE * probe.separation[tap] for tap in probe.taps}
    worst = max(probe.taps, key=lambda tap: distances[tap] / limits[tap])
    counts, agreed, differs = _tokens(probe, seen)
    return ProbeResult(
        distances,
        limits,
        tuple(a / n if n else None for a, n in zip(agreed, counts, strict=True)),
        tuple(counts),
        "\n".join([lines[worst], *differs[:1]]),
    )


def _shown(values: np.ndarray) -> str:
    return "(" + ", ".join(f"{x:.3g}" for x in values[:4]) + ", ...)"


def _tokens(probe: Probe, seen: _Seen) -> tuple[list[int], list[int], list[str]]:
    """Confident rows and those that agree, by step, and those that do not in words."""
    counts, agreed, differs = [0] * STEPS, [0] * STEPS, list[str]()
    for j in range(STEPS):
        for i, s in enumerate(probe.sequences):
            for p, position in enumerate(s.positions):
                if s.margins[j][p] < MARGIN:
                    continue
                right, found = s.tokens[j][p], tuple(seen.tokens[j][i, position].tolist())
                counts[j] += 1
                agreed[j] += right[0] == found[0]
                if right[0] != found[0]:
                    where = f"draft step {j}, sequence {i}, position {position}"
                    differs.append(f"{where}: recorded tokens {right}, found {found}")
    return counts, agreed, differs


def check(result: ProbeResult, name: str = "the draft") -> None:
    """Refuses what a replay found to differ.

    Raises:
      WiringError: shows both sides.
    """
    if result.features_match and result.tokens_match:
        return
    if not result.features_match:
        what = "its target's features are not those that it was trained on: another target, tap or precision"
    else:
        what = "with the right features it proposes other tokens: other weights, vocabulary, or order of the taps"
    raise WiringError("probe", f"{name} does not replay its probe: {what}\n{result.summary()}\n{result.example}")


def served_acceptance_warning(probe: Probe, served: float) -> str:
    """What to log when the first draft is accepted too rarely; empty while it is not.

    Args:
      probe: with the recorded acceptance.
      served: share of the rounds whose first draft was accepted.
    """
    if probe.acceptance is None or served >= SERVED_SHARE * probe.acceptance.by_position[0]:
        return ""
    recorded = probe.acceptance.by_position[0]
    return (
        f"the first draft is accepted in {served:.1%} of the rounds, below {SERVED_SHARE} of the {recorded:.1%} that "
        "were recorded with this draft: other text than it was trained on, or a fault (python -m kimijax.doctor)"
    )
