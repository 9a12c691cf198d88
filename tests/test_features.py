"""Hidden states in files: the same however they are computed, complete or not there, and refused once damaged."""

import functools
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimijax import checkpoint
from kimijax.config import load_config
from kimijax.errors import ConfigError
from kimijax.model import Target
from kimijax.sharding import PRESETS, Preset, make_mesh
from kimijax.train import draft_recipe, draft_target, feature_files, feature_manifest, feature_writer
from kimijax.train import features as stage

from .feature_cases import (
    TAPS,
    WIRING,
    make_documents,
    make_run,
    save_documents,
    small_files,
    split,
)
from .feature_cases import write_target as write_checkpoint

LIMIT = 1e-5  # largest error relative to the largest value
FILE = "features-00001.safetensors"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def target(directory: Path) -> Target:
    """As the stage loads it: its programs are compiled once for all tests."""
    return checkpoint.load(directory, load_config(directory), dtype=jnp.float32, unpack_int4=True)


@pytest.fixture(scope="module")
def finished(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[draft_recipe.DraftRecipe, Path]:
    """A run whose features are complete, in several files; tests copy it."""
    out = tmp_path_factory.mktemp("finished") / "run"
    recipe = make_run(out, directory)
    with small_files():
        assert stage.extract(recipe, out)
    return recipe, out


@pytest.fixture
def run(finished: tuple[draft_recipe.DraftRecipe, Path], tmp_path: Path) -> tuple[draft_recipe.DraftRecipe, Path]:
    shutil.copytree(finished[1], tmp_path / "run")
    return finished[0], tmp_path / "run"


def open_set(recipe: draft_recipe.DraftRecipe, out: Path) -> feature_files.FeatureSet:
    contract, documents = draft_target.DraftTarget.of(recipe).contract, stage.load_splits(recipe, out)["train"]
    return feature_files.FeatureSet.open(out / "features", contract, documents=documents)


@functools.partial(jax.jit, static_argnums=0)
def plain(graph: nnx.GraphDef[Target], state: nnx.State, ids: jax.Array) -> dict[int, jax.Array]:
    return nnx.merge(graph, state)(ids, taps=(0, *TAPS)).taps


def alone(target: Target, tokens: np.ndarray) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """The states of one document by the model's own plain call; nothing can see the padding after it."""
    ids = np.zeros((1, 48), np.int32)
    ids[0, : len(tokens)] = tokens
    found = {tap: np.asarray(h)[0, : len(tokens)] for tap, h in plain(*nnx.split(target), ids).items()}
    return {tap: found[tap] for tap in TAPS}, found[2]


def assert_close(found: np.ndarray, right: np.ndarray) -> None:
    assert found.shape == right.shape
    assert np.abs(found - right).max() <= LIMIT * np.abs(right).max()


# With 20 tokens a pass, two documents go through in chunks, with a last chunk that is not full.
@pytest.mark.parametrize("batch_tokens", [64, 20])
def test_states_do_not_depend_on_batch_rows_or_chunks(target: Target, batch_tokens: int) -> None:
    documents = split(make_documents())
    extractor = stage.Extractor(target, WIRING, batch_tokens, "float32")
    found = {s.document: s for s in extractor.run(documents)}
    assert sorted(found) == list(range(len(documents)))
    for i, tokens in enumerate(documents):
        taps, last = alone(target, tokens)
        assert_close(found[i].last, last)
        for tap in TAPS:
            assert_close(found[i].taps[tap], taps[tap])
        assert np.array_equal(found[i].taps[2], found[i].last)
    # A second call, after other samples and in another order, gives the same.
    again = {s.document: s for s in extractor.run(documents[::-1])}
    assert_close(again[0].last, found[len(documents) - 1].last)


def test_documents_of_one_row_do_not_see_each_other(target: Target) -> None:
    extractor = stage.Extractor(target, WIRING, 20, "float32")
    documents = [np.arange(1, 9), np.arange(20, 26)]
    before = {s.document: s for s in extractor.run(documents)}
    documents[0] = documents[0] + 300
    after = {s.document: s for s in extractor.run(documents)}
    assert np.array_equal(before[1].last, after[1].last)
    assert not np.array_equal(before[0].last, after[0].last)


def test_a_batch_is_packed_into_few_shapes() -> None:
    documents = [np.full(n, n) for n in (600, 500, 12, 2000, 7, 3000)]
    found = list(stage.batches(documents, [len(d) for d in documents], 2048))
    assert [b.ids.shape for b in found] == [(1, 2048), (1, 2048), (4, 512)]  # the last one is 600 + ..., 500 + 12
    assert sorted(place[0] for b in found for place in b.places) == [0, 1, 2, 3, 4]  # 3000 tokens go in chunks
    for b in found:
        for document, row, start, stop in b.places:
            assert (b.ids[row, start:stop] == len(documents[document])).all()
            assert b.positions[row, start:stop].tolist() == list(range(stop - start))
        assert (b.segments >= 0).sum() == sum(stop - start for _, _, start, stop in b.places)


def test_row_lengths() -> None:
    assert [stage.row_tokens(n, 8192) for n in (1, 512, 513, 2048, 2049, 8192)] == [512, 512, 2048, 2048, 8192, 8192]
    assert stage.row_tokens(3, 100) == 100


@pytest.mark.parametrize("preset", ["tp", *(pytest.param(p, marks=pytest.mark.slow) for p in PRESETS if p != "tp")])
def test_states_are_the_same_on_a_mesh(preset: Preset, directory: Path, target: Target) -> None:
    mesh = make_mesh(jax.devices()[:2], preset=preset)
    split_target = checkpoint.load(directory, load_config(directory), mesh=mesh, dtype=jnp.float32)
    documents = [split(make_documents())[i] for i in (0, 2, -1)]  # two packed, one in chunks
    found = list(stage.Extractor(split_target, WIRING, 20, "float32", mesh).run(documents))
    assert sorted(states.document for states in found) == [0, 1, 2]
    for states in found:
        assert_close(states.last, alone(target, documents[states.document])[1])


def test_a_finished_set_has_the_states_of_each_document(
    finished: tuple[draft_recipe.DraftRecipe, Path], target: Target
) -> None:
    features = open_set(*finished)
    assert len(features.manifest.splits["train"].shards) == 3
    for d, tokens in zip(features, split(make_documents()), strict=True):
        assert np.array_equal(d.tokens, tokens)
        taps, last = alone(target, tokens)
        assert_close(d.taps[1], taps[1])
        assert_close(d.taps[2], taps[2])
        assert_close(d.last, last)


def files(out: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted((out / "features").iterdir())}


def test_stop_and_resume_write_what_a_clean_run_writes(
    finished: tuple[draft_recipe.DraftRecipe, Path], directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_run(tmp_path, directory)
    calls = iter([False] * 6 + [True])
    with small_files():
        assert not stage.extract(recipe, tmp_path, lambda: next(calls))
        done = len(feature_manifest.Manifest.read(tmp_path / "features").splits["train"].shards)
        assert 0 < done < 3
        with pytest.raises(feature_manifest.FeatureError, match="of 8 documents, expected all"):
            open_set(recipe, tmp_path)
        # What a kill leaves: a part, and a file that was renamed but is not in the manifest yet.
        (tmp_path / "features" / ".features-00002.safetensors.part").write_bytes(b"half")
        (tmp_path / "features" / "features-00002.safetensors").write_bytes(b"unlisted")
        assert stage.extract(recipe, tmp_path)
        assert f"({done} complete)" in capsys.readouterr().err
        assert files(tmp_path) == files(finished[1])
        assert stage.extract(recipe, tmp_path)  # nothing is left to do
        assert "0 of 4 files to write" in capsys.readouterr().err


def test_full_disk_keeps_complete_files(
    finished: tuple[draft_recipe.DraftRecipe, Path], directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, real = make_run(tmp_path, directory), feature_writer.write_file
    with small_files():

        def full(file: Path, *arguments: Any) -> None:
            if "00001" in file.name:
                file.write_bytes(b"half of it")
                raise OSError(28, "No space left on device")
            real(file, *arguments)

        monkeypatch.setattr(feature_writer, "write_file", full)
        with pytest.raises(feature_manifest.FeatureError, match=rf"{FILE}: cannot be written: No space left on device"):
            stage.extract(recipe, tmp_path)
        assert sorted(files(tmp_path)) == ["features-00000.safetensors", "manifest.json"]
        monkeypatch.setattr(feature_writer, "write_file", real)
        assert stage.extract(recipe, tmp_path)
    assert files(tmp_path) == files(finished[1])


def test_a_small_disk_is_refused_before_the_target_is_loaded(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_run(tmp_path, directory)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=64 * 10**6 + 50_000))
    monkeypatch.setattr(draft_target.DraftTarget, "load", lambda *_: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=r"features: free disk space: .* corpus\.limit, or set features\.source"):
        stage.extract(recipe, tmp_path)
    assert "147 tokens of 389 bytes: 0.1 MB" in capsys.readouterr().err


def test_online_stores_nothing(directory: Path, tmp_path: Path) -> None:
    assert stage.extract(make_run(tmp_path, directory, features={"source": "online"}), tmp_path)
    assert not (tmp_path / "features").exists()


def test_damaged_file_is_made_again(
    run: tuple[draft_recipe.DraftRecipe, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, out = run
    right = files(out)
    path = out / "features" / FILE
    path.write_bytes(path.read_bytes()[:-1])
    (out / "features" / "heldout-00000.safetensors").unlink()
    with small_files():
        assert stage.extract(recipe, out)
    said = capsys.readouterr().err
    assert f"{FILE} is damaged" in said
    assert "heldout-00000.safetensors is missing" in said
    assert files(out) == right


def test_ids_that_the_target_does_not_have_are_refused(directory: Path, tmp_path: Path) -> None:
    recipe, documents = make_run(tmp_path, directory), make_documents()
    documents.tokens[3] = 600
    save_documents(tmp_path / "corpus", documents, make_documents((4, 7), seed=1))
    with pytest.raises(ConfigError, match=r"documents \(train\): token ids: .*expected ids from 0 to 599"):
        stage.extract(recipe, tmp_path)
