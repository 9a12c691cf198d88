"""Recipes: TOML files read once into frozen dataclasses; any field can be overridden as `--set table.field=value`."""

import dataclasses
import math
import tomllib
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kimijax.config import TargetConfig, parse_config
from kimijax.errors import ConfigError
from kimijax.tokenizer import N_SPECIAL

RECIPES = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class CorpusConfig:
    """Which corpus builder makes the training text, and its arguments."""

    builder: Literal["nano"]
    seed: int
    n_ranks: int


@dataclass(frozen=True)
class PretrainConfig:
    """One pre-training run. Schedules: warm-up, constant, then linear to zero over `decay_steps` (WSD)."""

    seed: int
    steps: int
    rows: int  # rows a step
    row_tokens: int  # tokens a row
    learning_rate: float  # of Muon's matrices
    embed_learning_rate: float  # of AdamW's embeddings, head, router and norms
    weight_decay: float
    warmup_steps: int
    decay_steps: int
    clip_norm: float
    prompt_weight: float
    balance_rate: float
    compute_dtype: Literal["bfloat16", "float32"]
    log_every: int
    eval_every: int
    save_every: int

    def __post_init__(self) -> None:
        counts = ("steps", "rows", "row_tokens", "log_every", "eval_every", "save_every")
        floats = {
            **dict.fromkeys(("learning_rate", "embed_learning_rate", "clip_norm"), "a positive number"),
            **dict.fromkeys(("weight_decay", "balance_rate"), "0 or a positive number"),
            "prompt_weight": "a number from 0 to 1",
        }
        values = dataclasses.asdict(self)
        for name in counts:
            if values[name] <= 0:
                raise ConfigError(f"pretrain.{name}", values[name], "a positive integer")
        for name in ("seed", "warmup_steps", "decay_steps"):
            if values[name] < 0:
                raise ConfigError(f"pretrain.{name}", values[name], "0 or a positive integer")
        for name, expected in floats.items():
            value = values[name]
            low = value > 0 if expected == "a positive number" else value >= 0
            if not (math.isfinite(value) and low and (name != "prompt_weight" or value <= 1)):
                raise ConfigError(f"pretrain.{name}", value, expected)
        if self.warmup_steps + self.decay_steps > self.steps:
            found = (self.warmup_steps, self.decay_steps)
            raise ConfigError("pretrain.warmup_steps and decay_steps", found, f"together at most steps ({self.steps})")


@dataclass(frozen=True)
class SamplesConfig:
    """The questions whose answers a report shows, greedy and unedited."""

    questions: tuple[str, ...]
    max_tokens: int  # an answer longer than this is cut, and marked as cut

    def __post_init__(self) -> None:
        if self.max_tokens <= 0:
            raise ConfigError("samples.max_tokens", self.max_tokens, "a positive integer")
        if not self.questions or not all(self.questions):
            raise ConfigError("samples.questions", list(self.questions), "at least one question, none empty")


@dataclass(frozen=True)
class Recipe:
    """All stages' settings."""

    name: str
    corpus: CorpusConfig
    pretrain: PretrainConfig
    samples: SamplesConfig
    model: dict[str, Any] = field(hash=False)  # the text_config to be written; read by kimijax.config

    @property
    def target(self) -> TargetConfig:
        """The model that is trained: without quantisation, which export adds."""
        return parse_config(self.model)

    def __post_init__(self) -> None:
        if "quantization_config" in self.model:
            raise ConfigError("model.quantization_config", "a value", "no such key", "export writes the INT4 one")
        target = self.target  # refuses what kimijax.config refuses
        if target.moe is None or not target.moe.has_bias:
            found = None if target.moe is None else target.moe.scoring
            raise ConfigError("model.scoring_func", found, "'sigmoid' experts: training balances them by their bias")
        # Token ids are stored in 16 bits, and every id of the tokenizer needs a row.
        least = self.corpus.n_ranks + N_SPECIAL
        if not least <= target.vocab_size <= 2**16:
            raise ConfigError("model.vocab_size", target.vocab_size, f"{least} (corpus.n_ranks + {N_SPECIAL}) to 65536")
        if self.pretrain.row_tokens > target.max_positions:
            expected = f"at most model.max_position_embeddings ({target.max_positions})"
            raise ConfigError("pretrain.row_tokens", self.pretrain.row_tokens, expected)


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe by the name of a file in `recipes/`, or by path.

    Args:
      name: a recipe's name, or a path that ends in `.toml`.
      overrides: `table.field=value` with a TOML value; tables nest, as in `model.rope_scaling.factor=8.0`.
    Raises:
      ConfigError: no such recipe, an unknown or missing field, a value of the wrong type or out of range.
    """
    path = Path(name) if name.endswith(".toml") else RECIPES / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in RECIPES.glob("*.toml")))
        raise ConfigError("recipe", name, f"one of {known}, or the path of a .toml file")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(str(path), str(e), "valid TOML") from e
    for item in overrides:
        _override(data, item)
    known = {"corpus", "pretrain", "samples", "model"}
    if set(data) != known or not all(isinstance(table, dict) for table in data.values()):
        raise ConfigError(f"{path.name}: tables", sorted(data), "exactly " + ", ".join(sorted(known)))
    return Recipe(
        name=path.stem,
        corpus=_read(CorpusConfig, data["corpus"], "corpus"),
        pretrain=_read(PretrainConfig, data["pretrain"], "pretrain"),
        samples=_read(SamplesConfig, data["samples"], "samples"),
        model=data["model"],
    )


def _override(data: dict[str, Any], item: str) -> None:
    key, eq, text = item.partition("=")
    *tables, name = key.split(".")
    table: Any = data
    for part in tables:
        table = table.get(part) if isinstance(table, dict) else None
    if not (eq and tables and isinstance(table, dict) and name in table):
        raise ConfigError("--set", item, "table.field=value with a field of the recipe")
    try:
        value = tomllib.loads(f"x = {text}")
    except tomllib.TOMLDecodeError as e:
        raise ConfigError("--set", item, 'a TOML value, such as 3, 1e-3 or "text"') from e
    if set(value) != {"x"}:
        raise ConfigError("--set", item, "one value")
    table[name] = value["x"]


def _read[T](cls: type[T], table: dict[str, Any], where: str) -> T:
    """A dataclass from a TOML table that has exactly its fields."""
    kinds = typing.get_type_hints(cls)
    for name in sorted(set(table) ^ set(kinds)):
        found = "no such field" if name in table else "missing"
        raise ConfigError(f"{where}.{name}", found, "fields " + ", ".join(kinds))
    return cls(**{name: _value(table[name], kind, f"{where}.{name}") for name, kind in kinds.items()})


def _value(value: Any, kind: Any, where: str) -> Any:
    """`value` as a field's type: int, float, str, tuple[str, ...] or a Literal of strings."""
    if typing.get_origin(kind) is Literal:
        allowed = typing.get_args(kind)
        if value not in allowed:
            raise ConfigError(where, value, " or ".join(map(repr, allowed)))
        return value
    if kind == tuple[str, ...]:
        if type(value) is not list or not all(type(v) is str for v in value):
            raise ConfigError(where, value, "a list of strings")
        return tuple(value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ConfigError(where, value, {int: "an integer", float: "a number", str: "a string"}[kind])
    return value
