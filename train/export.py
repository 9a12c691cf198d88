"""Stage export: the fitted drafter in the formats of servers, with the record and the probe that tie it to a target."""

import dataclasses
import json
import shutil
import tempfile
from pathlib import Path
from typing import cast

import jax.numpy as jnp
import numpy as np

from kimijax.checkpoint_writer import json_bytes
from kimijax.config import read_json
from kimijax.draft_checkpoint import load_draft
from kimijax.draft_export import DraftFormat, Verifier, draft_config_json, save_draft
from kimijax.draft_record import DraftRecord, resolve_draft
from kimijax.errors import ConfigError
from kimijax.loader import NANO, NANO_DRAFTER
from kimijax.probe import POSITIONS, PROBE_FILE, STEPS, Probe, ProbeAcceptance, check, make_probe, replay

from . import evaluate, fit
from .document_files import documents_folder
from .draft_recipe import DraftRecipe
from .draft_target import DraftTarget
from .fit_checkpoints import last_step
from .packing import Documents
from .run_record import source_commit, versions
from .target_export import LICENSE_FILE, swap

FOLDER = "export"
PROBE_TOKENS = 64  # of each sequence, at most


def run(recipe: DraftRecipe, out: Path) -> None:
    """Write `out/export/FORM` for each form, replacing what an earlier export wrote there.

    Every written draft is loaded again, as a server would, and must replay its own probe.

    Raises:
      ConfigError: nothing was fitted or evaluated yet, or a form cannot hold this head.
    """
    target = DraftTarget.of(recipe)
    acceptance = _measured(recipe, out)
    model, mesh = target.load(progress=False)
    drafter = fit.load_fitted(recipe, out, model, mesh=mesh)
    # The probe is recorded with the numbers that the files hold.
    stored = jnp.dtype(recipe.export.dtype)
    record = DraftRecord(target.contract, _training(recipe, out, acceptance))
    sequences, license_text = _sequences(recipe, out), _license(target)
    for form in cast(tuple[DraftFormat, ...], recipe.export.forms):
        folder = out / FOLDER / form
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{form}-", dir=folder.parent) as scratch:
            written = Path(scratch) / form
            save_draft(
                drafter,
                written,
                form,
                dtype=stored,
                with_head=form == "speculators",
                verifier=_verifier(target),
                record=record.to_json(),
                files={LICENSE_FILE: license_text} if license_text else {},
            )
            contract = target.contract
            found = resolve_draft(written, contract.target, contract.tokenizer, target_name=recipe.target.model)
            again = load_draft(written, found.wiring, model, mesh=mesh, dtype=jnp.float32)
            probe = make_probe(model, again, sequences, acceptance, mesh=mesh)
            (written / PROBE_FILE).write_bytes(json_bytes(probe.to_json()))
            stored_probe = Probe.from_json(read_json(written / PROBE_FILE))
            check(replay(stored_probe, model, again, mesh=mesh), str(folder))
            swap(written, folder, Path(scratch) / "old")
        print(f"export: {folder}", flush=True)


def check_recipe(recipe: DraftRecipe, target: DraftTarget) -> None:
    """Refuse, before anything is trained, what the export would refuse in the end.

    Raises:
      ConfigError: a form that cannot hold the recipe's head, or no greedy evaluation for the probe.
    """
    _check_greedy(recipe)
    head = recipe.draft.config(target.config, target.wiring, recipe.vocab.size)
    for form in cast(tuple[DraftFormat, ...], recipe.export.forms):
        dtype = np.dtype(jnp.dtype(recipe.export.dtype))
        draft_config_json(head, target.wiring, form, dtype=dtype, verifier=_verifier(target))


def install(recipe: DraftRecipe, out: Path) -> None:
    """Make the run's draft the embedded model's.

    Raises:
      ConfigError: it is another target's, or there is no export in SGLang's form.
    """
    source = out / FOLDER / "sglang"
    if DraftTarget.of(recipe).directory != NANO:
        raise ConfigError("target.model", recipe.target.model, "nano: only its draft can be installed")
    if not (source / PROBE_FILE).is_file():
        raise ConfigError("export.forms", list(recipe.export.forms), "sglang among them", "run the stage export")
    with tempfile.TemporaryDirectory(prefix=".drafter-", dir=NANO_DRAFTER.parent) as scratch:
        staged = Path(scratch) / NANO_DRAFTER.name
        shutil.copytree(source, staged)
        swap(staged, NANO_DRAFTER, Path(scratch) / "old")


def _measured(recipe: DraftRecipe, out: Path) -> ProbeAcceptance:
    """Greedy acceptance over all data sets, as the stage evaluate measured it. ConfigError: of another drafter."""
    _check_greedy(recipe)
    found, updates = evaluate.read(out), last_step(out / fit.FOLDER)
    if found.updates != updates:
        where = f"{out / evaluate.FOLDER / evaluate.FILE}: updates"
        raise ConfigError(where, found.updates, f"{updates}, those of the newest drafter", "run the stage evaluate")
    greedy = [m for m in found.measured if m.temperature == 0]
    if not greedy:
        where = f"{out / evaluate.FOLDER / evaluate.FILE}: temperatures"
        raise ConfigError(where, [m.temperature for m in found.measured], "0 among them", "run the stage evaluate")
    return ProbeAcceptance(found.draft_tokens, 0.0, greedy[0].total.by_position)


def _check_greedy(recipe: DraftRecipe) -> None:
    if 0 not in recipe.evaluate.temperatures:
        expected = "0 among them: the probe records greedy acceptance"
        raise ConfigError("evaluate.temperatures", list(recipe.evaluate.temperatures), expected)


def _training(recipe: DraftRecipe, out: Path, acceptance: ProbeAcceptance) -> dict[str, object]:
    """Where the draft comes from."""
    return {
        "recipe": recipe.name,
        "commit": source_commit(),
        "versions": versions(),
        "updates": last_step(out / fit.FOLDER),
        "acceptance": dataclasses.asdict(acceptance),
    }


def _sequences(recipe: DraftRecipe, out: Path) -> list[list[int]]:
    """Beginnings of held-out documents, prompt and answer."""
    documents = Documents.load(documents_folder(recipe, out), "heldout_")
    lengths = np.diff(documents.offsets)
    least = POSITIONS + STEPS + 2
    fit_for = np.flatnonzero(lengths >= least)[: recipe.export.probe_sequences]
    if len(fit_for) < recipe.export.probe_sequences:
        expected = f"at most the {len(fit_for)} held-out documents of {least} tokens or more"
        raise ConfigError("export.probe_sequences", recipe.export.probe_sequences, expected)
    starts = documents.offsets[fit_for]
    return [
        documents.tokens[a : a + min(n, PROBE_TOKENS)].tolist() for a, n in zip(starts, lengths[fit_for], strict=True)
    ]


def _verifier(target: DraftTarget) -> Verifier:
    names = json.loads((target.directory / "config.json").read_text(encoding="utf-8")).get("architectures")
    return Verifier(target.directory.name, tuple(names or ()))


def _license(target: DraftTarget) -> bytes:
    """The licence of the target's training text, where it says one: the draft was trained on its answers."""
    path = target.directory / LICENSE_FILE
    return path.read_bytes() if path.is_file() else b""
