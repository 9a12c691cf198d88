"""Recipes of drafters: one table a stage, read once into frozen dataclasses.

The stages hand files to each other in the run's folder; a recipe says what is to be in them, never where they lie.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kimijax.config import TargetConfig
from kimijax.draft_config import DraftConfig, LlamaAttentionConfig, mla_attention
from kimijax.errors import ConfigError
from kimijax.sharding import Preset
from kimijax.wiring import Wiring

from .recipe_reader import find_recipe, read_table, read_tables

NANO_CONVERSATIONS = "nano"  # the built-in questions about Python's library


@dataclass(frozen=True)
class TargetTable:
    """The model that drafts are made for, as every stage runs it."""

    model: str  # a checkpoint's folder, or nano
    dtype: Literal["float32", "bfloat16"]
    devices: int  # 1, or all of the mesh; the weights are split over them
    preset: Preset  # how: see kimijax.sharding
    taps: tuple[int, ...]  # which residual streams feed the drafter; none: 2, n//2, n-3
    max_tokens: int  # the longest document, prompt and answer; longer ones are cut

    def __post_init__(self) -> None:
        _positive("target", self, "devices", "max_tokens")

    def wiring(self, target: TargetConfig) -> Wiring:
        """The taps on this target. ConfigError: taps that it does not have, or too few layers for the default."""
        if not self.taps:
            return Wiring.default(target.n_layers, target.hidden)
        return Wiring(self.taps, target.n_layers, target.hidden)


@dataclass(frozen=True)
class CorpusTable:
    """Which conversations are learned from."""

    conversations: tuple[str, ...]  # JSON-lines files, or nano
    seed: int
    limit: int  # conversations of each file, drawn by the seed; 0: all
    heldout: int  # conversations of each file that are kept for evaluation
    # Which assistant turns count: all of them, the last one, or as the chat template needs it: where it drops the
    # thinking of earlier turns, each turn becomes a document of its own.
    turns: Literal["auto", "all", "last"]
    thinking: bool  # the template's argument

    def __post_init__(self) -> None:
        _not_negative("corpus", self, "seed", "limit")
        _positive("corpus", self, "heldout")
        if not self.conversations or not all(self.conversations):
            raise ConfigError("corpus.conversations", list(self.conversations), "at least one file, or nano")


@dataclass(frozen=True)
class GenerateTable:
    """How the target answers the prompts again; sampling should be what will be served."""

    enabled: bool  # false: learn from the answers in the files
    seed: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int  # of one answer; a longer one is cut, and kept apart
    batch: int  # requests that are answered together

    def __post_init__(self) -> None:
        _not_negative("generate", self, "seed", "top_k", "temperature")
        _positive("generate", self, "max_tokens", "batch", "top_p")
        if self.top_p > 1:
            raise ConfigError("generate.top_p", self.top_p, "a number above 0 and at most 1")


@dataclass(frozen=True)
class FeaturesTable:
    """Where the target's hidden states come from."""

    source: Literal["files", "online"]  # computed once and stored, or anew in every step
    dtype: Literal["bfloat16", "float32"]  # of what is stored
    batch_tokens: int  # tokens of one forward pass
    shard_mb: int  # size of a file

    def __post_init__(self) -> None:
        _positive("features", self, "batch_tokens", "shard_mb")


@dataclass(frozen=True)
class VocabTable:
    """The draft vocabulary: the most frequent tokens of the answers."""

    size: int  # 0: the target's whole vocabulary

    def __post_init__(self) -> None:
        _not_negative("vocab", self, "size")


@dataclass(frozen=True)
class DraftTable:
    """The head. For kind mla the sizes of its attention are the target's, and the fields of heads are 0."""

    kind: Literal["llama", "mla"]
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope_theta: float
    mlp_width: int
    max_positions: int
    fc_norm: bool
    norm_before_fc: bool
    norm_before_residual: bool
    norm_output: bool
    window: int  # 0: none

    def __post_init__(self) -> None:
        _positive("draft", self, "mlp_width", "max_positions")
        _not_negative("draft", self, "window")
        heads = ("n_heads", "n_kv_heads", "head_dim", "rope_theta")
        if self.kind == "llama":
            _positive("draft", self, *heads)
        else:
            for name in heads:
                if getattr(self, name):
                    expected = "0: an mla head has the target's attention"
                    raise ConfigError(f"draft.{name}", getattr(self, name), expected)

    def config(self, target: TargetConfig, wiring: Wiring, vocab_size: int) -> DraftConfig:
        """The head on a target. ConfigError: sizes that do not fit together.

        Args:
          target: whose width it has.
          wiring: what feeds it.
          vocab_size: of the draft vocabulary; 0: the target's.
        """
        t = target
        if self.kind == "llama":
            attention = LlamaAttentionConfig(self.n_heads, self.n_kv_heads, self.head_dim, self.rope_theta)
        else:
            attention = mla_attention(
                t, hidden=t.hidden, mlp_width=self.mlp_width, norm_eps=t.norm_eps, max_positions=self.max_positions
            )
        return DraftConfig(
            attention=attention,
            vocab_size=t.vocab_size,
            draft_vocab_size=vocab_size or t.vocab_size,
            hidden=t.hidden,
            target_hidden=t.hidden,
            n_taps=len(wiring.taps),
            mlp_width=self.mlp_width,
            norm_eps=t.norm_eps,
            max_positions=self.max_positions,
            fc_norm=self.fc_norm,
            norm_before_fc=self.norm_before_fc,
            norm_before_residual=self.norm_before_residual,
            norm_output=self.norm_output,
            window=self.window or None,
        )


@dataclass(frozen=True)
class FitTable:
    """One training run of the head."""

    seed: int
    epochs: int
    rows: int  # rows a step
    row_tokens: int  # tokens a row; documents are packed into rows
    accumulate: int  # steps whose gradients make one update
    ttt_steps: int  # unrolled steps of the training-time test
    decay: float  # weight of step j is decay ** j
    # soft_ce: cross-entropy with the target's distribution over the draft vocabulary; kl: the same less its entropy;
    # lk: the blend of kl and total variation that turns to the latter as acceptance rises (see losses.py)
    loss: Literal["soft_ce", "kl", "lk"]
    lk_rate: float  # how fast the blend turns; only for lk
    normaliser: Literal["all", "valid"]  # divide by all positions of a micro-batch, or by those that count in it
    schedule: Literal["cosine", "wsd"]
    learning_rate: float
    final_share: float  # of the learning rate, at the end
    warmup_share: float  # of the updates
    decay_share: float  # of the updates, for wsd
    beta1: float
    beta2: float
    weight_decay: float
    clip_norm: float
    compute_dtype: Literal["bfloat16", "float32"]
    data_parallel: int  # groups of devices that take different rows
    fsdp: bool  # parameters and optimiser state split over those groups, not repeated
    log_every: int
    eval_every: int
    save_every: int

    def __post_init__(self) -> None:
        counts = """epochs rows row_tokens accumulate ttt_steps learning_rate clip_norm data_parallel log_every
        eval_every save_every""".split()
        _positive("fit", self, *counts, "decay")
        _not_negative("fit", self, "seed", "lk_rate", "weight_decay")
        for name in ("decay", "final_share", "warmup_share", "decay_share"):
            _share("fit", self, name)
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"fit.{name}", getattr(self, name), "a number from 0 to below 1")
        if self.warmup_share + self.decay_share > 1:
            found = (self.warmup_share, self.decay_share)
            raise ConfigError("fit.warmup_share and decay_share", found, "together at most 1")
        if self.rows % self.data_parallel:
            raise ConfigError("fit.rows", self.rows, f"a multiple of fit.data_parallel ({self.data_parallel})")


@dataclass(frozen=True)
class EvaluateTable:
    """How acceptance is measured: the served program on held-out prompts."""

    draft_tokens: int  # k, proposed in each round of the chain
    prompts: int  # of each data set
    max_tokens: int  # of an answer
    temperatures: tuple[float, ...]
    seed: int

    def __post_init__(self) -> None:
        _positive("evaluate", self, "draft_tokens", "prompts", "max_tokens")
        _not_negative("evaluate", self, "seed")
        if not self.temperatures or any(not (math.isfinite(t) and t >= 0) for t in self.temperatures):
            raise ConfigError("evaluate.temperatures", list(self.temperatures), "temperatures of 0 or above")


@dataclass(frozen=True)
class ExportTable:
    """What is written in the end."""

    forms: tuple[str, ...]  # sglang, vllm, speculators; a folder for each
    dtype: Literal["bfloat16", "float32"]
    probe_sequences: int  # token sequences in the probe

    def __post_init__(self) -> None:
        known = ("sglang", "vllm", "speculators")
        if not self.forms or not set(self.forms) <= set(known) or len(set(self.forms)) < len(self.forms):
            raise ConfigError("export.forms", list(self.forms), "one or more of " + ", ".join(known))
        _positive("export", self, "probe_sequences")


@dataclass(frozen=True)
class DraftRecipe:
    """All stages' settings."""

    name: str
    target: TargetTable
    corpus: CorpusTable
    generate: GenerateTable
    features: FeaturesTable
    vocab: VocabTable
    draft: DraftTable
    fit: FitTable
    evaluate: EvaluateTable
    export: ExportTable

    def __post_init__(self) -> None:
        # A document that is longer than a row would be cut a second time, and its end never trained on.
        if self.fit.row_tokens < self.target.max_tokens:
            expected = f"at least target.max_tokens ({self.target.max_tokens}), the longest document"
            raise ConfigError("fit.row_tokens", self.fit.row_tokens, expected)
        if self.draft.max_positions < self.target.max_tokens:
            expected = f"at least target.max_tokens ({self.target.max_tokens}), which it is trained on"
            raise ConfigError("draft.max_positions", self.draft.max_positions, expected)


_TABLES: dict[str, type[Any]] = {
    "target": TargetTable,
    "corpus": CorpusTable,
    "generate": GenerateTable,
    "features": FeaturesTable,
    "vocab": VocabTable,
    "draft": DraftTable,
    "fit": FitTable,
    "evaluate": EvaluateTable,
    "export": ExportTable,
}


def load_draft_recipe(name: str, overrides: Sequence[str] = ()) -> DraftRecipe:
    """A recipe of a drafter by the name of a file in `recipes/`, or by path; see `recipe_reader`.

    Raises:
      ConfigError: no such recipe, an unknown or missing field, a value of the wrong type or out of range.
    """
    path = find_recipe(name)
    data = read_tables(path, overrides, tuple(_TABLES), "recipes of targets are for the stage pretrain")
    return DraftRecipe(name=path.stem, **{table: read_table(cls, data[table], table) for table, cls in _TABLES.items()})


def _positive(where: str, table: Any, *names: str) -> None:
    _check(where, table, names, lambda v: v > 0, "above 0")


def _not_negative(where: str, table: Any, *names: str) -> None:
    _check(where, table, names, lambda v: v >= 0, "0 or above")


def _share(where: str, table: Any, *names: str) -> None:
    _check(where, table, names, lambda v: 0 <= v <= 1, "from 0 to 1")


def _check(where: str, table: Any, names: Sequence[str], fits: Any, expected: str) -> None:
    values = dataclasses.asdict(table)
    for name in names:
        if not (math.isfinite(values[name]) and fits(values[name])):
            raise ConfigError(f"{where}.{name}", values[name], f"a number {expected}")
