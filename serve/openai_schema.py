"""The bodies of OpenAI's requests, strictly: what is not listed here, or listed and not honoured, is refused by name.

Fields that this version does not implement are listed with the values that mean "off", which clients like to send.
Ranges of sampling settings are checked where they are used, in `kimijax.engine.request.Sampling` and
`kimijax.penalties.Rules`. Fields that OpenAI does not have are vLLM's, with its names.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from kimijax.engine.request import MAX_LOGPROBS, WIDEST

# Each new token is compared with every stop string while it is on its way to the client.
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_CHOICES = 128  # OpenAI's limit of `n`
MAX_BAD_WORDS = WIDEST.words // 2  # each is two sequences of tokens, with a blank before it and without
_NO_TOOLS = "this version does not read tool calls out of answers"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _wrong(found: object, expected: str) -> PydanticCustomError:
    # The text goes in as a value, since braces in a template would be read as places to fill.
    return PydanticCustomError("value", "{text}", {"text": f"found {_shown(found)}, expected {expected}"})


class _Only:
    """Marks a field of the protocol that is not implemented: absent, or one of the values that change nothing."""

    def __init__(self, *allowed: object, why: str = "this version does not support anything else") -> None:
        self.allowed = allowed
        self.why = why

    def check(self, value: object) -> object:
        # In Python True == 1, in JSON they differ.
        if any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in self.allowed):
            return value
        texts = " or ".join(json.dumps(a) for a in self.allowed)
        raise _wrong(value, f"{texts}: {self.why}")

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": list(self.allowed)}


def _strings(value: object, given: object, expected: str, most: int) -> tuple[str, ...]:
    """`given` as non-empty strings; `value` is what is shown of a wrong one."""
    if not isinstance(given, list | tuple):
        raise _wrong(value, expected)
    found = cast(Sequence[object], given)
    texts = tuple(s for s in found if isinstance(s, str) and s)
    if len(texts) != len(found):
        raise _wrong(value, expected)
    if len(texts) > most or any(len(s) > MAX_STOP_CHARS for s in texts):
        raise _wrong(value, f"at most {most} strings of at most {MAX_STOP_CHARS} characters")
    return texts


def _stops(value: object) -> tuple[str, ...]:
    given: object = () if value is None else (value,) if isinstance(value, str) else value
    return _strings(value, given, "a non-empty string or a list of such strings", MAX_STOPS)


def _words(value: object) -> tuple[str, ...]:
    words = _strings(value, () if value is None else value, "a list of non-empty strings", MAX_BAD_WORDS)
    if not all(w.strip() for w in words):
        raise _wrong(value, "words of more than blanks")
    return words


def _bias(value: object) -> dict[int, float]:
    """JSON has strings for keys; `Rules` checks the numbers."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _wrong(value, "an object of token ids and numbers")
    bias: dict[int, float] = {}
    for key, number in cast(Mapping[object, object], value).items():
        if not isinstance(key, str) or not (key.isascii() and key.isdecimal() and str(int(key)) == key):
            raise _wrong(key, 'token ids as keys, such as "42"')
        if not isinstance(number, int | float) or isinstance(number, bool):
            raise _wrong(number, f"a number for token {key}")
        bias[int(key)] = number
    return bias


def _ids(value: object) -> tuple[int, ...]:
    given: object = () if value is None else value
    if not isinstance(given, list | tuple):
        raise _wrong(value, "a list of token ids")
    found = cast(Sequence[object], given)
    ids = tuple(i for i in found if type(i) is int)
    if len(ids) != len(found):
        raise _wrong(value, "a list of token ids")
    return ids


_STOP_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
_ID_LIST = {"type": "array", "items": {"type": "integer"}}
_WORD_SCHEMA = {"type": "array", "items": {"type": "string"}, "maxItems": MAX_BAD_WORDS}
_BIAS_SCHEMA = {"type": "object", "additionalProperties": {"type": "number"}, "maxProperties": WIDEST.bias}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        _ID_LIST,
        {"type": "array", "items": _ID_LIST},
    ]
}


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Body):
    """What a stream tells besides text."""

    include_usage: bool = False
    """One more chunk at the end, with the token counts."""
    continuous_usage_stats: bool = False
    """Token counts so far in each chunk."""
    include_obfuscation: Annotated[Any, _Only(False, None)] = None


class JsonSchemaFormat(_Body):
    """The schema that an answer follows."""

    name: str
    """Of the schema; changes nothing here."""
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """Either value: answers always follow the schema."""


class ResponseFormat(_Body):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise _wrong({"type": self.type}, 'json_schema with, and only with, "type": "json_schema"')
        return self


class StructuredOutputs(_Body):
    """vLLM's field for the form of an answer: exactly one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    """A JSON schema, or one written out as a string."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """In llguidance's Lark syntax."""
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _one(self) -> "StructuredOutputs":
        if len(given := [name for name in self.model_fields_set if vars(self)[name] is not None]) != 1:
            raise _wrong(sorted(name.rstrip("_") for name in given), "exactly one field")
        return self


class GenerationRequest(_Body):
    """The fields that chat and plain completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    """Answers to make; answer i draws with seed + i."""
    max_tokens: int | None = Field(None, ge=1)
    """More than the context has room for is cut to it, and the answer then ends with finish_reason "length"."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """0 and -1 are off."""
    min_p: float | None = None
    seed: int | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops), WithJsonSchema(_STOP_SCHEMA)] = ()
    stop_token_ids: Annotated[tuple[int, ...], BeforeValidator(_ids), WithJsonSchema(_ID_LIST)] = ()
    ignore_eos: bool = False
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_bias), WithJsonSchema(_BIAS_SCHEMA)] = {}
    """Token id to what is added to its logit, -100 ... 100."""
    min_tokens: int | None = None
    """Before so many tokens neither a stop id nor a stop string ends the answer."""
    bad_words: Annotated[tuple[str, ...], BeforeValidator(_words), WithJsonSchema(_WORD_SCHEMA)] = ()
    """Texts whose tokens, as they are encoded alone or after a blank, are not put out one after another."""
    priority: int | None = None
    """Lower values are served first."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    # Names for the operator's own books; they change no answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    service_tier: Annotated[Any, _Only("auto", "default", None)] = None
    skip_special_tokens: Annotated[Any, _Only(True, None)] = None

    @field_validator("stream_options")
    @classmethod
    def _needs_a_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise PydanticCustomError("value", "found without stream, expected stream to be true")
        return value

    @field_validator("structured_outputs")
    @classmethod
    def _one_form(cls, value: StructuredOutputs | None, info: ValidationInfo) -> StructuredOutputs | None:
        other: ResponseFormat | None = info.data.get("response_format")
        if value is not None and other is not None and other.type != "text":
            raise PydanticCustomError("value", "found beside response_format, expected one of the two")
        return value


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    """Checked message by message where they are rendered."""
    max_completion_tokens: int | None = Field(None, ge=1)
    """The newer name of max_tokens."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the checkpoint's template; `thinking` (true or false) switches reasoning."""
    logprobs: bool | None = None
    """Log-probabilities of the answer's tokens, and in `logprobs.reasoning_content` of the reasoning's."""
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """And of the most probable tokens in their places."""

    tools: Annotated[Any, _Only([], None, why=_NO_TOOLS)] = None
    tool_choice: Annotated[Any, _Only("none", "auto", None, why=_NO_TOOLS)] = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[Any, _Only([], None, why=_NO_TOOLS)] = None
    function_call: Annotated[Any, _Only("none", "auto", None, why=_NO_TOOLS)] = None
    reasoning_effort: Annotated[Any, _Only(None)] = None
    modalities: Annotated[Any, _Only(["text"], None)] = None
    audio: Annotated[Any, _Only(None)] = None
    prediction: Annotated[Any, _Only(None)] = None
    store: Annotated[Any, _Only(False, None)] = None
    web_search_options: Annotated[Any, _Only(None)] = None
    verbosity: Annotated[Any, _Only("medium", None)] = None

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise _wrong(value, "logprobs to be true, or 0")
        return value

    @field_validator("max_completion_tokens")
    @classmethod
    def _one_limit(cls, value: int | None, info: ValidationInfo) -> int | None:
        if None not in (value, other := info.data.get("max_tokens")) and value != other:
            raise _wrong(value, f"what max_tokens says, {other}, or only one of the two")
        return value


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. Without max_tokens 16 tokens are made, as OpenAI has it."""

    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
    """Text, token ids, or a list of either. Control tokens written out in text become control tokens."""

    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """Log-probabilities of the tokens, and of so many of the most probable ones in their places."""
    best_of: Annotated[Any, _Only(1, None)] = None
    echo: Annotated[Any, _Only(False, None)] = None
    suffix: Annotated[Any, _Only("", None)] = None
