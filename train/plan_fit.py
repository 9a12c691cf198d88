"""What an update of a drafter takes before anything is loaded: `python -m kimijax.train.plan_fit --recipe kimi-k2.5`.

The trainer's own update is compiled over as many virtual CPU devices as the recipe names, at its shapes, from a target
that is only declared. Nothing is allocated; bytes are those of one device. A CPU's compiler wants some matrices in
float32, or in another order: such copies are named, and are not a GPU's.
"""

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kimijax.config import Int4Config, TargetConfig, load_config
from kimijax.drafter import declare_drafter
from kimijax.errors import ConfigError
from kimijax.loader import model_directory
from kimijax.model import declare_target
from kimijax.plan_compile import PARTS, CompiledProgram, ask_for_devices, compile_lowered
from kimijax.plan_report import program_lines
from kimijax.sharding import partition

from .dataset import RowBatch
from .draft_recipe import DraftRecipe, load_draft_recipe
from .fitter import Fitter
from .placement import check_mesh, fit_mesh, repeated, state_shardings


class DeclaredFitter(Fitter):
    """The trainer of a target that is only declared: its update is to be lowered, never run."""

    def _place(self, state: nnx.State) -> nnx.State:
        where = state_shardings(state, self.mesh, fsdp=False)
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, where)

    def rows(self, *, online: bool) -> RowBatch[Any]:
        """The rows of one update as shapes."""
        f = self.fit
        shape = (f.accumulate, f.rows, f.row_tokens)
        where: Any = repeated(None)
        if self.mesh is not None:
            where = jax.sharding.NamedSharding(self.mesh, partition(("replicated", "batch"), self.mesh))

        def array(dtype: Any, *width: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((*shape, *width), dtype, sharding=where)

        ids, mask = array(jnp.int32), array(jnp.bool_)
        if online:
            return RowBatch(ids, mask, ids, ids, {}, None)
        stream = array(jnp.bfloat16, self.wiring.target_hidden)
        return RowBatch(ids, mask, ids, ids, dict.fromkeys(self.wiring.taps, stream), stream)

    def lower(self, *, online: bool) -> jax.stages.Lowered:
        """The update."""
        with self._devices():
            return self._update.lower(self.abstract(), self._frozen, self.rows(online=online))

    def frozen_target(self) -> nnx.State:
        """What is kept of the target: all of it online, else embedding, norm and head."""
        return self._frozen.tables if self._frozen.target is None else self._frozen.target


@dataclass(frozen=True)
class FitPlan:
    """What an update takes on each device, in bytes."""

    devices: int
    n_layers: int
    target: int  # online: the frozen target; else its embedding, norm and head
    drafter: int  # parameters, float32
    optimizer: int
    update: CompiledProgram


def plan_fit(recipe: DraftRecipe, target: TargetConfig, *, n_layers: int | None = None) -> FitPlan:
    """Compiles the update of a recipe.

    Args:
      recipe: whose tables target, features, draft, vocab and fit are read.
      target: its target.
      n_layers: of the target; None: all.
    Raises:
      ConfigError: fewer devices than the recipe names, or sizes that do not fit together.
    """
    online = recipe.features.source == "online"
    mesh = fit_mesh(recipe.fit, recipe.target.devices, recipe.target.preset)
    int4 = isinstance(target.quantization, Int4Config)
    config = target if n_layers is None else replace(target, n_layers=n_layers)
    declared = declare_target(config, dtype=jnp.dtype(recipe.target.dtype), int4=int4)
    wiring = recipe.target.wiring(config)
    ids = np.arange(recipe.vocab.size or config.vocab_size)
    where = {"updates": 1000, "mesh": mesh, "online": declared if online else None}
    start = time.perf_counter()
    fitter = DeclaredFitter(recipe, config, wiring, ids, declared, **where)
    check_mesh(declare_drafter(fitter.config, wiring, dtype=jnp.dtype(jnp.float32)), mesh, recipe.fit)
    lowered = fitter.lower(online=online)
    seconds = time.perf_counter() - start
    update = compile_lowered("update", lowered, frozen_name, lower_seconds=seconds)
    state = fitter.abstract()
    return FitPlan(
        devices=recipe.target.devices,
        n_layers=config.n_layers,
        target=bytes_on_each(fitter.frozen_target()),
        drafter=bytes_on_each(state.params),
        optimizer=bytes_on_each(state.optimizer),
        update=update,
    )


def bytes_on_each(tree: Any) -> int:
    """Of arrays that are shapes with placements, on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def frozen_name(argument: str) -> str | None:
    """The dotted path of a weight that an update never changes, the layer's number as *; None: another argument."""
    if not argument.startswith("frozen."):
        return None
    owner, *path = re.findall(r"\w+", argument.removeprefix("frozen."))
    return ".".join([owner, *("*" if word.isdigit() else word for word in path if word != "value")])


def lines_of(plan: FitPlan, recipe: DraftRecipe) -> list[str]:
    """For people."""
    f, u = recipe.fit, plan.update
    on = f"{plan.devices} devices, {recipe.target.preset}, {f.data_parallel} group(s) with different rows"
    count = {part: u.collectives_of(part) for part in PARTS}
    told = [f"{part} {dict(kinds)}" for part, kinds in count.items() if kinds]
    return [
        f"recipe {recipe.name}, {plan.n_layers} target layers: {f.accumulate} x {f.rows} rows of {f.row_tokens} tokens "
        f"an update, {f.ttt_steps} steps; {on}",
        f"each device: target {plan.target / 1e9:,.2f} GB, drafter {plan.drafter / 1e9:,.2f} GB, optimiser "
        f"{plan.optimizer / 1e9:,.2f} GB, temporaries {u.temporaries / 1e9:,.2f} GB (of the CPU's program)",
        f"lowered in {u.lower_seconds:.0f} s, compiled in {u.compile_seconds:.0f} s",
        f"collectives of a micro-batch: {'; '.join(told)}; {u.collective_bytes() / 1e9:,.2f} GB",
        *program_lines([u]),
    ]


def to_json(plan: FitPlan) -> dict[str, Any]:
    """All fields."""
    sums = {name: value for name, value in vars(plan).items() if name != "update"}
    return sums | {"update": plan.update.to_json()}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser("python -m kimijax.train.plan_fit", description="What an update of a drafter takes.")
    p.add_argument("--recipe", required=True, help="name of a recipe, or the path of a .toml file")
    p.add_argument("--set", action="append", default=[], metavar="TABLE.FIELD=VALUE", help="change a field")
    p.add_argument("--model", help="the target's folder or config.json (default: the recipe's)")
    p.add_argument("--layers", type=int, help="of the target (default: all)")
    p.add_argument("--json", action="store_true", help="print JSON")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 where the recipe or its target is refused."""
    args = parser().parse_args(arguments)
    try:
        recipe = load_draft_recipe(args.recipe, args.set)
        ask_for_devices(recipe.target.devices)
        plan = plan_fit(recipe, load_config(args.model or model_directory(recipe.target.model)), n_layers=args.layers)
    except ConfigError as e:
        print(f"kimijax.train.plan_fit: {e}", file=sys.stderr)
        return 2
    print(json.dumps(to_json(plan), indent=2) if args.json else "\n".join(lines_of(plan, recipe)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
