"""Reads a published EAGLE-3 draft directory: every tensor is consumed, checked, or refused by name.

Producers disagree about names only: the layer is `midlayer.` (EAGLE reference, SGLang, SpecForge) or `layers.0.` (vLLM,
ModelOpt, speculators), some write `model.` before everything, SGLang once named the norms of fc otherwise. All of them
are brought to one spelling, and one table says what each tensor is. Other servers skip names that they do not know, and
then draft at random without a word.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .checkpoint import CheckpointIndex, fill, inspect, place
from .checkpoint_reader import Leaf, Source, read_leaves, shortened
from .config import TargetConfig
from .draft_config import DraftConfig, load_draft_config
from .drafter import Drafter, borrow, declare_drafter, set_vocabulary, vocabulary_fault
from .errors import CheckpointError, ConfigError
from .memory import FreeMemory, free_memory
from .model import Tables
from .names import Piece, Table, attention_pieces, mlp_pieces, parameters, viewed, whole
from .safetensors_io import FilePool, TensorInfo
from .startup_progress import Shown
from .wiring import Wiring

_FLOATS = ("BF16", "F16", "F32")
_LAYER = "midlayer"
_EMBED, _HEAD = "embed_tokens.weight", "lm_head.weight"
_LEGACY = {f"aux_norm_{place}.weight": f"fc_norm.{i}.weight" for i, place in enumerate(("low", "mid", "high"))}
# Parts of the target that speculators keeps beside a draft while it trains, and a derived buffer.
_TRAINING_ONLY = ("verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")

log = logging.getLogger(__name__)


def load_draft(
    directory: str | FilePath,
    wiring: Wiring,
    target: Tables,
    *,
    own_embed: bool = False,
    mesh: Mesh | None = None,
    dtype: Any = jnp.bfloat16,
    progress: Shown = False,
    threads: int = 8,
    free: FreeMemory = free_memory,
) -> Drafter:
    """The drafter of a directory, its parameters on the devices of `mesh`.

    Tables that the files do not hold are the target's, which is logged: its embedding, and its head where the draft has
    its width and whole vocabulary. An embedding that the files do hold must equal the target's (which is then used, so
    that it lies in memory once): exporters are known to have written random ones, which some engines use and others
    ignore.

    Args:
      directory: `config.json` and safetensors files of any form in `draft_config`.
      wiring: the taps that feed the draft.
      target: filled; the model that the draft was made for.
      own_embed: use an embedding in the files that differs from the target's.
      mesh: where the parameters go; None: the first device.
      dtype: bf16 or f32, of every float parameter.
      progress: show GB, GB/s and time left on stderr, or on a display that is given.
      threads: readers at work at the same time.
      free: bytes that a device can still hold, None where that is unknown.
    Raises:
      ConfigError: a config that is refused, a wiring or target that it does not fit, another dtype, or devices that are
        too small.
      CheckpointError: lists every tensor that is missing, superfluous, misshapen, mistyped or wrong in its values.
    """
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        raise ConfigError("dtype", str(dtype), "bfloat16 or float32")
    config = load_draft_config(directory, wiring)
    _check_target(config, wiring, target.config)
    with FilePool() as pool:
        files = _Files(inspect(directory), config, pool)
        embeds = files.owns_embed(target, own_embed)
        owns_head = files.owns_head()
        table = draft_table(config, own_embed=embeds, own_head=owns_head)
        sources = {path: tuple(files.source(piece) for piece in pieces) for path, pieces in table.items()}
        target_ids = files.target_ids()
        files.finish()
    drafter = declare_drafter(config, wiring, dtype=jnp.dtype(dtype), own_embed=embeds, own_head=owns_head)
    flat = parameters(drafter)
    if table.keys() != flat.keys():
        raise ValueError(f"declaration and name table differ: {sorted(map(str, table.keys() ^ flat.keys()))}")
    leaves = {path: Leaf(path, p.get_value().shape, jnp.dtype(dtype), sources[path]) for path, p in flat.items()}
    arrays = read_leaves(
        leaves,
        place(flat, mesh, free),
        rounding="reference",
        progress=progress,
        threads=threads,
        what="loading the draft",
    )
    fill(drafter, arrays)
    set_vocabulary(drafter, target_ids)
    borrow(drafter, target)
    return drafter


def check_draft(
    directory: str | FilePath, wiring: Wiring, target: TargetConfig, *, dtype: Any = jnp.bfloat16
) -> Drafter:
    """What `load_draft` refuses without the target's arrays: from headers, and the draft vocabulary alone.

    Args:
      directory, wiring, dtype: as for `load_draft`.
      target: the configuration of the model that the draft was made for.
    Returns:
      The drafter's declaration: shapes of what it would hold, and of the tables that it would borrow.
    Raises:
      ConfigError, CheckpointError: as `load_draft`; whether an embedding in the files is the target's shows only there.
    """
    config = load_draft_config(directory, wiring)
    _check_target(config, wiring, target)
    with FilePool() as pool:
        files = _Files(inspect(directory), config, pool)
        embeds = config.hidden != config.target_hidden
        if not embeds and files.has(_EMBED):
            files.expect(_EMBED, (config.vocab_size, config.hidden), _FLOATS)
        owns_head = files.owns_head()
        for pieces in draft_table(config, own_embed=embeds, own_head=owns_head).values():
            for piece in pieces:
                files.source(piece)
        files.target_ids()
        files.finish()
    return declare_drafter(config, wiring, dtype=jnp.dtype(dtype), own_embed=embeds, own_head=owns_head)


def _check_target(config: DraftConfig, wiring: Wiring, t: TargetConfig) -> None:
    """Refuses a target of another vocabulary, width or depth before any file is opened."""
    found = (t.vocab_size, t.hidden, t.n_layers)
    expected = (config.vocab_size, config.target_hidden, wiring.target_layers)
    if found != expected:
        fix = "use the target that the draft was trained for"
        raise ConfigError("target (vocab_size, hidden_size, layers)", found, f"the draft's {expected}", fix)


def draft_table(config: DraftConfig, *, own_embed: bool, own_head: bool, layer: str = _LAYER) -> Table:
    """Every parameter of `Drafter` and the tensors that it is made of, [out, in] as in the files.

    Args:
      config: the drafter.
      own_embed: it has an embedding of its own.
      own_head: it has a head of its own.
      layer: the layer's prefix.
    """
    c, d = config, config.hidden
    table: Table = {
        ("fc",): (whole("fc.weight", d, c.fused_width),),
        ("embed_norm",): (whole(f"{layer}.input_layernorm.weight", d),),
        ("hidden_norm",): (whole(f"{layer}.hidden_norm.weight", d),),
        ("post_norm",): (whole(f"{layer}.post_attention_layernorm.weight", d),),
        ("norm",): (whole("norm.weight", d),),
    }
    if c.norm_before_fc:
        table["feature_norm",] = (whole("input_norm.weight", c.fused_width),)
    if c.fc_norm:
        table["fc_norm",] = tuple(whole(f"fc_norm.{i}.weight", c.target_hidden, at=(i,)) for i in range(c.n_taps))
    if own_embed:
        table["embed",] = (whole(_EMBED, c.vocab_size, d),)
    if own_head:
        table["lm_head",] = (whole(_HEAD, c.draft_vocab_size, d),)
    attention = _attention_pieces(config, f"{layer}.self_attn")
    table |= {("attention", key): pieces for key, pieces in attention.items()}
    return table | {("mlp", key): pieces for key, pieces in mlp_pieces(d, c.mlp_width, f"{layer}.mlp").items()}


def _attention_pieces(config: DraftConfig, at: str) -> dict[str, tuple[Piece, ...]]:
    """The attention's tensors: like the target's or Llama's, with inputs twice as wide."""
    d, a = config.hidden, config.attention
    if isinstance(a, TargetConfig):
        o = viewed(f"{at}.o_proj.weight", (d, a.n_heads * a.v_dim), (d, a.n_heads, a.v_dim))
        return attention_pieces(replace(a, hidden=2 * d), at) | {"o": (o,)}
    h = a.head_dim
    heads = {"q": a.n_heads, "k": a.n_kv_heads, "v": a.n_kv_heads}
    out = {
        key: (viewed(f"{at}.{key}_proj.weight", (n * h, 2 * d), (n, h, 2 * d)),) for key, n in heads.items()
    }  # fmt: skip
    out["o"] = (viewed(f"{at}.o_proj.weight", (d, a.n_heads * h), (d, a.n_heads, h)),)
    return out


def canonical_name(name: str) -> str:
    """A tensor's name in the one spelling that the table uses."""
    name = name.removeprefix("model.")
    if name.startswith("layers.0."):
        name = f"{_LAYER}.{name.removeprefix('layers.0.')}"
    return _LEGACY.get(name, name)


class _Files:
    """Looks tensors up in the headers of a directory, and collects what is wrong with them."""

    def __init__(self, index: CheckpointIndex, config: DraftConfig, pool: FilePool) -> None:
        self.index, self.config, self.pool = index, config, pool
        self.bad: dict[str, list[str]] = defaultdict(list)
        self.bad["files"] = list(index.problems)
        self.used: set[str] = set()
        self.tensors: dict[str, TensorInfo] = {}
        for name, info in index.tensors.items():
            other = self.tensors.setdefault(canonical_name(name), info)
            if other is not info:
                self.bad["superfluous"].append(f"{info.name}: the same tensor as {other.name}")
        self.absent: Mapping[str, FilePath] = {canonical_name(n): f for n, f in index.absent.items()}

    def has(self, name: str) -> bool:
        """Whether the files are meant to hold the tensor."""
        return name in self.tensors or name in self.absent

    def expect(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> TensorInfo | None:
        """The tensor, if it is there and as it should be."""
        self.used.add(name)
        info = self.tensors.get(name)
        if info is None:
            if name not in self.absent:
                self.bad["missing"].append(f"{name}: expected {' or '.join(dtypes)} {list(shape)}")
            return None
        if info.shape != shape:
            self.bad["misshapen"].append(f"{info.name}: found {list(info.shape)}, expected {list(shape)}")
        if info.dtype not in dtypes:
            self.bad["mistyped"].append(f"{info.name}: found {info.dtype}, expected {' or '.join(dtypes)}")
        return info if info.shape == shape and info.dtype in dtypes else None

    def source(self, piece: Piece) -> Source:
        """Where a piece is read; a placeholder where its tensor is at fault (`finish` raises, so it is never read)."""
        info = self.expect(piece.name, piece.shape, _FLOATS)
        return Source(piece, "plain", info or TensorInfo(self.index.directory, piece.name, "F32", (), 0))

    def owns_embed(self, target: Tables, allowed: bool) -> bool:
        """Whether the drafter has an embedding of its own; compares one that the files hold with the target's."""
        c, shape = self.config, (self.config.vocab_size, self.config.hidden)
        if c.hidden != c.target_hidden:
            return True
        if not self.has(_EMBED):
            log.info("%s: no embedding in the files, the target's is used", self.index.directory)
            return False
        info = self.expect(_EMBED, shape, _FLOATS)
        if info is None:
            return False
        lent = np.asarray(target.embed.get_value())
        own = self.pool.read(info).astype(lent.dtype, copy=False)
        rows = np.flatnonzero((own != lent).any(axis=1))
        if not rows.size:
            log.info("%s: the embedding in the files equals the target's, which is used", self.index.directory)
        elif allowed:
            log.warning("%s: the draft's own embedding is used", self.index.directory)
        else:
            row = rows[0]
            far = np.abs(own[row].astype(np.float32) - lent[row].astype(np.float32)).max()
            self.bad["wrong values"].append(
                f"{info.name}: {rows.size} of {shape[0]} rows differ from the target's embedding, row {row} by up to "
                f"{far:.3g}: remove the tensor if an exporter filled it with noise, or pass own_embed=True if the "
                "draft was trained with it"
            )
        return bool(rows.size) and allowed

    def owns_head(self) -> bool:
        """Whether the files hold a head; if not, and the target's would not do, it is reported as missing."""
        c = self.config
        if self.has(_HEAD) or c.is_reduced or c.hidden != c.target_hidden:
            return True
        log.info("%s: no lm_head in the files, the target's is used", self.index.directory)
        return False

    def target_ids(self) -> np.ndarray:
        """Target id of each draft id, int64 [Vd], from the offsets `d2t`; checked against the mask `t2d`."""
        n, v = self.config.draft_vocab_size, self.config.vocab_size
        ids, offsets = np.arange(n), None
        if self.config.is_reduced or self.has("d2t"):
            info = self.expect("d2t", (n,), ("I64", "I32"))
            if info is not None:
                offsets = self.pool.read(info).astype(np.int64)
                ids = ids + offsets
                fault = vocabulary_fault(ids, self.config)
                if fault:
                    # The mistake that exporters make: ids in place of offsets.
                    absolute = not vocabulary_fault(offsets, self.config)
                    hint = "; it holds absolute ids: subtract 0, 1, 2, ... from them" if absolute else ""
                    self.bad["wrong values"].append(f"{info.name}: offsets (id = i + d2t[i]): expected {fault}{hint}")
                    offsets = None
        if self.has("t2d"):
            info = self.expect("t2d", (v,), ("BOOL", "U8"))
            known = offsets is not None or not self.config.is_reduced
            if info is not None and known:
                kept = np.flatnonzero(self.pool.read(info))
                if not np.array_equal(kept, ids):
                    both = np.intersect1d(kept, ids).size
                    found = f"found {kept.size} target ids, {both} of which are among the {n} of d2t"
                    self.bad["wrong values"].append(f"{info.name}: {found}: expected exactly those")
        return ids

    def finish(self) -> None:
        """Looks for superfluous tensors, and raises if anything was noted."""
        skipped: Counter[str] = Counter()
        for name, info in self.tensors.items():
            if name in self.used:
                continue
            if name.endswith(_TRAINING_ONLY):
                skipped[name] += 1
            else:
                self.bad["superfluous"].append(f"{info.name}: no parameter of the drafter takes it")
        needed = Counter(file for name, file in self.absent.items() if name in self.used)
        self.bad["files"] += [f"{file.name}: holds {count} needed tensors" for file, count in needed.items()]
        if any(self.bad.values()):
            raise CheckpointError(self._message())
        for name in sorted(skipped):
            log.info("%s: %s is not used by a draft, skipped", self.index.directory, name)

    def _message(self) -> str:
        lines = [f"{self.index.directory}: the files do not fit the drafter; nothing was loaded"]
        for sort in ("files", "missing", "superfluous", "misshapen", "mistyped", "wrong values"):
            found = sorted(set(self.bad[sort]))
            if found:
                lines += [f"{sort} ({len(found)}):", *shortened([f"  {line}" for line in found])]
        lines.append("use the config.json that belongs to the files, and files of one draft")
        return "\n".join(lines)
