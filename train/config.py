"""Recipes: TOML files read once into frozen dataclasses; any field can be overridden as `--set table.field=value`."""

import dataclasses
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kimijax.errors import ConfigError

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
        if not 0 <= self.warmup_steps + self.decay_steps <= self.steps:
            found = (self.warmup_steps, self.decay_steps)
            raise ConfigError("pretrain.warmup_steps and decay_steps", found, f"together at most steps ({self.steps})")
        for name in ("steps", "rows", "row_tokens", "log_every", "eval_every", "save_every"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"pretrain.{name}", getattr(self, name), "a positive integer")


@dataclass(frozen=True)
class Recipe:
    """All stages' settings."""

    name: str
    corpus: CorpusConfig
    pretrain: PretrainConfig
    model: dict[str, Any] = field(hash=False)  # the text_config to be written; read by kimijax.config


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe by the name of a file in `recipes/`, or by path.

    Raises:
      ConfigError: no such recipe, an unknown or missing field, a value of the wrong type.
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
    known = {"corpus", "pretrain", "model"}
    if set(data) != known:
        raise ConfigError(f"{path.name}: tables", sorted(data), "exactly " + ", ".join(sorted(known)))
    return Recipe(
        name=path.stem,
        corpus=_read(CorpusConfig, data["corpus"], "corpus"),
        pretrain=_read(PretrainConfig, data["pretrain"], "pretrain"),
        model=data["model"],
    )


def _override(data: dict[str, Any], item: str) -> None:
    key, eq, value = item.partition("=")
    table, dot, name = key.partition(".")
    if not (eq and dot and table in data and name in data[table]):
        raise ConfigError("--set", item, "table.field=value with a field of the recipe")
    try:
        data[table][name] = tomllib.loads(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError as e:
        raise ConfigError("--set", item, 'a TOML value, such as 3, 1e-3 or "text"') from e


def _read[T](cls: type[T], table: dict[str, Any], where: str) -> T:
    fields = {f.name: f.type for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in sorted(set(table) ^ set(fields)):
        found = "no such field" if name in table else "missing"
        raise ConfigError(f"{where}.{name}", found, "fields " + ", ".join(fields))
    values: dict[str, Any] = {}
    for name, kind in fields.items():
        value = table[name]
        if kind is float and type(value) is int:
            value = float(value)
        allowed = getattr(kind, "__args__", None) if getattr(kind, "__origin__", None) is Literal else None
        ok = value in allowed if allowed else type(value) is kind
        if not ok:
            raise ConfigError(f"{where}.{name}", value, " or ".join(map(repr, allowed)) if allowed else kind.__name__)
        values[name] = value
    return cls(**values)
