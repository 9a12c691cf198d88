"""Whether the files that a stage reads were made with the recipe that it is run with.

Each stage checks what its own files say. That a corpus was made with another limit, or answers with another
temperature, no file of a later stage can tell: the record of the sessions can.
"""

from pathlib import Path
from typing import Any

from kimijax.errors import ConfigError

from .draft_recipe import DraftRecipe
from .run_record import plain, sessions

# Of each stage, the settings that change what it writes; None: the whole table.
_MADE_WITH: dict[str, dict[str, tuple[str, ...] | None]] = {
    "corpus": {"target": ("model", "max_tokens"), "corpus": None},
    "generate": {"target": ("dtype",), "generate": ("seed", "temperature", "top_p", "top_k", "max_tokens")},
    "features": {"target": ("dtype", "taps"), "features": ("dtype",)},
    "vocab": {"vocab": None},
}


def check_made_with(out: Path, stage: str, recipe: DraftRecipe) -> None:
    """Refuse files of earlier stages that were made with other settings.

    Args:
      out: the run's folder.
      stage: the one that is about to read them.
      recipe: what it is run with.
    Raises:
      ConfigError: names the setting, both values and the stage to run again.
    """
    new = plain(recipe)
    unused = {"generate": not recipe.generate.enabled, "features": recipe.features.source != "files"}
    for earlier, tables in _MADE_WITH.items():
        if earlier == stage:
            return
        made = [s for s in sessions(out) if f"{earlier}_seconds" in s]
        if made and not unused.get(earlier, False):
            _check(made[-1]["recipe"], new, earlier, tables)


def _check(old: dict[str, Any], new: dict[str, Any], stage: str, tables: dict[str, tuple[str, ...] | None]) -> None:
    for table, names in tables.items():
        for name in new[table] if names is None else names:
            if old[table].get(name) != new[table][name]:
                fix = f"run the stage {stage} again, or use the recipe that it was run with"
                expected = f"{old[table].get(name)!r}, with which {stage} was done"
                raise ConfigError(f"{table}.{name}", new[table][name], expected, fix)
