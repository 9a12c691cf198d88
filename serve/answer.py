"""One HTTP request while the engine works on it: submitted, followed step by step, and cancelled when nobody waits."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from kimijax.engine.request import StepOutput
from kimijax.engine.runner import RunnerStoppedError
from kimijax.errors import RequestError
from kimijax.text_stream import Delta, TextStream

from .errors import ApiError, refused, unavailable
from .prepare import Job
from .service import Service


@dataclass(frozen=True)
class Usage:
    """Token counts, as OpenAI names them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Tokens of the prompts that were in the cache already; those of a prompt with several choices count once."""

    def json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Answer:
    """The choices of one request. Lives on the event loop; outputs come from the engine's thread through a queue.

    Use as an async context manager: entering submits every choice or raises ApiError and leaves none behind; leaving
    cancels what is not finished.
    """

    def __init__(self, service: Service, job: Job) -> None:
        self._service = service
        self._job = job
        self._outputs: asyncio.Queue[tuple[int, StepOutput]] = asyncio.Queue()
        self._open: dict[int, str] = {}  # choice -> id of its request in the engine
        self._texts = [TextStream(service.tokenizer, request, stop=job.stop, raw=job.raw) for request in job.requests]

    @property
    def id(self) -> str:
        return self._job.id

    @property
    def n_choices(self) -> int:
        return len(self._texts)

    def usage(self) -> Usage:
        """Counts up to now."""
        return Usage(
            self._job.prompt_tokens,
            sum(text.completion_tokens for text in self._texts),
            # Of a prompt's choices the first tells what was there before this request; the others find its pages.
            sum(request.cached_at_start for request in self._job.requests[:: self._job.n]),
        )

    async def __aenter__(self) -> "Answer":
        try:
            await self._submit()
        except BaseException:  # cancellation too: nothing may stay in the engine
            self.cancel()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Take what is not finished out of the engine; harmless when all is."""
        for request_id in self._open.values():
            self._service.runner.cancel(request_id)
        self._open.clear()

    async def _submit(self) -> None:
        loop = asyncio.get_running_loop()
        accepted: list[asyncio.Future[None]] = []
        for index, request in enumerate(self._job.requests):

            def deliver(output: StepOutput, index: int = index) -> None:
                loop.call_soon_threadsafe(self._outputs.put_nowait, (index, output))

            accepted.append(asyncio.wrap_future(self._service.runner.submit(request, deliver)))
            self._open[index] = request.id
        results = await asyncio.gather(*accepted, return_exceptions=True)
        for result in results:
            if isinstance(result, RequestError | RunnerStoppedError):
                raise refused(result)
            if isinstance(result, BaseException):
                raise result

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """(choice, text) as it comes, until every choice is done. ApiError if the engine gave one of them up."""
        while self._open:
            index, output = await self._outputs.get()
            if index not in self._open:  # ended by a stop string while the engine's next step was under way
                continue
            if output.error is not None:
                raise ApiError(500, f"the engine failed on this request: {output.error}", kind="server_error")
            if output.finish_reason == "abort":
                raise unavailable("the request was cut because the server is shutting down", {"connection": "close"})
            delta = self._texts[index].feed(output)
            if delta.done:
                request_id = self._open.pop(index)
                if output.finish_reason is None:
                    self._service.runner.cancel(request_id)
            yield index, delta
