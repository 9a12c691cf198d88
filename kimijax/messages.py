"""OpenAI-style chat messages: checked, and brought to the one form that chat templates get to see.

In that form `content` is always a string (null, absent and empty content are "", text parts are joined as Kimi's own
templates join them), absent fields are absent instead of null, and a tool result names a call made before it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .errors import RequestError

# OpenAI renamed "system" to "developer"; Kimi was trained on the former name.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_JSON_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_MAX_DEPTH = 100  # of arguments given as an object
_REASONING_FIELDS = ("reasoning_content", "reasoning")


def _refuse(at: str, found: object, expected: str) -> RequestError:
    return RequestError("messages", f"{at}: found {found!r}, expected {expected}")


def nested_deeper(value: Any, limit: int) -> bool:
    """Whether JSON data has more than `limit` levels of lists and objects; never recurses deeper itself."""
    if not isinstance(value, Mapping | list | tuple):
        return False
    inner = value.values() if isinstance(value, Mapping) else value
    return limit <= 0 or any(nested_deeper(v, limit - 1) for v in inner)


def normalised(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Check a conversation and return it in the templates' form; fields that are none of a template's are left out."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise _refuse("messages", messages, "a list with at least one message")
    out: list[dict[str, Any]] = []
    called: set[str] = set()
    for i, message in enumerate(messages):
        at = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise _refuse(at, message, "an object with `role` and `content`")
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise _refuse(f"{at}.role", role, f"one of {', '.join(_ROLES)}")
        turn: dict[str, Any] = {"role": _ROLES[role], "content": _content(message.get("content"), f"{at}.content")}
        if (name := _text(message, "name", at)) is not None:
            turn["name"] = name
        if role == "assistant":
            turn |= _assistant_fields(message, at)
            called.update(call["id"] for call in turn.get("tool_calls", ()))
        elif message.get("tool_calls"):
            raise _refuse(f"{at}.tool_calls", role, "tool calls in assistant messages only")
        if role == "tool":
            call_id = _text(message, "tool_call_id", at)
            if call_id is None or call_id not in called:
                raise _refuse(f"{at}.tool_call_id", call_id, f"the id of an earlier tool call: {sorted(called)}")
            turn["tool_call_id"] = call_id
        out.append(turn)
    return out


def _text(message: Mapping[str, Any], key: str, at: str) -> str | None:
    value = message.get(key)
    if value is not None and not isinstance(value, str):
        raise _refuse(f"{at}.{key}", value, "a string")
    return value


def _content(content: Any, at: str) -> str:
    """String form of a `content` field. RequestError names a part that is no text: vision is not served."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        raise _refuse(at, content, "a string, null or a list of text parts")
    texts = []
    for j, part in enumerate(content):
        here = f"{at}[{j}]"
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise RequestError("messages", f"{here}: found a part of type {kind!r}; only text parts are served")
        if (text := _text(part, "text", here)) is None:
            raise _refuse(f"{here}.text", None, "a string")
        texts.append(text)
    return "".join(texts)


def _assistant_fields(message: Mapping[str, Any], at: str) -> dict[str, Any]:
    """Reasoning (under either of its two names) and tool calls of an assistant message, where present."""
    fields: dict[str, Any] = {}
    reasoning = {text for key in _REASONING_FIELDS if (text := _text(message, key, at)) is not None}
    if len(reasoning) > 1:
        raise _refuse(f"{at}.reasoning", sorted(reasoning), "what `reasoning_content` says, or only one of the two")
    if reasoning:
        fields["reasoning_content"] = reasoning.pop()
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list | tuple):
        raise _refuse(f"{at}.tool_calls", calls, "a list of tool calls")
    if calls:
        fields["tool_calls"] = [_call(call, f"{at}.tool_calls[{j}]") for j, call in enumerate(calls)]
    return fields


def _call(call: Any, at: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise _refuse(at, call, "an object with `id` and `function`")
    if call.get("type", "function") != "function":
        raise _refuse(f"{at}.type", call["type"], "'function'")
    call_id, name = _text(call, "id", at), _text(function, "name", f"{at}.function")
    if not call_id:
        raise _refuse(f"{at}.id", call_id, "the id that the tool's result names, like 'functions.NAME:0'")
    if not name:
        raise _refuse(f"{at}.function.name", name, "the name of the function")
    arguments = function.get("arguments")
    if not isinstance(arguments, str | Mapping):
        raise _refuse(f"{at}.function.arguments", arguments, "a JSON string or an object")
    if nested_deeper(arguments, _MAX_DEPTH):
        raise RequestError("messages", f"{at}.function.arguments: nested deeper than {_MAX_DEPTH} levels")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def in_call_order(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Bring each run of tool results into the order of the calls, for templates that pair the two by position.

    RequestError if results are missing in between: such a template would put a result under another call's name.
    """
    out: list[dict[str, Any]] = []
    waiting: list[str] = []
    i = 0
    while i < len(turns):
        run: list[dict[str, Any]] = []
        while i < len(turns) and turns[i]["role"] == "tool":
            run.append(turns[i])
            i += 1
        for expected in waiting[: len(run)]:
            at = next((k for k, turn in enumerate(run) if turn["tool_call_id"] == expected), None)
            if at is None:
                found = [turn["tool_call_id"] for turn in run]
                raise _refuse("messages", found, f"the result of {expected!r} first: this template pairs them in order")
            out.append(run.pop(at))
            waiting = waiting[1:]
        if run:
            raise _refuse("messages", run[0]["tool_call_id"], "one result for each tool call, not more")
        if i < len(turns):
            waiting += [call["id"] for call in turns[i].get("tool_calls", ())]
            out.append(turns[i])
            i += 1
    return out


_KEPT_FIELDS = ("role", "type")  # templates compare these with constants; `normalised` admits known values only


def replaced(message: Any, table: Mapping[int, int], key_chars: frozenset[str] | None = None) -> Any:
    """Copy a message or tool with every text passed through str.translate(table).

    Field names and the fields in `_KEPT_FIELDS` of a message, its calls and its functions stay. `key_chars` None: a
    message, where keys inside `arguments` are text; otherwise a tool, where keys without any of these characters stay,
    and so do the names of JSON types, which templates that write out schemas compare with constants.
    """
    if key_chars is not None:
        return _translated(message, table, key_chars)
    out: dict[str, Any] = {}
    for key, value in message.items():
        if key in _KEPT_FIELDS:
            out[key] = value
        elif key == "tool_calls":
            out[key] = [replaced(call, table) for call in value]
        elif key == "function":
            out[key] = {k: _translated(v, table, None) for k, v in value.items()}
        else:
            out[key] = _translated(value, table, None)
    return out


def _translated(value: Any, table: Mapping[int, int], key_chars: frozenset[str] | None) -> Any:
    if isinstance(value, str):
        return value if key_chars is not None and value in _JSON_TYPES else value.translate(table)
    if isinstance(value, Mapping):
        keep = (lambda key: key_chars.isdisjoint(key)) if key_chars is not None else (lambda key: False)
        return {
            (k if not isinstance(k, str) or keep(k) else k.translate(table)): _translated(v, table, key_chars)
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [_translated(v, table, key_chars) for v in value]
    return value


def all_strings(value: Any) -> Iterator[str]:
    """Every string inside JSON-like data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for k, v in value.items():
            yield from all_strings(k)
            yield from all_strings(v)
    elif isinstance(value, list | tuple):
        for v in value:
            yield from all_strings(v)
