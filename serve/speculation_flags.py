"""Speculation as the command line says it, in SGLang's flags or in vLLM's, brought to one form.

Other servers ignore a draft without an algorithm, change numbers that do not agree, or let one flag override another.
Here each of these is an error.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kimijax.errors import ConfigError
from kimijax.speculative_options import OFF, SpeculativeOptions

# Names of `SpeculativeOptions.resolve` and the flags that set them.
FLAGS = {
    "algorithm": "speculative_algorithm",
    "draft": "speculative_draft_model_path",
    "convention": "layer_id_convention",
    "num_steps": "speculative_num_steps",
    "eagle_topk": "speculative_eagle_topk",
    "num_draft_tokens": "speculative_num_draft_tokens",
    "adaptive": "speculative_adaptive",
    "block_verification": "speculative_use_block_verification",
    "simulate_acc_len": "speculative_simulate_acc_len",
}
NOT_SETTINGS = ("draft", "convention")  # they name a draft, and how to read it
_JSON, _TOKENS = "speculative_config", "spec_tokens"
_JSON_KEYS: dict[str, type] = {"method": str, "model": str, "num_speculative_tokens": int}
# What vLLM's object says, or leaves to its own defaults: no flag may say it too.
_IN_JSON = (*(FLAGS[n] for n in ("algorithm", "draft", "num_steps", "eagle_topk", "num_draft_tokens")), _TOKENS)


@dataclass(frozen=True)
class SpeculationFlags:
    """What the user set; None: not set."""

    algorithm: str | None = None
    draft: str | None = None
    convention: str | None = None
    num_steps: int | None = None
    eagle_topk: int | None = None
    num_draft_tokens: int | None = None
    adaptive: bool | None = None
    block_verification: bool | None = None
    simulate_acc_len: float | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of `SpeculativeOptions.resolve` that these are."""
        return {name: value for name, value in vars(self).items() if name not in NOT_SETTINGS}

    @property
    def is_off(self) -> bool:
        return self.algorithm is None or self.algorithm.upper() == OFF

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "SpeculationFlags":
        """From the fields of a `ServerConfig`.

        Raises:
          ConfigError: two dialects at once, an unknown key, or anything that is set without an algorithm.
        """
        flags = cls(**{name: fields[flag] for name, flag in FLAGS.items()})
        tokens, data = fields[_TOKENS], fields[_JSON]
        if tokens is not None:
            if flags.num_draft_tokens is not None:
                raise _both(_TOKENS, tokens, FLAGS["num_draft_tokens"])
            if tokens < 1:
                raise ConfigError(flag_name(_TOKENS), tokens, "1 or more")
            flags = dataclasses.replace(flags, num_draft_tokens=tokens + 1)
        if data is not None:
            for flag in _IN_JSON:
                if fields[flag] is not None:
                    raise _both(_JSON, data, flag)
            flags = flags._with_json(data)
        flags._check()
        return flags

    def _with_json(self, data: Mapping[str, Any]) -> "SpeculationFlags":
        for key, value in data.items():
            name = f"{flag_name(_JSON)}.{key}"
            if key not in _JSON_KEYS:
                raise ConfigError(name, value, "no such key, only " + ", ".join(_JSON_KEYS))
            if type(value) is not _JSON_KEYS[key] or value == "" or (type(value) is int and value < 1):
                raise ConfigError(name, value, "a text" if _JSON_KEYS[key] is str else "an integer, 1 or more")
        k = data.get("num_speculative_tokens")
        tokens = None if k is None else k + 1
        return dataclasses.replace(self, algorithm=data.get("method"), draft=data.get("model"), num_draft_tokens=tokens)

    def _check(self) -> None:
        """Refuses what would be ignored."""
        if self.algorithm is None:
            for name, value in vars(self).items():
                if value is not None:
                    fix = "add --speculative-algorithm EAGLE3, or leave it out"
                    raise ConfigError(flag_name(FLAGS[name]), value, "no such setting without an algorithm", fix)
        elif self.is_off:
            SpeculativeOptions.resolve(draft=self.draft, **self.settings)  # names what is set beside it
        if self.convention is not None and self.draft is None:
            flag = flag_name(FLAGS["convention"])
            raise ConfigError(flag, self.convention, "no such setting without a draft", "leave it out")


def flag_name(name: str) -> str:
    """The flag of a field: --model-path of model_path."""
    return "--" + name.replace("_", "-")


def _both(one: str, value: object, other: str) -> ConfigError:
    expected = f"one of {flag_name(one)} and {flag_name(other)}"
    return ConfigError(flag_name(one), value, expected, "neither overrides the other: leave one out")
