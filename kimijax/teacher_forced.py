"""Teacher-forced acceptance of a draft: its steps run over given text, each compared with the target's own logits.

Row t of step j is given the text's tokens up to t + 1 + j and counts if t + 1 ... t + 2 + j lie in what a server would
generate. It matches if the draft's first choice is the target's at that place; its overlap is 1 - TV, sum_v min(p, q),
the chance that a token drawn from the draft is accepted. On text that the target itself wrote greedily, the matches of
rows that count in every step are what a chain of as many drafts has accepted from there.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from .draft_config import DraftConfig
from .drafter import Drafter
from .errors import ConfigError
from .hypotheses import LAST_NORMED, Reading
from .layers import rms_norm
from .model import Target
from .unroll import unroll, valid_rows

STEPS = 3  # draft steps that are measured
MIN_ROWS = 32  # that count; fewer tell nothing apart


@dataclass(frozen=True)
class Text:
    """Token sequences side by side, each padded at its end."""

    ids: np.ndarray  # int32 [B, T]
    mask: np.ndarray  # bool [B, T]: tokens that a server would generate
    segments: np.ndarray  # int32 [B, T]: 0, and -1 for padding

    @classmethod
    def of(cls, sequences: Iterable[Sequence[int]], answers: Iterable[int] | None = None) -> "Text":
        """Args:
          sequences: token ids.
          answers: where the answer begins in each; None: at the second token, since the first is given.
        Raises:
          ConfigError: fewer rows than can tell readings apart.
        """
        rows = [list(s) for s in sequences]
        begins = [1] * len(rows) if answers is None else list(answers)
        shape = (len(rows), max((len(r) for r in rows), default=0))
        ids, mask, segments = np.zeros(shape, np.int32), np.zeros(shape, np.bool_), np.full(shape, -1, np.int32)
        for i, (row, begin) in enumerate(zip(rows, begins, strict=True)):
            ids[i, : len(row)], mask[i, begin : len(row)], segments[i, : len(row)] = row, True, 0
        text = cls(ids, mask, segments)
        n = sum(max(0, len(r) - max(b, 1) - STEPS) for r, b in zip(rows, begins, strict=True))
        if n < MIN_ROWS:
            raise ConfigError("text", f"{n} rows that count", f"{MIN_ROWS} or more", "give a longer text")
        return text

    @property
    def positions(self) -> np.ndarray:
        """int32 [B, T]."""
        return np.broadcast_to(np.arange(self.ids.shape[1], dtype=np.int32)[None], self.ids.shape)


class Observation(NamedTuple):
    """What one forward pass of the target says about a text."""

    ids: jax.Array  # int32 [B, T]
    segments: jax.Array  # int32 [B, T]
    positions: jax.Array  # int32 [B, T]
    valid: jax.Array  # bool [STEPS, B, T]
    streams: dict[int, jax.Array]  # tap, or LAST_NORMED -> [B, T, D]
    choice: jax.Array  # int32 [B, T], argmax of the logits
    probability: jax.Array  # float32 [B, T, V]


def observe(target: Target, text: Text, taps: Sequence[int], mesh: Mesh | None = None) -> Observation:
    """One forward pass that collects the taps and the last hidden state."""
    graph, state = nnx.split(target)
    arrays = (jnp.asarray(a) for a in (text.ids, text.mask, text.segments, text.positions))
    with on(mesh):
        return _observe(graph, tuple(sorted({*taps, target.config.n_layers})), state, *arrays)


# The programs belong to the module, so that a second draft of the same shapes compiles nothing.
@partial(jax.jit, static_argnums=(0, 1))
def _observe(
    graph: Any,
    taps: tuple[int, ...],
    state: nnx.State,
    ids: jax.Array,
    mask: jax.Array,
    segments: jax.Array,
    positions: jax.Array,
) -> Observation:
    model: Target = nnx.merge(graph, state)
    out = model(ids, segments=segments, taps=taps)
    normed = rms_norm(out.taps[taps[-1]], model.norm[...], model.config.norm_eps)
    choice = jnp.argmax(out.logits, axis=-1).astype(jnp.int32)
    valid = valid_rows(mask, segments, STEPS)
    streams = {**out.taps, LAST_NORMED: normed}
    return Observation(ids, segments, positions, valid, streams, choice, jax.nn.softmax(out.logits, axis=-1))


@partial(jax.jit, static_argnums=0)
def _fuse(graph: Any, state: nnx.State, taps: dict[int, jax.Array]) -> jax.Array:
    return nnx.merge(graph, state).fuse(taps)


@partial(jax.jit, static_argnums=0)
def _steps(
    graph: Any,
    state: nnx.State,
    features: jax.Array,
    ids: jax.Array,
    segments: jax.Array,
    positions: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
    """Logits [B, T, Vd] of every step, at its own rotary positions."""
    drafter: Drafter = nnx.merge(graph, state)
    hidden = unroll(drafter, features, ids, positions[0], segments, STEPS, positions_of_step=lambda j: positions[j])
    return tuple(drafter.logits(h) for h in hidden)


def on(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """The context in which programs of a model on that mesh run."""
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


@dataclass(frozen=True)
class Measured:
    """Acceptance of one reading.

    Attributes:
      matches: share of the rows that count whose greedy choices agree, by step.
      overlaps: mean 1 - TV by step.
      greedy, sampled: mean tokens of a round with a chain of `STEPS` drafts, the bonus token included, at temperature 0
        and 1.
      rows: float [n], what `sampled` is the mean of, less one; the same rows for every reading of one text.
    """

    reading: Reading
    matches: tuple[float, ...]
    overlaps: tuple[float, ...]
    greedy: float
    sampled: float
    rows: np.ndarray = dataclasses.field(repr=False, compare=False)

    def lead(self, other: "Measured") -> float:
        """By how many standard errors this one's acceptance is above the other's, paired by rows."""
        difference = self.rows - other.rows
        error = float(np.std(difference)) / len(difference) ** 0.5
        return 0.0 if error == 0 else float(np.mean(difference)) / error

    def to_json(self) -> dict[str, Any]:
        out = {"reading": self.reading.to_json(), "matches": list(self.matches), "overlaps": list(self.overlaps)}
        return {**out, "length_greedy": self.greedy, "length_sampled": self.sampled}


class Forcing:
    """Measures readings of one draft over one observation; each set of norms is a program of its own."""

    def __init__(
        self,
        build: Callable[[Reading], Drafter],
        target_ids: Mapping[str, np.ndarray],
        base: DraftConfig,
        seen: Observation,
        mesh: Mesh | None = None,
    ) -> None:
        """
        Args:
          build: the drafter of a reading's norms and tables; its wiring is 0, 1, 2, ..., the column blocks of fc.
          target_ids: for each reading of d2t the target id of each draft id, int64 [Vd], -1 where it means none.
          base: the draft's configuration.
          seen: what the target says about the text.
          mesh: where target and draft lie.
        """
        self._build, self._base, self._seen, self._mesh = build, base, seen, mesh
        self._target_ids = {name: jnp.asarray(ids, jnp.int32) for name, ids in target_ids.items()}
        self._heads: dict[tuple[DraftConfig, str], tuple[Any, nnx.State]] = {}
        self._logits: tuple[Reading | None, tuple[jax.Array, ...]] = (None, ())
        self._done: dict[Reading, Measured] = {}
        valid = np.asarray(seen.valid)
        self._counts = valid.sum(axis=(1, 2))
        self._rows = valid[-1]  # rows that count in the last step count in all of them

    @property
    def n_rows(self) -> int:
        """Rows that count in every step."""
        return int(self._rows.sum())

    @property
    def done(self) -> list[Measured]:
        """Everything measured so far, the best first."""
        return sorted(self._done.values(), key=lambda m: -m.sampled)

    def chance(self) -> float:
        """Share of the rows that a draft matches in its first step if it always names the commonest token."""
        choices = np.asarray(self._seen.choice)[:, 1:][np.asarray(self._seen.valid)[0, :, :-1]]
        return float(np.bincount(choices).max() / choices.size)

    def measure(self, reading: Reading) -> Measured:
        """The acceptance of a reading; measured once."""
        if reading not in self._done:
            with on(self._mesh):
                logits = self._run(reading)
                match, overlap = _score(logits, self._target_ids[reading.d2t], self._seen)
            self._done[reading] = self._summary(reading, np.asarray(match), np.asarray(overlap))
        return self._done[reading]

    def _run(self, reading: Reading) -> tuple[jax.Array, ...]:
        """Logits [B, T, Vd] of every step. The last ones are kept: readings of d2t share them."""
        key = dataclasses.replace(reading, d2t="offset")
        if self._logits[0] != key:
            seen = self._seen
            graph, state = self._head(reading)
            if reading.bypass is not None:
                features = seen.streams[reading.bypass]
            else:
                features = _fuse(graph, state, {slot: seen.streams[tap] for slot, tap in enumerate(reading.taps)})
            ids = seen.ids
            if reading.tokens == "same":  # row t then finds its own token where it looks for the next one
                ids = jnp.pad(ids[:, :-1], ((0, 0), (1, 0)))
            later = {"t": (0, 0), "t+1": (1, 1), "steps+1": (0, 1)}[reading.positions]
            positions = tuple(seen.positions + jnp.int32(j + later[min(j, 1)]) for j in range(STEPS))
            self._logits = (key, _steps(graph, state, features, ids, seen.segments, positions))
        return self._logits[1]

    def _head(self, reading: Reading) -> tuple[Any, nnx.State]:
        key = (reading.config(self._base), reading.embedding)
        if key not in self._heads:
            self._heads[key] = nnx.split(self._build(reading))
        return self._heads[key]

    def _summary(self, reading: Reading, match: np.ndarray, overlap: np.ndarray) -> Measured:
        valid = np.asarray(self._seen.valid)
        chained = [np.cumprod(a[:, self._rows], axis=0).sum(axis=0) for a in (match.astype(np.float64), overlap)]
        return Measured(
            reading,
            matches=tuple(float(match[j][valid[j]].sum() / self._counts[j]) for j in range(STEPS)),
            overlaps=tuple(float(overlap[j][valid[j]].sum() / self._counts[j]) for j in range(STEPS)),
            greedy=1 + float(chained[0].mean()),
            sampled=1 + float(chained[1].mean()),
            rows=chained[1],
        )


@jax.jit
def _score(logits: tuple[jax.Array, ...], target_ids: jax.Array, seen: Observation) -> tuple[jax.Array, jax.Array]:
    """match bool and overlap float32, [STEPS, B, T], of draft logits by step; see the module.

    Args:
      logits: [B, T, Vd] by step.
      target_ids: int32 [Vd], -1 for a draft id that means no token: it never matches and overlaps with nothing.
      seen: of the same text.
    """
    matches: list[jax.Array] = []
    overlaps: list[jax.Array] = []
    known = (target_ids >= 0)[None, None]
    for j, step in enumerate(logits):
        by = 1 + j
        right = jnp.pad(seen.choice[:, by:], ((0, 0), (0, by)))
        p = jnp.pad(seen.probability[:, by:], ((0, 0), (0, by), (0, 0)))
        matches.append(target_ids[jnp.argmax(step, axis=-1)] == right)
        kept = jnp.where(known, p[..., jnp.maximum(target_ids, 0)], 0.0)
        overlaps.append(jnp.minimum(kept, jax.nn.softmax(step, axis=-1)).sum(axis=-1))
    return jnp.stack(matches), jnp.stack(overlaps)
