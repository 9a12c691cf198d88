"""How fast a checkpoint loads, against `cat` and against safetensors' own loader, and how much memory that takes.

    python -m benchmarks.load                                  # 1 GB, INT4 experts, one CPU device
    python -m benchmarks.load --devices 1 8 --cache both       # also over eight virtual devices, and from the disk
    python -m benchmarks.load --form bf16 --dtype float32 --json

Run from the root of the repository, on Linux. A made-up checkpoint of Kimi-K2.5's architecture, in 64 files, is written
once to a temporary directory, unless `--checkpoint` names one. In each round all ways to read it take turns: `cat` to
nowhere; a plain read of the same files into fresh memory (`cat` reuses one buffer that stays in the processor's cache,
a load has to touch new memory for every byte); `safetensors.safe_open` for NumPy; kimijax on each number of devices;
and with `--direct` kimijax past the page cache. Loads run in processes of their own. `of cat` is the median of the
rounds' ratios. `peak/kept` is (peak resident memory while loading - resident memory before it) / bytes of the arrays
that were loaded; 1.0 is the least there can be. safetensors maps the files: what is mapped at a time counts, too.

Before each read that is called cold the system is asked to forget the files; a virtual machine's host may have them
still. `loadavg_before` and `probe_gflops` tell whether something else had the processor, as in `kimijax.bench`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HIDDEN, EXPERT_WIDTH, N_EXPERTS, VOCABULARY = 2048, 1024, 32, 16384
N_FILES = 64  # as Kimi-K2.5 has


def config_json(layers: int, int4: bool) -> dict[str, Any]:
    """`config.json` of a kimi_k2 model with one dense layer and `layers - 1` layers of experts."""
    config: dict[str, Any] = {
        "model_type": "kimi_k2",
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "q_lora_rank": 512,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "intermediate_size": 4096,
        "moe_intermediate_size": EXPERT_WIDTH,
        "n_routed_experts": N_EXPERTS,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "max_position_embeddings": 4096,
    }
    if int4:
        weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        }
    return config


def make_checkpoint(directory: Path, gigabytes: float, int4: bool) -> None:
    """A made-up checkpoint of at least `gigabytes`."""
    from kimijax import synthetic

    layers = 2
    while True:
        config = config_json(layers, int4)
        if sum(t.nbytes for file in synthetic.layout(config) for t in file) >= gigabytes * 1e9:
            break
        layers += 1
    synthetic.write(config, directory, shards=N_FILES)


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status: no {field}")


@contextmanager
def measured() -> Iterator[dict[str, float]]:
    """Fills in seconds and peak resident memory of the block, over what there was before."""
    found: dict[str, float] = {}
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    start = time.perf_counter()
    yield found
    found["seconds"] = time.perf_counter() - start
    found["peak_bytes"] = resident("VmHWM") - before


def load_once(args: argparse.Namespace) -> dict[str, float]:
    """Loads in this process: seconds, bytes kept and resident memory."""
    import jax
    import jax.numpy as jnp

    from kimijax.checkpoint import load
    from kimijax.config import load_config
    from kimijax.names import parameters
    from kimijax.sharding import make_mesh

    (devices,) = args.devices
    config = load_config(args.checkpoint)
    jax.block_until_ready(jax.device_put(jnp.zeros(8), jax.devices()[0]))  # the backend is up before the count begins
    with measured() as found:
        model = load(
            args.checkpoint,
            config,
            mesh=make_mesh() if devices > 1 else None,
            dtype=jnp.dtype(args.dtype),
            unpack_int4=args.unpack_int4,
            threads=args.threads,
            direct=args.direct,
        )
    return found | {"kept_bytes": sum(p.get_value().nbytes for p in parameters(model).values())}


def load_safetensors(directory: Path) -> dict[str, float]:
    """Every tensor as a NumPy array, by safetensors' own loader."""
    import ml_dtypes  # noqa: F401  NumPy knows bfloat16 by it
    from safetensors import safe_open

    with measured() as found:
        tensors = {}
        for file in sorted(directory.glob("*.safetensors")):
            with safe_open(file, framework="numpy") as f:
                tensors |= {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    return found | {"kept_bytes": sum(a.nbytes for a in tensors.values())}


def drop_cache(files: list[Path]) -> None:
    """Asks the kernel to forget the files' pages."""
    for file in files:
        with file.open("rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(files: list[Path]) -> float:
    """Seconds to read the files into new memory, one after the other."""
    start = time.perf_counter()
    kept = [f.read_bytes() for f in files]
    seconds = time.perf_counter() - start
    del kept
    return seconds


@dataclass(frozen=True)
class Way:
    """A way to read the files: `run` returns seconds and, where known, peak and kept bytes."""

    name: str
    run: Callable[[], dict[str, float]]


def cat(files: list[Path]) -> dict[str, float]:
    start = time.perf_counter()
    with open(os.devnull, "wb") as null:
        subprocess.run(["cat", *map(str, files)], stdout=null, check=True)
    return {"seconds": time.perf_counter() - start}


def ways(args: argparse.Namespace, directory: Path) -> list[Way]:
    """All that is compared; `cat` first."""
    files = sorted(directory.glob("*.safetensors"))

    def child(kind: str, devices: int = 1, *flags: str) -> Callable[[], dict[str, float]]:
        options = ["--threads", str(args.threads), "--dtype", args.dtype, "--devices", str(devices), *flags]
        command = [sys.executable, "-m", "benchmarks.load", "--child", kind, "--checkpoint", str(directory), *options]
        if args.unpack_int4:
            command.append("--unpack-int4")
        flag = f"--xla_force_host_platform_device_count={devices}"
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag}

        def run() -> dict[str, float]:
            return json.loads(subprocess.run(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)

        return run

    found = [Way("cat", lambda: cat(files)), Way("read", lambda: {"seconds": read_all(files)})]
    found.append(Way("safetensors", child("safetensors")))
    for n in args.devices:
        found.append(Way(f"kimijax, {n} device{'s' * (n > 1)}", child("kimijax", n)))
        if args.direct:
            found.append(Way(f"kimijax, {n} device{'s' * (n > 1)}, direct", child("kimijax", n, "--direct")))
    return found


def compare(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """All ways in turns, `--repeat` rounds for each state of the page cache."""
    from kimijax.bench import host_gflops

    load_before = os.getloadavg()[0]
    files = sorted(directory.glob("*.safetensors"))
    size = sum(f.stat().st_size for f in files)
    rows: list[dict[str, Any]] = []
    for cache in ("warm", "cold") if args.cache == "both" else (args.cache,):
        if cache == "warm":
            read_all(files)
        results: dict[str, list[dict[str, float]]] = defaultdict(list)
        for _ in range(args.repeat):
            for way in ways(args, directory):
                if cache == "cold":
                    drop_cache(files)
                results[way.name].append(way.run())
        rows += [summary(name, cache, size, results) for name in results]
    return {
        "form": args.form,
        "dtype": args.dtype,
        "unpack_int4": args.unpack_int4,
        "threads": args.threads,
        "files": len(files),
        "file_bytes": size,
        "rows": rows,
        "loadavg_before": round(load_before, 2),
        "probe_gflops": host_gflops(),
    }


def summary(name: str, cache: str, size: int, results: Mapping[str, list[dict[str, float]]]) -> dict[str, Any]:
    """One row of the table."""
    own = results[name]
    ratios = [c["seconds"] / r["seconds"] for c, r in zip(results["cat"], own, strict=True)]
    row: dict[str, Any] = {
        "way": name,
        "cache": cache,
        "gb_per_s": round(size / 1e9 / statistics.median(r["seconds"] for r in own), 3),
        "of_cat": round(statistics.median(ratios), 3),
    }
    if "kept_bytes" in own[0]:
        peak, kept = max(r["peak_bytes"] for r in own), own[0]["kept_bytes"]
        row |= {"kept_bytes": kept, "peak_bytes": peak, "peak_over_kept": round(peak / kept, 4)}
    return row


def table(result: Mapping[str, Any]) -> str:
    """The rows as Markdown."""
    lines = [
        f"{result['files']} files, {result['file_bytes'] / 1e9:.2f} GB, {result['form']} experts as {result['dtype']}, "
        f"{result['threads']} threads; load average before {result['loadavg_before']}",
        "",
        "| cache | way | GB/s | of cat | peak RSS, GB | peak/kept |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        memory = (f"{row['peak_bytes'] / 1e9:.2f}", f"{row['peak_over_kept']:.3f}") if "peak_bytes" in row else ("", "")
        cells = (row["cache"], row["way"], f"{row['gb_per_s']:.2f}", f"{row['of_cat']:.2f}", *memory)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the checkpoint")
    parser.add_argument("--form", choices=["int4", "bf16"], default="int4", help="how the experts are stored")
    parser.add_argument("--checkpoint", type=Path, help="load this one instead of a made-up one")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the loaded floats")
    parser.add_argument("--unpack-int4", action="store_true", help="dequantise the experts while loading")
    parser.add_argument("--devices", type=int, nargs="+", default=[1], help="virtual CPU devices, one or more numbers")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--direct", action="store_true", help="load past the page cache, too")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cache", choices=["warm", "cold", "both"], default="warm", help="page cache before each read")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--child", choices=["kimijax", "safetensors"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(load_once(args) if args.child == "kimijax" else load_safetensors(args.checkpoint)))
        return
    with tempfile.TemporaryDirectory() as parent:
        directory = args.checkpoint or Path(parent) / "checkpoint"
        if args.checkpoint is None:
            make_checkpoint(directory, args.gb, args.form == "int4")
        result = compare(args, directory)
    print(json.dumps(result, indent=2) if args.json else table(result))


if __name__ == "__main__":
    main()
