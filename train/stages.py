"""What each stage of `python -m kimijax.train` does, from a recipe and a folder.

A run's folder holds `corpus/`, `checkpoints/`, `metrics.jsonl`, `tensorboard/`, `run.json`, `evaluation.json`,
`export/` (the model) and `report.md`.
"""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from kimijax.errors import ConfigError
from kimijax.tokenizer import Tokenizer

from . import nano_corpus, report, run_record, target_export
from .config import Recipe
from .packing import Documents
from .pretrain import Pretrainer, TrainState, check_steps, checkpoints, evaluate, last_step, restore, run
from .stopping import StopRequest


def pretrain(recipe: Recipe, out: Path, command: Sequence[str], *, install: bool = False) -> None:
    """Corpus, training, evaluation, export, report; each is skipped or resumed where it is done already.

    Args:
      recipe: what to train.
      out: the run's folder.
      command: the command line, for the record.
      install: make the result the embedded model.
    Raises:
      ConfigError: the folder holds another run, or more steps than the recipe asks for.
      FloatingPointError: the loss is not finite.
    """
    _check_out(out)
    started = last_step(out)
    if started is None:
        _say(f"corpus: {out / 'corpus'}")
        # Training sees the text it began with: once there is a checkpoint, a newer Python or text changes nothing.
        nano_corpus.build(out / "corpus", seed=recipe.corpus.seed, n_ranks=recipe.corpus.n_ranks)
    inputs = _inputs(recipe, out)
    if started is not None:
        run_record.check_resumable(out, recipe, inputs)
        check_steps(started, recipe.pretrain, out)
    record = run_record.RunRecord(out, recipe, command, inputs)
    corpus, trainer = out / "corpus", Pretrainer(recipe.target, recipe.pretrain)
    with StopRequest() as stop:
        train, heldout = Documents.load(corpus), Documents.load(corpus, "heldout_")
        try:
            state = run(trainer, train, heldout, token_bytes(recipe, corpus), out, stop)
        except FloatingPointError as e:
            record.note(outcome=f"failed: {e}")
            raise
    step = int(state.step)
    if step < recipe.pretrain.steps:
        record.note(outcome="interrupted", step=step)
        _say(f"saved at step {step} of {recipe.pretrain.steps}; run the same command again to resume")
        return
    record.note(outcome="trained", step=step)
    _export(recipe, out, trainer, state, install)
    record.note(outcome="exported")


def export_pretrained(recipe: Recipe, out: Path, command: Sequence[str], *, install: bool = False) -> None:
    """Evaluate, export and report the newest checkpoint of a run, finished or not, without touching the run.

    Raises:
      ConfigError: there is no checkpoint, or it is another recipe's.
    """
    _check_out(out)
    if last_step(out) is None:
        raise ConfigError("--out", str(out), "a run with a checkpoint", "start it with the stage `pretrain`")
    inputs = _inputs(recipe, out)
    run_record.check_resumable(out, recipe, inputs)
    trainer = Pretrainer(recipe.target, recipe.pretrain)
    with checkpoints(out, read_only=True) as manager:
        state = restore(trainer, manager)
    _export(recipe, out, trainer, state, install)
    _say(f"exported step {int(state.step)} by: {' '.join(command)}")


def token_bytes(recipe: Recipe, corpus: Path) -> np.ndarray:
    """int64 [V]: the length of each token's text in bytes, 0 for control tokens and ids without a token."""
    sizes = np.zeros(recipe.target.vocab_size, np.int64)
    for token, rank in Tokenizer.from_dir(corpus).ranks.items():
        sizes[rank] = len(token)
    return sizes


def _export(recipe: Recipe, out: Path, trainer: Pretrainer, state: TrainState, install: bool) -> None:
    """Evaluation, model directory, samples, report; and the embedded model where asked."""
    corpus, directory = out / "corpus", out / "export"
    heldout, sizes = Documents.load(corpus, "heldout_"), token_bytes(recipe, corpus)
    evaluation = report.Evaluation(
        int(state.step),
        evaluate(trainer, state.params, heldout, sizes, int4=False),
        evaluate(trainer, state.params, heldout, sizes, int4=True),
    )
    report.write_evaluation(out, evaluation)
    target_export.export_target(state.params, recipe, corpus, directory)
    _say(f"model: {directory} ({target_export.size_mb(directory):.1f} MB)")
    samples = report.sample_answers(directory, recipe.samples)
    n_parameters = sum(math.prod(x.shape) for x in jax.tree.leaves(state.params))
    text = report.markdown(recipe, out, directory, n_parameters, evaluation, samples)
    (out / "report.md").write_text(text, encoding="utf-8")
    _say(f"report: {out / 'report.md'}")
    if install:
        target_export.install(directory)
        _say(f"installed as the embedded model: {target_export.NANO}")


def _inputs(recipe: Recipe, out: Path) -> dict[str, str]:
    """Hashes of what a run reads; refuses a corpus that the recipe did not ask for."""
    corpus = out / "corpus"
    path = corpus / "report.json"
    if not path.is_file():
        raise ConfigError("--out", str(corpus), "the corpus that the run began with", "restore it, or begin anew")
    built = json.loads(path.read_text(encoding="utf-8"))
    for name, value in (("seed", recipe.corpus.seed), ("n_ranks", recipe.corpus.n_ranks)):
        if built[name] != value:
            raise ConfigError(f"corpus.{name}", value, f"{built[name]}, as in {path}", "or use another --out")
    names = ("tokens.npy", "mask.npy", "offsets.npy", "tiktoken.model", "heldout_tokens.npy")
    return {f"corpus/{name}": run_record.file_hash(corpus / name) for name in names}


def _check_out(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError("--out", str(out), "a folder")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
