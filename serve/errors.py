"""Errors as an OpenAI client expects them: {"error": {"message", "type", "param", "code"}} and a fitting status."""

import difflib
from collections.abc import Mapping, Sequence

import orjson
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from kimijax.engine.runner import RunnerStoppedError
from kimijax.engine.scheduler import QueueFullError
from kimijax.errors import RequestError, TemplateError

RETRY_AFTER = {"retry-after": "1"}


class ApiError(Exception):
    """An answer other than 200. `param` names the field at fault, `kind` is OpenAI's error type."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        kind: str = "invalid_request_error",
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.message = message
        self.param = param
        self.kind = kind
        self.code = code
        self.headers = dict(headers or {})
        super().__init__(message)

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        # What a message quotes may hold a lone surrogate, which JSON output cannot.
        return orjson.dumps({"error": {k: _printable(v) for k, v in error.items()}})

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, "application/json")


def _printable(text: str | None) -> str | None:
    return None if text is None else text.encode("utf-8", errors="replace").decode()


def unavailable(message: str, headers: Mapping[str, str] = RETRY_AFTER) -> ApiError:
    """503: not now, for no fault of the request."""
    return ApiError(503, message, kind="service_unavailable", headers=headers)


def refused(error: RequestError | TemplateError | RunnerStoppedError) -> ApiError:
    """The answer to a request that tokenizer, template or engine did not take."""
    if isinstance(error, QueueFullError):
        return unavailable(f"the server is full: {error.message}")
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.field)
    if isinstance(error, TemplateError):
        return ApiError(400, f"messages: {error}", param="messages")
    return unavailable(str(error))


def invalid_body(error: ValidationError, model: type[BaseModel]) -> ApiError:
    """400 for the first thing that is wrong with a body, and how many more there are."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    first = faults[0]
    param = _path(first["loc"])
    message = f"{param or 'body'}: {_reason(first['type'], first['msg'], first['loc'], model)}"
    if len(faults) > 1:
        message += f" (and {len(faults) - 1} more)"
    return ApiError(400, message, param=param or None)


def _path(loc: Sequence[str | int]) -> str:
    """("messages", 0, "role") to "messages[0].role"."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")


def _reason(kind: str, message: str, loc: Sequence[str | int], model: type[BaseModel]) -> str:
    if kind != "extra_forbidden":
        return message[:1].lower() + message[1:]
    near = difflib.get_close_matches(str(loc[-1]), model.model_fields, 1) if len(loc) == 1 else []
    hint = f"did you mean {near[0]!r}?" if near else "GET /openapi.json lists the fields"
    return f"this field is unknown or not supported; {hint}"
