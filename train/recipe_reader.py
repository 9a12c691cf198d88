"""Recipes are TOML files: found by name or path, overridden field by field, read into frozen dataclasses."""

import tomllib
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from kimijax.errors import ConfigError

RECIPES = Path(__file__).parent / "recipes"


def find_recipe(name: str) -> Path:
    """The file of a recipe by the name of a file in `recipes/`, or by a path that ends in `.toml`.

    Raises:
      ConfigError: there is none.
    """
    path = Path(name) if name.endswith(".toml") else RECIPES / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in RECIPES.glob("*.toml")))
        raise ConfigError("recipe", name, f"one of {known}, or the path of a .toml file")
    return path


def read_tables(path: Path, overrides: Sequence[str], tables: Sequence[str], other: str) -> dict[str, dict[str, Any]]:
    """The tables of a recipe, overrides applied.

    Args:
      path: the file.
      overrides: `table.field=value` with a TOML value; tables nest, as in `model.rope_scaling.factor=8.0`.
      tables: which ones there must be.
      other: what a file with other tables might be.
    Raises:
      ConfigError: not TOML, other tables, or an override that names no field.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(str(path), str(e), "valid TOML") from e
    if set(data) != set(tables) or not all(isinstance(table, dict) for table in data.values()):
        raise ConfigError(f"{path.name}: tables", sorted(data), "exactly " + ", ".join(sorted(tables)), other)
    for item in overrides:
        _override(data, item)
    return data


def _override(data: dict[str, Any], item: str) -> None:
    key, eq, text = item.partition("=")
    *tables, name = key.split(".")
    table: Any = data
    for part in tables:
        table = table.get(part) if isinstance(table, dict) else None
    if not (eq and tables and isinstance(table, dict) and name in table):
        raise ConfigError("--set", item, "table.field=value with a field of the recipe")
    try:
        value = tomllib.loads(f"x = {text}")
    except tomllib.TOMLDecodeError as e:
        raise ConfigError("--set", item, 'a TOML value, such as 3, 1e-3 or "text"') from e
    if set(value) != {"x"}:
        raise ConfigError("--set", item, "one value")
    table[name] = value["x"]


def read_table[T](cls: type[T], table: dict[str, Any], where: str) -> T:
    """A dataclass from a TOML table that has exactly its fields. ConfigError names the first that is at fault."""
    kinds = typing.get_type_hints(cls)
    for name in sorted(set(table) ^ set(kinds)):
        found = "no such field" if name in table else "missing"
        raise ConfigError(f"{where}.{name}", found, "fields " + ", ".join(kinds))
    return cls(**{name: _value(table[name], kind, f"{where}.{name}") for name, kind in kinds.items()})


_LISTS = {tuple[str, ...]: (str, "a list of strings"), tuple[int, ...]: (int, "a list of integers")}
_LISTS |= {tuple[float, ...]: (float, "a list of numbers")}
_NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


def _value(value: Any, kind: Any, where: str) -> Any:
    """`value` as a field's type: int, float, str, bool, a tuple of one of them, or a Literal of strings."""
    if isinstance(kind, typing.TypeAliasType):
        kind = kind.__value__
    if typing.get_origin(kind) is Literal:
        allowed = typing.get_args(kind)
        if value not in allowed:
            raise ConfigError(where, value, " or ".join(map(repr, allowed)))
        return value
    if kind in _LISTS:
        item, expected = _LISTS[kind]
        numbers = (int, float) if item is float else (item,)
        if type(value) is not list or not all(type(v) in numbers for v in value):
            raise ConfigError(where, value, expected)
        return tuple(item(v) for v in value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ConfigError(where, value, _NAMES[kind])
    return value
