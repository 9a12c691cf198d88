"""What does not fit is refused before anything is read, and every fault is in the one error."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimijax import checkpoint
from kimijax.config import load_config
from kimijax.errors import CheckpointError, ConfigError
from kimijax.names import skip_reason
from kimijax.safetensors_io import FilePool, read_header
from kimijax.sharding import make_mesh

from .checkpoint_cases import config_of, fails, rewrite
from .golden import FAMILIES, stored_tensors, with_quantization, write_checkpoint, write_tensors

LAYER_1 = "model.layers.1.mlp"


@pytest.fixture
def int4_directory(tmp_path: Path) -> Path:
    return write_checkpoint("kimi_k25", tmp_path / "c", quantization="int4")


def test_a_missing_shard_is_named(int4_directory: Path) -> None:
    (int4_directory / "model-00002-of-00003.safetensors").unlink()
    message = fails(int4_directory)
    assert "model-00002-of-00003.safetensors: missing file" in message
    assert "missing (" not in message  # its tensors are counted, not listed one by one
    assert "needed tensors" in message


def test_a_missing_scale_is_named(int4_directory: Path) -> None:
    name = f"language_model.{LAYER_1}.experts.3.up_proj.weight_scale"
    rewrite(int4_directory, lambda tensors: {n: a for n, a in tensors.items() if n != name})
    for unpack in (False, True):
        message = fails(int4_directory, unpack_int4=unpack)
        assert f"{LAYER_1}.experts.3.up_proj.weight_scale: expected BF16" in message
        assert "missing (1)" in message


def test_an_index_without_files(int4_directory: Path) -> None:
    for file in int4_directory.glob("*.safetensors"):
        file.unlink()
    assert checkpoint.inspect(int4_directory).int4  # the index file's names already tell
    message = fails(int4_directory)
    for i in (1, 2, 3):
        assert f"model-0000{i}-of-00003.safetensors: missing file" in message


def test_what_else_is_skipped() -> None:
    k2, v3 = (config_of(f) for f in ("kimi_k2", "deepseek_v3"))
    assert skip_reason("model.layers.0.self_attn.rotary_emb.inv_freq", k2) == "rotary_emb.inv_freq"
    assert skip_reason("model.layers.5.eh_proj.weight", v3) == "multi-token-prediction layer"
    assert skip_reason("model.layers.6.eh_proj.weight", v3) is None
    assert skip_reason("model.layers.3.input_layernorm.weight", k2) is None
    assert skip_reason("model.layers.2.mlp.gate.bias", k2) is None


def test_all_faults_are_in_one_error(tmp_path: Path) -> None:
    directory = write_checkpoint("kimi_k2_thinking", tmp_path / "c", quantization="int4")
    expert = f"{LAYER_1}.experts.2"

    def spoil(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        del tensors["model.norm.weight"]
        del tensors[f"{expert}.down_proj.weight_shape"]
        tensors["model.layers.0.self_attn.q_a_proj.weight"] = np.zeros((3, 5), jnp.bfloat16)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int8)
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].astype(np.float64)
        tensors[f"{expert}.gate_proj.weight_shape"] = np.array([32, 63], np.int32)
        tensors[f"{expert}.up_proj.weight_scale"] = tensors[f"{expert}.up_proj.weight_scale"].astype(np.float32)
        tensors["model.layers.1.self_attn.o_proj.bias"] = np.zeros(4, np.float32)
        tensors["model.layers.3.input_layernorm.weight"] = np.zeros(64, jnp.bfloat16)
        return tensors

    rewrite(directory, spoil)
    (directory / "model-00001-of-00003.safetensors").rename(directory / "elsewhere")
    message = fails(directory)
    (directory / "elsewhere").rename(directory / "model-00001-of-00003.safetensors")
    message += fails(directory)
    for line in (
        "model-00001-of-00003.safetensors: missing file",
        "model.norm.weight: expected BF16 or F16 or F32 [64]",
        f"{expert}.down_proj.weight_shape: expected I32 or I64 [2]",
        "q_a_proj.weight: found [3, 5], expected [40, 64]",
        "lm_head.weight: found I8, expected BF16 or F16 or F32",
        "model.embed_tokens.weight: found F64, expected BF16 or F16 or F32",
        f"{expert}.gate_proj.weight_shape: says [32, 63], expected [32, 64]",
        f"{expert}.up_proj.weight_scale: found F32, expected BF16",
        "model.layers.1.self_attn.o_proj.bias: no parameter of the model takes it",
        "model.layers.3.input_layernorm.weight: no parameter of the model takes it",
        "nothing was loaded",
    ):
        assert line in message


def test_fp8_needs_the_block_size_of_the_config(tmp_path: Path) -> None:
    directory = write_checkpoint("kimi_k2", tmp_path / "c", quantization="fp8")
    (directory / "config.json").write_text(json.dumps(FAMILIES["kimi_k2"]))
    assert "fp8 with block scales, but the config declares None" in fails(directory)
    stored = stored_tensors(
        with_quantization(FAMILIES["kimi_k2"], "fp8"), dtype="bfloat16", quantization="fp8", extras=False
    )
    name = "model.layers.0.mlp.down_proj.weight_scale_inv"
    write_tensors({n: a for n, a in stored.items() if n != name}, directory, 3)
    (directory / "config.json").write_text(json.dumps(with_quantization(FAMILIES["kimi_k2"], "fp8")))
    assert "model.layers.0.mlp.down_proj.weight: found F8_E4M3" in fails(directory)


def test_int4_files_with_an_fp8_config_are_refused(int4_directory: Path) -> None:
    config = with_quantization(FAMILIES["kimi_k25"], "fp8")
    (int4_directory / "config.json").write_text(json.dumps(config))
    assert "but the files hold INT4 experts" in fails(int4_directory)


def test_faults_of_the_index_file(int4_directory: Path) -> None:
    file = int4_directory / "model.safetensors.index.json"
    good = json.loads(file.read_text())
    name, shard = next(iter(good["weight_map"].items()))
    good["weight_map"]["model.no_such"] = shard
    file.write_text(json.dumps(good))
    assert f"model.no_such: missing: model.safetensors.index.json places it in {shard}" in fails(int4_directory)
    for content, message in (
        ("{", "JSONDecodeError"),
        ("{}", "KeyError"),
        ('{"weight_map": {}}', "not empty"),
        (json.dumps({"weight_map": {name: "../x.safetensors"}}), "expected a file name in this folder"),
    ):
        file.write_text(content)
        assert message in fails(int4_directory)


def test_a_tensor_in_two_files_is_named(int4_directory: Path) -> None:
    (int4_directory / "model.safetensors.index.json").unlink()
    checkpoint.load(int4_directory, load_config(int4_directory))  # an index is not needed
    first = int4_directory / "model-00001-of-00003.safetensors"
    (int4_directory / "copy.safetensors").write_bytes(first.read_bytes())
    assert "found in copy.safetensors and model-00001-of-00003.safetensors, expected once" in fails(int4_directory)


def test_directories_without_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        checkpoint.inspect(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors files"):
        checkpoint.inspect(tmp_path)


def test_unusable_settings_are_refused(int4_directory: Path) -> None:
    config = load_config(int4_directory)
    with pytest.raises(ConfigError, match="dtype: found 'float16', expected bfloat16 or float32"):
        checkpoint.load(int4_directory, config, dtype=np.dtype(np.float16))
    with pytest.raises(ConfigError, match="mesh axis tensor: found 3"):
        checkpoint.load(int4_directory, config, mesh=make_mesh(jax.devices()[:3]))


@pytest.mark.parametrize("options", [{}, {"unpack_int4": True}, {"mesh": 8}], ids=["kept", "unpacked", "sharded"])
def test_all_scales_that_are_not_finite_and_positive_are_in_one_error(
    options: dict[str, Any], int4_directory: Path
) -> None:
    """They pass the headers' check, so they are found while reading; a good subnormal is no fault."""
    at = "language_model.model.layers.{}.mlp.experts.{}.{}_proj.weight_scale".format
    faults = {at(1, 0, "gate"): np.nan, at(1, 3, "down"): 0.0, at(2, 1, "up"): -0.25, at(3, 2, "down"): np.inf}

    def spoil(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        for name, value in faults.items():
            tensors[name][5, -1] = value
            tensors[name][7, 0] = value
        tensors[at(1, 0, "up")][0, 0] = 1e-40
        return tensors

    rewrite(int4_directory, spoil)
    if "mesh" in options:
        options = {"mesh": make_mesh()}
    with pytest.raises(CheckpointError, match="INT4 scales that are not finite and positive") as error:
        checkpoint.load(int4_directory, load_config(int4_directory), **options)
    lines = str(error.value).splitlines()[2:-1]
    assert lines == [f"  {n.removeprefix('language_model.')}: found {v} in row 5" for n, v in sorted(faults.items())]


def test_float32_scales_are_refused_kept_or_unpacked(int4_directory: Path) -> None:
    """To round them would change the weights."""
    name = f"{LAYER_1}.experts.3.up_proj.weight_scale"
    full = f"language_model.{name}"
    rewrite(int4_directory, lambda tensors: tensors | {full: tensors[full].astype(np.float32)})
    for unpack in (False, True):
        message = fails(int4_directory, unpack_int4=unpack)
        assert f"{name}: found F32, expected BF16" in message
        assert "mistyped (1)" in message


def test_a_file_cut_while_it_is_read_is_named(int4_directory: Path) -> None:
    file = sorted(int4_directory.glob("*.safetensors"))[1]
    last = read_header(file)[-1]
    file.write_bytes(file.read_bytes()[:-4])
    with FilePool() as pool, pytest.raises(CheckpointError, match=f"inside {last.name}: truncated while in use"):
        pool.read(last)


def test_long_lists_are_counted(int4_directory: Path) -> None:
    rewrite(int4_directory, lambda tensors: {n: a for n, a in tensors.items() if "experts.1" not in n})
    message = fails(int4_directory)
    assert "more" in message
    assert message.count("\n") < 60
