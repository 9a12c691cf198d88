"""The trainer of drafters: EAGLE-3's training-time test (arXiv:2503.01840), in updates that can be resumed.

The state is (float32 parameters, optimiser state, updates done). An update is a pure function of it and of its rows,
and which rows those are is a function of (seed, number of the update): a resumed run is the run. The target's hidden
states come from files or (online) from the frozen target, on the same mesh and in the same program.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from kimijax.config import TargetConfig
from kimijax.drafter import Drafter, borrow, declare_drafter, initialise_drafter, set_vocabulary
from kimijax.model import Tables, Target
from kimijax.unroll import valid_rows
from kimijax.wiring import Wiring

from .dataset import RowBatch
from .draft_recipe import DraftRecipe
from .features import hidden_states
from .fit_checkpoints import FitState
from .fit_optimizer import make_optimizer, schedule
from .fit_progress import StepMetrics
from .placement import optimizer_shardings, place_rows, repeated, state_shardings
from .ttt import Batch, StepSums, ttt_loss

type DeviceRows = RowBatch[jax.Array]


class Frozen(NamedTuple):
    """What an update reads and never changes: an argument of the programs, so that no copy is compiled into them."""

    lent: nnx.State  # the drafter's borrowed tables and its vocabulary
    tables: nnx.State  # the target's embedding, final norm and head
    target: nnx.State | None  # the whole target, online


class Fitter:
    """The jitted programs of a run."""

    def __init__(
        self,
        recipe: DraftRecipe,
        target: TargetConfig,
        wiring: Wiring,
        target_ids: np.ndarray,
        tables: Tables,
        *,
        updates: int,
        mesh: Mesh | None = None,
        online: Target | None = None,
        last_is_normed: bool = False,
    ) -> None:
        """Declares the drafter and places what is frozen.

        Args:
          recipe: its tables `draft` and `fit` are read.
          target: whose drafter it is.
          wiring: the taps that feed it.
          target_ids: int [Vd], the draft vocabulary.
          tables: of the target, filled.
          updates: of the whole run, which the learning rate follows.
          mesh: see `placement.fit_mesh`; None: the first device.
          online: the target, filled, where its hidden states are not stored.
          last_is_normed: the stored last states went through the target's final norm already.
        Raises:
          ConfigError: sizes that do not fit together, or that do not divide over the mesh.
        """
        self.fit, self.wiring, self.mesh, self.updates = recipe.fit, wiring, mesh, updates
        self.config = recipe.draft.config(target, wiring, len(target_ids))
        self._tables, self._target_ids, self._last_is_normed = lone_tables(tables), target_ids, last_is_normed
        self._dtype = jnp.dtype(self.fit.compute_dtype)
        self._graph, declared, lent = nnx.split(self._declared(self._dtype), nnx.Param, ...)
        self._tables_graph, tables_state = nnx.split(self._tables)
        self._online_graph, online_state = (None, None) if online is None else nnx.split(online)
        placed_target = None if online_state is None else self._place(online_state)
        self._frozen = Frozen(self._place(lent), self._place(tables_state), placed_target)
        self.rate = schedule(self.fit, updates)
        self._optimizer = make_optimizer(self.fit, updates)
        self._shapes = cast(nnx.State, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), declared))
        placed = state_shardings(self._shapes, mesh, fsdp=self.fit.fsdp)
        optimizer = optimizer_shardings(self._optimizer, self._shapes, placed, mesh)
        self._shardings = FitState(placed, optimizer, cast(jax.Array, repeated(mesh)))
        self._update = jax.jit(self._updated, donate_argnums=0, out_shardings=(self._shardings, repeated(mesh)))
        self._evaluate = jax.jit(self._evaluated, out_shardings=repeated(mesh))

    def create(self) -> FitState:
        """A fresh state."""
        fresh = initialise_drafter(
            self._declared(jnp.dtype(jnp.float32)), self._tables, self._target_ids, self.fit.seed
        )
        params = jax.device_put(nnx.state(fresh, nnx.Param), self._shardings.params)
        with self._devices():
            optimizer = jax.jit(self._optimizer.init, out_shardings=self._shardings.optimizer)(params)
        return FitState(params, optimizer, jax.device_put(jnp.int32(0), self._shardings.step))

    def abstract(self) -> FitState:
        """Shapes, dtypes and placement of a state."""
        step: Any = jax.ShapeDtypeStruct((), jnp.int32)
        state = FitState(self._shapes, jax.eval_shape(self._optimizer.init, self._shapes), step)
        return cast(
            FitState,
            jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, self._shardings),
        )

    def step(self, state: FitState, rows: RowBatch[np.ndarray]) -> tuple[FitState, StepMetrics]:
        """One update; `state` is given up for the new one.

        Args:
          state: its arrays are donated.
          rows: this process's share of the update's micro-batches.
        """
        with self._devices():
            return self._update(state, self._frozen, self._placed(rows))

    def sums(self, params: nnx.State, rows: RowBatch[np.ndarray]) -> StepSums:
        """Sums over rows for evaluation, as in training."""
        with self._devices():
            return self._evaluate(params, self._frozen, self._placed(rows))

    def drafter(self, params: nnx.State, dtype: Any = jnp.float32) -> Drafter:
        """The drafter of a state: its parameters in `dtype`, everything else the target's."""
        drafter = self._declared(jnp.dtype(dtype))
        nnx.update(drafter, jax.tree.map(lambda x: x.astype(dtype), params))
        return drafter

    def _declared(self, dtype: Any) -> Drafter:
        drafter = declare_drafter(self.config, self.wiring, dtype=dtype)
        set_vocabulary(drafter, self._target_ids)
        borrow(drafter, self._tables)
        return drafter

    def _place(self, state: nnx.State) -> nnx.State:
        return jax.device_put(state, state_shardings(state, self.mesh, fsdp=False))

    def _placed(self, rows: RowBatch[np.ndarray]) -> DeviceRows:
        return jax.tree.map(lambda x: place_rows(x, self.mesh), rows)

    def _devices(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def _updated(self, state: FitState, frozen: Frozen, rows: DeviceRows) -> tuple[FitState, StepMetrics]:
        gradient, part = self._gradient(state.params, frozen, rows)
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer's power
            changes, optimizer = self._optimizer.update(gradient, state.optimizer, state.params)
        params = cast(nnx.State, optax.apply_updates(state.params, changes))
        metrics = StepMetrics(part.loss, optax.tree.norm(gradient), optax.tree.norm(changes), part.sums, part.masked)
        return FitState(params, optimizer, state.step + 1), metrics

    def _gradient(self, params: nnx.State, frozen: Frozen, rows: DeviceRows) -> "tuple[nnx.State, _Part]":
        """The mean of the micro-batches' gradients, float32."""

        def one(micro: DeviceRows) -> "tuple[nnx.State, _Part]":
            batch = self._batch(frozen, micro)
            (_, part), gradient = jax.value_and_grad(self._loss, has_aux=True)(params, frozen, batch)
            return gradient, part

        if self.fit.accumulate == 1:
            return one(jax.tree.map(lambda x: x[0], rows))

        def add(total: Any, micro: DeviceRows) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, one(micro)), None

        first = jax.tree.map(lambda x: x[0], rows)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, first))
        (gradient, part), _ = jax.lax.scan(add, zeros, rows)
        share = self._share(rows)
        return jax.tree.map(lambda g: g * share, gradient), part._replace(loss=part.loss * share)

    def _share(self, rows: DeviceRows) -> jax.Array:
        """One over the micro-batches that count: all, or those that a normaliser of valid rows can divide."""
        if self.fit.normaliser == "all":
            return jnp.float32(1 / self.fit.accumulate)
        learns = jax.vmap(lambda mask, segments: valid_rows(mask, segments, 1).any())(rows.mask, rows.segments)
        return 1.0 / jnp.maximum(learns.sum(), 1).astype(jnp.float32)

    def _loss(self, params: nnx.State, frozen: Frozen, batch: Batch) -> "tuple[jax.Array, _Part]":
        cast_params = jax.tree.map(lambda x: x.astype(self._dtype), params)
        drafter = nnx.merge(self._graph, cast_params, frozen.lent)
        loss, sums = ttt_loss(drafter, nnx.merge(self._tables_graph, frozen.tables), batch, self.fit)
        learns = valid_rows(batch.mask, batch.segments, 1)[0].any(axis=1)
        masked = ((batch.segments >= 0).any(axis=1) & ~learns).sum(dtype=jnp.int32)
        return loss, _Part(loss, sums, masked)

    def _batch(self, frozen: Frozen, rows: DeviceRows) -> Batch:
        """The rows with the target's states, which no gradient reaches."""
        taps, last = rows.taps, rows.last
        normed = self._last_is_normed
        if self._online_graph is not None:
            normed = False
            target = nnx.merge(self._online_graph, frozen.target)
            taps, last = hidden_states(target, rows.ids, rows.positions, rows.segments, self.wiring)
        if last is None:
            raise ValueError("rows: found no hidden states, expected them: pass the target as `online`")
        return Batch(rows.ids, rows.mask, rows.segments, rows.positions, taps, last, normed)

    def _evaluated(self, params: nnx.State, frozen: Frozen, rows: DeviceRows) -> StepSums:
        batch = self._batch(frozen, jax.tree.map(lambda x: x[0], rows))
        return self._loss(params, frozen, batch)[1].sums


class _Part(NamedTuple):
    """What a micro-batch adds up to."""

    loss: jax.Array
    sums: StepSums
    masked: jax.Array  # int32, rows with documents and without a position that counts


def lone_tables(tables: Tables) -> Tables:
    """The tables of a whole target without its layers, the arrays shared."""
    lone = Tables(tables.config, tables.embed.get_value().dtype)
    for own, lent in ((lone.embed, tables.embed), (lone.norm, tables.norm), (lone.lm_head, tables.lm_head)):
        own.set_value(lent.get_value())
    return lone
