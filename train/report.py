"""The report of a pre-trained model: held-out loss, cost, size and unedited sample answers, as Markdown."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import kimijax

from .config import Recipe, SamplesConfig
from .metrics import training_seconds
from .pretrain import HeldOut
from .target_export import size_mb


@dataclass(frozen=True)
class Sample:
    """A question and the model's answer, as it came."""

    question: str
    answer: str
    cut: bool  # the answer reached the limit of tokens


@dataclass(frozen=True)
class Evaluation:
    """Held-out loss of a step with the weights as trained and with the experts rounded to INT4."""

    step: int
    float_weights: HeldOut
    int4_weights: HeldOut

    @property
    def int4_cost(self) -> float:
        """Relative rise of the loss per byte by INT4."""
        return self.int4_weights.nats_per_byte / self.float_weights.nats_per_byte - 1


def sample_answers(directory: Path, config: SamplesConfig) -> list[Sample]:
    """Greedy answers of an exported model to the recipe's questions, without thinking."""
    model = kimijax.load(directory)
    prompts = [[{"role": "user", "content": question}] for question in config.questions]
    answers = model.generate(prompts, temperature=0.0, max_tokens=config.max_tokens, chat={"thinking": False})
    return [
        Sample(question, answer.text, answer.finish_reason == "length")
        for question, answer in zip(config.questions, answers, strict=True)
    ]


def write_evaluation(out: Path, evaluation: Evaluation) -> None:
    """Write `out/evaluation.json`."""
    text = json.dumps({**dataclasses.asdict(evaluation), "int4_cost": evaluation.int4_cost}, indent=2)
    (out / "evaluation.json").write_text(text + "\n", encoding="utf-8")


def markdown(
    recipe: Recipe, out: Path, export: Path, n_parameters: int, evaluation: Evaluation, samples: list[Sample]
) -> str:
    """The report's text."""
    corpus = json.loads((out / "corpus" / "report.json").read_text(encoding="utf-8"))
    p, step = recipe.pretrain, evaluation.step
    tokens = step * p.rows * p.row_tokens
    hours = training_seconds(out, p) / 3600
    rows = [
        ("parameters", f"{n_parameters / 1e6:.2f} M"),
        ("size of all files", f"{size_mb(export):.1f} MB"),
        ("corpus", f"{corpus['tokens'] / 1e6:.2f} M tokens from the library of Python {corpus['python']}"),
        ("steps", f"{step} of {p.steps}, {p.rows} rows of {p.row_tokens} tokens each"),
        ("positions trained on", f"{tokens / 1e6:.1f} M"),
        ("training time", f"{hours:.2f} h"),
        ("held-out text", f"{corpus['heldout_documents']} documents, {corpus['heldout_tokens']} tokens"),
    ]
    losses = [("as trained", evaluation.float_weights), ("INT4 experts", evaluation.int4_weights)]
    lines = [
        f"# kimi-{recipe.name.removesuffix('-target')}",
        "",
        "Written by `python -m kimijax.train pretrain`; the answers are unedited.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows),
        "",
        "| held-out loss | nats a byte | nats a token |",
        "|---|---|---|",
        *(f"| {name} | {loss.nats_per_byte:.4f} | {loss.nats_per_token:.4f} |" for name, loss in losses),
        "",
        f"INT4 changes the loss per byte by {100 * evaluation.int4_cost:+.2f} %.",
        "",
        "## Sample answers",
        "",
        f"Greedy, at most {recipe.samples.max_tokens} tokens, without thinking.",
    ]
    for sample in samples:
        lines += answer_lines(sample)
    return "\n".join(lines) + "\n"


def answer_lines(sample: Sample) -> list[str]:
    """A question and its answer as lines of Markdown."""
    fence = _fence(sample.answer)
    cut = ["", "(Cut at the limit of tokens.)"] if sample.cut else []
    return ["", f"### {sample.question}", "", f"{fence}text", sample.answer, fence, *cut]


def _fence(text: str) -> str:
    """A code fence that `text` does not close."""
    fence = "```"
    while fence in text:
        fence += "`"
    return fence
