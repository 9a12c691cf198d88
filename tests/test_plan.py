"""The plan of the published Kimi-K2.5 gives the figures known from its files; other families and faults follow."""

import json
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from kimijax import checkpoint
from kimijax.checkpoint import inspect
from kimijax.config import load_config
from kimijax.errors import CheckpointError, ConfigError
from kimijax.loader import NANO, NANO_DRAFTER
from kimijax.plan import JAX_FRACTION, Plan, main, make_plan, on_layers, read_drafter
from kimijax.plan_weights import make_plans
from kimijax.sharding import PRESETS, TABLE, Preset, make_mesh

from .checkpoint_cases import loaded, rewrite
from .golden import FAMILIES, PUBLISHED_QUANTIZATION, with_quantization, write_checkpoint

PUBLISHED = Path(__file__).parents[2] / "shared" / "data" / "kimi_k25"

# The sizes of the published config.json; what only concerns the maths is left out or taken from the tiny model.
K25_TEXT = {
    "first_k_dense_replace": 1,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
K25_VISION = {
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "merge_kernel_size": [2, 2],
    "mm_hidden_size": 1152,
    "patch_size": 14,
    "text_hidden_size": 7168,
    "vt_hidden_size": 1152,
    "vt_intermediate_size": 4304,
    "vt_num_attention_heads": 16,
    "vt_num_hidden_layers": 27,
}


def k25_config() -> dict[str, Any]:
    config = with_quantization(FAMILIES["kimi_k25"], "int4")
    config["text_config"] |= K25_TEXT
    config["vision_config"] |= K25_VISION
    return config


def k25_tensors() -> dict[str, list[tuple[str, str, tuple[int, ...]]]]:
    """Every tensor of the published files by shard: (name, dtype, shape)."""
    shards: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {}

    def add(shard: int, name: str, *shape: int, dtype: str = "BF16") -> None:
        file = f"model-{shard:05d}-of-000064.safetensors"
        shards.setdefault(file, []).append((name, dtype, shape))

    for i in range(61):
        at, shard = f"language_model.model.layers.{i}", i + 1
        add(shard, f"{at}.input_layernorm.weight", 7168)
        add(shard, f"{at}.post_attention_layernorm.weight", 7168)
        add(shard, f"{at}.self_attn.q_a_proj.weight", 1536, 7168)
        add(shard, f"{at}.self_attn.q_a_layernorm.weight", 1536)
        add(shard, f"{at}.self_attn.q_b_proj.weight", 12288, 1536)
        add(shard, f"{at}.self_attn.kv_a_proj_with_mqa.weight", 576, 7168)
        add(shard, f"{at}.self_attn.kv_a_layernorm.weight", 512)
        add(shard, f"{at}.self_attn.kv_b_proj.weight", 16384, 512)
        add(shard, f"{at}.self_attn.o_proj.weight", 7168, 8192)
        mlp, width = (f"{at}.mlp.shared_experts", 2048) if i else (f"{at}.mlp", 18432)
        add(shard, f"{mlp}.gate_proj.weight", width, 7168)
        add(shard, f"{mlp}.up_proj.weight", width, 7168)
        add(shard, f"{mlp}.down_proj.weight", 7168, width)
        if i == 0:
            continue
        add(shard, f"{at}.mlp.gate.weight", 384, 7168)
        add(shard, f"{at}.mlp.gate.e_score_correction_bias", 384, dtype="F32")
        for e in range(384):
            for proj, out, inputs in (("gate", 2048, 7168), ("up", 2048, 7168), ("down", 7168, 2048)):
                stem = f"{at}.mlp.experts.{e}.{proj}_proj"
                add(shard, f"{stem}.weight_packed", out, inputs // 8, dtype="I32")
                add(shard, f"{stem}.weight_scale", out, inputs // 32)
                add(shard, f"{stem}.weight_shape", 2, dtype="I32")
    add(62, "language_model.model.embed_tokens.weight", 163840, 7168)
    add(62, "language_model.model.norm.weight", 7168)
    add(62, "language_model.lm_head.weight", 163840, 7168)
    for name, shape in (("pre_norm", (1152,)), ("proj.0", (4608, 4608)), ("proj.2", (7168, 4608))):
        add(63, f"mm_projector.{name}.weight", *shape)
        add(63, f"mm_projector.{name}.bias", shape[0])
    add(64, "vision_tower.patch_embed.pos_emb.weight", 64, 64, 1152)
    linear = {"patch_embed.proj": (1152, 3, 14, 14), "encoder.final_layernorm": (1152,)}
    block = {"norm0": (1152,), "norm1": (1152,), "wqkv": (3456, 1152), "wo": (1152, 1152)}
    block |= {"mlp.fc0": (4304, 1152), "mlp.fc1": (1152, 4304)}
    linear |= {f"encoder.blocks.{i}.{n}": s for i in range(27) for n, s in block.items()}
    for name, shape in linear.items():
        add(64, f"vision_tower.{name}.weight", *shape)
        add(64, f"vision_tower.{name}.bias", shape[0])
    return shards


def write_headers(directory: Path, shards: dict[str, list[tuple[str, str, tuple[int, ...]]]]) -> None:
    """Files with real headers whose data are holes: they take no space on the disk."""
    sizes = {"BF16": 2, "I32": 4, "F32": 4}
    for file, tensors in shards.items():
        header, end = {}, 0
        for name, dtype, shape in tensors:
            size = sizes[dtype]
            for n in shape:
                size *= n
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            end += size
        raw = json.dumps(header).encode()
        with (directory / file).open("wb") as f:
            f.write(struct.pack("<Q", len(raw)) + raw)
            f.truncate(8 + len(raw) + end)
    weight_map = {name: file for file, tensors in shards.items() for name, _, _ in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def assert_k25(plan: Any) -> None:
    """The published figures."""
    by_name = {c.name: c for c in plan.components}
    assert plan.params == 1_026_408_232_448
    assert plan.total_bytes == 595_148_192_736
    assert plan.text_bytes == 594_205_904_896
    assert by_name["routed experts"].params == 1_014_686_023_680
    packed, scales, shapes = 507_343_011_840, 63_417_876_480, 23_040 * 3 * 8
    assert by_name["routed experts"].file_bytes == packed + scales + shapes
    assert by_name["attention"].params == 61 * 101_124_096
    assert by_name["router"].file_bytes == 60 * 384 * (7168 * 2 + 4)
    assert by_name["embedding"].params == by_name["head"].params == 163840 * 7168
    rounded = {"shared experts": 2.642, "dense MLP": 0.396, "router": 0.165}
    assert {n: round(by_name[n].params / 1e9, 3) for n in rounded} == rounded
    (vision,) = plan.skipped
    assert (vision.name, vision.params, vision.file_bytes) == ("vision", 471_143_920, 942_287_840)
    assert plan.cache_bytes_per_token == 70_272
    assert round(plan.cache_bytes_per_token * plan.max_positions / 1e9, 2) == 18.42
    assert round(plan.active_params / 1e9, 2) == 32.86
    device = plan.device
    assert (device.devices, device.memory_bytes, device.fits) == (8, 141_000_000_000, True)
    gigabytes = (device.weight_bytes, device.expert_bytes, device.other_sharded_bytes, device.replicated_bytes)
    assert [round(b / 1e9, 2) for b in gigabytes] == [76.18, 71.35, 2.66, 2.18]
    assert round(device.cache_tokens / 1e6, 2) == 0.72


def test_kimi_k25_from_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(k25_config()))
    for path in (tmp_path, tmp_path / "config.json"):
        plan = make_plan(path, fraction=0.9)
        assert plan.source == "config"
        assert_k25(plan)


def test_kimi_k25_from_the_published_config() -> None:
    if not PUBLISHED.is_dir():
        pytest.skip(f"the published config is not at {PUBLISHED}")
    assert_k25(make_plan(PUBLISHED, fraction=0.9))


def test_kimi_k25_from_its_headers(tmp_path: Path) -> None:
    shards = k25_tensors()
    assert sum(map(len, shards.values())) == 208_550
    write_headers(tmp_path, shards)
    (tmp_path / "config.json").write_text(json.dumps(k25_config()))
    plan = make_plan(tmp_path, fraction=0.9)
    assert plan.source == "headers"
    assert_k25(plan)


# Of Kimi-K2.5 on eight devices: GB of weights, bytes of a cached token on a device that holds it or a part of it, and
# millions of tokens that 90 % of 141 GB hold beside the weights, in all.
ON_EIGHT: dict[Preset, tuple[float, int, float]] = {
    "tp": (76.18, 70_272, 0.72),
    "ep": (76.18, 70_272, 0.72),
    "dp-attention": (90.68, 70_272, 4.12),
    "dcp": (76.18, 8_784, 5.77),
}


def test_every_preset(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(k25_config()))
    plans = make_plans(tmp_path, PRESETS, memory_bytes=141 * 10**9, devices=8, fraction=0.9)
    for preset, (weights, cached, tokens) in ON_EIGHT.items():
        plan = plans[preset]
        assert isinstance(plan, Plan)
        d = plan.device
        assert (round(d.weight_bytes / 1e9, 2), d.cache_bytes_per_token) == (weights, cached)
        assert round(d.cache_tokens / 1e6, 2) == tokens
        assert d.cache_tokens_on_each * (8 if preset == "dp-attention" else 1) == d.cache_tokens
        assert d == make_plan(tmp_path, preset=preset, fraction=0.9).device
        assert d.cache_tokens_beside(10**9) == pytest.approx(d.cache_tokens - 1e9 / cached * d.cache_groups, abs=8)
    small = make_plan(tmp_path, memory_bytes=96 * 10**9, fraction=0.9).device
    assert (small.fits, round(small.cache_tokens, -3)) == (True, 145_000)
    assert not make_plan(tmp_path, memory_bytes=96 * 10**9).device.fits  # 75 %, unless JAX is told otherwise
    assert not make_plan(tmp_path, memory_bytes=96 * 10**9, fraction=0.9, preset="dp-attention").device.fits
    uneven = make_plans(tmp_path, PRESETS, memory_bytes=141 * 10**9, devices=12)
    assert {preset for preset, plan in uneven.items() if isinstance(plan, ConfigError)} == set(PRESETS)


def test_a_draft_is_declared_from_its_configuration() -> None:
    target = load_config(NANO)
    drafter = read_drafter(str(NANO_DRAFTER), target, jnp.bfloat16)
    assert drafter.wiring.target_layers == target.n_layers
    assert read_drafter(str(NANO_DRAFTER / "config.json"), target, jnp.bfloat16).config == drafter.config
    assert read_drafter(None, target, jnp.bfloat16).config == read_drafter("stand-in", target, jnp.bfloat16).config
    fewer = on_layers(drafter, 2)
    assert (fewer.config, fewer.wiring.taps) == (drafter.config, (0, 1, 2))
    with pytest.raises(ConfigError, match=r"wiring \(target_layers, target_hidden\)"):
        read_drafter(str(NANO_DRAFTER), replace(target, n_layers=4), jnp.bfloat16)
    with pytest.raises(ConfigError, match="layers: found 1, expected at least 2"):
        on_layers(drafter, 1)


def test_kimi_k2_instruct_from_its_config(tmp_path: Path) -> None:
    """fp8: the published files hold 1,026,470,731,056 values, of which 61 x 56 are rotary frequencies (not counted)."""
    config = with_quantization(FAMILIES["kimi_k2"], "fp8") | K25_TEXT | {"max_position_embeddings": 131072}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = make_plan(tmp_path)
    assert plan.params == 1_026_408_232_448
    scales = 1_026_470_731_056 - 61 * 56 - plan.params
    by_name = {c.name: c for c in plan.components}
    wide = {n: by_name[n].params for n in ("embedding", "head", "norms")}
    latent_norms = 61 * (1536 + 512)
    router = by_name["router"]
    fp8 = plan.params - sum(wide.values()) - latent_norms - router.params
    assert plan.text_bytes == fp8 + 4 * scales + 2 * (sum(wide.values()) + latent_norms) + router.file_bytes
    # dequantised to bf16 on load, it does not fit on the devices that hold the INT4 model
    assert not plan.device.fits
    assert plan.device.cache_tokens == 0


def test_devices_hold_what_jax_takes_by_default(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(k25_config()))
    default, nine_tenths = make_plan(tmp_path).device, make_plan(tmp_path, fraction=0.9).device
    assert JAX_FRACTION == 0.75
    assert default.usable_bytes == 0.75 * 141e9
    assert default.weight_bytes == nine_tenths.weight_bytes
    assert 0 < default.cache_tokens < nine_tenths.cache_tokens


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("unpack", [False, True], ids=["kept", "unpacked"])
@pytest.mark.parametrize("devices", [1, 8])
def test_bytes_on_devices_are_those_of_a_load(dtype: Any, unpack: bool, devices: int, tmp_path: Path) -> None:
    directory = write_checkpoint("kimi_k25", tmp_path / "c", quantization="int4")
    name = jnp.dtype(dtype).name
    plan = make_plan(directory, devices=devices, dtype=name, unpack_int4=unpack)
    mesh = make_mesh() if devices > 1 else None
    model = checkpoint.load(directory, load_config(directory), mesh=mesh, dtype=dtype, unpack_int4=unpack)
    arrays = loaded(model).values()
    assert plan.device.weight_bytes == sum(a.addressable_shards[0].data.nbytes for a in arrays)
    assert (plan.int4, plan.dtype) == (not unpack, name)
    plain = make_plan(directory, devices=devices)
    assert plan.cache_bytes_per_token == plain.cache_bytes_per_token * jnp.dtype(dtype).itemsize // 2
    assert (plan.params, plan.total_bytes) == (plain.params, plain.total_bytes)  # the files stay what they are


@pytest.mark.parametrize("family", FAMILIES)
def test_headers_and_config_agree(family: str, tmp_path: Path) -> None:
    quantization = PUBLISHED_QUANTIZATION[family]
    directory = write_checkpoint(family, tmp_path / "c", quantization=quantization)
    devices = 1 if family == "kimi_k2_thinking" else 8  # its 32 inputs of a down matrix are one INT4 group
    from_headers = make_plan(directory, devices=devices)
    stored = inspect(directory).tensors.values()
    assert from_headers.total_bytes == sum(t.nbytes for t in stored)
    from_config = make_plan(directory / "config.json", devices=devices)
    assert (from_headers.source, from_config.source) == ("headers", "config")
    assert from_config.components == from_headers.components
    assert from_config.device == from_headers.device
    assert bool(from_config.uncounted) == (family == "deepseek_v3")


def test_more_devices_hold_less_each(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(k25_config()))
    eight, sixteen = (make_plan(tmp_path, devices=n).device for n in (8, 16))
    assert sixteen.replicated_bytes == eight.replicated_bytes
    assert 2 * (sixteen.weight_bytes - sixteen.replicated_bytes) == eight.weight_bytes - eight.replicated_bytes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": 3}, "devices: found 3, expected a divisor of"),
        ({"devices": 0}, "devices: found 0, expected a positive number"),
        ({"memory_bytes": 0}, "memory: found 0"),
        ({"fraction": 1.5}, "fraction: found 1.5"),
        ({"dtype": "float16"}, "dtype: found 'float16', expected bfloat16 or float32"),
    ],
)
def test_unusable_settings_are_named(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(k25_config()))
    with pytest.raises(ConfigError, match=message):
        make_plan(tmp_path, **settings)


def test_files_that_are_not_those_of_the_config_are_refused(tmp_path: Path) -> None:
    directory = write_checkpoint("kimi_k2", tmp_path / "c", extras=False)
    rewrite(directory, lambda t: {n.replace("0.input_layernorm", "7.input_layernorm"): a for n, a in t.items()})
    with pytest.raises(CheckpointError) as error:
        make_plan(directory)
    assert "model.layers.7.input_layernorm.weight: no parameter of the model takes it" in str(error.value)
    assert "model.layers.0.input_layernorm: missing" in str(error.value)
    (directory / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003\.safetensors: missing file"):
        make_plan(directory)


def test_a_vision_config_without_sizes_is_refused(tmp_path: Path) -> None:
    config = k25_config()
    del config["vision_config"]["merge_kernel_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"config\.vision_config\.merge_kernel_size: found 'no such key'"):
        make_plan(tmp_path)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(k25_config()))
    assert main(["--model", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["params"] == 1_026_408_232_448
    assert printed["total_bytes"] == 595_148_192_736
    assert printed["device"]["fits"] is True
    assert printed["mesh_axes"] == {axis: list(names) for axis, names in TABLE.items()}
    assert main(["--model", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    for text in ("1,014,686,023,680", "595,148,192,736 bytes", "70,272 bytes a token", "vision (skipped)"):
        assert text in table
    rows = [[word for word in line.split() if word != "│"][:2] for line in table.splitlines()]
    for axis, names in TABLE.items():
        assert any(
            row[0] == axis and row[1].startswith(names[0] if names else "none:") for row in rows if len(row) == 2
        )
    assert "loaded as bfloat16, routed experts as INT4: 76.18 GB on each of 8 device(s)" in table
    assert "cached tokens in all, in latent pages alone" in table
    assert main(["--model", str(tmp_path), "--dtype", "float32", "--unpack-int4"]) == 0
    table = capsys.readouterr().out
    assert "loaded as float32: " in table
    assert "140,544 bytes a token (float32)" in table
    assert main(["--model", str(tmp_path), "--memory-gb", "80"]) == 0
    assert "DOES NOT FIT" in capsys.readouterr().out
    assert main(["--model", str(tmp_path / "none")]) == 2
    assert "no such file" in capsys.readouterr().err


def test_sparse_files_take_no_space(tmp_path: Path) -> None:
    """The full-size headers above must not fill a disk."""
    write_headers(tmp_path, {"model.safetensors": [("a", "BF16", (1 << 30,))]})
    assert os.stat(tmp_path / "model.safetensors").st_blocks * 512 < 1 << 20
