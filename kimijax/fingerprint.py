"""Which target and which tokenizer an artefact belongs to: recognised by content, not by name.

A drafter fits one target. Feature files, training checkpoints and drafts therefore carry a `Contract`: their wiring, a
fingerprint of the target and one of the tokenizer. Whoever opens them compares it with the target at hand; any
difference is one error that shows both sides, field by field.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from .checkpoint import CheckpointIndex, inspect, with_int4
from .config import Fp8BlockConfig, Int4Config, MoEConfig, TargetConfig, YarnConfig
from .config_reader import Reader
from .errors import CheckpointError, ConfigError
from .safetensors_io import FilePool, TensorInfo
from .wiring import Wiring, WiringError

type Scalar = str | int | float | bool | None

# Fields of TargetConfig that change a residual stream or a logit, and those that change neither.
MATTERS = frozenset(
    """vocab_size hidden n_layers n_heads q_lora_rank kv_lora_rank nope_dim rope_dim v_dim dense_width n_dense_layers
    moe norm_eps latent_norm_eps rope_theta yarn quantization""".split()
)
IGNORED = frozenset(
    """model_type text_type max_positions bos_token_id eos_token_ids pad_token_id n_mtp_layers has_vision""".split()
)

# Rows hashed of each matrix: a fine-tuned model can keep every norm of its parent to the bit, but not these.
_ROWS = 8


@dataclass(frozen=True)
class TargetFingerprint:
    """What tells one target from another.

    Attributes:
      config: the fields of `TargetConfig` that matter, nested ones by dotted names.
      tensors: sha256 (hex) of the float32 values of a few small tensors, and of a few rows of some matrices, by name
        without the wrapper's prefix. bf16, f16 and f32 files of the same values agree.
    """

    config: Mapping[str, Scalar]
    tensors: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        return {"config": dict(self.config), "tensors": dict(self.tensors)}

    @classmethod
    def from_json(cls, data: object, where: str = "target") -> "TargetFingerprint":
        """Reads `to_json`'s record. ConfigError names the field that is missing, unknown or mistyped."""
        r = Reader(data, where)
        config = Reader(r.get("config", dict), f"{where}.config")
        tensors = Reader(r.get("tensors", dict), f"{where}.tensors")
        r.finish()
        for key in config.data:
            config.get(key, (str, int, float, bool, type(None)))
        for key in tensors.data:
            _check_hash(tensors.get(key, str), f"{tensors.where}.{key}")
        return cls(MappingProxyType(dict(config.data)), MappingProxyType(dict(tensors.data)))


@dataclass(frozen=True)
class Contract:
    """What an artefact says of the target it was made with.

    Attributes:
      wiring: the taps.
      target: the fingerprint of its configuration and weights.
      tokenizer: `Tokenizer.fingerprint`; None for a target without tokenizer files.
    """

    wiring: Wiring
    target: TargetFingerprint
    tokenizer: str | None

    def __post_init__(self) -> None:
        for field, wired in (("n_layers", self.wiring.target_layers), ("hidden", self.wiring.target_hidden)):
            if self.target.config.get(field) != wired:
                raise WiringError(
                    f"target.config.{field}", f"found {self.target.config.get(field)!r}, but the wiring is for {wired}"
                )

    def to_json(self) -> dict[str, Any]:
        return {"wiring": self.wiring.to_json(), "target": self.target.to_json(), "tokenizer": self.tokenizer}

    @property
    def digest(self) -> str:
        """sha256 (hex) of the record, for comparisons that need no explanation."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    @classmethod
    def from_json(cls, data: object, where: str = "kimijax", also: frozenset[str] = frozenset()) -> "Contract":
        """Reads `to_json`'s record.

        Args:
          data: the parsed record.
          where: its name in errors.
          also: further keys that the artefact keeps beside the contract, for its own reader.
        Raises:
          ConfigError: a key that is missing, unknown or mistyped.
        """
        r = Reader(data, where)
        wiring = Wiring.from_json(r.get("wiring", dict), f"{where}.wiring")
        target = TargetFingerprint.from_json(r.get("target", dict), f"{where}.target")
        tokenizer: str | None = r.get("tokenizer", (str, type(None)))
        if tokenizer is not None:
            _check_hash(tokenizer, f"{where}.tokenizer")
        r.finish(also)
        return cls(wiring, target, tokenizer)


def fingerprint_target(directory: str | Path, config: TargetConfig) -> TargetFingerprint:
    """The fingerprint of a checkpoint: reads headers and well under 2 MB of its files.

    Args:
      directory: the checkpoint.
      config: its configuration, as the model runs it.
    Raises:
      CheckpointError: a tensor that is missing, in an unreadable file, or misshapen.
    """
    index = inspect(directory)
    config = with_int4(config) if index.int4 else config
    hashes: dict[str, str] = {}
    with FilePool() as pool:
        for info in _chosen(index, config):
            hashes[info.name.removeprefix(index.prefix)] = _hash(pool, info)
    return TargetFingerprint(MappingProxyType(_config_fields(config)), MappingProxyType(hashes))


def check_contract(artefact: Contract, running: Contract, *, artefact_name: str, running_name: str) -> None:
    """Refuses an artefact that was made with another wiring, target or tokenizer.

    Args:
      artefact: what it carries.
      running: what it is about to be used with.
      artefact_name, running_name: what the error calls them, such as `draft DIR` and `target DIR`.
    Raises:
      WiringError: lists every field that differs with both values, and what to do.
    """
    left, right = _flat(artefact), _flat(running)
    rows = [
        (field, left.get(field, "absent"), right.get(field, "absent"))
        for field in [*left, *(f for f in right if f not in left)]
        if field not in left or field not in right or left[field] != right[field]
    ]
    if not rows:
        return
    columns = [("field", artefact_name, running_name), *((f, _shown(a), _shown(b)) for f, a, b in rows)]
    widths = [max(len(row[i]) for row in columns) for i in range(2)]
    table = "".join(f"\n  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in columns)
    fixes = "".join(f"\n{_FIXES[part]}" for part in _FIXES if any(f.partition(".")[0] == part for f, _, _ in rows))
    count = "1 difference" if len(rows) == 1 else f"{len(rows)} differences"
    raise WiringError(rows[0][0], f"{artefact_name} was not made for {running_name}, {count}:{table}{fixes}")


_FIXES = {
    "wiring": "wiring: give both the same taps, or make the artefact again with the taps that are wanted",
    "target": "target: use the checkpoint and settings that the artefact was made with, or make it again with these",
    "tokenizer": "tokenizer: use the tokenizer files that the artefact was made with, or make it again with these",
}


def _flat(contract: Contract) -> dict[str, object]:
    """Every compared field by its dotted name."""
    return {
        "wiring.taps": contract.wiring.taps,
        "wiring.target_layers": contract.wiring.target_layers,
        "wiring.target_hidden": contract.wiring.target_hidden,
        **{f"target.config.{k}": v for k, v in contract.target.config.items()},
        **{f"target.tensors.{k}": v for k, v in contract.target.tensors.items()},
        "tokenizer": contract.tokenizer,
    }


def _shown(value: object) -> str:
    """A value in the table: hashes by their beginning, which is as telling and can be read."""
    if isinstance(value, str):
        return f"sha256 {value[:12]}" if re.fullmatch("[0-9a-f]{64}", value) else value
    return "none" if value is None else str(value)


def _check_hash(value: str, where: str) -> None:
    if not re.fullmatch("[0-9a-f]{64}", value):
        raise ConfigError(where, value, "a sha256 of 64 hexadecimal digits")


def _config_fields(config: TargetConfig) -> dict[str, Scalar]:
    """The fields that matter, flat, and of types that JSON keeps exactly."""
    out: dict[str, Scalar] = {}
    for field in dataclasses.fields(config):
        if field.name in IGNORED:
            continue
        if field.name not in MATTERS:
            raise ValueError(f"TargetConfig.{field.name}: say in kimijax.fingerprint whether it tells targets apart")
        value: Any = vars(config)[field.name]
        if isinstance(value, Int4Config):
            value = f"int4, group {value.group_size}"
        elif isinstance(value, Fp8BlockConfig):
            value = f"fp8, block {value.block[0]} x {value.block[1]}"
        if isinstance(value, MoEConfig | YarnConfig):
            out |= {f"{field.name}.{k}": v for k, v in dataclasses.asdict(value).items()}
        else:
            out[field.name] = value
    return out


def _chosen(index: CheckpointIndex, config: TargetConfig) -> list[TensorInfo]:
    """Small tensors from the beginning, middle and end of the model, and the two vocabulary matrices."""
    last = config.n_layers - 1
    layers = sorted({0, config.n_layers // 2, last})
    names = ["model.norm.weight"]
    names += [f"model.layers.{i}.{n}.weight" for i in layers for n in ("input_layernorm", "self_attn.kv_a_layernorm")]
    if config.moe is not None and config.is_moe_layer(last):
        names.append(f"model.layers.{last}.mlp.gate.weight")
        if config.moe.has_bias:
            names.append(f"model.layers.{last}.mlp.gate.e_score_correction_bias")
    names += ["model.embed_tokens.weight", "lm_head.weight"]
    found: list[TensorInfo] = []
    for name in names:
        stem = name.removesuffix(".weight")
        if name.endswith(".weight") and index.has(f"{stem}.weight_packed"):
            name = f"{stem}.weight_packed"
        if name not in index.tensors:
            where = f"in {index.absent[name].name}, which cannot be read" if name in index.absent else "no such tensor"
            raise CheckpointError(f"{index.directory}: {name}: found {where}, expected it for the target's fingerprint")
        found.append(index.tensors[name])
    return found


def _hash(pool: FilePool, info: TensorInfo) -> str:
    """sha256 of shape and values: all of a vector, `_ROWS` rows of a matrix; floats as float32, integers as stored."""
    digest = hashlib.sha256(repr(info.shape).encode())
    rows = info.shape[0] if info.shape else 1
    if len(info.shape) == 2:
        at = sorted({i * (rows - 1) // (_ROWS - 1) for i in range(_ROWS)})
        parts = [pool.read(info, slice(row, row + 1)) for row in at]
    else:
        parts = [pool.read(info)]
    for part in parts:
        values = part if np.issubdtype(part.dtype, np.integer) else part.astype(np.float32)
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()
