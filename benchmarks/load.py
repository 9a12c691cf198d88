"""How fast a checkpoint loads, against `cat` of the same files, and how much memory that takes. Prints JSON.

    python -m benchmarks.load                      # 1 GB, INT4 experts, one CPU device
    python -m benchmarks.load --devices 8          # the same, tensor-parallel over eight virtual devices
    python -m benchmarks.load --form bf16 --dtype float32 --cold

Run from the root of the repository, on Linux. A random checkpoint of Kimi-K2.5's architecture is written once to a
temporary directory. Each load runs in a process of its own and takes turns with `cat` and with a plain read of the same
files into fresh memory: `cat` reuses one buffer that stays in the processor's cache, a load has to touch new memory for
every byte. `peak_over_kept` is (peak resident memory while loading - resident memory before it) / bytes of the arrays
that were loaded; 1.0 is the least there can be. `loadavg_before` and `probe_gflops` tell whether something
else had the processor, as in `kimijax.bench`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HIDDEN, EXPERT_WIDTH, N_EXPERTS, VOCABULARY = 2048, 1024, 32, 16384


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
    """A random checkpoint of at least `gigabytes`, in shards of 256 MB."""
    import jax.numpy as jnp
    import numpy as np

    from kimijax.checkpoint import save
    from kimijax.config import parse_config
    from kimijax.model import declare_target
    from kimijax.names import Path as ParameterPath
    from kimijax.names import parameters

    layers = 2
    while True:
        config = config_json(layers, int4)
        declared = parameters(declare_target(parse_config(config), dtype=jnp.dtype(jnp.bfloat16), int4=int4))
        structs = {path: p.get_value() for path, p in declared.items()}
        if sum(s.size * s.dtype.itemsize for s in structs.values()) >= gigabytes * 1e9:
            break
        layers += 1
    rng = np.random.default_rng(0)
    floats = rng.standard_normal(1 << 20, dtype=np.float32)
    words = rng.integers(-(2**31), 2**31, 1 << 20, dtype=np.int32)

    def draw(path: ParameterPath, struct: Any) -> Any:
        values = words if struct.dtype == np.int32 else abs(floats) + np.float32(0.01)
        return np.resize(values.astype(struct.dtype), struct.shape)

    save({path: draw(path, s) for path, s in structs.items()}, directory, config, shard_bytes=256_000_000)


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status: no {field}")


def load_once(directory: Path, dtype: str, threads: int, mesh: bool, unpack_int4: bool) -> dict[str, float]:
    """Loads in this process: seconds, bytes kept and resident memory."""
    import jax
    import jax.numpy as jnp

    from kimijax.checkpoint import load
    from kimijax.config import load_config
    from kimijax.names import parameters
    from kimijax.sharding import make_mesh

    config = load_config(directory)
    placed = make_mesh() if mesh else None
    jax.block_until_ready(jax.device_put(jnp.zeros(8), jax.devices()[0]))  # the backend is up before the count begins
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    start = time.perf_counter()
    model = load(directory, config, mesh=placed, dtype=jnp.dtype(dtype), unpack_int4=unpack_int4, threads=threads)
    seconds = time.perf_counter() - start
    kept = sum(p.get_value().nbytes for p in parameters(model).values())
    return {"seconds": seconds, "kept_bytes": kept, "peak_bytes": resident("VmHWM") - before}


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


def compare(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """`cat`, a plain read and a load in turns."""
    from kimijax.bench import host_gflops

    load_before = os.getloadavg()[0]
    files = sorted(directory.glob("*.safetensors"))
    size = sum(f.stat().st_size for f in files)
    flags = f"--xla_force_host_platform_device_count={args.devices}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    options = ["--threads", str(args.threads), "--dtype", args.dtype, "--devices", str(args.devices)]
    child = [sys.executable, "-m", "benchmarks.load", "--child", str(directory), *options]
    if args.unpack_int4:
        child.append("--unpack-int4")
    cats: list[float] = []
    reads: list[float] = []
    loads: list[dict[str, float]] = []
    for _ in range(args.repeat):
        if args.cold:
            drop_cache(files)
        start = time.perf_counter()
        with open(os.devnull, "wb") as null:
            subprocess.run(["cat", *map(str, files)], stdout=null, check=True)
        cats.append(time.perf_counter() - start)
        if args.cold:
            drop_cache(files)
        reads.append(read_all(files))
        if args.cold:
            drop_cache(files)
        out = subprocess.run(child, env=env, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
        loads.append(json.loads(out))
    seconds = statistics.median(r["seconds"] for r in loads)
    peak, kept = max(r["peak_bytes"] for r in loads), loads[0]["kept_bytes"]
    return {
        "form": args.form,
        "dtype": args.dtype,
        "unpack_int4": args.unpack_int4,
        "devices": args.devices,
        "threads": args.threads,
        "cold": args.cold,
        "file_bytes": size,
        "cat_gb_per_s": round(size / 1e9 / statistics.median(cats), 3),
        "read_gb_per_s": round(size / 1e9 / statistics.median(reads), 3),
        "load_gb_per_s": round(size / 1e9 / seconds, 3),
        "kept_bytes": kept,
        "peak_bytes": peak,
        "peak_over_kept": round(peak / kept, 4),
        "loadavg_before": round(load_before, 2),
        "probe_gflops": host_gflops(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the checkpoint")
    parser.add_argument("--form", choices=["int4", "bf16"], default="int4", help="how the experts are stored")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the loaded floats")
    parser.add_argument("--unpack-int4", action="store_true", help="dequantise the experts while loading")
    parser.add_argument("--devices", type=int, default=1, help="virtual CPU devices")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before each run")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(load_once(args.child, args.dtype, args.threads, args.devices > 1, args.unpack_int4)))
        return
    with tempfile.TemporaryDirectory() as parent:
        directory = Path(parent) / "checkpoint"
        make_checkpoint(directory, args.gb, args.form == "int4")
        print(json.dumps(compare(args, directory), indent=2))


if __name__ == "__main__":
    main()
