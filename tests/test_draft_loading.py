"""From a draft's directory to a drafter in memory, on the embedded model: what is refused, filled, replayed."""

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kimijax
from kimijax import checkpoint
from kimijax.acceptance import Acceptance
from kimijax.config import load_config
from kimijax.draft_loading import (
    WATCHED_ROUNDS,
    AcceptanceWatch,
    DraftFiles,
    LoadedDraft,
    check_options,
    declare_stand_in,
    load_drafter,
    read_draft,
    recommended_steps,
    resolve_options,
    stand_in,
)
from kimijax.engine.config import EngineConfig
from kimijax.errors import ConfigError
from kimijax.loader import NANO, NANO_DRAFTER, Placement, load_tokenizer, place
from kimijax.model import Target
from kimijax.names import parameters
from kimijax.probe import PROBE_FILE
from kimijax.sharding import make_mesh
from kimijax.speculative_options import SpeculativeOptions
from kimijax.wiring import WiringError

CONFIG = load_config(NANO)
TOKENIZER, _ = load_tokenizer(NANO, CONFIG)
CHAIN = SpeculativeOptions("EAGLE3", 3, 1, 4)


@pytest.fixture(scope="module")
def where() -> Placement:
    return place(jnp.float32)


@pytest.fixture(scope="module")
def target(where: Placement) -> Target:
    return checkpoint.load(NANO, CONFIG, dtype=where.dtype, unpack_int4=where.unpack_int4)


def read(draft: str | Path, **options: Any) -> DraftFiles:
    return read_draft(draft, NANO, CONFIG, TOKENIZER, **options)


def copied(folder: Path, file: str, change: Callable[[dict[str, Any]], object]) -> Path:
    """Nano's draft with another config or probe."""
    shutil.copytree(NANO_DRAFTER, folder)
    data = json.loads((folder / file).read_text())
    change(data)
    (folder / file).write_text(json.dumps(data))
    return folder


def foreign(folder: Path) -> Path:
    copied(folder, "config.json", lambda d: d.pop("kimijax"))
    (folder / PROBE_FILE).unlink()
    return folder


def test_its_files_say_how_many_to_draft(tmp_path: Path) -> None:
    assert read("nano").recommended_steps == 3  # what the probe was measured with
    folder = foreign(tmp_path / "draft")
    assert read(folder, convention="vllm").recommended_steps is None
    data = json.loads((folder / "config.json").read_text())
    methods = [{"proposal_type": "greedy", "speculative_tokens": 5}]
    (folder / "config.json").write_text(json.dumps(data | {"speculators_config": {"proposal_methods": methods}}))
    assert recommended_steps(folder, None) == 5


def test_settings_are_filled_from_the_files() -> None:
    files = read("nano")
    assert resolve_options(files) == CHAIN
    assert resolve_options(files, num_steps=2) == SpeculativeOptions("EAGLE3", 2, 1, 3)
    assert resolve_options(None) is None
    with pytest.raises(ConfigError, match="its fc takes 768 = 3 x 256"):
        resolve_options(files, algorithm="EAGLE")


def test_settings_that_the_sizes_do_not_allow() -> None:
    files = read("nano")
    check_options(files, CHAIN, 2048)
    with pytest.raises(ConfigError, match=r"^context_length: found 2112, expected at most 2048"):
        check_options(files, CHAIN, 2112)
    with pytest.raises(ConfigError, match=r"^speculative_eagle_topk: found 3073, expected at most 3072"):
        check_options(files, SpeculativeOptions("EAGLE3", 1, 3073, 4), 2048)
    with pytest.raises(ConfigError, match=r"^draft: found None"):
        check_options(None, CHAIN, 2048)
    check_options(None, dataclasses.replace(CHAIN, simulate_acc_len=2.0), 10**6)


def test_a_draft_without_a_record_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read("nano")
    assert not caplog.messages
    read(foreign(tmp_path / "draft"), convention="vllm")
    assert "nothing in it says which target and tokenizer it was trained for" in caplog.text


def test_a_draft_replays_its_probe(target: Target, where: Placement, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kimijax.draft_loading"):
        loaded = load_drafter(read("nano"), CHAIN, target, where)
    assert "replays its probe: distance of features" in caplog.text
    assert loaded.recorded == pytest.approx((0.85, 0.757, 0.682), abs=1e-3)
    assert loaded.name == "drafter"
    simulated = dataclasses.replace(loaded, options=dataclasses.replace(CHAIN, simulate_acc_len=2.0))
    assert simulated.recorded == ()


def test_a_draft_that_does_not_replay_its_probe_is_refused(target: Target, where: Placement, tmp_path: Path) -> None:
    """Its weights are sound, and its wiring is the target's: only the features of some other text were recorded."""

    def other(data: dict[str, Any]) -> None:
        for sequence in data["sequences"]:
            sequence["features"]["4"] = sequence["features"]["5"]

    files = read(copied(tmp_path / "draft", PROBE_FILE, other))
    with pytest.raises(WiringError, match="does not replay its probe"):
        load_drafter(files, CHAIN, target, where)


def test_a_stand_in_costs_what_a_published_head_does(target: Target, where: Placement) -> None:
    options = dataclasses.replace(CHAIN, simulate_acc_len=2.0)
    loaded = load_drafter(None, options, target, where)
    assert loaded.is_stand_in
    assert (loaded.probe, loaded.recorded) == (None, ())
    c = loaded.drafter.config
    assert (c.is_mla, c.hidden, c.vocab_size, c.draft_vocab_size) == (True, 256, 4096, 4096)
    ids = jnp.asarray([[1, 2, 3]])
    taps = target(ids, taps=loaded.drafter.wiring.taps).taps
    logits = loaded.drafter.forward(ids, loaded.drafter.fuse(taps)).logits
    assert logits.shape == (1, 3, 4096)
    assert np.isfinite(np.asarray(logits)).all()


def test_a_stand_in_lies_where_its_target_does(target: Target) -> None:
    mesh = make_mesh(jax.devices()[:2])
    drafter = stand_in(target, Placement(mesh, jnp.dtype(jnp.float32), unpack_int4=True))
    placed = parameters(drafter)
    declared = parameters(declare_stand_in(CONFIG, jnp.float32))
    assert placed.keys() == declared.keys()
    for path, param in placed.items():
        assert param.get_value().sharding.device_set == set(mesh.devices.flat)
        assert param.get_value().dtype == declared[path].get_value().dtype == jnp.float32


@pytest.mark.slow
def test_a_model_says_the_same_with_its_draft() -> None:
    question = [{"role": "user", "content": "What does textwrap.dedent do?"}]
    sizes = EngineConfig(max_batch=1, context_length=256, chunk_size=64)
    plain, drafted = (kimijax.load("nano", draft=draft, engine=sizes) for draft in (None, "nano"))
    assert plain.draft is None
    assert drafted.draft is not None
    one, two = (m.generate(question, temperature=0.0, max_tokens=40) for m in (plain, drafted))
    assert (one.token_ids, one.text, one.finish_reason) == (two.token_ids, two.text, two.finish_reason)
    found = drafted.engine.stats().acceptance
    assert found.length > 2
    assert not plain.engine.stats().acceptance.rounds
    simulated = kimijax.load("nano", engine=sizes, speculation=dataclasses.replace(CHAIN, simulate_acc_len=4.0))
    assert simulated.draft is not None
    assert simulated.draft.is_stand_in
    simulated.generate(question, temperature=0.0, max_tokens=40, ignore_eos=True)
    assert simulated.engine.stats().acceptance.length == 4
    assert simulated.engine.stats().simulated


# ---- what is served -------------------------------------------------------------------------------------------------


def counted(rounds: int, first: float, before: Acceptance | None = None) -> Acceptance:
    """Rounds of one draft more, of which a share was accepted."""
    return (before or Acceptance()) + Acceptance(rounds, (rounds,), (round(first * rounds),))


@pytest.fixture
def watch() -> AcceptanceWatch:
    files = read("nano")
    return AcceptanceWatch(LoadedDraft("d", files.declared, CHAIN, files.probe, is_stand_in=False))


def test_low_acceptance_is_told_once(watch: AcceptanceWatch) -> None:
    n = WATCHED_ROUNDS
    assert watch.look(Acceptance()) == ""
    low = counted(n, 0.5)
    assert "accepted in 50.0% of the rounds, below 0.85 of the 85.0% that were recorded" in watch.look(low)
    worse = counted(n, 0.1, low)
    assert watch.look(worse) == ""
    better = counted(n, 0.9, worse)  # of these, not of all
    assert watch.look(better) == ""
    assert "accepted in 60.0% of the rounds" in watch.look(counted(n, 0.6, better))


def test_few_rounds_tell_nothing(watch: AcceptanceWatch) -> None:
    few = counted(WATCHED_ROUNDS - 1, 0.0)
    assert watch.look(few) == ""
    assert "0.0%" in watch.look(counted(1, 0.0, few))  # they are not lost


def test_nothing_recorded_is_nothing_to_compare_with() -> None:
    files = read("nano")
    simulated = dataclasses.replace(CHAIN, simulate_acc_len=2.0)
    for probe, options in ((None, CHAIN), (files.probe, simulated)):
        watch = AcceptanceWatch(LoadedDraft("d", files.declared, options, probe, is_stand_in=False))
        assert watch.look(counted(10 * WATCHED_ROUNDS, 0.0)) == ""
