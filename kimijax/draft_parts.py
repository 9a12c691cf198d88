"""A draft's tensors read leniently, so that it can be put together in more ways than its own configuration says.

`draft_checkpoint.load_draft` refuses whatever is ambiguous or contradicts itself. The doctor has to run such drafts to
find out what they are; it reads the same tensors by the same table.
"""

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from .checkpoint import CheckpointIndex, inspect
from .checkpoint_reader import Leaf, Source, read_leaves
from .config import read_json
from .draft_checkpoint import canonical_name, draft_table
from .draft_config import DraftConfig, parse_draft_config
from .drafter import Drafter, borrow, declare_drafter, set_vocabulary
from .errors import CheckpointError, ConfigError
from .hypotheses import LAST_NORMED, Reading, wiring_candidates
from .layer_ids import RECORD_KEY, layer_id_lists, read_wiring
from .model import Target
from .names import Path, parameters
from .safetensors_io import FilePool, TensorInfo
from .sharding import parameter_sharding
from .wiring import Wiring

_FLOATS = ("BF16", "F16", "F32")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftParts:
    """A draft taken apart.

    Attributes:
      config: the head as configured; flags whose tensors the files lack are off.
      configured: how the files say that it is run; None where the strict reader finds no single meaning.
      base: the same, with the ids' likeliest meaning where there is none.
      data: the parsed `config.json`; empty for a drafter in memory.
      arrays: parameters by path, those of norms that the configuration switches off too.
      target_ids: for each way to read d2t the target ids, int64 [Vd], -1 where it means none.
      has_fc: whether the files hold fc.
      target: whose tables are borrowed.
    """

    config: DraftConfig
    configured: Reading | None
    base: Reading
    data: Mapping[str, Any]
    arrays: Mapping[Path, jax.Array]
    target_ids: Mapping[str, np.ndarray]
    has_fc: bool
    target: Target

    @property
    def wiring(self) -> Wiring:
        """0, 1, 2, ...: the column blocks of fc, whatever feeds them."""
        t = self.target.config
        return Wiring(tuple(range(self.config.n_taps)), t.n_layers, t.hidden)

    @property
    def available(self) -> dict[str, tuple[Any, ...]]:
        """Fields of `Reading` other than the streams, and the values that these tensors allow."""
        both = (False, True)
        norms = {"fc_norm": ("fc_norm",), "norm_before_fc": ("feature_norm",)}
        out: dict[str, tuple[Any, ...]] = {f: both for f, path in norms.items() if path in self.arrays}
        out |= {"feedback": ("pre_norm", "post_norm"), "norm_before_residual": both, "d2t": tuple(self.target_ids)}
        out |= {"tokens": ("next", "same"), "positions": ("t", "t+1", "steps+1")}
        if self.config.hidden == self.config.target_hidden and ("embed",) in self.arrays:
            out["embedding"] = ("target", "file")
        return out

    def check(self, reading: Reading, where: str) -> None:
        """Refuses a reading that these tensors do not allow. ConfigError names its field under `where`."""
        if reading.bypass is not None and self.config.hidden != self.config.target_hidden:
            found = f"skipped by a head {self.config.hidden} wide"
            raise ConfigError(f"{where}.fc", found, f"on: only a head {self.config.target_hidden} wide takes a stream")
        available = self.available
        for field in ("d2t", "fc_norm", "norm_before_fc", "embedding"):
            value, allowed = vars(reading)[field], available.get(field, (vars(self.base)[field],))
            if value not in allowed:
                names = ", ".join({True: "on", False: "off"}.get(v, str(v)) for v in allowed)
                found = {True: "on", False: "off"}.get(value, value)
                fix = "the files hold no tensor for it, or one that means the same so"
                raise ConfigError(f"{where}.{field}", found, f"one of {names}", fix)

    def drafter(self, reading: Reading) -> Drafter:
        """The head of a reading, on `wiring`. What is fed to its blocks, and how d2t is read, is up to the caller."""
        own_embed = ("embed",) in self.arrays and reading.embedding == "file"
        out = declare_drafter(
            reading.config(self.config),
            self.wiring,
            dtype=next(iter(self.arrays.values())).dtype,
            own_embed=own_embed,
            own_head=("lm_head",) in self.arrays,
        )
        filled = [(path, p.replace(self.arrays[path])) for path, p in parameters(out).items()]
        nnx.update(out, nnx.from_flat_state(filled))
        set_vocabulary(out, np.arange(self.config.draft_vocab_size))
        borrow(out, self.target)
        return out

    @classmethod
    def of(cls, drafter: Drafter, target: Target) -> "DraftParts":
        """Of a drafter that is loaded already, its arrays shared."""
        c, ids = drafter.config, np.asarray(drafter.target_ids.get_value()).astype(np.int64)
        arrays = {path: param.get_value() for path, param in parameters(drafter).items()}
        reading = _configured(c, drafter.wiring.taps, "file" if ("embed",) in arrays else "target")
        names = _d2t_readings(ids - np.arange(ids.size) if c.is_reduced else None, c)
        return cls(c, reading, reading, {}, arrays, names, True, target)

    @classmethod
    def read(
        cls,
        directory: str | FilePath,
        target: Target,
        *,
        convention: str | None = None,
        mesh: Mesh | None = None,
        dtype: Any = jnp.bfloat16,
    ) -> "DraftParts":
        """Of a directory.

        Args:
          directory: `config.json` and safetensors files.
          target: filled.
          convention: how to read the layer ids.
          mesh: where the parameters go.
          dtype: of every float parameter.
        Raises:
          ConfigError, CheckpointError: files of which no head can be made on this target.
        """
        directory = FilePath(directory)
        data = read_json(directory / "config.json")
        index = inspect(directory)
        if index.problems:
            raise CheckpointError("\n".join([f"{directory}: unreadable files", *index.problems]))
        tensors = {canonical_name(name): info for name, info in index.tensors.items()}
        fc = tensors.get("fc.weight")
        fc_width = fc.shape[1] if fc is not None and len(fc.shape) == 2 else None
        plain, bypass = _plainer(data)
        t = target.config
        taps = _taps(plain, Wiring((0,), t.n_layers, t.hidden), convention, fc_width)
        count = fc_width // t.hidden if fc_width else 3 if taps is None else len(taps)
        blocks = Wiring(tuple(range(count)), t.n_layers, t.hidden)
        blocks.check_width(fc_width or blocks.fused_width, "fc.weight's inputs")
        said = parse_draft_config({k: v for k, v in plain.items() if k != "num_aux_hidden_states"}, blocks)
        found = (said.vocab_size, said.target_hidden)
        if found != (t.vocab_size, t.hidden):
            expected = f"{(t.vocab_size, t.hidden)}, the target's"
            raise ConfigError("config (vocab_size, target width)", found, expected, "use a draft of this target")
        whole = dataclasses.replace(
            said, fc_norm="fc_norm.0.weight" in tensors, norm_before_fc="input_norm.weight" in tensors
        )
        arrays = _read_arrays(index, tensors, whole, blocks, target, mesh, dtype)
        config = dataclasses.replace(
            said,
            fc_norm=said.fc_norm and whole.fc_norm,
            norm_before_fc=said.norm_before_fc and whole.norm_before_fc,
        )
        with FilePool() as pool:
            offsets = pool.read(tensors["d2t"]).astype(np.int64) if "d2t" in tensors else None
        own = config.hidden != config.target_hidden  # an embedding that could be the target's is not used by itself
        lists = list(layer_id_lists(plain).values())
        ids = (taps or next(iter(lists), ()))[:count]
        if len(ids) < count or not all(0 <= tap <= t.n_layers for tap in ids):  # no streams by these very numbers
            ids = wiring_candidates(lists, None, t.n_layers, count)[0]
        base = _configured(config, ids, "file" if own else "target")
        names = _d2t_readings(offsets, config)
        base = dataclasses.replace(base, bypass=bypass, d2t=next(iter(names)))
        return cls(config, None if taps is None else base, base, data, arrays, names, fc is not None, target)


def _configured(config: DraftConfig, taps: tuple[int, ...], embedding: Any) -> Reading:
    return Reading(
        taps,
        d2t="offset" if config.is_reduced else "identity",
        feedback="post_norm" if config.norm_output else "pre_norm",
        fc_norm=config.fc_norm,
        norm_before_fc=config.norm_before_fc,
        norm_before_residual=config.norm_before_residual,
        embedding=embedding,
    )


def _plainer(data: Mapping[str, Any]) -> tuple[dict[str, Any], int | None]:
    """A config without what the strict readers refuse although a head can be made, and what it is fed without fc."""
    out, bypass = dict(data), None
    eagle = data.get("eagle_config")
    if isinstance(eagle, Mapping):
        inner = dict(cast(Mapping[str, Any], eagle))
        if inner.get("use_aux_hidden_state") is False:
            del inner["use_aux_hidden_state"]
            out["eagle_config"], bypass = inner, LAST_NORMED
    if "speculators_model_type" in data and "norm_before_residual" not in data:
        out["norm_before_residual"] = False
    return out, bypass


def _taps(
    plain: Mapping[str, Any], like: Wiring, convention: str | None, fc_width: int | None
) -> tuple[int, ...] | None:
    """The taps of a config, None where it has no single meaning.

    A record that contradicts the layer ids is left aside: they may be right.
    """
    without = {k: v for k, v in plain.items() if k not in (RECORD_KEY, "num_aux_hidden_states")}
    for config in (plain, without):
        try:
            return read_wiring(
                config,
                target_layers=like.target_layers,
                target_hidden=like.target_hidden,
                convention=convention,
                fc_width=fc_width,
            ).taps
        except ConfigError as e:
            log.info("%s", e)
    return None


def _read_arrays(
    index: CheckpointIndex,
    tensors: Mapping[str, TensorInfo],
    config: DraftConfig,
    blocks: Wiring,
    target: Target,
    mesh: Mesh | None,
    dtype: Any,
) -> dict[Path, jax.Array]:
    """Every parameter of the head; an embedding only if it differs from the target's, fc of zeros if it is missing."""
    own_embed = config.hidden != config.target_hidden or "embed_tokens.weight" in tensors
    own_head = "lm_head.weight" in tensors or config.is_reduced or config.hidden != config.target_hidden
    table = draft_table(config, own_embed=own_embed, own_head=own_head)
    declared = parameters(declare_drafter(config, blocks, dtype=dtype, own_embed=own_embed, own_head=own_head))
    bad: list[str] = []
    leaves: dict[Path, Leaf] = {}
    for path, pieces in table.items():
        infos = [tensors.get(piece.name) for piece in pieces]
        if path == ("fc",) and infos == [None]:
            continue
        for piece, info in zip(pieces, infos, strict=True):
            if info is None or info.shape != piece.shape or info.dtype not in _FLOATS:
                found = "no such tensor" if info is None else f"{info.dtype} {list(info.shape)}"
                bad.append(f"  {piece.name}: found {found}, expected a float {list(piece.shape)}")
        sources = tuple(Source(p, "plain", i) for p, i in zip(pieces, infos, strict=True) if i is not None)
        leaves[path] = Leaf(path, declared[path].get_value().shape, jnp.dtype(dtype), sources)
    if bad:
        head = f"{index.directory}: no head can be made of these files"
        raise CheckpointError("\n".join([head, *bad, "use the config.json that belongs to the files"]))
    shardings = {
        path: parameter_sharding(mesh, p.get_metadata()["axes"], p.get_value().shape) for path, p in declared.items()
    }
    arrays = read_leaves(leaves, shardings, rounding="reference", progress=False, threads=8)
    if ("fc",) not in arrays:
        shape = declared["fc",].get_value().shape
        arrays["fc",] = jax.device_put(jnp.zeros(shape, dtype), shardings["fc",])
    lent = target.embed.get_value()
    if ("embed",) in arrays and arrays["embed",].shape == lent.shape and jnp.array_equal(arrays["embed",], lent):
        del arrays["embed",]
    return arrays


def _d2t_readings(offsets: np.ndarray | None, config: DraftConfig) -> dict[str, np.ndarray]:
    """Target ids by each reading of d2t, -1 where one is out of range; readings that agree are listed once."""
    n = config.draft_vocab_size
    if offsets is None or offsets.shape != (n,):
        return {"identity": np.arange(n)}
    out: dict[str, np.ndarray] = {}
    for name, ids in (("offset", np.arange(n) + offsets), ("absolute", offsets), ("identity", np.arange(n))):
        ids = np.where((ids >= 0) & (ids < config.vocab_size), ids, -1)
        if not any(np.array_equal(ids, other) for other in out.values()):
            out[name] = ids
    return out
