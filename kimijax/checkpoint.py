"""A Hugging Face checkpoint directory: what its headers hold, whether that fits the model, and loading it.

`inspect` reads headers only. `load` declares the model, compares every tensor with the declaration, reports all
differences in one error, and only then reads: each parameter straight into its sharded device array. Nothing is ever
filled by a default.
"""

import dataclasses
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding

from .checkpoint_reader import Leaf, Source, read_leaves, shortened
from .checkpoint_writer import save
from .config import Fp8BlockConfig, Int4Config, TargetConfig
from .errors import CheckpointError, ConfigError
from .memory import FreeMemory, check_memory, free_memory
from .model import Tables, Target, declare_target
from .names import WRAPPER_PREFIX, Path, Piece, name_table, parameters, skip_reason
from .quant import GROUP_SIZE, NIBBLES_PER_WORD, Rounding
from .safetensors_io import DTYPES, INDEX_FILE, FilePool, TensorInfo, read_header
from .sharding import parameter_sharding
from .startup_progress import Shown

__all__ = [
    "Checked",
    "CheckpointIndex",
    "Kind",
    "check",
    "fill",
    "inspect",
    "load",
    "load_tables",
    "place",
    "resolve",
    "save",
    "with_int4",
]

Kind = Literal["int4", "fp8", "plain"]

_FLOATS = ("BF16", "F16", "F32")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointIndex:
    """What the headers of a directory's safetensors files say. Names are without the wrapper's prefix."""

    directory: FilePath
    prefix: str  # "" or "language_model.": what was removed from the names
    tensors: Mapping[str, TensorInfo]
    absent: Mapping[str, FilePath]  # tensors that the index file places in a file that is missing or unreadable
    problems: tuple[str, ...]  # faults of the files themselves

    @property
    def int4(self) -> bool:
        """Whether routed experts are INT4: that, and not what the config says, decides the declaration."""
        return any(".mlp.experts." in n and n.endswith(".weight_packed") for n in self._names())

    def kind(self, stem: str) -> Kind:
        """How a linear layer's weight is stored.

        Args:
          stem: its name without `.weight`, with or without the wrapper's prefix.
        Raises:
          CheckpointError: the files hold no weight of that name.
        """
        stem = stem.removeprefix(WRAPPER_PREFIX)
        if self.has(f"{stem}.weight_packed"):
            return "int4"
        if self.has(f"{stem}.weight_scale_inv"):
            return "fp8"
        if self.has(f"{stem}.weight"):
            return "plain"
        raise CheckpointError(f"{self.directory}: no tensor {stem}.weight, .weight_packed or .weight_scale_inv")

    def has(self, name: str) -> bool:
        """Whether the checkpoint is meant to hold the tensor: it is in a header, or the index file lists it."""
        return name in self.tensors or name in self.absent

    def _names(self) -> Iterable[str]:
        yield from self.tensors
        yield from self.absent


def inspect(directory: str | FilePath) -> CheckpointIndex:
    """Reads the headers of a directory: of `model.safetensors.index.json` and its files, or of all `*.safetensors`.

    Missing and malformed files are noted in `problems`, for `resolve` to report together with everything else.

    Raises:
      CheckpointError: no such directory, no safetensors files at all, or an index file that cannot be understood.
    """
    directory = FilePath(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory, expected a checkpoint")
    listed = _weight_map(directory / INDEX_FILE)
    present = sorted(directory.glob("*.safetensors"))
    files = sorted({directory / f for f in listed.values()}) or present
    if not files:
        raise CheckpointError(f"{directory}: no *.safetensors files, expected a checkpoint")
    for stray in set(present) - set(files):
        log.warning("%s is not in %s and is left unread", stray, INDEX_FILE)
    problems: list[str] = []
    tensors: dict[str, TensorInfo] = {}
    unread: set[FilePath] = set()
    with ThreadPoolExecutor(8) as threads:
        for file, result in zip(files, threads.map(_try_header, files), strict=True):
            if isinstance(result, str):
                problems.append(result)
                unread.add(file)
                continue
            for t in result:
                if t.name in tensors:
                    problems.append(f"{t.name}: found in {tensors[t.name].file.name} and {file.name}, expected once")
                tensors[t.name] = t
    absent: dict[str, FilePath] = {}
    for name, file in listed.items():
        if directory / file in unread:
            absent[name] = directory / file
        elif name not in tensors:
            problems.append(f"{name}: missing: {INDEX_FILE} places it in {file}, whose header has no such tensor")
    names = (*tensors, *absent)
    prefix = WRAPPER_PREFIX if any(n.startswith(WRAPPER_PREFIX) for n in names) else ""
    return CheckpointIndex(
        directory,
        prefix,
        {n.removeprefix(prefix): t for n, t in tensors.items()},
        {n.removeprefix(prefix): f for n, f in absent.items()},
        tuple(problems),
    )


def _try_header(file: FilePath) -> list[TensorInfo] | str:
    """The header, or what is wrong with the file."""
    if not file.is_file():
        return f"{file}: missing file"
    try:
        return read_header(file)
    except CheckpointError as e:
        return str(e)


def _weight_map(file: FilePath) -> dict[str, str]:
    """Tensor name -> file name, from the index file; empty where there is none."""
    if not file.is_file():
        return {}
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as e:
        raise CheckpointError(f"{file}: found {e!r}, expected a JSON object with a weight_map") from e
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file}: weight_map: found {weight_map!r}, expected an object that is not empty")
    for name, target in weight_map.items():
        if not isinstance(target, str) or FilePath(target).name != target:
            raise CheckpointError(f"{file}: weight_map.{name}: found {target!r}, expected a file name in this folder")
    return weight_map


@dataclass(frozen=True)
class Checked:
    """A declaration that a directory's headers fill, and where each parameter comes from and goes to."""

    target: Target
    leaves: dict[Path, Leaf]
    shardings: dict[Path, Sharding]


def check(
    directory: str | FilePath,
    config: TargetConfig,
    *,
    mesh: Mesh | None = None,
    dtype: Any = jnp.bfloat16,
    unpack_int4: bool = False,
    free: FreeMemory = free_memory,
) -> Checked:
    """All that `load` can refuse before it reads an array: from headers alone. Arguments and errors are `load`'s."""
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        raise ConfigError("dtype", str(dtype), "bfloat16 or float32")
    index = inspect(directory)
    int4 = index.int4 and not unpack_int4
    config = with_int4(config) if int4 else config
    target = declare_target(config, dtype=jnp.dtype(dtype), int4=int4)
    flat = parameters(target)
    leaves = resolve(index, config, {path: param.get_value() for path, param in flat.items()}, int4=int4)
    return Checked(target, leaves, place(flat, mesh, free))


def load(
    directory: str | FilePath,
    config: TargetConfig,
    *,
    mesh: Mesh | None = None,
    dtype: Any = jnp.bfloat16,
    unpack_int4: bool = False,
    rounding: Rounding = "reference",
    progress: Shown = False,
    threads: int = 8,
    direct: bool = False,
    free: FreeMemory = free_memory,
) -> Target:
    """The model of a checkpoint directory, its parameters on the devices of `mesh`.

    Float tensors are converted to `dtype` (a wider file is rounded to nearest even; the router's correction bias stays
    float32 whatever `dtype` is). fp8 block weights, and INT4 weights outside the routed experts, are dequantised.
    Routed experts that are INT4 in the files stay INT4 unless `unpack_int4`. Either way their scales must be bf16,
    finite and positive: others are refused, neither rounded nor replaced.

    What cannot fit on the devices is refused before any tensor is read (`memory.check_memory`), unless neither backend
    nor system tells how much they hold. While it loads, host memory holds the parameters under way
    (`checkpoint_reader.in_flight_bytes`) and a few MB a thread; on CPU devices their buffers become the arrays.

    Args:
      directory: safetensors files in Hugging Face's layout, with or without the `language_model.` prefix.
      config: the model, from the same directory.
      mesh: where the parameters go, by `kimijax.sharding`; None: the first device.
      dtype: bf16 or f32, of every float parameter but the router's correction bias.
      unpack_int4: dequantise the routed experts to `dtype`, one row block after the other.
      rounding: of that dequantisation, see `quant.dequantize_words`.
      progress: show GB, GB/s and time left on stderr, or on a display that is given.
      threads: readers at work at the same time.
      direct: read past the system's page cache, which then keeps what it has; the file system must support it.
      free: bytes that a device can still hold, None where that is unknown.
    Raises:
      ConfigError: another dtype, a mesh that does not divide the model, or devices that are too small for it.
      CheckpointError: lists every tensor that is missing, superfluous, misshapen or mistyped, and every faulty file;
        or, after reading, every tensor with a scale that is not finite and positive.
    """
    checked = check(directory, config, mesh=mesh, dtype=dtype, unpack_int4=unpack_int4, free=free)
    arrays = read_leaves(
        checked.leaves, checked.shardings, rounding=rounding, progress=progress, threads=threads, direct=direct
    )
    fill(checked.target, arrays)
    return checked.target


def load_tables(
    directory: str | FilePath,
    config: TargetConfig,
    *,
    mesh: Mesh | None = None,
    dtype: Any = jnp.bfloat16,
    free: FreeMemory = free_memory,
) -> Tables:
    """Embedding, final norm and head of a checkpoint directory; its layers are neither read nor checked.

    Arguments and errors are `load`'s.
    """
    tables = Tables(config, jnp.dtype(dtype))
    flat = parameters(tables)
    leaves = resolve(inspect(directory), config, {p: v.get_value() for p, v in flat.items()}, int4=False, part=True)
    arrays = read_leaves(leaves, place(flat, mesh, free), rounding="reference", progress=False, threads=4)
    fill(tables, arrays)
    return tables


def place(flat: Mapping[Path, nnx.Param], mesh: Mesh | None, free: FreeMemory) -> dict[Path, Sharding]:
    """Where declared parameters go. ConfigError: a mesh that does not divide them, or devices that are too small."""
    shardings = {
        path: parameter_sharding(mesh, p.get_metadata()["axes"], p.get_value().shape) for path, p in flat.items()
    }
    check_memory(flat, shardings, free)
    return shardings


def fill(model: nnx.Module, arrays: Mapping[Path, jax.Array]) -> None:
    """Put arrays in the place of all declared parameters of a model."""
    filled = [(path, param.replace(arrays[path])) for path, param in parameters(model).items()]
    nnx.update(model, nnx.from_flat_state(filled))


def with_int4(config: TargetConfig) -> TargetConfig:
    """The config of files whose routed experts are INT4: the files decide, also where the config says nothing of it.

    Raises:
      CheckpointError: the config declares another quantisation.
    """
    if config.quantization is None:
        return dataclasses.replace(config, quantization=Int4Config(GROUP_SIZE))
    if not isinstance(config.quantization, Int4Config):
        raise CheckpointError(f"config: found {config.quantization!r}, but the files hold INT4 experts (weight_packed)")
    return config


def resolve(
    index: CheckpointIndex,
    config: TargetConfig,
    declared: Mapping[Path, jax.ShapeDtypeStruct],
    *,
    int4: bool,
    part: bool = False,
) -> dict[Path, Leaf]:
    """Where each declared parameter comes from.

    Args:
      index: the directory's headers.
      config: the model.
      declared: shape and dtype by path.
      int4: the routed experts are declared as words and scales.
      part: only what is declared is wanted, and only that is checked.
    Raises:
      CheckpointError: lists every mismatch between files and declaration.
    """
    table = name_table(config, int4=int4)
    if part:
        table = {path: pieces for path, pieces in table.items() if path in declared}
    if table.keys() != declared.keys():
        raise ValueError(f"declaration and name table differ: {sorted(map(str, table.keys() ^ declared.keys()))}")
    check = _Checker(index, config)
    leaves = {
        path: Leaf(path, s.shape, jnp.dtype(s.dtype), tuple(check.source(p, jnp.dtype(s.dtype)) for p in table[path]))
        for path, s in declared.items()
    }
    check.finish(part)
    return leaves


class _Checker:
    """Looks tensors up in an index and collects what is wrong with them."""

    def __init__(self, index: CheckpointIndex, config: TargetConfig) -> None:
        self.index, self.config = index, config
        self.used: set[str] = set()
        self.bad: dict[str, list[str]] = defaultdict(list)
        self.shapes: list[tuple[TensorInfo, tuple[int, ...]]] = []  # weight_shape tensors and what they must say

    def source(self, piece: Piece, dtype: np.dtype) -> Source:
        """Finds the tensors behind a piece of a parameter of `dtype`; faults are noted, and reported by `finish`."""
        if jnp.issubdtype(dtype, jnp.integer) or piece.name.endswith(".weight_scale"):
            if piece.name.endswith(".weight_packed"):
                width = piece.shape[1] * NIBBLES_PER_WORD
                self.logical_shape(piece.stem, (piece.shape[0], width))
            exact = next(name for name, d in DTYPES.items() if d == dtype)
            return Source(piece, "plain", self.expect(piece.name, piece.shape, (exact,)))
        stem, (rows, *columns) = piece.stem, piece.shape
        if piece.name.endswith(".weight") and len(columns) == 1:
            width = columns[0]
            if self.index.has(f"{stem}.weight_packed"):
                packed = self.expect(f"{stem}.weight_packed", (rows, -(-width // NIBBLES_PER_WORD)), ("I32",))
                scale = self.expect(f"{stem}.weight_scale", (rows, width // GROUP_SIZE), ("BF16",))
                self.logical_shape(stem, (rows, width))
                return Source(piece, "int4", packed, scale)
            if self.index.has(f"{stem}.weight_scale_inv"):
                return self.fp8(piece, rows, width)
        return Source(piece, "plain", self.expect(piece.name, piece.shape, _FLOATS))

    def fp8(self, piece: Piece, rows: int, width: int) -> Source:
        """An fp8 weight and its block scales."""
        weight = self.expect(piece.name, (rows, width), ("F8_E4M3",))
        if not isinstance(self.config.quantization, Fp8BlockConfig):
            found = self.config.quantization
            self.bad["mistyped"].append(f"{piece.name}: fp8 with block scales, but the config declares {found!r}")
            return Source(piece, "fp8", weight)
        block = self.config.quantization.block
        blocks = (-(-rows // block[0]), -(-width // block[1]))
        scale = self.expect(f"{piece.stem}.weight_scale_inv", blocks, ("F32",))
        return Source(piece, "fp8", weight, scale, block)

    def logical_shape(self, stem: str, shape: tuple[int, ...]) -> None:
        """Notes that the tensor `weight_shape` must say `shape`; `finish` reads it."""
        info = self.expect(f"{stem}.weight_shape", (2,), ("I32", "I64"))
        if info.shape == (2,):
            self.shapes.append((info, shape))

    def expect(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> TensorInfo:
        """The tensor of that name; a placeholder where it is missing (`finish` raises then, so it is never read)."""
        self.used.add(name)
        info = self.index.tensors.get(name)
        if info is None:
            if name not in self.index.absent:
                self.bad["missing"].append(f"{name}: expected {' or '.join(dtypes)} {list(shape)}")
            return TensorInfo(self.index.directory, name, dtypes[0], (), 0)
        if info.shape != shape:
            self.bad["misshapen"].append(f"{name}: found {list(info.shape)}, expected {list(shape)}")
        if info.dtype not in dtypes:
            self.bad["mistyped"].append(f"{name}: found {info.dtype}, expected {' or '.join(dtypes)}")
        return info

    def finish(self, part: bool) -> None:
        """Reads the `weight_shape` tensors, looks for superfluous ones, and raises if anything was noted.

        With `part` other tensors, and faults of files that hold nothing of what is wanted, are left alone.
        """
        skipped: Counter[str] = Counter()
        for name in self.index.tensors:
            if name in self.used or part:
                continue
            reason = skip_reason(name, self.config)
            if reason is None:
                self.bad["superfluous"].append(f"{name}: no parameter of the model takes it")
            else:
                skipped[reason] += 1
        with FilePool() as pool:
            for info, shape in self.shapes:
                found = info.dtype in ("I32", "I64") and tuple(pool.read(info).tolist())
                if found is not False and found != shape:
                    self.bad["misshapen"].append(f"{info.name}: says {list(found)}, expected {list(shape)}")
        absent = self._absent_files(part)
        self.bad["files"] = [*absent, *(self.index.problems if absent or not part else ())]
        if any(self.bad.values()):
            raise CheckpointError(self._message())
        for reason, count in sorted(skipped.items()):
            log.info("%s: %d %s tensors skipped", self.index.directory, count, reason)

    def _absent_files(self, part: bool) -> list[str]:
        """One line for each missing file whose tensors are needed, instead of one for each tensor."""
        absent = {n: f for n, f in self.index.absent.items() if not part or n in self.used}
        needed = Counter(f for n, f in absent.items() if skip_reason(n, self.config) is None)
        example = {f: n for n, f in absent.items()}
        return [f"{f.name}: holds {n} needed tensors, {example[f]} among them" for f, n in sorted(needed.items())]

    def _message(self) -> str:
        lines = [f"{self.index.directory}: the checkpoint does not fit the model; nothing was loaded"]
        for sort in ("files", "missing", "superfluous", "misshapen", "mistyped"):
            found = sorted(set(self.bad[sort]))
            if found:
                lines.append(f"{sort} ({len(found)}):")
                lines += shortened([f"  {line}" for line in found])
        lines.append("download the files again, or use the config.json that belongs to them")
        return "\n".join(lines)
