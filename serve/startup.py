"""The steps before the first answer: take the port, check the checkpoint, listen, load, say how to ask."""

import logging
import socket
import time

import jax
import jax.numpy as jnp
import orjson

import kimijax
from kimijax import checkpoint
from kimijax.config import load_config
from kimijax.engine.runner import EngineRunner
from kimijax.errors import CheckpointError, ConfigError, RequestError, TemplateError, TokenizerError
from kimijax.generate import LLM
from kimijax.loader import load_tokenizer, model_directory, place

from .config import ServerConfig
from .service import Service

log = logging.getLogger(__name__)

# What a user can cause and a line of text can explain.
USER_ERRORS = (ConfigError, CheckpointError, TokenizerError, TemplateError)
_DTYPES = {"auto": None, "float32": jnp.float32, "bfloat16": jnp.bfloat16}
_BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the address and refuses connections until `listen`.

    Raises:
      ConfigError: it is no address of this machine, or taken.
    """
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
    except OSError as error:
        listener.close()
        raise _taken(host, port, error) from error
    return listener


def listen(listener: socket.socket) -> None:
    """Take connections from now on. ConfigError if another process has begun to listen there since `bind`."""
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        listener.close()
        raise _taken(host, port, error) from error


def _taken(host: str, port: int, error: OSError) -> ConfigError:
    why = f"{error.strerror}; is another server running? --port 0 takes a free one"
    return ConfigError("--port", port, f"a port of {host} that is free", why)


def check_files(config: ServerConfig) -> int:
    """Read all that is small in the checkpoint: JSON, tokenizer, template and the headers of the weights.

    Returns:
      The model's number of positions.
    Raises:
      ConfigError, CheckpointError, TokenizerError, TemplateError: what is wrong with it.
    """
    if config.tp > (n := len(jax.devices())):
        raise ConfigError("--tp", config.tp, f"at most {n}, the number of devices")
    directory = model_directory(config.model_path)
    target = load_config(directory, latent_norm_eps=config.latent_norm_eps)
    tokenizer, chat = load_tokenizer(directory, target)
    if tokenizer is None:
        raise TokenizerError(f"{directory}: found no tiktoken.model and tokenizer_config.json; a server needs both")
    if chat is None:
        log.warning("%s has no chat template: only /v1/completions will answer", directory)
    else:
        try:
            chat.encode([{"role": "user", "content": "?"}], **config.default_chat_template_kwargs)
        except RequestError as error:
            found = config.default_chat_template_kwargs
            raise ConfigError(
                "--default-chat-template-kwargs", found, "variables of the template", str(error)
            ) from error
    placement = place(_DTYPES[config.dtype], config.tp)
    try:
        checkpoint.check(
            directory, target, mesh=placement.mesh, dtype=placement.dtype, unpack_int4=placement.unpack_int4
        )
    except ConfigError as error:
        if not error.field.startswith("mesh axis"):
            raise
        raise ConfigError("--tp", config.tp, "a number that divides the model", str(error)) from error
    return target.max_positions


def load_service(config: ServerConfig, model_limit: int) -> tuple[Service, LLM]:
    """Load the weights, compile, and start the engine's thread."""
    llm = kimijax.load(
        config.model_path,
        engine=config.engine_config(model_limit),
        dtype=_DTYPES[config.dtype],
        tensor_parallel=config.tp,
        latent_norm_eps=config.latent_norm_eps,
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
        default_sampling=llm.default_sampling,
        chat_kwargs=config.default_chat_template_kwargs,
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
