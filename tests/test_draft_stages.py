"""All stages of a drafter in a row, from conversations to a draft that a server would load, on a random target."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kimijax.config import read_json
from kimijax.draft_checkpoint import load_draft
from kimijax.draft_record import resolve_draft
from kimijax.errors import ConfigError
from kimijax.names import parameters
from kimijax.probe import PROBE_FILE, Probe, check, replay
from kimijax.train import cli, draft_recipe, draft_stages, draft_target, evaluate, export, fit, run_record

from .corpus_cases import recipe as made_recipe
from .corpus_cases import said, write_lines, write_target

LLAMA: dict[str, Any] = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "mlp_width": 32, "max_positions": 128}
MLA: dict[str, Any] = {"kind": "mla", "n_heads": 0, "n_kv_heads": 0, "head_dim": 0, "rope_theta": 0.0}
MLA |= {"fc_norm": True, "norm_output": True, "mlp_width": 32, "max_positions": 128}
FIT: dict[str, Any] = {"epochs": 2, "rows": 2, "row_tokens": 64, "ttt_steps": 2, "save_every": 4, "eval_every": 4}


def recipe(
    folder: Path, head: dict[str, Any], source: str, forms: tuple[str, ...], devices: int = 1
) -> draft_recipe.DraftRecipe:
    target = write_target(folder / "target")
    lines = [said(f"question {i}?", "abc" * (1 + i % 3), "and?", "de") for i in range(8)]
    return made_recipe(
        target,
        write_lines(folder / "talk.jsonl", lines),
        target={"taps": (0, 1), "devices": devices},
        corpus={"heldout": 3},
        generate={"enabled": source == "files"},
        features={"source": source},
        vocab={"size": 0 if "kind" in head else 40},
        draft=head,
        fit=FIT,
        evaluate={"draft_tokens": 2, "prompts": 2, "max_tokens": 8, "temperatures": (0.0,)},
        export={"forms": forms, "probe_sequences": 2},
    )


def run(name: str, recipe: draft_recipe.DraftRecipe, out: Path, **options: Any) -> None:
    draft_stages.run(name, recipe, out, ["test"], **options)


@pytest.mark.parametrize(
    ("head", "source", "forms", "devices"),
    [
        (LLAMA, "files", ("sglang", "speculators"), 1),
        pytest.param(MLA, "online", ("sglang",), 2, marks=pytest.mark.slow),
    ],
)
def test_all_stages(head: dict[str, Any], source: str, forms: tuple[str, ...], devices: int, tmp_path: Path) -> None:
    """What is exported loads as a server loads it, equals what was fitted, and replays its probe."""
    r, out = recipe(tmp_path, head, source, forms, devices), tmp_path / "run"
    if "speculators" in forms:  # which takes no tap 0
        with pytest.raises(ConfigError, match="speculators: taps"):
            run("all", r, out)
        assert not out.exists()  # refused before anything is made
        r = dataclasses.replace(r, export=dataclasses.replace(r.export, forms=("speculators",)))
        r = dataclasses.replace(r, target=dataclasses.replace(r.target, taps=(1,)))
    run("all", r, out)
    assert (out / "features").exists() == (source == "files")
    of = draft_target.DraftTarget.of(r)
    target, mesh = of.load(progress=False)
    found = resolve_draft(out / "export" / r.export.forms[0], of.contract.target, of.contract.tokenizer)
    assert found.record is not None
    assert found.record.training["acceptance"]["draft_tokens"] == 2
    draft = load_draft(found.directory, found.wiring, target, mesh=mesh, dtype=jnp.float32)
    fitted = fit.load_fitted(r, out, target, mesh=mesh)
    for path, param in parameters(fitted).items():
        stored = np.asarray(param.get_value()).astype(jnp.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(parameters(draft)[path].get_value(), stored)
    check(replay(Probe.from_json(read_json(found.directory / PROBE_FILE)), target, draft, mesh=mesh))
    measured = evaluate.read(out)
    assert [m.total.rounds > 0 for m in measured.measured] == [True]
    outcomes = [s["outcome"] for s in run_record.sessions(out)]
    assert outcomes[-1] == "export done"
    if devices == 1:
        run("all", r, out)  # once more: nothing is left to do but to measure and to write again
    assert fit.load_fitted(r, out, target, mesh=mesh).config == fitted.config
    path = out / evaluate.FOLDER / evaluate.FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"updates": 1}))
    with pytest.raises(ConfigError, match=r"updates: found 1, expected \d+, those of the newest drafter"):
        run("export", r, out)


def test_what_the_probe_needs_is_asked_for_first(tmp_path: Path) -> None:
    r = recipe(tmp_path, LLAMA, "files", ("sglang",))
    r = dataclasses.replace(r, evaluate=dataclasses.replace(r.evaluate, temperatures=(1.0,)))
    for stage in ("all", "fit"):
        with pytest.raises(ConfigError, match=r"evaluate.temperatures: found \[1.0\], expected 0 among them"):
            run(stage, r, tmp_path / "run")


def test_every_failure_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setitem(draft_stages.STAGES, "corpus", draft_stages.Stage(broken, ""))
    with pytest.raises(RuntimeError):
        run("corpus", recipe(tmp_path, LLAMA, "files", ("sglang",)), tmp_path / "run")
    assert run_record.sessions(tmp_path / "run")[-1]["outcome"] == "corpus failed: out of memory"


def test_a_stage_without_its_inputs_names_the_stage_that_makes_them(tmp_path: Path) -> None:
    r = recipe(tmp_path, LLAMA, "files", ("sglang",))
    for stage, missing in (("generate", "corpus"), ("vocab", "corpus"), ("fit", "vocab"), ("evaluate", "")):
        with pytest.raises(ConfigError) as error:
            run(stage, r, tmp_path / "run")
        assert f"run the stage {missing}" in str(error.value)
    [*_, last] = run_record.sessions(tmp_path / "run")
    assert last["outcome"].startswith("evaluate failed: ")


def test_stages_that_a_recipe_has_no_use_for(tmp_path: Path) -> None:
    r = recipe(tmp_path, LLAMA, "online", ("sglang",))
    r = dataclasses.replace(r, generate=dataclasses.replace(r.generate, enabled=False))
    for stage, why in (("generate", r"generate\.enabled is false"), ("features", "features.source is online")):
        with pytest.raises(ConfigError, match=why):
            run(stage, r, tmp_path / "run")
    for stage, options, names in (("fit", {"install": True}, "--install"), ("export", {"install": True}, "nano")):
        if stage == "export":
            (tmp_path / "run" / "export" / "sglang").mkdir(parents=True)
            with pytest.raises(ConfigError, match=names):
                export.install(r, tmp_path / "run")
        else:
            with pytest.raises(ConfigError, match=names):
                run(stage, r, tmp_path / "run", **options)


def test_install_replaces_the_embedded_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    r = draft_recipe.load_draft_recipe("nano")
    monkeypatch.setattr(export, "NANO_DRAFTER", tmp_path / "nano" / "drafter")
    out = tmp_path / "run"
    (tmp_path / "nano").mkdir()
    with pytest.raises(ConfigError, match="run the stage export"):
        export.install(r, out)
    source = out / "export" / "sglang"
    for content in ("old", "new"):
        shutil.rmtree(source, ignore_errors=True)
        source.mkdir(parents=True)
        (source / PROBE_FILE).write_text(content)
        (source / f"{content}.txt").write_text("")
        export.install(r, out)
    names = {f.name for f in (tmp_path / "nano" / "drafter").iterdir()}
    assert names == {PROBE_FILE, "new.txt"}
    assert (tmp_path / "nano" / "drafter" / PROBE_FILE).read_text() == "new"
    assert [f.name for f in (tmp_path / "nano").iterdir()] == ["drafter"]


def test_the_command_line_reaches_a_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(draft_stages, "run", lambda *a, **k: given.append((a[0], a[1].features.source, a[2], k)))
    assert cli.main(["fit", "--recipe", "nano", "--online", "--out", str(tmp_path)]) == 0
    assert cli.main(["all", "--recipe", "nano-mla", "--install"]) == 0
    assert given == [
        ("fit", "online", tmp_path, {"install": False}),
        ("all", "online", Path("runs/nano-mla"), {"install": True}),
    ]


def test_flags_do_not_override_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fit", "--recipe", "nano", "--online", "--set", 'features.source="files"']) == 2
    assert "--online: found '--set features.source" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stage", "name", "says"), [("fit", "nano-target", "the stage pretrain"), ("pretrain", "nano", "the other stages")]
)
def test_a_recipe_of_the_other_kind(stage: str, name: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([stage, "--recipe", name]) == 2
    assert says in capsys.readouterr().err


def test_an_import_reaches_the_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "import-features --layout torchspec --source x --model nano --layer-ids 2 4 5".split()
    assert cli.main([*arguments, "--layer-id-convention", "vllm", "--out", str(tmp_path / "run")]) == 2
    assert "Mooncake" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["nano", "nano-mla", "kimi-k2.5"])
def test_recipes_are_whole(name: str) -> None:
    """Every embedded recipe is read, and fits the target that it names, where that is at hand."""
    r = draft_recipe.load_draft_recipe(name)
    if r.target.model == "nano":
        of = draft_target.DraftTarget.of(r)
        head = r.draft.config(of.config, of.wiring, r.vocab.size)
        assert head.fused_width == of.wiring.fused_width == 3 * 256
    else:
        assert json.dumps(r.fit.ttt_steps) == "4"


def test_files_of_earlier_stages_were_made_with_the_same_recipe(tmp_path: Path) -> None:
    r, out = recipe(tmp_path, LLAMA, "online", ("sglang",)), tmp_path / "run"
    r = dataclasses.replace(r, generate=dataclasses.replace(r.generate, enabled=False))
    run("corpus", r, out)
    other = dataclasses.replace(r, corpus=dataclasses.replace(r.corpus, seed=7))
    with pytest.raises(ConfigError, match=r"corpus\.seed: found 7, expected 0, with which corpus was done"):
        run("vocab", other, out)
    run("vocab", r, out)
    other = dataclasses.replace(r, vocab=dataclasses.replace(r.vocab, size=41))
    with pytest.raises(ConfigError, match=r"vocab\.size: found 41, expected 40.*run the stage vocab again"):
        run("fit", other, out)
    run("vocab", other, out)
