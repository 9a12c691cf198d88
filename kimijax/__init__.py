"""Kimi-K2.5 and its relatives in JAX: load a checkpoint, generate, serve it, train drafters for it."""

from pathlib import Path

__version__ = "0.1.0"

# A checkout keeps serve/, train/ and pallas_kernels/ beside this folder; a wheel holds them inside it. Either way they
# are kimijax.serve, kimijax.train and kimijax.pallas_kernels.
_root = Path(__file__).resolve().parents[1]
if (_root / "pyproject.toml").is_file():
    __path__.append(str(_root))
