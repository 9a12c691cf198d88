"""Runs an exported draft in speculators' own `Eagle3DraftModel`, read by its own `from_pretrained`.

The class has one forward, its training loop: step j of row t continues step j - 1 of the same row with the sequence's
own token, and sees the rows of the first step up to t and its own later ones. That is what serving does while tokens
are accepted, so the last row of the prompt chained over j steps is read off it. It returns no logits: hooks on fc, the
last norm and the head keep what passes. Attention is PyTorch's own (`sdpa`); the default, flex attention, is for GPUs.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from speculators.models.eagle3 import (  # pyright: ignore[reportMissingImports]
    Eagle3DraftModel,
    Eagle3SpeculatorConfig,
)

from .engine_cases import CHAIN, PROMPT, ROWS, Case, Outputs, inputs


def run(case: Case, directory: Path) -> Outputs:
    """Outputs of `directory`/export; the verifier that its config names is `directory`/target."""
    os.chdir(directory)
    config = Eagle3SpeculatorConfig.from_pretrained("export")
    config.transformer_layer_config._attn_implementation = "sdpa"
    model: Any = Eagle3DraftModel.from_pretrained("export", config=config, dtype=torch.float32).eval()
    seen: dict[str, list[torch.Tensor]] = {"fc": [], "norm": [], "lm_head": []}
    for name, kept in seen.items():
        model.get_submodule(name).register_forward_hook(
            lambda _, given, out, kept=kept: kept.append(torch.cat([given[0], out], -1)[0])
        )
    given = inputs()
    rows = PROMPT + CHAIN
    with torch.no_grad():
        model(
            torch.from_numpy(given.taps)[None],
            torch.from_numpy(given.ids)[None],
            torch.zeros(1, rows, dtype=torch.long),
            ttt_steps=1 + CHAIN,
        )
    width = config.transformer_layer_config.hidden_size
    (fused,), normed, heads = seen["fc"], seen["norm"], seen["lm_head"]
    at = [(0, row) for row in ROWS] + [(j, PROMPT - 1) for j in range(1, 1 + case.chain)]
    # With norm_output the layer is fed the norm's output, otherwise its input.
    fed = slice(width, None) if config.norm_output else slice(0, width)
    size = config.draft_vocab_size
    ids = torch.arange(size) + (0 if model.d2t is None else model.d2t)
    return Outputs(
        features=fused[list(ROWS), -width:].numpy(),
        feedback=torch.stack([normed[j][row, fed] for j, row in at]).numpy(),
        logits=torch.stack([heads[j][row, width:] for j, row in at]).numpy(),
        target_ids=ids.numpy().astype(np.int64),
    )
