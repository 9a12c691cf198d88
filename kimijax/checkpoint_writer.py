"""Writes a model as a Hugging Face checkpoint directory: the inverse of `checkpoint.load`, by the same name table."""

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .config import Int4Config, TargetConfig, parse_config
from .model import Target
from .names import WRAPPER_PREFIX, Path, Piece, Table, name_table, parameters
from .quant import GROUP_SIZE, NIBBLES_PER_WORD, dequantize_words, quantize_words
from .safetensors_io import INDEX_FILE, TensorSpec, new_directory, write_file, write_synced

Int4Mode = Literal["keep", "quantize", "dequantize"]
type Host = Mapping[Path, np.ndarray]

_BF16, _I32 = np.dtype(jnp.bfloat16), np.dtype(np.int32)


@dataclass(frozen=True)
class Unit:
    """Tensors that are made together, and the parameters they are made of."""

    specs: tuple[TensorSpec, ...]
    needs: tuple[Path, ...]
    make: Callable[[Host], tuple[np.ndarray, ...]]

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in self.specs)


def save(
    model: Target | Mapping[Path, jax.Array],
    directory: str | FilePath,
    config_json: Mapping[str, Any],
    *,
    dtype: Any = None,
    int4: Int4Mode = "keep",
    prefix: str | None = None,
    shard_bytes: int = 5_000_000_000,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Writes `model-0000N-of-0000M.safetensors`, their index, `config.json` and `files`; all of them or none.

    Everything is written into a directory beside the target, flushed to the disk, and renamed into place. The host
    holds one parameter (of INT4 experts: words and scales of one stack) at a time.

    Args:
      model: a filled target, or its parameters by path; every shard must be on this process's devices.
      directory: must not exist, or be empty: a checkpoint is never overwritten.
      config_json: the `config.json` to write; it must describe the model, and declare INT4 where INT4 is written.
      dtype: float dtype to write; None: as the parameters are. The router's correction bias stays float32.
      int4: "keep" the routed experts as they are, "quantize" float ones (rounded to bf16, then group 32, minmax
        rule), or "dequantize" INT4 ones (to `dtype`, or to bf16).
      prefix: of the names; None: "language_model." where `config_json` is the multimodal wrapper's, else "".
      shard_bytes: a new file is begun before the tensor that would make one larger than this.
      files: further files by name: tokenizer, chat template, generation config.
    Raises:
      ValueError: the directory is in use, parameters, config and `int4` do not fit together, or INT4 scales to be kept
        are not bf16.
    """
    directory = FilePath(directory)
    config = parse_config(config_json)
    arrays = dict(model) if isinstance(model, Mapping) else _arrays(model)
    stored = any(str(path[-1]).endswith("_packed") for path in arrays)
    writes = _check_int4(config, stored, int4)
    table = name_table(config, int4=stored)
    if table.keys() != arrays.keys():
        raise ValueError(f"model: parameters and config differ in {sorted(map(str, table.keys() ^ arrays.keys()))}")
    if prefix is None:
        prefix = WRAPPER_PREFIX if config.is_wrapped else ""
    units = list(units_of(arrays, table, writes, None if dtype is None else np.dtype(dtype), prefix))
    with new_directory(directory) as part:
        index = _write_shards(part, _shards(units, shard_bytes), arrays)
        written = {**(files or {}), "config.json": json_bytes(dict(config_json)), INDEX_FILE: json_bytes(index)}
        for name, data in written.items():
            write_synced(part / name, lambda f, data=data: f.write(data))


def json_bytes(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=2) + "\n").encode()


def _arrays(model: Target) -> dict[Path, jax.Array]:
    return {path: param.get_value() for path, param in parameters(model).items()}


def _check_int4(config: TargetConfig, stored: bool, mode: Int4Mode) -> bool:
    """Whether routed experts are written as INT4; refuses a mode or a config that does not fit."""
    if mode not in ("keep", "quantize", "dequantize"):
        raise ValueError(f"int4: found {mode!r}, expected 'keep', 'quantize' or 'dequantize'")
    if mode == "quantize" and (stored or config.moe is None):
        what = "routed experts that are INT4 already" if stored else "a model without routed experts"
        raise ValueError(f"int4: found 'quantize' for {what}, expected 'keep'")
    if mode == "dequantize" and not stored:
        raise ValueError("int4: found 'dequantize' for float weights, expected 'keep'")
    writes = mode == "quantize" or (stored and mode == "keep")
    if isinstance(config.quantization, Int4Config) != writes or (config.quantization is not None and not writes):
        expected = "a pack-quantized quantization_config" if writes else "no quantization_config"
        raise ValueError(f"config_json: found quantization {config.quantization!r}, expected {expected}")
    return writes


def units_of(
    arrays: Mapping[Path, jax.Array], table: Table, int4: bool, dtype: np.dtype | None, prefix: str
) -> Iterator[Unit]:
    """Everything to write, in the table's order. Parameters that share a tensor come together, at the first of them."""
    parts: dict[str, list[tuple[Path, Piece]]] = defaultdict(list)
    for path, pieces in table.items():
        for piece in pieces:
            parts[piece.name].append((path, piece))
    for name, found in parts.items():
        (path, piece), own = found[0], arrays[found[0][0]].dtype
        if name.endswith(".weight_scale"):
            continue  # written with its words
        if name.endswith(".weight_packed"):
            scale_path = (*path[:-1], str(path[-1]).replace("_packed", "_scale"))
            scale_dtype = arrays[scale_path].dtype
            yield _stored_int4(path, scale_path, piece, scale_dtype, int4, dtype or _BF16, prefix)
        elif int4 and "experts" in path:
            yield _quantised(path, piece, prefix)
        else:
            is_bias = name.endswith("e_score_correction_bias")
            yield _assembled(found, np.dtype(own) if dtype is None or is_bias else dtype, prefix)


def _assembled(found: Sequence[tuple[Path, Piece]], dtype: np.dtype, prefix: str) -> Unit:
    """A float tensor, put together from the parameters that hold its parts."""
    name, shape, view = found[0][1].name, found[0][1].shape, found[0][1].view
    covered = sum(math.prod(p.block) for _, p in found)
    if covered != math.prod(shape):
        raise ValueError(f"{name}: its parts cover {covered} of {math.prod(shape)} values")

    def make(host: Host) -> tuple[np.ndarray, ...]:
        if len(found) == 1:
            path, piece = found[0]
            return (host[path][piece.at].reshape(shape).astype(dtype, copy=False),)
        out = np.empty(view, dtype)
        for path, piece in found:
            region = tuple(slice(b, b + n) for b, n in zip(piece.begin, piece.block, strict=True))
            out[region] = host[path][piece.at]
        return (out.reshape(shape),)

    return Unit((TensorSpec(prefix + name, dtype, shape),), tuple(path for path, _ in found), make)


def _int4_specs(stem: str, rows: int, width: int) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec(f"{stem}.weight_packed", _I32, (rows, width // NIBBLES_PER_WORD)),
        TensorSpec(f"{stem}.weight_scale", _BF16, (rows, width // GROUP_SIZE)),
        TensorSpec(f"{stem}.weight_shape", _I32, (2,)),
    )


def _stored_int4(
    packed: Path, scale: Path, piece: Piece, scale_dtype: Any, keep: bool, dtype: np.dtype, prefix: str
) -> Unit:
    """INT4 words and scales as they are, or dequantised to `dtype`."""
    rows, width = piece.shape[0], piece.shape[1] * NIBBLES_PER_WORD
    stem = prefix + piece.stem

    def make_int4(host: Host) -> tuple[np.ndarray, ...]:
        return host[packed][piece.at], host[scale][piece.at], np.array([rows, width], _I32)

    def make_float(host: Host) -> tuple[np.ndarray, ...]:
        return (dequantize_words(host[packed][piece.at], host[scale][piece.at], dtype),)

    if keep:
        if scale_dtype != _BF16:
            raise ValueError(f"{stem}: found {scale_dtype} scales, expected bfloat16: `load` takes no others")
        return Unit(_int4_specs(stem, rows, width), (packed, scale), make_int4)
    return Unit((TensorSpec(f"{stem}.weight", dtype, (rows, width)),), (packed, scale), make_float)


def _quantised(path: Path, piece: Piece, prefix: str) -> Unit:
    """A float expert matrix, quantised."""
    rows, width = piece.shape

    def make(host: Host) -> tuple[np.ndarray, ...]:
        return *quantize_words(host[path][piece.at].astype(_BF16, copy=False)), np.array([rows, width], _I32)

    return Unit(_int4_specs(prefix + piece.stem, rows, width), (path,), make)


def _shards(units: Sequence[Unit], shard_bytes: int) -> list[list[Unit]]:
    """Consecutive units, at most `shard_bytes` a file unless a single unit is larger."""
    shards: list[list[Unit]] = []
    size = 0
    for unit in units:
        if not shards or size + unit.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(unit)
        size += unit.nbytes
    return shards


def _write_shards(part: FilePath, shards: Sequence[Sequence[Unit]], arrays: Mapping[Path, jax.Array]) -> dict[str, Any]:
    """Writes the shard files and returns the content of their index."""
    weight_map: dict[str, str] = {}
    for number, units in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        specs = [s for u in units for s in u.specs]
        write_file(part / file, specs, stream_units(units, arrays))
        weight_map |= {s.name: file for s in specs}
    total = sum(u.nbytes for units in shards for u in units)
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def stream_units(units: Sequence[Unit], arrays: Mapping[Path, jax.Array]) -> Iterator[np.ndarray]:
    """The tensors of the units in order; a parameter is fetched from the devices once for all units that need it."""
    for needs, run in itertools.groupby(units, key=lambda u: u.needs):
        host = {path: np.asarray(arrays[path]) for path in needs}
        for unit in run:
            yield from unit.make(host)
