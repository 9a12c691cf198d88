"""Calls an ASGI application without a socket; unlike ready-made clients it streams, and can hang up at any moment."""

import asyncio
import json
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

App = Callable[..., Any]


@dataclass
class Reply:
    """What came back; for a stream, `events` are its decoded events without the final `[DONE]`."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    finished: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        assert self.headers["content-type"].startswith("text/event-stream")
        lines = self.body.decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def call(
    app: App,
    method: str,
    path: str,
    body: bytes | Any = b"",
    *,
    content_type: str = "application/json",
    hang_up: Callable[[Reply], bool] | None = None,
    chunk_size: int = 1 << 20,
) -> Reply:
    """One exchange. `body`: bytes, or what is sent as JSON. `hang_up` is asked often whether the client leaves."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    parts = [data[i : i + chunk_size] for i in range(0, len(data), chunk_size)] or [b""]
    reply = Reply()

    async def receive() -> MutableMapping[str, Any]:
        if parts:
            part = parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(parts)}
        while not reply.finished and not (hang_up is not None and hang_up(reply)):
            await asyncio.sleep(0.001)
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {k.decode().lower(): v.decode() for k, v in message["headers"]}
        else:
            reply.body += message.get("body", b"")
            reply.finished = not message.get("more_body", False)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [(b"host", b"test"), (b"content-type", content_type.encode())],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    await asyncio.wait_for(app(scope, receive, send), timeout=20)
    return reply
