"""Writes a pre-trained target as a checkpoint directory in the files and names of Kimi-K2.5.

Routed experts become INT4, everything else bf16 (the router's bias stays float32); the configuration is the multimodal
wrapper's without a vision tower. The directory holds all that a server needs, and the licence of the training text.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
from flax import nnx

from kimijax import checkpoint
from kimijax.errors import ConfigError
from kimijax.loader import NANO
from kimijax.names import Path as ParameterPath
from kimijax.tokenizer import Tokenizer

from .config import RECIPES, Recipe
from .nano_corpus import SPECIAL_OFFSETS

TOKENIZER_FILES = ("tiktoken.model", "tokenizer_config.json")
TEMPLATE_FILE = "chat_template.jinja"
LICENSE_FILE = "LICENSE-DATA.md"
# Kimi's recommended sampling for answers without thinking.
TEMPERATURE, TOP_P = 0.6, 0.95

# As published with Kimi-K2.5: `targets` less `ignore` leaves the routed experts.
QUANTIZATION: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def config_json(recipe: Recipe) -> dict[str, Any]:
    """The `config.json` of the exported model: the wrapper, with the recipe's model as its text part."""
    first = recipe.corpus.n_ranks
    ids = {
        "bos_token_id": first + SPECIAL_OFFSETS["[BOS]"],
        "eos_token_id": first + SPECIAL_OFFSETS["[EOS]"],  # a turn ends with <|im_end|>: see `generation_json`
        "pad_token_id": first + SPECIAL_OFFSETS["[PAD]"],
    }
    text = {
        "architectures": ["DeepseekV3ForCausalLM"],
        **recipe.model,
        **ids,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "quantization_config": QUANTIZATION,
    }
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        **ids,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "text_config": text,
    }


def generation_json(recipe: Recipe) -> dict[str, Any]:
    """The `generation_config.json`: where an answer ends, and how it is sampled by default."""
    return {
        "max_length": recipe.target.max_positions,
        "eos_token_id": recipe.corpus.n_ranks + SPECIAL_OFFSETS["<|im_end|>"],
        "temperature": TEMPERATURE,
        "top_p": TOP_P,
    }


def export_target(params: nnx.State, recipe: Recipe, corpus: Path, directory: Path) -> None:
    """Write the model directory; a directory of an earlier export is replaced once the new one is complete.

    Args:
      params: the parameters as they are trained, float.
      recipe: what they were trained by.
      corpus: folder of the corpus builder, with the tokenizer.
      directory: where to write.
    Raises:
      ConfigError: `directory` is not an export, or the tokenizer is not the recipe's.
    """
    if directory.exists() and any(directory.iterdir()) and not (directory / LICENSE_FILE).is_file():
        raise ConfigError("export", str(directory), "a new folder, or one that an earlier export wrote")
    tokenizer = Tokenizer.from_dir(corpus)
    if tokenizer.n_ranks != recipe.corpus.n_ranks:
        expected = f"{tokenizer.n_ranks}, as in {corpus / 'tiktoken.model'}"
        raise ConfigError("corpus.n_ranks", recipe.corpus.n_ranks, expected)
    files = {name: (corpus / name).read_bytes() for name in TOKENIZER_FILES}
    files[TEMPLATE_FILE] = (NANO / TEMPLATE_FILE).read_bytes()
    files["generation_config.json"] = (json.dumps(generation_json(recipe), indent=2) + "\n").encode()
    files[LICENSE_FILE] = _license(corpus)
    directory.parent.mkdir(parents=True, exist_ok=True)
    arrays = {cast(ParameterPath, path): param.get_value() for path, param in nnx.to_flat_state(params)}
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
        written = Path(scratch) / directory.name
        checkpoint.save(arrays, written, config_json(recipe), dtype=jnp.bfloat16, int4="quantize", files=files)
        swap(written, directory, Path(scratch) / "old")


def install(export: Path, directory: Path = NANO) -> None:
    """Make an export the embedded model: its files replace those of the same kind in `directory`, all at once.

    Whatever else `directory` holds (a drafter's folder) stays.
    """
    if not (export / LICENSE_FILE).is_file():
        raise ConfigError("export", str(export), "a complete export", "run the export first")
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
        staged = Path(scratch) / directory.name
        shutil.copytree(export, staged)
        for entry in directory.iterdir() if directory.exists() else ():
            if entry.name.endswith((".safetensors", ".safetensors.index.json")) or (staged / entry.name).exists():
                continue  # an earlier model's
            if entry.is_dir():
                shutil.copytree(entry, staged / entry.name)
            else:
                shutil.copy2(entry, staged / entry.name)
        swap(staged, directory, Path(scratch) / "old")


def swap(new: Path, directory: Path, old: Path) -> None:
    """Put `new` in the place of `directory`, which moves to `old`. Neither is ever seen half written."""
    if directory.exists():
        directory.replace(old)
    try:
        new.replace(directory)
    except OSError:
        if old.exists():
            old.replace(directory)
        raise
    # A temporary directory is private to its owner; a model need not be.
    directory.chmod(0o755)


def _license(corpus: Path) -> bytes:
    """The licence of the training text, for the Python version whose library was read."""
    python = json.loads((corpus / "report.json").read_text(encoding="utf-8"))["python"]
    text = (RECIPES / "nano" / LICENSE_FILE).read_text(encoding="utf-8")
    return text.replace("{python}", python).encode()


def size_mb(directory: Path) -> float:
    """Size of all files of a directory in 10^6 bytes."""
    return sum(f.stat().st_size for f in directory.rglob("*") if f.is_file()) / 1e6
