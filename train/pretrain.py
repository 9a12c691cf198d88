"""Stage `pretrain`: train a small target from scratch, resumable at any step.

The state is (parameters, optimiser state, step); the order of the data is a function of (seed, step), so that a resumed
run sees what an uninterrupted one would have seen. In the last `decay_steps` the routed experts are rounded to INT4 in
the forward pass (straight-through gradient), as they will be stored.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

from kimijax import quant
from kimijax.config import TargetConfig
from kimijax.errors import ConfigError
from kimijax.model import Target, declare_target, initialise
from kimijax.moe import dropped_share

from .config import PretrainConfig
from .metrics import MetricsLog
from .optimizer import FROZEN, make_optimizer, parameter_name
from .packing import Documents, Rows, pack


class TrainState(NamedTuple):
    """Everything a step reads and writes."""

    params: nnx.State
    optimizer: optax.OptState
    step: jax.Array  # int32


class StepMetrics(NamedTuple):
    """Scalars of one step, on the device."""

    loss: jax.Array  # weighted mean, nats a token
    gradient_norm: jax.Array
    max_load: jax.Array  # busiest expert's rows over the mean, worst layer
    dropped: jax.Array  # share of the (token, expert) rows that found no place at their expert, worst layer


@dataclasses.dataclass(frozen=True)
class Batch:
    """One step's rows on the device; see `packing.Rows`."""

    ids: jax.Array
    weight: jax.Array
    segments: jax.Array
    positions: jax.Array

    @staticmethod
    def of(rows: Rows) -> "Batch":
        return Batch(*(jnp.asarray(a) for a in (rows.ids, rows.weight, rows.segments, rows.positions)))


jax.tree_util.register_dataclass(Batch)


class Pretrainer:
    """The jitted programs of a run. `graph` is the model's static part."""

    def __init__(self, target: TargetConfig, config: PretrainConfig) -> None:
        if target.moe is None:
            raise ConfigError("model.n_routed_experts", None, "a model with routed experts, as all of the family have")
        self.config = config
        self._n_chosen = target.moe.n_chosen
        self.graph, self._abstract = nnx.split(declare_target(target, dtype=jnp.dtype(jnp.float32), int4=False))
        self._optimizer = make_optimizer(config)
        self._dtype = jnp.dtype(config.compute_dtype)
        self.step = jax.jit(self._step, donate_argnums=0, static_argnames="int4_experts")
        self.losses = jax.jit(self._losses, static_argnames=("experts", "int4_experts"))

    def create(self) -> TrainState:
        """A fresh state."""
        params = nnx.state(initialise(nnx.merge(self.graph, self._abstract), self.config.seed))
        state = TrainState(params, jax.jit(self._optimizer.init)(params), jnp.int32(0))
        # Committed to the device, as a restored state is: jit would compile a second program for one that is not.
        return jax.device_put(state, jax.devices()[0])

    def model(self, params: nnx.State, int4_experts: bool) -> Target:
        """The model that a step computes with: weights in the compute dtype, routed experts rounded to INT4 or not."""

        def computed(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
            if parameter_name(path) == FROZEN:
                return x
            x = x.astype(self._dtype)
            return _round_to_int4(x) if int4_experts and _is_routed_expert(path) else x

        return nnx.merge(self.graph, jax.tree_util.tree_map_with_path(computed, params))

    def _losses(
        self, params: nnx.State, batch: Batch, experts: str, int4_experts: bool
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Negative log-likelihood [B, T] in nats, and the rows of each expert per MoE layer, [E] each."""
        model = self.model(params, int4_experts)
        out = model(batch.ids[:, :-1], positions=batch.positions, segments=batch.segments, experts=experts)
        nll = optax.softmax_cross_entropy_with_integer_labels(out.logits, batch.ids[:, 1:])
        n_experts = out.routing[0].scores.shape[-1]
        loads = [jnp.bincount(r.experts.reshape(-1), length=n_experts) for r in out.routing]
        return nll, loads

    def _step(self, state: TrainState, batch: Batch, int4_experts: bool) -> tuple[TrainState, StepMetrics]:
        def loss(params: nnx.State) -> tuple[jax.Array, list[jax.Array]]:
            nll, loads = self._losses(params, batch, "capacity", int4_experts)
            return (nll * batch.weight).sum() / jnp.maximum(batch.weight.sum(), 1.0), loads

        (value, loads), gradient = jax.value_and_grad(loss, has_aux=True)(state.params)
        with jax.numpy_dtype_promotion("standard"):  # optax's Muon raises a float to an integer's power
            updates, optimizer = self._optimizer.update(gradient, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        params = _balance(cast(nnx.State, params), loads, self.config.balance_rate)
        rows = jnp.stack(loads)  # [MoE layers, E]
        load = rows.astype(jnp.float32)
        max_load = (load.max(axis=1) / load.mean(axis=1)).max()
        n_rows = batch.positions.size * self._n_chosen
        metrics = StepMetrics(value, optax.tree.norm(gradient), max_load, dropped_share(rows, n_rows).max())
        return TrainState(params, optimizer, state.step + 1), metrics


def _is_routed_expert(path: tuple[Any, ...]) -> bool:
    return any(isinstance(k, jax.tree_util.DictKey) and k.key == "experts" for k in path)


def _round_to_int4(w: jax.Array) -> jax.Array:
    """The stored value of w (bf16, then INT4, as a checkpoint is written), with the gradient of w."""
    exact = jax.lax.stop_gradient(w).astype(jnp.bfloat16)
    stored = quant.dequantize(quant.quantize(exact), w.dtype)
    return w + jax.lax.stop_gradient(stored - w)


def _balance(params: nnx.State, loads: list[jax.Array], rate: float) -> nnx.State:
    """Move each router bias one step towards equal load (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)."""
    layers = iter(loads)

    def move(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        if parameter_name(path) != FROZEN:
            return x
        load = next(layers).astype(jnp.float32)
        return x + jnp.float32(rate) * jnp.sign(load.mean() - load)

    return jax.tree_util.tree_map_with_path(move, params)


def batches(documents: Documents, config: PretrainConfig, first_step: int) -> Iterator[Batch]:
    """Batches from `first_step` on: every epoch packs the documents anew in an order drawn from (seed, epoch)."""
    step, epoch = 0, 0
    while True:
        rows = pack(documents, config.row_tokens, config.prompt_weight, np.random.default_rng((config.seed, epoch)))
        order = np.random.default_rng((config.seed, epoch, 1)).permutation(len(rows))
        if len(rows) < config.rows:
            raise ValueError(f"pretrain.rows: {config.rows} rows a step, but the corpus packs into {len(rows)} rows")
        for start in range(0, len(rows) - config.rows + 1, config.rows):  # an epoch's last, partial step is left out
            if step >= first_step:
                yield Batch.of(rows.batch(order[start : start + config.rows]))
            step += 1
        epoch += 1


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Loss on text that was not trained on, over full-weight tokens."""

    nats_per_byte: float
    nats_per_token: float


def evaluate(
    trainer: Pretrainer, params: nnx.State, documents: Documents, token_bytes: np.ndarray, *, int4: bool
) -> HeldOut:
    """Held-out loss with the served expert product (nothing is dropped), experts rounded to INT4 or not.

    Args:
      token_bytes: int [V], length of each token's text in bytes (0 for control tokens).
    """
    config = trainer.config
    rows = pack(documents, config.row_tokens, 0.0, None)
    nats, n_bytes, n_tokens = 0.0, 0, 0
    for start in range(0, len(rows), config.rows):
        index = np.arange(start, start + config.rows)
        part = rows.batch(np.minimum(index, len(rows) - 1))
        weight = part.weight * (index < len(rows))[:, None]
        nll, _ = trainer.losses(params, Batch.of(part), experts="reference", int4_experts=int4)
        nats += float((np.asarray(nll) * weight).sum())
        n_bytes += int((token_bytes[part.ids[:, 1:]] * weight).sum())
        n_tokens += int(weight.sum())
    return HeldOut(nats / n_bytes, nats / n_tokens)


CHECKPOINTS = "checkpoints"  # folder within a run's folder


def checkpoints(out: Path, *, read_only: bool = False) -> ocp.CheckpointManager:
    """Atomic checkpoints of the run in `out`, the newest three kept; half-written ones are ignored.

    A reader of a run that another process is training must be `read_only`: opening for writing removes what looks like
    the rest of a killed save.
    """
    if read_only:  # the other two are what read_only implies; not saying so is a warning
        options = ocp.CheckpointManagerOptions(read_only=True, create=False, save_interval_steps=0)
    else:
        options = ocp.CheckpointManagerOptions(max_to_keep=3, cleanup_tmp_directories=True)
    return ocp.CheckpointManager((out / CHECKPOINTS).absolute(), options=options)


def last_step(out: Path) -> int | None:
    """The newest complete checkpoint's step, or None."""
    if not (out / CHECKPOINTS).is_dir():
        return None
    with checkpoints(out, read_only=True) as manager:
        return manager.latest_step()


def check_steps(done: int, config: PretrainConfig, out: Path) -> None:
    """Refuse a run that has done more steps than are asked for. Raises ConfigError."""
    if done > config.steps:
        expected = f"at least {done}, the steps that {out} has done"
        raise ConfigError("pretrain.steps", config.steps, expected, "or use another --out")


def restore(trainer: Pretrainer, manager: ocp.CheckpointManager) -> TrainState:
    """The newest checkpoint, or a fresh state where there is none."""
    state, latest = trainer.create(), manager.latest_step()
    if latest is None:
        return state
    params, optimizer, step = cast(
        tuple[nnx.State, optax.OptState, jax.Array],
        manager.restore(latest, args=ocp.args.StandardRestore(tuple(state))),
    )
    return TrainState(params, optimizer, step)


def run(
    trainer: Pretrainer,
    train: Documents,
    heldout: Documents,
    token_bytes: np.ndarray,
    out: Path,
    stop: Callable[[], bool] = lambda: False,
) -> TrainState:
    """Train to the configured steps, from the newest checkpoint in `out` if there is one.

    Writes `out/checkpoints`, `out/metrics.jsonl` and TensorBoard events in `out/tensorboard`.

    Args:
      token_bytes: see `evaluate`.
      stop: asked after every step; once it says yes the step is saved and the run returns.
    Raises:
      ConfigError: the checkpoint has more steps than are asked for.
      FloatingPointError: the loss is not finite.
    """
    config, done = trainer.config, last_step(out)
    if done is not None:
        check_steps(done, config, out)
    with checkpoints(out) as manager:
        state = restore(trainer, manager)
        step = int(state.step)
        if done is not None:
            print(f"resumed at step {step} of {config.steps}", file=sys.stderr, flush=True)
        step_tokens = config.rows * config.row_tokens
        with MetricsLog(out, step, step * step_tokens) as log:
            for batch in batches(train, config, step):
                if step >= config.steps:
                    break
                int4_experts = step >= config.steps - config.decay_steps
                state, metrics = trainer.step(state, batch, int4_experts=int4_experts)
                step += 1
                last = step == config.steps or stop()
                saves = last or step % config.save_every == 0
                # The loss is looked at before every save as well: a checkpoint must be worth resuming from.
                if saves or step % config.log_every == 0:
                    values = {name: float(v) for name, v in metrics._asdict().items()}
                    log.step(step, config.steps, step * step_tokens, values)
                if step == config.steps or step % config.eval_every == 0:
                    for name, int4 in (("float", False), ("int4", True)):
                        held = evaluate(trainer, state.params, heldout, token_bytes, int4=int4)
                        log.write(step, {f"heldout_{name}/{k}": v for k, v in dataclasses.asdict(held).items()})
                if saves:
                    manager.save(step, args=ocp.args.StandardSave(tuple(state)))
                if last:
                    break
        manager.wait_until_finished()
    return state
