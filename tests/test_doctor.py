"""The doctor: what each fault costs, and that every one is named from the draft's files alone, with what to change."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kimijax.diagnosis import Diagnosis, conclude
from kimijax.doctor import diagnose, main, negative_controls, search, short_doctor, telling_readings, text_of_file
from kimijax.draft_config import DraftConfig, LlamaAttentionConfig
from kimijax.draft_parts import DraftParts
from kimijax.drafter import declare_drafter, initialise_drafter
from kimijax.errors import ConfigError
from kimijax.hypotheses import LAST_NORMED, Reading, assume, wiring_candidates
from kimijax.teacher_forced import STEPS, Forcing, Text
from kimijax.unroll import valid_rows
from kimijax.wiring import Wiring

from .draft_faults import (
    F32,
    LAYERS,
    TAPS,
    WIRING,
    Workshop,
    lag_draft,
    lag_observation,
    lag_target,
    random_ids,
    set_ids,
)

Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop.build(tmp_path_factory.mktemp("doctor"))


@pytest.fixture(scope="module")
def text() -> Text:
    return Text.of(random_ids(16, 5).tolist())


@pytest.fixture(scope="module")
def lag() -> tuple[DraftParts, Forcing]:
    target = lag_target()
    parts = DraftParts.of(lag_draft(target), target)
    return parts, Forcing(parts.drafter, parts.target_ids, parts.config, lag_observation())


# ---- what a fault costs ---------------------------------------------------------------------------------------------


def test_negative_controls(workshop: Workshop, text: Text) -> None:
    """Every fault of the streams and of the vocabulary takes the draft below chance or near it; a shift of all
    positions takes nothing."""
    found = negative_controls(workshop.target, workshop.drafter, text)
    match = {name: m.matches[0] for name, m in found.named.items()}
    right = match.pop("right")
    assert right > found.chance + 0.2
    assert found.named["position + 1 everywhere"].sampled == pytest.approx(found.named["right"].sampled, abs=1e-4)
    for name in ("taps shifted by one", "slots shifted, the embedding in front", "fc dropped", "d2t read as ids"):
        assert match[name] < 0.1, name
    later = found.named["feedback from the other side of the norm"]
    assert later.matches[0] == right
    assert later.matches[1] < 0.1
    table = found.controls().splitlines()
    assert len(table) == 2 + len(found.named)
    assert table[2].startswith(f"| right | {right:.1%} |")


def test_negative_controls_of_rows(lag: tuple[DraftParts, Forcing]) -> None:
    """Positions, tokens and the residual's norm, on a draft that needs them."""
    parts, forcing = lag
    base, right = parts.base, forcing.measure(parts.base)
    assert min(right.matches) > 0.9
    ahead = forcing.measure(dataclasses.replace(base, positions="steps+1"))
    assert ahead.matches[0] == right.matches[0]
    assert max(ahead.matches[1:]) < 0.8
    shifted = forcing.measure(dataclasses.replace(base, positions="t+1"))
    np.testing.assert_allclose(shifted.rows, right.rows, atol=1e-3)
    assert forcing.measure(dataclasses.replace(base, tokens="same")).matches[0] < 0.7
    assert forcing.measure(dataclasses.replace(base, norm_before_residual=False)).matches[1] < 0.8
    assert forcing.measure(dataclasses.replace(base, feedback="post_norm")).matches[1] < 0.5
    assert forcing.measure(dataclasses.replace(base, taps=(4, 2, 5))).matches[0] < 0.7


def test_lengths_are_those_of_chains(lag: tuple[DraftParts, Forcing]) -> None:
    """Of the 28 rows of a document that count in three steps the first two lack a row to read: their chains end at
    once, unless by luck, although their last step is right again."""
    parts, forcing = lag
    m = forcing.measure(parts.base)
    assert forcing.n_rows == m.rows.size == 8 * 28
    assert m.matches[2] == 1.0
    assert 1 + 3 * 26 / 28 <= m.greedy < 4
    assert m.sampled == pytest.approx(1 + m.rows.mean())
    assert m.sampled < m.greedy


# ---- naming the fault, from files -----------------------------------------------------------------------------------


def run(workshop: Workshop, capsys: pytest.CaptureFixture[str], draft: Path, *options: str) -> tuple[int, str]:
    """Exit code and output of the command line."""
    argv = ["--model", str(workshop.root / "target"), "--draft", str(draft), "--text", str(workshop.text)]
    code = main([*argv, "--dtype", "float32", *options])
    out = capsys.readouterr()
    return code, out.out + out.err


def test_a_right_draft(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(workshop, capsys, workshop.root / "right")
    assert code == 0, out
    assert "the draft runs as configured: taps (2, 4, 5), through fc" in out
    assert "trained, as configured" in out
    assert "harmless" in out
    assert "to run it as it was trained" not in out


def test_json(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(workshop, capsys, workshop.root / "right", "--json")
    data = json.loads(out)
    assert code == data["exit_code"] == 0
    assert data["trained"]["reading"]["taps"] == list(TAPS)
    assert data["trained"] == data["configured"]
    sampled = [m["length_sampled"] for m in data["measured"]]
    assert sampled == sorted(sampled, reverse=True)


def no_aux(data: dict[str, Any]) -> None:
    data["eagle_config"]["use_aux_hidden_state"] = False


def absolute(tensors: Tensors) -> None:
    tensors["d2t"] = tensors["d2t"] + np.arange(len(tensors["d2t"]))


def permuted(tensors: Tensors) -> None:
    a, b, c = np.split(tensors["fc.weight"], 3, axis=1)
    tensors["fc.weight"] = np.concatenate([c, a, b], axis=1)


def noise_embedding(tensors: Tensors) -> None:
    tensors["embed_tokens.weight"] = np.random.default_rng(0).standard_normal((128, 64)).astype(np.float32)


def post_norm(data: dict[str, Any]) -> None:
    data["norm_output"] = True


# config, tensors, what is said. The ids of the first three are read as vLLM reads them.
FAULTS: dict[str, tuple[Callable[[dict[str, Any]], None] | None, Callable[[Tensors], None] | None, tuple[str, ...]]] = {
    "ids shifted": (
        set_ids([3, 5, 6]),
        None,
        ("as configured it runs with: taps (3, 5, 6)", "to [2, 4, 5], the layers entered"),
    ),
    "ids of outputs": (
        set_ids([1, 3, 4]),
        None,
        ("as configured it runs with: taps (1, 3, 4)", "leave --layer-id-convention out"),
    ),
    "embedding in front": (
        set_ids([0, 2, 4]),
        None,
        ("as configured it runs with: taps (0, 2, 4)", "to [2, 4, 5], the layers entered"),
    ),
    "fc dropped": (
        no_aux,
        None,
        (
            "as configured it runs with: fc skipped, fed the normed last hidden state",
            'set "use_aux_hidden_state": true in eagle_config',
            "the loader refuses the draft as it is",
        ),
    ),
    "d2t absolute": (
        None,
        absolute,
        ("as configured it runs with: d2t as offsets", "subtract 0, 1, 2, ... from it to make them offsets"),
    ),
    "slots permuted": (
        None,
        permuted,
        ("taps (5, 2, 4) in that order", "put its 3 column blocks of 64 in the order [1, 2, 0]"),
    ),
    "random embedding": (None, noise_embedding, ("embed_tokens.weight: remove it", "the loader refuses")),
    "feedback": (post_norm, None, ("as configured it runs with: feedback post_norm", 'set "norm_output": false')),
}


NUMBERED = ("ids shifted", "ids of outputs", "embedding in front")


@pytest.mark.parametrize("name", FAULTS)
def test_names_the_fault(name: str, workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    config, tensors, expected = FAULTS[name]
    draft = workshop.faulty(name.replace(" ", "-"), config=config, tensors=tensors)
    code, out = run(workshop, capsys, draft, *(("--layer-id-convention", "vllm") if name in NUMBERED else ()))
    assert code == 1, out
    for part in expected:
        assert part in out, out


def test_ids_with_two_readings(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    """The loader refuses them; the doctor finds out which convention is meant."""
    draft = workshop.faulty("two-readings", config=set_ids([0, 2, 4]))
    code, out = run(workshop, capsys, draft)
    assert code == 1
    assert "as configured it has no single meaning" in out
    assert "the draft was trained with: taps (2, 4, 5)" in out
    assert "to [2, 4, 5], the layers entered" in out
    assert "taps (0, 2, 4): input_of_layer" in out


@pytest.mark.parametrize("ids", [[2, 4, 99], [-1, 3, 4]])
def test_ids_of_no_stream(ids: list[int], workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    """They cannot be run as they stand, and tell nothing; the tensors do."""
    draft = workshop.faulty(f"no-stream{ids[0]}", config=set_ids(ids))
    base = DraftParts.read(draft, workshop.target, dtype=F32).base
    assert all(0 <= tap <= LAYERS for tap in base.taps)
    code, out = run(workshop, capsys, draft)
    assert code == 1
    assert "as configured it has no single meaning" in out
    assert "the draft was trained with: taps (2, 4, 5)" in out


@pytest.mark.parametrize("name", ["ids shifted", "fc dropped", "d2t absolute", "feedback"])
def test_the_fix_fixes(name: str, workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    """What the verdict says to change, changed."""
    config, tensors, _ = FAULTS[name]

    def repaired(data: dict[str, Any]) -> None:
        (config or (lambda _: None))(data)
        set_ids([2, 4, 5])(data)
        data["eagle_config"]["use_aux_hidden_state"] = True
        data["norm_output"] = False

    def subtracted(arrays: Tensors) -> None:
        if tensors:
            tensors(arrays)
            arrays["d2t"] = arrays["d2t"] - np.arange(len(arrays["d2t"]))

    draft = workshop.faulty(f"fixed-{name.replace(' ', '-')}", config=repaired, tensors=subtracted)
    assert run(workshop, capsys, draft)[0] == 0


def test_what_another_stack_assumes(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    """Faults that lie in a server's flags, and not in the draft."""
    for settings, expected in (
        (("taps=0,2,4",), "as assumed it runs with: taps (0, 2, 4)"),
        (("fc=off",), "as assumed it runs with: fc skipped, fed the normed last hidden state"),
        (("d2t=absolute", "feedback=post"), "as assumed it runs with: d2t as ids, feedback post_norm"),
    ):
        code, out = run(workshop, capsys, workshop.root / "right", "--assume", *settings)
        assert code == 1, out
        assert expected in out
        assert "to run it as it was trained there:" in out
        assert "feed it the taps (2, 4, 5)" in out or "taps" not in settings[0]
    code, out = run(workshop, capsys, workshop.root / "right", "--assume", "positions=+1")
    assert code == 0
    assert "A shift of all positions by one is harmless" in out


def test_what_another_stack_cannot_do(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    """An assumption that these tensors do not allow is refused by its name, and not measured as something else."""
    for setting, expected in (
        ("fc_norm=on", "assume.fc_norm: found 'on', expected one of off"),
        ("norm_before_fc=on", "assume.norm_before_fc: found 'on', expected one of off"),
        ("embedding=file", "assume.embedding: found 'file', expected one of target"),
    ):
        code, out = run(workshop, capsys, workshop.root / "right", "--assume", setting)
        assert code == 2, out
        assert expected in out


def test_a_stream_that_only_the_assumption_names(
    workshop: Workshop, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a big target only the streams that some reading wants are kept: that one too."""
    monkeypatch.setattr("kimijax.doctor.ALL_TAPS", 0)
    monkeypatch.setattr("kimijax.doctor.wiring_candidates", lambda *_: [TAPS])
    monkeypatch.setattr("kimijax.doctor.ROUNDS", 0)
    parts = DraftParts.of(workshop.drafter, workshop.target)
    found = diagnose(parts, text, assumed=assume(parts.base, ["fc=7"], LAYERS))
    assert found.exit_code == 1
    assert "as assumed it runs with: fc skipped, fed tap 7 alone" in found.verdict


def test_a_narrower_head_is_never_fed_a_stream(workshop: Workshop, text: Text) -> None:
    attention = LlamaAttentionConfig(n_heads=4, n_kv_heads=4, head_dim=8, rope_theta=1e4)
    config = DraftConfig(attention, 128, 96, 32, 64, 3, 48, 1e-5, 512)
    narrow = declare_drafter(config, WIRING, dtype=F32, own_embed=True)
    initialise_drafter(narrow, workshop.target, range(96), 0)
    found = negative_controls(workshop.target, narrow, text)
    assert "fc dropped" not in found.named
    parts = DraftParts.of(narrow, workshop.target)
    with pytest.raises(ConfigError, match=r"assume\.fc: found 'skipped by a head 32 wide'"):
        diagnose(parts, text, assumed=assume(parts.base, ["fc=off"], LAYERS))


def test_taps_that_cannot_be_shifted(workshop: Workshop) -> None:
    """From the first to the last there is no room on either side, and no tap -1."""
    base = DraftParts.of(workshop.drafter, workshop.target).base
    for taps, shifted in (((0, 4, 8), None), ((2, 4, 8), (1, 3, 7)), ((0, 4, 7), (1, 5, 8))):
        Wiring(taps, LAYERS, 64)
        found = telling_readings(dataclasses.replace(base, taps=taps), LAYERS).get("taps shifted by one")
        assert (None if found is None else found.taps) == shifted


def test_positions_that_run_ahead_in_draft_steps(lag: tuple[DraftParts, Forcing]) -> None:
    parts, _ = lag
    forcing = Forcing(parts.drafter, parts.target_ids, parts.config, lag_observation())
    search(forcing, parts, [TAPS, (3, 5, 6), (0, 2, 4)], range(LAYERS + 1))
    right = conclude(forcing, parts)
    assert right.exit_code == 0
    assert right.trained is not None
    assert right.trained.reading == parts.base
    wrong = conclude(forcing, parts, assumed=assume(parts.base, ["positions=steps+1"], LAYERS))
    assert wrong.exit_code == 1
    assert "as assumed it runs with: positions + 1 in draft steps" in wrong.verdict
    assert "give row t rotary position t in the first step and t + j in step j" in wrong.verdict


def test_an_untrained_draft(workshop: Workshop, text: Text) -> None:
    d, parts = workshop.drafter, DraftParts.of(workshop.drafter, workshop.target)
    untrained = initialise_drafter(parts.drafter(parts.base), workshop.target, np.asarray(d.target_ids[...]), 3)
    untrained.wiring = d.wiring
    found = short_doctor(workshop.target, untrained, text)
    assert found.exit_code == 1
    assert found.trained is None
    assert "no reading is above chance" in found.verdict


def test_a_file_without_fc(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    draft = workshop.faulty("no-fc", tensors=lambda tensors: tensors.__delitem__("fc.weight"))
    code, out = run(workshop, capsys, draft)
    assert code == 1
    assert "no reading is above chance" in out
    assert "fc.weight: found no such matrix" in out


def test_short_doctor(workshop: Workshop, text: Text) -> None:
    """What a server runs at its start: few readings, the same verdict."""
    found = short_doctor(workshop.target, workshop.drafter, text)
    assert found.exit_code == 0
    assert len(found.measured) < 12
    assert isinstance(found, Diagnosis)


# ---- unusable input -------------------------------------------------------------------------------------------------


def test_unusable_input(workshop: Workshop, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Exit code 2 and one message: nothing can be measured."""
    argv = ["--model", str(workshop.root / "target"), "--draft", str(workshop.root / "right")]
    short = tmp_path / "short.json"
    short.write_text(json.dumps([[1, 2, 3, 4, 5]]))
    other = workshop.faulty("other", config=lambda data: data.update(vocab_size=256))
    missing = workshop.faulty("missing", tensors=lambda tensors: tensors.__delitem__("norm.weight"))
    for options, expected in (
        (["--text", str(short)], "text: found '1 rows that count', expected 32 or more"),
        (["--text", str(tmp_path / "no.json")], "No such file"),
        ([], "the checkpoint has no tokenizer files"),
        (["--draft", str(tmp_path / "nowhere")], "no such file"),
        (["--draft", str(other)], "config (vocab_size, target width): found (256, 64)"),
        (["--draft", str(missing)], "norm.weight: found no such tensor"),
        (["--text", str(workshop.text), "--assume", "taps=1,2"], "expected 3 taps from 0 to 8"),
        (["--text", str(workshop.text), "--assume", "fcc=off"], "KEY=VALUE with KEY one of taps, fc"),
    ):
        assert main([*argv, "--dtype", "float32", *options]) == 2
        assert expected in capsys.readouterr().err


def test_text_files(tmp_path: Path) -> None:
    file = tmp_path / "text.json"
    file.write_text(json.dumps([[1, 2, 300]]))
    with pytest.raises(ConfigError, match="a list of lists of token ids from 0 to 127"):
        text_of_file(file, None, 128)
    with pytest.raises(ConfigError, match=r"a \.json file with lists of token ids"):
        text_of_file(tmp_path / "text.txt", None, 128)


def test_rows_that_count() -> None:
    """Those that have a token of the answer after them for every step, and one more. A text is refused by their number,
    and not by that of its tokens."""
    text = Text.of([[*range(40)], [*range(20)]], [3, 1])
    assert text.ids.shape == (2, 40)
    assert text.segments[1].tolist() == [0] * 20 + [-1] * 20
    assert text.mask.sum(axis=1).tolist() == [37, 19]
    n = np.asarray(valid_rows(jnp.asarray(text.mask), jnp.asarray(text.segments), STEPS))[-1].sum()
    assert n == (37 - STEPS) + (19 - STEPS)
    assert Text.of([[1] * 5] * 32).ids.shape == (32, 5)
    for sequences, found in (([[1] * 4] * 32, 0), ([[1] * 5] * 31, 31)):
        with pytest.raises(ConfigError, match=f"{found} rows that count"):
            Text.of(sequences)


# ---- readings -------------------------------------------------------------------------------------------------------


def test_candidates_hold_the_faults_that_have_been_seen() -> None:
    """From the ids of the history every way back: the embedding in front, streams one layer late, other conventions."""
    found = wiring_candidates([(0, 3, 31)], (0, 3, 31), 61, 3)
    assert {(3, 31, 59), (1, 4, 32), (2, 30, 58), (3, 31, 0), (31, 3, 0)} <= set(found)
    found = wiring_candidates([(2, 30, 58)], (2, 30, 58), 61, 3)
    assert {(3, 31, 59), (1, 29, 57), (0, 2, 30), (30, 58, 61)} <= set(found)
    assert len(found) < 40
    assert all(len(set(taps)) == 3 and all(0 <= t <= 61 for t in taps) for taps in found)


def test_assumptions() -> None:
    base = Reading(TAPS)
    found = assume(
        base, ["taps=5,2,4", "fc=off", "d2t=absolute", "tokens=same", "embedding=file", "fc_norm=on"], LAYERS
    )
    right = Reading((5, 2, 4), LAST_NORMED, "absolute", fc_norm=True, tokens="same", embedding="file")
    assert found == right
    assert assume(base, ["fc=8"], LAYERS).bypass == 8
    for setting in ("fc=9", "d2t=ids", "taps=1,2,9", "taps=a,b,c", "positions=2", "feedback"):
        with pytest.raises(ConfigError, match="assume"):
            assume(base, [setting], LAYERS)


def test_differences_without_effect_do_not_count() -> None:
    """Without fc nothing before it matters."""
    a, b = Reading((1, 2, 3), LAST_NORMED, fc_norm=True), Reading(TAPS, LAST_NORMED)
    assert a.differences(b) == ()
    assert a.differences(dataclasses.replace(b, bypass=3)) == ("bypass",)
    assert Reading((1, 2, 3)).differences(Reading(TAPS)) == ("taps",)


def test_norms_that_the_config_denies_are_tried(workshop: Workshop) -> None:
    """Norms before fc in the files, flags in the config or not: both are readings."""

    def norms(tensors: Tensors) -> None:
        tensors.update({f"fc_norm.{i}.weight": np.ones(64, np.float32) for i in range(3)})

    draft = workshop.faulty("norms", tensors=norms)
    parts = DraftParts.read(draft, workshop.target, dtype=F32)
    assert parts.available["fc_norm"] == (False, True)
    assert not parts.base.fc_norm
    built = parts.drafter(dataclasses.replace(parts.base, fc_norm=True))
    np.testing.assert_array_equal(built.fc_norm[...], jnp.ones((3, 64)))
    assert "norm_before_fc" not in parts.available
