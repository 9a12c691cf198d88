"""The EAGLE-3 head against a NumPy reference in every variant, and its programs against each other."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimijax.config import parse_config
from kimijax.draft_attention import llama_frequencies
from kimijax.draft_checkpoint import load_draft
from kimijax.draft_config import DraftConfig, LlamaAttentionConfig, mla_attention, parse_draft_config
from kimijax.drafter import (
    Borrowed,
    Drafter,
    borrow,
    declare_drafter,
    draft_cache,
    initialise_drafter,
    set_vocabulary,
)
from kimijax.errors import ConfigError
from kimijax.model import Target, declare_target
from kimijax.names import parameters
from kimijax.wiring import Wiring

from . import draft_reference as ref
from .golden import FAMILIES, write_tensors

WIRING = Wiring((2, 5, 7), target_layers=10, target_hidden=ref.TARGET_WIDTH)
LIMIT = 1e-5  # largest error relative to the largest value
T = 11  # tokens of a sequence

EAGLE31 = {"fc_norm": True, "norm_output": True}
SCALED3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0, "beta_slow": 1.0, "original_max_position_embeddings": 64}
WINDOW = {"layer_types": ["sliding_attention"], "sliding_window": 4, "use_sliding_window": True}

VARIANTS: dict[str, tuple[ref.Config, dict[str, Any]]] = {
    "llama": (ref.LLAMA, {}),
    "llama eagle-3.1": (ref.LLAMA, EAGLE31),
    "llama norm_before_residual": (ref.LLAMA, {"norm_before_residual": True}),
    "llama both norms before fc": (ref.LLAMA, {"norm_before_fc": True, "fc_norm": True}),
    "llama window": (ref.LLAMA, WINDOW),
    "llama rope llama3": (ref.LLAMA, {"rope_scaling": SCALED3}),
    "llama rope yarn": (ref.LLAMA, {"rope_scaling": YARN}),
    "llama full vocabulary": (ref.LLAMA, {"draft_vocab_size": None}),
    "llama of another width": (ref.LLAMA, {"target_hidden_size": 64, "hidden_size": 48}),
    "mla": (ref.MLA, {}),
    "mla eagle-3.1": (ref.MLA, {**EAGLE31, "norm_before_residual": True}),
    "mla without q rank": (ref.MLA, {"q_lora_rank": None, "draft_vocab_size": 40, "rope_scaling": None}),
}


def tiny_target(tensors: Mapping[str, np.ndarray], seed: int = 1) -> Target:
    """A target of which only embedding and head are filled: the embedding with the draft's, if it is as wide."""
    config = dataclasses.replace(parse_config(FAMILIES["deepseek_v3"]), n_layers=10)
    target = declare_target(config, dtype=jnp.dtype(jnp.float32), int4=False)
    rng = np.random.default_rng(seed)
    shape = (config.vocab_size, config.hidden)
    embed = tensors.get("embed_tokens.weight", np.empty(0))
    embed = embed if embed.shape == shape else rng.standard_normal(shape).astype(np.float32)
    target.embed.set_value(jnp.asarray(embed))
    target.lm_head.set_value(jnp.asarray(rng.standard_normal(shape).astype(np.float32) / 8))
    return target


def write_draft(directory: Path, config: ref.Config, tensors: Mapping[str, np.ndarray]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    write_tensors(dict(tensors), directory, 1)
    return directory


def make(directory: Path, variant: str) -> tuple[Drafter, ref.Draft]:
    """A variant, loaded from files, and its reference."""
    base, changes = VARIANTS[variant]
    config = {**base, **changes}
    tensors = ref.random_tensors(config)
    drafter = load_draft(write_draft(directory, config, tensors), WIRING, tiny_target(tensors), dtype=jnp.float32)
    return drafter, ref.Draft(config, tensors)


def random_inputs(seed: int = 2) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Two rows of next tokens [2, T], and taps by number [2, T, D]; one that the wiring does not ask for."""
    rng = np.random.default_rng(seed)
    taps = {tap: rng.standard_normal((2, T, ref.TARGET_WIDTH)).astype(np.float32) * (1 + tap) for tap in (7, 2, 10, 5)}
    return rng.integers(0, ref.VOCAB, (2, T)), taps


def relative_error(found: Any, right: np.ndarray) -> float:
    return float(np.abs(np.asarray(found, np.float64) - right).max() / np.abs(right).max())


class Programs:
    """A drafter's programs, compiled."""

    def __init__(self, drafter: Drafter) -> None:
        graph, self.state = nnx.split(drafter)
        self.drafter = drafter
        self._fuse = jax.jit(lambda s, taps: nnx.merge(graph, s).fuse(taps))
        self._forward = jax.jit(lambda s, *a: nnx.merge(graph, s).forward(*a))
        self._decode = jax.jit(lambda s, *a: self._extend(nnx.merge(graph, s), *a))
        self._step = jax.jit(lambda s, *a: nnx.merge(graph, s).step(*a))

    @staticmethod
    def _extend(d: Drafter, ids: Any, features: Any, start: Any, cache: Any):
        hidden, cache = d.decode(ids, features, start, cache)
        return hidden.feedback, d.logits(hidden.normed), cache

    def fuse(self, taps: Any):
        return self._fuse(self.state, taps)

    def forward(self, ids: Any, features: Any, positions: Any = None, segments: Any = None):
        return self._forward(self.state, jnp.asarray(ids, jnp.int32), features, positions, segments)

    def decode(self, ids: Any, features: Any, start: Any, cache: Any):
        return self._decode(self.state, jnp.asarray(ids, jnp.int32), features, jnp.asarray(start, jnp.int32), cache)

    def step(self, ids: Any, features: Any, start: Any, cache: Any):
        return self._step(self.state, jnp.asarray(ids, jnp.int32), features, jnp.asarray(start, jnp.int32), cache)


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_reference(variant: str, tmp_path: Path) -> None:
    """Features, feedback and logits of a first and a second step; one row of the batch is two packed documents."""
    drafter, reference = make(tmp_path, variant)
    ids, taps = random_inputs()
    segments = np.asarray([[0] * T, [0] * 4 + [1] * (T - 4)], np.int32)
    positions = np.asarray([range(T), [*range(4), *range(T - 4)]], np.int32)
    programs = Programs(drafter)
    features = programs.fuse(taps)
    first = programs.forward(ids, features, positions, segments)
    second = programs.forward(ids, first.feedback, positions, segments)
    assert first.logits.dtype == jnp.float32
    for b in range(2):
        right = reference.fuse([taps[t][b] for t in WIRING.taps])
        assert relative_error(features[b], right) < LIMIT
        for found in (first, second):
            right, logits = reference.forward(ids[b], right, segments[b])
            assert relative_error(found.feedback[b], right) < LIMIT
            assert relative_error(found.logits[b], logits) < LIMIT


@pytest.mark.parametrize("variant", ["llama window", "mla eagle-3.1"])
def test_decode_equals_forward_token_by_token(variant: str, tmp_path: Path) -> None:
    """One row at a time over a cache, requests at different positions, gives the rows of the whole forward pass."""
    programs = Programs(make(tmp_path, variant)[0])
    ids, taps = random_inputs()
    features = np.asarray(programs.fuse(taps))
    right = programs.forward(ids, features)
    cache = draft_cache(programs.drafter.config, 2, T + 3, jnp.dtype(jnp.float32))
    behind = 3  # the second request is three tokens late
    for t in range(T + behind):
        at = np.asarray([min(t, T - 1), max(t - behind, 0)], np.int64)
        rows = np.arange(2)
        out, cache = programs.step(ids[rows, at], features[rows, at], at, cache)
        for b in range(2):
            assert relative_error(out.feedback[b], np.asarray(right.feedback[b, at[b]])) < LIMIT
            assert relative_error(out.logits[b], np.asarray(right.logits[b, at[b]])) < LIMIT


@pytest.mark.parametrize("variant", ["llama eagle-3.1", "mla"])
def test_a_chain_and_its_rollback_equal_the_reference(variant: str, tmp_path: Path) -> None:
    """Draft three tokens after a prompt, then extend over two accepted ones: their rows are rebuilt from true features,
    and a stale row beyond them is not seen."""
    drafter, reference = make(tmp_path, variant)
    programs = Programs(drafter)
    ids, taps = random_inputs()
    features = np.asarray(programs.fuse(taps))
    prompt, drafts = 6, [17, 5, 99]
    right = reference.chain(ids[0, :prompt], features[0, :prompt], drafts)
    cache = draft_cache(drafter.config, 2, T, jnp.dtype(jnp.float32))
    feedback, logits, cache = programs.decode(ids[:, :prompt], features[:, :prompt], [0, 0], cache)
    found = [(feedback[0, -1], logits[0, -1])]
    last = feedback[:, -1]
    for j, token in enumerate(drafts):
        out, cache = programs.step([token] * 2, last, [prompt + j] * 2, cache)
        last = out.feedback
        found.append((out.feedback[0], out.logits[0]))
    for (feedback, logits), (right_feedback, right_logits) in zip(found, right, strict=True):
        assert relative_error(feedback, right_feedback) < LIMIT
        assert relative_error(logits, right_logits) < LIMIT
    accepted = slice(prompt, prompt + 2)
    feedback, logits, _ = programs.decode(ids[:, accepted], features[:, accepted], [prompt] * 2, cache)
    right_feedback, right_logits = reference.forward(ids[0, : prompt + 2], features[0, : prompt + 2])
    assert relative_error(feedback[0], right_feedback[accepted]) < LIMIT
    assert relative_error(logits[0], right_logits[accepted]) < LIMIT


def test_blocks_of_queries_equal_one_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that a whole block cannot see are left out, with and without a window."""
    ids, taps = random_inputs()
    for variant in ("llama", "llama window"):
        drafter, _ = make(tmp_path / variant.replace(" ", "-"), variant)
        features = Programs(drafter).fuse(taps)
        whole = Programs(drafter).forward(ids, features)
        with monkeypatch.context() as patch:
            patch.setattr("kimijax.chained_attention.QUERY_BLOCK", 3)
            patch.setattr("kimijax.chained_attention.MAX_BLOCKS", 8)
            blocks = Programs(drafter).forward(ids, features)
        assert relative_error(blocks.logits, np.asarray(whole.logits)) < 1e-6


def test_mla_window_is_the_same_in_both_forms(tmp_path: Path) -> None:
    loaded, _ = make(tmp_path, "mla")
    config = dataclasses.replace(loaded.config, window=3)
    drafter = declare_drafter(config, WIRING, dtype=jnp.dtype(jnp.float32))
    nnx.update(drafter, nnx.state(loaded))
    programs = Programs(drafter)
    ids, taps = random_inputs()
    features = np.asarray(programs.fuse(taps))
    right = programs.forward(ids, features)
    cache = draft_cache(config, 2, T, jnp.dtype(jnp.float32))
    _, logits, _ = programs.decode(ids, features, [0, 0], cache)
    assert relative_error(logits, np.asarray(right.logits)) < LIMIT
    full = Programs(loaded).forward(ids, features)
    assert relative_error(right.logits[:, :3], np.asarray(full.logits[:, :3])) < LIMIT
    assert relative_error(right.logits[:, 3:], np.asarray(full.logits[:, 3:])) > 1e-3


def test_fuse_takes_exactly_the_wirings_taps(tmp_path: Path) -> None:
    """No array passes for features by its width: neither a missing tap, nor a narrow one, nor unfused taps."""
    drafter, _ = make(tmp_path, "llama")
    ids, taps = random_inputs()
    ids = jnp.asarray(ids, jnp.int32)
    with pytest.raises(ValueError, match=r"taps: found \[2, 5, 10\], expected the wiring's \(2, 5, 7\)"):
        drafter.fuse({k: jnp.asarray(v) for k, v in taps.items() if k != 7})
    narrow = {k: jnp.asarray(v[..., :32] if k == 5 else v) for k, v in taps.items()}
    with pytest.raises(ValueError, match="tap 5: found width 32, expected 64"):
        drafter.fuse(narrow)
    unfused = jnp.concatenate([jnp.asarray(taps[t]) for t in WIRING.taps], axis=-1)
    with pytest.raises(ValueError, match=r"features: found \[2, 11, 192\], expected \[2, 11, 64\]: taps go through"):
        drafter.forward(ids, unfused)


def test_one_tap_of_the_draft_s_own_width_is_fused_too(tmp_path: Path) -> None:
    """Where the fused width happens to be the draft's, a test on widths would skip fc."""
    config = dict(ref.LLAMA)
    tensors = ref.random_tensors(config, n_taps=1)
    wiring = Wiring((5,), target_layers=10, target_hidden=64)
    drafter = load_draft(write_draft(tmp_path, config, tensors), wiring, tiny_target(tensors), dtype=jnp.float32)
    _, taps = random_inputs()
    found = drafter.fuse({5: jnp.asarray(taps[5])})
    assert relative_error(found[0], taps[5][0].astype(np.float64) @ tensors["fc.weight"].T) < LIMIT


def small_config(**changes: Any) -> DraftConfig:
    attention = LlamaAttentionConfig(n_heads=4, n_kv_heads=2, head_dim=16, rope_theta=1e4)
    sizes = {"hidden": 64, "target_hidden": 64, "n_taps": 3, "mlp_width": 96, "norm_eps": 1e-5, "max_positions": 512}
    return DraftConfig(**{"attention": attention, "vocab_size": 128, "draft_vocab_size": 40, **sizes, **changes})


def test_published_sizes() -> None:
    """Parameters of Kimi-K2.5's published drafts: the MLA head, and TorchSpec's Llama head; the output head apart."""
    llama = LlamaAttentionConfig(n_heads=64, n_kv_heads=64, head_dim=128, rope_theta=1e6)
    family = dataclasses.replace(
        parse_config(FAMILIES["kimi_k25"]), n_heads=64, q_lora_rank=1536, kv_lora_rank=512, nope_dim=128, rope_dim=64
    )
    sizes: dict[str, Any] = {"hidden": 7168, "norm_eps": 1e-5, "max_positions": 262_144}
    mla = mla_attention(dataclasses.replace(family, v_dim=128), mlp_width=18432, **sizes)
    wiring = Wiring.default(61, 7168)
    for attention, width, billions in ((mla, 18432, 0.667), (llama, 12288, 0.829)):
        config = DraftConfig(attention, 163_840, 163_840, target_hidden=7168, n_taps=3, mlp_width=width, **sizes)
        drafter = declare_drafter(config, wiring, dtype=jnp.dtype(jnp.bfloat16), own_head=False)
        count = sum(p.get_value().size for p in parameters(drafter).values())
        assert count / 1e9 == pytest.approx(billions, abs=5e-4)


def test_a_wiring_or_table_that_does_not_fit_is_refused() -> None:
    config, f32 = small_config(), jnp.dtype(jnp.float32)
    two = Wiring((2, 5), target_layers=10, target_hidden=64)
    with pytest.raises(ConfigError, match=r"wiring \(taps, target_hidden\): found \(2, 64\), expected \(3, 64\)"):
        declare_drafter(config, two, dtype=f32)
    with pytest.raises(ConfigError, match="lm_head: found 'borrowed by a draft of 40 tokens"):
        declare_drafter(config, WIRING, dtype=f32, own_head=False)
    other = small_config(hidden=48)
    with pytest.raises(ConfigError, match="embedding: found 'borrowed from a target of width 64'"):
        declare_drafter(other, WIRING, dtype=f32, own_embed=False)
    with pytest.raises(ConfigError, match="draft_vocab_size: found 129"):
        small_config(draft_vocab_size=129)
    with pytest.raises(ConfigError, match="window: found 0"):
        small_config(window=0)
    with pytest.raises(ConfigError, match="n_heads, n_kv_heads, head_dim"):
        small_config(attention=LlamaAttentionConfig(n_heads=4, n_kv_heads=3, head_dim=16, rope_theta=1e4))
    mla = mla_attention(parse_config(FAMILIES["kimi_k2"]), hidden=32, mlp_width=96, norm_eps=1e-5, max_positions=512)
    with pytest.raises(ConfigError, match=r"attention.hidden: found 32, expected hidden \(64\)"):
        small_config(attention=mla)


def test_initialise_borrows_what_is_not_trained() -> None:
    """What is borrowed is the target's own array, and no parameter; the rest depends on the seed alone."""
    target, f32 = tiny_target({}), jnp.dtype(jnp.float32)
    ids = np.arange(3, 123, 3)
    drafters = [
        initialise_drafter(declare_drafter(small_config(), WIRING, dtype=f32), target, ids, seed) for seed in (0, 0, 1)
    ]
    a, b, c = [{path: np.asarray(p.get_value()) for path, p in parameters(d).items()} for d in drafters]
    assert ("embed",) not in a
    assert ("lm_head",) in a
    for path, value in a.items():
        np.testing.assert_array_equal(value, b[path])
        assert np.array_equal(value, c[path]) == str(path[-1]).endswith("norm"), path
    assert isinstance(drafters[0].embed, Borrowed)
    assert drafters[0].embed.get_value() is target.embed.get_value()
    assert a["attention", "q"].std() == pytest.approx(128**-0.5, rel=0.05)
    np.testing.assert_array_equal(drafters[0].to_target(jnp.asarray([[0, 39]])), [[3, 120]])


def test_borrow_and_vocabulary_refuse_what_does_not_fit() -> None:
    drafter = declare_drafter(small_config(vocab_size=200), WIRING, dtype=jnp.dtype(jnp.float32))
    with pytest.raises(ConfigError, match=r"target \(vocab_size, hidden\): found \(128, 64\), expected \(200, 64\)"):
        borrow(drafter, tiny_target({}))
    with pytest.raises(ConfigError, match=r"target_ids: found '3 ids', expected 40 ids"):
        set_vocabulary(drafter, [1, 2, 3])
    with pytest.raises(ConfigError, match="draft ids 4 and 5 stand for 4 and 4"):
        set_vocabulary(drafter, [0, 1, 2, 3, 4, *range(4, 39)])
    with pytest.raises(ConfigError, match="ids from 0 to 199; draft id 39 stands for 200"):
        set_vocabulary(drafter, range(161, 201))


@pytest.mark.parametrize("scaling", [None, SCALED3, YARN])
def test_llama_frequencies(scaling: dict[str, Any] | None, tmp_path: Path) -> None:
    """At a published head size, where every part of the ramps has pairs."""
    changes = {"head_dim": 128, "rope_theta": 5e5, "rope_scaling": scaling and {**scaling}}
    if scaling:
        changes["rope_scaling"]["original_max_position_embeddings"] = 8192
    config = {**ref.LLAMA, **changes}
    attention = parse_draft_config(config, WIRING).attention
    assert isinstance(attention, LlamaAttentionConfig)
    found, gain = llama_frequencies(attention)
    right, right_gain = ref.llama_frequencies(config)
    np.testing.assert_allclose(found, right, rtol=1e-6)
    assert gain == pytest.approx(right_gain)
