"""From the body of an HTTP request to requests for the engine.

Takes long for long prompts, so it runs in a worker thread.
"""

import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kimijax.engine.request import Request, Sampling
from kimijax.errors import RequestError
from kimijax.grammar import GrammarKind, GrammarSpec
from kimijax.text_request import bad_word_ids, with_grammar

from .errors import ApiError
from .openai_schema import ChatRequest, CompletionRequest, GenerationRequest
from .service import Service

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for plain completions
_SEEDS = 2**63
# Arguments of ChatTemplate.encode that a request sets by fields of its own, or not at all.
_NOT_TEMPLATE_VARIABLES = ("messages", "tools", "add_generation_prompt")


@dataclass(frozen=True)
class Job:
    """What one HTTP request asks of the engine; `requests` are in the order of the choices."""

    id: str
    requests: tuple[Request, ...]
    n: int
    """Choices a prompt; those of one prompt follow one another."""
    stop: tuple[str, ...]
    prompt_tokens: int
    raw: bool
    """Marks of reasoning are text like any other."""
    logprobs: int | None
    """How many alternatives to each token the answer lists; None: no log-probabilities at all."""


def prepare_chat(service: Service, body: ChatRequest) -> Job:
    """Render and tokenise a conversation. RequestError or TemplateError if it cannot be."""
    if service.chat is None:
        raise RequestError("messages", "this checkpoint has no chat template; use /v1/completions")
    prompt = service.chat.encode(body.messages, **_template_arguments(service, body.chat_template_kwargs or {})).ids
    max_tokens = body.max_completion_tokens or body.max_tokens
    sampling = _sampling(service, body, max_tokens, (body.top_logprobs or 0) if body.logprobs else None)
    try:
        return _job(service, body, "chatcmpl", [prompt], sampling, raw=False)
    except RequestError as error:
        if error.field != "prompt":
            raise
        raise RequestError("messages", f"rendered as a prompt: {error.message}") from error


def prepare_completion(service: Service, body: CompletionRequest) -> Job:
    """Tokenise plain prompts. RequestError if one cannot be."""
    prompts = [
        service.tokenizer.encode_with_specials(prompt) if isinstance(prompt, str) else prompt
        for prompt in _prompts(body.prompt)
    ]
    sampling = _sampling(service, body, body.max_tokens or COMPLETION_MAX_TOKENS, body.logprobs)
    return _job(service, body, "cmpl", prompts, sampling, raw=True)


def _template_arguments(service: Service, asked: Mapping[str, Any]) -> dict[str, Any]:
    for name in _NOT_TEMPLATE_VARIABLES:
        if name in asked:
            raise RequestError(f"chat_template_kwargs.{name}", "the server sets this one itself; leave it out")
    merged = {**service.chat_kwargs, **asked}
    if not isinstance(merged.get("thinking", True), bool):
        raise RequestError("chat_template_kwargs.thinking", f"found {merged['thinking']!r}, expected true or false")
    return merged


def _prompts(prompt: object) -> list[str | list[int]]:
    """The four forms of `prompt` as one list; ids are checked by the engine."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        items = cast(list[object], prompt)
        if _is_ids(items):
            return [cast(list[int], items)]
        if all(isinstance(item, str) for item in items) or all(_is_ids(item) for item in items):
            return cast(list[str | list[int]], items)
    raise RequestError("prompt", "expected a string, a list of token ids, or a non-empty list of one of these")


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(i) is int for i in cast(list[object], value))


def _job(
    service: Service,
    body: GenerationRequest,
    prefix: str,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    raw: bool,
) -> Job:
    n = body.n or 1
    config = service.engine.config
    if (room := config.max_batch + config.max_queued) < n * len(prompts):
        field = "n" if n > 1 else "prompt"
        raise RequestError(field, f"found {n * len(prompts)} answers in one request, expected at most {room}")
    job_id = f"{prefix}-{uuid.uuid4().hex}"
    requests: list[Request] = []
    spec = _grammar(body)
    for prompt in prompts:
        for i in range(n):
            choice = dataclasses.replace(sampling, seed=_seed(body.seed, i))
            request = service.engine.make_request(prompt, choice, id=f"{job_id}-{len(requests)}")
            if spec is not None:
                request = with_grammar(request, spec, service.tokenizer, service.grammars, raw=raw)
            requests.append(request)
    prompt_tokens = sum(map(len, prompts))
    return Job(job_id, tuple(requests), n, body.stop, prompt_tokens, raw, sampling.logprobs)


def _grammar(body: GenerationRequest) -> GrammarSpec | None:
    """The form that the answer has to have, if any. RequestError for one that is malformed."""
    form, outputs = body.response_format, body.structured_outputs
    if form is not None and form.json_schema is not None:
        return GrammarSpec.of_json_schema(form.json_schema.schema_)
    if form is not None and form.type == "json_object":
        return GrammarSpec("json_object")
    if outputs is None:
        return None
    name = "structured_outputs"
    if isinstance(outputs.json_, dict):
        return GrammarSpec.of_json_schema(outputs.json_, name)
    if outputs.choice is not None:
        return GrammarSpec.of_choices(outputs.choice, name)
    if outputs.json_object:
        return GrammarSpec("json_object", field=name)
    texts: dict[GrammarKind, str | None] = {
        "json_schema": outputs.json_,
        "regex": outputs.regex,
        "lark": outputs.grammar,
    }
    return next(GrammarSpec(kind, text, name) for kind, text in texts.items() if text is not None)


def _seed(seed: int | None, index: int) -> int | None:
    """Of one choice: the first of n draws as the only one would. An invalid seed stays invalid."""
    return (seed + index) % _SEEDS if seed is not None and 0 <= seed < _SEEDS else seed


def _sampling(service: Service, body: GenerationRequest, max_tokens: int | None, logprobs: int | None) -> Sampling:
    """The request's settings over the checkpoint's, but for the seed; the engine checks their ranges."""
    given = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": 0 if body.top_k == -1 else body.top_k,
        "min_p": body.min_p,
        "max_tokens": max_tokens,
        "stop_token_ids": body.stop_token_ids,
        "ignore_eos": body.ignore_eos,
        "repetition_penalty": body.repetition_penalty,
        "frequency_penalty": body.frequency_penalty,
        "presence_penalty": body.presence_penalty,
        "logit_bias": body.logit_bias,
        "min_tokens": body.min_tokens,
        "bad_words": bad_word_ids(service.tokenizer, body.bad_words),
        "logprobs": logprobs,
        "priority": body.priority,
    }
    return dataclasses.replace(
        service.default_sampling, **{name: value for name, value in given.items() if value is not None}
    )


def check_model(service: Service, asked: str | None) -> None:
    """ApiError 404, as OpenAI has it, for the name of another model."""
    if asked is not None and asked != service.name:
        raise ApiError(
            404,
            f"model: found {asked!r}, expected {service.name!r}, the model that is served here",
            param="model",
            code="model_not_found",
        )
