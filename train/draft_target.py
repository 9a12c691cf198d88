"""The target of a drafter's recipe: its files, its contract, and its weights as far as a stage needs them."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh

from kimijax import checkpoint
from kimijax.chat import ChatTemplate
from kimijax.config import TargetConfig, load_config
from kimijax.errors import ConfigError, TokenizerError
from kimijax.fingerprint import Contract, fingerprint_target
from kimijax.loader import Placement, load_tokenizer, model_directory, place
from kimijax.model import Tables, Target
from kimijax.tokenizer import Tokenizer
from kimijax.wiring import Wiring

from .draft_recipe import DraftRecipe


@dataclass(frozen=True)
class DraftTarget:
    """What a recipe's target is, from its small files: nothing is on a device yet."""

    recipe: DraftRecipe
    directory: Path
    config: TargetConfig
    tokenizer: Tokenizer
    chat: ChatTemplate
    wiring: Wiring

    @staticmethod
    def of(recipe: DraftRecipe) -> "DraftTarget":
        """Reads configuration, tokenizer and chat template.

        Raises:
          ConfigError, TokenizerError, TemplateError: a file that is missing or does not fit.
        """
        directory = model_directory(recipe.target.model)
        config = load_config(directory)
        if recipe.target.max_tokens > config.max_positions:
            expected = f"at most the {config.max_positions} positions of {directory}"
            raise ConfigError("target.max_tokens", recipe.target.max_tokens, expected)
        tokenizer, chat = load_tokenizer(directory, config)
        if tokenizer is None or chat is None:
            missing = "chat template" if tokenizer else "tiktoken.model"
            raise TokenizerError(f"{directory}: found no {missing}, expected one: training is on conversations")
        return DraftTarget(recipe, directory, config, tokenizer, chat, recipe.target.wiring(config))

    @functools.cached_property
    def contract(self) -> Contract:
        """What every artefact of the run carries."""
        target = fingerprint_target(self.directory, self.config)
        return Contract(self.wiring, target, self.tokenizer.fingerprint)

    @property
    def stop_ids(self) -> Sequence[int]:
        """Tokens that end an answer."""
        return sorted(self.tokenizer.stop_ids)

    @property
    def is_copied(self) -> bool:
        """Whether each process has a copy of the whole target, on its own devices; else it lies on those of all."""
        return self.recipe.target.devices <= jax.local_device_count()

    def placement(self) -> Placement:
        """Where the whole target goes.

        Raises:
          ConfigError: more devices than there are, or neither within a process nor all of several.
        """
        t = self.recipe.target
        n, local = jax.device_count(), jax.local_device_count()
        if not 1 <= t.devices <= n:
            raise ConfigError("target.devices", t.devices, f"1 to {n}, the devices there are")
        if jax.process_count() > 1 and local < t.devices < n:
            expected = f"at most {local}, for a copy of the target in each process, or all {n} for one over all"
            raise ConfigError("target.devices", t.devices, expected)
        return place(t.dtype, t.devices, t.preset, local=self.is_copied)

    def load(self, *, progress: bool = True) -> tuple[Target, Mesh | None]:
        """The whole model where `placement` says, and its mesh; None: one device."""
        p = self.placement()
        target = checkpoint.load(
            self.directory, self.config, mesh=p.mesh, dtype=p.dtype, unpack_int4=p.unpack_int4, progress=progress
        )
        return target, p.mesh

    def load_tables(self, mesh: Mesh | None = None) -> Tables:
        """Embedding, final norm and head alone."""
        dtype = jax.numpy.dtype(self.recipe.target.dtype)
        return checkpoint.load_tables(self.directory, self.config, mesh=mesh, dtype=dtype)
