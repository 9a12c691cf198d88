"""Checkpoints of Kimi-K2.5's layout with made-up contents: `python -m kimijax.synthetic --model CONFIG --out DIR`.

For trying out whatever reads a checkpoint where the real one, of 595 GB, is not at hand. Names, shapes, forms and the
order of the files are the published ones: a file for each layer, one for embedding, final norm and head, and for a
model with a vision tower one for its projector and one for the tower itself.

Either the contents are random and valid (norms near one, scales finite and positive), usually at a reduced width; or
the files are sparse: their headers and sizes are real, full size too, their contents zeros that take no disk space. A
sparse checkpoint passes every check of headers, and loading it ends in the error that its scales are zero.
"""

import argparse
import copy
import json
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from .checkpoint_writer import json_bytes, units_of
from .config import Fp8BlockConfig, Int4Config, TargetConfig, parse_config, read_json
from .errors import ConfigError
from .file_sizes import vision_tensors
from .model import declare_target
from .names import WRAPPER_PREFIX, name_table, parameters
from .quant import GROUP_SIZE
from .safetensors_io import INDEX_FILE, TensorSpec, new_directory, write_file, write_sparse_file, write_synced

_BF16 = np.dtype(jnp.bfloat16)
_POOL = 1 << 22  # random values that all tensors are cut from

# Keys of a text or vision config that are divided with the width.
_TEXT_WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "vocab_size",
)
_VISION_WIDTHS = ("vt_hidden_size", "vt_intermediate_size", "mm_hidden_size", "text_hidden_size")
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "media_placeholder_token_id")


@dataclass(frozen=True)
class Reduction:
    """How much smaller than its config a model is made; checked by `reduced`.

    Attributes:
      width_divisor: of widths, ranks, heads and vocabulary; widths of heads stay.
      layers: None: all.
      experts: of a layer; None: all.
    """

    width_divisor: int = 1
    layers: int | None = None
    experts: int | None = None


def reduced(raw: Mapping[str, Any], by: Reduction) -> dict[str, Any]:
    """The `config.json` of a smaller model of the same kind.

    Token ids keep their distance from the end of the vocabulary, where the special ones lie.

    Args:
      raw: the `config.json` of the whole one.
      by: how much smaller.
    Raises:
      ConfigError: a width that cannot be divided so, too many layers or experts, or a config that is refused.
    """
    config = copy.deepcopy(dict(raw))
    text, where = config.get("text_config", config), "config.text_config" if "text_config" in config else "config"
    old_vocabulary = text.get("vocab_size")
    _divide(text, where, _TEXT_WIDTHS, by.width_divisor)
    _divide(config.get("vision_config") or {}, "config.vision_config", _VISION_WIDTHS, by.width_divisor)
    for key, value in (("num_hidden_layers", by.layers), ("n_routed_experts", by.experts)):
        if value is None:
            continue
        found = text.get(key)
        if not isinstance(found, int) or not 1 <= value <= found:
            raise ConfigError(key, value, f"1 to the config's {found}")
        text[key] = value
    for part in (config, text):
        for key in _TOKEN_IDS:
            if isinstance(part.get(key), int) and isinstance(old_vocabulary, int):
                part[key] += text["vocab_size"] - old_vocabulary
    parse_config(config)
    return config


def _divide(part: dict[str, Any], where: str, keys: Sequence[str], divisor: int) -> None:
    if divisor < 1:
        raise ConfigError("--width-divisor", divisor, "1 or more")
    for key in keys:
        value = part.get(key)
        if value is None:
            continue
        step = divisor * (GROUP_SIZE if key == "moe_intermediate_size" else 1)
        if value % step:
            raise ConfigError(f"{where}.{key}", value, f"a multiple of {step}", "use another --width-divisor")
        part[key] = value // divisor


def layout(raw: Mapping[str, Any], shards: int | None = None) -> list[list[TensorSpec]]:
    """The tensors of each file, in the order in which they lie there.

    Args:
      raw: the `config.json`.
      shards: number of files, of about the same size; None: the published layout, a file for each layer and the rest.
    Raises:
      ConfigError: fp8 weights, which are not made here, or more files than tensors.
    """
    config = parse_config(raw)
    if isinstance(config.quantization, Fp8BlockConfig):
        raise ConfigError("config.quantization_config", config.quantization, "INT4 or none", "fp8 is not made here")
    groups: dict[str, list[TensorSpec]] = {f"model.layers.{i}": [] for i in range(config.n_layers)}
    groups |= {"rest": [], "mm_projector": [], "vision_tower": []}
    for spec in text_tensors(config):
        name = spec.name.removeprefix(WRAPPER_PREFIX)
        group = ".".join(name.split(".")[:3])
        groups[group if group in groups else "rest"].append(spec)
    for name, shape in vision_tensors(raw).items():
        groups[name.partition(".")[0]].append(TensorSpec(name, _BF16, shape))
    files = [tensors for tensors in groups.values() if tensors]
    return files if shards is None else _spread([t for tensors in files for t in tensors], shards)


def _spread(tensors: Sequence[TensorSpec], shards: int) -> list[list[TensorSpec]]:
    """Consecutive tensors in files of about the same size, none of them empty."""
    if not 1 <= shards <= len(tensors):
        raise ConfigError("--shards", shards, f"1 to {len(tensors)}, the number of tensors")
    total, done, files = sum(t.nbytes for t in tensors), 0, [[]]
    for i, t in enumerate(tensors):
        left, room = len(tensors) - i, shards - len(files)
        if files[-1] and room and (done >= total * len(files) / shards or left == room):
            files.append([])
        files[-1].append(t)
        done += t.nbytes
    return files


def text_tensors(config: TargetConfig) -> Iterator[TensorSpec]:
    """The tensors of a text model as they are published: INT4 experts where the config says so, bf16 else."""
    int4 = isinstance(config.quantization, Int4Config)
    declared = parameters(declare_target(config, dtype=_BF16, int4=int4))
    arrays = {path: p.get_value() for path, p in declared.items()}
    prefix = WRAPPER_PREFIX if config.is_wrapped else ""
    for unit in units_of(arrays, name_table(config, int4=int4), int4, None, prefix):
        yield from unit.specs


class Contents:
    """Random and valid contents by tensor: the same for the same seed and name, cut from pools of random values."""

    def __init__(self, seed: int, shapes: Mapping[str, np.ndarray]) -> None:
        """Args: shapes: the `weight_shape` tensors by name."""
        rng = np.random.default_rng(seed)
        self._shapes = shapes
        self._normal = rng.standard_normal(_POOL, np.float32)
        self._words = rng.integers(-(2**31), 2**31, _POOL, np.int32)
        self._pools: dict[tuple[str, np.dtype], np.ndarray] = {}

    def of(self, spec: TensorSpec) -> np.ndarray:
        """The tensor's values."""
        if spec.name in self._shapes:
            return self._shapes[spec.name]
        pool = self._pool(_kind(spec), spec.dtype)
        n = int(np.prod(spec.shape))
        first = zlib.crc32(spec.name.encode()) % _POOL
        return np.resize(np.roll(pool, -first) if n > _POOL - first else pool[first : first + n], spec.shape)

    def _pool(self, kind: str, dtype: np.dtype) -> np.ndarray:
        if (kind, dtype) not in self._pools:
            values = {
                "words": lambda: self._words,
                "scales": lambda: 2e-3 + 1e-3 * np.tanh(self._normal),  # times codes of -8..7: weights of about 0.01
                "norms": lambda: 1 + 0.1 * np.tanh(self._normal),
                "weights": lambda: 0.02 * self._normal,
            }[kind]()
            self._pools[kind, dtype] = values.astype(dtype)
        return self._pools[kind, dtype]


def _kind(spec: TensorSpec) -> str:
    if spec.dtype == np.int32:
        return "words"
    if spec.name.endswith(".weight_scale"):
        return "scales"
    return "norms" if len(spec.shape) == 1 and spec.name.endswith("norm.weight") else "weights"


def matrix_shapes(tensors: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
    """The values of the `weight_shape` tensors, [out, in] each, by name."""
    scales = {t.name.rpartition(".")[0]: t.shape for t in tensors if t.name.endswith(".weight_scale")}
    return {
        t.name: np.array([rows, groups * GROUP_SIZE], t.dtype)
        for t in tensors
        if t.name.endswith(".weight_shape")
        for rows, groups in [scales[t.name.rpartition(".")[0]]]
    }


def write(
    raw: Mapping[str, Any], directory: str | Path, *, shards: int | None = None, sparse: bool = False, seed: int = 0
) -> int:
    """Writes a checkpoint directory: files, index and `config.json`; all of them or none.

    Args:
      raw: the `config.json` to write (`reduced` makes a smaller one).
      directory: new or empty.
      shards: as for `layout`.
      sparse: zeros that take no disk space, but for the tensors that say shapes.
      seed: of the random contents.
    Returns:
      Bytes of all tensors.
    Raises:
      ConfigError: what `layout` refuses.
      ValueError: the directory is in use.
    """
    files = layout(raw, shards)
    weight_map: dict[str, str] = {}
    shapes = matrix_shapes([t for tensors in files for t in tensors])
    contents = None if sparse else Contents(seed, shapes)
    total = 0
    with new_directory(Path(directory)) as part:
        for number, tensors in enumerate(files, 1):
            name = f"model-{number:05d}-of-{len(files):06d}.safetensors"
            if contents is None:
                write_sparse_file(part / name, tensors, {t.name: shapes[t.name] for t in tensors if t.name in shapes})
            else:
                write_file(part / name, tensors, map(contents.of, tensors))
            weight_map |= {t.name: name for t in tensors}
            total += sum(t.nbytes for t in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        for name, data in (("config.json", raw), (INDEX_FILE, index)):
            write_synced(part / name, lambda f, data=data: f.write(json_bytes(data)))
    return total


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser("python -m kimijax.synthetic", description="A checkpoint with made-up contents.")
    p.add_argument("--model", type=Path, required=True, help="a config.json, or a directory that has one")
    p.add_argument("--out", type=Path, required=True, help="a new directory")
    p.add_argument("--width-divisor", type=int, default=1, help="divides widths, ranks, heads and the vocabulary")
    p.add_argument("--layers", type=int, help="default: all")
    p.add_argument("--experts", type=int, help="routed experts of a layer; default: all")
    p.add_argument("--shards", type=int, help="files of about the same size; default: as published, one a layer")
    p.add_argument("--sparse", action="store_true", help="real headers and sizes, zeros that take no disk space")
    p.add_argument("--seed", type=int, default=0, help="of the random contents")
    return p


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code (2: a config or a size that cannot be made)."""
    args = parser().parse_args(argv)
    file = args.model if args.model.suffix == ".json" else args.model / "config.json"
    try:
        raw = reduced(read_json(file), Reduction(args.width_divisor, args.layers, args.experts))
        total = write(raw, args.out, shards=args.shards, sparse=args.sparse, seed=args.seed)
    except ValueError as e:  # ConfigError too
        print(f"error: {e}", file=sys.stderr)
        return 2
    n_files = len(list(args.out.glob("*.safetensors")))
    print(json.dumps({"directory": str(args.out), "files": n_files, "bytes": total, "sparse": args.sparse}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
