"""TypeScript tool declarations, against texts made by another port of the checkpoint's encoder (fixtures/)."""

import json
from pathlib import Path
from typing import Any

import pytest

from kimijax.errors import RequestError
from kimijax.tool_schema import declare_tools, deep_sorted
from tests.toy_tokenizer import real_data

FIXTURES = Path(__file__).parent / "fixtures"
GOLDEN: list[dict[str, Any]] = json.loads((FIXTURES / "tool_schema_golden.json").read_text(encoding="utf-8"))

TIDE = {
    "type": "function",
    "function": {
        "name": "lookup_tide",
        "description": "Tide height.\nMetres.",
        "parameters": {
            "type": "object",
            "properties": {
                "unit": {"type": "string", "enum": ["m", "ft"]},
                "port": {"type": "string", "description": "Port code"},
                "day": {"type": "integer", "minimum": 1, "maximum": 31, "default": 1},
            },
            "required": ["port"],
        },
    },
}
TIDE_TEXT = (
    "# Tools\n\n## functions\nnamespace functions {\n// Tide height.\n// Metres.\ntype lookup_tide = (_: {\n"
    "  // Port code\n  port: string,\n  // maximum: 31, minimum: 1\n  // Default: 1\n  day?: number,\n"
    '  unit?: "m" | "ft"\n}) => any;\n}\n'
)


def tool(parameters: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **fields}}


def body(parameters: Any) -> str:
    """The declaration of one tool, without the frame around it."""
    head, tail = "# Tools\n\n## functions\nnamespace functions {\n", "\n}\n"
    text = declare_tools([tool(parameters)])
    assert text.startswith(head)
    assert text.endswith(tail)
    return text.removeprefix(head).removesuffix(tail)


def property_type(schema: Any) -> str:
    return (
        body({"type": "object", "properties": {"v": schema}})
        .removeprefix("type f = (_: {\n")
        .removesuffix("\n}) => any;")
    )


def reversed_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: reversed_keys(value[k]) for k in reversed(value)}
    return [reversed_keys(v) for v in value] if isinstance(value, list) else value


def test_worked_example_in_any_order_of_keys() -> None:
    assert declare_tools([TIDE]) == TIDE_TEXT
    assert declare_tools([reversed_keys(TIDE)]) == TIDE_TEXT
    assert declare_tools([deep_sorted(TIDE)]) == TIDE_TEXT


def test_no_tools_give_no_text_and_several_keep_their_order() -> None:
    assert declare_tools([]) == ""
    text = declare_tools([tool({}), {"type": "function", "function": {"name": "a"}}])
    assert (
        text
        == "# Tools\n\n## functions\nnamespace functions {\ntype f = (_: {}) => any;\ntype a = (_: {}) => any;\n}\n"
    )


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda g: json.dumps(g["parameters"])[:60])
def test_equals_the_reference_encoder(golden: dict[str, Any]) -> None:
    assert declare_tools([tool(golden["parameters"], description="First line.\n\nThird line.")]) == golden["text"]


def test_every_vendor_schema_can_be_declared() -> None:
    folder = real_data("tool_schema_cases")
    if folder is None:
        pytest.skip("the vendor's schema cases (../shared/data/tool_schema_cases) are not here")
    schemas = [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]
    assert len(schemas) > 200
    for schema in schemas:
        definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
        assert body(schema).count("\ntype f = ") + body(schema).startswith("type f = ") == 1
        assert body({"type": "object", "properties": {"v": schema}, **definitions}).endswith(") => any;")


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"const": "a"}, '  v?: "a"'),
        ({"const": 3}, "  v?: 3"),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, "  v?: string | null"),
        ({"allOf": [{"type": "object"}, {"enum": [1]}]}, "  v?: {} & 1"),
        ({"description": "What you like."}, "  // What you like.\n  v?: any"),
        ({"properties": {"x": {"type": "string"}}}, "  v?: {\n    x?: string\n  }"),
        ({"items": {"type": "integer"}}, "  v?: Array<number>"),
        ({"enum": ["a", None, True, 1.5]}, '  v?: "a" | None | True | 1.5'),
        ({"type": "boolean", "default": False}, "  // Default: False\n  v?: boolean"),
        ({"type": "string", "default": "é"}, '  // Default: "é"\n  v?: string'),
        (True, "  v?: any"),
    ],
)
def test_types_of_a_property(schema: Any, text: str) -> None:
    assert property_type(schema) == text


def test_references_to_places_without_a_name_become_interfaces() -> None:
    schema = {
        "type": "object",
        "$defs": {
            "group": {"type": "array", "items": {"type": "object", "properties": {"a": {"$ref": "#/$defs/A~1B"}}}}
        },
        "definitions": {"A/B": {"type": "string"}},
        "properties": {"one": {"$ref": "#/$defs/group/items"}, "two": {"$ref": "#/definitions/A~1B"}},
    }
    with pytest.raises(RequestError, match=r"'#/\$defs/A~1B' leads to no schema"):
        body(schema)
    schema["$defs"]["group"]["items"]["properties"]["a"]["$ref"] = "#/definitions/A~1B"
    assert body(schema) == (
        "interface group Array<{\n  a?: A/B\n}>\ninterface group_items {\n  a?: A/B\n}\ninterface A/B string\n"
        "type f = (_: {\n  one?: group_items,\n  two?: A/B\n}) => any;"
    )


def test_recursion_through_the_root_names_the_parameters() -> None:
    schema = {
        "type": "object",
        "properties": {"z": {"type": "string"}, "next": {"$ref": "#"}},
        "required": ["z"],
        "additionalProperties": False,
    }
    assert body(schema) == (
        "interface parameters {\n  next?: parameters,\n  z: string\n}\ntype f = (_: parameters) => any;"
    )


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"v": schema}}
    return schema


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"type": "retrieval"}, r"tools\[0\].type: found 'retrieval', expected 'function'"),
        ("x", r"tools\[0\].type: found 'str'"),
        ({"type": "function", "function": {}}, r"tools\[0\].function: expected an object with a `name`"),
        (tool([]) | {"function": {"name": "f", "parameters": ["x"]}}, r"tools\[0\].function.parameters: found \['x'\]"),
        (tool({"properties": []}), "properties: found"),
        (tool({"properties": {"v": "string"}}), r"parameters.properties.v: found 'string', expected a JSON schema"),
        (tool({"properties": {"v": {"enum": []}}}), r"v.enum: found \[\], expected a list"),
        (tool({"properties": {"v": {"anyOf": {}}}}), "v.anyOf: found {}, expected a list"),
        (tool({"properties": {"v": {"type": "string", "description": 3}}}), "v.description: found 3"),
        (tool({"properties": {"v": {"$ref": "http://x.org/s.json"}}}), "expected a reference inside the schema"),
        (tool({"properties": {"v": {"$ref": "#/$defs/Gone"}}}), "leads to no schema"),
        (tool({"required": "v", "properties": {"v": {}}}), "required: found 'v', expected a list"),
        (tool({"$defs": []} | {"properties": {}, "$defs": ["x"]}), r"\$defs: found \['x'\]"),
        (tool(nested(70)), "nested deeper than 64 levels"),
        (tool(nested(5000)), "nested deeper than 256 levels of JSON"),
    ],
)
def test_what_cannot_be_declared_is_refused_by_place(bad: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as e:
        declare_tools([bad])
    assert e.value.field == "tools"


def test_depth_counts_arrays_and_unions_too() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        schema = {"anyOf": [{"type": "array", "items": schema}]}
    with pytest.raises(RequestError, match="nested deeper"):
        body({"type": "object", "properties": {"v": schema}})
