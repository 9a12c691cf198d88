"""A run of a micro model on a micro corpus: all parts of a real one, in seconds."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from kimijax.tokenizer import Tokenizer
from kimijax.train import bpe, config, nano_corpus

N_RANKS = 256  # single bytes

MODEL: dict[str, Any] = {
    "model_type": "kimi_k2",
    "vocab_size": 512,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
}

RECIPE = """
[corpus]
builder = "nano"
seed = 0
n_ranks = {n_ranks}

[samples]
max_tokens = 8
questions = ["abc?", "What is b?"]

[pretrain]
{pretrain}

[model]
{model}
"""

PRETRAIN: dict[str, Any] = {
    "seed": 0,
    "steps": 10,
    "rows": 4,
    "row_tokens": 32,
    "learning_rate": 2e-2,
    "embed_learning_rate": 2e-2,
    "weight_decay": 0.01,
    "warmup_steps": 2,
    "decay_steps": 5,
    "clip_norm": 1.0,
    "prompt_weight": 0.1,
    "balance_rate": 1e-2,
    "compute_dtype": "float32",
    "log_every": 5,
    "eval_every": 10,
    "save_every": 10,
}


def recipe_text(**pretrain: Any) -> str:
    """The micro recipe as a TOML file, with fields of [pretrain] changed."""

    def lines(table: dict[str, Any]) -> str:
        return "\n".join(f"{name} = {json.dumps(value)}" for name, value in table.items())

    return RECIPE.format(n_ranks=N_RANKS, pretrain=lines(PRETRAIN | pretrain), model=lines(MODEL))


def micro_recipe(**pretrain: Any) -> config.Recipe:
    """The micro recipe, with fields of [pretrain] changed."""
    return config.Recipe(
        name="micro",
        corpus=config.CorpusConfig("nano", 0, N_RANKS),
        pretrain=config.PretrainConfig(**(PRETRAIN | pretrain)),
        samples=config.SamplesConfig(("abc?", "What is b?"), 8),
        model=MODEL,
    )


def write_corpus(folder: Path, *, seed: int = 0, n_ranks: int = N_RANKS) -> Path:
    """A corpus folder as `nano_corpus.build` leaves it: texts that repeat the alphabet from some letter on."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiktoken.model").write_text(bpe.tiktoken_text([bytes([b]) for b in range(n_ranks)]))
    (folder / "tokenizer_config.json").write_text(json.dumps(nano_corpus.tokenizer_config(n_ranks)))
    tokenizer = Tokenizer.from_dir(folder)
    rng = np.random.default_rng(seed)
    for prefix, count in (("", 60), ("heldout_", 12)):
        tokens: list[int] = []
        offsets = [0]
        for _ in range(count):
            start, length = rng.integers(26), rng.integers(6, 28)
            text = "".join(chr(97 + (start + i) % 26) for i in range(length))
            tokens += [*tokenizer.encode(text), tokenizer.special_ids["[EOS]"]]
            offsets.append(len(tokens))
        np.save(folder / f"{prefix}tokens.npy", np.array(tokens, np.uint16))
        np.save(folder / f"{prefix}mask.npy", np.ones(len(tokens), np.uint8))
        np.save(folder / f"{prefix}offsets.npy", np.array(offsets, np.int64))
    fields: dict[str, Any] = {f.name: 0 for f in dataclasses.fields(nano_corpus.CorpusReport)}
    fields |= {"format": nano_corpus.FORMAT, "seed": seed, "n_ranks": n_ranks, "python": "3.13.0"}
    (folder / "report.json").write_text(json.dumps(fields))
    return folder
