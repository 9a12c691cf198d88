"""A toy tokenizer in the real file formats: 256 bytes, five merges, 256 special slots (261 .. 516)."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path

from kimijax.tokenizer import Tokenizer

MERGES = (b"\n/", b"o\xe4", b"34", b"aa", b" b")
N_RANKS = 256 + len(MERGES)
NAMES = (
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<think>",
    "</think>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
SHOWN = NAMES[7:]  # thinking and tool marks are not `special` in the real file: output parsers need them


def write(folder: Path, merges: Sequence[bytes] = MERGES, names: Sequence[str] = NAMES) -> Path:
    tokens = [bytes([i]) for i in range(256)] + list(merges)
    lines = [f"{base64.b64encode(t).decode()} {i}\n" for i, t in enumerate(tokens)]
    (folder / "tiktoken.model").write_text("".join(lines))
    added = {str(len(tokens) + i): {"content": n, "special": n not in SHOWN} for i, n in enumerate(names)}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added, "eos_token": "[EOS]"}))
    return folder


def load(folder: Path) -> Tokenizer:
    return Tokenizer.from_dir(write(folder))


def real_data(name: str) -> Path | None:
    """A folder of real Kimi files beside the checkout, where there is one."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data" / name
    return folder if folder.is_dir() else None
