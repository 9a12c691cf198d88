"""Makes `engines_ENGINE.npz`: what the unmodified draft classes of other engines compute from drafts kimijax exports.

From the repository root, first in the project's environment, then in that of each engine (README.md has the versions):

    python -m tests.golden.make_engine_golden write FOLDER
    python -m tests.golden.make_engine_golden speculators|vllm|sglang|trace FOLDER

`trace` serves a whole request in vLLM's engine. Outputs are compared with the NumPy reference in float64, and not
written if they differ by more than rounding. A file keeps the sha256 of the drafts that were run, so that nobody
compares it with others.
"""

import importlib
import sys
from pathlib import Path

import numpy as np

from tests import draft_reference as ref
from tests.golden import HERE, engine_trace
from tests.golden.engine_cases import CASES, PROMPT, ROWS, TAPS, Case, Outputs, digest, inputs, tensors

TOLERANCE = 1e-5  # of the largest value of an array


def expected(case: Case) -> Outputs:
    """The reference's float64 outputs."""
    published = tensors(case)
    vocabulary = published.get("d2t", np.zeros(0))
    draft = ref.Draft({**case.config, "draft_vocab_size": published["lm_head.weight"].shape[0]}, published)
    given = inputs()
    features = draft.fuse(np.split(given.taps[:PROMPT], len(TAPS), axis=1))
    ids = given.ids[:PROMPT]
    feedback, logits = draft.forward(ids, features)
    chain = draft.chain(ids, features, given.ids[PROMPT : PROMPT + case.chain].tolist())[1:]
    return Outputs(
        features[list(ROWS)],
        np.stack([feedback[row] for row in ROWS] + [f for f, _ in chain]),
        np.stack([logits[row] for row in ROWS] + [x for _, x in chain]),
        np.arange(logits.shape[1]) + (vocabulary if vocabulary.size else 0),
    )


def errors(found: Outputs, right: Outputs) -> dict[str, float]:
    """Largest differences of the float arrays, each of the largest value."""
    if not np.array_equal(found.target_ids, right.target_ids):
        raise AssertionError(f"target ids: found {found.target_ids}, expected {right.target_ids}")
    out: dict[str, float] = {}
    for name in ("features", "feedback", "logits"):
        a, b = np.asarray(getattr(found, name), np.float64), getattr(right, name)
        if a.shape != b.shape:
            raise AssertionError(f"{name}: found shape {a.shape}, expected {b.shape}")
        out[name] = float(np.abs(a - b).max() / np.abs(b).max())
    return out


def write(folder: Path) -> None:
    """Writes every draft, and the target that a speculators config names."""
    drafts = importlib.import_module("tests.golden.engine_drafts")
    for case in CASES:
        drafts.write(case, folder / case.key)
        print(case.key, digest(folder / case.key / "export"))
    print("trace", digest(drafts.write_trace(folder / "trace")))


def make(engine: str, folder: Path) -> None:
    module = importlib.import_module(f"tests.golden.engine_{engine}")
    arrays: dict[str, np.ndarray] = {}
    bad: list[str] = []
    for case in CASES:
        if case.engine != engine:
            continue
        found = module.run(case, (folder / case.key).resolve())
        error = errors(found, expected(case))
        print(f"{case.key}: " + ", ".join(f"{name} {e:.1e}" for name, e in error.items()), flush=True)
        if not max(error.values()) < TOLERANCE:
            bad.append(case.key)
        arrays[f"{case.key}/sha256"] = np.array(digest(folder / case.key / "export"))
        for name in ("features", "feedback", "logits"):
            arrays[f"{case.key}/{name}"] = np.asarray(getattr(found, name), np.float32)
        arrays[f"{case.key}/target_ids"] = found.target_ids.astype(np.int64)
    if bad:
        raise AssertionError(f"differ by more than {TOLERANCE}: {bad}")
    save(engine, arrays)


def make_trace(folder: Path) -> None:
    module = importlib.import_module("tests.golden.engine_vllm_trace")
    output, rounds = module.run((folder / "trace").resolve())
    right, taps = engine_trace.generate()
    expected_rounds, lead = engine_trace.simulate(right, taps)
    if output != right or rounds != expected_rounds:
        raise AssertionError(f"found {output}, {rounds}, expected {right}, {expected_rounds}")
    print(f"{len(rounds)} rounds, {sum(r.accepted for r in rounds)} tokens accepted, least lead {lead:.1e}")
    names = ("position", "drafts", "accepted")
    arrays = {name: np.array([getattr(r, name) for r in rounds], np.int32) for name in names}
    sha256 = np.array(digest(folder / "trace" / "export"))
    save("trace", arrays | {"output": np.array(output, np.int32), "sha256": sha256})


def save(engine: str, arrays: dict[str, np.ndarray]) -> None:
    file = HERE / f"engines_{engine}.npz"
    np.savez_compressed(file, allow_pickle=False, **arrays)
    print(f"{file.name}: {file.stat().st_size} bytes")


if __name__ == "__main__":
    command, place = sys.argv[1], Path(sys.argv[2])
    if command == "write":
        write(place)
    elif command == "trace":
        make_trace(place)
    else:
        make(command, place)
