"""Reading JSON objects strictly: each key is asked for by name and type; one that nobody asked for is an error."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from .errors import ConfigError


class Reader:
    """Reads keys of one JSON object and remembers which; `finish` refuses the rest."""

    def __init__(self, data: object, where: str) -> None:
        """`where`: the object's name in errors, such as `config.text_config`. ConfigError if `data` is no object."""
        if not isinstance(data, Mapping):
            raise ConfigError(where, data, "a JSON object")
        self.data = cast(Mapping[str, Any], data)
        self.where = where
        self.seen = set[str]()

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """The value, of that type (an integer will do for a float). ConfigError if it is mistyped, or missing without
        a default."""
        self.seen.add(key)
        name = f"{self.where}.{key}"
        if key not in self.data:
            if default is ...:
                raise ConfigError(name, "no such key", "a value", "the checkpoint's config.json is not of this family")
            return default
        value = self.data[key]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if float in kinds and type(value) is int:
            value = float(value)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ConfigError(name, value, " or ".join(k.__name__ for k in kinds))
        return value

    def positive(self, key: str, default: Any = ...) -> int:
        """A positive integer."""
        value: int = self.get(key, int, default)
        if value <= 0:
            raise ConfigError(f"{self.where}.{key}", value, "a positive integer")
        return value

    def one_of(self, key: str, allowed: tuple[Any, ...], default: Any = ..., fix: str = "") -> Any:
        """One of the values that are implemented. 1 and 1.0 are the same, 1 and true are not."""
        self.seen.add(key)
        value = self.data.get(key, default)
        if value is ... or not any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed):
            found = "no such key" if value is ... else value
            expected = "one of " if len(allowed) > 1 else ""
            raise ConfigError(f"{self.where}.{key}", found, expected + ", ".join(map(repr, allowed)), fix)
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them; none where the key is missing or null."""
        found: Any = self.get(key, (int, list, type(None)), None)
        ids: list[Any] = [] if found is None else [found] if isinstance(found, int) else found
        if not all(type(i) is int and i >= 0 for i in ids):
            raise ConfigError(f"{self.where}.{key}", found, "a token id or a list of token ids")
        return tuple(ids)

    def finish(self, harmless: frozenset[str] = frozenset()) -> None:
        """Refuse the first key that was neither read nor is known to be harmless."""
        for key in sorted(self.data.keys() - self.seen - harmless):
            raise ConfigError(
                f"{self.where}.{key}",
                self.data[key],
                "no such field",
                "kimijax neither reads it nor knows it to be harmless, and it might change the output",
            )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`; errors name the file."""
    if not path.is_file():
        raise ConfigError(str(path), "no such file", "a JSON file", "point at a checkpoint directory")
    try:
        data: object = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(str(path), str(e), "valid JSON") from e
    if not isinstance(data, dict):
        raise ConfigError(str(path), type(data).__name__, "a JSON object")
    return cast(dict[str, Any], data)
