"""`python -m kimijax.bench offline`: how fast a checkpoint prefills and decodes in the engine that also serves it.

What the figures mean. Every batch gets its own engine of exactly that many rows over the one loaded model. A run adds
`batch` requests, computes their prompts, and decodes; where there are more prompts, another begins when one ends.

    prefill tok/s = tokens of the first `batch` prompts / time until all of them are computed
    decode  tok/s = tokens / time of the steps in which `batch` requests decode and no prompt is computed
    output  tok/s = all tokens / time of everything

Runs count from the first one on before which a whole run compiled nothing, and must compile nothing themselves.

With a draft, engines are compared that differ in the number of drafts alone. They take turns, and each is compared with
the engine without a drafter run by run: what else the machine does in the meantime cancels. Random prompts are answered
to the last of `gen_len` tokens, text ends where the model ends it.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from rich.console import Console

from . import checkpoint
from .bench_engines import Drafting, Models, Variant, make_engine
from .bench_prompts import HELD_OUT, RANDOM, Prompts, Workload, probe_prompts, random_prompts, read_prompts
from .bench_report import render, report
from .bench_runs import BatchResult, SteppedEngine, measure
from .config import TargetConfig, load_config
from .cpu_layout import arrange_for_cpu
from .draft_loading import DraftFiles, check_options, load_drafter, read_draft
from .draft_tree import TreeShape
from .engine.config import EngineConfig, fit_context
from .errors import CheckpointError, ConfigError, RequestError, TokenizerError
from .loader import Placement, load_tokenizer, model_directory, place
from .loading import DEFAULT_CONTEXT
from .model import Target
from .wiring import WiringError


def host_gflops(seconds: float = 0.4) -> float:
    """GFLOP/s of NumPy's float32 matrix product on the host: low when something else has the processor."""
    a = np.ones((512, 512), np.float32)
    out, n, t0 = np.empty_like(a), 0, time.perf_counter()
    while time.perf_counter() - t0 < seconds:
        np.matmul(a, a, out=out)
        n += 1
    return round(2 * 512**3 * n / (time.perf_counter() - t0) / 1e9, 1)


def engine_config(
    config: TargetConfig, work: Workload, batch: int, prompt_len: int, context_length: int | None, burst: int
) -> EngineConfig:
    """An engine of exactly `batch` rows.

    Args:
      config: the model.
      work: what has to fit.
      batch: rows.
      prompt_len: tokens of the longest prompt.
      context_length: tokens of a request; None: what the server takes unless told otherwise.
      burst: tokens a decoding program makes.
    Raises:
      ConfigError: the prompt and the output do not fit into the context, or the context not into the model.
    """
    length = min(DEFAULT_CONTEXT, config.max_positions) if context_length is None else context_length
    if length > config.max_positions:
        raise ConfigError("context_length", length, f"at most the model's {config.max_positions} positions")
    if prompt_len + work.gen_len > length:
        needed = f"at least prompt_len + gen_len ({prompt_len + work.gen_len})"
        raise ConfigError("context_length", length, needed, "raise it or shorten the prompt")
    # The same prompts come again in every run: found in a cache, they would cost nothing.
    return EngineConfig(max_batch=batch, context_length=length, burst=burst, prefix_cache=False)


def load_model(directory: Path, config: TargetConfig, placement: Placement) -> tuple[Target, float]:
    """The model on the first device, INT4 experts unpacked on a CPU, and the seconds that took."""
    t0 = time.perf_counter()
    model = checkpoint.load(directory, config, dtype=placement.dtype, unpack_int4=placement.unpack_int4)
    return model, time.perf_counter() - t0


@dataclass(frozen=True)
class _Plan:
    """What is known before any weight is read."""

    directory: Path
    config: TargetConfig
    placement: Placement
    work: Workload
    prompts: Prompts
    files: DraftFiles | None
    variants: list[Variant]
    engines: list[EngineConfig]  # of each batch size
    n_tokens: int | None
    stop_ids: tuple[int, ...]


def _plan(args: argparse.Namespace) -> _Plan:
    """Raises ConfigError, CheckpointError, TokenizerError or WiringError."""
    work = Workload(
        args.batch, args.prompt_len, args.gen_len, args.runs, args.requests, args.temperature, args.ignore_eos
    )
    directory = model_directory(args.model)
    config = load_config(directory, latent_norm_eps=args.latent_norm_eps)
    placement = place(args.dtype)
    tokenizer, chat = load_tokenizer(directory, config) if args.draft or args.data != RANDOM else (None, None)
    files = None
    if args.draft is not None:
        files = read_draft(args.draft, directory, config, tokenizer, dtype=placement.dtype)
    drafting = Drafting(args.k, tuple(args.tree), args.block_verification, args.simulate_acc_len)
    variants = drafting.variants(files)
    n_tokens = None if tokenizer is None else tokenizer.vocab_size
    if args.data == RANDOM:
        most = max(work.requests or 0, *work.batches)
        random = random_prompts(config.vocab_size if n_tokens is None else n_tokens, most, work.prompt_len)
        prompts = Prompts(RANDOM, tuple(map(tuple, random)), is_text=False)
    elif args.data == HELD_OUT and args.prompts is None:
        prompts = probe_prompts(None if files is None else files.probe)
    else:
        path = Path(args.prompts if args.data == HELD_OUT else args.data)
        prompts = read_prompts(path, chat, n_tokens or config.vocab_size)
    context = args.context_length
    if context is None and len(variants) > 1:  # engines that choose compile all their programs: no more than needed
        least = -(-(prompts.longest + work.gen_len) // EngineConfig.page_size) * EngineConfig.page_size
        context = fit_context(least, config.max_positions)
    sizes = [engine_config(config, work, batch, prompts.longest, context, args.burst) for batch in work.batches]
    for variant in variants:
        if variant.options is not None:
            check_options(files, variant.options, sizes[0].context_length)
    stop_ids = config.eos_token_ids if tokenizer is None else tokenizer.stop_ids
    return _Plan(directory, config, placement, work, prompts, files, variants, sizes, n_tokens, tuple(sorted(stop_ids)))


def _load(plan: _Plan) -> tuple[Models, float]:
    """The weights, and the seconds that the target's took."""
    model, load_s = load_model(plan.directory, plan.config, plan.placement)
    options, draft = plan.variants[-1].options, None
    if options is not None:
        draft = load_drafter(plan.files, options, model, plan.placement)
    arrange_for_cpu(model, None if draft is None else draft.drafter, mesh=plan.placement.mesh)
    return Models(model, draft, plan.n_tokens, plan.stop_ids), load_s


def _measure_batch(plan: _Plan, models: Models, sizes: EngineConfig, console: Console) -> list[BatchResult]:
    """All variants at one batch size."""
    batch = sizes.max_batch
    engines: dict[str, SteppedEngine] = {}
    spent: dict[str, float] = {}
    for variant in plan.variants:
        console.print(f"batch {batch}, {variant.name} drafts: compiling", highlight=False)
        t0 = time.perf_counter()
        engines[variant.name] = make_engine(models, sizes, variant)
        spent[variant.name] = time.perf_counter() - t0
    console.print(f"batch {batch}: {plan.work.runs} runs of each", highlight=False)
    return measure(engines, plan.work.of_batch(batch, plan.prompts), plan.work.runs, warm_up_s=spent)


def offline(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Carry out the command. Raises ConfigError or CheckpointError, settings before any weight is read."""
    load_before = os.getloadavg()[0]
    plan = _plan(args)
    models, load_s = _load(plan)
    results = [result for sizes in plan.engines for result in _measure_batch(plan, models, sizes, console)]
    facts: dict[str, Any] = {
        "model": str(args.model),
        "dtype": str(plan.placement.dtype),
        "load_s": round(load_s, 2),
        "loadavg_before": round(load_before, 2),
        "probe_gflops": host_gflops(),
    }
    if len(plan.variants) > 1:
        facts |= {
            "draft": args.draft,
            "baseline": "k 0: an engine without a drafter, in the same round of runs",
            "simulated_acceptance_length": args.simulate_acc_len,
            "block_verification": args.block_verification,
        }
    return report(results, plan.work, plan.prompts, plan.engines[0], facts)


class _Parser(argparse.ArgumentParser):
    """Errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see --help\n")


def _batches(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected integers and commas, such as 1,8,32") from e


def _counts(text: str) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(text.split(",")))
    if not all(word == "adaptive" or (word.isdecimal() and word == str(int(word))) for word in words):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected numbers of drafts, such as 0,1,3,5,adaptive")
    return words


def _tree(text: str) -> TreeShape:
    try:
        depth, top_k, n_tokens = (int(word) for word in text.split(","))
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected DEPTH,TOPK,TOKENS, such as 5,4,16") from e
    try:
        return TreeShape(depth, top_k, n_tokens - 1)
    except ConfigError as e:
        raise argparse.ArgumentTypeError(str(e)) from e


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = _Parser("python -m kimijax.bench", description="Measure the engine.")
    commands = top.add_subparsers(dest="command", required=True, parser_class=_Parser)
    p = commands.add_parser("offline", help="prefill and decode throughput, without a server")
    p.add_argument("--model", default="nano", help="checkpoint directory, or nano, the model that comes with kimijax")
    p.add_argument("--batch", type=_batches, default=Workload.batches, help="batch sizes, such as 1,8,32")
    p.add_argument("--prompt-len", type=int, default=Workload.prompt_len, help="random ids in each prompt")
    p.add_argument("--gen-len", type=int, default=Workload.gen_len, help="tokens to generate for each prompt, at most")
    p.add_argument("--runs", type=int, default=Workload.runs, help="runs that count")
    p.add_argument("--requests", type=int, help="prompts of each run; default: the batch, or all of a text's")
    p.add_argument("--data", default=RANDOM, help=f"{RANDOM} (ids), {HELD_OUT}, or a file of prompts (.json, .jsonl)")
    p.add_argument("--prompts", help=f"the file of prompts that --data {HELD_OUT} takes; default: the draft's probe")
    p.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    p.add_argument("--ignore-eos", action="store_true", help="answer beyond the end of text, too; random prompts do")
    p.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: float32 on CPUs, else bfloat16")
    p.add_argument(
        "--context-length",
        type=int,
        help=f"default: {DEFAULT_CONTEXT}, or what the model holds if less; with a draft what prompt and output need",
    )
    p.add_argument("--burst", type=int, default=EngineConfig.burst, help="tokens a decoding program makes at a time")
    p.add_argument("--latent-norm-eps", type=float, help="eps of the q_a and kv_a norms; default: rms_norm_eps")
    p.add_argument("--json", action="store_true", help="one JSON line on stdout instead of the table")
    d = p.add_argument_group("speculation", "engines to compare with one that has no drafter, in turns")
    d.add_argument("--draft", help="directory of an EAGLE-3 draft, or nano")
    d.add_argument(
        "--k", "--spec-tokens", type=_counts, help="numbers of drafts, such as 1,3,5,adaptive; default: N,adaptive"
    )
    d.add_argument(
        "--tree",
        type=_tree,
        action="append",
        default=[],
        metavar="DEPTH,TOPK,TOKENS",
        help="a tree of drafts, TOKENS verified with the root; may be given several times",
    )
    d.add_argument("--block-verification", action="store_true", help="accept the drafts of chains as blocks")
    d.add_argument("--simulate-acc-len", type=float, help="pretend this acceptance length; tokens are no output")
    return top


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code (2: the model or the settings cannot be measured)."""
    args = parser().parse_args(argv)
    if args.prompts is not None and args.data == RANDOM:
        args.data = HELD_OUT
    try:
        row = offline(args, Console(stderr=True))
    except (ConfigError, CheckpointError, WiringError, TokenizerError, RequestError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(row))
    else:
        Console().print(render(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
