"""Operations with a `jax.numpy` reference and Pallas kernels of the same signature.

This folder imports jax and nothing of kimijax; `kimijax` uses only the names that this module exports.
"""

# In a checkout this folder can be reached as `pallas_kernels` too; a second copy of every op under that name would
# follow, with its own registry of implementations.
if __name__ == "pallas_kernels":
    raise ImportError("import kimijax.pallas_kernels, not pallas_kernels")

from .experts import ExpertList as ExpertList
from .experts import dropped_share as dropped_share
from .experts import experts as experts
from .int4 import dequantize_int4 as dequantize_int4
from .int4 import round_to as round_to
from .int4 import unpack_int4 as unpack_int4
