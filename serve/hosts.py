"""A server of several hosts: host 0 answers and schedules, the others repeat what it calls, and all end together.

A host whose connection breaks is lost at once, one that falls silent after `remote.LOST_AFTER` seconds. The server then
answers what is under way with an error, reports the fault on /health, and ends with exit code 1 within GRACE seconds.
"""

import hashlib
import logging
import queue
import signal
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import jax
import uvicorn

import kimijax
from kimijax import multihost
from kimijax.doctor import text_of_target
from kimijax.engine.remote import Follower, Host, Leader
from kimijax.errors import ConfigError
from kimijax.fingerprint import fingerprint_target
from kimijax.generate import LLM
from kimijax.teacher_forced import Text

from .config import ServerConfig
from .service import ServerState
from .startup import USER_ERRORS, Resolved, audit_draft, check_files, load_llm, use_compilation_cache

GRACE = 5.0  # seconds that answers have to leave after a host is lost
_LINGER = 1.0  # seconds of these in which /health still answers, and says what is wrong
_LOOK_INTERVAL = 0.5  # seconds between two looks at the engine

log = logging.getLogger("kimijax.serve")


class Leading:
    """Host 0's side of the group: ends the service when a host is lost, and the other hosts when the service ends."""

    def __init__(self) -> None:
        self.state: ServerState | None = None
        self.server: uvicorn.Server | None = None
        self.exit_code = 0
        self._leader: Leader | None = None
        self._gathered = threading.Event()
        self._lock = threading.Lock()

    def gather(self) -> None:
        """Wait for the other hosts. ConfigError: they do not come."""
        self._leader = Leader.gather(self.lost)
        self._leader.on_stop = self._stop
        self._gathered.set()

    @property
    def leader(self) -> Leader:
        self._gathered.wait()  # a host may be lost while `gather` returns
        assert self._leader is not None
        return self._leader

    @property
    def hosts(self) -> tuple[Host, ...]:
        return self.leader.hosts

    def serve(self, state: ServerState, server: uvicorn.Server) -> None:
        """The HTTP server begins: it is what has to end from now on."""
        with self._lock:
            self.state, self.server = state, server
        threading.Thread(target=self._watch, name="engine watch", daemon=True).start()

    def _watch(self) -> None:
        """End the service when the engine has failed: other than with one host there is no way back."""
        while True:
            time.sleep(_LOOK_INTERVAL)
            service = None if self.state is None else self.state.service
            if service is not None and service.runner.failure is not None:
                self.lost(f"the engine failed: {service.runner.failure}", 1)
                return

    def _stop(self, host: Host) -> None:
        log.info("%s was asked to stop: the service ends", host)
        with self._lock:
            server = self.server
        if server is None:
            self.end(0, at_once=True)
        server.should_exit = True

    def lost(self, reason: str, code: int) -> NoReturn:
        """The service cannot go on; called on any thread, and does not return."""
        with self._lock:
            first, self.exit_code = not self.exit_code, self.exit_code or code
            state, server = self.state, self.server
        if not first:
            while True:  # the thread that was first ends the process
                time.sleep(GRACE)
        log.error("the service ends: %s", reason)
        if state is None or server is None:
            self.end(code, reason)
        state.fail(reason)  # answers what is under way
        self.leader.end(code, reason)
        time.sleep(_LINGER)
        server.should_exit = True
        time.sleep(GRACE - _LINGER)
        multihost.leave(code)

    def end(self, code: int, reason: str = "", *, at_once: bool = False) -> NoReturn:
        """End the other hosts, and this process where it is."""
        self.leader.end(code, reason, at_once=at_once)
        multihost.leave(code)


def join(config: ServerConfig) -> Leading | None:
    """Meet the other hosts; None on those that follow. ConfigError: they do not come."""
    multihost.initialize(config.hosts)
    if jax.process_index() > 0:
        return None
    group = Leading()
    group.gather()
    return group


def follow(config: ServerConfig) -> int:
    """Be one of the other hosts until host 0 ends the service; returns the exit code."""

    def leave(reason: str, code: int) -> None:
        if reason:
            log.error("the service ends: %s", reason)
        multihost.leave(code)

    try:
        follower = Follower.join(leave)
    except ConfigError as error:
        print(f"kimijax.serve: error: {error}", file=sys.stderr, flush=True)
        multihost.leave(2)
    _pass_on_signals(follower)
    try:
        use_compilation_cache(config)
        found = check_files(config)
        follower.agree(identity(config, found))
        llm = load_llm(config, found)
        audit_draft(llm, found.placement, ReceivedText(follower))
        message = follower.follow(llm.engine.repeat)
    except USER_ERRORS as error:
        _fail(follower, str(error), 2)
    except Exception as error:
        log.exception("%s failed", follower.host)
        _fail(follower, f"{type(error).__name__}: {error}", 1)
    follower.close()
    log.info("host 0 ended the service")
    return int(message.fields["code"])


def _pass_on_signals(follower: Follower) -> None:
    """On SIGTERM or SIGINT ask host 0 to end the service in order; a second one ends this process, and so all."""
    seen: queue.SimpleQueue[int] = queue.SimpleQueue()  # the only thing that a handler may safely touch

    def pass_on() -> None:
        log.info("%s: asking host 0 to end the service", signal.Signals(seen.get()).name)
        try:
            follower.stop()
        except OSError as error:
            log.warning("host 0 could not be asked: %s", error)
        seen.get()
        multihost.leave(1)

    threading.Thread(target=pass_on, name="signals", daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _: seen.put(n))


def _fail(follower: Follower, reason: str, code: int) -> NoReturn:
    print(f"kimijax.serve: error: {reason}", file=sys.stderr, flush=True)
    follower.fail(reason, code)
    multihost.leave(code)


class SentText:
    """The target's own text for the audit of a draft, on host 0: the other hosts get it too."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader

    def __call__(self, llm: LLM) -> Text:
        try:
            text = text_of_target(llm)
        except ConfigError:
            self._leader.share([])
            raise
        self._leader.share([text.ids, text.mask, text.segments])
        return text


class ReceivedText:
    """The same on the other hosts, which repeat the calls that host 0 makes for it."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    def __call__(self, llm: LLM) -> Text:
        message = self._follower.follow(llm.engine.repeat)
        if message.kind != "share":
            raise RuntimeError(f"found a message {message.kind!r}, expected host 0 to share a text")
        if not message.arrays:
            raise ConfigError("text", "none", "one that host 0 has made")
        return Text(*message.arrays)


def identity(config: ServerConfig, found: Resolved) -> dict[str, str]:
    """What has to be the same on every host, by names for messages."""
    where, target = found.placement, fingerprint_target(found.directory, found.target).to_json()
    assert where.mesh is not None
    facts: dict[str, object] = {
        "kimijax": kimijax.__version__,
        "jax": f"{jax.__version__}, jaxlib {version('jaxlib')}",
        "device": jax.local_devices()[0].device_kind,
        "mesh": dict(where.mesh.shape),
        "dtype": f"{where.dtype}, experts unpacked {where.unpack_int4}",
        "model": hashlib.sha256(repr(target).encode()).hexdigest(),
        "tokenizer": None if found.tokenizer is None else found.tokenizer.fingerprint,
        "draft": None if found.draft is None else _digest(found.draft.directory),
        "engine": found.engine,
        "speculation": found.speculation,
        "layer_id_convention": config.layer_id_convention,
    }
    return {name: str(value) for name, value in facts.items()}


def _digest(draft: Path) -> str:
    """sha256 of a draft's small files and of the sizes of all: its probe, where there is one, tells the weights."""
    h = hashlib.sha256()
    for file in sorted(p for p in draft.iterdir() if p.suffix in (".json", ".safetensors", ".jinja")):
        h.update(f"{file.name} {file.stat().st_size}\n".encode())
        if file.suffix == ".json":
            h.update(file.read_bytes())
    return h.hexdigest()
