"""A draft on its way into an engine: its files held against the target, its settings, its weights, and its probe.

`read_draft` and `check_options` need no weights; `load_drafter` reads them, and refuses a draft that does not replay
its probe. The server, notebooks and `--check` all come this way.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .acceptance import Acceptance
from .config import TargetConfig, read_json
from .config_reader import Reader
from .draft_checkpoint import check_draft, load_draft
from .draft_config import DraftConfig, mla_attention
from .draft_record import ResolvedDraft, resolve_draft
from .drafter import Drafter, borrow, declare_drafter, initialise_drafter
from .errors import ConfigError
from .fingerprint import fingerprint_target
from .loader import NANO_DRAFTER, Placement
from .model import Target
from .names import parameters
from .probe import PROBE_FILE, Probe, check, replay, served_acceptance_warning
from .sharding import parameter_sharding
from .speculative_options import SpeculativeOptions
from .startup_progress import Shown
from .tokenizer import Tokenizer
from .wiring import Wiring, default_taps

WATCHED_ROUNDS = 500  # between two looks at the served acceptance: its standard error is then 2 % at the most

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftFiles:
    """A draft that fits the target, as far as can be told without weights.

    Attributes:
      resolved: its wiring, configuration and record.
      declared: its parameters as shapes.
      probe: None: another producer's, or one whose probe was left out.
      recommended_steps: the chain's length that it was measured with, or that its producer recommends.
    """

    resolved: ResolvedDraft
    declared: Drafter
    probe: Probe | None
    recommended_steps: int | None

    @property
    def directory(self) -> Path:
        return self.resolved.directory

    @property
    def config(self) -> DraftConfig:
        return self.resolved.config


@dataclass(frozen=True)
class LoadedDraft:
    """A drafter and how it is to be used.

    Attributes:
      name: of its directory, for logs.
      drafter: filled.
      options: that agree with it.
      probe: that it replays; None: nothing vouches for it (see `doctor.short_doctor`).
      is_stand_in: a head with random weights, for simulated acceptance.
    """

    name: str
    drafter: Drafter
    options: SpeculativeOptions
    probe: Probe | None
    is_stand_in: bool

    @property
    def recorded(self) -> tuple[float, ...]:
        """Acceptance by position as `evaluate` measured it; empty where nothing was."""
        if self.probe is None or self.probe.acceptance is None or self.options.is_simulated:
            return ()
        return self.probe.acceptance.by_position


def draft_directory(draft: str | Path) -> Path:
    """The directory of a draft's name or path. Raises ConfigError where there is no config.json."""
    directory = NANO_DRAFTER if str(draft) == "nano" else Path(draft)
    if not (directory / "config.json").is_file():
        raise ConfigError("draft", str(draft), '"nano", or the directory of an EAGLE-3 draft with a config.json')
    return directory


def read_draft(
    draft: str | Path,
    target_directory: Path,
    target: TargetConfig,
    tokenizer: Tokenizer | None,
    *,
    algorithm: str | None = None,
    convention: str | None = None,
    dtype: Any = jnp.bfloat16,
) -> DraftFiles:
    """A draft's files, held against the target; no weights are read but its draft vocabulary.

    Args:
      draft: a directory, or nano.
      target_directory: the target's checkpoint.
      target: its configuration, as it will run.
      tokenizer: of the target; None: its checkpoint has no tokenizer files.
      algorithm: as set by the user.
      convention: how to read the layer ids of another producer's draft, see `layer_ids.CONVENTIONS`.
      dtype: of the declaration.
    Raises:
      ConfigError, WiringError, CheckpointError: names what does not fit.
    """
    directory = draft_directory(draft)
    resolved = resolve_draft(
        directory,
        fingerprint_target(target_directory, target),
        None if tokenizer is None else tokenizer.fingerprint,
        algorithm=algorithm,
        convention=convention,
        target_name=f"target {target_directory}",
    )
    if resolved.record is None:
        log.warning("%s: nothing in it says which target and tokenizer it was trained for", directory)
    declared = check_draft(directory, resolved.wiring, target, dtype=dtype)
    path = directory / PROBE_FILE
    probe = Probe.from_json(read_json(path), str(path)) if path.is_file() else None
    return DraftFiles(resolved, declared, probe, recommended_steps(directory, probe))


def recommended_steps(directory: Path, probe: Probe | None) -> int | None:
    """Of the probe's measurement, else what speculators' form says."""
    if probe is not None and probe.acceptance is not None:
        return probe.acceptance.draft_tokens
    where = "config.speculators_config"
    data: Any = read_json(directory / "config.json").get("speculators_config", {})
    methods: list[Any] = Reader(data, where).get("proposal_methods", list, [])
    for i, method in enumerate(methods):
        steps: int | None = Reader(method, f"{where}.proposal_methods[{i}]").get("speculative_tokens", int, None)
        if steps is not None:
            return steps
    return None


def resolve_options(files: DraftFiles | None, **given: Any) -> SpeculativeOptions | None:
    """`SpeculativeOptions.resolve` with what a draft's files say; `given`: as the user set them."""
    if files is None:
        return SpeculativeOptions.resolve(draft=None, **given)
    wiring = files.resolved.wiring
    return SpeculativeOptions.resolve(
        draft=files.directory,
        recorded_steps=files.recommended_steps,
        wiring=wiring,
        fc_width=wiring.fused_width,  # `resolve_draft` has compared it with the tensor's
        **given,
    )


def check_options(files: DraftFiles | None, options: SpeculativeOptions, context_length: int) -> None:
    """Refuses settings that the draft's sizes do not allow.

    Args:
      files: None: a stand-in will be made.
      options: to serve with.
      context_length: of a request.
    Raises:
      ConfigError: no draft though acceptance is not simulated, more branches than the draft has tokens, or a context
        beyond its positions.
    """
    if files is None:
        if not options.is_simulated:
            raise ConfigError("draft", None, f"a draft's directory for {options}", "name one, or leave speculation out")
        return
    c = files.config
    if options.eagle_topk > c.draft_vocab_size:
        expected = f"at most {c.draft_vocab_size}, the draft's vocabulary"
        raise ConfigError("speculative_eagle_topk", options.eagle_topk, expected)
    if context_length > c.max_positions:
        expected = f"at most {c.max_positions}, the positions of the draft {files.directory}"
        fix = f"set --context-length {c.max_positions}, or use a draft that was made for longer texts"
        raise ConfigError("context_length", context_length, expected, fix)


def load_drafter(
    files: DraftFiles | None,
    options: SpeculativeOptions,
    target: Target,
    placement: Placement,
    *,
    progress: Shown = False,
) -> LoadedDraft:
    """The drafter's weights, checked by its probe.

    Args:
      files: None: a stand-in for simulated acceptance.
      options: that `check_options` has passed.
      target: filled.
      placement: of the target.
      progress: show GB, GB/s and time left on stderr, or on a display that is given.
    Raises:
      ConfigError, CheckpointError: as `load_draft`.
      WiringError: a draft that does not replay its probe.
    """
    if files is None:
        log.warning("acceptance is simulated with a drafter of random weights")
        return LoadedDraft("stand-in", stand_in(target, placement), options, None, is_stand_in=True)
    directory, mesh = files.directory, placement.mesh
    drafter = load_draft(directory, files.resolved.wiring, target, mesh=mesh, dtype=placement.dtype, progress=progress)
    if files.probe is not None:
        result = replay(files.probe, target, drafter, mesh=mesh)
        check(result, f"draft {directory}")
        log.info("draft %s replays its probe: %s", directory, result.summary())
    return LoadedDraft(directory.resolve().name, drafter, options, files.probe, is_stand_in=False)


def declare_stand_in(target: TargetConfig, dtype: Any) -> Drafter:
    """A head of the size that the family's published ones have: the target's attention, dense width and vocabulary."""
    n = target.n_layers
    taps = default_taps(n) if n >= 7 else tuple(sorted({0, n // 2, n}))
    wiring = Wiring(taps, n, target.hidden)
    sizes: dict[str, Any] = {
        "hidden": target.hidden,
        "mlp_width": target.dense_width,
        "norm_eps": target.norm_eps,
        "max_positions": target.max_positions,
    }
    config = DraftConfig(
        attention=mla_attention(target, **sizes),
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        target_hidden=target.hidden,
        n_taps=len(taps),
        **sizes,
    )
    return declare_drafter(config, wiring, dtype=jnp.dtype(dtype))


def stand_in(target: Target, placement: Placement) -> Drafter:
    """`declare_stand_in` with random weights: drafting costs what it costs with a real one."""
    declared = declare_stand_in(target.config, placement.dtype)
    drafter = initialise_drafter(declared, target, np.arange(target.config.vocab_size), seed=0)
    placed = [(path, p.replace(_placed(p, placement))) for path, p in parameters(drafter).items()]
    nnx.update(drafter, nnx.from_flat_state(placed))
    borrow(drafter, target)
    return drafter


def _placed(param: nnx.Param, placement: Placement) -> jax.Array:
    value = param.get_value()
    return jax.device_put(value, parameter_sharding(placement.mesh, param.get_metadata()["axes"], value.shape))


class AcceptanceWatch:
    """Tells when what is served is accepted far more rarely than was recorded with the draft; asked now and then."""

    def __init__(self, draft: LoadedDraft) -> None:
        self._probe = draft.probe if draft.recorded else None
        self._seen = Acceptance()
        self._is_low = False

    def look(self, total: Acceptance) -> str:
        """What to log; empty while there is nothing new to tell.

        Args:
          total: exact counters of all rounds since the start.
        """
        lately = total - self._seen
        if self._probe is None or not lately.drafted or lately.drafted[0] < WATCHED_ROUNDS:
            return ""
        self._seen = total
        warning = served_acceptance_warning(self._probe, lately.by_position[0])
        told, self._is_low = self._is_low, bool(warning)
        return "" if told else warning
