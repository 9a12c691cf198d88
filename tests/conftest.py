"""What every test runs under: the CPU, eight virtual devices, strict types and ranks, reproducible examples.

Warnings are errors too: `filterwarnings` in `pyproject.toml`.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

if "jax" in sys.modules:
    raise RuntimeError(
        "tests/conftest.py: jax is already imported, and would ignore the eight virtual devices set here"
    )

# A platform that is set already stays: `JAX_PLATFORMS=cuda python -m pytest -m gpu` runs the GPU tests.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The flag only concerns the CPU platform, and the last one given wins.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import jax

import kimijax

# A float32 array that silently becomes float64, or bfloat16 that becomes float32, is a mistake in a model.
jax.config.update("jax_numpy_dtype_promotion", "strict")
# So is [D] + [B, D] where [B] was meant: axes are added by hand, where they can be read.
jax.config.update("jax_numpy_rank_promotion", "raise")

# Derandomised: the same examples in each run, so that red means the code has changed. No deadline: the first example
# of a jitted function pays for its compilation.
settings.register_profile(
    "kimijax", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kimijax")


@pytest.fixture(scope="session")
def nano() -> kimijax.LLM:
    """The embedded model, its programs compiled once for all tests."""
    sizes = kimijax.EngineConfig(max_batch=4, context_length=512, chunk_size=128, burst=8, batch_factor=4)
    llm = kimijax.load("nano", engine=sizes)
    llm.engine.warm_up()
    return llm


MOST_MAPS = 40_000  # memory maps; Linux allows a process 65,530 unless told otherwise


@pytest.fixture(scope="module", autouse=True)
def few_programs() -> Iterator[None]:
    """Forget compiled programs between two files when there are thousands: each holds some twenty memory maps, and
    XLA crashes where the kernel refuses it one."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in tests/slow, tests/gpu and tests/kernels: no test there can be left without its marker."""
    here = Path(__file__).parent
    for item in items:
        for folder in ("slow", "gpu", "kernels"):
            if item.path.is_relative_to(here / folder):
                item.add_marker(folder)
