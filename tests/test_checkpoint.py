"""Loading: every family and form gives exactly the numbers in the files, straight into the devices' slices."""

import json
import logging
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from kimijax import checkpoint, checkpoint_reader, quant
from kimijax.checkpoint_reader import Leaf, Source, read_leaves
from kimijax.config import load_config
from kimijax.errors import CheckpointError
from kimijax.names import Path as ParameterPath
from kimijax.names import Piece, name_table
from kimijax.safetensors_io import FilePool, TensorInfo, TensorSpec, read_header, write_file
from kimijax.sharding import make_mesh

from .checkpoint_cases import config_of, expected, loaded, rewrite
from .golden import (
    FAMILIES,
    PUBLISHED_QUANTIZATION,
    hf_weights,
    with_quantization,
    write_checkpoint,
)

LAYER_1 = "model.layers.1.mlp"


def assert_loaded(arrays: dict[Any, Any], wanted: dict[Any, np.ndarray], dtype: Any) -> None:
    assert arrays.keys() == wanted.keys()
    for path, value in wanted.items():
        exact = np.float32 if path[-1] == "router_bias" else dtype
        assert arrays[path].dtype == exact, path
        assert np.array_equal(np.asarray(arrays[path]), value.astype(exact)), path


def forms(family: str) -> list[tuple[Any, Any]]:
    published = PUBLISHED_QUANTIZATION[family]
    return [("float32", None), ("bfloat16", None), *([("bfloat16", published)] if published else [])]


@pytest.mark.parametrize(("family", "form"), [(f, form) for f in FAMILIES for form in forms(f)], ids=str)
def test_every_form_loads_exactly(family: str, form: tuple[Any, Any], tmp_path: Path) -> None:
    stored, quantization = form
    directory = write_checkpoint(family, tmp_path / "c", dtype=stored, quantization=quantization)
    config = load_config(directory)
    wanted = expected(FAMILIES[family], hf_weights(FAMILIES[family]))
    for dtype in (jnp.float32, jnp.bfloat16):
        model = checkpoint.load(directory, config, dtype=dtype, unpack_int4=True)
        assert_loaded(loaded(model), wanted, dtype)
    # over eight devices, tensor-parallel
    if quantization != "int4":
        arrays = loaded(checkpoint.load(directory, config, mesh=make_mesh(), dtype=jnp.float32))
        assert_loaded(arrays, wanted, jnp.float32)


@pytest.mark.parametrize("devices", [1, 8])
def test_int4_experts_stay_packed(devices: int, tmp_path: Path) -> None:
    directory = write_checkpoint("kimi_k25", tmp_path / "c", quantization="int4")
    mesh = make_mesh() if devices > 1 else None
    model = checkpoint.load(directory, load_config(directory), mesh=mesh, dtype=jnp.float32)
    arrays = loaded(model)
    wanted = expected(FAMILIES["kimi_k25"], hf_weights(FAMILIES["kimi_k25"]))
    packed = [path for path in arrays if str(path[-1]).endswith("_packed")]
    assert len(packed) == 2 * 3  # gate_up and down of three layers
    for path in packed:
        stem = (*path[:-1], str(path[-1]).removesuffix("_packed"))
        scale = arrays.pop((*stem[:-1], f"{stem[-1]}_scale"))
        assert (arrays[path].dtype, scale.dtype) == (jnp.int32, jnp.bfloat16)
        quant.QuantizedTensor(arrays[path], scale).check()
        back = quant.dequantize_words(np.asarray(arrays.pop(path)), np.asarray(scale), np.float32)
        assert np.array_equal(back, wanted.pop(stem))
    assert_loaded(arrays, wanted, jnp.float32)


def test_eight_devices_hold_their_slices(tmp_path: Path) -> None:
    directory = write_checkpoint("kimi_k25", tmp_path / "c", quantization="int4")
    arrays = loaded(checkpoint.load(directory, load_config(directory), mesh=make_mesh()))
    t = FAMILIES["kimi_k25"]["text_config"]
    experts, hidden, width = t["n_routed_experts"], t["hidden_size"], t["moe_intermediate_size"]
    shards = {
        ("embed",): (t["vocab_size"] // 8, hidden),
        ("layers", 1, "attention", "o"): (hidden, 1, t["v_head_dim"]),
        ("layers", 1, "mlp", "experts", "gate_up_packed"): (experts, 2, width // 8, hidden // 8),
        ("layers", 1, "mlp", "experts", "down_packed"): (experts, hidden, width // 64),
        ("layers", 1, "mlp", "experts", "down_scale"): (experts, hidden, 1),
        ("layers", 1, "mlp", "router"): (experts, hidden),
    }
    for path, shape in shards.items():
        assert {s.data.shape for s in arrays[path].addressable_shards} == {shape}, path
        assert len(arrays[path].addressable_shards) == 8


@pytest.mark.parametrize("devices", [1, 8])
def test_the_tables_load_without_the_layers(devices: int, tmp_path: Path) -> None:
    directory = write_checkpoint("kimi_k25", tmp_path / "c", quantization="int4")
    config = load_config(directory)
    mesh = make_mesh() if devices > 1 else None
    whole = checkpoint.load(directory, config, mesh=mesh, dtype=jnp.float32)
    tables = checkpoint.load_tables(directory, config, mesh=mesh, dtype=jnp.float32)
    assert set(loaded(tables)) == {("embed",), ("norm",), ("lm_head",)}
    for path, array in loaded(tables).items():
        assert array.sharding == loaded(whole)[path].sharding
        assert np.array_equal(array, loaded(whole)[path])
    h = jnp.linspace(-1, 1, config.hidden, dtype=jnp.float32)[None, None]
    assert np.array_equal(tables.logits(h), whole.logits(h))
    rewrite(directory, lambda t: {n: v for n, v in t.items() if not n.endswith("lm_head.weight")})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        checkpoint.load_tables(directory, config)


def test_cpu_devices_adopt_the_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: set[int] = set()
    original = checkpoint_reader._aligned

    def recorded(*args: Any) -> np.ndarray:
        buffer = original(*args)
        made.add(buffer.ctypes.data)
        return buffer

    monkeypatch.setattr(checkpoint_reader, "_aligned", recorded)
    directory = write_checkpoint("kimi_k2", tmp_path / "c")
    for mesh in (None, make_mesh()):
        arrays = loaded(checkpoint.load(directory, load_config(directory), mesh=mesh))
        shards = [s.data for a in arrays.values() for s in a.addressable_shards]
        assert all(s.unsafe_buffer_pointer() in made for s in shards)


@pytest.mark.parametrize(
    "spec", [(None, None, None), ("a",), (None, "a"), (None, None, "b"), ("b", None, "a")], ids=str
)
@pytest.mark.parametrize("rows", [1, 5, 1 << 20])
def test_any_sharding_of_any_piece(
    spec: tuple[str | None, ...], rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view with an offset, beside a stack of two: cut along each dimension, read in blocks of any height."""
    monkeypatch.setattr(checkpoint_reader, "_SCRATCH_VALUES", rows * 12)
    monkeypatch.setattr(checkpoint_reader, "_DIRECT_BYTES", rows * 12)
    kv = np.arange(8 * 7 * 4, dtype=np.float32).reshape(56, 4)
    pair = [np.arange(48, dtype=np.float32).reshape(8, 6) + 1000 * i for i in range(2)]
    file = tmp_path / "x.safetensors"
    write_file(
        file, [TensorSpec(n, a.dtype, a.shape) for n, a in (("kv", kv), ("g", pair[0]), ("u", pair[1]))], [kv, *pair]
    )
    infos = {t.name: t for t in read_header(file)}
    view = Piece("kv", (56, 4), (8, 7, 4), (0, 3, 0), (8, 4, 4))
    stack = [Piece(n, (8, 6), (8, 6), (0, 0), (8, 6), at=(i,)) for i, n in enumerate("gu")]
    leaves: dict[ParameterPath, Leaf] = {
        ("v",): Leaf(("v",), (8, 4, 4), np.dtype(np.float32), (Source(view, "plain", infos["kv"]),)),
        ("s",): Leaf(("s",), (2, 8, 6), np.dtype(np.float32), tuple(Source(p, "plain", infos[p.name]) for p in stack)),
    }
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    arrays = read_leaves(leaves, dict.fromkeys(leaves, sharding), rounding="exact", progress=False, threads=3)
    assert np.array_equal(np.asarray(arrays["v",]), kv.reshape(8, 7, 4)[:, 3:])
    assert np.array_equal(np.asarray(arrays["s",]), np.stack(pair))
    for array in arrays.values():
        assert array.sharding == sharding
        for shard in array.addressable_shards:
            assert np.array_equal(np.asarray(shard.data), np.asarray(array)[shard.index])


def test_a_process_reads_only_the_rows_of_its_devices() -> None:
    info = TensorInfo(Path("x"), "w", "BF16", (64, 16), 0)
    piece = Piece("w", (64, 16), (8, 8, 16), (0, 0, 0), (8, 8, 16))
    box = ((2, 4), (0, 8), (0, 16))  # what the devices of one of four processes hold
    buffer = np.zeros((2, 8, 16), jnp.bfloat16)
    blocks = checkpoint_reader._blocks(Source(piece, "plain", info), buffer.dtype, {box: buffer})
    assert [(start, stop) for start, stop, _ in blocks] == [(2, 4)]


def test_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where eight devices share each row: only kv_b, which feeds two parameters, is read twice."""
    read: Counter[str] = Counter()
    original = FilePool.read_into

    def counted(self: FilePool, info: TensorInfo, start: int, out: np.ndarray) -> None:
        read[info.name] += out.nbytes
        original(self, info, start, out)

    monkeypatch.setattr(FilePool, "read_into", counted)
    directory = write_checkpoint("kimi_k25", tmp_path / "c", quantization="int4")
    checkpoint.load(directory, load_config(directory), mesh=make_mesh(), dtype=jnp.bfloat16)
    index = checkpoint.inspect(directory)
    for name, t in index.tensors.items():
        times = 0 if name.startswith(("vision", "mm_")) else 2 if "kv_b_proj" in name else 1
        assert read[t.name] == times * t.nbytes, name


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("prefix", ["language_model.", ""])
def test_only_routed_experts_are_packed(nested: bool, prefix: str, tmp_path: Path) -> None:
    """The kind of a tensor comes from the names in the files, wherever the config keeps its quantisation."""
    directory = write_checkpoint("kimi_k25", tmp_path / "c", quantization="int4")
    config = json.loads((directory / "config.json").read_text())
    if not nested:
        config["quantization_config"] = config["text_config"].pop("quantization_config")
        (directory / "config.json").write_text(json.dumps(config))
    if not prefix:
        rewrite(directory, lambda tensors: {n.removeprefix("language_model."): a for n, a in tensors.items()})
    index = checkpoint.inspect(directory)
    assert (index.prefix, index.int4) == (prefix, True)
    for ask in ("", "language_model."):
        assert index.kind(f"{ask}{LAYER_1}.experts.0.gate_proj") == "int4"
        for stem in (
            f"{LAYER_1}.shared_experts.up_proj",
            "model.layers.0.mlp.down_proj",
            f"{LAYER_1}.gate",
            "model.layers.1.self_attn.kv_b_proj",
            "lm_head",
        ):
            assert index.kind(ask + stem) == "plain", stem
    with pytest.raises(CheckpointError, match="no tensor lm_tail"):
        index.kind("lm_tail")
    arrays = loaded(checkpoint.load(directory, load_config(directory)))
    assert arrays["layers", 1, "mlp", "router_bias"].dtype == jnp.float32
    assert ("layers", 1, "mlp", "experts", "gate_up_packed") in arrays


def test_the_files_decide_what_is_int4(tmp_path: Path) -> None:
    """Not the config: with or without a quantization_config, INT4 files load as INT4 and plain files as plain."""
    plain, int4 = FAMILIES["kimi_k25"], with_quantization(FAMILIES["kimi_k25"], "int4")
    for form, config in (("int4", plain), (None, int4)):
        directory = write_checkpoint("kimi_k25", tmp_path / str(form), quantization=form)  # pyright: ignore[reportArgumentType]
        (directory / "config.json").write_text(json.dumps(config))
        arrays = loaded(checkpoint.load(directory, load_config(directory)))
        assert any("packed" in str(path[-1]) for path in arrays) == (form == "int4")


def test_int4_outside_the_experts_is_dequantised(tmp_path: Path) -> None:
    config = FAMILIES["kimi_k2_thinking"]
    directory = write_checkpoint("kimi_k2_thinking", tmp_path / "c")
    name = "model.layers.1.self_attn.o_proj"

    def pack(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        w = tensors.pop(f"{name}.weight")
        packed, scale = quant.quantize_words(w)
        shape = np.array(w.shape, np.int64)
        return tensors | {f"{name}.weight_packed": packed, f"{name}.weight_scale": scale, f"{name}.weight_shape": shape}

    tensors = rewrite(directory, pack)
    assert not checkpoint.inspect(directory).int4
    arrays = loaded(checkpoint.load(directory, load_config(directory), mesh=make_mesh(), dtype=jnp.float32))
    o = quant.dequantize_words(tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"], np.float32)
    wanted = expected(config, hf_weights(config) | {f"{name}.weight": o})
    assert_loaded(arrays, wanted, jnp.float32)


@pytest.fixture
def int4_directory(tmp_path: Path) -> Path:
    return write_checkpoint("kimi_k25", tmp_path / "c", quantization="int4")


def test_vision_tensors_are_skipped_and_counted(int4_directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kimijax"):
        checkpoint.load(int4_directory, load_config(int4_directory))
    assert "5 vision tensors skipped" in caplog.text


def test_progress_goes_to_stderr(int4_directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    checkpoint.load(int4_directory, load_config(int4_directory), progress=True)
    out, err = capfd.readouterr()
    assert "loading weights" in err
    assert out == ""
    checkpoint.load(int4_directory, load_config(int4_directory))
    assert capfd.readouterr().err == ""


def test_the_table_covers_every_value_once() -> None:
    for family in FAMILIES:
        table = name_table(config_of(family), int4=False)
        values: Counter[str] = Counter()
        for pieces in table.values():
            assert len({p.at for p in pieces}) == len(pieces)
            for p in pieces:
                values[p.name] += math.prod(p.block)
        shapes = {p.name: p.shape for pieces in table.values() for p in pieces}
        tensors = {n.removeprefix("language_model."): a.shape for n, a in hf_weights(FAMILIES[family]).items()}
        assert shapes == tensors
        assert values == {name: math.prod(shape) for name, shape in shapes.items()}


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
@pytest.mark.parametrize(
    "options",
    [
        (),
        pytest.param(("--devices", "8"), marks=pytest.mark.slow),
        pytest.param(("--form", "bf16", "--dtype", "float32"), marks=pytest.mark.slow),
        # a fifth of the bytes in the files, since each value grows from half a byte to four
        pytest.param(("--gb", "0.2", "--unpack-int4", "--dtype", "float32"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_one_gigabyte_needs_no_second_copy(options: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "benchmarks.load", "--json", "--repeat", "1", *options]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, check=True)
    result = json.loads(done.stdout)
    rows = {row["way"].partition(",")[0]: row for row in result["rows"]}
    assert rows.keys() == {"cat", "read", "safetensors", "kimijax"}
    assert all(row["gb_per_s"] > 0 for row in rows.values())
    assert rows["kimijax"]["kept_bytes"] >= 1e9
    assert rows["kimijax"]["peak_over_kept"] <= 1.10
    assert result["loadavg_before"] >= 0
    assert result["probe_gflops"] > 0


def test_single_device_without_a_mesh(int4_directory: Path) -> None:
    arrays = loaded(checkpoint.load(int4_directory, load_config(int4_directory)))
    assert {a.sharding for a in arrays.values()} == {SingleDeviceSharding(jax.devices()[0])}
