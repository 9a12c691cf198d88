"""Feature files: read back as they were written, refused by name once anything about them is wrong."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kimijax.errors import ConfigError
from kimijax.train import draft_recipe, draft_target, feature_files, feature_manifest, feature_writer, run_record
from kimijax.train import features as stage
from kimijax.wiring import WiringError

from .feature_cases import LENGTHS, TAPS, make_documents, make_run, save_documents, small_files
from .feature_cases import write_target as write_checkpoint

FILE = "features-00001.safetensors"  # documents 4 and 5, 41 and 9 tokens


def new_writer(recipe: draft_recipe.DraftRecipe, out: Path, folder: str = "features") -> feature_writer.FeatureWriter:
    documents = stage.load_splits(recipe, out)
    contract = draft_target.DraftTarget.of(recipe).contract
    manifest = feature_manifest.Manifest(
        contract, recipe.features.dtype, "float32", "pre_norm", "kimijax", 1, feature_writer.empty_splits(documents)
    )
    return feature_writer.FeatureWriter(out / folder, manifest, documents)


def states(writer: feature_writer.FeatureWriter, tokens: int, seed: int = 0) -> feature_writer.ShardArrays:
    rng, arrays = np.random.default_rng(seed), feature_writer.ShardArrays(writer.manifest, tokens)
    taps = {tap: rng.standard_normal((tokens, 32)).astype(np.float32) for tap in TAPS}
    arrays.put(0, taps, rng.standard_normal((tokens, 32)).astype(np.float32))
    return arrays


def write_all(recipe: draft_recipe.DraftRecipe, out: Path) -> dict[str, feature_writer.ShardArrays]:
    """A complete set of random states, in several files."""
    with small_files():
        writer = new_writer(recipe, out)
    written: dict[str, feature_writer.ShardArrays] = {}
    for seed, planned in enumerate(writer.missing):
        written[planned.file] = states(writer, planned.tokens, seed)
        writer.write(planned, written[planned.file])
    return written


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def finished(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[draft_recipe.DraftRecipe, Path]:
    """A run with complete features; tests copy it."""
    out = tmp_path_factory.mktemp("finished") / "run"
    recipe = make_run(out, directory)
    write_all(recipe, out)
    return recipe, out


@pytest.fixture
def run(finished: tuple[draft_recipe.DraftRecipe, Path], tmp_path: Path) -> tuple[draft_recipe.DraftRecipe, Path]:
    shutil.copytree(finished[1], tmp_path / "run")
    return finished[0], tmp_path / "run"


def open_set(recipe: draft_recipe.DraftRecipe, out: Path, dtype: str | None = None) -> feature_files.FeatureSet:
    contract, documents = draft_target.DraftTarget.of(recipe).contract, stage.load_splits(recipe, out)["train"]
    return feature_files.FeatureSet.open(out / "features", contract, documents=documents, dtype=dtype)


def test_a_finished_set_reads_back(directory: Path, tmp_path: Path) -> None:
    recipe, documents = make_run(tmp_path, directory), make_documents()
    written = write_all(recipe, tmp_path)
    features = open_set(recipe, tmp_path, "float32")
    features.verify()
    assert features.n_documents == len(LENGTHS)
    assert features.lengths.tolist() == list(LENGTHS)
    assert features.last == "pre_norm"
    found = [*features]
    for d, length, start in zip(found, LENGTHS, documents.offsets, strict=False):
        assert np.array_equal(d.tokens, documents.tokens[start : start + length])
        assert np.array_equal(d.mask, documents.mask[start : start + length])
        assert tuple(d.taps) == TAPS
        assert not d.last.flags.writeable
    for i, rows in ((4, slice(0, 41)), (5, slice(41, 50))):
        assert np.array_equal(found[i].last, written[FILE].last[rows])
        assert np.array_equal(found[i].taps[2], written[FILE].taps[2][rows])
    heldout = feature_files.FeatureSet.open(
        tmp_path / "features", draft_target.DraftTarget.of(recipe).contract, split="heldout"
    )
    assert heldout.lengths.tolist() == [4, 7]
    with pytest.raises(IndexError):
        features.document(len(LENGTHS))


def test_more_files_than_may_be_open(
    run: tuple[draft_recipe.DraftRecipe, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    features = open_set(*run)
    right = [d.last.copy() for d in features]
    features, hashed = open_set(*run), list[str]()
    sha256 = feature_files.file_hash
    monkeypatch.setattr(feature_files, "file_hash", lambda path: (hashed.append(path.name), sha256(path))[1])
    monkeypatch.setattr(feature_files, "_MAPPED", 1)
    first = features.document(0)
    for order in (range(len(right)), reversed(range(len(right)))):
        for i in order:
            assert np.array_equal(features.document(i).last, right[i])
            mapped = [p for p in Path("/proc/self/maps").read_text().splitlines() if str(features.folder) in p]
            assert len(mapped) <= 2  # the file just read and that of `first`
    assert np.array_equal(first.last, right[0])  # a view outlives its file's turn
    assert len(features.manifest.splits["train"].shards) > 2
    assert len(hashed) == len(set(hashed)) == len(features.manifest.splits["train"].shards)  # once each


def test_bfloat16_is_rounded_to_nearest(directory: Path, tmp_path: Path) -> None:
    recipe = make_run(tmp_path, directory, features={"dtype": "bfloat16"})
    writer = new_writer(recipe, tmp_path)
    arrays = feature_writer.ShardArrays(writer.manifest, 3)
    wide = np.array([[1 + 2**-8], [1 + 2**-7 + 2**-8], [1 + 2**-9]], np.float32) * np.ones((3, 32), np.float32)
    arrays.put(0, dict.fromkeys(TAPS, wide), wide)
    assert arrays.last.dtype == ml_dtypes.bfloat16
    assert arrays.last[:, 0].astype(np.float32).tolist() == [1, 1 + 2**-6, 1]  # ties to even
    write_all(recipe, tmp_path)
    assert open_set(recipe, tmp_path, "bfloat16").document(3).taps[1].dtype == ml_dtypes.bfloat16
    with pytest.raises(ConfigError, match=r"features\.dtype: found 'float32', expected bfloat16"):
        open_set(recipe, tmp_path, "float32")


def rewrite(path: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Changes a file's tensors, and the manifest with them: a producer that lies."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    manifest = path.parent / "manifest.json"
    data = json.loads(manifest.read_text())
    for shard in data["splits"]["train"]["shards"]:
        if shard["file"] == path.name:
            shard |= {"bytes": path.stat().st_size, "sha256": run_record.file_hash(path)}
    manifest.write_text(json.dumps(data))


def put_nan(tensors: dict[str, np.ndarray]) -> None:
    tensors["tap.2"][44, 3] = np.nan


def put_infinity(tensors: dict[str, np.ndarray]) -> None:
    tensors["last"][0, 0] = -np.inf


def other_tokens(tensors: dict[str, np.ndarray]) -> None:
    tensors["tokens"][1] += 1


def other_mask(tensors: dict[str, np.ndarray]) -> None:
    tensors["mask"][0] = 1 - tensors["mask"][0]


def other_offsets(tensors: dict[str, np.ndarray]) -> None:
    tensors["offsets"][1] += 1


def flat_offsets(tensors: dict[str, np.ndarray]) -> None:
    tensors["offsets"][1] = 0


def one_row_too_few(tensors: dict[str, np.ndarray]) -> None:
    tensors["tap.1"] = tensors["tap.1"][:-1]


def wrong_width(tensors: dict[str, np.ndarray]) -> None:
    tensors["tap.1"] = np.ascontiguousarray(tensors["tap.1"][:, :-1])


def wrong_dtype(tensors: dict[str, np.ndarray]) -> None:
    tensors["last"] = tensors["last"].astype(ml_dtypes.bfloat16)


def other_tap(tensors: dict[str, np.ndarray]) -> None:
    tensors["tap.3"] = tensors.pop("tap.2")


def normed_last(tensors: dict[str, np.ndarray]) -> None:
    tensors["last_normed"] = tensors.pop("last")


def swapped(path: Path) -> None:
    other = path.with_name("features-00000.safetensors")
    first = other.read_bytes()
    other.write_bytes(path.read_bytes())
    path.write_bytes(first)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]), "truncated"),
        (lambda p: p.write_bytes(b""), "a file of 0 bytes"),
        (lambda p: p.unlink(), "cannot be read: No such file"),
        (lambda p: p.write_bytes(p.read_bytes()[:-1] + b"\x07"), "damaged, or another file under this name"),
        (swapped, "offsets: found I64 [3], expected int64 [5]"),
        (lambda p: rewrite(p, put_nan), "tap.2: found a NaN or infinity in document 5"),
        (lambda p: rewrite(p, put_infinity), "last: found a NaN or infinity in document 4"),
        (lambda p: rewrite(p, other_tokens), "tokens: not those of documents 4 to 5 of the corpus"),
        (lambda p: rewrite(p, other_mask), "mask: not those of documents"),
        (lambda p: rewrite(p, other_offsets), "offsets: not those of documents"),
        (lambda p: rewrite(p, flat_offsets), "offsets: expected to rise from 0 to 50"),
        (lambda p: rewrite(p, one_row_too_few), "tap.1: found F32 [49, 32], expected float32 [50, 32]"),
        (lambda p: rewrite(p, wrong_width), "tap.1: found F32 [50, 31], expected float32 [50, 32]"),
        (lambda p: rewrite(p, wrong_dtype), "last: found BF16 [50, 32], expected float32 [50, 32]"),
        (lambda p: rewrite(p, other_tap), "tap.3: no such tensor is declared; tap.2: missing"),
        (lambda p: rewrite(p, normed_last), "last_normed: no such tensor is declared; last: missing"),
    ],
)
def test_damaged_files_are_refused_by_name(
    run: tuple[draft_recipe.DraftRecipe, Path], damage: Callable[[Path], None], reason: str
) -> None:
    recipe, out = run
    damage(out / "features" / FILE)
    with pytest.raises(feature_manifest.FeatureError) as e:
        open_set(recipe, out).document(4)
    assert reason in str(e.value)
    assert "features-0000" in str(e.value)
    assert "makes this file anew" in str(e.value)


def test_files_of_equal_sizes_that_changed_places_are_refused(directory: Path, tmp_path: Path) -> None:
    recipe = make_run(tmp_path, directory)
    save_documents(tmp_path / "corpus", make_documents((40, 40)), make_documents((4, 7), seed=1))
    write_all(recipe, tmp_path)
    swapped(tmp_path / "features" / FILE)
    with pytest.raises(
        feature_manifest.FeatureError, match=r"features-00000.* expected .* by manifest\.json: damaged, or another"
    ):
        open_set(recipe, tmp_path).document(0)


def test_other_documents_target_wiring_or_format_are_refused(
    run: tuple[draft_recipe.DraftRecipe, Path], tmp_path: Path
) -> None:
    recipe, out = run
    other_taps = dataclasses.replace(recipe, target=dataclasses.replace(recipe.target, taps=(0, 1)))
    with pytest.raises(WiringError, match=r"wiring\.taps .*\(1, 2\) .*\(0, 1\)"):
        open_set(other_taps, out)
    with pytest.raises(WiringError, match=r"wiring\.taps"):
        new_writer(other_taps, out)
    retrained = make_run(tmp_path / "other", write_checkpoint(tmp_path / "retrained", seed=1))
    with pytest.raises(WiringError, match=r"target\.tensors"):
        open_set(retrained, out)
    halves = dataclasses.replace(recipe, features=dataclasses.replace(recipe.features, dtype="bfloat16"))
    with pytest.raises(ConfigError, match=r"features: dtype: found 'bfloat16', expected float32, as in"):
        new_writer(halves, out)
    save_documents(out / "corpus", make_documents(seed=5), make_documents((4, 7), seed=1))
    for use in (new_writer, open_set):
        with pytest.raises(ConfigError, match=r"train: documents .* the documents have changed"):
            use(recipe, out)
    manifest = out / "features" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ConfigError, match=r"manifest\.json\.format: found 2, expected 1"):
        open_set(recipe, out)
    shutil.rmtree(out / "features")
    with pytest.raises(ConfigError, match=r"manifest\.json: found 'no such file', expected a feature set"):
        open_set(recipe, out)


def test_manifest_names_only_files_of_its_folder(run: tuple[draft_recipe.DraftRecipe, Path]) -> None:
    recipe, out = run
    manifest = out / "features" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("features-00001", "../features-00001"))
    with pytest.raises(ConfigError, match=r"shards\[1\]\.file: found '\.\./features-00001"):
        open_set(recipe, out)


def test_states_that_are_not_finite_are_never_written(run: tuple[draft_recipe.DraftRecipe, Path]) -> None:
    writer = new_writer(*run, "new")
    planned, _ = writer.planned  # one file a split
    arrays = states(writer, planned.tokens)
    arrays.last[9, 0] = np.inf
    with pytest.raises(
        feature_manifest.FeatureError, match=r"features-00000.*: last: a NaN or infinity in document 2 \(train\)"
    ):
        writer.write(planned, arrays)
    assert [p.name for p in writer.folder.iterdir()] == []


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_first_not_finite(dtype: np.dtype) -> None:
    array = np.ones((7, 5), dtype)
    assert feature_manifest.first_not_finite(array) is None
    array[5, 1] = -np.inf
    assert feature_manifest.first_not_finite(array) == 5
    array[2, 4] = np.nan
    assert feature_manifest.first_not_finite(array) == 2


def test_plan_of_files() -> None:
    offsets = np.array([0, 3, 5, 30, 31, 40])
    assert feature_manifest.plan_shards(offsets, 100_000, 1) == [
        (0, 2),
        (2, 3),
        (3, 5),
    ]  # 10 tokens a file; the 25 have their own
    assert feature_manifest.plan_shards(offsets, 1, 1) == [(0, 5)]
    assert feature_manifest.plan_shards(offsets, 10**9, 1) == [(i, i + 1) for i in range(5)]


def test_a_file_of_which_a_document_is_missing_is_not_written(run: tuple[draft_recipe.DraftRecipe, Path]) -> None:
    writer = new_writer(*run, "new")
    planned, _ = writer.planned
    with pytest.raises(ValueError, match="found states of 130 tokens, expected 136"):
        writer.write(planned, states(writer, 130))
