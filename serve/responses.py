"""Sending an answer, whole or as server-sent events; a client that hangs up takes its request out of the engine."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .answer import Answer
from .errors import ApiError
from .formats import Format, Text
from .openai_schema import StreamOptions


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _unless_hung_up[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; ClientDisconnect, and `work` is cancelled, when the client leaves first."""
    working, waiting = asyncio.create_task(work), asyncio.create_task(_hung_up(receive))
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)


class _AnswerResponse(Response):
    """A response whose body is made while it is sent. What can be refused is refused before the first byte."""

    def __init__(self, answer: Answer, form: Format) -> None:
        super().__init__()
        self.answer = answer
        self.format = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self.answer:
                await _unless_hung_up(receive, self.reply(scope, receive, send))
        except ApiError as error:
            await error.response()(scope, receive, send)
        except ClientDisconnect:
            pass  # leaving the answer's context has cancelled it, and nobody is left to tell

    async def reply(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class WholeAnswer(_AnswerResponse):
    """One JSON object when every choice is done."""

    async def reply(self, scope: Scope, receive: Receive, send: Send) -> None:
        texts = [Text() for _ in range(self.answer.n_choices)]
        async for index, delta in self.answer.deltas():
            texts[index].add(delta)
        choices = [self.format.choice(i, text) for i, text in enumerate(texts)]
        body = orjson.dumps(self.format.whole(choices, self.answer.usage()))
        await Response(body, media_type="application/json")(scope, receive, send)


class EventStream(_AnswerResponse):
    """Server-sent events: one JSON chunk an event, `[DONE]` at the end.

    The status is sent when the engine has taken the request; a failure after that is an event with an `error`.
    """

    def __init__(self, answer: Answer, form: Format, options: StreamOptions) -> None:
        super().__init__(answer, form)
        self.options = options

    async def reply(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for chunk in self._chunks():
                await self._event(send, orjson.dumps(chunk))
        except ApiError as error:
            await self._event(send, error.body())
        await self._event(send, b"[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _event(self, send: Send, data: bytes) -> None:
        try:
            await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})
        except OSError as error:  # some servers tell of a hang-up this way
            raise ClientDisconnect from error

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        for index in range(self.answer.n_choices):
            for choice in self.format.opening(index):
                yield self._chunk(choice)
        async for index, delta in self.answer.deltas():
            for choice in self.format.chunks(index, delta):
                yield self._chunk(choice)
        if self.options.include_usage:
            yield self.format.chunk([]) | {"usage": self.answer.usage().json()}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self.format.chunk([choice])
        if self.options.continuous_usage_stats:
            chunk["usage"] = self.answer.usage().json()
        elif self.options.include_usage:
            chunk["usage"] = None
        return chunk
