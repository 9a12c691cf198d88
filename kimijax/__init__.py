"""Kimi-K2.5 and its relatives in JAX: load a checkpoint, generate, serve it, train drafters for it."""

from pathlib import Path

__version__ = "0.1.0"

# A checkout keeps serve/, train/ and pallas_kernels/ beside this folder; a wheel holds them inside it. Either way they
# are kimijax.serve, kimijax.train and kimijax.pallas_kernels.
_root = Path(__file__).resolve().parents[1]
if (_root / "pyproject.toml").is_file():
    __path__.append(str(_root))

from .config import TargetConfig as TargetConfig  # noqa: E402  # the line above must run before any import of ours
from .engine.config import EngineConfig as EngineConfig  # noqa: E402
from .engine.request import Sampling as Sampling  # noqa: E402
from .generate import LLM as LLM  # noqa: E402
from .generate import Completion as Completion  # noqa: E402
from .generate import Delta as Delta  # noqa: E402
from .loading import load as load  # noqa: E402
