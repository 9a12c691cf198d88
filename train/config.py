"""Recipes of targets: the tables of `pretrain`, read once into frozen dataclasses."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kimijax.config import TargetConfig, parse_config
from kimijax.errors import ConfigError
from kimijax.tokenizer import N_SPECIAL

from .recipe_reader import RECIPES as RECIPES
from .recipe_reader import find_recipe, read_table, read_tables


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
    """A recipe of a target by the name of a file in `recipes/`, or by path; see `recipe_reader`.

    Raises:
      ConfigError: no such recipe, an unknown or missing field, a value of the wrong type or out of range.
    """
    path = find_recipe(name)
    other = "recipes of drafters are for the other stages"
    data = read_tables(path, overrides, ("corpus", "pretrain", "samples", "model"), other)
    return Recipe(
        name=path.stem,
        corpus=read_table(CorpusConfig, data["corpus"], "corpus"),
        pretrain=read_table(PretrainConfig, data["pretrain"], "pretrain"),
        samples=read_table(SamplesConfig, data["samples"], "samples"),
        model=data["model"],
    )
