# Where type checkers and editors find kimijax.pallas_kernels; not shipped. See docs/architecture.md, "Imports".
from pallas_kernels import *
