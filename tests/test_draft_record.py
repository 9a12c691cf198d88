"""A draft's directory held against a target: what agrees is resolved, what differs is refused with both sides."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kimijax.draft_export import DraftFormat, save_draft
from kimijax.draft_record import DraftRecord, read_record, resolve_draft
from kimijax.errors import CheckpointError, ConfigError
from kimijax.fingerprint import Contract, TargetFingerprint
from kimijax.wiring import WiringError

from . import draft_reference as ref
from .checkpoint_cases import rewrite
from .test_draft_checkpoint import loaded
from .test_drafter import WIRING

TARGET = TargetFingerprint(
    {"n_layers": WIRING.target_layers, "hidden": WIRING.target_hidden, "norm_eps": 1e-5}, {"lm_head.weight": "a" * 64}
)
TOKENIZER = "b" * 64
RECORD = DraftRecord(Contract(WIRING, TARGET, TOKENIZER), {"recipe": "nano"})


def draft(folder: Path, *, record: bool = True, form: DraftFormat = "sglang") -> Path:
    """A draft's directory, with kimijax's record or as another producer would have written it."""
    drafter = loaded(folder / "in", ref.LLAMA, ref.random_tensors(ref.LLAMA))
    save_draft(drafter, folder / "draft", form, record=RECORD.to_json() if record else None)
    return folder / "draft"


def edit(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "config.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_an_own_draft_resolves_by_its_record(tmp_path: Path) -> None:
    found = resolve_draft(draft(tmp_path), TARGET, TOKENIZER, algorithm="EAGLE3")
    assert (found.wiring, found.record) == (WIRING, RECORD)
    assert found.config.fused_width == WIRING.fused_width
    assert read_record(found.directory) == RECORD


def test_a_foreign_draft_resolves_by_its_layer_ids(tmp_path: Path) -> None:
    directory = draft(tmp_path, record=False)
    found = resolve_draft(directory, TARGET, TOKENIZER, convention="vllm")
    assert (found.wiring, found.record, read_record(directory)) == (WIRING, None, None)
    other = resolve_draft(directory, TARGET, TOKENIZER, convention="specforge")
    assert other.wiring.taps == tuple(t + 1 for t in WIRING.taps)


def test_another_target_is_refused_with_both_sides(tmp_path: Path) -> None:
    directory = draft(tmp_path)
    other = TargetFingerprint({**TARGET.config, "norm_eps": 1e-6}, {"lm_head.weight": "c" * 64})
    with pytest.raises(WiringError) as error:
        resolve_draft(directory, other, "d" * 64, target_name="target T")
    text = str(error.value)
    assert "3 differences" in text
    for part in ("target.config.norm_eps", "1e-05", "1e-06", "sha256 aaaaaaaaaaaa", "sha256 cccccccccccc", "tokenizer"):
        assert part in text


def test_features_of_other_layers_are_refused(tmp_path: Path) -> None:
    """Trained on [embedding, 3, 6], served with [3, 6, 7]: ids beside the record that say something else."""
    directory = draft(tmp_path)

    def served(data: dict[str, Any]) -> None:
        data["eagle_aux_hidden_state_layer_ids"] = data["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [3, 6, 7]
        data["kimijax"]["wiring"]["taps"] = [0, 3, 6]

    edit(directory, served)
    with pytest.raises(WiringError) as error:
        resolve_draft(directory, TARGET, TOKENIZER)
    assert "[3, 6, 7]" in str(error.value)
    assert "(0, 3, 6)" in str(error.value)


def test_an_older_algorithm_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    directory = draft(tmp_path)
    with pytest.raises(ConfigError, match="EAGLE3") as error:
        resolve_draft(directory, TARGET, TOKENIZER, algorithm="EAGLE")
    assert error.value.field == "speculative_algorithm"
    assert f"its fc takes {WIRING.fused_width}" in str(error.value)


def test_a_draft_without_its_fusion_layer_is_refused(tmp_path: Path) -> None:
    directory = draft(tmp_path)
    rewrite(directory, lambda t: {n: v for n, v in t.items() if n != "fc.weight"}, shards=1)
    with pytest.raises(CheckpointError, match=r"fc\.weight: found no such matrix"):
        resolve_draft(directory, TARGET, TOKENIZER)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda r: r.update(format=2), "kimijax.format: found 2, expected 1"),
        (lambda r: r.pop("tokenizer"), "kimijax.tokenizer"),
        (lambda r: r.pop("training"), "kimijax.training"),
        (lambda r: r.update(speed=1), "kimijax.speed"),
    ],
)
def test_a_damaged_record_is_named(change: Callable[[dict[str, Any]], object], names: str, tmp_path: Path) -> None:
    directory = draft(tmp_path)
    edit(directory, lambda data: change(data["kimijax"]))
    with pytest.raises(ConfigError) as error:
        resolve_draft(directory, TARGET, TOKENIZER)
    assert names in str(error.value)
