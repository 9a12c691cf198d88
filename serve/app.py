"""The routes: OpenAI's protocol, health and readiness."""

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import FastAPI, Request
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kimijax import __version__
from kimijax.errors import RequestError, TemplateError

from .answer import Answer
from .errors import ApiError, invalid_body, refused
from .formats import ChatFormat, CompletionFormat
from .openai_schema import ChatRequest, CompletionRequest, StreamOptions
from .prepare import check_model, prepare_chat, prepare_completion
from .responses import EventStream, WholeAnswer
from .service import Phase, ServerState, Service

# Far above what a full context takes: 262,144 tokens of text are about 1 MB, each character at most 6 bytes of JSON.
MAX_BODY_BYTES = 32 * 2**20


class _App(FastAPI):
    """FastAPI whose OpenAPI page knows the bodies, which are parsed here rather than by FastAPI."""

    def openapi(self) -> dict[str, Any]:
        schema = super().openapi()
        known = schema.setdefault("components", {}).setdefault("schemas", {})
        for model in (ChatRequest, CompletionRequest):
            known.update(_schema(model))
        return schema


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    return schema.pop("$defs", {}) | {model.__name__: schema}


def _documented(model: type[BaseModel]) -> dict[str, Any]:
    reference = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


async def _read_body[M: BaseModel](request: Request, model: type[M]) -> M:
    """The parsed and checked body. ApiError 415, 413, or 400 with the field's name."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Also keeps web pages of other origins from posting here: browsers ask first for this type, and for it only.
        raise ApiError(415, f"found content-type {kind!r}, expected application/json")
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes, the limit")
    try:
        # Strict: no NaN, no lone surrogates, nothing after the end.
        parsed = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    try:
        return model.model_validate(parsed)
    except ValidationError as error:
        raise invalid_body(error, model) from error


def create_app(state: ServerState) -> FastAPI:
    """The application. It answers from the start; what needs the model is 503 until `state` has a service."""
    # The interactive pages of FastAPI load their scripts from the network, so they are left out.
    app = _App(title="kimijax", version=__version__, docs_url=None, redoc_url=None)
    _add_error_handlers(app)
    _add_generation(app, state)
    _add_information(app, state)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestError)
    async def on_request_error(request: Request, error: RequestError) -> Response:
        return refused(error).response()

    @app.exception_handler(TemplateError)
    async def on_template_error(request: Request, error: TemplateError) -> Response:
        return refused(error).response()

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return ApiError(error.status_code, message, headers=error.headers).response()

    @app.exception_handler(Exception)
    async def on_fault(request: Request, error: Exception) -> Response:
        # The traceback goes to the log; the framework sees to that after this answer.
        return ApiError(500, "internal error; the server's log has the details", kind="server_error").response()


def _add_generation(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/chat/completions", openapi_extra=_documented(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        service = state.serving()
        body = await _read_body(request, ChatRequest)
        check_model(service, body.model)
        job = await asyncio.to_thread(prepare_chat, service, body)
        answer, form = Answer(service, job), ChatFormat.of(service, job)
        return (
            EventStream(answer, form, body.stream_options or StreamOptions())
            if body.stream
            else WholeAnswer(answer, form)
        )

    @app.post("/v1/completions", openapi_extra=_documented(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue plain prompts. Control tokens written out in a text prompt are control tokens."""
        service = state.serving()
        body = await _read_body(request, CompletionRequest)
        check_model(service, body.model)
        job = await asyncio.to_thread(prepare_completion, service, body)
        answer, form = Answer(service, job), CompletionFormat.of(service, job)
        return (
            EventStream(answer, form, body.stream_options or StreamOptions())
            if body.stream
            else WholeAnswer(answer, form)
        )


def _add_information(app: FastAPI, state: ServerState) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        """The one model that is served."""
        return _json({"object": "list", "data": [_model_card(state.serving())]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """The one model that is served, by its name."""
        service = state.serving()
        check_model(service, name)
        return _json(_model_card(service))

    @app.get("/server_info")
    async def server_info() -> Response:
        """Counters since the start, and what speculation gains now."""
        return _json(_info(state.serving()))

    @app.get("/health")
    async def health() -> Response:
        """200 while the process makes progress, also while it loads; 503 when its engine failed or is stuck."""
        return _condition(state, state.fault())

    @app.get("/ready")
    async def ready() -> Response:
        """200 when a request sent now would be worked on."""
        not_yet = None if state.phase is Phase.READY else f"the server is {state.phase.value}"
        return _condition(state, state.fault() or not_yet)


def _model_card(service: Service) -> dict[str, object]:
    card: dict[str, object] = {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "kimijax",
        "max_model_len": service.engine.config.context_length,
    }
    if service.speculation is not None:
        card["speculation"] = service.speculation.to_json()
        if service.speculation.is_simulated:
            card["simulated"] = "acceptance is simulated to measure speed: answers are not the model's output"
    return card


def _info(service: Service) -> dict[str, object]:
    stats = service.runner.stats()
    status = stats.speculation
    info: dict[str, object] = {
        "version": __version__,
        "model": service.name,
        "requests": {"running": stats.n_running, "waiting": stats.n_waiting, "preempted": stats.n_preempted},
        "pages": {"free": stats.free_pages, "total": stats.total_pages},
        "tokens": {
            "prompt": stats.n_prompt_tokens,
            "prompt_cached": stats.n_cached_tokens,
            "output": stats.n_output_tokens,
        },
    }
    if service.hosts:
        info["hosts"] = [dataclasses.asdict(host) for host in service.hosts]
    if service.speculation is not None:
        info["speculation"] = {
            "settings": service.speculation.to_json(),
            "simulated": stats.simulated,
            "acceptance": stats.acceptance.to_json(),
            "rounds_of_a_broken_drafter": stats.n_without_guesses,
            # None while the number of drafts is fixed, or nothing has been decoded yet.
            "now": None
            if status is None
            else {
                "drafts": status.k,
                "speed_up_estimate": status.speed_up,
                "acceptance_length_expected": status.length,
                "acceptance_length_to_break_even": status.break_even,
                "of_drafts": status.drafts,
            },
        }
    return info


def _condition(state: ServerState, fault: str | None) -> Response:
    report: dict[str, object] = {"status": fault or "ok", "phase": state.phase.value}
    if state.service is not None:
        stats = state.service.runner.stats()
        report |= {
            "last_step_age_seconds": round(state.service.runner.last_step_age(), 3),
            "running": stats.n_running,
            "waiting": stats.n_waiting,
            "free_pages": stats.free_pages,
            "total_pages": stats.total_pages,
        }
    return _json(report, 200 if fault is None else 503)


def _json(value: Mapping[str, object], status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
