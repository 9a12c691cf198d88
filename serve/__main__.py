"""python -m kimijax.serve: check, bind, load, warm up, serve.

What is wrong with the command line, the port or the files is one line and exit code 2, before weights are loaded. The
port answers from the start: /health 200, everything that needs the model 503 until it is there.
"""

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import orjson
import uvicorn

import kimijax
from kimijax.config import load_config
from kimijax.engine.runner import EngineRunner
from kimijax.errors import CheckpointError, ConfigError, TemplateError, TokenizerError
from kimijax.generate import LLM, load_tokenizer, model_directory

from .app import create_app
from .config import ServerConfig, parse_args
from .service import ServerState, Service
from .shutdown import DrainingServer

log = logging.getLogger("kimijax.serve")

# What a user can cause and a line of text can explain.
USER_ERRORS = (ConfigError, CheckpointError, TokenizerError, TemplateError)
_DTYPES = {"auto": None, "float32": jnp.float32, "bfloat16": jnp.bfloat16}
_BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. ConfigError if the address is no address of this machine, or taken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError("--host", host, "a name or address of this machine", error.strerror or "") from error
    listener = socket.socket(family, kind, protocol)
    try:
        # So that a restart need not wait for the old connections; a port that another process listens on stays taken.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        why = f"{error.strerror}; is another server running? --port 0 takes a free one"
        raise ConfigError("--port", port, f"a port of {host} that is free", why) from error
    return listener


def check_files(config: ServerConfig) -> int:
    """Read all that is small in the checkpoint; the model's number of positions. Raises what is wrong with it."""
    directory = model_directory(config.model_path)
    target = load_config(directory)
    tokenizer, chat = load_tokenizer(directory, target)
    if tokenizer is None:
        raise TokenizerError(f"{directory}: found no tiktoken.model and tokenizer_config.json; a server needs both")
    if chat is None:
        log.warning("%s has no chat template: only /v1/completions will answer", directory)
    return target.max_positions


def load_service(config: ServerConfig, model_limit: int) -> tuple[Service, LLM]:
    """Load the weights, compile, and start the engine's thread."""
    llm = kimijax.load(
        config.model_path,
        engine=config.engine_config(model_limit),
        dtype=_DTYPES[config.dtype],
        tensor_parallel=config.tp,
        progress=True,
    )
    if llm.tokenizer is None:
        raise TokenizerError(f"{config.model_path}: the tokenizer files vanished while the server started")
    started = time.monotonic()
    llm.engine.warm_up(log.info)
    log.info("warm-up took %.1f s", time.monotonic() - started)
    service = Service(
        name=config.served_model_name or llm.name,
        engine=llm.engine,
        runner=EngineRunner(llm.engine).start(),
        tokenizer=llm.tokenizer,
        chat=llm.chat,
        defaults=llm.defaults,
        chat_kwargs={**llm.default_chat_kwargs, **config.default_chat_template_kwargs},
        created=int(time.time()),
    )
    return service, llm


def example(config: ServerConfig, port: int, service: Service) -> str:
    """A command line that gets an answer."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
    question = "What does textwrap.dedent do?"
    if service.chat is None:
        path, body = "completions", {"model": service.name, "prompt": question}
    else:
        path = "chat/completions"
        body = {"model": service.name, "messages": [{"role": "user", "content": question}]}
    quoted = orjson.dumps(body).decode().replace("'", "'\\''")
    return f"curl {url}/{path} -H 'Content-Type: application/json' -d '{quoted}'"


class Loader(threading.Thread):
    """Makes the service while the HTTP server already answers. Ends the server when it fails."""

    def __init__(self, config: ServerConfig, model_limit: int, port: int, state: ServerState) -> None:
        super().__init__(name="loader", daemon=True)
        self._config, self._model_limit, self._port, self._state = config, model_limit, port, state
        self.server: uvicorn.Server | None = None
        self.exit_code = 0

    def run(self) -> None:
        try:
            service, llm = load_service(self._config, self._model_limit)
        except USER_ERRORS as error:
            self._fail(2, str(error))
        except Exception as error:
            log.exception("the model could not be loaded")
            self._fail(1, f"{type(error).__name__}: {error}")
        else:
            self._state.ready(service)
            print(self._banner(service, llm), flush=True)

    def _fail(self, code: int, message: str) -> None:
        self.exit_code = code
        print(f"kimijax.serve: error: {message}", file=sys.stderr, flush=True)
        if self.server is not None:
            self.server.should_exit = True

    def _banner(self, service: Service, llm: LLM) -> str:
        engine = llm.engine.config
        devices = jax.devices()
        return (
            f"kimijax {kimijax.__version__}, jax {jax.__version__} on {len(devices)} x {devices[0].device_kind}, "
            f"{llm!r} as {service.name!r}: context {engine.context_length}, "
            f"{engine.max_batch} requests at once, {engine.total_pages} pages of {engine.page_size} tokens\n"
            f"Ready. Try:\n\n  {example(self._config, self._port, service)}\n"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server until a signal ends it; returns the exit code."""
    config = parse_args(arguments)
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    try:
        listener = bind(config.host, config.port)
        model_limit = check_files(config)
        config.engine_config(model_limit)
    except USER_ERRORS as error:
        print(f"kimijax.serve: error: {error}", file=sys.stderr)
        return 2
    state = ServerState(config.watchdog_timeout)
    loader = Loader(config, model_limit, listener.getsockname()[1], state)
    settings = uvicorn.Config(create_app(state), log_config=None, lifespan="off", ws="none", server_header=False)
    loader.server = DrainingServer(settings, state, config.shutdown_timeout)
    loader.start()
    loader.server.run(sockets=[listener])
    if state.service is not None:  # also when the model came up while the server was going down
        state.service.runner.stop()
    if loader.is_alive():
        # A signal came while the model was loading. Threads inside a compilation cannot be asked to stop, and the
        # interpreter must not be taken down under them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return loader.exit_code


if __name__ == "__main__":
    sys.exit(main())
