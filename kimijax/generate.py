"""Text in, text out: a loaded model with its tokenizer, chat template and engine, for notebooks and for the server."""

import dataclasses
import functools
import threading
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from .acceptance import Acceptance
from .chat import ChatTemplate
from .config import GenerationDefaults, TargetConfig
from .draft_loading import LoadedDraft
from .engine.engine import Engine
from .engine.request import FinishReason, Request, Sampling, StepOutput, TokenLogprobs
from .engine.scheduler import QueueFullError
from .errors import RequestError
from .grammar import Grammars, GrammarSpec
from .model import Target, check_taps
from .sharding import preset_on
from .text_request import bad_word_ids, with_grammar
from .text_stream import Delta as Delta
from .text_stream import TextStream as TextStream
from .tokenizer import Tokenizer

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | np.ndarray | Sequence[Message]  # text, token ids, or chat messages


@dataclass(frozen=True)
class Completion:
    """One finished answer."""

    text: str
    reasoning: str  # what a thinking model wrote before `</think>`
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One a token of `token_ids`, the end token too, where `Sampling.logprobs` asked for them."""
    cached_tokens: int = 0
    """Tokens of the prompt that were in the engine's cache already."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    """Exact counts of the rounds with drafts; see there for lengths and rates."""

    def __str__(self) -> str:
        return self.text


class Logits(NamedTuple):
    """Result of `LLM.logits`."""

    logits: np.ndarray  # float32 [T, V]
    taps: dict[int, np.ndarray]  # tap -> float32 [T, D]


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
        draft: LoadedDraft | None = None,
    ) -> None:
        self.name, self.engine, self.tokenizer, self.chat, self.defaults = name, engine, tokenizer, chat, defaults
        self.model, self.draft = model, draft
        self.config: TargetConfig = model.config
        self._mesh = mesh
        self._lock = threading.RLock()  # around every use of the engine
        self._inboxes: dict[str, deque[StepOutput]] = {}  # of every request that somebody here waits for
        graph, state = nnx.split(model)
        self._state = state

        def forward(state: nnx.State, ids: jax.Array, taps: tuple[int, ...]) -> tuple[jax.Array, dict[int, jax.Array]]:
            out = nnx.merge(graph, state)(ids, taps=taps)
            return out.logits, out.taps

        self._forward = jax.jit(forward, static_argnames="taps")

    def __repr__(self) -> str:
        c = self.config
        where = f"{jax.devices()[0].device_kind}" + (
            "" if self._mesh is None else f" x {self._mesh.size}, {preset_on(self._mesh)}"
        )
        return f"LLM({self.name!r}: {c.text_type}, {c.n_layers} layers, width {c.hidden}, on {where})"

    @functools.cached_property
    def grammars(self) -> Grammars | None:
        """What makes constraints of grammars; None without a tokenizer."""
        return None if self.tokenizer is None else Grammars(self.tokenizer, self.engine.vocab_size)

    @property
    def default_sampling(self) -> Sampling:
        """Sampling as the checkpoint's generation_config.json proposes it."""
        d, s = self.defaults, Sampling()
        return Sampling(
            temperature=s.temperature if d.temperature is None else d.temperature,
            top_p=s.top_p if d.top_p is None else d.top_p,
            top_k=s.top_k if d.top_k is None else max(d.top_k, 0),
        )

    @overload
    def generate(  # pyright: ignore[reportOverlappingOverload]  # a batch is what is no single prompt
        self,
        prompts: Prompt,
        sampling: Sampling | None = None,
        *,
        stop: Sequence[str] = (),
        bad_words: Sequence[str] = (),
        grammar: GrammarSpec | None = None,
        chat: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Any],
        sampling: Sampling | None = None,
        *,
        stop: Sequence[str] = (),
        bad_words: Sequence[str] = (),
        grammar: GrammarSpec | None = None,
        chat: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> list[Completion]: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Any],
        sampling: Sampling | None = None,
        *,
        stop: Sequence[str] = (),
        bad_words: Sequence[str] = (),
        grammar: GrammarSpec | None = None,
        chat: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Completion | list[Completion]:
        """Answer one prompt or many, batched together.

        Args:
          prompts: text (continued as it stands, control tokens and all), token ids, or chat messages; or a list of
            such prompts.
          sampling: default: the checkpoint's own.
          stop: strings that end the text, and are not part of it.
          bad_words: texts whose tokens are not put out one after another (see `bad_word_ids`); the field of that name
            in `sampling` has token ids.
          grammar: what the text has to fit; after `</think>` where the prompt ends in `<think>`.
          chat: arguments of the chat template, such as {"thinking": False} or {"tools": [...]}.
          fields: fields of `Sampling` to change, such as temperature=0.
        Returns:
          A Completion, or a list of them for a list of prompts.
        Raises:
          RequestError: names the field that cannot be served.
          RuntimeError: the engine gave a request up.
        """
        many = _is_batch(prompts)
        batch: list[Any] = list(prompts) if many else [prompts]
        sampling = dataclasses.replace(sampling or self.default_sampling, **fields)
        requests = [self.request(p, sampling, bad_words=bad_words, grammar=grammar, chat=chat) for p in batch]
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
        bad_words: Sequence[str] = (),
        grammar: GrammarSpec | None = None,
        chat: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Generator[Delta]:
        """The answer to one prompt, piece by piece; see `generate`. Closing the iterator cancels the request."""
        sampling = dataclasses.replace(sampling or self.default_sampling, **fields)
        request = self.request(prompt, sampling, bad_words=bad_words, grammar=grammar, chat=chat)
        stream = self.text_stream(request, stop=stop, raw=isinstance(prompt, str))
        return (delta for _, delta in self._drive([request], {request.id: stream}))

    def logits(self, token_ids: Sequence[int] | np.ndarray, taps: Sequence[int] = ()) -> Logits:
        """One forward pass.

        Args:
          token_ids: T ids, at most the model's positions.
          taps: residual streams to return: tap i enters layer i, tap n_layers enters the final norm.
        """
        ids = [int(i) for i in token_ids]
        check_taps(taps, self.config)
        if not ids or not all(0 <= i < self.config.vocab_size for i in ids):
            raise RequestError("token_ids", f"expected at least one id, all in 0 ... {self.config.vocab_size - 1}")
        if len(ids) > self.config.max_positions:
            raise RequestError("token_ids", f"found {len(ids)}, expected at most {self.config.max_positions}")
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
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        bad_words: Sequence[str] = (),
        grammar: GrammarSpec | None = None,
        chat: Mapping[str, Any] | None = None,
        id: str | None = None,
    ) -> Request:
        """A checked request of the engine; see `generate`. Raises RequestError."""
        if bad_words:
            ids = bad_word_ids(self.tokenizer, bad_words)
            sampling = dataclasses.replace(sampling, bad_words=(*sampling.bad_words, *ids))
        request = self.engine.make_request(self.encode(prompt, chat=chat), sampling, id=id)
        if grammar is None:
            return request
        if self.tokenizer is None or self.grammars is None:
            raise RequestError(grammar.field, "the checkpoint has no tokenizer files, whose texts a grammar is about")
        return with_grammar(request, grammar, self.tokenizer, self.grammars, raw=isinstance(prompt, str))

    def encode(self, prompt: Prompt, *, chat: Mapping[str, Any] | None = None) -> tuple[int, ...]:
        """Token ids of a prompt; `chat` holds arguments of the chat template. Raises RequestError."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("prompt", "the checkpoint has no tokenizer files; send token ids")
            return tuple(self.tokenizer.encode_with_specials(prompt))
        items: Sequence[Any] = prompt.tolist() if isinstance(prompt, np.ndarray) else prompt
        if items and all(isinstance(item, Mapping) for item in items):
            if self.chat is None:
                raise RequestError("messages", "the checkpoint has no chat template; send a text or token ids")
            return tuple(self.chat.encode(list(items), **(chat or {})).ids)
        if not all(isinstance(item, Integral) for item in items):
            raise RequestError("prompt", "expected a text, a list of token ids, or a list of chat messages")
        return tuple(int(i) for i in items)

    def text_stream(self, request: Request, *, stop: Sequence[str] = (), raw: bool = False) -> TextStream:
        """The text of a request; see `TextStream`."""
        return TextStream(self.tokenizer, request, stop=stop, raw=raw)

    def _drive(self, requests: Sequence[Request], streams: dict[str, TextStream]) -> Generator[tuple[str, Delta]]:
        """Step the engine until these requests are done; what is left is cancelled if the caller stops early.

        Several of these may run at once, in turns or in threads: each puts what the others wait for into their inboxes.
        """
        mine: deque[StepOutput] = deque()
        to_add, unfinished = deque(requests), {r.id for r in requests}
        self._inboxes.update(dict.fromkeys(unfinished, mine))
        try:
            while unfinished:
                with self._lock:
                    self._add(to_add)
                    if not mine:
                        self._step()
                while mine:
                    output = mine.popleft()
                    delta = streams[output.request_id].feed(output)
                    if delta.done:
                        unfinished.remove(output.request_id)
                        self._leave(output.request_id)
                    if delta.error is not None:
                        raise RuntimeError(f"the engine gave request {output.request_id} up: {delta.error}")
                    yield output.request_id, delta
        finally:
            for request_id in unfinished:
                self._leave(request_id)

    def _add(self, requests: deque[Request]) -> None:
        """Hand over as many requests as the engine's queue takes."""
        while requests:
            try:
                self.engine.add(requests[0])
            except QueueFullError:
                return
            requests.popleft()

    def _step(self) -> None:
        """One engine step, its outputs put into the inboxes. A step that raises leaves a usable engine behind."""
        if not self.engine.has_work:
            raise RuntimeError("the engine has no work, but an answer is waited for")
        try:
            outputs = self.engine.step()
        except BaseException:  # an interrupt too: the cache may have been donated already
            self._deliver(self.engine.recover())
            raise
        self._deliver(outputs)

    def _deliver(self, outputs: Sequence[StepOutput]) -> None:
        for output in outputs:
            if output.request_id in self._inboxes:
                self._inboxes[output.request_id].append(output)

    def _leave(self, request_id: str) -> None:
        """Wait no longer for a request; it is cancelled if it runs."""
        with self._lock:
            self._inboxes.pop(request_id, None)
            self.engine.cancel(request_id)


def _is_batch(prompts: Any) -> bool:
    """Whether `prompts` is a list of prompts: neither a text, nor token ids, nor the messages of one chat."""
    if isinstance(prompts, str) or (isinstance(prompts, np.ndarray) and prompts.ndim == 1):
        return False
    return not len(prompts) or not isinstance(prompts[0], Integral | Mapping)


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
        logprobs=tuple(entry for d in deltas for entry in d.logprobs),
        cached_tokens=request.cached_at_start,
        acceptance=request.acceptance,
    )
