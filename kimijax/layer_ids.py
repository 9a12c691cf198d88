"""The layer numbers of other trainers and engines, converted to taps (see `wiring`).

`CONVENTIONS` is the one table of who means what by a layer id; `read_wiring` reads a draft's `config.json` through it,
`layer_ids` writes one. Ids that can be read in two ways are refused, never guessed.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .config_reader import Reader
from .errors import ConfigError
from .wiring import Wiring, WiringError, default_taps, taps_fault

RECORD_KEY = "kimijax"  # of a draft's config.json: what kimijax itself wrote
_IDS = "eagle_aux_hidden_state_layer_ids"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Convention:
    """How one producer numbers layers.

    `numbering`: id i is tap i (`input`), or the output of layer i, tap i + 1 (`output`), or `output` exactly if the
    first id is 1 (`first_id`).
    """

    name: str
    numbering: Literal["input", "output", "first_id"]
    about: str
    appends_last: bool = False  # a further id n is the target's last hidden state, for the loss and not for fusing
    captures_last: bool = True  # whether tap n can be captured at all
    embedding_id: int | None = None  # the negative id that stands for tap 0
    counts_embedding: bool = False  # without ids, n counts the embedding's output as a layer
    has_default: bool = True

    def read(self, ids: tuple[int, ...], n_layers: int, count: int | None = None) -> tuple[int, ...]:
        """The taps that ids mean. They may be out of range; see `fault`.

        Args:
          ids: as the file has them.
          n_layers: of the target.
          count: how many streams the fusion layer takes, where that is known.
        """
        output = self.numbering == "output" or (self.numbering == "first_id" and ids[0] == 1)
        taps = tuple(i + 1 if output else i for i in ids)
        # Three streams unless the file says otherwise: (24, 30, 36) of 36 layers fuses the last, it does not append it.
        if self.appends_last and taps[-1] == n_layers and len(taps) == (count or 3) + 1:
            return taps[:-1]
        return taps

    def fault(self, ids: tuple[int, ...], n_layers: int, count: int | None = None) -> str:
        """Why this convention cannot mean these ids, in the form "expected ..."; empty if it can."""
        if any(i < 0 and i != self.embedding_id for i in ids):
            return "no negative ids: DeepSpec means the embedding by -1, TensorRT-LLM a normed last state"
        taps = self.read(ids, n_layers, count)
        if not self.captures_last and taps[-1] == n_layers:
            return f"ids below the last layer's output: {self.name} does not capture tap {n_layers}"
        if count is not None and len(taps) != count:
            return f"{count} ids: that many streams are fused"
        return taps_fault(taps, n_layers)

    def default(self, n_layers: int) -> tuple[int, ...]:
        """The taps of a draft whose config has no ids."""
        if not self.has_default:
            raise ConfigError(_IDS, "no such key", f"layer ids: {self.name} has no default", "add them to config.json")
        low, _, high = default_taps(n_layers)
        extra = int(self.counts_embedding)
        return low, (n_layers + extra) // 2, high + extra


_ROWS = (
    Convention("input_of_layer", "input", "id i enters layer i"),
    Convention("output_of_layer", "output", "id i leaves layer i; the embedding has no id"),
    Convention("eagle", "input", "the reference's fixed 2, n//2, n-3: streams are kept before a layer runs"),
    Convention(
        "sglang",
        "first_id",
        "since 2026-05 a list that starts with 1 means outputs, any other one inputs; the last output has no id",
        captures_last=False,
    ),
    Convention(
        "sglang_before_2026_05",
        "output",
        "any explicit list means outputs, and 2, n//2, n-3 without a list means inputs; the last output has no id",
        captures_last=False,
    ),
    Convention("vllm", "input", "id i enters layer i; ids are sorted and made unique"),
    Convention("speculators", "input", "vLLM's ids; a fourth id n is the last hidden state", appends_last=True),
    Convention("specforge", "output", "id i leaves layer i"),
    Convention("torchspec", "output", "id i leaves layer i"),
    Convention("torchspec_vllm", "input", "TorchSpec's export for vLLM adds 1 to its ids"),
    Convention("modelopt", "output", "id i leaves layer i"),
    Convention("modelopt_vllm", "input", "ids of states streamed from vLLM, id n appended", appends_last=True),
    Convention("tensorrt_llm", "output", "id i leaves layer i"),
    Convention("angelslim", "output", "id i leaves layer i: hidden_states[i + 1]"),
    Convention(
        "angelslim_early",
        "output",
        "id i leaves layer i; without ids the first releases counted the embedding as a layer",
        counts_embedding=True,
    ),
    Convention("deepspec", "output", "id i leaves layer i; -1 is the embedding", embedding_id=-1, has_default=False),
)
CONVENTIONS: Mapping[str, Convention] = {c.name: c for c in _ROWS}


def find_convention(name: str) -> Convention:
    """The convention of that name. ConfigError lists the names."""
    if name not in CONVENTIONS:
        raise ConfigError("layer_id_convention", name, "one of " + ", ".join(CONVENTIONS))
    return CONVENTIONS[name]


def layer_ids(wiring: Wiring, convention: str) -> tuple[int, ...]:
    """The taps as a producer numbers them, for a file that its software reads.

    A file for vLLM and SGLang alike takes `vllm`'s ids, which SGLang understands since 2026-05. `sglang`'s are, where
    there is a choice, the ones that its older releases understand too.

    Raises:
      WiringError: that convention has no way to say these taps.
    """
    c, n, count = find_convention(convention), wiring.target_layers, len(wiring.taps)
    for shift in (1, 0):
        ids = tuple(t - shift for t in wiring.taps)
        if not c.fault(ids, n, count) and c.read(ids, n, count) == wiring.taps:
            return ids
    raise WiringError("wiring.taps", f"found {wiring.taps} of {n} layers, which {c.name} cannot express: {c.about}")


def read_wiring(
    config: Mapping[str, Any],
    *,
    target_layers: int,
    target_hidden: int,
    convention: str | None = None,
    fc_width: int | None = None,
    where: str = "config",
) -> Wiring:
    """The wiring of an EAGLE-3 draft from its `config.json`: kimijax's own record, or a producer's layer ids.

    Without `convention`, ids are accepted if only one reading is possible: the file names its producer, or the ids are
    2, n//2, n-3 as one of the two numberings writes them, or only one reading lies in range.

    Args:
      config: the parsed file.
      target_layers: decoder layers of the target that will be tapped.
      target_hidden: its width.
      convention: a name in `CONVENTIONS`, where the file cannot tell. Refused for a file with kimijax's record.
      fc_width: inputs of the draft's fusion layer (`fc.weight` is [draft width, fc_width]), where known.
      where: the file's name in errors.
    Raises:
      ConfigError: a draft that is not EAGLE-3, made for another width, or with malformed fields.
      WiringError: ids with several readings or none, or fields that contradict each other; shows each reading.
    """
    r = Reader(config, where)
    named = None if convention is None else find_convention(convention)
    if RECORD_KEY in config:
        return _own(r, target_layers, target_hidden, named, fc_width)
    _check_kind(r, target_hidden)
    count = _count(r, target_hidden, fc_width)
    lists = _id_lists(r)
    by = named or (CONVENTIONS["speculators"] if _is_speculators(config) else None)
    if not lists:
        by = by or CONVENTIONS["eagle"]
        taps = by.default(target_layers)
        log.warning("%s has no layer ids: taps %s by the default of %s", where, taps, by.name)
        if count is not None and count != len(taps):
            raise ConfigError(f"{where}.{_IDS}", "no such key", f"{count} ids: that many streams are fused")
        return Wiring(taps, target_layers, target_hidden)
    for key, (ids, own) in lists.items():
        if own and named and own.read(ids, target_layers) != named.read(ids, target_layers):
            fix = f"name {own.name}, or leave it out"
            raise ConfigError("layer_id_convention", named.name, f"{own.name}, whose own field {key} is", fix)
    readings = {key: _reading(key, ids, own or by, named, target_layers, count) for key, (ids, own) in lists.items()}
    if len(set(readings.values())) > 1:
        first = next(iter(lists))
        lines = [f"{key} {list(lists[key][0])} means taps {taps}" for key, taps in readings.items()]
        raise WiringError(first, "fields of one file contradict each other:\n  " + "\n  ".join(lines))
    taps = next(iter(readings.values()))
    log.info("%s: layer ids of %s are taps %s", where, ", ".join(lists), taps)
    return Wiring(taps, target_layers, target_hidden)


def _own(r: Reader, layers: int, hidden: int, named: Convention | None, fc_width: int | None) -> Wiring:
    """The record that kimijax wrote, checked against everything else that the file says."""
    record = Reader(r.get(RECORD_KEY, dict), f"{r.where}.{RECORD_KEY}")
    wiring = Wiring.from_json(record.get("wiring", dict), f"{record.where}.wiring")
    if named is not None:
        raise ConfigError("layer_id_convention", named.name, f"no value: {record.where}.wiring says it", "leave it out")
    for field, said, found in (
        ("target_layers", wiring.target_layers, layers),
        ("target_hidden", wiring.target_hidden, hidden),
    ):
        if said != found:
            raise WiringError(
                f"{record.where}.wiring.{field}", f"the draft was made for {said}, the target has {found}"
            )
    _check_kind(r, hidden)
    if fc_width is not None:
        wiring.check_width(fc_width, "fc.weight's inputs")
    count = _count(r, hidden, wiring.fused_width)
    for key, (ids, own) in _id_lists(r).items():
        readings = (own,) if own else (CONVENTIONS["input_of_layer"], CONVENTIONS["output_of_layer"])
        if wiring.taps not in (c.read(ids, layers, count) for c in readings):
            raise WiringError(key, f"found {list(ids)}, but {record.where}.wiring says taps {wiring.taps}")
    return wiring


def _is_speculators(config: Mapping[str, Any]) -> bool:
    return "speculators_model_type" in config or "speculators_config" in config


def _check_kind(r: Reader, hidden: int) -> None:
    """Refuses drafts that do not fuse pre-norm streams of a target of this width."""
    for key in ("dflash_config", "target_layer_ids", "aux_hidden_state_layer_ids"):
        if r.get(key, (dict, list, type(None)), None) is not None:
            raise ConfigError(f"{r.where}.{key}", r.data[key], "no such field", "block drafters are not EAGLE-3 drafts")
    eagle = r.get("eagle_config", (dict, type(None)), None) or {}
    Reader(eagle, f"{r.where}.eagle_config").one_of(
        "use_aux_hidden_state", (True,), True, "a head on the normed last state alone is not an EAGLE-3 head"
    )
    inner = Reader(
        r.get("transformer_layer_config", (dict, type(None)), None) or {}, f"{r.where}.transformer_layer_config"
    )
    # The draft's own width only speaks of the target where target_hidden_size is left out.
    for reader, key in ((r, "target_hidden_size"), (r, "hidden_size"), (inner, "hidden_size")):
        found = reader.get(key, (int, type(None)), None)
        if found is None:
            continue
        if found != hidden:
            fix = "use a draft of this target"
            raise ConfigError(f"{reader.where}.{key}", found, f"{hidden}, the target's width", fix)
        return


def _count(r: Reader, hidden: int, fc_width: int | None) -> int | None:
    """How many streams are fused, where the file or the fusion layer tells."""
    said: int | None = r.get("num_aux_hidden_states", (int, type(None)), None)
    if fc_width is None:
        return said
    if fc_width % hidden or fc_width < hidden:
        raise ConfigError("fc.weight's inputs", fc_width, f"a multiple of the target's width {hidden}")
    if said is not None and said * hidden != fc_width:
        found = f"{fc_width} inputs, {fc_width // hidden} x {hidden}"
        raise WiringError(f"{r.where}.num_aux_hidden_states", f"found {said}, but fc.weight takes {found}")
    return fc_width // hidden


def layer_id_lists(config: Mapping[str, Any], where: str = "config") -> dict[str, tuple[int, ...]]:
    """Every list of layer ids in a draft's `config.json`: where it stands -> ids. ConfigError: a malformed one."""
    return {key: ids for key, (ids, _) in _id_lists(Reader(config, where)).items()}


def _id_lists(r: Reader) -> dict[str, tuple[tuple[int, ...], Convention | None]]:
    """Every list of layer ids in the file: where it stands -> ids, and the producer if only one uses that key.

    vLLM and speculators write the ids at the top level, SGLang reads them in `eagle_config`, AngelSlim trains by
    `aux_hidden_states_layer_ids`, and TensorRT-LLM calls its option `eagle3_layers_to_capture`.
    """
    inner = Reader(r.get("eagle_config", (dict, type(None)), None) or {}, f"{r.where}.eagle_config")
    out: dict[str, tuple[tuple[int, ...], Convention | None]] = {}
    for reader, key, producer in (
        (r, _IDS, None),
        (inner, _IDS, None),
        (r, "aux_hidden_states_layer_ids", "angelslim"),
        (r, "eagle3_layers_to_capture", "tensorrt_llm"),
    ):
        ids: list[Any] | None = reader.get(key, (list, type(None)), None)
        if ids is None:
            continue
        if not ids or any(type(i) is not int for i in ids):
            raise ConfigError(f"{reader.where}.{key}", ids, "a list of layer numbers")
        out[f"{reader.where}.{key}"] = (tuple(ids), CONVENTIONS[producer] if producer else None)
    return out


def _reading(
    key: str, ids: tuple[int, ...], by: Convention | None, named: Convention | None, n_layers: int, count: int | None
) -> tuple[int, ...]:
    """The one possible meaning of a list of ids.

    Args:
      by: the convention that the user or the file names.
      named: the convention that the user names; it is believed, also against the published default.
    """
    # DeepSpec's only difference, the embedding as -1, is TensorRT-LLM's normed last state: it has to be named.
    candidates = [by] if by else [c for c in _ROWS if c.embedding_id is None]
    found = {c.read(ids, n_layers, count) for c in candidates if not c.fault(ids, n_layers, count)}
    usual = _published(ids, n_layers)
    likely = {taps for taps in found if usual and taps[:3] == default_taps(n_layers)}
    if len(likely or found) != 1:
        raise WiringError(
            key, _explain(ids, n_layers, count, by, "has no single meaning" if found else "means nothing")
        )
    if usual and not likely:
        other = f"is the published default 2, n//2, n-3 as {usual.name}"
        if named is None:
            raise WiringError(key, _explain(ids, n_layers, count, by, other))
        log.warning("%s: %s %s, but is read as %s", key, list(ids), other, named.name)
    return (likely or found).pop()


def _published(ids: tuple[int, ...], n_layers: int) -> Convention | None:
    """The numbering under which the first three ids are the published default, if there is one."""
    if n_layers < 7:
        return None
    for name in ("input_of_layer", "output_of_layer"):
        if CONVENTIONS[name].read(ids, n_layers)[:3] == default_taps(n_layers):
            return CONVENTIONS[name]
    return None


def _explain(ids: tuple[int, ...], n_layers: int, count: int | None, by: Convention | None, why: str) -> str:
    """Why ids are refused, and what each convention makes of them."""
    results: dict[str, list[str]] = {}
    for c in _ROWS:
        fault = c.fault(ids, n_layers, count)
        result = f"refused, expected {fault}" if fault else f"taps {c.read(ids, n_layers, count)}"
        results.setdefault(result, []).append(c.name)
    target = f"a target of {n_layers} layers" + ("" if count is None else f" and a draft that fuses {count}")
    reading = f" (read as {by.name})" if by else ""
    lines = "".join(f"\n  {result}: {', '.join(names)}" for result, names in results.items())
    return (
        f"found {list(ids)} for {target}, which {why}{reading}{lines}\n"
        "set layer_id_convention (--layer-id-convention) to the one that the draft was made with"
    )
