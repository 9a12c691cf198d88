"""How weights lie in memory on a CPU: those of `layers.linear` with their inputs first.

Made once, after loading; files, training and meshes know the declared form alone.
"""

from flax import nnx

from .drafter import Drafter, borrow
from .layers import InputFirst
from .model import Target
from .names import parameters
from .pallas_kernels import ExpertList

MOST_LISTED = 32  # experts: each is a branch to compile and two arrays to hand over in every call


def store_input_first(target: Target, drafter: Drafter | None = None) -> None:
    """Replace every weight of `linear` by an `InputFirst`, one at a time, so that memory grows by the largest alone.

    What the drafter borrows stays the target's own. A filled model on one device is meant: it cannot be saved, trained
    or sharded afterwards.

    Args:
      target: filled, in float32.
      drafter: filled; it borrows from this target, if from any.
    """
    for model in (target, drafter):
        if model is None:
            continue
        for param in parameters(model).values():
            _store(param)
    if drafter is not None:
        borrow(drafter, target)


def _store(param: nnx.Param) -> None:
    value, meta = param.get_value(), param.get_metadata()
    if isinstance(value, InputFirst | ExpertList):
        return
    if meta["inputs"]:
        param.set_value(InputFirst.of(value, meta["inputs"]))
    elif meta["axes"][0] == "experts" and value.ndim > 2 and value.shape[0] <= MOST_LISTED:
        param.set_value(ExpertList.of(value))
