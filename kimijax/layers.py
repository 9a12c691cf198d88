"""The pieces every layer is made of: declared parameters, the linear product, RMSNorm, the gated MLP."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import EllipsisType
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx

from .sharding import shard


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class InputFirst:
    """A weight [*F, *D] of `linear` stored as [D, F]: each group of axes merged, inputs first.

    XLA's CPU compiler multiplies 2 to 16 rows by it in a third of the time that it takes with the inputs last, one row
    and many rows in the same time. A transpose in the program does not help: the copy would be made in every call.
    """

    matrix: jax.Array
    outputs: tuple[int, ...] = field(metadata={"static": True})  # F

    @classmethod
    def of(cls, w: jax.Array, n_inputs: int) -> Self:
        """A copy of a weight whose last `n_inputs` axes are D."""
        outputs = w.shape[: w.ndim - n_inputs]
        return cls(jnp.moveaxis(w.reshape(math.prod(outputs), -1), 0, 1).copy(), outputs)

    @property
    def dtype(self) -> jnp.dtype:
        return self.matrix.dtype

    def astype(self, dtype: jnp.dtype) -> Self:
        return replace(self, matrix=self.matrix.astype(dtype))

    def __getitem__(self, key: EllipsisType | tuple[EllipsisType, slice]) -> Self:
        """The weight itself at [...], as a parameter's value is asked for; at [..., a:b] for these of its inputs."""
        return replace(self, matrix=self.matrix[key[1]]) if isinstance(key, tuple) else self


type Weight = jax.Array | InputFirst


def declare(
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    axes: tuple[str, ...],
    *,
    mean: float = 0.0,
    std: float | None = None,
    inputs: int = 0,
) -> nnx.Param:
    """A parameter before it exists: shape, dtype, logical axes, and the normal distribution of a fresh one.

    Args:
      shape: of the array.
      dtype: of the array.
      axes: logical axes, one a dimension.
      mean: of a fresh one.
      std: of a fresh one; default (size of the last axis) ** -0.5, the inverse root of the fan-in.
      inputs: how many of the last axes `linear` sums over; 0: no weight of `linear`.
    """
    if len(shape) != len(axes):
        raise ValueError(f"shape {shape} and axes {axes} differ in length")
    std = shape[-1] ** -0.5 if std is None else std
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), axes=axes, mean=mean, std=std, inputs=inputs)


def declare_norm(width: int, dtype: jnp.dtype, axis: str = "hidden") -> nnx.Param:
    """The weight of an RMSNorm; a fresh one is all ones."""
    return declare((width,), dtype, (axis,), mean=1.0, std=0.0)


def linear(x: jax.Array, w: Weight, dtype: jnp.dtype | None = None, *, n_inputs: int = 1) -> jax.Array:
    """x [..., *D] times w [*F, *D] transposed: [..., *F], in `dtype`, by default x's; D are the last `n_inputs` axes.

    A single row on a single device is multiplied as a vector: XLA's CPU matrix-vector product streams the weights at
    memory speed, its one-row matrix product does not. Under a mesh the axes F are never merged: a split axis that is
    merged with another would be gathered first.
    """
    if n_inputs > 1:
        x = x.reshape(*x.shape[: x.ndim - n_inputs], -1)
    if isinstance(w, InputFirst):
        out = jax.lax.dot(x.reshape(-1, x.shape[-1]), w.matrix, preferred_element_type=dtype)
        return out.reshape(*x.shape[:-1], *w.outputs)
    if n_inputs > 1:
        w = w.reshape(*w.shape[: w.ndim - n_inputs], -1)
    if x.size == x.shape[-1] and jax.sharding.get_abstract_mesh().empty:
        flat = w.reshape(-1, w.shape[-1])
        out = jax.lax.dot(flat, x.reshape(-1), preferred_element_type=dtype)
        return out.reshape(*x.shape[:-1], *w.shape[:-1])
    contract = (((x.ndim - 1,), (w.ndim - 1,)), ((), ()))
    return jax.lax.dot_general(x, w, contract, preferred_element_type=dtype)


def matmul_precision(dtype: jnp.dtype) -> AbstractContextManager[object]:
    """float32 models multiply in float32: a GPU would otherwise take TF32, whose products have 10 bits."""
    return jax.default_matmul_precision("highest") if dtype == jnp.float32 else nullcontext()


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, statistics in float32, cast back before the weight is applied."""
    f = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(f * f, axis=-1, keepdims=True) + jnp.float32(eps))
    return _scaled((f * scale).astype(x.dtype), weight.astype(x.dtype))


@jax.custom_vjp
def _scaled(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., D] times weight [D]; see `_scaled_gradient`."""
    return x * weight.reshape((1,) * (x.ndim - 1) + (-1,))


def _scaled_forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _scaled(x, weight), (x, weight)


def _scaled_gradient(saved: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The weight's is a sum over all rows, taken as a product with ones: XLA's CPU compiler makes a scalar loop of the
    sum, which in bfloat16 takes four times as long as the norm."""
    x, weight = saved
    rows = tuple(range(x.ndim - 1))
    product = jax.lax.optimization_barrier(gradient * x)
    d_weight = jax.lax.dot_general(jnp.ones(x.shape[:-1], x.dtype), product, ((rows, rows), ((), ())))
    return _scaled(gradient, weight), d_weight


_scaled.defvjp(_scaled_forward, _scaled_gradient)


class MLP(nnx.Module):
    """down(silu(gate x) * up x), the gate and up matrices in one array [2, F, D]."""

    def __init__(self, hidden: int, width: int, dtype: jnp.dtype) -> None:
        self.gate_up = declare((2, width, hidden), dtype, ("gate_up", "ffn", "hidden"), inputs=1)
        self.down = declare((hidden, width), dtype, ("hidden", "ffn"), inputs=1)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] to [B, T, D]."""
        gate_up = shard(linear(x, self.gate_up[...]), "batch", "replicated", "gate_up", "ffn")
        return linear(_gated(gate_up), self.down[...])


def gated_mlp(x: jax.Array, gate_up: Weight, down: Weight) -> jax.Array:
    """`MLP` of [..., D] on the weights that one device holds: its part of the sum over F."""
    return linear(_gated(linear(x, gate_up)), down)


def _gated(gate_up: jax.Array) -> jax.Array:
    """[..., 2, F] to [..., F]."""
    return jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]
