"""The server's settings and its command line, which is made from their definition.

Flags have SGLang's names; vLLM's are aliases where they mean the same. Speculation may be set in vLLM's way too, by one
JSON object; what it says and a flag says as well is an error, whether they agree or not.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, cast, get_args

from kimijax.engine.config import EngineConfig
from kimijax.errors import ConfigError
from kimijax.layer_ids import CONVENTIONS
from kimijax.loading import DEFAULT_CONTEXT
from kimijax.multihost import HostsConfig, hosts_value
from kimijax.plan_weights import JAX_FRACTION

from .speculation_flags import SpeculationFlags, flag_name

LogLevel = Literal["debug", "info", "warning", "error"]
Dtype = Literal["auto", "bfloat16", "float32"]
DEFAULT_COMPILATION_CACHE = "~/.cache/kimijax"


def _json_object(text: str) -> dict[str, Any]:
    try:
        value: object = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a JSON object like '{{\"thinking\": false}}'")
    return cast(dict[str, Any], value)


def _hosts(text: str) -> int | Literal["auto"]:
    try:
        return hosts_value(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number or auto") from error


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected true or false")
    return text == "true"


def _flag(help: str, *aliases: str, kind: Any = str, choices: Sequence[str] | None = None) -> dict[str, Any]:
    """Metadata of a field that is a flag: the field's name with dashes."""
    return {"help": help, "aliases": aliases, "type": kind, "choices": choices}


def _switch(help: str, *aliases: str) -> dict[str, Any]:
    """Metadata of a flag that is true or false, and true where no value follows it."""
    return _flag(help, *aliases, kind=_truth)


@dataclass(frozen=True)
class ServerConfig:
    """Checked when made: ConfigError names the flag."""

    model_path: str = field(
        default="nano", metadata=_flag("checkpoint directory, or nano, the model that comes with kimijax", "--model")
    )
    served_model_name: str | None = field(
        default=None, metadata=_flag("name in requests and answers (default: the model's own)")
    )
    host: str = field(default="127.0.0.1", metadata=_flag("address to listen on"))
    port: int = field(default=30000, metadata=_flag("port to listen on; 0 takes a free one", kind=int))
    context_length: int | None = field(
        default=None,
        metadata=_flag(
            f"tokens of prompt and answer together (default: the model's, at most {DEFAULT_CONTEXT})",
            "--max-model-len",
            kind=int,
        ),
    )
    max_running_requests: int = field(
        default=16, metadata=_flag("requests that decode together", "--max-num-seqs", kind=int)
    )
    max_queued_requests: int = field(
        default=1024,
        metadata=_flag("requests that may wait; more are answered 503", "--max-num-queued-reqs", kind=int),
    )
    page_size: int = field(default=64, metadata=_flag("tokens in a page of the cache", "--block-size", kind=int))
    max_total_tokens: int | None = field(
        default=None,
        metadata=_flag("tokens the cache holds (default: a full context for every running request)", kind=int),
    )
    chunked_prefill_size: int = field(default=512, metadata=_flag("prompt tokens computed in one step", kind=int))
    disable_radix_cache: bool = field(
        default=False,
        metadata=_switch(
            "compute every prompt anew, also where its beginning is in the cache", "--no-enable-prefix-caching"
        ),
    )
    tp: int = field(
        default=1,
        metadata=_flag(
            "devices to split the model over (tensor-parallel)", "--tp-size", "--tensor-parallel-size", "-tp", kind=int
        ),
    )
    preset: str = field(
        default="tp",
        metadata=_flag(
            "how devices share the work: tp (heads, widths, vocabulary), ep (as tp, but experts whole), dp-attention "
            "(requests and their cache; experts whole), dcp (as tp, and the cache by position)"
        ),
    )
    num_hosts: int | Literal["auto"] = field(
        default=1,
        metadata=_flag(
            "hosts that serve together, one process on each, or auto: as SLURM or Kubernetes say",
            "--nnodes",
            kind=_hosts,
        ),
    )
    host_id: int | None = field(
        default=None, metadata=_flag("which of them this is; host 0 answers requests", "--node-rank", kind=int)
    )
    coordinator: str | None = field(
        default=None,
        metadata=_flag("host:port of host 0 at which the hosts meet, a port that is free there", "--dist-init-addr"),
    )
    direct_io: bool = field(
        default=False,
        metadata=_switch(
            "read weights past the system's page cache, so that 600 GB of them do not displace all else in it; an "
            "error where the file system cannot"
        ),
    )
    dtype: Dtype = field(
        default="auto",
        metadata=_flag(
            "of weights and activations; auto is float32 on CPUs, bfloat16 elsewhere", choices=get_args(Dtype)
        ),
    )
    latent_norm_eps: float | None = field(
        default=None,
        metadata=_flag(
            "eps of the norms on queries and latents of low rank; 1e-6 is what transformers uses (default: the model's "
            "rms_norm_eps, as in vLLM and SGLang)",
            kind=float,
        ),
    )
    speculative_algorithm: str | None = field(
        default=None,
        metadata=_flag("EAGLE3, which needs a draft, or NONE (default: none)", "--spec-method"),
    )
    speculative_draft_model_path: str | None = field(
        default=None,
        metadata=_flag(
            "directory of an EAGLE-3 draft, or nano, the one that comes with kimijax",
            "--speculative-draft-model",
            "--spec-model",
        ),
    )
    layer_id_convention: str | None = field(
        default=None,
        metadata=_flag(
            "whose layer ids another producer's draft has, where its files do not tell", choices=tuple(CONVENTIONS)
        ),
    )
    speculative_num_steps: int | None = field(
        default=None,
        metadata=_flag("drafts one after the other (default: as the draft's files recommend, else 3)", kind=int),
    )
    speculative_eagle_topk: int | None = field(
        default=None, metadata=_flag("branches of a tree of drafts (default: 1, a chain)", kind=int)
    )
    speculative_num_draft_tokens: int | None = field(
        default=None,
        metadata=_flag("tokens verified together (default: for a chain, the steps and one more)", kind=int),
    )
    spec_tokens: int | None = field(
        default=None,
        metadata=_flag("drafts a round, as vLLM counts: one less than --speculative-num-draft-tokens", kind=int),
    )
    speculative_config: dict[str, Any] | None = field(
        default=None,
        metadata=_flag(
            'vLLM\'s JSON object, {"method": "eagle3", "model": ..., "num_speculative_tokens": ...}',
            "-sc",
            kind=_json_object,
        ),
    )
    speculative_adaptive: bool | None = field(
        default=None,
        metadata=_switch(
            "draft as many tokens as pay, by measured cost and acceptance, and none where none do (default: true)"
        ),
    )
    speculative_use_block_verification: bool | None = field(
        default=None,
        metadata=_switch("accept a chain's drafts as a block: more pass at temperatures above 0 (default: false)"),
    )
    speculative_simulate_acc_len: float | None = field(
        default=None,
        metadata=_flag(
            "accept drafts at random, so that a round gives so many tokens: measures speed; what comes out is no "
            "model's text",
            kind=float,
        ),
    )
    default_chat_template_kwargs: dict[str, Any] = field(
        default_factory=dict[str, Any],
        metadata=_flag("JSON object of template variables for requests that set none", kind=_json_object),
    )
    log_level: LogLevel = field(default="info", metadata=_flag("what is logged", choices=get_args(LogLevel)))
    decode_log_interval: int = field(
        default=40, metadata=_flag("steps between two lines of load, speed and acceptance; 0 logs none", kind=int)
    )
    shutdown_timeout: float = field(
        default=30.0,
        metadata=_flag("seconds that requests have to finish after SIGTERM before they are cut", kind=float),
    )
    watchdog_timeout: float = field(
        default=300.0, metadata=_flag("seconds in one step after which /health reports a fault", kind=float)
    )
    compilation_cache_dir: str | None = field(
        default=None,
        metadata=_flag(
            "where compiled programs are kept, so that a second start compiles nothing; none keeps none "
            f"(default: {DEFAULT_COMPILATION_CACHE}, or what JAX was told)"
        ),
    )
    check: bool = field(
        default=False,
        metadata=_switch("print all settings, the memory plan and the roofline, and end; no weights are loaded"),
    )
    given: frozenset[str] = field(default=frozenset(), compare=False)
    """Fields that the command line has set; no flag itself."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError("--port", self.port, "0 ... 65535")
        positive = ("max_running_requests", "page_size", "chunked_prefill_size", "tp", "watchdog_timeout")
        for name in (*positive, "context_length", "max_total_tokens"):
            value = vars(self)[name]
            if value is not None and not value > 0:
                raise ConfigError(flag_name(name), value, "a number above 0")
        for name in ("max_queued_requests", "shutdown_timeout", "decode_log_interval"):
            if not vars(self)[name] >= 0:
                raise ConfigError(flag_name(name), vars(self)[name], "0 or more")
        if self.latent_norm_eps is not None and not 0 < self.latent_norm_eps < math.inf:
            raise ConfigError("--latent-norm-eps", self.latent_norm_eps, "a finite number above 0")
        for name in ("model_path", "served_model_name", "host", "speculative_draft_model_path"):
            if vars(self)[name] == "":
                raise ConfigError(flag_name(name), "", "a non-empty text")
        _ = self.hosts
        self.speculation()

    @property
    def hosts(self) -> HostsConfig:
        """Which processes serve together. ConfigError: flags that are missing or do not fit."""
        return HostsConfig(self.num_hosts, self.host_id, self.coordinator)

    def speculation(self) -> SpeculationFlags:
        """What the flags say of speculation, in whichever dialect. ConfigError: as `SpeculationFlags.of`."""
        return SpeculationFlags.of(vars(self))

    def engine_config(self, model_limit: int, draft_limit: int | None = None) -> EngineConfig:
        """The engine's sizes, for a model with `model_limit` positions and a draft with `draft_limit`.

        Raises:
          ConfigError: names the flag at fault.
        """
        page = self.page_size
        context = self.context_length
        if context is None:
            most = model_limit if draft_limit is None else min(model_limit, draft_limit)
            context = min(most, DEFAULT_CONTEXT) // page * page
        if not 0 < context <= model_limit or context % page:
            raise ConfigError(
                "--context-length",
                context,
                f"at most the model's {model_limit}, and a multiple of --page-size ({page})",
            )
        if draft_limit is not None and context > draft_limit:
            expected = f"at most {draft_limit}, the positions of the draft; the model's are {model_limit}"
            fix = f"set --context-length {draft_limit // page * page}, or use a draft that was made for longer texts"
            raise ConfigError("--context-length", context, expected, fix)
        total = self.max_total_tokens
        if total is not None and total < context:
            raise ConfigError("--max-total-tokens", total, f"at least one full context, {context} tokens")
        return EngineConfig(
            max_batch=self.max_running_requests,
            context_length=context,
            page_size=page,
            n_pages=None if total is None else total // page,
            chunk_size=self.chunked_prefill_size,
            prefix_cache=not self.disable_radix_cache,
            max_queued=self.max_queued_requests,
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help lists the flags)\n")


class _Once(argparse.Action):
    """Stores a value; a second one, under whatever alias, is an error: neither may silently win."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if self.dest in vars(namespace):
            parser.error(f"{option}: {flag_name(self.dest)} is given twice")
        setattr(namespace, self.dest, values)


class _Refused(argparse.Action):
    """A flag of another server that means something else here."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        parser.error(
            f"{option}: found {values!r}, expected no such flag: it is vLLM's share of a GPU for weights and cache "
            f"together; here --max-total-tokens sizes the cache, and JAX takes {JAX_FRACTION:.0%} of a GPU unless its "
            "own XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise; --check prints what is needed"
        )


def _options(kind: Any) -> dict[str, Any]:
    """Arguments of `add_argument` that a switch has: its value may be left out."""
    return {"nargs": "?", "const": True} if kind is _truth else {}


def parse_args(arguments: Sequence[str] | None = None) -> ServerConfig:
    """The configuration of a command line (default: this process's). Exits with code 2 and one line if it is wrong."""
    parser = _Parser(
        prog="kimijax.serve", description="Serve a Kimi checkpoint with OpenAI's protocol.", allow_abbrev=False
    )
    for f in dataclasses.fields(ServerConfig):
        m = f.metadata
        if not m:
            continue
        default: object = f.default if f.default is not dataclasses.MISSING else {}
        shown = str(default).lower() if isinstance(default, bool) else default
        text = m["help"] if default is None else f"{m['help']} (default: {shown})"
        parser.add_argument(
            flag_name(f.name),
            *m["aliases"],
            dest=f.name,
            action=_Once,
            type=m["type"],
            choices=m["choices"],
            default=argparse.SUPPRESS,
            metavar=None if m["choices"] else m["type"].__name__.strip("_").upper(),
            help=text.replace("%", "%%"),
            **_options(m["type"]),
        )
    parser.add_argument("--gpu-memory-utilization", action=_Refused, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    found = vars(parser.parse_args(arguments))
    try:
        return ServerConfig(**found, given=frozenset(found))
    except ConfigError as error:
        parser.error(str(error))
