"""What is decided before a checkpoint is loaded: its folder, its text files, where its weights go and in which form."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from .chat import ChatTemplate
from .config import TargetConfig
from .errors import ConfigError, TokenizerError
from .sharding import make_mesh, preset_of
from .tokenizer import Tokenizer, read_json_object

log = logging.getLogger(__name__)

NANO = Path(__file__).parent / "nano"
NANO_DRAFTER = NANO / "drafter"


@dataclass(frozen=True)
class Placement:
    """Where a model's weights go, and in which form."""

    mesh: Mesh | None  # None: the first device
    dtype: Any
    unpack_int4: bool  # on a CPU: no kernel reads packed experts there


def place(dtype: Any = None, devices: int = 1, preset: str = "tp", *, local: bool = False) -> Placement:
    """Placement on the devices there are, those of all processes or this one's.

    Args:
      dtype: of weights and activations; default bfloat16 on a GPU, float32 on a CPU.
      devices: to split the model over.
      preset: how (`sharding.PRESETS`), with or without the number of devices behind it.
      local: each process has a model of its own, on its own devices.
    Raises:
      ConfigError: more devices than there are, not all of several processes, or no such preset.
    """
    name = preset_of(preset, devices)
    on_cpu = jax.default_backend() == "cpu"
    if dtype is None:
        dtype = jnp.float32 if on_cpu else jnp.bfloat16
    found = jax.local_devices() if local else jax.devices()
    n = len(found)
    if not 1 <= devices <= n:
        raise ConfigError("devices", devices, f"1 to {n}, the devices there are")
    if jax.process_count() > 1 and not local and devices < n:
        fix = "every process works on every step; start fewer, or use all of their devices"
        raise ConfigError("devices", devices, f"{n}, the devices of all {jax.process_count()} processes", fix)
    mesh = make_mesh(found[:devices], preset=name) if devices > 1 else None
    return Placement(mesh, jnp.dtype(dtype), unpack_int4=on_cpu)


def model_directory(path: str | Path) -> Path:
    """The directory of a model name or path. Raises ConfigError where there is no config.json."""
    directory = NANO if str(path) == "nano" else Path(path)
    if not (directory / "config.json").is_file():
        raise ConfigError("model", str(path), '"nano" or a checkpoint directory with a config.json')
    return directory


def model_name(directory: Path) -> str:
    """What a model is called where nothing else is said."""
    return "kimi-nano" if directory == NANO else directory.resolve().name


def load_tokenizer(directory: Path, config: TargetConfig) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """Tokenizer and chat template of a checkpoint.

    Both are None, which is logged, where it has no tokenizer files, or only a `tokenizer.json`, as DeepSeek's own
    checkpoints have: that format is not read. The template alone is None where there is none.

    Raises:
      TokenizerError: part of the files is missing, or they hold more ids than the model.
    """
    has_ranks, has_config = ((directory / name).is_file() for name in ("tiktoken.model", "tokenizer_config.json"))
    if not has_ranks and (not has_config or (directory / "tokenizer.json").is_file()):
        log.warning("%s has no tiktoken.model: it loads for token ids only", directory)
        return None, None
    tokenizer = Tokenizer.from_dir(directory, config.eos_token_ids)  # names the file that is missing
    if tokenizer.vocab_size > config.vocab_size:
        raise TokenizerError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size} ids, the model {config.vocab_size}: wrong files"
        )
    inline = read_json_object(directory / "tokenizer_config.json").get("chat_template")
    has_template = (directory / "chat_template.jinja").is_file() or isinstance(inline, str)
    return tokenizer, ChatTemplate.from_dir(directory, tokenizer) if has_template else None
