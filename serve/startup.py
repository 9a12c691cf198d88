"""The steps before the first answer: take the port, check the files, listen, load, audit the draft, say how to ask."""

import gc
import logging
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import orjson

import kimijax
from kimijax import checkpoint
from kimijax.chat import ChatTemplate
from kimijax.config import TargetConfig, load_config
from kimijax.doctor import short_doctor, text_of_target
from kimijax.draft_loading import DraftFiles, check_options, declare_stand_in, read_draft, resolve_options
from kimijax.drafter import Drafter
from kimijax.engine.config import EngineConfig
from kimijax.engine.remote import Leader
from kimijax.engine.runner import EngineRunner
from kimijax.errors import CheckpointError, ConfigError, RequestError, TemplateError, TokenizerError
from kimijax.generate import LLM
from kimijax.loader import Placement, load_tokenizer, model_directory, place
from kimijax.names import parameters
from kimijax.serving_plan import plan_memory
from kimijax.sharding import preset_of
from kimijax.speculative_options import SpeculativeOptions
from kimijax.startup_progress import Shown, StartProgress
from kimijax.teacher_forced import Text
from kimijax.tokenizer import Tokenizer
from kimijax.wiring import WiringError

from .config import DEFAULT_COMPILATION_CACHE, ServerConfig
from .service import Service
from .status_log import StatusLog

log = logging.getLogger(__name__)

# What a user can cause and a line of text can explain.
USER_ERRORS = (ConfigError, CheckpointError, TokenizerError, TemplateError)
MakeText = Callable[[LLM], Text]
DTYPES = {"auto": None, "float32": jnp.float32, "bfloat16": jnp.bfloat16}
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


@dataclass(frozen=True)
class Resolved:
    """What a command line and the files that it names come to.

    Attributes:
      placement: where the weights will go.
      draft: None without speculation, or where acceptance is simulated without a draft.
      speculation: None: plain decoding.
    """

    directory: Path
    target: TargetConfig
    tokenizer: Tokenizer | None
    chat: ChatTemplate | None
    placement: Placement
    engine: EngineConfig
    draft: DraftFiles | None
    speculation: SpeculativeOptions | None

    @property
    def drafter(self) -> Drafter | None:
        """The drafter's declaration, a stand-in's where acceptance is simulated without a draft."""
        if self.speculation is None:
            return None
        return declare_stand_in(self.target, self.placement.dtype) if self.draft is None else self.draft.declared


def resolve(config: ServerConfig, placement: Placement) -> Resolved:
    """Reads all that is small: JSON, tokenizer, template, the draft's headers and vocabulary.

    Raises:
      ConfigError, CheckpointError, TokenizerError, TemplateError: what is wrong with it, or does not fit together.
    """
    directory = model_directory(config.model_path)
    target = load_config(directory, latent_norm_eps=config.latent_norm_eps)
    tokenizer, chat = load_tokenizer(directory, target)
    if chat is not None:
        try:
            chat.encode([{"role": "user", "content": "?"}], **config.default_chat_template_kwargs)
        except RequestError as error:
            found = config.default_chat_template_kwargs
            raise ConfigError(
                "--default-chat-template-kwargs", found, "variables of the template", str(error)
            ) from error
    flags = config.speculation()
    draft = None
    if flags.draft is not None:
        draft = read_draft(
            flags.draft,
            directory,
            target,
            tokenizer,
            algorithm=flags.algorithm,
            convention=flags.convention,
            dtype=placement.dtype,
        )
    options = resolve_options(draft, **flags.settings)
    engine = config.engine_config(target.max_positions, None if draft is None else draft.config.max_positions)
    if options is not None:
        check_options(draft, options, engine.context_length)
        engine.pages(options.room)  # refuses too few
    return Resolved(directory, target, tokenizer, chat, placement, engine, draft, options)


def check_files(config: ServerConfig) -> Resolved:
    """`resolve`, and whether the headers of the weights fit the configuration, and all of it the devices.

    Raises:
      ConfigError, CheckpointError, TokenizerError, TemplateError: what is wrong.
    """
    if config.tp > (n := len(jax.devices())):
        raise ConfigError("--tp", config.tp, f"at most {n}, the number of devices")
    if jax.process_count() > 1 and config.tp != n:
        raise ConfigError("--tp", config.tp, f"{n}, the devices of all {jax.process_count()} hosts")
    found = resolve(config, place(DTYPES[config.dtype], config.tp, config.preset))
    if found.tokenizer is None:
        raise TokenizerError(
            f"{found.directory}: found no tiktoken.model and tokenizer_config.json; a server needs both"
        )
    if found.chat is None:
        log.warning("%s has no chat template: only /v1/completions will answer", found.directory)
    check_weights(config, found)
    return found


def check_weights(config: ServerConfig, found: Resolved) -> None:
    """Whether headers, configuration and this machine's devices fit. ConfigError, CheckpointError: what does not."""
    where = found.placement
    try:
        checkpoint.check(
            found.directory, found.target, mesh=where.mesh, dtype=where.dtype, unpack_int4=where.unpack_int4
        )
        if found.drafter is not None:
            checkpoint.place(parameters(found.drafter), where.mesh, lambda _: None)
    except ConfigError as error:
        if not error.field.startswith("mesh axis"):
            raise
        raise ConfigError("--tp", config.tp, "a number that divides the model and its draft", str(error)) from error
    preset = preset_of(config.preset, config.tp)
    plan, _ = plan_memory(
        found.directory, found.engine, found.drafter, found.speculation, where, config.tp, preset=preset
    )
    plan.check()


def use_compilation_cache(config: ServerConfig) -> Path | None:
    """Lets JAX keep compiled programs on disk; the folder, None where nothing is kept.

    Raises:
      ConfigError: a folder that was asked for and cannot be written.
    """
    wanted = config.compilation_cache_dir
    if wanted == "none":
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    told: str | None = jax.config.jax_compilation_cache_dir
    if wanted is None and told is not None:
        return Path(told)
    folder = Path(wanted or DEFAULT_COMPILATION_CACHE).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        if wanted is None:
            log.warning("no compiled programs are kept, every start compiles anew: %s: %s", folder, error)
            return None
        fix = "name another folder, or none to keep nothing"
        raise ConfigError("--compilation-cache-dir", wanted, f"a folder that can be written ({error})", fix) from error
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # The defaults keep what took a second; a server has many small programs.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


def load_llm(config: ServerConfig, found: Resolved, progress: Shown = True) -> LLM:
    """Load the weights; the same on every host.

    Args:
      config, found: what to load.
      progress: where to show how far it is.
    Raises:
      WiringError: a draft that target and drafter do not reproduce.
    """
    return kimijax.load(
        config.model_path,
        draft=None if found.draft is None else found.draft.directory,
        speculation=found.speculation,
        layer_id_convention=config.layer_id_convention,
        engine=found.engine,
        dtype=DTYPES[config.dtype],
        devices=config.tp,
        preset=config.preset,
        latent_norm_eps=config.latent_norm_eps,
        progress=progress,
        direct=config.direct_io,
    )


def load_service(
    config: ServerConfig, found: Resolved, leader: Leader | None = None, text: MakeText = text_of_target
) -> tuple[Service, LLM]:
    """Load the weights, compile, audit the draft, and start the engine's thread.

    Args:
      config, found: what to serve.
      leader: of the other hosts, which load the same meanwhile.
      text: of the target, to audit a draft by.
    Raises:
      WiringError: a draft that target and drafter do not reproduce, or that runs otherwise than it was trained.
    """
    with StartProgress(log.info) as progress:
        llm = load_llm(config, found, progress)
        if leader is not None:
            llm.engine.lead(leader)
        llm.engine.warm_up(progress)
        with progress.stage("warming up"):
            audit_draft(llm, found.placement, text)
            service = _make_service(config, found, llm, leader)
        progress.ready()
    return service, llm


def _make_service(config: ServerConfig, found: Resolved, llm: LLM, leader: Leader | None) -> Service:
    """What serves a model that is loaded and warm; its engine's thread runs."""
    if llm.tokenizer is None:
        raise TokenizerError(f"{config.model_path}: the tokenizer files vanished while the server started")
    service = Service(
        name=config.served_model_name or llm.name,
        engine=llm.engine,
        runner=EngineRunner(llm.engine, StatusLog(config.decode_log_interval, llm.draft)).start(),
        tokenizer=llm.tokenizer,
        chat=llm.chat,
        default_sampling=llm.default_sampling,
        chat_kwargs=config.default_chat_template_kwargs,
        created=int(time.time()),
        speculation=found.speculation,
        hosts=() if leader is None else leader.hosts,
    )
    _ = service.grammars  # made now, not for the first request that asks for one
    # All that is loaded stays: the collector need not walk through it, tens of milliseconds in the middle of a step.
    gc.collect()
    gc.freeze()
    return service


def audit_draft(llm: LLM, placement: Placement, make_text: MakeText = text_of_target) -> None:
    """Runs a draft that has no probe in the few ways that are mixed up most, on text that the target writes.

    Raises:
      WiringError: it was trained to be run otherwise; names the fix.
    """
    draft = llm.draft
    if draft is None or draft.probe is not None or draft.is_stand_in:
        return
    if draft.options.is_simulated:
        log.warning("draft %s has no probe, and is not checked: acceptance is simulated", draft.name)
        return
    try:
        text = make_text(llm)
    except ConfigError as error:
        log.warning("draft %s has no probe, and the target writes too little to check it: %s", draft.name, error)
        return
    diagnosis = short_doctor(llm.model, draft.drafter, text, mesh=placement.mesh)
    if diagnosis.trained is None:
        log.warning("draft %s: %s", draft.name, diagnosis.verdict)
    elif diagnosis.is_right:
        log.info("draft %s has no probe; on the target's own text %s", draft.name, diagnosis.verdict)
    else:
        more = "python -m kimijax.doctor searches further; --layer-id-convention reads a draft's layer ids otherwise"
        raise WiringError("draft", f"{draft.name} does not run as it was trained\n{diagnosis.verdict}\n{more}")


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
