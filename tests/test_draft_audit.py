"""What a server makes of a draft without a probe when it starts: run as it was trained, otherwise, or not trained."""

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import pytest

from kimijax import checkpoint
from kimijax.config import load_config
from kimijax.draft_loading import LoadedDraft, load_drafter, read_draft, stand_in
from kimijax.errors import ConfigError
from kimijax.generate import LLM
from kimijax.loader import NANO, NANO_DRAFTER, load_tokenizer, place
from kimijax.model import Target
from kimijax.probe import PROBE_FILE
from kimijax.serve import startup
from kimijax.speculative_options import SpeculativeOptions
from kimijax.teacher_forced import Text
from kimijax.wiring import WiringError

CONFIG = load_config(NANO)
TOKENIZER, _ = load_tokenizer(NANO, CONFIG)
WHERE = place(jnp.float32)
CHAIN = SpeculativeOptions("EAGLE3", 3, 1, 4)
PROBE = read_draft("nano", NANO, CONFIG, TOKENIZER).probe


@dataclasses.dataclass
class Loaded:
    """What is used of an LLM."""

    model: Target
    draft: LoadedDraft | None


Audit = Callable[..., None]  # of a draft, on a text that the target writes (default: that of nano's probe)


@pytest.fixture(scope="module")
def target() -> Target:
    return checkpoint.load(NANO, CONFIG, dtype=WHERE.dtype, unpack_int4=WHERE.unpack_int4)


@pytest.fixture
def audit(target: Target) -> Audit:
    """Nano writes what it wrote for its own draft's probe."""
    assert PROBE is not None
    text = Text.of(s.ids for s in PROBE.sequences)

    def run(draft: LoadedDraft | None, make_text: startup.MakeText = lambda llm: text) -> None:
        startup.audit_draft(cast(LLM, Loaded(target, draft)), WHERE, make_text)

    return run


def foreign(folder: Path, target: Target, convention: str) -> LoadedDraft:
    """Nano's draft as another producer would have written it: without record and probe."""
    shutil.copytree(NANO_DRAFTER, folder)
    (folder / PROBE_FILE).unlink()
    data: dict[str, Any] = json.loads((folder / "config.json").read_text())
    del data["kimijax"]
    (folder / "config.json").write_text(json.dumps(data))
    files = read_draft(folder, NANO, CONFIG, TOKENIZER, convention=convention)
    return load_drafter(files, CHAIN, target, WHERE)


def test_one_that_runs_as_it_was_trained_is_served(
    audit: Audit, target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kimijax.serve.startup"):
        audit(foreign(tmp_path / "draft", target, "vllm"))
    assert "draft draft has no probe; on the target's own text the draft runs as configured" in caplog.text


def test_one_that_is_fed_the_wrong_layers_is_refused(audit: Audit, target: Target, tmp_path: Path) -> None:
    """Its ids are those of the layers' inputs, and were read as those of their outputs."""
    with pytest.raises(WiringError, match="does not run as it was trained") as error:
        audit(foreign(tmp_path / "draft", target, "specforge"))
    assert "trained with: taps (2, 4, 5)" in str(error.value)


def test_one_that_knows_nothing_is_warned_of(audit: Audit, target: Target, caplog: pytest.LogCaptureFixture) -> None:
    audit(LoadedDraft("noise", stand_in(target, WHERE), CHAIN, None, is_stand_in=False))
    assert "draft noise: no reading is above chance" in caplog.text


def test_what_needs_no_audit(
    audit: Audit, target: Target, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the doctor was called")

    monkeypatch.setattr(startup, "short_doctor", never)
    noise = LoadedDraft("noise", stand_in(target, WHERE), CHAIN, None, is_stand_in=False)
    simulated = dataclasses.replace(CHAIN, simulate_acc_len=2.0)
    for draft in (None, dataclasses.replace(noise, probe=PROBE), dataclasses.replace(noise, is_stand_in=True)):
        audit(draft)
    assert not caplog.messages
    audit(dataclasses.replace(noise, options=simulated))
    assert caplog.messages == ["draft noise has no probe, and is not checked: acceptance is simulated"]

    def silent(llm: LLM) -> Text:
        raise ConfigError("text", "3 rows that count", "32 or more")

    audit(noise, silent)
    assert "the target writes too little to check it" in caplog.text
