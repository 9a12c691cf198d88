"""What the routes work with: the loaded model behind its runner, and where the server is in its life."""

import enum
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kimijax.chat import ChatTemplate
from kimijax.engine.config import EngineConfig
from kimijax.engine.remote import Host
from kimijax.engine.request import Request, Sampling
from kimijax.engine.runner import EngineRunner
from kimijax.grammar import Grammars
from kimijax.speculative_options import SpeculativeOptions
from kimijax.tokenizer import Tokenizer

from .errors import unavailable


class RequestMaker(Protocol):
    """The part of an engine that other threads may use: it reads the configuration and changes nothing."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def vocab_size(self) -> int: ...
    def make_request(self, prompt: Sequence[int], sampling: Sampling, *, id: str | None = None) -> Request: ...


@dataclass(frozen=True)
class Service:
    """A model that is ready to answer."""

    name: str
    engine: RequestMaker
    runner: EngineRunner
    tokenizer: Tokenizer
    chat: ChatTemplate | None
    default_sampling: Sampling = field(default_factory=Sampling)
    """What holds for fields that a request leaves out."""
    chat_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Template variables for requests that do not set them."""
    created: int = 0
    """Seconds since 1970 at which the model was loaded."""
    speculation: SpeculativeOptions | None = None
    hosts: tuple[Host, ...] = ()
    """Where several serve together: all of them."""

    @property
    def is_simulated(self) -> bool:
        """Whether acceptance is pretended: what comes out is no answer of the model, and says so."""
        return self.speculation is not None and self.speculation.is_simulated

    @functools.cached_property
    def grammars(self) -> Grammars:
        """Made for the first request that asks for a form; that takes about a second for 160,000 ids."""
        return Grammars(self.tokenizer, self.engine.vocab_size)


class Phase(enum.Enum):
    """Where the server is in its life."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


class ServerState:
    """The service, once there is one. The loader's thread sets it; the one that shuts down changes the phase only."""

    def __init__(self, watchdog_timeout: float) -> None:
        self.watchdog_timeout = watchdog_timeout
        self.phase = Phase.LOADING
        self.service: Service | None = None
        self._failure: str | None = None  # of the hosts, be there a service yet or not

    def ready(self, service: Service) -> None:
        self.service = service
        if self.phase is Phase.LOADING:  # a signal may have come first
            self.phase = Phase.READY

    def fail(self, reason: str) -> None:
        """Another host is lost: what is under way ends with an error, nothing new is taken. From any thread."""
        self._failure = reason
        if self.service is not None:
            self.service.runner.fail(reason)

    def serving(self) -> Service:
        """The service; ApiError 503 while there is none to take requests."""
        if self.phase is Phase.DRAINING:
            raise unavailable("the server is shutting down", {"connection": "close"})
        if self._failure is not None:
            raise unavailable(f"the service ends: {self._failure}", {"connection": "close"})
        if self.service is None:
            raise unavailable("the model is loading; GET /ready answers 200 when it has", {"retry-after": "5"})
        return self.service

    def fault(self) -> str | None:
        """Why the engine makes no progress, None if it does or has nothing to do."""
        if self._failure is not None:
            return self._failure
        if self.service is None:
            return None
        runner = self.service.runner
        if runner.failure is not None:
            return f"the engine failed: {runner.failure}"
        age = runner.last_step_age()
        if age > self.watchdog_timeout:
            return f"the engine has been in one step for {age:.0f} s, more than {self.watchdog_timeout:.0f} s"
        return None
