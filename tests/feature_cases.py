"""A run's folder with a tiny target and documents, for the tests of features and vocabulary."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kimijax import checkpoint_writer
from kimijax.config import parse_config
from kimijax.loader import NANO
from kimijax.model import Target, declare_target, initialise
from kimijax.train import draft_recipe, feature_manifest, feature_writer, packing
from kimijax.wiring import Wiring

from . import toy_tokenizer

CONFIG: dict[str, Any] = {
    "model_type": "kimi_k2",
    "vocab_size": 600,
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
    "max_position_embeddings": 512,
    "eos_token_id": 262,
}
TAPS = (1, 2)  # the second is the last state too
WIRING = Wiring(TAPS, 2, 32)
LENGTHS = (5, 3, 17, 2, 41, 9, 11, 48)


# For groups of up to eight devices.
WIDE: dict[str, Any] = CONFIG | {"num_attention_heads": 8, "n_routed_experts": 8, "moe_intermediate_size": 64}


def make_target(seed: int = 0, config: dict[str, Any] = CONFIG) -> Target:
    target = declare_target(parse_config(config), dtype=jnp.dtype(jnp.float32), int4=False)
    return initialise(target, seed)


def write_target(folder: Path, seed: int = 0, config: dict[str, Any] = CONFIG) -> Path:
    """A checkpoint with tokenizer and chat template."""
    checkpoint_writer.save(make_target(seed, config), folder, config)
    toy_tokenizer.write(folder)
    (folder / "chat_template.jinja").write_bytes((NANO / "chat_template.jinja").read_bytes())
    return folder


def make_documents(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> packing.Documents:
    """Documents whose second half is the assistant's."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 500, sum(lengths)).astype(np.uint16)
    mask = np.concatenate([(np.arange(n) >= n // 2).astype(np.uint8) for n in lengths])
    return packing.Documents(tokens, mask, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))


def save_documents(folder: Path, train: packing.Documents, heldout: packing.Documents) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, d in (("", train), ("heldout_", heldout)):
        for name in ("tokens", "mask", "offsets"):
            np.save(folder / f"{prefix}{name}.npy", vars(d)[name])
    (folder / "report.json").write_text("{}")  # finished


def make_run(out: Path, target: Path, /, **tables: dict[str, Any]) -> draft_recipe.DraftRecipe:
    """A run with documents in `corpus`, and its recipe: features in float32, 20 tokens a forward pass."""
    save_documents(out / "corpus", make_documents(), make_documents((4, 7), seed=1))
    recipe = draft_recipe.load_draft_recipe("nano")
    changed: dict[str, dict[str, Any]] = {
        "target": {"model": str(target), "taps": TAPS, "max_tokens": 64},
        "generate": {"enabled": False},
        "features": {"dtype": "float32", "batch_tokens": 20, "shard_mb": 1},
        "vocab": {"size": 300},
    }
    for name, fields in tables.items():
        changed.setdefault(name, {}).update(fields)
    for name, fields in changed.items():
        recipe = dataclasses.replace(recipe, **{name: dataclasses.replace(vars(recipe)[name], **fields)})
    return recipe


def split(documents: packing.Documents) -> list[np.ndarray]:
    """The documents one by one."""
    return np.split(documents.tokens, documents.offsets[1:-1].tolist())


@contextmanager
def small_files() -> Iterator[None]:
    """Files of at most 60 tokens, so that the documents need three: a megabyte would hold them all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            feature_writer, "plan_shards", lambda offsets, *_: feature_manifest.plan_shards(offsets, 10**6 // 60, 1)
        )
        yield
