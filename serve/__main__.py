"""python -m kimijax.serve: bind, check, listen, load, warm up, serve.

What is wrong with the command line, the port or the files (missing and misshapen tensors too) is an error and exit code
2, before the port answers and before weights are loaded. While they load it answers: /health 200, everything that needs
the model 503 until it is there. With --check nothing is bound or loaded: see `check`.
"""

import logging
import os
import socket
import sys
import threading
from collections.abc import Sequence

import jax
import uvicorn

import kimijax
from kimijax.doctor import text_of_target
from kimijax.generate import LLM

from .app import create_app
from .check import check
from .config import ServerConfig, parse_args
from .hosts import Leading, SentText, follow, identity, join
from .service import ServerState, Service
from .shutdown import DrainingServer
from .startup import USER_ERRORS, Resolved, bind, check_files, example, listen, load_service, use_compilation_cache

log = logging.getLogger("kimijax.serve")

_PROBES = ("/health", "/ready")


class Loader(threading.Thread):
    """Makes the service while the HTTP server already answers. Ends the server when it fails."""

    def __init__(
        self, config: ServerConfig, found: Resolved, port: int, state: ServerState, group: Leading | None
    ) -> None:
        super().__init__(name="loader", daemon=True)
        self._config, self._found, self._port, self._state = config, found, port, state
        self._leader = None if group is None else group.leader
        self.server: uvicorn.Server | None = None
        self.exit_code, self.error = 0, ""

    def run(self) -> None:
        try:
            text = text_of_target if self._leader is None else SentText(self._leader)
            service, llm = load_service(self._config, self._found, self._leader, text)
        except USER_ERRORS as error:
            self._fail(2, str(error))
        except Exception as error:
            log.exception("the model could not be loaded")
            self._fail(1, f"{type(error).__name__}: {error}")
        else:
            self._state.ready(service)
            print(self._banner(service, llm), flush=True)

    def _fail(self, code: int, message: str) -> None:
        self.exit_code, self.error = code, message
        print(f"kimijax.serve: error: {message}", file=sys.stderr, flush=True)
        if self.server is not None:
            self.server.should_exit = True

    def _banner(self, service: Service, llm: LLM) -> str:
        engine = llm.engine.config
        return (
            f"kimijax {kimijax.__version__}, jax {jax.__version__}, {llm!r} as {service.name!r}: "
            f"context {engine.context_length}, {engine.max_batch} requests at once, "
            f"{llm.engine.stats().total_pages} pages of {engine.page_size} tokens\n"
            f"{self._speculation(llm)}\n"
            f"{_told(service)}"
            f"Ready. Try:\n\n  {example(self._config, self._port, service)}\n"
        )

    def _speculation(self, llm: LLM) -> str:
        draft, options = llm.draft, self._found.speculation
        if draft is None or options is None:
            return "No speculation."
        told = f"Speculation: {options}; draft {draft.name}"
        if draft.recorded:
            told += f", recorded acceptance by position {', '.join(f'{p:.2f}' for p in draft.recorded)}"
        return told


def _told(service: Service) -> str:
    if not service.hosts:
        return ""
    return "Hosts: " + ", ".join(f"{host} with {host.devices} devices" for host in service.hosts) + ".\n"


def _is_no_probe(record: logging.LogRecord) -> bool:
    return not any(f" {path} " in record.getMessage() for path in _PROBES)


def start_logging(config: ServerConfig) -> None:
    """Log to stderr. Probes of health and readiness come every few seconds and are logged at level debug only."""
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=config.log_level.upper(), format=form, stream=sys.stderr)
    if config.log_level != "debug":
        logging.getLogger("jax").setLevel(logging.WARNING)  # it tells of every kind of device that is not there
        logging.getLogger("uvicorn.access").addFilter(_is_no_probe)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server until a signal ends it; returns the exit code."""
    config = parse_args(arguments)
    start_logging(config)
    group: Leading | None = None
    try:
        if config.hosts.is_several:
            group = join(config)
            if group is None:
                return follow(config)
        if config.check:
            print(check(config), flush=True)
            if group is not None:
                group.end(0, at_once=True)
            return 0
        kept = use_compilation_cache(config)
        listener = bind(config.host, config.port)
        found = check_files(config)
        if group is not None:
            group.leader.agree(identity(config, found))
        listen(listener)
    except USER_ERRORS as error:
        print(f"kimijax.serve: error: {error}", file=sys.stderr)
        if group is not None:
            group.end(2, str(error))
        return 2
    if kept is not None:
        log.info("compiled programs are kept in %s", kept)
    return serve(config, found, listener, group)


def serve(config: ServerConfig, found: Resolved, listener: socket.socket, group: Leading | None = None) -> int:
    """Answer at once, and load meanwhile; returns the exit code when a signal has ended the server."""
    state = ServerState(config.watchdog_timeout)
    loader = Loader(config, found, listener.getsockname()[1], state, group)
    settings = uvicorn.Config(create_app(state), log_config=None, lifespan="off", ws="none", server_header=False)
    loader.server = DrainingServer(settings, state, config.shutdown_timeout)
    if group is not None:
        group.serve(state, loader.server)
    loader.start()
    loader.server.run(sockets=[listener])
    if state.service is not None:  # also when the model came up while the server was going down
        state.service.runner.stop()
    if group is not None and (code := group.exit_code or loader.exit_code):
        group.end(code, loader.error)
    if loader.is_alive():
        # A signal came while the model was loading. Threads inside a compilation cannot be asked to stop, and the
        # interpreter must not be taken down under them.
        if group is not None:
            group.end(0, at_once=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    if group is not None:
        group.leader.end(0)
    return loader.exit_code


if __name__ == "__main__":
    sys.exit(main())
