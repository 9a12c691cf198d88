"""Tiny exported drafts and the inputs that other engines run them on; NumPy alone, for their environments too.

Every number is computed from a name (see `weights`), so a draft is the same to the byte wherever it is made again.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from tests import draft_reference as ref

from .weights import Weights, round_bf16, token_ids, uniform

Engine = Literal["speculators", "vllm", "sglang"]

TAPS, TARGET_LAYERS = (2, 5, 7), 10
PROMPT, CHAIN = 8, 2  # rows of the first step; further steps, each fed its predecessor's output
ROWS = (3, PROMPT - 1)  # rows of the first step that are kept
WINDOW = 4

# Sizes that vLLM's attention takes on a CPU; the heads' total width is not the draft's.
LLAMA: ref.Config = {**ref.LLAMA, "head_dim": 32, "num_attention_heads": 4}
MLA: ref.Config = {**ref.MLA, "kv_lora_rank": 512, "qk_rope_head_dim": 64}

EAGLE31 = {"fc_norm": True, "norm_output": True}
SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": WINDOW, "use_sliding_window": True}
NARROW = {"hidden_size": 48, "target_hidden_size": ref.TARGET_WIDTH}
LLAMA3 = {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                           "original_max_position_embeddings": 64}}  # fmt: skip
YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0, "beta_slow": 1.0,
                         "original_max_position_embeddings": 64}}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One draft, in one form, for one engine.

    `changes` are to the published config that the draft is first made from; `head` is false where the head is the
    target's, `embedding` true where the files also hold the target's embedding (they always do for speculators).
    `chain` counts the chained steps that can be compared.
    """

    engine: Engine
    name: str
    form: Literal["sglang", "vllm", "speculators"]
    base: ref.Config = field(default_factory=lambda: LLAMA)
    changes: ref.Config = field(default_factory=dict[str, Any])
    head: bool = True
    embedding: bool = False
    chain: int = CHAIN

    @property
    def key(self) -> str:
        """The case's folder, and its prefix in the golden file."""
        return f"{self.engine}-{self.name}".replace(" ", "-")

    @property
    def config(self) -> ref.Config:
        return {**self.base, **self.changes}

    @property
    def window(self) -> int | None:
        return WINDOW if "layer_types" in self.changes else None


_FULL: dict[str, Any] = {"draft_vocab_size": None}
_REDUCED: dict[str, Any] = {"draft_vocab_size": 40}
_BOTH_BEFORE = {"norm_before_residual": True, "norm_before_fc": True}

CASES = (
    Case("speculators", "plain", "speculators"),
    Case("speculators", "eagle 3.1", "speculators", changes=EAGLE31),
    Case("speculators", "norms before", "speculators", changes={**_BOTH_BEFORE, **YARN}),
    # Its training keeps a row's window where the first step had it, serving moves it along with the chain.
    Case("speculators", "window", "speculators", changes={**SLIDING, "norm_before_residual": True}, chain=0),
    Case("speculators", "full vocabulary", "speculators", changes={**_FULL, **LLAMA3}),
    Case("vllm", "plain", "vllm", embedding=True),
    Case("vllm", "eagle 3.1", "vllm", changes=EAGLE31),
    Case("vllm", "norms before", "vllm", changes={**_BOTH_BEFORE, **YARN}),
    Case("vllm", "window", "vllm", changes=SLIDING),
    Case("vllm", "borrowed head", "vllm", changes={**_FULL, **LLAMA3}, head=False),
    Case("vllm", "another width", "vllm", changes={**NARROW, **EAGLE31}),
    Case("vllm", "sglang form", "sglang", changes={**EAGLE31, "norm_before_fc": True}),
    Case("vllm", "speculators form", "speculators", changes={**EAGLE31, **SLIDING, "norm_before_residual": True}),
    Case("vllm", "mla", "vllm", MLA),
    Case("vllm", "mla eagle 3.1", "vllm", MLA, {**EAGLE31, **_REDUCED, "norm_before_residual": True}),
    Case("vllm", "mla sglang form", "sglang", MLA, EAGLE31),
    Case("vllm", "mla borrowed head", "vllm", MLA, _FULL, head=False),
    Case("sglang", "plain", "sglang"),
    Case("sglang", "eagle 3.1", "sglang", changes=EAGLE31),
    Case("sglang", "norm before fc", "sglang", changes={"norm_before_fc": True, **YARN}),
    Case("sglang", "window", "sglang", changes=SLIDING),
    Case("sglang", "borrowed head", "sglang", changes={**_FULL, **LLAMA3}, head=False),
    Case("sglang", "another width", "sglang", changes={**NARROW, **EAGLE31}),
    Case("sglang", "mla", "sglang", MLA),
    Case("sglang", "mla eagle 3.1", "sglang", MLA, {**EAGLE31, **_REDUCED}),
    Case("sglang", "mla borrowed head", "sglang", MLA, _FULL, head=False),
)


class Inputs(NamedTuple):
    """What a draft is run on.

    The first step is PROMPT rows at positions 0, 1, ...; then each of the last CHAIN tokens is a step of one row.
    """

    ids: np.ndarray  # int64 [PROMPT + CHAIN], of row t the token after position t
    taps: np.ndarray  # float32 [PROMPT + CHAIN, 3 * target width], the taps side by side; only PROMPT rows matter


class Outputs(NamedTuple):
    """What an engine computes: float32, rows ROWS of the first step, then one for each chained token."""

    features: np.ndarray  # [len(ROWS), D], after fc
    feedback: np.ndarray  # [len(ROWS) + chain, D], what the next step is fed
    logits: np.ndarray  # [len(ROWS) + chain, Vd]
    target_ids: np.ndarray  # int64 [Vd], the target's id of each logit, as the engine maps it


def inputs() -> Inputs:
    rows, width = PROMPT + CHAIN, ref.TARGET_WIDTH
    scale = np.repeat(np.array([3.0, 6.0, 8.0], np.float32), width)
    taps = uniform("engines/taps", (rows, len(TAPS) * width)) * scale
    return Inputs(token_ids("engines/ids", rows, ref.VOCAB).astype(np.int64), taps)


def tensors(case: Case) -> Weights:
    """Tensors of the draft under SGLang's names, embedding and head included, and its vocabulary."""
    out = random_tensors(case.key, case.config)
    size = case.config["draft_vocab_size"]
    if size is not None and size < ref.VOCAB:
        ids = np.sort(np.argsort(uniform(f"{case.key}/ids", (ref.VOCAB,)), kind="stable")[:size])
        out |= {"d2t": ids - np.arange(size), "t2d": np.isin(np.arange(ref.VOCAB), ids)}
    return out


def random_tensors(prefix: str, config: ref.Config) -> Weights:
    """The float tensors of a draft, each drawn by its name."""
    return {name: _tensor(f"{prefix}/{name}", shape) for name, shape in ref.tensor_shapes(config).items()}


def _tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Exact in bf16, so that no engine's handling of dtypes can matter."""
    if len(shape) == 1:
        return round_bf16(1 + np.float32(0.4) * uniform(name, shape))
    gain = 1.5 if "embed" in name else 1.7 * shape[-1] ** -0.5
    return round_bf16(uniform(name, shape) * np.float32(gain))


def target_embedding(case: Case) -> np.ndarray:
    """[V, target width]: the draft's, where that is as wide."""
    own = tensors(case)["embed_tokens.weight"]
    shape = (ref.VOCAB, ref.TARGET_WIDTH)
    return own if own.shape == shape else _tensor("engines/embed_tokens", shape)


def target_head(case: Case) -> np.ndarray:
    """[V, target width]: the draft's where it is borrowed."""
    shape = (ref.VOCAB, ref.TARGET_WIDTH)
    return _tensor("engines/head", shape) if case.head else tensors(case)["lm_head.weight"]


def digest(directory: Path) -> str:
    """sha256 of what an engine reads of a draft."""
    h = hashlib.sha256()
    for name in ("config.json", "model.safetensors"):
        h.update((directory / name).read_bytes())
    return h.hexdigest()
