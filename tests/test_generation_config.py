"""generation_config.json: what a checkpoint proposes is taken over, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from kimijax.config import GenerationDefaults, load_generation_defaults
from kimijax.errors import ConfigError


def generation_config(folder: Path, **fields: Any) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return load_generation_defaults(folder)


def test_generation_config_as_published_and_as_transformers_writes_it(tmp_path: Path) -> None:
    """Kimi's own; DeepSeek-V3's; and one that spells every default out."""
    assert generation_config(tmp_path, max_length=262144, eos_token_id=163586) == GenerationDefaults((163586,))
    found = generation_config(
        tmp_path,
        _from_model_config=True,
        bos_token_id=0,
        eos_token_id=1,
        do_sample=True,
        temperature=0.6,
        top_p=0.95,
        transformers_version="4.46.3",
    )
    assert found == GenerationDefaults((1,), 0.6, 0.95)
    off = {
        "repetition_penalty": 1,
        "no_repeat_ngram_size": 0,
        "num_beams": 1,
        "typical_p": 1.0,
        "min_p": None,
        "suppress_tokens": None,
        "renormalize_logits": False,
        "max_new_tokens": None,
        "early_stopping": False,
        "length_penalty": 1.0,
        "top_k": -1,
        "temperature": None,
    }
    assert generation_config(tmp_path, **off) == GenerationDefaults(top_k=-1)


def test_no_sampling_means_greedy(tmp_path: Path) -> None:
    """As in transformers, where `do_sample: false` makes the temperature idle; silence about it does not."""
    assert generation_config(tmp_path, do_sample=False, temperature=0.6, top_p=0.9).temperature == 0
    assert generation_config(tmp_path, do_sample=False).temperature == 0
    for silent in ({}, {"do_sample": None}, {"do_sample": True}):
        assert generation_config(tmp_path, temperature=0.6, **silent).temperature == 0.6


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("top_k", -2),
        ("top_k", 1.5),
        ("do_sample", "no"),
        ("do_sample", 0),
        ("eos_token_id", [True]),
        ("eos_token_id", -1),
        ("repetition_penalty", 1.05),
        ("repetition_penalty", True),
        ("no_repeat_ngram_size", 3),
        ("num_beams", 4),
        ("min_p", 0.1),
        ("suppress_tokens", [5]),
        ("forced_eos_token_id", 2),
        ("sequence_bias", [[[1], -5.0]]),
        ("guidance_scale", 1.5),
        ("min_new_tokens", 8),
        ("max_new_tokens", 2048),
        ("stop_strings", ["###"]),
        ("presence_penalty", 0.5),
        ("repetition_penality", 1.0),
    ],
    ids=str,
)
def test_other_generation_settings_are_refused_by_name(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^generation_config\.{field}: found "):
        generation_config(tmp_path, **{field: value})
