"""A server over an engine without a model, for the tests of `serve/`."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kimijax.chat import ChatTemplate
from kimijax.engine.request import Request, Sampling
from kimijax.engine.runner import EngineRunner
from kimijax.loader import NANO
from kimijax.serve import app, service

from . import toy_tokenizer
from .asgi import Reply, call
from .fake_engine import FakeEngine

TEXT = "A 世a😀b"
TEMPLATE = (NANO / "chat_template.jinja").read_text()
END, THINK, END_THINK = (
    toy_tokenizer.N_RANKS + toy_tokenizer.NAMES.index(n) for n in ("<|im_end|>", "<think>", "</think>")
)


def say(text: str) -> list[int]:
    return list(text.encode())


class Server:
    """An application with all that is behind it."""

    def __init__(self, folder: Path, script: Callable[[Request], list[int]], **engine: Any) -> None:
        tokenizer = toy_tokenizer.load(folder)
        self.engine = FakeEngine(script, end=END, vocab_size=tokenizer.vocab_size, **engine)
        self.runner = EngineRunner(self.engine).start()
        self.service = service.Service(
            name="toy",
            engine=self.engine,
            runner=self.runner,
            tokenizer=tokenizer,
            chat=ChatTemplate(TEMPLATE, tokenizer),
            default_sampling=Sampling(temperature=0.25, top_k=7),
            chat_kwargs={"thinking": False},
            created=1,
        )
        self.state = service.ServerState(watchdog_timeout=0.2)
        self.state.ready(self.service)
        self.app = app.create_app(self.state)

    def __call__(self, path: str, body: Any, **options: Any) -> Reply:
        return asyncio.run(call(self.app, "POST", path, body, **options))

    def get(self, path: str) -> Reply:
        return asyncio.run(call(self.app, "GET", path))

    def chat(self, content: str = "hi", **fields: Any) -> Reply:
        return self("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})

    def complete(self, prompt: Any = "hi", **fields: Any) -> Reply:
        return self("/v1/completions", {"prompt": prompt, **fields})

    def close(self) -> None:
        if self.engine.gate is not None:
            self.engine.gate.release(10**6)
        self.runner.stop()
        assert self.engine.free_pages == self.engine.config.total_pages
        assert not self.engine.running


MakeServer = Callable[..., Server]


def servers(folder: Path) -> Iterator[MakeServer]:
    """What a fixture yields: makes servers, by default ones that say TEXT, and closes them in the end."""
    made: list[Server] = []

    def make(script: Callable[[Request], list[int]] = lambda request: say(TEXT), **engine: Any) -> Server:
        made.append(Server(folder, script, **engine))
        return made[-1]

    yield make
    for server in made:
        server.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
