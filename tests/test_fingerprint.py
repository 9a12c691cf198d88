"""Fingerprints tell targets and tokenizers apart by content; a broken contract is refused with both sides shown."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kimijax.config import TargetConfig, load_config
from kimijax.errors import CheckpointError, ConfigError
from kimijax.fingerprint import (
    IGNORED,
    MATTERS,
    Contract,
    TargetFingerprint,
    check_contract,
    fingerprint_target,
)
from kimijax.layer_ids import read_wiring
from kimijax.tokenizer import Tokenizer
from kimijax.wiring import Wiring, WiringError

from . import toy_tokenizer
from .checkpoint_cases import Tensors, config_of, rewrite
from .golden import FAMILIES, write_checkpoint

FAMILY = "kimi_k25"


def fingerprint(directory: Path, **options: Any) -> TargetFingerprint:
    return fingerprint_target(directory, load_config(directory, **options))


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Kimi-K2.5 with INT4 experts and the wrapper's prefix."""
    return write_checkpoint(FAMILY, tmp_path_factory.mktemp("target") / "int4", quantization="int4")


@pytest.fixture
def contract(int4: Path) -> Contract:
    target = fingerprint(int4)
    return Contract(Wiring((1, 2, 3), 4, 64), target, "ab" * 32)


def mapped(directory: Path, name: str, change: Any) -> Path:
    """The checkpoint with one tensor changed."""

    def apply(tensors: Tensors) -> Tensors:
        full = next(n for n in tensors if n.removeprefix("language_model.") == name)
        return tensors | {full: change(tensors[full])}

    rewrite(directory, apply)
    return directory


# ---- the target -----------------------------------------------------------------------------------------------------


def test_every_field_of_the_config_is_classified() -> None:
    """A new field must be put on one list: forgotten, it would let another model pass for the same one."""
    assert {f.name for f in dataclasses.fields(TargetConfig)} == MATTERS | IGNORED
    assert not MATTERS & IGNORED


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_fingerprint(family: str, tmp_path: Path) -> None:
    print_ = fingerprint(write_checkpoint(family, tmp_path / "c"))
    assert print_.config["n_layers"] == config_of(family).n_layers
    assert "lm_head.weight" in print_.tensors
    assert not any(name.startswith("language_model.") for name in print_.tensors)
    assert TargetFingerprint.from_json(json.loads(json.dumps(print_.to_json()))) == print_


def test_fp8_blocks_are_told_apart(tmp_path: Path) -> None:
    stored = fingerprint(write_checkpoint("deepseek_v3", tmp_path / "fp8", quantization="fp8"))
    assert stored.config["quantization"] == "fp8, block 128 x 128"
    plain = fingerprint(write_checkpoint("deepseek_v3", tmp_path / "plain"))
    assert stored.tensors["model.norm.weight"] == plain.tensors["model.norm.weight"]


def test_storage_does_not_matter(tmp_path: Path) -> None:
    """Shards, wrapper prefix and a wider dtype leave the values, and so the fingerprint, as they are."""
    directory = write_checkpoint(FAMILY, tmp_path / "c")
    before = fingerprint(directory)
    widened = rewrite(directory, lambda t: {n: _widened(a) for n, a in t.items()}, shards=1)
    assert any(a.dtype == np.float32 for n, a in widened.items() if "lm_head" in n)
    assert fingerprint(directory) == before
    rewrite(directory, lambda t: {n.removeprefix("language_model."): a for n, a in t.items()})
    assert fingerprint(directory) == before


def _widened(a: np.ndarray) -> np.ndarray:
    return a.astype(np.float32) if a.dtype == ml_dtypes.bfloat16 else a


def test_what_the_files_quantise_is_told_apart(int4: Path, tmp_path: Path) -> None:
    plain = fingerprint(write_checkpoint(FAMILY, tmp_path / "c"))
    packed = fingerprint(int4)
    assert packed.config["quantization"] == "int4, group 32"
    assert plain.config["quantization"] is None
    assert packed.tensors == plain.tensors


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.3.self_attn.kv_a_layernorm.weight",
        "model.layers.3.mlp.gate.weight",
        "model.layers.3.mlp.gate.e_score_correction_bias",
        "model.embed_tokens.weight",
        "lm_head.weight",
    ],
)
def test_one_changed_value_changes_one_hash(name: str, tmp_path: Path) -> None:
    directory = write_checkpoint(FAMILY, tmp_path / "c")
    before = fingerprint(directory).tensors

    def nudge(a: np.ndarray) -> np.ndarray:
        out = a.copy()
        out.reshape(-1)[0] += 1
        return out

    after = fingerprint(mapped(directory, name, nudge)).tensors
    assert {n for n in before if before[n] != after[n]} == {name}


def test_a_fine_tuned_head_is_seen_in_its_last_row_too(tmp_path: Path) -> None:
    directory = write_checkpoint(FAMILY, tmp_path / "c")
    before = fingerprint(directory)
    mapped(directory, "lm_head.weight", lambda a: np.concatenate([a[:-1], a[-1:] * 2]))
    assert fingerprint(directory).tensors["lm_head.weight"] != before.tensors["lm_head.weight"]


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    directory = write_checkpoint(FAMILY, tmp_path / "c")
    rewrite(directory, lambda t: {n: a for n, a in t.items() if not n.endswith("lm_head.weight")})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: found no such tensor"):
        fingerprint(directory)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    directory = write_checkpoint(FAMILY, tmp_path / "c")
    for file in directory.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"in model-0000\d-of-00003\.safetensors, which cannot be read"):
        fingerprint(directory)


# ---- the record -----------------------------------------------------------------------------------------------------


def test_contract_round_trip(contract: Contract) -> None:
    record = json.loads(json.dumps(contract.to_json()))
    assert Contract.from_json(record) == contract
    assert Contract.from_json(record | {"tokenizer": None}).tokenizer is None
    assert Contract.from_json(record | {"probe": []}, also=frozenset({"probe"})) == contract


def test_draft_config_with_a_contract_is_read(contract: Contract) -> None:
    config = {"kimijax": contract.to_json(), "hidden_size": 64}
    assert read_wiring(config, target_layers=4, target_hidden=64) == contract.wiring


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("probe",), [], "kimijax.probe"),
        (("tokenizer",), "abc", "kimijax.tokenizer"),
        (("target", "config"), [], "kimijax.target.config"),
        (("target", "config", "hidden"), [64], "kimijax.target.config.hidden"),
        (("target", "config", "hidden"), 65, "target.config.hidden"),
        (("target", "tensors", "lm_head.weight"), "", "kimijax.target.tensors.lm_head.weight"),
        (("target", "name"), "K2.5", "kimijax.target.name"),
        (("wiring", "taps"), [3, 2, 1], "wiring.taps"),
    ],
)
def test_record_is_read_strictly(contract: Contract, path: tuple[str, ...], value: Any, field: str) -> None:
    record = json.loads(json.dumps(contract.to_json()))
    at = record
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(ConfigError) as error:
        Contract.from_json(record)
    assert error.value.field == field


@pytest.mark.parametrize("key", ["wiring", "target", "tokenizer"])
def test_record_needs_every_part(contract: Contract, key: str) -> None:
    record = {k: v for k, v in contract.to_json().items() if k != key}
    with pytest.raises(ConfigError) as error:
        Contract.from_json(record)
    assert error.value.field == f"kimijax.{key}"


# ---- the comparison -------------------------------------------------------------------------------------------------


def refused(artefact: Contract, running: Contract) -> str:
    with pytest.raises(WiringError) as error:
        check_contract(artefact, running, artefact_name="draft D", running_name="target T")
    return str(error.value)


def test_equal_contracts_pass(contract: Contract) -> None:
    again = Contract.from_json(json.loads(json.dumps(contract.to_json())))
    check_contract(again, contract, artefact_name="draft D", running_name="target T")


def test_other_taps_show_both_sides(contract: Contract) -> None:
    message = refused(dataclasses.replace(contract, wiring=Wiring((0, 1, 2), 4, 64)), contract)
    assert "draft D was not made for target T, 1 difference:" in message
    row = next(line for line in message.splitlines() if "wiring.taps" in line and "(0, 1, 2)" in line)
    assert row.split("  ")[-1] == "(1, 2, 3)"
    assert "give both the same taps" in message
    assert "tokenizer:" not in message


def test_every_difference_is_in_one_error(contract: Contract, int4: Path, tmp_path: Path) -> None:
    """Another target of the same shape, run with other settings and another tokenizer."""
    directory = write_checkpoint(FAMILY, tmp_path / "c", quantization="int4")
    mapped(directory, "lm_head.weight", lambda a: a * 2)
    toy = Tokenizer.from_dir(toy_tokenizer.write(tmp_path))
    other = Contract(Wiring((1, 2, 4), 4, 64), fingerprint(directory, latent_norm_eps=1e-6), toy.fingerprint)
    message = refused(contract, other)
    assert "4 differences" in message
    for field in ("wiring.taps", "target.config.latent_norm_eps", "target.tensors.lm_head.weight", "tokenizer"):
        assert any(line.split()[0] == field for line in message.splitlines()[1:]), field
    assert "1e-05" in message
    assert "1e-06" in message
    assert f"sha256 {toy.fingerprint[:12]}" in message
    for fix in ("wiring: ", "target: ", "tokenizer: "):
        assert f"\n{fix}" in message


def test_a_tokenizer_on_one_side_only(contract: Contract) -> None:
    message = refused(contract, dataclasses.replace(contract, tokenizer=None))
    assert "none" in message
    assert "sha256 abababababab" in message


def test_a_field_on_one_side_only(contract: Contract) -> None:
    """Written by a version that hashed another set of tensors."""
    tensors = {n: h for n, h in contract.target.tensors.items() if n != "lm_head.weight"}
    fewer = dataclasses.replace(contract, target=TargetFingerprint(contract.target.config, tensors))
    for message in (refused(fewer, contract), refused(contract, fewer)):
        assert "1 difference:" in message
        assert "absent" in message


# ---- the embedded model ---------------------------------------------------------------------------------------------


def test_nano_has_a_contract() -> None:
    directory = Path(__file__).resolve().parents[1] / "kimijax" / "nano"
    target = fingerprint(directory)
    contract = Contract(Wiring((2, 4, 5), 6, 256), target, Tokenizer.from_dir(directory).fingerprint)
    assert contract.target.config["quantization"] == "int4, group 32"
    assert Contract.from_json(contract.to_json()) == contract
