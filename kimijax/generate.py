"""Text in, text out: a loaded model with its tokenizer, chat template and engine, for notebooks and for the server."""

import dataclasses
import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from . import checkpoint
from .chat import ChatTemplate
from .config import GenerationDefaults, TargetConfig, load_config, load_generation_defaults
from .engine.config import EngineConfig
from .engine.engine import Engine
from .engine.request import FinishReason, Request, Sampling, StepOutput
from .errors import ConfigError, RequestError, TokenizerError
from .model import Target, check_taps
from .sharding import make_mesh
from .tokenizer import IncrementalDetokenizer, Tokenizer

log = logging.getLogger(__name__)

NANO = Path(__file__).parent / "nano"
DEFAULT_CONTEXT = 2048  # tokens of prompt and output, unless the model holds fewer or the caller asks otherwise

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]  # text, token ids, or chat messages


@dataclass(frozen=True)
class Delta:
    """What a step added to one answer."""

    text: str
    reasoning: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def done(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class Completion:
    """One finished answer."""

    text: str
    reasoning: str  # what a thinking model wrote before `</think>`
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int

    def __str__(self) -> str:
        return self.text


class Logits(NamedTuple):
    """Result of `LLM.logits`."""

    logits: np.ndarray  # float32 [T, V]
    taps: dict[int, np.ndarray]  # tap -> float32 [T, D]


class TextStream:
    """The text of one request, from its step outputs: detokenised, cut at stop strings, thinking kept apart.

    Text between `<think>` and `</think>` is reasoning; a prompt that ends in `<think>` starts inside it. Stop strings
    bind the answer only. When one is found the stream is done and the caller cancels the request.
    """

    def __init__(self, tokenizer: Tokenizer, request: Request, *, stop: Sequence[str] = (), raw: bool = False) -> None:
        """`raw`: a text completion, where think tokens are text like any other."""
        self._content = IncrementalDetokenizer(tokenizer, stop)
        self._reasoning = IncrementalDetokenizer(tokenizer)
        begin, end = (tokenizer.special_ids.get(name) for name in ("<think>", "</think>"))
        self._begin, self._end = (None, None) if raw else (begin, end)
        self._thinking = self._begin is not None and request.prompt[-1] == self._begin
        self._started = False  # the answer has begun: a later <think> is its own text
        self._stop_ids = request.stop_ids
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None

    @property
    def completion_tokens(self) -> int:
        """Tokens up to the end, the end token included, those after a stop string not."""
        return len(self.token_ids)

    def feed(self, output: StepOutput) -> Delta:
        """The text that one step adds."""
        text, reasoning, used = "", "", 0
        for token in output.tokens:
            if self.finish_reason is not None:
                break
            used += 1
            if token in self._stop_ids:
                continue  # the end of the turn is not part of its text
            if self._thinking:
                if token == self._end:
                    self._thinking, self._started = False, True
                    reasoning += self._reasoning.flush()
                else:
                    reasoning += self._reasoning.feed([token])
            elif token == self._begin and not self._started:
                self._thinking = True
            else:
                self._started = True
                text += self._content.feed([token])
                if self._content.finished:
                    self.finish_reason = "stop"
        tokens = output.tokens[:used]
        self.token_ids.extend(tokens)
        if self.finish_reason is None and output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            reasoning += self._reasoning.flush() if self._thinking else ""
            text += self._content.flush()
        return Delta(text, reasoning, tokens, self.finish_reason, output.error)


class LLM:
    """A loaded model. Made by `kimijax.load`."""

    def __init__(
        self,
        name: str,
        model: Target,
        engine: Engine,
        tokenizer: Tokenizer | None,
        chat: ChatTemplate | None,
        defaults: GenerationDefaults,
        mesh: Mesh | None,
    ) -> None:
        self.name, self.engine, self.tokenizer, self.chat, self.defaults = name, engine, tokenizer, chat, defaults
        self.config: TargetConfig = model.config
        self._mesh = mesh
        graph, state = nnx.split(model)
        self._state = state

        def forward(state: nnx.State, ids: jax.Array, taps: tuple[int, ...]) -> tuple[jax.Array, dict[int, jax.Array]]:
            out = nnx.merge(graph, state)(ids, taps=taps)
            return out.logits, out.taps

        self._forward = jax.jit(forward, static_argnames="taps")

    def __repr__(self) -> str:
        c = self.config
        where = f"{jax.devices()[0].device_kind}" + (f" x {self._mesh.size}" if self._mesh is not None else "")
        return f"LLM({self.name!r}: {c.text_type}, {c.n_layers} layers, width {c.hidden}, on {where})"

    @property
    def default_sampling(self) -> Sampling:
        """Sampling as the checkpoint's generation_config.json proposes it."""
        d, s = self.defaults, Sampling()
        return Sampling(
            temperature=s.temperature if d.temperature is None else d.temperature,
            top_p=s.top_p if d.top_p is None else d.top_p,
            top_k=s.top_k if d.top_k is None else max(d.top_k, 0),
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | None = None,
        *,
        stop: Sequence[str] = (),
        chat: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Any:
        """Answer one prompt or many, batched together.

        Args:
          prompts: text (continued as it stands, control tokens and all), token ids, or chat messages; or a list of
            such prompts.
          sampling: default: the checkpoint's own.
          stop: strings that end the text, and are not part of it.
          chat: arguments of the chat template, such as {"thinking": False} or {"tools": [...]}.
          fields: fields of `Sampling` to change, such as temperature=0.
        Returns:
          A Completion, or a list of them for a list of prompts.
        Raises:
          RequestError: names the field that cannot be served.
        """
        many = not isinstance(prompts, str) and bool(prompts) and not isinstance(prompts[0], int | Mapping)
        batch: Sequence[Any] = prompts if many else [prompts]
        sampling = dataclasses.replace(sampling or self.default_sampling, **fields)
        requests = [self.request(p, sampling, chat=chat) for p in batch]
        streams = {
            r.id: self.text_stream(r, stop=stop, raw=isinstance(p, str)) for r, p in zip(requests, batch, strict=True)
        }
        deltas: dict[str, list[Delta]] = {r.id: [] for r in requests}
        for request_id, delta in self._drive(requests, streams):
            deltas[request_id].append(delta)
        done = [_completion(r, deltas[r.id]) for r in requests]
        return done if many else done[0]

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        stop: Sequence[str] = (),
        chat: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Generator[Delta]:
        """The answer to one prompt, piece by piece; see `generate`. Closing the iterator cancels the request."""
        sampling = dataclasses.replace(sampling or self.default_sampling, **fields)
        request = self.request(prompt, sampling, chat=chat)
        stream = self.text_stream(request, stop=stop, raw=isinstance(prompt, str))
        for _, delta in self._drive([request], {request.id: stream}):
            yield delta

    def logits(self, token_ids: Sequence[int], taps: Sequence[int] = ()) -> Logits:
        """One forward pass.

        Args:
          token_ids: T ids.
          taps: residual streams to return: tap i enters layer i, tap n_layers enters the final norm.
        """
        ids = list(token_ids)
        check_taps(taps, self.config)
        if not ids or not all(0 <= i < self.config.vocab_size for i in ids):
            raise RequestError("token_ids", f"expected at least one id, all in 0 ... {self.config.vocab_size - 1}")
        padded = 1 << max(4, (len(ids) - 1).bit_length())  # few lengths are compiled; causality hides the padding
        row = jnp.asarray(ids + [0] * (padded - len(ids)), jnp.int32)[None]
        if self._mesh is None:
            logits, found = self._forward(self._state, row, tuple(taps))
        else:
            with jax.set_mesh(self._mesh):
                logits, found = self._forward(self._state, row, tuple(taps))
        return Logits(
            np.asarray(logits[0, : len(ids)]),
            {tap: np.asarray(h[0, : len(ids)].astype(jnp.float32)) for tap, h in found.items()},
        )

    def request(
        self, prompt: Prompt, sampling: Sampling, *, chat: Mapping[str, Any] | None = None, id: str | None = None
    ) -> Request:
        """A checked request of the engine. Raises RequestError."""
        return self.engine.make_request(self.encode(prompt, chat=chat), sampling, id=id)

    def encode(self, prompt: Prompt, *, chat: Mapping[str, Any] | None = None) -> tuple[int, ...]:
        """Token ids of a prompt; `chat` holds arguments of the chat template. Raises RequestError."""
        if isinstance(prompt, str):
            return tuple(self._tokenizer().encode_with_specials(prompt))
        if prompt and isinstance(prompt[0], Mapping):
            if self.chat is None:
                raise RequestError(
                    "messages", "the checkpoint has no chat template; send a prompt of text or token ids"
                )
            return tuple(self.chat.encode(list(prompt), **(chat or {})).ids)  # type: ignore[arg-type]
        return tuple(int(i) for i in prompt)  # type: ignore[arg-type]

    def text_stream(self, request: Request, *, stop: Sequence[str] = (), raw: bool = False) -> TextStream:
        """The text of a request; see `TextStream`."""
        return TextStream(self._tokenizer(), request, stop=stop, raw=raw)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                "prompt", "the checkpoint has no tokenizer files; use `logits` or `engine` with token ids"
            )
        return self.tokenizer

    def _drive(self, requests: Sequence[Request], streams: dict[str, TextStream]) -> Iterator[tuple[str, Delta]]:
        """Step the engine until these requests are done; they are cancelled if the caller stops early."""
        waiting = {r.id for r in requests}
        try:
            for request in requests:
                self.engine.add(request)
            while waiting:
                for output in self.engine.step():
                    if output.request_id not in waiting:
                        continue
                    delta = streams[output.request_id].feed(output)
                    if delta.done:
                        waiting.remove(output.request_id)
                        self.engine.cancel(output.request_id)
                    yield output.request_id, delta
        finally:
            for request_id in waiting:
                self.engine.cancel(request_id)


def _completion(request: Request, deltas: Sequence[Delta]) -> Completion:
    reason = deltas[-1].finish_reason
    if reason is None:
        raise RuntimeError(f"request {request.id} has no end")
    return Completion(
        text="".join(d.text for d in deltas),
        reasoning="".join(d.reasoning for d in deltas),
        token_ids=tuple(t for d in deltas for t in d.tokens),
        finish_reason=reason,
        prompt_tokens=len(request.prompt),
    )


def load(
    path: str | Path = "nano",
    *,
    engine: EngineConfig | None = None,
    dtype: Any = None,
    tensor_parallel: int = 1,
    latent_norm_eps: float | None = None,
    progress: bool = False,
) -> LLM:
    """Load a checkpoint directory, or the embedded "nano".

    Args:
      path: a Hugging Face checkpoint directory of the family, or "nano".
      engine: sizes of the engine; default: a context of DEFAULT_CONTEXT tokens.
      dtype: of the weights and activations; default bfloat16 on a GPU, float32 on a CPU.
      tensor_parallel: devices to split the model over.
      latent_norm_eps: eps of the q_a and kv_a norms; default rms_norm_eps, see `load_config`.
      progress: show a progress bar on stderr.
    Raises:
      ConfigError, CheckpointError, TokenizerError, TemplateError: what does not fit, before anything is served.
    """
    directory = model_directory(path)
    config = load_config(directory, latent_norm_eps=latent_norm_eps)
    tokenizer, chat = load_tokenizer(directory, config)
    on_cpu = jax.default_backend() == "cpu"
    if dtype is None:
        dtype = jnp.float32 if on_cpu else jnp.bfloat16
    n = len(jax.devices())
    if not 1 <= tensor_parallel <= n:
        raise ConfigError("tensor_parallel", tensor_parallel, f"1 to {n}, the devices there are")
    mesh = make_mesh(jax.devices()[:tensor_parallel]) if tensor_parallel > 1 else None
    if engine is None:
        engine = EngineConfig(context_length=min(DEFAULT_CONTEXT, config.max_positions))
    model = checkpoint.load(directory, config, mesh=mesh, dtype=dtype, unpack_int4=on_cpu, progress=progress)
    stop_ids = config.eos_token_ids if tokenizer is None else tokenizer.stop_ids
    return LLM(
        name=directory.name if str(path) != "nano" else "kimi-nano",
        model=model,
        engine=Engine(
            model,
            engine,
            n_tokens=None if tokenizer is None else tokenizer.vocab_size,
            stop_ids=tuple(stop_ids),
            mesh=mesh,
        ),
        tokenizer=tokenizer,
        chat=chat,
        defaults=load_generation_defaults(directory),
        mesh=mesh,
    )


def model_directory(path: str | Path) -> Path:
    """The directory of a model name or path. Raises ConfigError where there is no config.json."""
    directory = NANO if str(path) == "nano" else Path(path)
    if not (directory / "config.json").is_file():
        raise ConfigError("model", str(path), '"nano" or a checkpoint directory with a config.json')
    return directory


def load_tokenizer(directory: Path, config: TargetConfig) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """Tokenizer and chat template of a checkpoint; (None, None), logged, where it has no tokenizer files at all.

    Raises:
      TokenizerError: only part of the files is there, or they hold more ids than the model.
    """
    files = [name for name in ("tiktoken.model", "tokenizer_config.json") if (directory / name).is_file()]
    if not files:
        log.warning("%s has no tokenizer files: it loads for token ids only", directory)
        return None, None
    tokenizer = Tokenizer.from_dir(directory, config.eos_token_ids)
    if tokenizer.vocab_size > config.vocab_size:
        raise TokenizerError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size} ids, the model {config.vocab_size}: wrong files"
        )
    has_template = (directory / "chat_template.jinja").is_file() or "chat_template" in (
        directory / "tokenizer_config.json"
    ).read_text(encoding="utf-8")
    return tokenizer, ChatTemplate.from_dir(directory, tokenizer) if has_template else None
