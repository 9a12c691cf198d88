"""Drafts that are right by construction, and directories of them with one thing wrong.

`ridge_draft` fits a random target: its fc is a ridge regression from the taps at a position to the last hidden state of
the next one, turned by a random rotation, so that streams, their slots, fc, the vocabulary and the norm before feedback
all matter. Its attention does nearly nothing. `lag_draft` is written by hand for a made-up target: its attention reads
the token two positions back, so that rotary positions, the alignment of tokens and the residual's norm matter too.
"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kimijax import checkpoint
from kimijax.config import parse_config
from kimijax.draft_config import DraftConfig, LlamaAttentionConfig
from kimijax.draft_export import save_draft
from kimijax.drafter import Drafter, declare_drafter, initialise_drafter
from kimijax.model import Target, declare_target, initialise
from kimijax.names import parameters
from kimijax.safetensors_io import FilePool, read_header
from kimijax.teacher_forced import LAST_NORMED, STEPS, Observation
from kimijax.unroll import valid_rows
from kimijax.wiring import Wiring

from .golden import FAMILIES, write_tensors

F32 = jnp.dtype(jnp.float32)
LAYERS, TAPS = 8, (2, 4, 5)
WIRING = Wiring(TAPS, LAYERS, 64)
TARGET_CONFIG: dict[str, Any] = {
    **FAMILIES["deepseek_v3"],
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": LAYERS,
}
N_DRAFT = 96


def random_target(seed: int = 0) -> Target:
    """A dense target with strong attention: its hidden states drift slowly, so that the next one can be guessed."""
    target = initialise(declare_target(parse_config(TARGET_CONFIG), dtype=F32, int4=False), seed)
    for layer in target.layers:
        layer.attention.o.set_value(layer.attention.o[...] * 6)
    target.lm_head.set_value(target.lm_head[...] * 8)
    return target


def random_ids(rows: int, seed: int) -> np.ndarray:
    """int32 [rows, 32]; without the ids below 8."""
    return np.random.default_rng(seed).integers(8, 128, (rows, 32)).astype(np.int32)


def ridge_draft(target: Target) -> Drafter:
    """See the module."""
    graph, state = nnx.split(target)

    @jax.jit
    def run(state: nnx.State, ids: jax.Array) -> tuple[jax.Array, dict[int, jax.Array]]:
        out = nnx.merge(graph, state)(ids, taps=(*TAPS, LAYERS))
        return jnp.argmax(out.logits, axis=-1), out.taps

    found: tuple[np.ndarray, dict[int, np.ndarray]] = jax.tree.map(np.asarray, run(state, random_ids(128, 0)))
    choice, taps = found
    d = WIRING.target_hidden
    x = np.concatenate([taps[t][:, 2:-1] for t in TAPS], axis=-1).reshape(-1, WIRING.fused_width).astype(np.float64)
    last = taps[LAYERS][:, 3:].reshape(-1, d).astype(np.float64)
    last /= np.sqrt(np.mean(last**2, axis=-1, keepdims=True))
    rng = np.random.default_rng(1)
    turn = np.linalg.qr(rng.standard_normal((d, d)))[0]
    gram = x.T @ x
    fc = np.linalg.solve(gram + np.eye(len(gram)) * np.trace(gram) * 1e-3 / len(gram), x.T @ (last @ turn)).T
    ids = np.sort(np.argsort(-np.bincount(choice.ravel(), minlength=128), kind="stable")[:N_DRAFT])
    attention = LlamaAttentionConfig(n_heads=8, n_kv_heads=8, head_dim=8, rope_theta=1e4)
    config = DraftConfig(attention, 128, N_DRAFT, d, d, len(TAPS), 96, 1e-5, 512)
    drafter = initialise_drafter(declare_drafter(config, WIRING, dtype=F32), target, ids, 0)
    drafter.fc.set_value(jnp.asarray(fc, F32))
    drafter.attention.o.set_value(drafter.attention.o[...] * 0.02)
    drafter.mlp.down.set_value(drafter.mlp.down[...] * 0.02)
    weight = rng.choice([-1.0, 1.0], d) * rng.uniform(0.5, 2.0, d)  # what the head undoes, and a second norm does not
    drafter.norm.set_value(jnp.asarray(weight, F32))
    head = np.asarray(target.lm_head[...], np.float64)[ids] * np.asarray(target.norm[...], np.float64)
    drafter.lm_head.set_value(jnp.asarray(head @ turn / weight, F32))
    return drafter


@dataclass(frozen=True)
class Workshop:
    """A target's directory and a right draft's, and copies of the latter with faults."""

    target: Target
    drafter: Drafter
    root: Path

    @classmethod
    def build(cls, root: Path) -> "Workshop":
        target = random_target()
        drafter = ridge_draft(target)
        checkpoint.save(target, root / "target", {**TARGET_CONFIG, "torch_dtype": "float32"}, dtype=np.float32)
        save_draft(drafter, root / "right", "vllm")
        (root / "text.json").write_text(json.dumps(random_ids(16, 5).tolist()))
        return cls(target, drafter, root)

    @property
    def text(self) -> Path:
        return self.root / "text.json"

    def faulty(
        self,
        name: str,
        *,
        config: Callable[[dict[str, Any]], None] | None = None,
        tensors: Callable[[dict[str, np.ndarray]], None] | None = None,
    ) -> Path:
        """A copy of the right draft whose parsed config and tensors went through the functions."""
        data = json.loads((self.root / "right" / "config.json").read_text())
        with FilePool() as pool:
            arrays = {t.name: pool.read(t) for t in read_header(self.root / "right" / "model.safetensors")}
        if config:
            config(data)
        if tensors:
            tensors(arrays)
        out = self.root / name
        out.mkdir()
        (out / "config.json").write_text(json.dumps(data))
        write_tensors(arrays, out, 1)
        return out


def set_ids(ids: list[int]) -> Callable[[dict[str, Any]], None]:
    """A change of a config: other layer ids, wherever it has some."""

    def change(data: dict[str, Any]) -> None:
        data["eagle_aux_hidden_state_layer_ids"] = ids
        data["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids

    return change


# ---- a draft written by hand -----------------------------------------------------------------------------------------

_WIDTH, _VOCAB, _CODES = 48, 32, 8
_TOKEN, _CONST, _CHOICE, _CODE = 0, 12, 16, 24  # dims: class of a token, a constant, class of the choice, the code
_LAG_CONFIG = dataclasses.replace(parse_config(TARGET_CONFIG), hidden=_WIDTH, vocab_size=_VOCAB)
_CLASS = np.asarray((2, 3, 1, 2))  # choice's class of a token's class
_BITS = np.arange(_CODES)[:, None] >> np.arange(3) & 1  # of each code; a tap shows one of them


def lag_target() -> Target:
    """Tables only. A token is a class and a code, 8 * class + code; its embedding shows the class."""
    target = declare_target(_LAG_CONFIG, dtype=F32, int4=False)
    embed = np.zeros((_VOCAB, _WIDTH), np.float32)
    embed[np.arange(_VOCAB), _TOKEN + np.arange(_VOCAB) // _CODES] = 1.0
    embed[:, _CONST] = 1.0
    target.embed.set_value(jnp.asarray(embed))
    target.lm_head.set_value(jnp.zeros((_VOCAB, _WIDTH), F32))
    return target


def _patterns() -> np.ndarray:
    """What each tap shows for each value of its bit: [LAYERS + 1, 2, _WIDTH]."""
    return np.random.default_rng(3).standard_normal((LAYERS + 1, 2, _WIDTH))


def lag_draft(target: Target) -> Drafter:
    """Proposes the class that belongs to the token two positions before the proposed one, and the document's code.

    The scores of its one head are sums of cos(f (distance - 2)), highest two rows back. The residual must be the normed
    features, since `hidden_norm` is what removes the class proposed in the step before.
    """
    attention = LlamaAttentionConfig(n_heads=1, n_kv_heads=1, head_dim=16, rope_theta=10.0)
    config = DraftConfig(attention, _VOCAB, 24, _WIDTH, _WIDTH, 3, 8, 1e-6, 512, norm_before_residual=True)
    wiring = Wiring(TAPS, LAYERS, _WIDTH)
    drafter = initialise_drafter(declare_drafter(config, wiring, dtype=F32), target, range(8, 32), 0)
    values = {path: np.zeros(p.get_value().shape, np.float32) for path, p in parameters(drafter).items()}
    for norm in ("embed_norm", "hidden_norm", "post_norm", "norm"):
        values[norm,] += 1.0
    frequencies = 10.0 ** (-np.arange(8) / 8)
    values["attention", "q"][0, :8, _CONST] = 40 * np.cos(2 * frequencies)
    values["attention", "q"][0, 8:, _CONST] = -40 * np.sin(2 * frequencies)
    values["attention", "k"][0, :8, _CONST] = 1.0
    values["attention", "v"][0, :4, _TOKEN : _TOKEN + 4] = np.eye(4)
    for token, choice in enumerate(_CLASS):
        values["attention", "o"][_CHOICE + choice, 0, token] = 1.0
    for slot, tap in enumerate(TAPS):  # each block finds its bit in its own tap, and votes for the codes that have it
        votes = _BITS[:, slot, None] == np.arange(2)
        block = votes @ np.linalg.pinv(_patterns()[tap].T)
        values["fc",][_CODE : _CODE + _CODES, slot * _WIDTH : (slot + 1) * _WIDTH] = block
    values["hidden_norm",][_CHOICE : _CHOICE + 4] = 0.0
    values["norm",][_CODE : _CODE + _CODES] = -1.0  # the head undoes it; a state fed back through it does not
    classes, codes = np.divmod(np.arange(8, 32), _CODES)
    values["lm_head",][np.arange(24), _CHOICE + classes] = 10.0
    values["lm_head",][np.arange(24), _CODE + codes] = -10.0
    filled = [(path, p.replace(jnp.asarray(values[path]))) for path, p in parameters(drafter).items()]
    nnx.update(drafter, nnx.from_flat_state(filled))
    return drafter


def lag_observation(rows: int = 8, length: int = 32) -> Observation:
    """Documents of random tokens and one code each, on a target that chooses as `lag_draft` proposes."""
    rng = np.random.default_rng(4)
    ids = rng.integers(0, _VOCAB, (rows, length)).astype(np.int32)
    code = rng.integers(0, _CODES, (rows, 1))
    before = np.pad(ids[:, :-2], ((0, 0), (2, 0)))
    choice = (_CODES * _CLASS[before // _CODES] + code).astype(np.int32)
    streams: dict[int, jax.Array] = {}
    for tap in range(LAYERS + 1):  # other taps show a bit of their own
        bit = _BITS[code, TAPS.index(tap)] if tap in TAPS else rng.integers(0, 2, (rows, 1))
        shown = _patterns()[tap][np.broadcast_to(bit, ids.shape)]
        streams[tap] = jnp.asarray(shown + 0.05 * rng.standard_normal(shown.shape), F32)
    segments = jnp.zeros(ids.shape, jnp.int32)
    mask = jnp.ones(ids.shape, jnp.bool_)
    return Observation(
        jnp.asarray(ids),
        segments,
        jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], ids.shape),
        valid_rows(mask, segments, STEPS),
        {**streams, LAST_NORMED: streams[LAYERS]},
        jnp.asarray(choice),
        jax.nn.softmax(8.0 * jax.nn.one_hot(choice, _VOCAB), axis=-1),
    )
