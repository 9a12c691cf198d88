"""The routed experts' product with INT4 weights: gate and up, SiLU, down, and the weighted sum over K chosen experts.

Implementations by name:
  reference   plain jax.numpy: `experts`' reference, on words brought back from the GPU's order.
  pallas      two kernels for Pallas' Triton backend, on CUDA (`triton.py`); x in bf16. Up to `tiles.DIRECT_ROWS`
              (token, slot) rows each row is a work item; beyond, rows are sorted by expert and cut into blocks.
  interpret   the same kernels run by Pallas' interpreter, on any platform; x in bf16 or float32.
"""

import jax
import jax.numpy as jnp

from ..route import WorkList, work_list
from . import triton
from .layout import GROUP, NIBBLES, block_width
from .layout import from_gpu_layout as from_gpu_layout
from .layout import to_gpu_layout as to_gpu_layout
from .reference import reference
from .tiles import CHIPS, Chip, block_rows, current_chip, plan

IMPLEMENTATIONS = ("reference", "pallas", "interpret")


def int4_experts(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    gate_up_scale: jax.Array,
    down_scale: jax.Array,
    *,
    implementation: str,
    partial: bool = False,
    work: WorkList | None = None,
    chip: Chip | None = None,
) -> jax.Array:
    """sum_k weights[t, k] * down_e(silu(gate_e x_t) * up_e x_t) with e = chosen[t, k].

    The weights are q * s, q the nibble minus 8 and s the scale of its group of 32 inputs. The kernels' products add up
    in float32; silu(gate) * up * weight is rounded to x's dtype in between.

    Args:
      x: [T, D], bf16 (float32 too for `reference` and `interpret`).
      chosen: int32 [T, K], distinct experts per token.
      weights: float32 [T, K].
      gate_up: int32 words [E, 2, F, D / 8] in the GPU's order (`to_gpu_layout`).
      down: int32 words [E, D, F / 8] in the GPU's order.
      gate_up_scale: bf16 [E, 2, F, D / 32].
      down_scale: bf16 [E, D, F / 32].
      implementation: a name of `IMPLEMENTATIONS`.
      partial: the weights are those of some experts only; `chosen` is -1 where another device has the expert, and
        such a term costs and adds nothing.
      work: `route.work_list(chosen, E, block_rows(T * K, E, partial))`, if at hand; made here
        where it is needed.
      chip: whose tile sizes to run with; None: the device that is traced for (H200's, when interpreted).
    Returns:
      [T, D] in x's dtype; the sum over k is taken in float32, in the same order each time.
    Raises:
      NotImplementedError: no such implementation, or no tile sizes for this device.
      ValueError: an operand's shape or dtype.
    """
    if implementation not in IMPLEMENTATIONS:
        names = ", ".join(IMPLEMENTATIONS)
        raise NotImplementedError(f"int4_experts implementation {implementation!r}: this build has {names}")
    operands = (x, chosen, weights, gate_up, down, gate_up_scale, down_scale)
    _check(*operands, implementation)
    if implementation == "reference":
        return reference(*operands, partial)
    interpret = implementation == "interpret"
    if chip is None:
        chip = CHIPS["H200"] if interpret else current_chip()
    n_experts, width, n_rows = gate_up.shape[0], gate_up.shape[2], chosen.size
    chosen_plan = plan(n_rows, chosen.shape[1], x.shape[1], n_experts, width, partial, chip)
    block = block_rows(n_rows, n_experts, partial)
    if block is None:
        work = None
    elif work is None:
        work = work_list(chosen, n_experts, block, implementation="reference")
    return triton.run(*operands, partial, work=work, plan=chosen_plan, interpret=interpret)


def _check(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    gate_up_scale: jax.Array,
    down_scale: jax.Array,
    implementation: str,
) -> None:
    floats = (jnp.bfloat16,) if implementation == "pallas" else (jnp.bfloat16, jnp.float32)
    if x.dtype not in floats:
        names = " or ".join(jnp.dtype(d).name for d in floats)
        raise ValueError(f"x of int4_experts {implementation!r}: found {x.dtype}, expected {names}")
    (t, d), (e, _, f, _), k = x.shape, gate_up.shape, chosen.shape[1]
    for width in (d, f):
        block_width(width)  # refuses one that fills no block
    expected = {
        "chosen": (chosen, (t, k), jnp.int32),
        "weights": (weights, (t, k), jnp.float32),
        "gate_up": (gate_up, (e, 2, f, d // NIBBLES), jnp.int32),
        "down": (down, (e, d, f // NIBBLES), jnp.int32),
        "gate_up_scale": (gate_up_scale, (e, 2, f, d // GROUP), jnp.bfloat16),
        "down_scale": (down_scale, (e, d, f // GROUP), jnp.bfloat16),
    }
    for name, (array, shape, dtype) in expected.items():
        if array.shape != shape or array.dtype != dtype:
            found = f"{array.dtype} {list(array.shape)}"
            raise ValueError(f"{name}: found {found}, expected {jnp.dtype(dtype).name} {list(shape)}")


__all__ = ["IMPLEMENTATIONS", "block_rows", "from_gpu_layout", "int4_experts", "to_gpu_layout"]
