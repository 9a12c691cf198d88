"""Writing: what is saved is what Hugging Face tools and our own loader read back, and nothing is half written."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from kimijax import checkpoint, checkpoint_writer, quant
from kimijax.config import load_config, parse_config
from kimijax.model import declare_target, initialise
from kimijax.sharding import make_mesh

from .checkpoint_cases import config_of, loaded
from .golden import FAMILIES, stored_tensors, with_quantization, write_checkpoint

INT4_CONFIG = with_quantization(FAMILIES["kimi_k25"], "int4")


def read_all(directory: Path) -> dict[str, np.ndarray]:
    """Every tensor of a directory, by the safetensors library."""
    tensors: dict[str, np.ndarray] = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def same(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    def bits(x: Any) -> tuple[Any, ...]:
        x = np.asarray(x)
        return x.dtype, x.shape, x.tobytes()

    return a.keys() == b.keys() and all(bits(a[k]) == bits(b[k]) for k in a)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("devices", [1, 8])
def test_saving_gives_back_the_files(family: str, devices: int, tmp_path: Path) -> None:
    """The tensors of a published form, loaded and saved, are the same bytes under the same names."""
    int4 = "int4" if family == "kimi_k25" else None
    config = with_quantization(FAMILIES[family], int4)
    source = write_checkpoint(family, tmp_path / "a", quantization=int4, extras=False)
    mesh = make_mesh() if devices > 1 else None
    model = checkpoint.load(source, load_config(source), mesh=mesh, dtype=jnp.bfloat16)
    target = tmp_path / "deep" / "b"
    checkpoint.save(model, target, config, shard_bytes=100_000, files={"generation_config.json": b"{}\n"})
    stored = stored_tensors(config, dtype="bfloat16", quantization=int4, extras=False)
    assert same(read_all(target), stored)
    again = checkpoint.load(target, load_config(target), mesh=mesh, dtype=jnp.bfloat16)
    assert same(loaded(again), loaded(model))


def test_float32_scales_are_not_written(tmp_path: Path) -> None:
    """`load` would refuse them."""
    source = write_checkpoint("kimi_k25", tmp_path / "a", quantization="int4")
    arrays = loaded(checkpoint.load(source, load_config(source)))
    wide = {p: a.astype(jnp.float32) if str(p[-1]).endswith("_scale") else a for p, a in arrays.items()}
    with pytest.raises(ValueError, match=r"experts\.0\.gate_proj: found float32 scales, expected bfloat16"):
        checkpoint.save(wide, tmp_path / "b", INT4_CONFIG)
    assert not (tmp_path / "b").exists()


def test_shards_and_their_index(tmp_path: Path) -> None:
    model = initialise(declare_target(config_of("moonlight"), dtype=jnp.dtype(jnp.float32), int4=False), seed=0)
    checkpoint.save(model, tmp_path / "c", FAMILIES["moonlight"], dtype=jnp.bfloat16, shard_bytes=40_000)
    names = sorted(f.name for f in (tmp_path / "c").iterdir())
    count = len(names) - 2
    shards = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    assert count > 5
    assert names == sorted([*shards, "config.json", "model.safetensors.index.json"])
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    tensors = read_all(tmp_path / "c")
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in tensors.values())
    for file in shards:
        size = sum(tensors[n].nbytes for n, f in index["weight_map"].items() if f == file)
        held = [n for n, f in index["weight_map"].items() if f == file]
        assert size <= 40_000 or len(held) == 1
    bias = {n: a.dtype for n, a in tensors.items() if a.dtype == np.float32}
    assert set(bias) == {n for n in tensors if n.endswith("e_score_correction_bias")}


def test_float_experts_are_quantised_on_request(tmp_path: Path) -> None:
    source = write_checkpoint("kimi_k25", tmp_path / "a", dtype="float32", extras=False)
    model = checkpoint.load(source, load_config(source), dtype=jnp.float32)
    checkpoint.save(model, tmp_path / "b", INT4_CONFIG, dtype=jnp.bfloat16, int4="quantize")
    plain, written = read_all(source), read_all(tmp_path / "b")
    stem = "language_model.model.layers.2.mlp.experts.5.down_proj"
    packed, scale = quant.quantize_words(plain[f"{stem}.weight"].astype(jnp.bfloat16))
    assert np.array_equal(written[f"{stem}.weight_packed"], packed)
    assert np.array_equal(written[f"{stem}.weight_scale"], scale)
    assert written[f"{stem}.weight_shape"].tolist() == list(plain[f"{stem}.weight"].shape)
    assert written[f"{stem}.weight_shape"].dtype == np.int32
    assert {n for n in written if "weight_packed" in n} == {
        n + "_packed" for n in plain if ".experts." in n and "shared" not in n
    }
    checkpoint.load(tmp_path / "b", load_config(tmp_path / "b"))


@pytest.mark.parametrize("devices", [1, 8])
def test_int4_experts_are_dequantised_on_request(devices: int, tmp_path: Path) -> None:
    source = write_checkpoint("kimi_k25", tmp_path / "a", quantization="int4", extras=False)
    mesh = make_mesh() if devices > 1 else None
    model = checkpoint.load(source, load_config(source), mesh=mesh)
    checkpoint.save(model, tmp_path / "b", FAMILIES["kimi_k25"], int4="dequantize")
    stored = stored_tensors(FAMILIES["kimi_k25"], dtype="bfloat16", quantization=None, extras=False)
    assert same(read_all(tmp_path / "b"), stored)


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_the_prefix_can_be_chosen(prefix: str, tmp_path: Path) -> None:
    config = config_of("kimi_k2")
    model = initialise(declare_target(config, dtype=jnp.dtype(jnp.bfloat16), int4=False), seed=1)
    checkpoint.save(model, tmp_path / "c", FAMILIES["kimi_k2"], prefix=prefix)
    index = checkpoint.inspect(tmp_path / "c")
    assert index.prefix == prefix
    assert same(loaded(checkpoint.load(tmp_path / "c", config)), loaded(model))


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = initialise(declare_target(config_of("kimi_k2"), dtype=jnp.dtype(jnp.bfloat16), int4=False), seed=1)
    calls = 0
    original = checkpoint_writer.write_file

    def fail_late(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError("disk full")
        original(*args)

    monkeypatch.setattr(checkpoint_writer, "write_file", fail_late)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(model, tmp_path / "c", FAMILIES["kimi_k2"], shard_bytes=50_000)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    model = initialise(declare_target(config_of("kimi_k2"), dtype=jnp.dtype(jnp.bfloat16), int4=False), seed=1)
    (tmp_path / "c").mkdir()
    checkpoint.save(model, tmp_path / "c", FAMILIES["kimi_k2"])  # an empty directory is no obstacle
    before = {f.name: f.stat().st_mtime_ns for f in (tmp_path / "c").iterdir()}
    with pytest.raises(ValueError, match="in use, expected a new or empty one"):
        checkpoint.save(model, tmp_path / "c", FAMILIES["kimi_k2"])
    assert {f.name: f.stat().st_mtime_ns for f in (tmp_path / "c").iterdir()} == before
    assert [f.name for f in tmp_path.iterdir()] == ["c"]


def test_what_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    def arrays(int4: bool) -> dict[Any, jax.Array]:
        config = parse_config(INT4_CONFIG if int4 else FAMILIES["kimi_k25"])
        target = declare_target(config, dtype=jnp.dtype(jnp.bfloat16), int4=int4)
        return {path: jnp.zeros(s.shape, s.dtype) for path, s in loaded(target).items()}

    plain, packed = arrays(False), arrays(True)
    for model, config, mode, message in (
        (plain, INT4_CONFIG, "keep", "config_json: found quantization .*, expected no quantization_config"),
        (packed, FAMILIES["kimi_k25"], "keep", "expected a pack-quantized quantization_config"),
        (packed, INT4_CONFIG, "quantize", "routed experts that are INT4 already"),
        (plain, FAMILIES["kimi_k25"], "dequantize", "found 'dequantize' for float weights"),
        (plain, FAMILIES["kimi_k25"], "int8", "int4: found 'int8'"),
        (plain, FAMILIES["kimi_k2"], "keep", "parameters and config differ in .*layers.*3"),
        (plain, with_quantization(FAMILIES["kimi_k25"], "fp8"), "keep", "expected no quantization_config"),
    ):
        with pytest.raises(ValueError, match=message):
            checkpoint.save(model, tmp_path / "c", config, int4=mode)  # pyright: ignore[reportArgumentType]
    assert list(tmp_path.iterdir()) == []
