"""The draft vocabulary: which tokens are kept, what that covers, and what published files store of it."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from kimijax.config import parse_config
from kimijax.draft_config import DraftConfig, LlamaAttentionConfig
from kimijax.draft_export import save_draft
from kimijax.drafter import declare_drafter, initialise_drafter
from kimijax.errors import ConfigError
from kimijax.model import declare_target, initialise
from kimijax.train import packing, vocab
from kimijax.wiring import Wiring

from . import toy_tokenizer
from .feature_cases import CONFIG, make_run, save_documents
from .feature_cases import write_target as write_checkpoint

END = toy_tokenizer.N_RANKS + toy_tokenizer.NAMES.index("<|im_end|>")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target") / "model")


def documents(tokens: list[int], mask: list[int]) -> packing.Documents:
    offsets = np.array([0, len(tokens)], np.int64)
    return packing.Documents(np.array(tokens, np.uint16), np.array(mask, np.uint8), offsets)


def test_only_answers_are_counted() -> None:
    counts = vocab.token_counts(documents([3, 3, 1, 1, 1, 2], [0, 1, 1, 0, 1, 0]), 5)
    assert counts.tolist() == [0, 2, 0, 1, 0]


def test_the_most_frequent_are_kept_and_ties_go_to_the_lower_id() -> None:
    counts = np.array([1, 5, 2, 0, 2, 2, 9, 0])
    assert vocab.choose(counts, 3, []).tolist() == [1, 2, 6]
    assert vocab.choose(counts, 4, []).tolist() == [1, 2, 4, 6]
    assert vocab.choose(counts, 3, [7]).tolist() == [1, 6, 7]  # an end of an answer, however rare
    assert vocab.choose(counts, 8, []).tolist() == list(range(8))
    with pytest.raises(ConfigError, match=r"vocab\.size: found 9, expected at most 8"):
        vocab.choose(counts, 9, [])
    with pytest.raises(ConfigError, match=r"vocab\.size: found 1, expected at least 2, the tokens that end an answer"):
        vocab.choose(counts, 1, [3, 7])


def test_a_vocabulary_and_its_report(directory: Path, tmp_path: Path) -> None:
    recipe = make_run(tmp_path, directory, vocab={"size": 6})
    # Training answers: 97 four times, 98 three times, 99 and 100 twice, 101 once. Prompts are full of 5.
    train = documents([5] * 9 + [97] * 4 + [98] * 3 + [99, 100] * 2 + [101], [0] * 9 + [1] * 12)
    heldout = documents([5, 97, 101, 5, 98, 7], [0, 1, 1, 0, 1, 1])
    save_documents(tmp_path / "corpus", train, heldout)
    vocab.build_vocab(recipe, tmp_path)
    ids = vocab.load_vocab(tmp_path)
    stops = {END, END - 1}  # and [EOS]
    assert stops <= set(ids.tolist())
    assert ids.dtype == np.int64
    assert [i for i in ids if i not in stops] == [97, 98, 99, 100]
    report = json.loads((tmp_path / "vocab" / "report.json").read_text())
    assert report["train"] == {
        "tokens": 12, "inside": 11, "coverage": 11 / 12, "distinct": 5, "distinct_inside": 4
    }  # fmt: skip
    assert report["heldout"]["coverage"] == 0.5
    assert report["kept_but_never_seen"] == 2
    assert report["most_frequent_left_out"] == [{"id": 101, "text": "e", "count": 1}]
    before = {p.name: p.read_bytes() for p in (tmp_path / "vocab").iterdir()}
    vocab.build_vocab(recipe, tmp_path)
    assert {p.name: p.read_bytes() for p in (tmp_path / "vocab").iterdir()} == before


def test_size_zero_keeps_every_id(directory: Path, tmp_path: Path) -> None:
    for size in (0, 600):
        vocab.build_vocab(make_run(tmp_path, directory, vocab={"size": size}), tmp_path)
        assert vocab.load_vocab(tmp_path).tolist() == list(range(600))


def test_what_does_not_fit_is_refused(directory: Path, tmp_path: Path) -> None:
    n = toy_tokenizer.N_RANKS + 256
    for size, expected in ((601, "at most 600, the target's vocabulary"), (n + 1, f"at most {n}, the ids")):
        with pytest.raises(ConfigError, match=rf"vocab\.size: found {size}, expected {expected}"):
            vocab.build_vocab(make_run(tmp_path, directory, vocab={"size": size}), tmp_path)
    assert not (tmp_path / "vocab").exists()
    recipe, empty = make_run(tmp_path, directory), documents([1, 2, 3], [0, 0, 0])
    save_documents(tmp_path / "corpus", empty, empty)
    with pytest.raises(ConfigError, match=r"documents \(train\): tokens of assistant turns: found 0"):
        vocab.build_vocab(recipe, tmp_path)
    save_documents(tmp_path / "corpus", documents([1, 600], [0, 1]), empty)
    with pytest.raises(ConfigError, match="expected ids from 0 to 599"):
        vocab.build_vocab(recipe, tmp_path)
    (tmp_path / "corpus" / "report.json").unlink()
    with pytest.raises(ConfigError, match="run the stage corpus"):
        vocab.build_vocab(recipe, tmp_path)


def test_a_vocabulary_is_read_only_as_it_was_written(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run the stage vocab"):
        vocab.load_vocab(tmp_path)
    vocab.build_vocab(make_run(tmp_path, directory), tmp_path)
    path = tmp_path / "vocab" / "target_ids.npy"
    ids = vocab.load_vocab(tmp_path)
    assert len(ids) == 300
    assert np.array_equal(vocab.load_vocab(tmp_path, 300), ids)
    with pytest.raises(ConfigError, match=r"vocab\.size: found 600, expected 300, the ids of .*run the stage vocab"):
        vocab.load_vocab(tmp_path, 600)
    np.save(path, ids + 1)
    with pytest.raises(ConfigError, match=r"target_ids\.npy: found 'int64, sha256"):
        vocab.load_vocab(tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigError, match="expected what the stage vocab writes"):
        vocab.load_vocab(tmp_path)


def test_published_files_store_the_distance_to_the_target_id(tmp_path: Path) -> None:
    config = parse_config({**CONFIG, "vocab_size": 16})
    target = initialise(declare_target(config, dtype=jnp.dtype(jnp.float32), int4=False), 0)
    drafter = declare_drafter(
        DraftConfig(
            attention=LlamaAttentionConfig(n_heads=2, n_kv_heads=1, head_dim=8, rope_theta=1e4),
            vocab_size=16,
            draft_vocab_size=4,
            hidden=32,
            target_hidden=32,
            n_taps=3,
            mlp_width=16,
            norm_eps=1e-5,
            max_positions=64,
        ),
        Wiring((2, 5, 7), 10, 32),
        dtype=jnp.dtype(jnp.float32),
    )
    kept = vocab.choose(np.bincount([5, 11, 2, 6, 2], minlength=16), 4, [])
    save_draft(initialise_drafter(drafter, target, kept, 0), tmp_path / "draft", "sglang")
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    assert kept.tolist() == [2, 5, 6, 11]
    assert tensors["d2t"].tolist() == [2, 4, 4, 8]
    assert np.flatnonzero(tensors["t2d"]).tolist() == [2, 5, 6, 11]
    assert tensors["t2d"].shape == (16,)
