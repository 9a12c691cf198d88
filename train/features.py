"""Stage `features`: the target's hidden states at every token of the documents, in files.

`hidden_states` is the one function that computes them; training with `features.source = "online"` calls it in its own
step. Documents are packed into rows of a few fixed lengths, so that each length is compiled once; a document longer
than `features.batch_tokens` goes through the target in chunks, with a cache. Neither changes a document's states.

Of several processes each writes its own files. Where each has a copy of the target it computes these alone, at its own
speed; where the target lies on the devices of all, all compute every file together and one of them writes it.
"""

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from kimijax.attention import MLA, Query
from kimijax.cache import Window
from kimijax.config import TargetConfig
from kimijax.errors import ConfigError
from kimijax.model import Target
from kimijax.safetensors_io import DTYPES
from kimijax.sharding import shard
from kimijax.wiring import Wiring

from .document_files import documents_folder
from .draft_recipe import DraftRecipe
from .draft_target import DraftTarget
from .feature_manifest import FLOATS, ORIGIN, Manifest, Split
from .feature_writer import FeatureWriter, Planned, ShardArrays, empty_splits
from .hosts import StopShared, gathered, is_first, say, wait_for_all
from .packing import Documents, plan

FOLDER = "features"  # within a run's folder
_SHORTEST_ROW, _ROW_FACTOR = 512, 4  # rows of 512, 2048, 8192, ... tokens, up to a batch
_REPORT_SECONDS = 10.0


def hidden_states(
    target: Target, ids: jax.Array, positions: jax.Array, segments: jax.Array, wiring: Wiring
) -> tuple[dict[int, jax.Array], jax.Array]:
    """The streams that a drafter reads and the last one, of whole documents: a pure function, for use under jit.

    Args:
      target: frozen.
      ids: int32 [B, T].
      positions: int32 [B, T], from 0 in each document.
      segments: int32 [B, T], the document of each token within its row, -1 for padding.
      wiring: which taps.
    Returns:
      tap -> [B, T, D], and tap n_layers [B, T, D], before the final norm; of padding, anything finite.
    """

    def attend(layer: int, mla: MLA, query: Query, latents: jax.Array) -> jax.Array:
        return mla.expanded(query, latents, segments=segments)

    hidden = target.run(ids, positions, attend, wiring.taps, "reference")
    return hidden.taps, hidden.last


_Output = tuple[dict[int, jax.Array], jax.Array]  # tap -> [B, T, D], and the last state


class States(NamedTuple):
    """The states of one document on the host."""

    document: int  # among those that were given
    taps: dict[int, np.ndarray]  # tap -> [T, D]
    last: np.ndarray  # [T, D], before the final norm


class _Batch(NamedTuple):
    """Rows of one forward pass."""

    ids: np.ndarray  # int32 [B, T]
    positions: np.ndarray  # int32 [B, T]
    segments: np.ndarray  # int32 [B, T]
    places: list[tuple[int, int, int, int]]  # document, row, first and last + 1 token


class _Program(NamedTuple):
    """What a compiled program depends on beside shapes."""

    graph: nnx.GraphDef[Target]
    wiring: Wiring
    stored: np.dtype

    def output(self, taps: Mapping[int, jax.Array], last: jax.Array) -> _Output:
        """Rounded on the device: half the bytes to copy. Every device of a mesh has all of it, so that every process
        can read it."""

        def whole(h: jax.Array) -> jax.Array:
            return shard(h.astype(self.stored), "replicated", "replicated", "replicated")

        return {tap: whole(h) for tap, h in taps.items()}, whole(last)


@functools.partial(jax.jit, static_argnums=0)
def _forward(p: _Program, state: nnx.State, ids: jax.Array, positions: jax.Array, segments: jax.Array) -> _Output:
    return p.output(*hidden_states(nnx.merge(p.graph, state), ids, positions, segments, p.wiring))


@functools.partial(jax.jit, static_argnums=0, donate_argnames="window")
def _chunk(
    p: _Program, state: nnx.State, ids: jax.Array, start: jax.Array, window: Window
) -> tuple[dict[int, jax.Array], jax.Array, Window]:
    """The next chunk of one document, ids [1, T] from position `start` [1] on; the window has all before it."""
    hidden, new = nnx.merge(p.graph, state).prefill(ids, start, window, taps=p.wiring.taps)
    for layer, latents in enumerate(new):
        window = window.store(layer, latents, start)
    return *p.output(hidden.taps, hidden.last), window


class Extractor:
    """Documents in, states out."""

    def __init__(self, target: Target, wiring: Wiring, batch_tokens: int, dtype: str, mesh: Mesh | None = None) -> None:
        """Prepares.

        Args:
          target: filled.
          wiring: which taps.
          batch_tokens: of one forward pass.
          dtype: of the states that are returned, bfloat16 or float32.
          mesh: where the target lies; None: one device.
        """
        self._config, self._compute_dtype = target.config, target.embed.get_value().dtype
        self._batch_tokens, self._mesh = batch_tokens, mesh
        graph, self._state = nnx.split(target)
        self._program = _Program(graph, wiring, jnp.dtype(DTYPES[FLOATS[dtype]]))

    def run(self, documents: Sequence[np.ndarray]) -> Iterator[States]:
        """The states of documents, int [T] each, in the order in which they become ready."""
        lengths = [len(d) for d in documents]
        pending: tuple[_Batch, _Output] | None = None
        for batch in batches(documents, lengths, self._batch_tokens):
            with self._devices():
                ahead = _forward(self._program, self._state, batch.ids, batch.positions, batch.segments)
            if pending is not None:  # copied to the host while the device computes the next
                yield from _split(*pending)
            pending = batch, ahead
        if pending is not None:
            yield from _split(*pending)
        for i, document in enumerate(documents):
            if len(document) > self._batch_tokens:
                yield self._in_chunks(i, document)

    def _in_chunks(self, index: int, document: np.ndarray) -> States:
        size = self._batch_tokens
        n_chunks = -(-len(document) // size)
        room = size << max(0, n_chunks - 1).bit_length()  # few sizes are compiled
        shape = (1, room, self._config.latent_dim)
        parts: list[tuple[dict[int, np.ndarray], np.ndarray]] = []
        with self._devices():
            window = Window(tuple(jnp.zeros(shape, self._compute_dtype) for _ in range(self._config.n_layers)))
            for start in range(0, len(document), size):
                ids = np.zeros((1, size), np.int32)
                tokens = document[start : start + size]
                ids[0, : len(tokens)] = tokens
                taps, last, window = _chunk(self._program, self._state, ids, np.array([start], np.int32), window)
                n = len(tokens)
                parts.append(({tap: np.asarray(h)[0, :n] for tap, h in taps.items()}, np.asarray(last)[0, :n]))
        taps = {tap: np.concatenate([part[0][tap] for part in parts]) for tap in parts[0][0]}
        return States(index, taps, np.concatenate([part[1] for part in parts]))

    def _devices(self) -> Any:
        return nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)


def _split(batch: _Batch, output: _Output) -> Iterator[States]:
    taps, last = {tap: np.asarray(h) for tap, h in output[0].items()}, np.asarray(output[1])
    for document, row, start, stop in batch.places:
        yield States(document, {tap: h[row, start:stop] for tap, h in taps.items()}, last[row, start:stop])


def row_tokens(length: int, batch_tokens: int) -> int:
    """The row that a document of `length` goes into: the shortest of the fixed lengths that holds it."""
    size = min(_SHORTEST_ROW, batch_tokens)
    while size < length:
        size = min(size * _ROW_FACTOR, batch_tokens)
    return size


def batches(documents: Sequence[np.ndarray], lengths: Sequence[int], batch_tokens: int) -> Iterator[_Batch]:
    """Forward passes over the documents that are not longer than one: all rows of a length have the same shape."""
    groups: dict[int, list[int]] = {}
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):  # the longest first: fuller rows
        if lengths[i] <= batch_tokens:
            groups.setdefault(row_tokens(lengths[i], batch_tokens), []).append(i)
    for size, members in groups.items():
        rows = plan([lengths[i] for i in members], size)
        n = batch_tokens // size
        for start in range(0, len(rows), n):
            yield _fill(documents, [[members[i] for i in row] for row in rows[start : start + n]], (n, size))


def _fill(documents: Sequence[np.ndarray], rows: list[list[int]], shape: tuple[int, int]) -> _Batch:
    ids, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    segments = np.full(shape, -1, np.int32)
    places: list[tuple[int, int, int, int]] = []
    for r, row in enumerate(rows):
        at = 0
        for d, i in enumerate(row):
            end = at + len(documents[i])
            ids[r, at:end], segments[r, at:end] = documents[i], d
            positions[r, at:end] = np.arange(end - at)
            places.append((i, r, at, end))
            at = end
    return _Batch(ids, positions, segments, places)


def load_splits(recipe: DraftRecipe, out: Path) -> dict[Split, Documents]:
    """The documents of both splits."""
    folder = documents_folder(recipe, out)
    return {"train": Documents.load(folder), "heldout": Documents.load(folder, "heldout_")}


def check_ids(documents: Mapping[Split, Documents], config: TargetConfig) -> None:
    """Refuses ids that the target does not have: a device would silently gather another row. ConfigError."""
    for split, d in documents.items():
        low, high = int(d.tokens.min(initial=0)), int(d.tokens.max(initial=0))
        if low < 0 or high >= config.vocab_size:
            expected = f"ids from 0 to {config.vocab_size - 1}, the target's"
            fix = "make the corpus with the target's own tokenizer"
            raise ConfigError(f"documents ({split}): token ids", f"{low} to {high}", expected, fix)


def extract(recipe: DraftRecipe, out: Path, stop: Callable[[], bool] = lambda: False) -> bool:
    """Writes `out/features`, or what is missing of it.

    Args:
      recipe: with `features.source = "online"` there is nothing to do.
      out: the run's folder, with its documents.
      stop: asked after every forward pass; once it says yes, complete files are kept and the run returns.
    Returns:
      Whether everything is written.
    Raises:
      ConfigError, WiringError: a disk that is too small, or a folder that holds features of something else.
      FeatureError: states that are not finite, or a disk that ran full.
    """
    if recipe.features.source == "online":
        say('features: features.source = "online": computed while training, nothing is stored')
        return True
    source, documents = DraftTarget.of(recipe), load_splits(recipe, out)
    check_ids(documents, source.config)
    source.placement()  # refused before anything is written
    f, folder = recipe.features, out / FOLDER
    manifest = Manifest(
        source.contract, f.dtype, recipe.target.dtype, "pre_norm", ORIGIN, f.shard_mb, empty_splits(documents)
    )
    with StopShared(stop, folder, in_step=not source.is_copied) as shared:
        writer = _open_writer(folder, manifest, documents)
        writer.check_disk()
        missing = writer.missing if source.is_copied else _missing_anywhere(writer)
        finished = not missing or _extract(source, writer, missing, documents, shared)
        wait_for_all("features: written")
        if is_first():
            writer.collect()
        return bool(gathered(np.array(finished)).all())


def _extract(
    source: DraftTarget,
    writer: FeatureWriter,
    missing: Sequence[Planned],
    documents: Mapping[Split, Documents],
    stop: Callable[[], bool],
) -> bool:
    """Computes files, and writes those that are this process's; false if it was asked to stop."""
    f, own = source.recipe.features, {p.file for p in writer.mine}
    target, mesh = source.load()
    extractor = Extractor(target, source.wiring, f.batch_tokens, f.dtype, mesh)
    progress = _Progress(sum(p.tokens for p in missing))
    for planned in missing:
        arrays = _shard(extractor, writer.manifest, planned, documents[planned.split], progress, stop)
        if arrays is None:
            say(f"features: stopped before {planned.file}; run the same command again to go on")
            return False
        if planned.file in own:
            writer.write(planned, arrays)
    progress.report("features: done")
    return True


def _missing_anywhere(writer: FeatureWriter) -> list[Planned]:
    """The files that are missing, of all processes."""
    missing = {p.file for p in writer.missing}
    found = gathered(np.array([p.file in missing for p in writer.planned], bool)).any(axis=0)
    return [p for p, is_missing in zip(writer.planned, found, strict=True) if is_missing]


def _open_writer(folder: Path, manifest: Manifest, documents: Mapping[Split, Documents]) -> FeatureWriter:
    """This process's writer, made after the first one's."""
    process = jax.process_index(), jax.process_count()
    if not is_first():
        wait_for_all("features: begin")
    try:
        return FeatureWriter(folder, manifest, documents, process)
    finally:
        if is_first():
            wait_for_all("features: begin")


def _shard(
    extractor: Extractor,
    manifest: Manifest,
    planned: Planned,
    documents: Documents,
    progress: "_Progress",
    stop: Callable[[], bool],
) -> ShardArrays | None:
    """The states of one file's documents; None if it was asked to stop."""
    ends = documents.offsets[planned.first : planned.stop + 1]
    parts = [documents.tokens[a:b] for a, b in pairwise(ends)]
    arrays = ShardArrays(manifest, planned.tokens)
    for states in extractor.run(parts):
        arrays.put(int(ends[states.document] - ends[0]), states.taps, states.last)
        progress.add(len(states.last))
        if stop():
            return None
    return arrays


class _Progress:
    """A line on stderr every few seconds."""

    def __init__(self, tokens: int) -> None:
        self._total, self._done = tokens, 0
        self._begin = self._last = time.monotonic()

    def add(self, tokens: int) -> None:
        self._done += tokens
        if time.monotonic() - self._last >= _REPORT_SECONDS:
            self.report("features")

    def report(self, what: str) -> None:
        self._last = time.monotonic()
        rate = self._done / max(self._last - self._begin, 1e-9)
        left = (self._total - self._done) / max(rate, 1e-9)
        say(f"{what}: {self._done:,} of {self._total:,} tokens, {rate:,.0f} tokens/s, {left / 60:.1f} min left")
