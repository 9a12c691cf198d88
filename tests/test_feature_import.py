"""Hidden states of other trainers: read without their software, refused where they cannot mean what is told."""

import dataclasses
import gzip
import json
import pickle
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from kimijax.config import load_config
from kimijax.errors import ConfigError
from kimijax.fingerprint import Contract, fingerprint_target
from kimijax.loader import load_tokenizer
from kimijax.train import feature_files, feature_import, packing, torch_files
from kimijax.wiring import Wiring, WiringError

from .feature_cases import WIRING
from .feature_cases import write_target as write_checkpoint

GOLDEN = Path(__file__).parent / "golden" / "torch_sample.ckpt"  # by torch itself: golden/make_torch_sample.py
BF16 = np.dtype(ml_dtypes.bfloat16)
STORAGES = {np.dtype(np.int64): "LongStorage", np.dtype(np.float32): "FloatStorage", BF16: "BFloat16Storage"}


def write_torch(path: Path, tensors: Mapping[str, np.ndarray], extra: bytes = b"") -> None:
    """What torch.save writes: a zip of raw storages and a pickle that refers to them.

    `extra`: opcodes of one more value, under the name `more`.
    """

    def text(value: str) -> bytes:
        return b"X" + len(value).to_bytes(4, "little") + value.encode()

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(b"J" + v.to_bytes(4, "little") for v in values) + b"t"

    code = b"\x80\x02}("
    for i, (name, array) in enumerate(tensors.items()):
        strides = tuple(s // array.itemsize for s in array.strides)
        code += text(name) + b"ctorch._utils\n_rebuild_tensor_v2\n("
        code += b"(" + text("storage") + f"ctorch\n{STORAGES[array.dtype]}\n".encode() + text(str(i)) + text("cpu")
        code += b"J" + array.size.to_bytes(4, "little") + b"tQ" + numbers((0,))[1:-1]
        code += numbers(array.shape) + numbers(strides) + b"\x89ccollections\nOrderedDict\n)RtR"
    if extra:
        code += text("more") + extra
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("sample/data.pkl", code + b"u.")
        archive.writestr("sample/byteorder", "little")
        for i, array in enumerate(tensors.values()):
            archive.writestr(f"sample/data/{i}", array.tobytes())


def record(seed: int, length: int = 9) -> dict[str, np.ndarray]:
    """A SpecForge record for a target 32 wide and two taps."""
    rng = np.random.default_rng(seed)
    return {
        "input_ids": rng.integers(0, 500, length),
        "loss_mask": (np.arange(length) >= length // 2).astype(np.int64),
        "hidden_state": rng.standard_normal((1, length, 32)).astype(BF16),
        "aux_hidden_state": rng.standard_normal((1, length, 64)).astype(BF16),
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture
def specforge(directory: Path, tmp_path: Path) -> feature_import.ImportOptions:
    """Five files in two folders, the fifth without a token to learn from."""
    for i in range(5):
        folder = tmp_path / "states" / f"rows_{i // 3}"
        folder.mkdir(parents=True, exist_ok=True)
        tensors = record(i, 5 + i)
        if i == 4:
            tensors["loss_mask"][:] = 0
        write_torch(folder / f"data_{i}.ckpt", tensors)
    packed = tmp_path / "states" / "rows_0" / "data_1.ckpt"
    Path(f"{packed}.gz").write_bytes(gzip.compress(packed.read_bytes()))
    packed.unlink()
    # Outputs of layers 0 and 1: taps 1 and 2.
    return feature_import.ImportOptions(
        "specforge", tmp_path / "states", str(directory), (0, 1), "specforge", heldout=1
    )


@pytest.fixture
def speculators(directory: Path, tmp_path: Path) -> feature_import.ImportOptions:
    lines = []
    (tmp_path / "hs").mkdir()
    for i in (0, 1, 2, 10):
        r = record(i)
        h = np.concatenate([r["aux_hidden_state"].reshape(9, 2, 32), r["hidden_state"].reshape(9, 1, 32)], axis=1)
        save_file({"token_ids": r["input_ids"], "hidden_states": h}, tmp_path / "hs" / f"hs_{i}.safetensors")
    for i in range(11):
        lines.append(json.dumps({k: record(i)[k].tolist() for k in ("input_ids", "loss_mask")}) + "\n")
    (tmp_path / "masks.jsonl").write_text("".join(lines))
    return feature_import.ImportOptions(
        "speculators", tmp_path / "hs", str(directory), (1, 2), "vllm", tmp_path / "masks.jsonl", heldout=1
    )


def open_set(options: feature_import.ImportOptions, out: Path, wiring: Wiring = WIRING) -> feature_files.FeatureSet:
    directory = Path(options.model)
    config = load_config(directory)
    tokenizer, _ = load_tokenizer(directory, config)
    assert tokenizer is not None
    contract = Contract(wiring, fingerprint_target(directory, config), tokenizer.fingerprint)
    return feature_files.FeatureSet.open(out / "features", contract, documents=packing.Documents.load(out / "corpus"))


def test_a_file_by_torch_itself_is_read_with_its_offsets_and_strides() -> None:
    with torch_files.TorchFile(GOLDEN) as file:
        assert file.names == ["aux_hidden_state", "hidden_state", "input_ids", "loss_mask"]
        assert file.read("input_ids").tolist() == [104, 105, 106, 107, 108, 109]
        assert file.read("loss_mask").tolist() == [0, 0, 1, 1, 0, 1]
        aux, last = file.read("aux_hidden_state"), file.read("hidden_state")
    right = (np.arange(6 * 64, dtype=np.float32).reshape(1, 6, 64) / 64).astype(BF16)
    assert aux.dtype == BF16
    assert np.array_equal(aux, right)
    assert np.array_equal(last[0], (np.arange(6 * 32, dtype=np.float32).reshape(32, 6).T / -32).astype(BF16))
    assert last.flags.c_contiguous


@pytest.mark.parametrize("name", ["os\nsystem", "builtins\neval", "torch\nload", "torch.serialization\n_get_layout"])
def test_a_pickle_that_asks_for_anything_else_is_refused(tmp_path: Path, name: str) -> None:
    write_torch(tmp_path / "bad.ckpt", record(0), f"c{name}\n(X\x04\x00\x00\x00truetR".encode())
    with pytest.raises(
        torch_files.TorchFileError, match=rf"bad\.ckpt: its pickle asks for {name.replace(chr(10), '.')}, expected"
    ):
        torch_files.TorchFile(tmp_path / "bad.ckpt")


def test_damaged_torch_files_are_refused_by_name(tmp_path: Path) -> None:
    path, right = tmp_path / "a.ckpt", GOLDEN.read_bytes()
    for wrong in (right[: len(right) // 2], b"", b"PK\x03\x04"):
        path.write_bytes(wrong)
        with pytest.raises(torch_files.TorchFileError, match=r"a\.ckpt: found .*truncated, or damaged"):
            torch_files.TorchFile(path)
    with zipfile.ZipFile(GOLDEN) as archive:
        at = next(i.header_offset for i in archive.infolist() if i.filename.endswith("data/3"))
    path.write_bytes(right[: at + 200] + b"\xff\xff" + right[at + 202 :])
    with (
        torch_files.TorchFile(path) as file,
        pytest.raises(torch_files.TorchFileError, match=r"a\.ckpt: found Bad CRC-32"),
    ):
        [file.read(name) for name in file.names]
    for at, byte in ((8, 9), (6, 1)):  # of a central directory's entry: flags, encrypted; compression, Deflate64
        entry = right.index(b"PK\x01\x02") + 2 + at
        path.write_bytes(right[:entry] + bytes([byte]) + right[entry + 1 :])
        with pytest.raises(torch_files.TorchFileError, match=r"a\.ckpt: found .*truncated, or damaged"):
            torch_files.TorchFile(path)
    packed = tmp_path / "a.ckpt.gz"
    packed.write_bytes(gzip.compress(right)[:-20])
    with pytest.raises(torch_files.TorchFileError, match=r"a\.ckpt\.gz: found .*truncated, or damaged"):
        torch_files.TorchFile(packed)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("sample/data.pkl", pickle.dumps([1, 2]))
    with pytest.raises(torch_files.TorchFileError, match=r"a\.ckpt: found a list, expected a dictionary of tensors"):
        torch_files.TorchFile(path)
    with pytest.raises(torch_files.TorchFileError, match="No such file"):
        torch_files.TorchFile(tmp_path / "none.ckpt")


def test_specforge_files_become_a_feature_set(specforge: feature_import.ImportOptions, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert feature_import.import_features(specforge, out)
    features = open_set(specforge, out)
    assert features.last == "post_norm"
    found = {len(d.tokens): d for d in features}
    heldout = packing.Documents.load(out / "corpus", "heldout_")
    assert sorted([*found, len(heldout.tokens)]) == [5, 6, 7, 8]  # that of 9 tokens has nothing to learn from
    for length, d in found.items():
        r = record(length - 5, length)
        assert np.array_equal(d.tokens, r["input_ids"])
        assert np.array_equal(d.mask, r["loss_mask"])
        assert np.array_equal(d.taps[1], r["aux_hidden_state"][0, :, :32])
        assert np.array_equal(d.taps[2], r["aux_hidden_state"][0, :, 32:])
        assert np.array_equal(d.last, r["hidden_state"][0])
    (prompt,) = map(json.loads, (out / "corpus" / "prompts.jsonl").read_text().splitlines())
    n = len(heldout.tokens)
    assert prompt == {
        "id": "specforge-0",
        "dataset": "specforge",
        "ids": record(n - 5, n)["input_ids"][: n // 2].tolist(),
    }


def test_speculators_files_become_a_feature_set(speculators: feature_import.ImportOptions, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert feature_import.import_features(speculators, out)
    features = open_set(speculators, out)
    assert features.last == "pre_norm"
    assert features.n_documents == 3
    records = {tuple(record(i)["input_ids"].tolist()): record(i) for i in (0, 1, 2, 10)}
    for d in features:
        r = records[tuple(d.tokens.tolist())]
        assert np.array_equal(d.mask, r["loss_mask"])
        assert np.array_equal(d.taps[1], r["aux_hidden_state"].reshape(9, 2, 32)[:, 0])
        assert np.array_equal(d.last, r["hidden_state"][0])


def test_import_goes_on_where_it_stopped(specforge: feature_import.ImportOptions, tmp_path: Path) -> None:
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    feature_import.import_features(specforge, whole)
    calls = iter([False, True])
    assert not feature_import.import_features(specforge, halved, lambda: next(calls))
    assert feature_import.import_features(specforge, halved)
    for path in (whole / "features").iterdir():
        assert (halved / "features" / path.name).read_bytes() == path.read_bytes()
    first = specforge.source / "rows_0" / "data_0.ckpt"
    write_torch(first, record(77))
    with pytest.raises(ConfigError, match=r"corpus: found .*expected the documents of the files to import"):
        feature_import.import_features(specforge, halved)


def test_what_cannot_be_imported_is_refused(
    specforge: feature_import.ImportOptions, speculators: feature_import.ImportOptions, tmp_path: Path
) -> None:
    def refused(message: str, options: feature_import.ImportOptions = specforge, **fields: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            feature_import.import_features(dataclasses.replace(options, **fields), tmp_path / "new")
        assert not (tmp_path / "new").exists()

    refused(r"layout: found 'torchspec', expected specforge or speculators; TorchSpec sends", layout="torchspec")
    refused(r"layout: found 'eagle'", layout="eagle")
    refused(r"layer_id_convention: found 'mine', expected one of", convention="mine")
    refused(r"layer_ids: found \[\]", layer_ids=())
    refused(r"layer_ids: found \[1, 2\] for a target of 2 layers, expected taps from 0", layer_ids=(1, 2))
    refused(r"source: found .*expected a folder with feature files", source=tmp_path / "none")
    refused(r"source: found .*expected a folder with \*\.ckpt", source=Path(specforge.model))
    refused(r"masks: found .*expected none", masks=tmp_path / "masks.jsonl")
    refused(r"heldout: found 4, expected from 1 to 3: there are 4 documents", heldout=4)
    refused(r"dtype: found 'float16'", dtype="float16")
    refused(r"masks: found None, expected a JSON-lines file", options=speculators, masks=None)
    refused(r"masks: found .*none\.jsonl", options=speculators, masks=tmp_path / "none.jsonl")


def change(tensors: dict[str, np.ndarray], name: str, value: np.ndarray | None) -> dict[str, np.ndarray]:
    return {k: v for k, v in {**tensors, name: value}.items() if v is not None}


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("aux_hidden_state", np.zeros((1, 9, 96), BF16), r"found bfloat16 \[1, 9, 96\], expected floats \[9, 64\]"),
        ("hidden_state", np.zeros((1, 8, 32), BF16), r"found bfloat16 \[1, 8, 32\], expected floats \[9, 32\]"),
        ("hidden_state", np.zeros((1, 9, 32), np.int64), r"found int64 \[1, 9, 32\], expected floats"),
        ("loss_mask", np.arange(9), "loss_mask: found values other than 0 and 1"),
        ("loss_mask", np.ones(8, np.int64), "loss_mask: found 8 rows, expected 9"),
        ("input_ids", np.ones((3, 3), np.int64), r"input_ids: found int64 \[3, 3\], expected integers \[T\]"),
        ("aux_hidden_state", None, "found tensors .*, expected .*aux_hidden_state"),
        ("attention_mask", np.ones(9, np.int64), r"found tensors \['attention_mask'"),
    ],
)
def test_files_that_are_not_of_the_layout_are_refused_by_name(
    specforge: feature_import.ImportOptions, tmp_path: Path, name: str, value: np.ndarray | None, reason: str
) -> None:
    write_torch(specforge.source / "rows_1" / "data_3.ckpt", change(record(3), name, value))
    with pytest.raises(feature_import.ImportedFileError, match=rf"data_3\.ckpt: .*{reason}"):
        feature_import.import_features(specforge, tmp_path / "run")


def test_ids_that_the_target_lacks_are_refused(specforge: feature_import.ImportOptions, tmp_path: Path) -> None:
    write_torch(specforge.source / "rows_1" / "data_3.ckpt", change(record(3), "input_ids", np.full(9, 600)))
    with pytest.raises(ConfigError, match=r"token ids: found .*expected ids from 0 to 599"):
        feature_import.import_features(specforge, tmp_path / "run")


def test_states_that_are_not_finite_are_refused(specforge: feature_import.ImportOptions, tmp_path: Path) -> None:
    states = record(3)["hidden_state"]
    states[0, 4, 1] = np.nan
    for i in range(4):
        name = "data_1.ckpt.gz" if i == 1 else f"data_{i}.ckpt"
        (specforge.source / f"rows_{i // 3}" / name).unlink()
        write_torch(specforge.source / f"rows_{i // 3}" / f"data_{i}.ckpt", change(record(3), "hidden_state", states))
    with pytest.raises(ValueError, match=r"features-00000\.safetensors: last_normed: a NaN or infinity in document 0"):
        feature_import.import_features(specforge, tmp_path / "run")


def test_speculators_files_that_do_not_fit_are_refused(
    speculators: feature_import.ImportOptions, tmp_path: Path
) -> None:
    path = speculators.source / "hs_2.safetensors"
    right = {"token_ids": record(2)["input_ids"], "hidden_states": np.zeros((9, 3, 32), BF16)}
    for tensors, reason in (
        (change(right, "token_ids", right["token_ids"][::-1].copy()), r"token_ids: not those of line 3 of .*masks"),
        (change(right, "hidden_states", np.zeros((9, 4, 32), BF16)), r"found bfloat16 \[9, 4, 32\], expected floats"),
        (
            change(right, "hidden_states", np.zeros((9, 3, 32), ml_dtypes.float8_e4m3fn)),
            r"hidden_states: found float8_e4m3fn",
        ),
        ({"token_ids": right["token_ids"]}, r"found tensors \['token_ids'\], expected hidden_states and token_ids"),
    ):
        save_file(tensors, path)
        with pytest.raises(feature_import.ImportedFileError, match=rf"hs_2\.safetensors: .*{reason}"):
            feature_import.import_features(speculators, tmp_path / "run")
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
    save_file(right, path)
    masks = tmp_path / "masks.jsonl"
    masks.write_text("".join(masks.read_text().splitlines(keepends=True)[:4]))
    with pytest.raises(feature_import.ImportedFileError, match=r"hs_10\.safetensors: .*masks\.jsonl has 4 lines"):
        feature_import.import_features(speculators, tmp_path / "run")
    for wrong in ('{"input_ids": [1]}', '{"input_ids": 1, "loss_mask": 1}', "[]", ""):
        masks.write_text(wrong + "\n")
        with pytest.raises(ConfigError, match=r"masks\.jsonl: line 1: found .*expected an object with input_ids and"):
            feature_import.import_features(speculators, tmp_path / "run")


@pytest.mark.parametrize(
    ("ids", "convention", "taps"),
    [
        ((1, 29, 57), "specforge", (2, 30, 58)),
        ((2, 30, 58), "vllm", (2, 30, 58)),
        ((2, 30, 58, 61), "speculators", (2, 30, 58)),
        ((1, 29, 57), "sglang", (2, 30, 58)),
    ],
)
def test_ids_mean_taps_by_their_convention(ids: tuple[int, ...], convention: str, taps: tuple[int, ...]) -> None:
    assert feature_import.read_ids(ids, convention, 61, 7168) == Wiring(taps, 61, 7168)


def test_ids_that_mean_no_taps_are_refused() -> None:
    with pytest.raises(WiringError, match=r"layer_ids: found \[30, 2, 58\]"):
        feature_import.read_ids((30, 2, 58), "vllm", 61, 7168)
