"""How float32 weights lie in memory on a CPU: what `layers.linear` multiplies by with its inputs first, experts apart.

Made once, after loading. Files, training, meshes and GPUs know the declared form alone.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from .drafter import Drafter, borrow
from .layers import InputFirst
from .model import Target
from .names import parameters
from .pallas_kernels import ExpertList

MOST_LISTED = 32  # experts of a layer: each is a branch to compile, and two arrays to hand over in every call


def arrange_for_cpu(target: Target, drafter: Drafter | None = None, *, mesh: Mesh | None = None) -> None:
    """Replace weights by the forms that a CPU multiplies fastest, one at a time; nothing on a GPU or under a mesh.

    What the drafter borrows stays the target's own. A model so arranged cannot be saved, trained or placed on a mesh
    any more. Doing it again changes nothing, so that a drafter may follow later.

    Args:
      target: filled.
      drafter: filled; it borrows from this target, if from any.
      mesh: that the parameters lie on; None: one device.
    """
    if mesh is not None or jax.default_backend() != "cpu":
        return
    for model in (target, drafter):
        for param in () if model is None else parameters(model).values():
            _arrange(param)
    if drafter is not None:
        borrow(drafter, target)


def _arrange(param: nnx.Param) -> None:
    value, meta = param.get_value(), param.get_metadata()
    if not isinstance(value, jax.Array) or value.dtype != jnp.float32:
        return  # arranged already, or of a type whose products gain nothing
    if meta["inputs"]:
        param.set_value(jax.block_until_ready(InputFirst.of(value, meta["inputs"])))
    elif meta["axes"][0] == "experts" and value.ndim > 2 and value.shape[0] <= MOST_LISTED:
        param.set_value(jax.block_until_ready(ExpertList.of(value)))
