"""Published draft files: the names of all producers, every strictness rule, tables of the draft's or the target's."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kimijax.draft_checkpoint import canonical_name, load_draft
from kimijax.draft_export import save_draft
from kimijax.drafter import Borrowed, Drafter
from kimijax.errors import CheckpointError, ConfigError
from kimijax.names import parameters
from kimijax.safetensors_io import FilePool, read_header
from kimijax.wiring import Wiring

from . import draft_reference as ref
from .test_drafter import EAGLE31, WIRING, tiny_target, write_draft

Tensors = dict[str, np.ndarray]


def stored(directory: Path) -> Tensors:
    """The tensors of a directory, in the order of the file."""
    out: Tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        with FilePool() as pool:
            out |= {t.name: pool.read(t) for t in read_header(file)}
    return out


def loaded(
    directory: Path, config: ref.Config, tensors: Tensors, *, lent: Tensors | None = None, **options: Any
) -> Drafter:
    """A draft written and loaded, on a target whose embedding is that of `lent`, by default of the tensors."""
    target = tiny_target(tensors if lent is None else lent)
    return load_draft(write_draft(directory, config, tensors), WIRING, target, dtype=jnp.float32, **options)


def fails(directory: Path, config: ref.Config, tensors: Tensors, **options: Any) -> str:
    """The message with which loading fails; no parameter is read before it does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kimijax.draft_checkpoint.read_leaves", lambda *_, **__: pytest.fail("arrays were read"))
        with pytest.raises(CheckpointError) as error:
            loaded(directory, config, tensors, **options)
    return str(error.value)


def without(tensors: Tensors, *names: str) -> Tensors:
    return {name: value for name, value in tensors.items() if name not in names}


def test_names_of_all_producers_are_one() -> None:
    table = {
        "midlayer.hidden_norm.weight": "midlayer.hidden_norm.weight",
        "layers.0.hidden_norm.weight": "midlayer.hidden_norm.weight",
        "model.layers.0.mlp.up_proj.weight": "midlayer.mlp.up_proj.weight",
        "model.midlayer.mlp.up_proj.weight": "midlayer.mlp.up_proj.weight",
        "model.fc.weight": "fc.weight",
        "aux_norm_low.weight": "fc_norm.0.weight",
        "aux_norm_mid.weight": "fc_norm.1.weight",
        "aux_norm_high.weight": "fc_norm.2.weight",
        "layers.1.mlp.up_proj.weight": "layers.1.mlp.up_proj.weight",
    }
    assert {name: canonical_name(name) for name in table} == table


def test_vllm_names_load_as_sglang_names_do(tmp_path: Path) -> None:
    config = {**ref.LLAMA, **EAGLE31}
    tensors = ref.random_tensors(config)
    right = parameters(loaded(tmp_path / "sglang", config, tensors))
    legacy = ("low", "mid", "high")
    renamed = {
        name.replace("midlayer.", "model.layers.0."): value for name, value in tensors.items() if "fc_norm" not in name
    } | {f"aux_norm_{place}.weight": tensors[f"fc_norm.{i}.weight"] for i, place in enumerate(legacy)}
    found = parameters(loaded(tmp_path / "vllm", config, renamed))
    assert found.keys() == right.keys()
    for path, param in found.items():
        np.testing.assert_array_equal(param.get_value(), right[path].get_value())
    np.testing.assert_array_equal(found["fc_norm",].get_value()[2], tensors["fc_norm.2.weight"])


def test_every_fault_is_in_one_error(tmp_path: Path) -> None:
    """Missing, superfluous, misshapen, mistyped and wrong tensors together, before a parameter is read."""
    tensors = ref.random_tensors(ref.LLAMA)
    tensors = without(tensors, "norm.weight", "d2t")
    tensors["midlayer.mlp.experts.0.up_proj.weight"] = tensors["fc.weight"]
    tensors["mask_hidden"] = tensors["fc.weight"][:1]
    tensors["layers.0.hidden_norm.weight"] = tensors["midlayer.hidden_norm.weight"]
    tensors["fc.weight"] = np.ascontiguousarray(tensors["fc.weight"][:, :64])
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int32)
    message = fails(tmp_path, ref.LLAMA, tensors, lent=ref.random_tensors(ref.LLAMA, seed=9))
    for part in (
        "missing (2):",
        "  norm.weight: expected BF16 or F16 or F32 [64]",
        "  d2t: expected I64 or I32 [40]",
        "superfluous (3):",
        "midlayer.mlp.experts.0.up_proj.weight: no parameter of the drafter takes it",
        "mask_hidden: no parameter of the drafter takes it",
        "hidden_norm.weight: the same tensor as ",
        "misshapen (1):\n  fc.weight: found [64, 64], expected [64, 192]",
        "mistyped (1):\n  lm_head.weight: found I32, expected BF16 or F16 or F32",
        "wrong values (1):\n  embed_tokens.weight: 128 of 128 rows differ from the target's embedding",
    ):
        assert part in message


def _d2t(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensors], Tensors]:
    return lambda t: {**t, "d2t": change(t["d2t"].copy())}


def _put(i: int, value: int) -> Callable[[np.ndarray], np.ndarray]:
    def change(offsets: np.ndarray) -> np.ndarray:
        offsets[i] = value
        return offsets

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_d2t(_put(39, 89)), "expected ids from 0 to 127; draft id 39 stands for 128"),
        (_d2t(_put(0, -1)), "expected ids from 0 to 127; draft id 0 stands for -1"),
        (_d2t(np.zeros_like), "t2d: found 40 target ids"),
        (_d2t(lambda d: d + np.arange(40)), "it holds absolute ids: subtract 0, 1, 2, ... from them"),
        (_d2t(lambda d: d[::-1].copy()), "expected strictly ascending ids"),
        (_d2t(lambda d: d.astype(np.float32)), "d2t: found F32, expected I64 or I32"),
        (lambda t: {**t, "t2d": ~t["t2d"]}, "t2d: found 88 target ids, 0 of which are among the 40 of d2t"),
        (lambda t: {**t, "t2d": t["t2d"][:64].copy()}, "t2d: found [64], expected [128]"),
        (lambda t: without(t, "lm_head.weight"), "lm_head.weight: expected BF16 or F16 or F32 [40, 64]"),
    ],
)
def test_a_wrong_vocabulary_is_refused(change: Callable[[Tensors], Tensors], message: str, tmp_path: Path) -> None:
    """Offsets out of range, falling, absolute or absent, a mask of other tokens; a reduced head that is not there."""
    tensors = change(ref.random_tensors(ref.LLAMA))
    assert message in fails(tmp_path, ref.LLAMA, tensors)


def test_offsets_of_a_worked_example(tmp_path: Path) -> None:
    """Kept tokens 2, 5, 6, 11: d2t is 2, 4, 4, 8; draft id 3 means token 11."""
    config = {**ref.LLAMA, "draft_vocab_size": 4}
    tensors = {**ref.random_tensors(config), "d2t": np.asarray([2, 4, 4, 8])}
    drafter = loaded(tmp_path, config, without(tensors, "t2d"))
    np.testing.assert_array_equal(drafter.to_target(jnp.arange(4)), [2, 5, 6, 11])
    save_draft(drafter, tmp_path / "out", "sglang")
    out = stored(tmp_path / "out")
    assert out["d2t"].tolist() == [2, 4, 4, 8]
    assert out["d2t"].dtype == np.int64
    assert np.flatnonzero(out["t2d"]).tolist() == [2, 5, 6, 11]
    assert out["t2d"].dtype == np.bool_


def test_a_full_vocabulary_takes_only_the_identity(tmp_path: Path) -> None:
    """Without d2t the ids are the target's; zeros say the same; anything else cannot be."""
    config = {**ref.LLAMA, "draft_vocab_size": 128}
    tensors = ref.random_tensors(config)
    drafter = loaded(tmp_path / "none", config, tensors)
    np.testing.assert_array_equal(drafter.to_target(jnp.arange(5)), range(5))
    loaded(tmp_path / "zeros", config, {**tensors, "d2t": np.zeros(128, np.int64)})
    message = fails(tmp_path / "arange", config, {**tensors, "d2t": np.arange(128)})
    assert "draft id 64 stands for 128; it holds absolute ids" in message


def test_embedding_and_head_of_draft_and_target(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Equal embedding, none, another one; no head with the whole vocabulary: own, borrowed (and logged) or refused."""
    config = {**ref.LLAMA, "draft_vocab_size": None}
    tensors = ref.random_tensors(config)
    caplog.set_level(logging.INFO, "kimijax.draft_checkpoint")
    same = loaded(tmp_path / "same", config, tensors)
    assert isinstance(same.embed, Borrowed)
    assert "the embedding in the files equals the target's, which is used" in caplog.text
    caplog.clear()
    bare = loaded(tmp_path / "bare", config, without(tensors, "embed_tokens.weight", "lm_head.weight"), lent=tensors)
    assert "no embedding in the files, the target's is used" in caplog.text
    assert "no lm_head in the files, the target's is used" in caplog.text
    assert isinstance(bare.lm_head, Borrowed)
    np.testing.assert_array_equal(bare.embed.get_value(), tensors["embed_tokens.weight"])
    np.testing.assert_array_equal(bare.lm_head.get_value(), tiny_target(tensors).lm_head.get_value())
    spoilt = {**tensors, "embed_tokens.weight": tensors["embed_tokens.weight"].copy()}
    spoilt["embed_tokens.weight"][7, 3] += 0.5
    message = fails(tmp_path / "spoilt", config, spoilt, lent=tensors)
    assert "embed_tokens.weight: 1 of 128 rows differ from the target's embedding, row 7 by up to 0.5" in message
    assert "own_embed=True" in message
    own = loaded(tmp_path / "own", config, spoilt, lent=tensors, own_embed=True)
    np.testing.assert_array_equal(own.embed.get_value(), spoilt["embed_tokens.weight"])
    assert ("embed",) in parameters(own)


def test_a_head_of_another_width_needs_its_own_tables(tmp_path: Path) -> None:
    config = {**ref.LLAMA, "hidden_size": 48, "target_hidden_size": 64, "draft_vocab_size": None}
    tensors = without(ref.random_tensors(config), "embed_tokens.weight", "lm_head.weight")
    message = fails(tmp_path, config, tensors)
    assert "missing (2):" in message
    assert "embed_tokens.weight: expected BF16 or F16 or F32 [128, 48]" in message


def test_a_target_of_another_vocabulary_or_depth_is_refused(tmp_path: Path) -> None:
    config = {**ref.LLAMA, "vocab_size": 256}
    with pytest.raises(ConfigError, match=r"target \(vocab_size, hidden_size, layers\): found \(128, 64, 10\)"):
        loaded(tmp_path / "a", config, ref.random_tensors(config))
    tensors = ref.random_tensors(ref.LLAMA)
    deeper = Wiring((2, 5, 7), target_layers=12, target_hidden=64)
    with pytest.raises(ConfigError, match=r"expected the draft's \(128, 64, 12\)"):
        load_draft(write_draft(tmp_path / "b", ref.LLAMA, tensors), deeper, tiny_target(tensors))
    with pytest.raises(ConfigError, match="dtype: found"):
        load_draft(tmp_path / "b", WIRING, tiny_target(tensors), dtype=jnp.float16)


def test_training_leftovers_are_skipped_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = ref.random_tensors(ref.LLAMA)
    tensors["verifier_norm.weight"] = np.ones(64, np.float32)
    caplog.set_level(logging.INFO, "kimijax.draft_checkpoint")
    loaded(tmp_path, ref.LLAMA, tensors)
    assert "verifier_norm.weight is not used by a draft, skipped" in caplog.text


def test_damaged_files_are_named(tmp_path: Path) -> None:
    tensors = ref.random_tensors(ref.LLAMA)
    directory = write_draft(tmp_path, ref.LLAMA, tensors)
    (file,) = directory.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"files \(2\):\n.*truncated"):
        load_draft(directory, WIRING, tiny_target(tensors), dtype=jnp.float32)


def test_bf16(tmp_path: Path) -> None:
    """A bf16 drafter of an f32 file, on a target in f32: rounded to nearest even."""
    tensors = ref.random_tensors(ref.LLAMA)
    directory = write_draft(tmp_path, ref.LLAMA, tensors)
    drafter = load_draft(directory, WIRING, tiny_target(tensors))
    assert {p.get_value().dtype for p in parameters(drafter).values()} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_array_equal(drafter.fc.get_value(), jnp.asarray(tensors["fc.weight"]).astype(jnp.bfloat16))
