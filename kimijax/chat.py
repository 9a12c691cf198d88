"""Conversations to prompts: the checkpoint's own Jinja template, rendered so that no message can forge a turn.

The reference renders a conversation to one string and tokenises it with every control token allowed, so `<|im_end|>`
typed by a user would end the user's turn. Here template text and message text are kept apart:

1. the template is rendered with the conversation as it is, which gives the prompt's text;
2. it is rendered again with every character of message text that occurs in the name of any control token replaced,
   one for one, by a private-use character that occurs nowhere else. No control token can now begin in, end in or run
   through message text, also not across two messages or parts that the template puts side by side;
3. undoing the replacement must give the text of step 1. It does unless the template computes on what messages say, in
   which case nothing can be told apart any more and the request is refused with a TemplateError;
4. the control tokens found in the second rendering are the template's own; the text between two of them, of whatever
   origin, is encoded in one piece as plain text. For messages without control-token text the ids are the reference's.
"""

import copy
import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from jinja2.sandbox import SandboxedEnvironment

from .errors import RequestError, TemplateError
from .messages import all_strings, in_call_order, normalised, replaced
from .tokenizer import Tokenizer, read_json_object
from .tool_schema import declare_tools, sorted_tool

# What encode() itself passes to a template; a caller may not pass these as template_kwargs.
_OWN_VARIABLES = ("messages", "tools", "tools_ts_str", "add_generation_prompt", "thinking")
_TOKEN_VARIABLES = ("bos_token", "eos_token", "unk_token", "pad_token")
_CALL_MARK = "<|tool_call_begin|>"

# Supplementary private-use planes, in blocks; the first block whose characters occur nowhere in a request is used.
_PRIVATE_BLOCKS = range(0xF0000, 0x10FF00, 0x100)
_BLOCK_SIZE = 0x100


@dataclass(frozen=True)
class EncodedPrompt:
    """A rendered conversation. `spans`: [start, end) into `ids` for each assistant message, in order: its body after
    `<|im_middle|>`, up to and with its `<|im_end|>`. Empty where the tokenizer has no such turn marks."""

    ids: tuple[int, ...]
    text: str
    spans: tuple[tuple[int, int], ...]


class _Refused(jinja2.TemplateError):
    """Raised by a template's own raise_exception()."""


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes < > & ' and non-ASCII characters for HTML; templates are written for plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> SandboxedEnvironment:
    """Jinja as chat templates expect it (the options that transformers uses), unable to touch anything outside.

    transformers uses the immutable sandbox, in which the K2 and K2-Thinking templates fail at the first tool call: they
    keep a list of call ids with append() and pop(). So lists are mutable here, and a rendering gets its own copies.
    """
    env = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], autoescape=False
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


def _read_source(folder: Path) -> str:
    """The template text of a checkpoint folder; TemplateError if there is none."""
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = read_json_object(config).get("chat_template") if config.is_file() else None
    if not isinstance(found, str):
        raise TemplateError(
            f"{folder}: found no chat_template.jinja and no `chat_template` string in tokenizer_config.json; "
            "without one only token ids and plain completions can be served"
        )
    return found


class ChatTemplate:
    """A compiled chat template with the tokenizer it writes for. Safe to use from several threads."""

    def __init__(self, source: str, tokenizer: Tokenizer, named_tokens: Mapping[str, str] | None = None) -> None:
        """`named_tokens`: texts for `bos_token` and the like. TemplateError if the source is no Jinja template."""
        env = _environment()
        try:
            self._template = env.from_string(source)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(env.parse(source)))
        except jinja2.TemplateSyntaxError as e:
            raise TemplateError(f"chat template, line {e.lineno}: {e.message}") from e
        self._source = source
        self._tokenizer = tokenizer
        self._named_tokens = dict(named_tokens or {})
        self._marked_chars = sorted(set("".join(tokenizer.special_ids)))
        self._first_chars = frozenset(name[0] for name in tokenizer.special_ids)
        if len(self._marked_chars) > _BLOCK_SIZE:
            raise TemplateError(f"control-token names use more than {_BLOCK_SIZE} different characters")
        self._pairs_by_position = self._finds_results_by_position()

    @classmethod
    def from_dir(cls, path: str | Path, tokenizer: Tokenizer | None = None) -> "ChatTemplate":
        """Read `chat_template.jinja`, or the `chat_template` of tokenizer_config.json, of a checkpoint folder."""
        folder = Path(path)
        source = _read_source(folder)
        config = read_json_object(folder / "tokenizer_config.json")
        named = {name: config[name] for name in _TOKEN_VARIABLES if isinstance(config.get(name), str)}
        return cls(source, tokenizer or Tokenizer.from_dir(folder), named)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        thinking: bool = True,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The prompt as text, equal to what the reference renders. Errors as for `encode`."""
        return self._checked_text(self._context(messages, tools, thinking, add_generation_prompt, template_kwargs))

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        thinking: bool = True,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> EncodedPrompt:
        """Render and tokenise a conversation (OpenAI chat form).

        Ids of tool calls are kept or rewritten as the template does it; a result always stands under the call that its
        `tool_call_id` names. `thinking=False` asks for an answer without reasoning. RequestError: a message, tool or
        template argument that cannot be rendered as meant. TemplateError: the template fails, or treats message text
        such that it cannot be told from the template's own.
        """
        context = self._context(messages, tools, thinking, add_generation_prompt, template_kwargs)
        text = self._checked_text(context)
        mask = self._mask(context)
        masked = self._run(self._masked(context, mask))
        if masked.translate({new: old for old, new in mask.items()}) != text:
            raise TemplateError(
                "the chat template computes on what messages say, so its control tokens cannot be told from control "
                "tokens written in a message; use a template that prints messages unchanged"
            )
        ids: list[int] = []
        done = 0
        for match in self._tokenizer.special_pattern.finditer(masked):
            ids += self._tokenizer.encode(text[done : match.start()])
            ids.append(self._tokenizer.special_ids[match[0]])
            done = match.end()
        ids += self._tokenizer.encode(text[done:])
        n_assistant = sum(m["role"] == "assistant" for m in context["messages"])
        return EncodedPrompt(tuple(ids), text, self._assistant_spans(ids, n_assistant))

    def _context(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        thinking: bool,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The variables of one rendering, checked."""
        for name, value in template_kwargs.items():
            self._check_argument(name, value)
        if not thinking and "thinking" not in self.variables and "<think>" in self._source:
            raise RequestError(
                "thinking", "found false, but this checkpoint's chat template always asks for reasoning; leave it on"
            )
        turns = normalised(messages)
        if self._pairs_by_position:
            turns = in_call_order(turns)
        context: dict[str, Any] = {
            **self._named_tokens,
            **template_kwargs,
            "messages": turns,
            "tools": None,
            "add_generation_prompt": add_generation_prompt,
            "thinking": thinking,
        }
        if tools:
            context["tools"] = [sorted_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
            if "tools_ts_str" in self.variables:
                context["tools_ts_str"] = declare_tools(tools)
        return context

    def _check_argument(self, name: str, value: Any) -> None:
        field = f"chat_template_kwargs.{name}"
        known = sorted(self.variables - set(_OWN_VARIABLES) - set(_TOKEN_VARIABLES))
        if name not in known:
            raise RequestError(field, f"this checkpoint's chat template does not use it; it uses {known or 'none'}")
        if isinstance(value, str) and not self._first_chars.isdisjoint(value):
            raise RequestError(field, f"found {value!r}, expected text without {sorted(self._first_chars)}")
        if not isinstance(value, str | bool | int | float | None):
            raise RequestError(field, f"found {type(value).__name__}, expected a string, number or truth value")

    def _checked_text(self, context: Mapping[str, Any]) -> str:
        """Render; RequestError if the template gives a call another id than the one its result will name."""
        text = self._run(context)
        if not self._pairs_by_position and _CALL_MARK in self._source:
            for message in context["messages"]:
                for call in message.get("tool_calls", ()):
                    if _CALL_MARK + call["id"] not in text:
                        raise RequestError(
                            "messages",
                            f"tool call id {call['id']!r}: this checkpoint's chat template writes ids of its own, "
                            "functions.NAME:INDEX, and would break the link to the result; use those ids",
                        )
        return text

    def _run(self, context: Mapping[str, Any]) -> str:
        own = {name: copy.deepcopy(value) for name, value in context.items()}
        try:
            return self._template.render(own)
        except _Refused as e:
            raise RequestError("messages", f"refused by the checkpoint's chat template: {e}") from e
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as e:
            raise TemplateError(f"the chat template failed: {type(e).__name__}: {e}") from e

    def _mask(self, context: Mapping[str, Any]) -> dict[int, int]:
        """Table for str.translate: each character of control-token names -> a character that occurs nowhere else."""
        foreign: set[str] = set()
        for text in (self._source, *all_strings(context)):
            if not text.isascii():
                foreign.update(text)
        used = {ord(c) // _BLOCK_SIZE for c in foreign}
        base = next((b for b in _PRIVATE_BLOCKS if b // _BLOCK_SIZE not in used), None)
        if base is None:
            raise RequestError("messages", "text uses characters from every private-use block of Unicode")
        return {ord(c): base + i for i, c in enumerate(self._marked_chars)}

    def _masked(self, context: Mapping[str, Any], mask: dict[int, int]) -> dict[str, Any]:
        """The context with message and tool text masked. Names that templates compare with stay: roles, types, keys."""
        out = {**context, "messages": [replaced(m, mask) for m in context["messages"]]}
        if context["tools"]:
            out["tools"] = [
                {**replaced(tool, mask, self._first_chars), "type": tool["type"]} for tool in context["tools"]
            ]
            if "tools_ts_str" in context:
                out["tools_ts_str"] = context["tools_ts_str"].translate(mask)
        return out

    def _assistant_spans(self, ids: Sequence[int], expected: int) -> tuple[tuple[int, int], ...]:
        """Token ranges of assistant bodies; control tokens are the template's own, so looking for them is exact."""
        marks = [self._tokenizer.special_ids.get(f"<|im_{name}|>") for name in ("assistant", "middle", "end")]
        turn, middle, end = marks
        if turn is None or middle is None or end is None:
            return ()
        spans: list[tuple[int, int]] = []
        inside = False
        start: int | None = None
        for i, token in enumerate(ids):
            if token == turn:
                inside, start = True, None
            elif token == middle and inside and start is None:
                start = i + 1
            elif token == end:
                if inside and start is not None:
                    spans.append((start, i + 1))
                inside = False
        if len(spans) != expected:
            raise TemplateError(f"the chat template gave {len(spans)} assistant turns for {expected} such messages")
        return tuple(spans)

    def _finds_results_by_position(self) -> bool:
        """Whether the template pairs tool results with calls by their order instead of by `tool_call_id`.

        Found by rendering two results in swapped order and looking under which call the first one stands.
        """
        first, second = "functions.p:0", "functions.q:1"
        calls = [{"id": i, "type": "function", "function": {"name": i[10], "arguments": "{}"}} for i in (first, second)]
        probe: list[dict[str, Any]] = [
            {"role": "user", "content": "U"},
            {"role": "assistant", "content": "A", "tool_calls": calls},
            {"role": "tool", "tool_call_id": second, "content": "result of q"},
            {"role": "tool", "tool_call_id": first, "content": "result of p"},
        ]
        context = {**self._named_tokens, "messages": probe, "tools": None, "add_generation_prompt": False}
        try:
            before, found, _ = self._run(context).partition("result of q")
        except (RequestError, TemplateError):
            return False  # no tool turns in this template: a conversation that has some is refused when it comes
        return not found or before.rfind(first) > before.rfind(second)
