"""Which residual streams of the target feed the drafter: the contract that training and serving share.

Tap i is the residual stream entering decoder layer i, residual added, before any norm: 0 is the embedding's output,
n_layers what enters the final norm. kimijax knows this one numbering; `layer_ids` converts those of other
trainers and engines at the edge. A drafter that is fed other streams than it was trained on still leaves the text
right and only makes it slow, so nothing but this contract tells: every artefact carries it, see `fingerprint`.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from .config_reader import Reader
from .errors import ConfigError


class WiringError(ConfigError):
    """Wiring, target or tokenizer that differ or contradict each other; the message shows every side."""

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        ValueError.__init__(self, f"{field}: {message}")


def default_taps(n_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's published choice, 2, n//2 and n-3 (EAGLE, `modeling_llama_kv.py`); 2, 30, 58 for Kimi's 61 layers.

    Raises:
      ConfigError: fewer than 7 layers, where the rule names one residual stream twice.
    """
    if n_layers < 7:
        found, expected = f"none given, and {n_layers} layers", "at least 7 layers for the default 2, n//2, n-3"
        raise ConfigError("taps", found, expected, "name the taps")
    return 2, n_layers // 2, n_layers - 3


@dataclass(frozen=True)
class Wiring:
    """The taps that are concatenated, in this order, into the input of the drafter's fusion layer.

    Attributes:
      taps: ascending, each 0 to `target_layers`.
      target_layers: decoder layers of the target.
      target_hidden: width D of the target.
    Raises:
      ConfigError: taps that are empty, outside the range, repeated or not ascending.
    """

    taps: tuple[int, ...]
    target_layers: int
    target_hidden: int

    def __post_init__(self) -> None:
        for name, value in (("target_layers", self.target_layers), ("target_hidden", self.target_hidden)):
            if type(value) is not int or value <= 0:
                raise ConfigError(f"wiring.{name}", value, "a positive integer")
        fault = taps_fault(self.taps, self.target_layers)
        if fault:
            raise ConfigError("wiring.taps", self.taps, fault, "tap i is the residual stream entering layer i")

    @property
    def fused_width(self) -> int:
        """Inputs of the fusion layer."""
        return len(self.taps) * self.target_hidden

    def check_target(self, n_layers: int, hidden: int) -> None:
        """Refuse a target of another size. ConfigError names both."""
        found = (self.target_layers, self.target_hidden)
        if found != (n_layers, hidden):
            expected = f"{(n_layers, hidden)}, the target's"
            raise ConfigError("drafter.wiring (target_layers, target_hidden)", found, expected)

    @classmethod
    def default(cls, target_layers: int, target_hidden: int) -> "Wiring":
        """The published choice of taps, see `default_taps`."""
        return cls(default_taps(target_layers), target_layers, target_hidden)

    def check_width(self, found: int, where: str) -> None:
        """Refuses features, or a fusion layer, of another width.

        Raises:
          ConfigError: names `where`.
        """
        if found != self.fused_width:
            raise ConfigError(
                where,
                found,
                f"{self.fused_width}: {len(self.taps)} taps {self.taps} of width {self.target_hidden}",
                "use the draft, features and target that belong together",
            )

    def to_json(self) -> dict[str, Any]:
        """The record that artefacts carry; it says what it means without this code."""
        return {
            "tensor": "residual_stream",
            "convention": "input_of_layer",
            "pre_norm": True,
            "order": "ascending",
            "taps": list(self.taps),
            "target_layers": self.target_layers,
            "target_hidden": self.target_hidden,
            "fused_width": self.fused_width,
        }

    @classmethod
    def from_json(cls, data: object, where: str = "wiring") -> "Wiring":
        """Reads `to_json`'s record.

        Raises:
          ConfigError: a key that is missing, unknown, mistyped or not of this convention, or taps that are refused.
        """
        r = Reader(data, where)
        for key, value in (("tensor", "residual_stream"), ("convention", "input_of_layer"), ("order", "ascending")):
            r.one_of(key, (value,))
        r.one_of("pre_norm", (True,))
        taps: list[Any] = r.get("taps", list)
        wiring = cls(tuple(taps), r.positive("target_layers"), r.positive("target_hidden"))
        wiring.check_width(r.positive("fused_width"), f"{where}.fused_width")
        r.finish()
        return wiring


def taps_fault(taps: tuple[Any, ...], n_layers: int) -> str:
    """What is wrong with taps, in the form "expected ..."; empty if nothing is."""
    if not isinstance(taps, tuple) or not taps or any(type(t) is not int for t in taps):
        return "a tuple of one or more integers"
    if any(not 0 <= t <= n_layers for t in taps):
        return f"taps from 0 (embedding) to {n_layers} (before the final norm)"
    if any(a >= b for a, b in pairwise(taps)):
        return "ascending taps, none twice: every engine captures in the order of the layers"
    return ""


def check_algorithm(
    algorithm: str | None, draft: str | Path | None, *, wiring: Wiring | None = None, fc_width: int | None = None
) -> None:
    """Refuses a speculation setting that does not fit the draft, before weights are loaded.

    With an older algorithm's name other servers skip the fusion layer of an EAGLE-3 draft, and accept nothing.

    Args:
      algorithm: as set by the user; None leaves it to the draft.
      draft: the draft's directory.
      wiring: of the draft.
      fc_width: inputs of its fusion layer.
    Raises:
      ConfigError: another algorithm than EAGLE3, EAGLE3 without a draft, or a fusion layer of another width.
    """
    if algorithm is not None and algorithm.upper() != "EAGLE3":
        fix = "only EAGLE-3 drafts are implemented"
        if wiring is not None and fc_width == wiring.fused_width:
            fix = f"{draft} is an EAGLE-3 draft: its fc takes {fc_width} = {len(wiring.taps)} x {wiring.target_hidden}"
        raise ConfigError("speculative_algorithm", algorithm, "EAGLE3", fix)
    if algorithm is not None and draft is None:
        raise ConfigError("draft", None, "a draft's directory", "name one, or leave speculative_algorithm out")
    if wiring is not None and fc_width is not None:
        if fc_width == 2 * wiring.target_hidden and len(wiring.taps) != 2:
            fix = f"{draft} looks like an EAGLE-1 or EAGLE-2 draft"
            raise ConfigError("fc.weight's inputs", fc_width, f"{wiring.fused_width}", fix)
        wiring.check_width(fc_width, "fc.weight's inputs")
