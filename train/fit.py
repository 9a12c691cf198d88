"""Stage `fit`: the run from its first or newest update to its last, and the fitted drafter."""

import contextlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kimijax import checkpoint
from kimijax.drafter import Drafter, declare_drafter
from kimijax.errors import ConfigError
from kimijax.loader import place
from kimijax.model import Tables, Target

from .dataset import DocumentSource, Rows, TokenDocuments, read_ahead
from .draft_recipe import DraftRecipe
from .draft_target import DraftTarget
from .feature_files import FeatureSet
from .feature_manifest import documents_hash
from .features import FOLDER as FEATURES
from .features import check_ids, load_splits
from .fit_checkpoints import Checkpoints, FitState, Identity, last_step, vocabulary_hash
from .fit_progress import Progress, summary
from .fit_report import write_report
from .fitter import Fitter as Fitter
from .host_memory import keep_freed_memory
from .hosts import StopTogether, is_first
from .metrics import MetricsLog
from .placement import check_mesh, fit_mesh, row_share
from .ttt import StepSums
from .vocab import load_vocab

FOLDER = "fit"  # within a run's folder


def evaluate(fitter: Fitter, state: FitState, rows: Rows) -> dict[str, float]:
    """What `fit_progress.summary` says of held-out rows."""
    total = {name: np.zeros(fitter.fit.ttt_steps, np.float64) for name in StepSums._fields}
    for batch in read_ahead(rows):
        for name, values in fitter.sums(state.params, batch)._asdict().items():
            total[name] += np.asarray(values, np.float64)
    return summary(total)


def run(
    fitter: Fitter, train: Rows, heldout: Rows, identity: Identity, folder: Path, stop: Callable[[], bool]
) -> FitState:
    """Train to the last update, from the newest checkpoint if there is one.

    Writes `checkpoints`, `metrics.jsonl` and `tensorboard` in `folder`.

    Args:
      fitter: the programs.
      train: the updates.
      heldout: what is evaluated on.
      identity: of the run.
      folder: `fit/` of the run's folder.
      stop: asked after every update; once it says yes, to one of several processes, the state is saved and the run
        returns.
    Raises:
      WiringError, ConfigError: the newest checkpoint is of another run, or has more updates than are asked for.
      FloatingPointError: loss or gradient is not finite; nothing of that update is saved.
    """
    fit, updates, stop = fitter.fit, len(train), StopTogether(stop, fitter.mesh)
    batches = read_ahead(train)
    with Checkpoints(folder) as checkpoints, contextlib.closing(batches):
        state, progress = _begin(fitter, checkpoints, identity, updates, batches)
        done = int(state.step)
        with MetricsLog(folder, done, progress.tokens) as log:
            pending: tuple[Any, ...] | None = None
            for step in range(done + 1, updates + 1):
                state, metrics = fitter.step(state, next(batches))
                if pending is not None:  # looked at while the device computes this one
                    progress.add(*pending)
                pending = step, metrics, train.n_tokens(step - 1), train.chosen(step - 1).reshape(-1).tolist()
                end, stopped = step == updates, stop()
                saves = stopped or end or step % fit.save_every == 0
                reports, evaluates = (end or step % every == 0 for every in (fit.log_every, fit.eval_every))
                if saves or reports or evaluates:
                    progress.add(*pending)
                    pending = None
                if reports:
                    values = progress.take() | {
                        "learning_rate": float(fitter.rate(step - 1)),
                        "gradient_norm": float(metrics.gradient_norm),
                        "tokens": float(progress.tokens),
                    }
                    log.step(step, updates, progress.tokens, values)
                if evaluates:
                    held = evaluate(fitter, state, heldout)
                    log.write(step, {f"heldout/{name}": value for name, value in held.items()})
                if saves:
                    checkpoints.save(state, identity, batches.get_state(), progress.to_json())
                if stopped:
                    break
        checkpoints.wait()
    return state


def _begin(
    fitter: Fitter, checkpoints: Checkpoints, identity: Identity, updates: int, batches: Any
) -> tuple[FitState, Progress]:
    """A fresh state, or the newest checkpoint's, the data moved to where it was."""
    checkpoints.check(identity)
    n_steps, done = fitter.fit.ttt_steps, checkpoints.latest
    if done is None:
        return fitter.create(), Progress(n_steps)
    if done > updates:
        expected = f"enough for the {done} updates that are done, not {updates}"
        raise ConfigError("fit.epochs", fitter.fit.epochs, expected, "or use another --out")
    saved = checkpoints.restore(fitter.abstract())
    batches.set_state(saved.data)
    _say(f"resumed at step {done} of {updates}")
    return saved.state, Progress.from_json(saved.progress, n_steps)


def fit(recipe: DraftRecipe, out: Path, stop: Callable[[], bool]) -> bool:
    """Train the recipe's drafter on what the earlier stages left in `out`, then write `fit/report.md`.

    Args:
      recipe: all of it.
      out: the run's folder.
      stop: asked after every update.
    Returns:
      Whether the last update is done.
    Raises:
      ConfigError, CheckpointError, FloatingPointError: see `run`; or files of earlier stages are missing or do not fit.
    """
    keep_freed_memory()
    of = DraftTarget.of(recipe)
    mesh = fit_mesh(recipe.fit, recipe.target.devices, recipe.target.preset)
    target_ids = load_vocab(out, recipe.vocab.size or of.config.vocab_size)
    sources = _sources(recipe, of, out)
    rows = _rows(recipe, sources["train"][0], mesh, train=True)
    heldout = _rows(recipe, sources["heldout"][0], mesh, train=False)
    config = recipe.draft.config(of.config, of.wiring, len(target_ids))
    check_mesh(declare_drafter(config, of.wiring, dtype=jnp.dtype(jnp.float32)), mesh, recipe.fit)
    identity = Identity(of.contract, config, vocabulary_hash(target_ids), sources["train"][1], recipe.fit)
    folder = out / FOLDER
    if last_step(folder) is not None:
        with Checkpoints(folder, read_only=True) as found:
            found.check(identity)  # before weights are read
    online, tables = _target(recipe, of, mesh)
    normed = any(isinstance(s, FeatureSet) and s.last == "post_norm" for s, _ in sources.values())
    fitter = Fitter(
        recipe,
        of.config,
        of.wiring,
        target_ids,
        tables,
        updates=len(rows),
        mesh=mesh,
        online=online,
        last_is_normed=normed,
    )
    _say(
        f"fit: {len(rows.plan)} rows of {recipe.fit.row_tokens} tokens, {rows.per_epoch} updates an epoch, "
        f"{len(rows)} in all"
    )
    state = run(fitter, rows, heldout, identity, folder, stop)
    if int(state.step) < len(rows):
        _say(f"saved at step {int(state.step)} of {len(rows)}; the same command goes on")
        return False
    if is_first():
        write_report(recipe, folder, _facts(fitter, rows, heldout, state))
    return True


def load_fitted(
    recipe: DraftRecipe, out: Path, tables: Tables | None = None, *, mesh: Mesh | None = None, dtype: Any = jnp.float32
) -> Drafter:
    """The drafter of a run's newest checkpoint.

    Args:
      recipe: of the run.
      out: its folder.
      tables: of the target, filled, for what the drafter borrows; None: they are read.
      mesh: where the tables are and the drafter goes; None: the first device.
      dtype: of the drafter's own parameters.
    Raises:
      ConfigError, WiringError: there is no checkpoint, or it is another run's.
    """
    of, folder = DraftTarget.of(recipe), out / FOLDER
    if last_step(folder) is None:
        raise ConfigError("--out", str(out), "a run with a checkpoint of a drafter", "run the stage fit")
    target_ids = load_vocab(out, recipe.vocab.size or of.config.vocab_size)
    data = documents_hash(load_splits(recipe, out)["train"])
    lent = of.load_tables(mesh) if tables is None else tables
    fitter = Fitter(recipe, of.config, of.wiring, target_ids, lent, updates=1, mesh=mesh)
    with Checkpoints(folder, read_only=True) as found:
        found.check(Identity(of.contract, fitter.config, vocabulary_hash(target_ids), data, recipe.fit))
        return fitter.drafter(found.restore(fitter.abstract()).state.params, dtype)


def _facts(fitter: Fitter, rows: Rows, heldout: Rows, state: FitState) -> dict[str, str]:
    """Rows of the report."""
    c, n = fitter.config, sum(x.size for x in jax.tree.leaves(state.params))
    row_tokens = fitter.fit.row_tokens
    mesh = "1 device" if fitter.mesh is None else f"{dict(fitter.mesh.shape)}, fsdp {fitter.fit.fsdp}".lower()
    return {
        "drafter": f"{'MLA' if c.is_mla else 'Llama'}, {n / 1e6:.2f} M trained parameters, vocabulary "
        f"{c.draft_vocab_size} of {c.vocab_size}, taps {', '.join(map(str, fitter.wiring.taps))}",
        "documents": f"{sum(map(len, rows.plan))} in {len(rows.plan)} rows of {row_tokens} tokens; held out "
        f"{sum(map(len, heldout.plan))} in {len(heldout.plan)}",
        "updates": f"{len(rows)} in {fitter.fit.epochs} epochs, of {fitter.fit.accumulate} x {fitter.fit.rows} rows",
        "devices": mesh,
    }


def _sources(recipe: DraftRecipe, of: DraftTarget, out: Path) -> Mapping[str, tuple[DocumentSource, str]]:
    """Documents of each split and their hash: with hidden states, or online without."""
    documents = load_splits(recipe, out)
    check_ids(documents, of.config)
    found: dict[str, tuple[DocumentSource, str]] = {}
    for split, tokens in documents.items():
        source: DocumentSource = TokenDocuments(tokens)
        if recipe.features.source == "files":
            dtype = recipe.features.dtype
            source = FeatureSet.open(out / FEATURES, of.contract, split=split, documents=tokens, dtype=dtype)
        found[split] = source, documents_hash(tokens)
    return found


def _rows(recipe: DraftRecipe, source: DocumentSource, mesh: Mesh | None, *, train: bool) -> Rows:
    f = recipe.fit
    sizes = {"rows": f.rows, "row_tokens": f.row_tokens, "seed": f.seed, "process": row_share(mesh)}
    if not train:
        return Rows(source, **sizes, shuffle=False)
    return Rows(source, **sizes, accumulate=f.accumulate, epochs=f.epochs)


def _target(recipe: DraftRecipe, of: DraftTarget, mesh: Mesh | None) -> tuple[Target | None, Tables]:
    """The target, online, and its tables."""
    if recipe.features.source == "files":
        return None, of.load_tables(mesh)
    p = place(recipe.target.dtype, local=True)  # the form of the weights: where they go, the mesh says
    target = checkpoint.load(
        of.directory, of.config, mesh=mesh, dtype=p.dtype, unpack_int4=p.unpack_int4, progress=True
    )
    return target, target


def _say(text: str) -> None:
    """To stderr, by one of several processes."""
    if is_first():
        print(text, file=sys.stderr, flush=True)
