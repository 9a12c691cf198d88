"""A whole request served with speculation: a tiny target, a tiny exported draft, and what each round proposes.

The draft's vocabulary is the few tokens that this target says most, so that a random head is accepted now and then, and
its seed is one of those with rounds of several accepted tokens. NumPy alone, like `engine_cases`.
"""

from typing import NamedTuple

import numpy as np

from tests import draft_reference as ref
from tests import reference

from .engine_cases import LLAMA, random_tensors
from .families import FAMILIES
from .weights import Weights, hf_weights, token_ids

FAMILY = "deepseek_v3"
TAPS, TARGET_LAYERS = (2, 3, 4), 5
STEPS = 3  # drafted tokens of a round
PROMPT = token_ids("engines/prompt", 12, ref.VOCAB)
NEW = 64  # tokens to generate
VOCABULARY = (4, 7, 24, 27, 82, 85, 90, 123)
SEED = 56
CONFIG: ref.Config = {**LLAMA, "draft_vocab_size": len(VOCABULARY), "fc_norm": True, "norm_output": True}


class Round(NamedTuple):
    """One round: its last features are those of `position`, the next token is known, and the drafts follow that."""

    position: int
    drafts: tuple[int, ...]  # target ids
    accepted: int


def tensors(seed: int = SEED) -> Weights:
    """The draft's tensors; the embedding is the target's."""
    out = random_tensors(f"trace/{seed}", CONFIG)
    out["embed_tokens.weight"] = hf_weights(FAMILIES[FAMILY])["model.embed_tokens.weight"]
    ids = np.asarray(VOCABULARY)
    return out | {"d2t": ids - np.arange(len(ids)), "t2d": np.isin(np.arange(ref.VOCAB), ids)}


def generate() -> tuple[list[int], np.ndarray]:
    """The target's greedy tokens, and the residual streams [layers + 1, prompt + NEW, D]; float64."""
    weights, ids = hf_weights(FAMILIES[FAMILY]), PROMPT.tolist()
    for _ in range(NEW):
        ids.append(int(reference.forward(FAMILIES[FAMILY], weights, np.asarray(ids)).logits[-1].argmax()))
    return ids[len(PROMPT) :], reference.forward(FAMILIES[FAMILY], weights, np.asarray(ids)).taps


def simulate(output: list[int], taps: np.ndarray, seed: int = SEED) -> tuple[list[Round], float]:
    """The rounds that serving should make, and the least lead of a drafted token over the next one, in logits."""
    draft = ref.Draft(CONFIG, tensors(seed))
    ids = np.asarray([*PROMPT.tolist(), *output])
    features = draft.fuse([taps[t] for t in TAPS])
    rounds: list[Round] = []
    lead, at = np.inf, len(PROMPT) - 1
    while at < len(ids) - 2:
        drafts: list[int] = []
        feedback, logits = draft.forward(ids[1 : at + 2], features[: at + 1])
        state, row = feedback[-1], logits[-1]
        for j in range(STEPS):
            low, high = np.sort(row)[-2:]
            lead = min(lead, float(high - low))
            drafts.append(VOCABULARY[int(row.argmax())])
            if j + 1 < STEPS:
                where = np.asarray([at + 1 + j])
                out = draft.layer(np.asarray(drafts[-1:]), state[None], where, [np.arange(where[0] + 1)])
                state, row = out[0][0], out[1][0]
        right = ids[at + 2 : at + 2 + STEPS]
        accepted = next((j for j, (a, b) in enumerate(zip(drafts, right, strict=False)) if a != b), len(right))
        rounds.append(Round(at, tuple(drafts), accepted))
        at += 1 + accepted
    return rounds, lead
