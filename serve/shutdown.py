"""An HTTP server that lets its requests finish before it closes, and ends the process with code 0."""

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Generator

import uvicorn

from .service import Phase, ServerState

log = logging.getLogger(__name__)

# After the engine has stopped, answers only have to leave the sockets.
_FLUSH_SECONDS = 2
_POLL_SECONDS = 0.1


class DrainingServer(uvicorn.Server):
    """On SIGTERM or SIGINT: new requests get 503, running and queued ones may finish for `timeout` seconds and are then
    cut; connections close after that. A second SIGINT cuts at once."""

    def __init__(self, config: uvicorn.Config, state: ServerState, timeout: float) -> None:
        config.timeout_graceful_shutdown = _FLUSH_SECONDS
        super().__init__(config)
        self._state = state
        self._timeout = timeout

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        # uvicorn raises the signal again when it is done, and the process would end with the signal's exit code.
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._state.phase = Phase.DRAINING
        service = self._state.service
        if service is not None:
            stats = service.runner.stats()
            log.info("shutting down: %d requests running, %d waiting", stats.n_running, stats.n_waiting)
            deadline = time.monotonic() + self._timeout
            while not await asyncio.to_thread(service.runner.drain, _POLL_SECONDS):
                if self.force_exit or time.monotonic() >= deadline:
                    log.warning("requests were cut: they did not finish in time")
                    break
            await asyncio.to_thread(service.runner.stop)
        await super().shutdown(sockets)
