"""Stage `evaluate`: how much a drafter gains, measured by the program that serves it, on held-out prompts.

Every prompt is answered at each of the recipe's temperatures by `kimijax.speculator`, and the rounds are counted. At
temperature 0 the same prompts are answered without drafts too: the texts must be the same. Where two tokens tie in the
target, rounding decides between them, and a pass over several tokens may round otherwise than one over a single token:
such texts are counted as ties. Any other difference would mean that speculation changes what the model says.
"""

import dataclasses
import functools
import hashlib
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from kimijax.acceptance import Acceptance
from kimijax.checkpoint_writer import json_bytes
from kimijax.config import read_json
from kimijax.config_reader import Reader
from kimijax.drafter import Drafter
from kimijax.errors import ConfigError
from kimijax.model import Target
from kimijax.sampling import SamplingRows
from kimijax.speculator import Generation, Speculator

from . import fit
from .document_files import PROMPTS, documents_folder, read_prompts
from .draft_recipe import DraftRecipe, EvaluateTable
from .draft_target import DraftTarget
from .fit_checkpoints import last_step

FOLDER = "evaluation"
FILE = "evaluation.json"
FORMAT = 1
BATCH = 16  # prompts that are answered together
# Largest difference of two logits that rounding may turn around, as a share of the largest logit.
_TIE = {"float32": 2.0**-13, "bfloat16": 2.0**-5}


@dataclass(frozen=True)
class Prompt:
    """Where an answer begins in a held-out conversation."""

    id: str
    dataset: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class DatasetResult:
    """One data set at one temperature."""

    dataset: str
    prompts: int
    tokens: int  # of the answers
    acceptance: Acceptance


@dataclass(frozen=True)
class Measured:
    """All data sets at one temperature."""

    temperature: float
    datasets: tuple[DatasetResult, ...]
    ties: int | None  # answers that part from those without drafts where logits tie; None: not compared

    @property
    def total(self) -> Acceptance:
        """Over all data sets: each round counts the same."""
        return sum((d.acceptance for d in self.datasets), Acceptance())


@dataclass(frozen=True)
class Evaluation:
    """What `evaluation.json` holds."""

    updates: int  # of the drafter
    draft_tokens: int
    max_tokens: int
    seed: int
    measured: tuple[Measured, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "updates": self.updates,
            "draft_tokens": self.draft_tokens,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "measured": [
                {
                    "temperature": m.temperature,
                    "ties": m.ties,
                    "total": m.total.to_json(),
                    "datasets": [{**dataclasses.asdict(d), "acceptance": d.acceptance.to_json()} for d in m.datasets],
                }
                for m in self.measured
            ],
        }

    @classmethod
    def from_json(cls, data: object, where: str = FILE) -> "Evaluation":
        """Reads `to_json`'s record. ConfigError names a key that is missing, unknown, mistyped or of another format."""
        r = Reader(data, where)
        r.one_of("format", (FORMAT,))
        measured = tuple(_read_measured(m, f"{where}.measured[{i}]") for i, m in enumerate(r.get("measured", list)))
        found = cls(
            r.get("updates", int), r.get("draft_tokens", int), r.get("max_tokens", int), r.get("seed", int), measured
        )
        r.finish()
        return found


def run(recipe: DraftRecipe, out: Path) -> None:
    """Evaluate the run's newest drafter and write `evaluation/evaluation.json`.

    Raises:
      ConfigError: no drafter or no prompts, or prompts that are too long for the positions of the models.
      RuntimeError: greedy text that speculation changed.
    """
    of = DraftTarget.of(recipe)
    prompts = load_prompts(recipe, out)
    target, mesh = of.load()
    drafter = fit.load_fitted(recipe, out, target, mesh=mesh, dtype=jnp.dtype(recipe.target.dtype))
    evaluation = evaluate(
        recipe.evaluate,
        prompts,
        target,
        drafter,
        n_tokens=of.tokenizer.vocab_size,
        stop_ids=of.stop_ids,
        mesh=mesh,
        updates=last_step(out / fit.FOLDER) or 0,
    )
    path = out / FOLDER / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{FILE}.{os.getpid()}")
    part.write_bytes(json_bytes(evaluation.to_json()))
    part.replace(path)
    _say(table(evaluation))
    _say(f"evaluation: {path}")


def read(out: Path) -> Evaluation:
    """What `run` wrote in a run's folder. ConfigError: nothing, or something damaged."""
    path = out / FOLDER / FILE
    if not path.is_file():
        raise ConfigError(str(path), "no such file", "the drafter's evaluation", "run the stage evaluate")
    return Evaluation.from_json(read_json(path), str(path))


def evaluate(
    settings: EvaluateTable,
    prompts: Sequence[Prompt],
    target: Target,
    drafter: Drafter,
    *,
    n_tokens: int,
    stop_ids: Sequence[int],
    mesh: Mesh | None = None,
    updates: int = 0,
    batch: int = BATCH,
) -> Evaluation:
    """Answer prompts and count.

    Args:
      settings: the recipe's table.
      prompts: of all data sets.
      target: the model.
      drafter: its head.
      n_tokens: ids that belong to a token.
      stop_ids: that end an answer.
      mesh: that both lie on; None: one device.
      updates: of the drafter, for the record.
      batch: prompts that are answered together; their answers do not depend on it.
    Raises:
      ConfigError: no prompts, or prompts that do not fit the models' positions.
      RuntimeError: greedy text that speculation changed.
    """
    if not prompts:
        raise ConfigError(PROMPTS, "no prompts", "at least one", "hold out more conversations")
    k = settings.draft_tokens
    made = Speculator(
        target,
        drafter,
        n_tokens=n_tokens,
        stop_ids=stop_ids,
        batch=batch,
        context_length=max(len(p.ids) for p in prompts) + settings.max_tokens + k,
        mesh=mesh,
    )
    measured: list[Measured] = []
    for temperature in settings.temperatures:
        started = time.monotonic()
        answers = answer(made, prompts, settings, temperature, k)
        ties = None
        if temperature == 0:
            plain = answer(made, prompts, settings, temperature, 0)
            ties = count_ties(target, prompts, answers, plain, n_tokens, mesh)
        measured.append(Measured(temperature, _by_dataset(prompts, answers), ties))
        _say(f"temperature {temperature}: {len(prompts)} prompts in {time.monotonic() - started:.0f} s")
    return Evaluation(updates, k, settings.max_tokens, settings.seed, tuple(measured))


def answer(
    made: Speculator, prompts: Sequence[Prompt], settings: EvaluateTable, temperature: float, k: int
) -> list[Generation]:
    """Answers with k drafts a round; a prompt's random numbers depend on the recipe's seed and its id alone."""
    n = len(prompts)
    seeds = [_seed(settings.seed, p.id) for p in prompts]
    rows = SamplingRows.of([temperature] * n, [0] * n, [1.0] * n, [0.0] * n, seeds)
    return made.generate([p.ids for p in prompts], rows, [settings.max_tokens] * n, k=k)


def count_ties(
    target: Target,
    prompts: Sequence[Prompt],
    answers: Sequence[Generation],
    plain: Sequence[Generation],
    n_tokens: int,
    mesh: Mesh | None = None,
) -> int:
    """Answers that differ from those without drafts, each first at a tie of the target's logits.

    Raises:
      RuntimeError: an answer that differs elsewhere.
    """
    graph, state = nnx.split(target)
    run = jax.jit(lambda state, ids, at: nnx.merge(graph, state)(ids).logits[0, at])
    ties = 0
    for prompt, one, two in zip(prompts, answers, plain, strict=True):
        if one.tokens == two.tokens:
            continue
        pairs = zip(one.tokens, two.tokens, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if first is None:
            raise RuntimeError(f"prompt {prompt.id}: answers of {len(one.tokens)} and {len(two.tokens)} tokens")
        text = (*prompt.ids, *one.tokens[:first])
        ids = np.zeros((1, 1 << (len(text) - 1).bit_length()), np.int32)  # few lengths are compiled
        ids[0, : len(text)] = text
        call = functools.partial(run, state, ids, len(text) - 1)
        if mesh is None:
            logits = np.asarray(call())[:n_tokens]
        else:
            with jax.set_mesh(mesh):
                logits = np.asarray(call())[:n_tokens]
        gap = abs(float(logits[one.tokens[first]]) - float(logits[two.tokens[first]]))
        limit = _TIE[str(target.embed.get_value().dtype)] * float(np.abs(logits).max())
        if gap > limit:
            raise RuntimeError(
                f"prompt {prompt.id}: with drafts token {first} of the answer is {one.tokens[first]}, without "
                f"{two.tokens[first]}, and their logits differ by {gap:.3g}; expected the same text, or a tie within "
                f"{limit:.3g}: speculation is at fault"
            )
        ties += 1
    return ties


def load_prompts(recipe: DraftRecipe, out: Path) -> list[Prompt]:
    """The first `evaluate.prompts` of each data set. ConfigError where the stage that makes them has not finished."""
    counts: dict[str, int] = {}
    chosen: list[Prompt] = []
    for name, dataset, ids in read_prompts(documents_folder(recipe, out)):
        counts[dataset] = counts.get(dataset, 0) + 1
        if counts[dataset] <= recipe.evaluate.prompts:
            chosen.append(Prompt(name, dataset, tuple(ids)))
    return chosen


def table(evaluation: Evaluation) -> str:
    """One line a data set and temperature: acceptance length, rate, and share by position."""
    names = [d.dataset for m in evaluation.measured for d in m.datasets]
    wide = max([len(n) for n in names] + [len("all data sets")])
    lines = [f"{'temperature':11}  {'data set':{wide}}  prompts   tokens  rounds  length  rate  by position"]
    for m in evaluation.measured:
        prompts, tokens = sum(d.prompts for d in m.datasets), sum(d.tokens for d in m.datasets)
        for d in (*m.datasets, DatasetResult("all data sets", prompts, tokens, m.total)):
            a = d.acceptance
            shares = " ".join("-" if math.isnan(x) else f"{x:.3f}" for x in a.by_position)
            lines.append(
                f"{m.temperature:<11g}  {d.dataset:{wide}}  {d.prompts:7}  {d.tokens:7}  {a.rounds:6}  "
                f"{a.length:6.3f}  {a.rate:.2f}  {shares}"
            )
        if m.ties is not None:
            lines.append(f"greedy text is that without drafts; ties that rounding decided otherwise: {m.ties}")
    return "\n".join(lines)


def _by_dataset(prompts: Sequence[Prompt], answers: Sequence[Generation]) -> tuple[DatasetResult, ...]:
    out: dict[str, DatasetResult] = {}
    for prompt, found in zip(prompts, answers, strict=True):
        before = out.get(prompt.dataset, DatasetResult(prompt.dataset, 0, 0, Acceptance()))
        out[prompt.dataset] = DatasetResult(
            prompt.dataset,
            before.prompts + 1,
            before.tokens + len(found.tokens),
            before.acceptance + found.acceptance,
        )
    return tuple(out.values())


def _seed(seed: int, prompt: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{prompt}".encode()).digest()[:8])


def _read_measured(data: object, where: str) -> Measured:
    r = Reader(data, where)
    datasets: list[DatasetResult] = []
    for i, item in enumerate(r.get("datasets", list)):
        d = Reader(item, f"{where}.datasets[{i}]")
        found = _read_acceptance(d.get("acceptance", dict), f"{where}.datasets[{i}].acceptance")
        datasets.append(DatasetResult(d.get("dataset", str), d.get("prompts", int), d.get("tokens", int), found))
        d.finish()
    measured = Measured(float(r.get("temperature", (int, float))), tuple(datasets), r.get("ties", (int, type(None))))
    total = _read_acceptance(r.get("total", dict), f"{where}.total")
    if total != measured.total:
        raise ConfigError(f"{where}.total", total, f"{measured.total}, the sum of its data sets")
    r.finish()
    return measured


def _read_acceptance(data: Any, where: str) -> Acceptance:
    """The counters; the numbers beside them follow from them."""
    r = Reader(data, where)
    try:
        return Acceptance(r.get("rounds", int), tuple(r.get("drafted", list)), tuple(r.get("accepted", list)))
    except TypeError as e:
        raise ConfigError(where, r.data, "counts", "run the stage evaluate again") from e


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
