"""`python -m kimijax.doctor --model M --draft D`: how a draft was trained, found by running it in every plausible way.

A draft that is fed other residual streams than in training, or in another order, at another position or without its
fusion layer, still gives right text, only slowly. The doctor runs the target once over text, then the draft in each
`hypotheses.Reading`, and compares their teacher-forced acceptance. It searches in stages: all wirings with everything
else as configured, then the other choices one by one on the best and on the configured one, until nothing improves.

Two readings are told apart if their mean acceptances, paired row by row, are more than `diagnosis.NOISE` standard
errors and more than `diagnosis.EFFECT` tokens a round apart.
"""

import argparse
import dataclasses
import json
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from rich.console import Console

from . import checkpoint
from .config import TargetConfig, load_config, load_generation_defaults, read_json
from .diagnosis import Diagnosis, conclude, preferred
from .draft_checkpoint import load_draft
from .draft_parts import DraftParts
from .draft_record import resolve_draft
from .drafter import Drafter
from .engine.config import EngineConfig, fit_context
from .engine.engine import Engine
from .errors import CheckpointError, ConfigError, TokenizerError
from .fingerprint import fingerprint_target
from .generate import LLM
from .hypotheses import LAST_NORMED, Reading, assume, flag_variants, slot_variants, wiring_candidates
from .layer_ids import CONVENTIONS, layer_id_lists
from .loader import load_tokenizer, model_directory, place
from .model import Target
from .probe import PROBE_FILE, Probe, check, replay
from .teacher_forced import Forcing, Text, observe
from .tokenizer import Tokenizer
from .wiring import WiringError

ALL_TAPS = 12  # of a target with up to as many layers all streams are kept, else those of the plausible wirings
ROUNDS = 4  # of the search; each starts from the best reading of the one before
ANSWER_TOKENS = 64  # that the target writes to each built-in prompt
PIECE, MAX_TOKENS = 128, 1024  # a file's text is cut into pieces, and used up to so many tokens

PROMPTS = (
    "What does the built-in function sorted return?",
    "How do I read a file line by line in Python?",
    "What is the difference between a list and a tuple?",
    "Explain what a generator is.",
    "What does json.dumps do?",
    "How do I open a file for writing?",
    "What is a dictionary?",
    "How can I join a list of strings?",
)

log = logging.getLogger(__name__)


def diagnose(
    parts: DraftParts,
    text: Text,
    *,
    assumed: Reading | None = None,
    refusal: str = "",
    mesh: Mesh | None = None,
) -> Diagnosis:
    """Searches for the reading that a draft was trained with.

    Args:
      parts: the draft, and its target.
      text: what target and draft are run over.
      assumed: how another stack runs it; compared in place of the configured reading.
      refusal: why the strict loader refuses it.
      mesh: where target and draft lie.
    Raises:
      ConfigError: an assumption that the draft's tensors do not allow.
    """
    if assumed is not None:
        parts.check(assumed, "assume")
    target, count = parts.target, parts.config.n_taps
    n = target.config.n_layers
    lists = list(layer_id_lists(parts.data).values())
    configured = parts.configured.taps if parts.configured is not None else None
    wirings = wiring_candidates(lists, configured, n, count)
    wanted = {*parts.base.taps, *(t for taps in wirings for t in taps)}
    if assumed is not None:
        wanted |= {*assumed.taps, *([] if assumed.bypass in (None, LAST_NORMED) else [assumed.bypass])}
    streams = _streams(wanted, n)
    forcing = Forcing(parts.drafter, parts.target_ids, parts.config, observe(target, text, streams, mesh), mesh)
    if assumed is not None:
        forcing.measure(assumed)
    search(forcing, parts, wirings, streams)
    return conclude(forcing, parts, assumed=assumed, refusal=refusal)


def _streams(wanted: Iterable[int], n_layers: int) -> list[int]:
    """The taps to keep: those wanted and the last; all of a small target, so that one program does for every draft."""
    return list(range(n_layers + 1)) if n_layers <= ALL_TAPS else sorted({*wanted, n_layers})


def search(forcing: Forcing, parts: DraftParts, wirings: Sequence[tuple[int, ...]], streams: Sequence[int]) -> None:
    """Measures all wirings with everything else as configured, then everything else on the best.

    Args:
      forcing: keeps what is measured.
      parts: the draft.
      wirings: taps to begin with.
      streams: taps that were observed.
    """
    base, available = parts.base, parts.available
    if parts.configured is not None and parts.has_fc:
        forcing.measure(base)
    if parts.has_fc:
        for taps in wirings:
            for d2t in parts.target_ids:
                forcing.measure(dataclasses.replace(base, taps=taps, bypass=None, d2t=d2t))
    if parts.config.hidden == parts.config.target_hidden:
        alone = streams if len(streams) <= ALL_TAPS + 1 else sorted({*base.taps, max(streams)})
        for bypass in (LAST_NORMED, *alone):
            forcing.measure(dataclasses.replace(base, bypass=bypass))
    anchor = dataclasses.replace(base, bypass=None) if parts.has_fc else preferred(forcing.done, base).reading
    for _ in range(ROUNDS):
        best = preferred(forcing.done, base).reading
        for reading in dict.fromkeys([anchor, best]):
            for variant in flag_variants(reading, available):
                forcing.measure(variant)
        best = preferred(forcing.done, base).reading
        if best.bypass is None:
            for variant in slot_variants(best, streams):
                forcing.measure(variant)
        if anchor == preferred(forcing.done, base).reading:
            return
        anchor = preferred(forcing.done, base).reading


def telling_readings(base: Reading, n_layers: int, *, embedding_in_front: bool = True) -> dict[str, Reading]:
    """The faults that have been seen most, by name, as readings of a draft that is right as `base`."""
    taps = base.taps
    out: dict[str, Reading] = {}
    if taps[-1] < n_layers or taps[0] > 0:
        by = 1 if taps[-1] < n_layers else -1
        out["taps shifted by one"] = dataclasses.replace(base, taps=tuple(t + by for t in taps))
    if embedding_in_front and 0 not in taps:
        front = (0, *taps[:-1])
        out["slots shifted, the embedding in front"] = dataclasses.replace(base, taps=front)
    out["fc dropped"] = dataclasses.replace(base, bypass=LAST_NORMED)
    return out


def short_doctor(target: Target, drafter: Drafter, text: Text, *, mesh: Mesh | None = None) -> Diagnosis:
    """The few most telling readings of a loaded drafter: a check for a server's start.

    Args:
      target: filled.
      drafter: filled, on its wiring.
      text: a few hundred tokens, best written by the target.
      mesh: where both lie.
    """
    parts = DraftParts.of(drafter, target)
    base, n = parts.base, target.config.n_layers
    readings = [base, *telling_readings(base, n).values()]
    readings += [dataclasses.replace(base, taps=tuple(t - 1 for t in base.taps))] if base.taps[0] > 0 else []
    readings += [dataclasses.replace(base, taps=(*base.taps[1:], n))] if base.taps[-1] < n else []
    readings.append(dataclasses.replace(base, feedback="pre_norm" if base.feedback == "post_norm" else "post_norm"))
    readings += [dataclasses.replace(base, d2t=name) for name in parts.target_ids]
    readings = [r for r in dict.fromkeys(readings) if r.bypass is None or parts.config.hidden == target.config.hidden]
    seen = observe(target, text, _streams((t for r in readings for t in r.taps), n), mesh)
    forcing = Forcing(parts.drafter, parts.target_ids, parts.config, seen, mesh)
    for reading in readings:
        forcing.measure(reading)
    return conclude(forcing, parts)


def negative_controls(target: Target, drafter: Drafter, text: Text, *, mesh: Mesh | None = None) -> Diagnosis:
    """A right draft run wrongly in each of the ways that have been seen: what every fault costs.

    `Diagnosis.measured` has the right reading under `subject`, and `Diagnosis.named` the faults by name.
    """
    parts = DraftParts.of(drafter, target)
    base = parts.base
    named = {"right": base, **telling_readings(base, target.config.n_layers)}
    if "absolute" in parts.target_ids:
        named["d2t read as ids"] = dataclasses.replace(base, d2t="absolute")
    named["position + 1 in draft steps"] = dataclasses.replace(base, positions="steps+1")
    named["position + 1 everywhere"] = dataclasses.replace(base, positions="t+1")
    other: Reading = dataclasses.replace(base, feedback="pre_norm" if base.feedback == "post_norm" else "post_norm")
    named["feedback from the other side of the norm"] = other
    named["row t with its own token"] = dataclasses.replace(base, tokens="same")
    named = {name: r for name, r in named.items() if r.bypass is None or parts.config.hidden == target.config.hidden}
    taps = _streams((t for r in named.values() for t in r.taps), target.config.n_layers)
    forcing = Forcing(parts.drafter, parts.target_ids, parts.config, observe(target, text, taps, mesh), mesh)
    measured = {name: forcing.measure(reading) for name, reading in named.items()}
    return dataclasses.replace(conclude(forcing, parts), named=measured)


# ---- what it is run over --------------------------------------------------------------------------------------------


def text_of_file(path: Path, tokenizer: Tokenizer | None, vocab_size: int) -> Text:
    """A text file as it stands, in pieces; or a JSON list of lists of token ids. ConfigError: neither of the two."""
    if path.suffix == ".json":
        try:
            rows: Any = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError, UnicodeDecodeError) as e:
            raise ConfigError("text", str(e), "a JSON file with lists of token ids") from e
        if not isinstance(rows, list) or not all(_are_ids(row, vocab_size) for row in rows):
            raise ConfigError("text", str(path), f"a list of lists of token ids from 0 to {vocab_size - 1}")
        return Text.of(rows)
    if tokenizer is None:
        fix = "the checkpoint has no tokenizer files: give token ids, in a .json file"
        raise ConfigError("text", str(path), "a .json file with lists of token ids", fix)
    try:
        ids = tokenizer.encode(path.read_text(encoding="utf-8"))[:MAX_TOKENS]
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError("text", str(e), "a readable text file in UTF-8") from e
    return Text.of([ids[i : i + PIECE] for i in range(0, len(ids), PIECE)])


def _are_ids(row: Any, vocab_size: int) -> bool:
    return isinstance(row, list) and all(type(i) is int and 0 <= i < vocab_size for i in row)


def text_of_target(llm: LLM) -> Text:
    """The target's own greedy answers to built-in prompts: what drafts are trained on. ConfigError: no tokenizer."""
    if llm.tokenizer is None:
        raise ConfigError("text", None, "a .json file with lists of token ids", "the checkpoint has no tokenizer files")
    prompts: list[Any] = list(PROMPTS)
    if llm.chat is not None:
        prompts = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    encoded = [llm.encode(prompt) for prompt in prompts]
    answers = llm.generate(list(encoded), temperature=0.0, max_tokens=ANSWER_TOKENS)
    rows = [[*prompt, *answer.token_ids] for prompt, answer in zip(encoded, answers, strict=True)]
    return Text.of(rows, [len(prompt) for prompt in encoded])


# ---- the command line -----------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser("python -m kimijax.doctor", description="How was this draft trained?")
    p.add_argument("--model", required=True, help="checkpoint directory of the target, or nano")
    p.add_argument("--draft", required=True, help="directory of the draft")
    text = "text to run over, or a .json file with lists of token ids (default: the target answers a few questions)"
    p.add_argument("--text", type=Path, help=text)
    p.add_argument("--layer-id-convention", choices=sorted(CONVENTIONS), help="how to read the draft's layer ids")
    assumed = (
        "how another stack runs the draft, such as taps=0,3,31 fc=off d2t=absolute positions=steps+1 feedback=post"
    )
    p.add_argument("--assume", nargs="+", default=[], metavar="KEY=VALUE", help=assumed)
    p.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: bfloat16 on a GPU, float32 on a CPU")
    p.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="devices to split the model over")
    p.add_argument("--rows", type=int, default=20, metavar="N", help="of the table; 0: all (default: %(default)s)")
    p.add_argument("--json", action="store_true", help="print JSON instead of the table")
    return p


def examine(args: argparse.Namespace) -> tuple[Diagnosis, str]:
    """The diagnosis, and what the draft's probe says."""
    directory = model_directory(args.model)
    config = load_config(directory)
    dtype = None if args.dtype is None else jnp.dtype(args.dtype)
    where = place(dtype, args.tensor_parallel)
    tokenizer, chat = load_tokenizer(directory, config)
    target = checkpoint.load(directory, config, mesh=where.mesh, dtype=where.dtype, unpack_int4=where.unpack_int4)
    options: dict[str, Any] = {"mesh": where.mesh, "dtype": where.dtype}
    parts = DraftParts.read(args.draft, target, convention=args.layer_id_convention, **options)
    fingerprint = None if tokenizer is None else tokenizer.fingerprint
    refusal, probe = _strictly(directory, config, args, target, fingerprint, options)
    assumed = assume(parts.base, args.assume, config.n_layers) if args.assume else None
    if assumed is not None:
        parts.check(assumed, "assume")  # before the target writes a text
    if args.text is not None:
        text = text_of_file(args.text, tokenizer, config.vocab_size)
    else:
        context = fit_context(512, config.max_positions)
        sizes = EngineConfig(max_batch=len(PROMPTS), context_length=context, chunk_size=128, burst=16)
        stops = config.eos_token_ids if tokenizer is None else tokenizer.stop_ids
        n_tokens = None if tokenizer is None else tokenizer.vocab_size
        engine = Engine(target, sizes, n_tokens=n_tokens, stop_ids=tuple(stops), mesh=where.mesh)
        defaults = load_generation_defaults(directory)
        text = text_of_target(LLM(directory.name, target, engine, tokenizer, chat, defaults, where.mesh))
    return diagnose(parts, text, assumed=assumed, refusal=refusal, mesh=where.mesh), probe


def _strictly(
    directory: Path,
    config: TargetConfig,
    args: argparse.Namespace,
    target: Target,
    tokenizer: str | None,
    options: Mapping[str, Any],
) -> tuple[str, str]:
    """Why the strict loader refuses the draft (empty: it does not), and what its probe says."""
    try:
        resolved = resolve_draft(
            args.draft,
            fingerprint_target(directory, config),
            tokenizer,
            convention=args.layer_id_convention,
            target_name=f"target {directory.name}",
        )
        drafter = load_draft(args.draft, resolved.wiring, target, **options)
    except (ConfigError, CheckpointError) as e:
        return str(e), ""
    path = Path(args.draft) / PROBE_FILE
    if not path.is_file():
        return "", ""
    try:
        result = replay(Probe.from_json(read_json(path)), target, drafter, mesh=options["mesh"])
        check(result)
    except WiringError as e:
        return str(e), "the draft's probe does not replay"
    except ConfigError as e:
        return str(e), "the draft's probe cannot be read"
    return "", f"the draft's probe replays: {result.summary()}"


def main(argv: list[str] | None = None) -> int:
    """The command line. 0: the draft runs as it was trained; 1: it does not; 2: it cannot be run at all."""
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    about_ids = logging.getLogger("kimijax.layer_ids")  # it is asked for many readings, which the table has
    level = about_ids.level
    about_ids.setLevel(logging.ERROR)
    try:
        diagnosis, probe = examine(args)
    except (ConfigError, CheckpointError, TokenizerError) as e:
        print(f"kimijax.doctor: {e}", file=sys.stderr)
        return 2
    finally:
        about_ids.setLevel(level)
    if args.json:
        print(json.dumps({**diagnosis.to_json(), "probe": probe}, indent=2))
        return diagnosis.exit_code
    if probe:
        print(probe)
    Console(width=None if sys.stdout.isatty() else 160).print(diagnosis.table(args.rows))
    print(diagnosis.verdict)
    return diagnosis.exit_code


if __name__ == "__main__":
    sys.exit(main())
