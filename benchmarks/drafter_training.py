"""Training throughput of `fit` on a CPU: tokens a second of one update, as one JSON line.

    python -m benchmarks.drafter_training MODEL [--dtype f32|bf16] [--batch 4] [--seq 512] [--ttt 7]
        [--draft-vocab 1024] [--steps 5]

An update is what `kimijax.train.fit` runs: features fused, all unrolled steps, the loss against the distribution of the
target's last hidden state, backward, clipped AdamW. The target's hidden states of random tokens are computed before.
tokens/s = batch * seq / time of an update. The draft: 8 heads and 4 key-value heads of 32, an MLP of 512, its own head,
the target's embedding; EAGLE-3's loss, every position an answer's.
"""

import argparse
import dataclasses
import json
import os
import platform
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kimijax
from kimijax.checkpoint import load
from kimijax.config import load_config
from kimijax.train import dataset, draft_recipe, features, fitter, host_memory
from kimijax.wiring import Wiring

_DTYPES = {"f32": "float32", "bf16": "bfloat16"}


def recipe(args: argparse.Namespace) -> draft_recipe.DraftRecipe:
    """The recipe of nano's drafter with the sizes that are measured."""
    base = draft_recipe.load_draft_recipe("nano")
    draft = dataclasses.replace(
        base.draft, kind="llama", n_heads=8, n_kv_heads=4, head_dim=32, rope_theta=1e4, mlp_width=512,
        max_positions=8192, fc_norm=False, norm_before_fc=False, norm_before_residual=False, norm_output=False,
        window=0,
    )  # fmt: skip
    fit = dataclasses.replace(
        base.fit, rows=args.batch, row_tokens=args.seq, accumulate=1, ttt_steps=args.ttt, decay=0.8, loss="soft_ce",
        normaliser="all", learning_rate=args.lr, warmup_share=0.0, compute_dtype=_DTYPES[args.dtype], data_parallel=1,
        fsdp=False,
    )  # fmt: skip
    target = dataclasses.replace(base.target, max_tokens=min(args.seq, base.target.max_tokens))
    return dataclasses.replace(base, draft=draft, fit=fit, target=target)


def rows(args: argparse.Namespace, directory: Path) -> tuple[Any, Wiring, dataset.RowBatch[np.ndarray]]:
    """The target, the wiring, and one update's rows: random tokens below the draft vocabulary's end."""
    target = load(directory, load_config(directory), dtype=_DTYPES[args.dtype])
    n = target.config.n_layers
    wiring = Wiring((1, n // 2, n - 1), n, target.config.hidden)
    ids = np.random.default_rng(0).integers(16, args.draft_vocab, (args.batch, args.seq)).astype(np.int32)
    segments = np.zeros_like(ids)
    positions = np.broadcast_to(np.arange(args.seq, dtype=np.int32), ids.shape)
    on_device = [jnp.asarray(x) for x in (ids, positions, segments)]
    taps, last = features.hidden_states(target, on_device[0], on_device[1], on_device[2], wiring)
    stored = {tap: np.asarray(x) for tap, x in taps.items()}
    one = dataset.RowBatch(ids, np.ones_like(ids, bool), segments, positions, stored, np.asarray(last))
    return target, wiring, jax.tree.map(lambda x: x[None], one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="f32", choices=_DTYPES)
    for name, default in (("batch", 4), ("seq", 512), ("ttt", 7), ("draft-vocab", 1024), ("steps", 5), ("warmup", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    load_before = os.getloadavg()[0]
    host_memory.keep_freed_memory()
    target, wiring, batch = rows(args, args.model)
    updates = args.warmup + args.steps
    ids = np.arange(args.draft_vocab)
    trainer = fitter.Fitter(recipe(args), target.config, wiring, ids, target, updates=updates)
    state = trainer.create()
    losses, seconds = [], []
    for _ in range(updates):
        start = time.perf_counter()
        state, metrics = trainer.step(state, batch)
        losses.append(round(float(metrics.loss), 4))
        seconds.append(time.perf_counter() - start)
    seconds = seconds[args.warmup :]
    row = {
        "peer": "kimijax", "version": kimijax.__version__, "jax": jax.__version__, "model": str(args.model),
        "dtype": args.dtype, "batch": args.batch, "seq": args.seq, "ttt": args.ttt, "draft_vocab": args.draft_vocab,
        "online": False, "trainable_params": sum(x.size for x in jax.tree.leaves(state.params)),
        "step_s": spread(seconds), "train_tok_s": spread([args.batch * args.seq / s for s in seconds]),
        "losses": losses, "loadavg_before": round(load_before, 2), "probe_gflops": probe(),
        "loadavg1": round(os.getloadavg()[0], 2), "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }  # fmt: skip
    print(json.dumps(row), flush=True)


def spread(values: list[float]) -> dict[str, float]:
    """Median, smallest, largest, and how many."""
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
        "runs": len(values),
    }


def probe(seconds: float = 0.4) -> float:
    """GFLOP/s of a float32 matrix product, which shows whether something else had the cores."""
    a, n, start = np.ones((512, 512), np.float32), 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        np.matmul(a, a)
        n += 1
    return round(2 * 512**3 * n / (time.perf_counter() - start) / 1e9, 1)


if __name__ == "__main__":
    main()
