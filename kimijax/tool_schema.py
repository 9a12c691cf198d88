"""Tool declarations as Kimi-K2.5 was trained on them: TypeScript text made from OpenAI-style JSON schemas.

The text is that of the encoder which accompanies the checkpoint, byte for byte wherever that encoder gives a text (and
leaves no reference dangling), its oddities included, because a model reads best what it was trained on: `True` and
`None` in their Python spelling, no escapes inside string literals, a lone `{}` for parameters that are no plain object,
and an `interface` for each definition found outside of other definitions. Where that encoder gives up (and its caller
silently sends JSON instead), the text here goes on in the same manner: `const`, `oneOf`, `allOf`, schemas without a
type, references to any place inside the schema. What cannot be followed, a reference to another document for instance,
is a RequestError.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from .errors import RequestError
from .messages import nested_deeper

_INDENT = "  "
_MAX_DEPTH = 64

# Constraints shown in a comment above a property, by JSON type.
_CONSTRAINTS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
# Types inside a union, where the encoder has no room for their fields.
_BARE_TYPES = {"integer": "number", "object": "{}", "array": "Array<any>"}

_NAMED_SECTIONS = ("$defs", "definitions", "properties")
ROOT_INTERFACE = "parameters"


def deep_sorted(value: Any) -> Any:
    """Copy JSON data with the keys of every object sorted; lists keep their order."""
    if isinstance(value, Mapping):
        return {k: deep_sorted(value[k]) for k in sorted(value)}
    if isinstance(value, list | tuple):
        return [deep_sorted(v) for v in value]
    return value


def declare_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the declaration text of `tools` ({"type": "function", "function": {name, description, parameters}}).

    The order of keys does not matter, the order of tools does. No tools give "". RequestError names the tool and the
    place in its schema that is malformed or cannot be expressed.
    """
    if not tools:
        return ""
    functions = []
    for i, tool in enumerate(tools):
        functions.append(_function_text(sorted_tool(tool, f"tools[{i}]")["function"], f"tools[{i}].function"))
    return "# Tools\n\n## functions\nnamespace functions {\n" + "\n".join(functions) + "\n}\n"


def sorted_tool(tool: Any, at: str) -> dict[str, Any]:
    """Return one tool with all keys sorted; RequestError unless it is a function with a name."""
    kind = tool.get("type") if isinstance(tool, Mapping) else type(tool).__name__
    if kind != "function":
        raise RequestError("tools", f"{at}.type: found {kind!r}, expected 'function'; no other kind of tool is known")
    function = tool.get("function")
    if not isinstance(function, Mapping) or not (isinstance(function.get("name"), str) and function["name"]):
        raise RequestError("tools", f"{at}.function: expected an object with a `name`, found {function!r}")
    if nested_deeper(tool, 4 * _MAX_DEPTH):
        raise RequestError("tools", f"{at}: nested deeper than {4 * _MAX_DEPTH} levels of JSON")
    return deep_sorted(tool)


@dataclass
class _Scope:
    """The named schemas of one tool: `interfaces` to print, in order; `known`, which `#/$defs/NAME` refers to."""

    root: Mapping[str, Any]
    interfaces: dict[str, Any] = field(default_factory=dict)
    known: dict[str, Any] = field(default_factory=dict)
    by_pointer: dict[str, str] = field(default_factory=dict)
    root_is_named: bool = False

    def name_of(self, ref: Any, at: str) -> str:
        """Name of the interface that a `$ref` stands for; makes one for a place that has no name of its own."""
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise RequestError(
                "tools", f"{at}.$ref: found {ref!r}, expected a reference inside the schema, like '#/$defs/Name'"
            )
        if ref == "#":
            return ROOT_INTERFACE
        parts = [unquote(p).replace("~1", "/").replace("~0", "~") for p in ref[2:].split("/")]
        if len(parts) == 2 and parts[0] == "$defs" and parts[1] in self.known:
            return parts[1]
        if ref not in self.by_pointer:
            target: Any = self.root
            for part in parts:
                inside = target[int(part)] if _is_index(part, target) else None
                target = target.get(part) if isinstance(target, Mapping) else inside
            if not isinstance(target, Mapping | bool):
                raise RequestError("tools", f"{at}.$ref: {ref!r} leads to no schema")
            base = name = "_".join(p for p in parts if p not in _NAMED_SECTIONS) or "definition"
            n = 1
            while name in self.interfaces or name in self.known or name == ROOT_INTERFACE:
                n += 1
                name = f"{base}_{n}"
            self.by_pointer[ref] = name
            self.interfaces[name] = target
        return self.by_pointer[ref]


def _is_index(part: str, target: Any) -> bool:
    return isinstance(target, list) and part.isdecimal() and int(part) < len(target)


def _function_text(function: Mapping[str, Any], at: str) -> str:
    """One tool: its interfaces, its description as comment lines, and its `type NAME = (_: {...}) => any;` line."""
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, Mapping):
        raise RequestError("tools", f"{at}.parameters: found {parameters!r}, expected a JSON schema of type object")
    at_parameters = f"{at}.parameters"
    scope = _Scope(parameters)
    _note_definitions(parameters, scope, at_parameters, is_object=True)
    scope.interfaces = dict(scope.known)

    argument = ROOT_INTERFACE if scope.root_is_named else _object_text(parameters, scope, "", at_parameters)
    interfaces = []
    if scope.root_is_named:
        # The encoder prints these fields by name alone: neither required ones first nor additionalProperties.
        fields = [text for _, text in _properties(parameters, scope, _INDENT, at_parameters)]
        body = "\n" + ",\n".join(fields) + "\n" if fields else ""
        interfaces.append(f"interface {ROOT_INTERFACE} {{{body}}}")
    done: set[str] = set()
    while left := [name for name in scope.interfaces if name not in done]:  # printing one may name another
        for name in left:
            schema, here = scope.interfaces[name], f"{at_parameters}.$defs.{name}"
            interfaces.append(f"{_description(schema, '', here)}interface {name} {_type_text(schema, scope, '', here)}")
            done.add(name)

    about = _description(function, "", at).removesuffix("\n")
    declaration = f"type {function['name']} = (_: {argument}) => any;"
    return "\n".join(part for part in (*interfaces, about, declaration) if part)


def _children(schema: Any, is_object: bool = False) -> Iterator[Any]:
    """Schemas directly inside one, in the encoder's order of reading; what its text leaves out is left out."""
    if not isinstance(schema, Mapping):
        return
    kind = "object" if is_object else _kind(schema)
    if kind in ("anyOf", "oneOf", "allOf"):
        yield from schema[kind] if isinstance(schema[kind], list) else ()
    elif kind == "array":
        yield schema.get("items")
    elif kind == "object":
        yield schema.get("additionalProperties")
        properties = schema.get("properties")
        yield from properties.values() if isinstance(properties, Mapping) else ()


def _note_definitions(schema: Any, scope: _Scope, at: str, *, is_object: bool = False, depth: int = 0) -> None:
    """Find the `$defs` of all objects outside of definitions, and whether a reference leads to the root itself."""
    if not isinstance(schema, Mapping):
        return
    if depth > _MAX_DEPTH:
        raise RequestError("tools", f"{at}: nested deeper than {_MAX_DEPTH} levels")
    if is_object or _kind(schema) == "object":
        definitions = schema.get("$defs") or {}
        if not isinstance(definitions, Mapping):
            raise RequestError("tools", f"{at}.$defs: found {definitions!r}, expected an object")
        scope.known.update(definitions)
    if not is_object and schema.get("$ref") == "#":
        scope.root_is_named = True
    for child in _children(schema, is_object):
        _note_definitions(child, scope, at, depth=depth + 1)


def _kind(schema: Mapping[str, Any]) -> str:
    """Which keyword decides about the text of a schema: first in the encoder's order, then the extensions."""
    for keyword in ("$ref", "anyOf", "enum"):
        if keyword in schema:
            return keyword
    if "type" in schema:
        declared = schema["type"]
        if isinstance(declared, list):
            return "union"
        return declared if declared in ("object", "array") else "scalar"
    for keyword in ("const", "oneOf", "allOf"):
        if keyword in schema:
            return keyword
    if "properties" in schema or "additionalProperties" in schema:
        return "object"
    return "array" if "items" in schema else "any"


def _type_text(schema: Any, scope: _Scope, indent: str, at: str) -> str:
    """The type expression of a schema whose line is indented by `indent`."""
    if len(indent) > _MAX_DEPTH * len(_INDENT):
        raise RequestError("tools", f"{at}: nested deeper than {_MAX_DEPTH} levels")
    if isinstance(schema, bool):
        return "any" if schema else "null"
    if not isinstance(schema, Mapping):
        raise RequestError("tools", f"{at}: found {schema!r}, expected a JSON schema")
    kind = _kind(schema)
    match kind:
        case "$ref":
            return scope.name_of(schema["$ref"], at)
        case "anyOf" | "oneOf" | "allOf":
            options = _list(schema, kind, at)
            separator = " & " if kind == "allOf" else " | "
            return separator.join(_type_text(o, scope, indent, f"{at}.{kind}[{i}]") for i, o in enumerate(options))
        case "enum":
            return " | ".join(_literal(v) for v in _list(schema, kind, at))
        case "const":
            return _literal(schema["const"])
        case "union":
            return " | ".join(_BARE_TYPES.get(str(t), str(t)) for t in _list(schema, "type", at))
        case "object":
            return _object_text(schema, scope, indent, at)
        case "array":
            return _array_text(schema, scope, indent, at)
        case "any":
            return "any"
    return "number" if schema["type"] == "integer" else str(schema["type"])


def _list(schema: Mapping[str, Any], key: str, at: str) -> list[Any]:
    value = schema[key]
    if not isinstance(value, list) or not value:
        raise RequestError("tools", f"{at}.{key}: found {value!r}, expected a list with at least one entry")
    return value


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _properties(schema: Mapping[str, Any], scope: _Scope, indent: str, at: str) -> list[tuple[bool, str]]:
    """(is optional, text with its comments) of each property of an object, in the order of the schema."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping):
        raise RequestError("tools", f"{at}.properties: found {properties!r}, expected an object")
    if not isinstance(required, list):
        raise RequestError("tools", f"{at}.required: found {required!r}, expected a list of property names")
    found = []
    for name, value in properties.items():
        here = f"{at}.properties.{name}"
        text = _comments(value, indent, here)
        default = value.get("default") if isinstance(value, Mapping) else None
        if default is not None:
            text += f"{indent}// Default: {_default(default)}\n"
        optional = name not in required
        text += f"{indent}{name}{'?' if optional else ''}: {_type_text(value, scope, indent, here)}"
        found.append((optional, text))
    return found


def _object_text(schema: Mapping[str, Any], scope: _Scope, indent: str, at: str) -> str:
    inner = indent + _INDENT
    # The keys are sorted already and sort() is stable: required fields first, each group by name.
    fields = [text for _, text in sorted(_properties(schema, scope, inner, at), key=lambda p: p[0])]
    additional = schema.get("additionalProperties")
    if additional is not None:
        value = "never" if additional is False else _type_text(additional, scope, inner, f"{at}.additionalProperties")
        fields.append(f"{inner}[k: string]: {value}")
    return "{\n" + ",\n".join(fields) + f"\n{indent}}}" if fields else "{}"


def _array_text(schema: Mapping[str, Any], scope: _Scope, indent: str, at: str) -> str:
    """Array<T>, on lines of its own where T has comments."""
    items, here = schema.get("items") or {}, f"{at}.items"
    inner = indent + _INDENT
    if comments := _comments(items, inner, here):
        return f"Array<\n{comments}{inner}{_type_text(items, scope, inner, here)}\n{indent}>"
    return f"Array<{_type_text(items, scope, indent, here)}>"


def _default(value: Any) -> str:
    # Numbers and truth values are printed as Python prints them, everything else as JSON.
    return repr(value) if isinstance(value, int | float) else json.dumps(value, ensure_ascii=False)


def _description(schema: Any, indent: str, at: str) -> str:
    """The description as comment lines, each with its newline; blank lines stay blank."""
    text = (schema.get("description") or "") if isinstance(schema, Mapping) else ""
    if not isinstance(text, str):
        raise RequestError("tools", f"{at}.description: found {text!r}, expected a string")
    return "".join((f"{indent}// {line}" if line else "") + "\n" for line in text.split("\n")) if text else ""


def _comments(schema: Any, indent: str, at: str) -> str:
    """Comment lines above a property or an array's item: description, then constraints by name."""
    if not isinstance(schema, Mapping):
        return ""
    kind = _kind(schema)
    declared = schema["type"] if kind == "scalar" else kind
    names = _CONSTRAINTS.get(declared, ()) if isinstance(declared, str) else ()
    shown = ", ".join(f"{n}: {schema[n]}" for n in names if n in schema)
    return _description(schema, indent, at) + (f"{indent}// {shown}\n" if shown else "")
