"""Arithmetic of a full-size drafter: seconds, bytes and hours from `scale_constants`.

A node is a group of `GROUP` GPUs that holds the target once; nodes do the same work on different samples. Time of a
token in a long forward pass is its FLOPs at a share of the peak, then its all-reduces; time of a decoding step the
larger of reading and computing, then its all-reduces.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kimijax.errors import ConfigError
from kimijax.plan_roofline import distinct_experts
from kimijax.train import evaluate

from .scale_constants import GROUP, PUBLISHED_TRAINING, Constants, Published

type Preset = Literal["tp", "dcp"]
type Source = Literal["online", "files"]

HOUR = 3600.0
_BF16 = 2
# All-reduces of a token's width, or as much: of a layer of the target by preset, of an unrolled step and its gradient.
_LAYER_COLLECTIVES: dict[Preset, int] = {"tp": 2, "dcp": 4}
_STEP_COLLECTIVES = 5
_ATTENTION_PASSES = 3.5  # forward 1, backward 2.5: the scores are made anew
_MOST_EPOCHS = 20


@dataclass(frozen=True)
class Job:
    """What is to be made.

    Raises:
      ConfigError: GPUs that are not whole nodes, no samples, or fewer tokens than samples.
    """

    gpus: int
    samples: int
    tokens: float  # of all documents, prompts and answers, of one epoch
    preset: Preset  # how the target lies on a node while it generates
    epochs: int = 1

    def __post_init__(self) -> None:
        if self.gpus < GROUP or self.gpus % GROUP:
            raise ConfigError("gpus", self.gpus, f"a multiple of {GROUP}, the GPUs that hold the target")
        if self.samples < 1 or self.tokens < self.samples or self.epochs < 1:
            found = (self.samples, self.tokens, self.epochs)
            raise ConfigError("samples, tokens, epochs", found, "at least 1, one token a sample, and 1")

    @property
    def nodes(self) -> int:
        return self.gpus // GROUP

    def context(self, c: Constants, tokens: float | None = None) -> float:
        """Tokens that a token of a document of mean length `tokens` attends to, on average; None: a sample's."""
        return (self.tokens / self.samples if tokens is None else tokens) * c.length_spread / 2


def traffic(c: Constants, tokens: float) -> float:
    """Seconds that the links of a node take for one all-reduce of bf16 [tokens, hidden]."""
    return 2 * (GROUP - 1) / GROUP * tokens * c.hidden * _BF16 / c.link_bandwidth


def compute(c: Constants, flops: float) -> float:
    """Seconds of a node for `flops`."""
    return flops / (GROUP * c.peak_flops * c.compute_efficiency)


def forward(c: Constants, context: float) -> float:
    """Seconds of a node for one token of the target's layers in a long pass; every token attends to `context`."""
    return compute(c, c.target_flops + c.attention_flops * context) + 2 * c.layers * traffic(c, 1)


def fit_flops(c: Constants, context: float) -> float:
    """Of one token in an update: fusion without a gradient by its input, all steps, and the target's head twice."""
    steps = 6 * (c.layer_params + c.draft_head_params) + _ATTENTION_PASSES * c.attention_flops / c.layers * context
    return 4 * c.fusion_params + 2 * c.head_flops + c.ttt_steps * steps


def fit_token(c: Constants, context: float) -> float:
    """Seconds of a node for one token of an update, the target's layers apart."""
    return compute(c, fit_flops(c, context)) + _STEP_COLLECTIVES * c.ttt_steps * traffic(c, 1)


def decode_step(c: Constants, batch: int, cached: float, preset: Preset) -> float:
    """Seconds of a step of `batch` requests, each with `cached` tokens behind it."""
    experts = distinct_experts(int(c.experts), int(c.chosen), batch) / c.experts
    cache = batch * cached * c.cache_bytes / (GROUP if preset == "dcp" else 1)
    reading = (c.dense_read_bytes + c.expert_read_bytes * experts + cache) / (c.memory_bandwidth * c.decode_efficiency)
    computing = compute(c, batch * (c.target_flops + c.head_flops + c.absorbed_flops * cached))
    collectives = _LAYER_COLLECTIVES[preset] * c.layers * (c.collective_latency + traffic(c, batch))
    return max(reading, computing) + collectives


def requests_that_fit(c: Constants, preset: Preset) -> int:
    """Requests of the longest document for which a node has cache: generation reserves all of it for each."""
    free = c.memory_bytes * c.memory_share - c.weight_bytes - c.workspace_bytes
    return max(0, int(free * (GROUP if preset == "dcp" else 1) // (c.cache_bytes * c.longest)))


def running_context(c: Constants, job: Job) -> float:
    """Cached tokens of a running request, averaged over a run: its prompt and what of its answer is there."""
    sample = job.tokens / job.samples
    return (1 - c.answer_share) * sample + job.context(c, c.answer_share * sample)


def generate_batch(c: Constants, preset: Preset) -> int:
    """Requests that a node answers together. ConfigError: the node has no room for one."""
    batch = min(int(c.max_batch), requests_that_fit(c, preset))
    if batch < 1:
        need = c.weight_bytes + c.workspace_bytes + c.cache_bytes * c.longest / (GROUP if preset == "dcp" else 1)
        found = f"{c.memory_bytes * c.memory_share / 1e9:.1f} GB usable on a GPU"
        raise ConfigError("memory", found, f"{need / 1e9:.1f} GB for one request", "use larger GPUs or preset dcp")
    return batch


@dataclass(frozen=True)
class Hours:
    """Wall-clock hours of the stages; those that use no GPU are left out."""

    generate: float
    features: float
    fit: float
    evaluate: float

    @property
    def total(self) -> float:
        return self.generate + self.features + self.fit + self.evaluate


def hours(c: Constants, job: Job, source: Source, *, beside: bool = False) -> Hours:
    """The stages' hours.

    Args:
      c: the constants.
      job: the work.
      source: of the features, as `features.source` in a recipe.
      beside: files are checked and written while the next are computed, which the stage `features` does not do.
    """
    context, each = job.context(c), job.tokens / job.nodes
    ahead, train = forward(c, context), fit_token(c, context)
    if source == "online":
        features, fit = 0.0, job.epochs * each * (ahead + train)
    else:
        features = each * _extract(c, ahead, beside)
        fit = each * sum(max(train, _read(c, first=epoch == 0)) for epoch in range(job.epochs))
    fit += job.epochs * job.tokens / c.update_tokens * _synchronise(c, job)
    return Hours(_generate(c, job) / HOUR, features / HOUR, fit / HOUR, _evaluate(c, job) / HOUR)


def _generate(c: Constants, job: Job) -> float:
    batch = generate_batch(c, job.preset)
    step = decode_step(c, batch, running_context(c, job), job.preset)
    prompts = (1 - c.answer_share) * job.tokens
    drawn = c.answer_share * job.tokens / (1 - c.wasted_share)
    return (drawn * step / batch + prompts * forward(c, job.context(c, prompts / job.samples))) / job.nodes


def _evaluate(c: Constants, job: Job) -> float:
    """On one node, at the speed of plain decoding: what the drafter gains is not yet known."""
    batch = min(evaluate.BATCH, generate_batch(c, "tp"))
    step = decode_step(c, batch, running_context(c, job), "tp")
    return c.data_sets * c.evaluated_tokens * step / batch


def _extract(c: Constants, ahead: float, beside: bool) -> float:
    """Seconds of a node for one token's features. A file is checked by one thread, and then written."""
    if beside:
        return max(ahead, c.feature_bytes / (c.check_rate * c.check_threads), c.feature_bytes / c.disk_write)
    return ahead + c.feature_bytes / c.check_rate + c.feature_bytes / c.disk_write


def _read(c: Constants, *, first: bool) -> float:
    """Seconds of a node to have one token's features: files are verified when they are first used."""
    checked = c.feature_bytes / (c.check_rate * c.check_threads) if first else 0.0
    return max(checked, c.feature_bytes / c.disk_read)


def _synchronise(c: Constants, job: Job) -> float:
    """Seconds of an update in which the nodes add up their float32 gradients."""
    return 2 * (job.nodes - 1) / job.nodes * 4 * c.draft_params / c.nic_bandwidth


def break_even(c: Constants, job: Job, *, beside: bool) -> int | None:
    """The fewest epochs from which on stored features take less time than online ones; None: never."""
    for epochs in range(1, _MOST_EPOCHS + 1):
        run = dataclasses.replace(job, epochs=epochs)
        stored, online = hours(c, run, "files", beside=beside).total, hours(c, run, "online").total
        if stored < online * (1 - 1e-9):
            return epochs
    return None


def predicted(c: Constants, p: Published) -> float:
    """Tokens a second for a published run: each token drawn brings the share of a prompt that has to be computed."""
    step = decode_step(c, p.batch, p.prompt + p.output / 2, "tp")
    return p.batch / (step + p.batch * p.prompt / p.output * forward(c, p.prompt / 2))


def predicted_training(c: Constants, samples: int) -> float:
    """GPU-hours of features and training in TorchSpec's run."""
    _, tokens, _, _ = PUBLISHED_TRAINING
    job = Job(GROUP, samples, tokens, "tp")
    return GROUP * hours(c, job, "online").fit


def sensitivity(
    c: Constants, job: Job, total: Callable[[Constants, Job], float]
) -> list[tuple[str, float, float, float]]:
    """What is not certain, the largest range first: name, value, and the total with 0.8 and with 1.25 times the value.

    A share stays at most 1.
    """
    rows: list[tuple[str, float, float, float]] = []
    for field in dataclasses.fields(c):
        if field.metadata["kind"] in ("code", "data sheet"):
            continue
        value, most = vars(c)[field.name], 1.0 if field.metadata["unit"] == "share" else float("inf")
        changed = [dataclasses.replace(c, **{field.name: min(value * by, most)}) for by in (0.8, 1.25)]
        low, high = (total(x, job) for x in changed)
        rows.append((field.name, value, low, high))
    return sorted(rows, key=lambda row: (-abs(row[3] - row[2]), row[0]))
