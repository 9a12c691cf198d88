"""`generation_config.json`: how a checkpoint proposes to sample, read as strictly as its `config.json`.

The names and meanings are those of transformers' GenerationConfig. What kimijax's sampling has no counterpart for is
accepted at the value that switches it off, and refused at any other.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from .config_reader import Reader, read_json
from .errors import ConfigError


@dataclass(frozen=True)
class GenerationDefaults:
    """What `generation_config.json` proposes; a request's own fields win. None: the file says nothing."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    """0, which is greedy, where the file says `do_sample: false`, whatever its temperature. A file that does not
    mention `do_sample` samples, as in vLLM and SGLang; the published Kimi files do not."""
    top_p: float | None = None
    top_k: int | None = None
    """0 and -1 are off."""


# Each has one effect on what is generated, and these values mean none.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "bad_words_ids": (None, []),
    "begin_suppress_tokens": (None, []),
    "constraints": (None,),
    "diversity_penalty": (None, 0.0),
    "dola_layers": (None,),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "exponential_decay_length_penalty": (None,),
    "force_words_ids": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "guidance_scale": (None, 1.0),
    "max_new_tokens": (None,),
    "max_time": (None,),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "min_p": (None, 0.0),
    "no_repeat_ngram_size": (None, 0),
    "num_beam_groups": (None, 1),
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "penalty_alpha": (None, 0.0),
    "prefill_chunk_size": (None,),
    "remove_invalid_values": (None, False),
    "renormalize_logits": (None, False),
    "repetition_penalty": (None, 1.0),
    "sequence_bias": (None, {}, []),
    "stop_strings": (None, []),
    "suppress_tokens": (None, []),
    "token_healing": (None, False),
    "top_h": (None,),
    "typical_p": (None, 1.0),
    "watermarking_config": (None,),
}

# Without effect on the tokens: how transformers runs and what it returns; the settings of beam search and of assisted
# decoding, which `_NEUTRAL` keeps off; ids for encoders and padding. `max_length` is the model's context, which the
# engine bounds anyway.
_HARMLESS = frozenset(
    """_from_model_config assistant_confidence_threshold assistant_early_exit assistant_lookbehind bos_token_id
    cache_config cache_implementation compile_config decoder_start_token_id disable_compile early_stopping
    is_assistant length_penalty low_memory max_length max_matching_ngram_size num_assistant_tokens
    num_assistant_tokens_schedule output_attentions output_hidden_states output_logits output_scores pad_token_id
    prompt_lookup_num_tokens return_dict_in_generate return_legacy_cache target_lookbehind transformers_version
    use_cache""".split()
)


def load_generation_defaults(directory: Path) -> GenerationDefaults:
    """`generation_config.json` of a checkpoint directory; nothing proposed where there is no such file.

    Raises:
      ConfigError: names the first field that is mistyped, out of range, unknown, or asks for what is not implemented.
    """
    file = directory / "generation_config.json"
    if not file.is_file():
        return GenerationDefaults()
    r = Reader(read_json(file), "generation_config")
    temperature: float | None = r.get("temperature", (float, type(None)), None)
    if temperature is not None and not (math.isfinite(temperature) and temperature >= 0):
        raise ConfigError(f"{r.where}.temperature", temperature, "a finite number, 0 (greedy) or more")
    top_p: float | None = r.get("top_p", (float, type(None)), None)
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"{r.where}.top_p", top_p, "a number above 0, at most 1 (off)")
    top_k: int | None = r.get("top_k", (int, type(None)), None)
    if top_k is not None and top_k < -1:
        raise ConfigError(f"{r.where}.top_k", top_k, "a positive integer, or 0 or -1 (off)")
    if r.one_of("do_sample", (None, True, False), None) is False:
        temperature = 0.0
    for key, allowed in _NEUTRAL.items():
        r.one_of(key, allowed, None, "it is not implemented: remove it to generate without")
    eos = r.token_ids("eos_token_id")
    r.finish(_HARMLESS)
    return GenerationDefaults(eos, temperature, top_p, top_k)
