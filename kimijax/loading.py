"""`kimijax.load`: from a checkpoint's directory, and a draft's, to a model that answers."""

from pathlib import Path
from typing import Any

from . import checkpoint
from .config import load_config, load_generation_defaults
from .cpu_layout import arrange_for_cpu
from .draft_loading import check_options, load_drafter, read_draft, resolve_options
from .engine.config import EngineConfig, fit_context
from .engine.engine import Engine
from .generate import LLM
from .loader import load_tokenizer, model_directory, model_name, place
from .speculative_options import SpeculativeOptions
from .startup_progress import Shown

DEFAULT_CONTEXT = 2048  # tokens of prompt and output, unless the model holds fewer or the caller asks otherwise


def load(
    path: str | Path = "nano",
    *,
    draft: str | Path | None = None,
    speculation: SpeculativeOptions | None = None,
    layer_id_convention: str | None = None,
    engine: EngineConfig | None = None,
    dtype: Any = None,
    devices: int = 1,
    preset: str = "tp",
    latent_norm_eps: float | None = None,
    progress: Shown = False,
    direct: bool = False,
) -> LLM:
    """Load a checkpoint directory, or the embedded "nano".

    Args:
      path: a Hugging Face checkpoint directory of the family, or "nano".
      draft: directory of an EAGLE-3 draft of this model, or "nano": tokens are then drafted and verified, which changes
        how fast they come and nothing else.
      speculation: how many are drafted, and how they are accepted (`SpeculativeOptions.resolve`); default: as many as
        the draft's files recommend, in every round. A number chosen by cost (`adaptive`) needs measurements first: they
        are made before the first answer, and take a minute or more.
      layer_id_convention: how to read the layer ids of another producer's draft, where its files do not tell; a name in
        `layer_ids.CONVENTIONS`.
      engine: sizes of the engine; default: a context of DEFAULT_CONTEXT tokens.
      dtype: of the weights and activations; default bfloat16 on a GPU, float32 on a CPU.
      devices: to split the model over.
      preset: how it is split: tp (heads, widths, vocabulary), ep (the same, but experts whole), dp-attention (requests
        and their cache, experts whole), dcp (as tp, and the cache by position).
      latent_norm_eps: eps of the q_a and kv_a norms; default rms_norm_eps, see `load_config`.
      progress: show on stderr how far it is, or on a display that is given.
      direct: read the weights past the system's page cache; the file system must support it.
    Raises:
      ConfigError, WiringError, CheckpointError, TokenizerError, TemplateError: what does not fit, before anything is
        served; a draft that does not belong to this model too.
    """
    directory = model_directory(path)
    config = load_config(directory, latent_norm_eps=latent_norm_eps)
    tokenizer, chat = load_tokenizer(directory, config)
    placement = place(dtype, devices, preset)
    files = None if draft is None else read_draft(draft, directory, config, tokenizer, convention=layer_id_convention)
    if speculation is None and files is not None:
        speculation = resolve_options(files, adaptive=False)
    if engine is None:
        positions = config.max_positions if files is None else min(config.max_positions, files.config.max_positions)
        engine = EngineConfig(context_length=fit_context(DEFAULT_CONTEXT, positions))
    if speculation is not None:
        check_options(files, speculation, engine.context_length)
    model = checkpoint.load(
        directory,
        config,
        mesh=placement.mesh,
        dtype=placement.dtype,
        unpack_int4=placement.unpack_int4,
        progress=progress,
        direct=direct,
    )
    loaded = None if speculation is None else load_drafter(files, speculation, model, placement, progress=progress)
    arrange_for_cpu(model, None if loaded is None else loaded.drafter, mesh=placement.mesh)
    stop_ids = config.eos_token_ids if tokenizer is None else tokenizer.stop_ids
    return LLM(
        name=model_name(directory),
        model=model,
        engine=Engine(
            model,
            engine,
            drafter=None if loaded is None else loaded.drafter,
            speculation=speculation,
            recorded=() if loaded is None else loaded.recorded,
            n_tokens=None if tokenizer is None else tokenizer.vocab_size,
            stop_ids=tuple(stop_ids),
            mesh=placement.mesh,
        ),
        tokenizer=tokenizer,
        chat=chat,
        defaults=load_generation_defaults(directory),
        mesh=placement.mesh,
        draft=loaded,
    )
