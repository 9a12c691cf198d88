"""A drafter's training in miniature: a random target, documents that can be learned, their hidden states."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kimijax.config import TargetConfig, parse_config
from kimijax.fingerprint import Contract, TargetFingerprint
from kimijax.model import Target, declare_target, initialise
from kimijax.train import dataset, draft_recipe, feature_manifest, fit_checkpoints, packing
from kimijax.train import features as features_stage
from kimijax.train import fit as fit_stage
from kimijax.train import fitter as trainer
from kimijax.wiring import Wiring

from .micro_run import MODEL

WIRING = Wiring((0, 1, 2), target_layers=2, target_hidden=32)
TARGET_IDS = np.arange(1, 97, 3)  # 32 of 96: a reduced vocabulary

FIT: dict[str, Any] = {
    "seed": 0,
    "epochs": 2,
    "rows": 8,
    "row_tokens": 32,
    "accumulate": 1,
    "ttt_steps": 2,
    "decay": 0.8,
    "loss": "kl",
    "lk_rate": 3.0,
    "normaliser": "all",
    "schedule": "cosine",
    "learning_rate": 2e-2,
    "final_share": 0.1,
    "warmup_share": 0.1,
    "decay_share": 0.3,
    "beta1": 0.9,
    "beta2": 0.95,
    "weight_decay": 0.01,
    "clip_norm": 1.0,
    "compute_dtype": "float32",
    "data_parallel": 1,
    "fsdp": False,
    "log_every": 1,
    "eval_every": 100,
    "save_every": 100,
}
LLAMA: dict[str, Any] = {"kind": "llama", "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "rope_theta": 1e4}
MLA: dict[str, Any] = {"kind": "mla", "n_heads": 0, "n_kv_heads": 0, "head_dim": 0, "rope_theta": 0.0}
FLAGS: dict[str, Any] = {"fc_norm": True, "norm_before_fc": False, "norm_before_residual": False, "norm_output": True}


def recipe(
    head: dict[str, Any] = LLAMA, *, source: str = "files", model: str = "nano", dtype: str = "float32", **fit: Any
) -> draft_recipe.DraftRecipe:
    """A recipe with fields of [fit] changed."""
    r = draft_recipe
    return r.DraftRecipe(
        name="micro",
        target=r.TargetTable(model, "float32", 1, "tp", (0, 1, 2), 32),
        corpus=r.CorpusTable(("nano",), 0, 0, 1, "auto", False),
        generate=r.GenerateTable(False, 0, 0.0, 1.0, 0, 8, 1),
        features=r.FeaturesTable(source, dtype, 64, 1),  # type: ignore[arg-type]
        vocab=r.VocabTable(len(TARGET_IDS)),
        draft=r.DraftTable(**head, mlp_width=32, max_positions=128, **FLAGS, window=0),
        fit=r.FitTable(**(FIT | fit)),
        evaluate=r.EvaluateTable(3, 1, 8, (0.0,), 0),
        export=r.ExportTable(("sglang",), "float32", 1),
    )


@functools.cache
def target() -> Target:
    config = parse_config(MODEL | {"vocab_size": 96})
    return initialise(declare_target(config, dtype=jnp.dtype(jnp.float32), int4=False), 5)


def config() -> TargetConfig:
    return target().config


def documents(count: int = 40, seed: int = 0) -> packing.Documents:
    """Sequences that go on as they began; the first third of each is a prompt."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(10, 33, count)
    tokens = [(rng.integers(96) + 2 * np.arange(n)) % 96 for n in lengths]
    masks = [np.arange(n) >= n // 3 for n in lengths]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return packing.Documents(np.concatenate(tokens).astype(np.uint16), np.concatenate(masks).astype(np.uint8), offsets)


@nnx.jit
def _states(target: Target, ids: jax.Array, positions: jax.Array, segments: jax.Array) -> Any:
    return features_stage.hidden_states(target, ids, positions, segments, WIRING)


class States:
    """Documents with the target's hidden states, as a feature set gives them."""

    def __init__(self, documents: packing.Documents) -> None:
        self._plain = dataset.TokenDocuments(documents)
        self.lengths = self._plain.lengths
        ids = np.zeros((len(self.lengths), 32), np.int32)
        segments = np.full_like(ids, -1)
        for i, n in enumerate(self.lengths):
            ids[i, :n], segments[i, :n] = self._plain.document(i).tokens, 0
        positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
        taps, last = _states(target(), jnp.asarray(ids), jnp.asarray(positions), jnp.asarray(segments))
        self._taps, self._last = {tap: np.asarray(x) for tap, x in taps.items()}, np.asarray(last)

    def document(self, index: int) -> dataset.Document:
        tokens, mask, _, _ = self._plain.document(index)
        n = len(tokens)
        return dataset.Document(tokens, mask, {t: x[index, :n] for t, x in self._taps.items()}, self._last[index, :n])


def identity(recipe: draft_recipe.DraftRecipe, train: packing.Documents) -> fit_checkpoints.Identity:
    """What a run on these documents is."""
    fingerprint = TargetFingerprint({"n_layers": 2, "hidden": 32}, {"norm": "0" * 64})
    draft = recipe.draft.config(config(), WIRING, len(TARGET_IDS))
    contract = Contract(WIRING, fingerprint, None)
    return fit_checkpoints.Identity(
        contract, draft, fit_checkpoints.vocabulary_hash(TARGET_IDS), feature_manifest.documents_hash(train), recipe.fit
    )


def fitter(recipe: draft_recipe.DraftRecipe, updates: int, **arguments: Any) -> trainer.Fitter:
    """The trainer on the random target."""
    return trainer.Fitter(recipe, config(), WIRING, TARGET_IDS, target(), updates=updates, **arguments)


@functools.cache
def train_rows(epochs: int) -> dataset.Rows:
    """Four updates of 8 rows an epoch, the last of which is not full."""
    return dataset.Rows(States(documents()), rows=8, row_tokens=32, seed=0, epochs=epochs)


@functools.cache
def heldout_rows() -> dataset.Rows:
    return dataset.Rows(States(documents(40, seed=1)), rows=8, row_tokens=32, seed=0, shuffle=False)


def train(
    fitter: trainer.Fitter, recipe: draft_recipe.DraftRecipe, folder: Path, stop: Callable[[], bool]
) -> fit_checkpoints.FitState:
    """`fit.run` on the documents, as many epochs as the recipe has."""
    return fit_stage.run(
        fitter, train_rows(recipe.fit.epochs), heldout_rows(), identity(recipe, documents()), folder, stop
    )


RESUMED: dict[str, Any] = {"epochs": 3, "log_every": 2, "eval_every": 6, "save_every": 1}  # of 12 updates


def train_alone(folder: str) -> None:
    """The run that is killed: a process of its own."""
    settings = recipe(**RESUMED)
    train(fitter(settings, 12), settings, Path(folder), lambda: False)
