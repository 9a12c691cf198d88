"""Made-up checkpoints have the published layout, load, and are refused where they cannot be made."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kimijax import checkpoint, synthetic
from kimijax.config import load_config, parse_config, read_json
from kimijax.errors import CheckpointError, ConfigError
from kimijax.safetensors_io import DTYPES, FilePool, read_header
from kimijax.sharding import make_mesh
from kimijax.synthetic import Reduction, reduced

from .checkpoint_cases import loaded
from .golden import FAMILIES, PUBLISHED_QUANTIZATION, stored_tensors, with_quantization

PUBLISHED = Path(__file__).parents[2] / "shared" / "data" / "kimi_k25" / "config.json"
K25 = with_quantization(FAMILIES["kimi_k25"], "int4")


def written(directory: Path) -> dict[str, np.ndarray]:
    with FilePool() as pool:
        return {t.name: pool.read(t) for f in sorted(directory.glob("*.safetensors")) for t in read_header(f)}


@pytest.mark.parametrize("family", ["kimi_k25", "kimi_k2_thinking", "moonlight"])
def test_tensors_are_those_that_are_published(family: str) -> None:
    quantization = PUBLISHED_QUANTIZATION[family]
    raw = with_quantization(FAMILIES[family], quantization)
    wanted = stored_tensors(raw, dtype="bfloat16", quantization=quantization, extras=False)
    found = {t.name: t for t in synthetic.text_tensors(parse_config(raw))}
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].shape == array.shape, name
        assert found[name].dtype == array.dtype or name.endswith("weight_shape"), name


def test_a_file_for_each_layer(tmp_path: Path) -> None:
    synthetic.write(K25, tmp_path / "c")
    files = [{t.name for t in read_header(f)} for f in sorted((tmp_path / "c").glob("*.safetensors"))]
    n = K25["text_config"]["num_hidden_layers"]
    assert len(files) == n + 3
    for i in range(n):
        assert {".".join(name.split(".")[:4]) for name in files[i]} == {f"language_model.model.layers.{i}"}
    tables = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert files[n] == {f"language_model.{name}" for name in tables}
    assert {name.partition(".")[0] for name in files[n + 1]} == {"mm_projector"}
    assert {name.partition(".")[0] for name in files[n + 2]} == {"vision_tower"}
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    names = {name: f"model-{k:05d}-of-{n + 3:06d}.safetensors" for k, file in enumerate(files, 1) for name in file}
    assert index["weight_map"] == names
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in written(tmp_path / "c").values())


@pytest.mark.parametrize("devices", [1, 8])
def test_contents_load(devices: int, tmp_path: Path) -> None:
    """Which takes finite positive scales and right `weight_shape` tensors."""
    synthetic.write(K25, tmp_path / "c")
    mesh = make_mesh() if devices > 1 else None
    arrays = loaded(checkpoint.load(tmp_path / "c", load_config(tmp_path / "c"), mesh=mesh, dtype=jnp.bfloat16))
    for path, array in arrays.items():
        values = np.asarray(array, np.float32)
        assert np.isfinite(values).all(), path
        assert values.std() > 0, path
    assert np.abs(np.asarray(arrays["norm",], np.float32) - 1).max() <= 0.1
    experts = arrays["layers", 1, "mlp", "experts", "gate_up_packed"]
    assert not np.array_equal(experts[0], experts[1])


def test_a_seed_makes_the_same_again(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        synthetic.write(K25, tmp_path / name, seed=seed)
    a, b, c = (written(tmp_path / name) for name in "abc")
    assert all(np.array_equal(a[name], b[name]) for name in a)
    assert not np.array_equal(a["language_model.lm_head.weight"], c["language_model.lm_head.weight"])


def test_sparse_files_have_the_same_headers_and_take_no_space(tmp_path: Path) -> None:
    raw = reduced(K25, Reduction())
    raw["text_config"]["vocab_size"] = 1 << 21
    synthetic.write(raw, tmp_path / "c", sparse=True)
    synthetic.write(K25, tmp_path / "small")
    files = sorted((tmp_path / "c").glob("*.safetensors"))
    names = [[t.name for t in read_header(f)] for f in files]  # which takes right sizes
    assert names == [[t.name for t in read_header(f)] for f in sorted((tmp_path / "small").glob("*.safetensors"))]
    stats = [f.stat() for f in files]
    assert sum(s.st_size for s in stats) > 2 * (1 << 21) * K25["text_config"]["hidden_size"] * 2
    if sum(s.st_blocks for s in stats) * 512 > 8 << 20:
        pytest.skip(f"the file system of {tmp_path} has no sparse files")
    config = load_config(tmp_path / "c")
    checkpoint.check(tmp_path / "c", config, mesh=make_mesh())
    with pytest.raises(CheckpointError, match=r"scales that are not finite and positive(.|\n)*found 0\.0"):
        checkpoint.load(tmp_path / "c", config, dtype=jnp.bfloat16)


@pytest.mark.parametrize("shards", [1, 2, 64])
def test_a_number_of_files(shards: int) -> None:
    files = synthetic.layout(K25, shards)
    assert len(files) == shards
    assert all(files)
    assert [t for f in files for t in f] == [t for f in synthetic.layout(K25) for t in f]
    if shards == 2:
        one, two = (sum(t.nbytes for t in f) for f in files)
        assert max(one, two) < 1.2 * min(one, two)


def test_a_reduced_model() -> None:
    text = K25["text_config"]
    config = parse_config(reduced(K25, Reduction(2, layers=2, experts=4)))
    assert (config.n_layers, config.hidden, config.n_heads) == (
        2,
        text["hidden_size"] // 2,
        text["num_attention_heads"] // 2,
    )
    assert config.moe is not None
    assert (config.moe.n_experts, config.moe.expert_width) == (4, text["moe_intermediate_size"] // 2)
    assert (config.nope_dim, config.v_dim) == (text["qk_nope_head_dim"], text["v_head_dim"])
    assert text["num_hidden_layers"] > 2  # what is given is left as it is


@pytest.mark.parametrize(
    ("by", "message"),
    [
        (Reduction(0), "--width-divisor: found 0"),
        (Reduction(7), r"config\.text_config\.hidden_size: found \d+, expected a multiple of 7"),
        (Reduction(layers=99), "num_hidden_layers: found 99, expected 1 to the config's"),
        (Reduction(experts=0), "n_routed_experts: found 0"),
        (Reduction(experts=1), "config"),  # fewer than are chosen
    ],
    ids=str,
)
def test_reductions_that_cannot_be_made(by: Reduction, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        reduced(K25, by)


def test_what_is_not_made_here() -> None:
    raw: dict[str, Any] = with_quantization(FAMILIES["deepseek_v3"], "fp8")
    with pytest.raises(ConfigError, match="fp8 is not made here"):
        synthetic.layout(raw)
    with pytest.raises(ConfigError, match="--shards: found 0"):
        synthetic.layout(K25, 0)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(K25))
    command = ["--model", str(tmp_path), "--out", str(tmp_path / "c"), "--layers", "2", "--shards", "3"]
    assert synthetic.main(command) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["files"], said["sparse"]) == (3, False)
    assert said["bytes"] == sum(a.nbytes for a in written(tmp_path / "c").values())
    assert load_config(tmp_path / "c").n_layers == 2
    assert synthetic.main(command) == 2
    assert "in use" in capsys.readouterr().err


@pytest.mark.slow
def test_the_published_checkpoint_in_full(tmp_path: Path) -> None:
    """64 files, 208,550 tensors and 595 GB, which pass every check; some 300 MB on a disk."""
    if not PUBLISHED.is_file():
        pytest.skip(f"the published config is not at {PUBLISHED}")
    synthetic.write(read_json(PUBLISHED), tmp_path / "c", sparse=True)
    index = checkpoint.inspect(tmp_path / "c")
    assert not index.problems
    assert len(index.tensors) == 208_550
    assert len({t.file for t in index.tensors.values()}) == 64
    total = sum(t.nbytes for t in index.tensors.values())
    assert round(total / 1e9, 2) == 595.15
    vision = sum(t.size for n, t in index.tensors.items() if n.startswith(("vision_tower", "mm_projector")))
    assert vision == 471_143_920
    assert {t.dtype for t in index.tensors.values()} <= DTYPES.keys()
    checkpoint.check(tmp_path / "c", load_config(tmp_path / "c"), mesh=make_mesh(), free=lambda _: None)
