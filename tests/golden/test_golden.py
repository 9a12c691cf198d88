"""The oracles agree with each other, and the golden checkpoints hold the same numbers in every published form."""

import copy
import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import pytest

from tests import reference
from tests.golden import (
    FAMILIES,
    HERE,
    PUBLISHED_QUANTIZATION,
    hf_weights,
    load_golden,
    load_int4_golden,
    stored_tensors,
    text_config,
    token_ids,
    with_quantization,
    write_checkpoint,
)
from tests.golden.families import Quantization
from tests.golden.weights import GROUP, Grid, extra_shapes, hf_shapes, random_bits, round_bf16

# Where the published numbers differ between families: wrong by this much, the logits must move well beyond rounding.
WRONG_SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("kimi_k25", {"rope_scaling.beta_fast": 1.0}),
    ("kimi_k2_thinking", {"rope_scaling.beta_fast": 32.0}),
    ("kimi_k2", {"rope_scaling.factor": 64.0}),
    ("kimi_k2", {"rope_scaling.mscale_all_dim": 0.0}),
    ("moonlight", {"rms_norm_eps": 1e-6}),
    ("moonlight", {"rope_theta": 10000.0}),
    ("deepseek_v3", {"topk_group": 8}),
    ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
    ("deepseek_v3", {"routed_scaling_factor": 2.827}),
    ("deepseek_v2_lite", {"norm_topk_prob": True}),
    ("deepseek_v2_lite", {"rope_scaling.mscale": 1.0, "rope_scaling.mscale_all_dim": 1.0}),
]


def relative_error(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_agrees_with_transformers(family: str) -> None:
    config, golden = FAMILIES[family], load_golden(family)
    weights = hf_weights(config)
    ours = reference.forward(config, weights, golden["ids"])
    assert relative_error(ours.logits, golden["logits"]) < 1e-5
    assert relative_error(ours.taps[:, golden["tap_positions"]], golden["taps"]) < 1e-5
    long = reference.forward(config, weights, golden["long_ids"])
    assert relative_error(long.logits[golden["long_positions"]], golden["long_logits"]) < 1e-5
    for m, layer in enumerate(golden["moe_layers"]):
        assert np.array_equal(ours.experts[layer], golden["experts"][m])
        assert relative_error(ours.expert_weights[layer], golden["expert_weights"][m]) < 1e-5
        assert np.array_equal(long.experts[layer], golden["long_experts"][m])


@pytest.mark.parametrize(("family", "changes"), WRONG_SETTINGS)
def test_goldens_notice_a_wrong_setting(family: str, changes: dict[str, Any]) -> None:
    config, golden = copy.deepcopy(FAMILIES[family]), load_golden(family)
    weights = hf_weights(config)
    for path, value in changes.items():
        place = text_config(config)
        *parents, key = path.split(".")
        for parent in parents:
            place = place[parent]
        assert place[key] != value
        place[key] = value
    wrong = reference.forward(config, weights, golden["ids"])
    assert relative_error(wrong.logits, golden["logits"]) > 5e-4


def test_goldens_notice_the_eps_of_the_latent_norms() -> None:
    for family in ("kimi_k25", "kimi_k2_thinking", "moonlight"):
        config, golden = FAMILIES[family], load_golden(family)
        wrong = reference.forward(config, hf_weights(config), golden["ids"], latent_norm_eps=1e-6)
        assert relative_error(wrong.logits, golden["logits"]) > 5e-4, family


def test_readme_lists_the_md5_of_every_file() -> None:
    listed = (HERE / "README.md").read_text().split("## MD5")[1]
    files = sorted(HERE.glob("*.npz"))
    engines = {f"engines_{name}" for name in ("speculators", "vllm", "sglang", "trace")}
    assert {f.stem for f in files} == {*FAMILIES, *engines, "int4"}
    for file in files:
        assert f"{hashlib.md5(file.read_bytes()).hexdigest()}  {file.name}" in listed
        assert file.stat().st_size < 250_000


def test_sequences_reach_far_beyond_the_original_context() -> None:
    for family, config in FAMILIES.items():
        yarn, golden = text_config(config)["rope_scaling"], load_golden(family)
        assert len(golden["long_ids"]) <= text_config(config)["max_position_embeddings"]
        if yarn:
            assert len(golden["ids"]) >= 5 * yarn["original_max_position_embeddings"]
            assert len(golden["long_ids"]) >= 19 * yarn["original_max_position_embeddings"]


def test_greedy_continues_with_the_argmax() -> None:
    config = FAMILIES["moonlight"]
    weights, ids = hf_weights(config), token_ids("greedy", 12, 128)
    first, second = reference.greedy(config, weights, ids, 2)
    assert first == np.argmax(reference.forward(config, weights, ids).logits[-1])
    assert second == np.argmax(reference.forward(config, weights, [*ids, first]).logits[-1])
    assert reference.greedy(config, weights, ids, 0) == []


def test_generator_is_splitmix64() -> None:
    # The CRC-32 of the empty name is 0: the published stream of seed 0.
    assert [hex(x) for x in random_bits("", 3)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]


def test_weights_are_exact_in_bf16_except_the_router_bias() -> None:
    for name, value in hf_weights(FAMILIES["deepseek_v3"]).items():
        is_bias = name.endswith("e_score_correction_bias")
        assert np.array_equal(round_bf16(value), value) != is_bias, name


def test_rounding_to_bf16_is_that_of_ml_dtypes() -> None:
    x = np.concatenate(
        [random_bits("bf16", 4096).astype(np.uint32).view(np.float32), np.asarray([0.0, 1.00390625], np.float32)]
    )
    x = x[np.isfinite(x)]
    assert np.array_equal(round_bf16(x), x.astype(ml_dtypes.bfloat16).astype(np.float32))


def _codes(packed: np.ndarray, width: int) -> np.ndarray:
    nibbles = (packed.view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & np.uint32(15)
    return nibbles.reshape(len(packed), -1)[:, :width].astype(np.int8) - np.int8(8)


def test_int4_goldens_are_consistent() -> None:
    golden = load_int4_golden()
    cases = sorted({name.split("/")[0] for name in golden})
    assert cases == ["edge", "narrow", "ragged", "tall", "uniform", "worked"]
    for case in cases:
        codes, packed = golden[f"{case}/codes"], golden[f"{case}/packed"]
        assert tuple(golden[f"{case}/shape"]) == codes.shape
        assert np.array_equal(_codes(packed, codes.shape[1]), codes), case
        if f"{case}/scale" in golden:
            scale = golden[f"{case}/scale"].view(ml_dtypes.bfloat16)
            product = np.multiply(codes.astype(ml_dtypes.bfloat16), np.repeat(scale, GROUP, axis=1))
            assert np.array_equal(product.view(np.uint16), golden[f"{case}/dequantised"]), case
    assert [hex(w) for w in golden["worked/packed"].view(np.uint32)[0]] == [
        "0x4ba7980f", "0x668aa88c", "0x1234fedc", "0x2e2e1f88"
    ]  # fmt: skip


def test_our_packing_is_that_of_compressed_tensors() -> None:
    golden = load_int4_golden()
    for case in ("edge", "tall", "uniform", "worked"):
        q = golden[f"{case}/codes"]
        g = Grid(q, np.zeros((len(q), q.shape[1] // GROUP), np.int8), np.ones((1, 2), np.float32))
        assert np.array_equal(g.int4_packed, golden[f"{case}/packed"])


@pytest.mark.parametrize("family", ["kimi_k25", "deepseek_v3"])
def test_every_form_holds_the_same_numbers(family: str) -> None:
    config = FAMILIES[family]
    forms: list[tuple[Quantization | None, Literal["float32", "bfloat16"]]] = [
        ("int4", "bfloat16"),
        ("fp8", "bfloat16"),
        (None, "bfloat16"),
        (None, "float32"),
    ]
    for form, dtype in forms:
        stored = stored_tensors(config, dtype=dtype, quantization=form, extras=False)
        for name, value in hf_weights(config).items():
            base = name.removesuffix("weight")
            if base + "weight_packed" in stored:
                out, width = stored[base + "weight_shape"]
                codes = _codes(stored[base + "weight_packed"], width)
                scale = np.repeat(stored[base + "weight_scale"].astype(np.float32), GROUP, axis=1)
                assert codes.shape == (out, width)
                assert np.array_equal(codes * scale, value), name
            elif base + "weight_scale_inv" in stored:
                w, scale = stored[name].astype(np.float32), stored[base + "weight_scale_inv"]
                assert w.dtype == np.float32
                spread = np.repeat(np.repeat(scale, 128, 0)[: len(w)], 128, 1)[:, : w.shape[1]]
                assert np.array_equal(w * spread, value), name
            else:
                assert np.array_equal(stored[name].astype(np.float32), value), name


def _headers(directory: Path) -> dict[str, dict[str, Any]]:
    """The safetensors headers of a directory, by tensor, with the file's name added."""
    out: dict[str, dict[str, Any]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        raw = file.read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        out |= {k: {**v, "file": file.name} for k, v in header.items() if k != "__metadata__"}
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_are_written_as_published(family: str, tmp_path: Path) -> None:
    quantization = PUBLISHED_QUANTIZATION[family]
    write_checkpoint(family, tmp_path / "model", quantization=quantization)
    headers = _headers(tmp_path / "model")
    index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: h["file"] for name, h in headers.items()}
    assert len(set(index["weight_map"].values())) == 3
    assert json.loads((tmp_path / "model/config.json").read_text()) == with_quantization(FAMILIES[family], quantization)
    for name, shape in (hf_shapes(FAMILIES[family]) | extra_shapes(FAMILIES[family])).items():
        base = name.removesuffix("weight")
        if base + "weight_packed" in headers:
            assert name not in headers
            assert headers[base + "weight_packed"]["shape"] == [shape[0], shape[1] // 8]
            assert headers[base + "weight_scale"]["dtype"] == "BF16"
        else:
            assert headers[name]["shape"] == list(shape)
            is_bias, is_fp8 = name.endswith("e_score_correction_bias"), base + "weight_scale_inv" in headers
            assert headers[name]["dtype"] == ("F32" if is_bias else "F8_E4M3" if is_fp8 else "BF16"), name
    assert any("weight_packed" in n for n in headers) == (quantization == "int4")
    assert any("weight_scale_inv" in n for n in headers) == (quantization == "fp8")
