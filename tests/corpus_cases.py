"""Small conversations, a target's folder and a recipe for the tests of the stages corpus and generate."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from kimijax.loader import NANO
from kimijax.train import draft_recipe

from . import golden, toy_tokenizer

VOCAB = 528  # of the model; the toy tokenizer has 517
U, A, S, M, E, THINK, END_THINK, CALLS = (
    toy_tokenizer.N_RANKS + toy_tokenizer.NAMES.index(name)
    for name in (
        "<|im_user|>",
        "<|im_assistant|>",
        "<|im_system|>",
        "<|im_middle|>",
        "<|im_end|>",
        "<think>",
        "</think>",
        "<|tool_calls_section_begin|>",
    )
)
LETTERS = tuple(b"abcdefg ")  # what the random model says


def said(*texts: str, **fields: Any) -> dict[str, Any]:
    """A line: user and assistant in turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)], **fields}


def write_lines(path: Path, rows: list[Any]) -> Path:
    """A JSON-lines file; bytes go in as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def user(text: str) -> list[int]:
    """Token ids of a user's turn."""
    return [U, *b"user", M, *text.encode(), E]


HEAD = [A, *b"assistant", M]


def write_target(folder: Path) -> Path:
    """A random Kimi-K2.5 that draws letters and end marks, with the toy tokenizer and nano's template."""
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(golden.FAMILIES["kimi_k25"])
    config["text_config"] |= {"vocab_size": VOCAB, "num_hidden_layers": 2, "max_position_embeddings": 256}
    tensors = {name: np.asarray(value, np.float32) for name, value in golden.hf_weights(config).items()}
    for name, value in tensors.items():
        if name.endswith("embed_tokens.weight"):
            value[:, 0] = 50.0  # so large that the normalised state has sqrt(D) there, whatever the layers add
        if name.endswith("model.norm.weight"):
            value[0] = 1.0
        if name.endswith("lm_head.weight"):
            value[:, 1:] *= 0.5
            value[:, 0] = -1.0
            value[[*LETTERS, E, END_THINK], 0] = 1.0
    golden.write_tensors(tensors, folder, 1)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": E}))
    toy_tokenizer.write(folder)
    (folder / "chat_template.jinja").write_text((NANO / "chat_template.jinja").read_text())
    return folder


def recipe(model: Path, /, *files: Path, **changes: dict[str, Any]) -> draft_recipe.DraftRecipe:
    """Nano's recipe for another target and other files, with fields of its tables changed."""
    base = draft_recipe.load_draft_recipe("nano")
    tables: dict[str, dict[str, Any]] = {
        "target": {"model": str(model), "taps": (0, 1, 2), "max_tokens": 64},
        "corpus": {"conversations": tuple(map(str, files)), "limit": 0, "heldout": 1},
        "generate": {"batch": 2, "max_tokens": 24, "temperature": 1.0, "top_p": 1.0},
    }
    for table, fields in changes.items():
        tables[table] = tables.get(table, {}) | fields
    made = {name: dataclasses.replace(vars(base)[name], **fields) for name, fields in tables.items()}
    return dataclasses.replace(base, **made)
