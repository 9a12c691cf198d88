"""Prints the parity table: family x (logits, taps, decode), the largest error relative to the largest right value.

python -m tests.parity
"""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from kimijax import checkpoint
from kimijax.config import load_config

from . import golden
from .test_model import PagedDecoder, relative_error, run_forward


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    print("| family | logits, 160 tokens | logits, 608 tokens | taps | decode | experts |")
    print("|---|---|---|---|---|---|")
    for family in golden.FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            golden.write_checkpoint(family, Path(folder), dtype="float32")
            model = checkpoint.load(folder, load_config(folder), dtype=jnp.float32)
        g = golden.load_golden(family)
        n = model.config.n_layers
        logits, taps, routing = run_forward(model, g["ids"], tuple(range(n + 1)))
        long_logits, _, long_routing = run_forward(model, g["long_ids"])
        pairs = [*zip(routing, g["experts"], strict=True), *zip(long_routing, g["long_experts"], strict=True)]
        same = all(np.array_equal(np.sort(e, axis=1), right) for (e, _), right in pairs)
        tap_error = max(relative_error(taps[i][0][g["tap_positions"]], g["taps"][i]) for i in range(n + 1))
        decoder = PagedDecoder(model, 160)
        decoded, decoded_tap = decoder.run(g["ids"], [48] + [1] * 112)
        tap_error = max(tap_error, relative_error(decoded_tap[g["tap_positions"]], g["taps"][decoder.tap]))
        print(
            f"| {family} | {relative_error(logits[0], g['logits']):.1e} "
            f"| {relative_error(long_logits[0][g['long_positions']], g['long_logits']):.1e} | {tap_error:.1e} "
            f"| {relative_error(decoded, g['logits']):.1e} | {'identical' if same else 'DIFFERENT'} |"
        )


if __name__ == "__main__":
    main()
