"""The engine: requests of token ids go in, drawn token ids come out, step by step."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from ..errors import ConfigError, RequestError
from ..model import Target
from .config import EngineConfig
from .programs import ProgramKind, Programs
from .request import Phase, Request, Sampling, StepOutput
from .scheduler import Scheduler


@dataclass(frozen=True)
class EngineStats:
    """Counters of the moment."""

    n_running: int
    n_waiting: int
    free_pages: int
    total_pages: int


class Engine:
    """Continuous batching over one model. Not thread-safe: one thread calls it (see `runner`)."""

    def __init__(
        self,
        model: Target,
        config: EngineConfig,
        *,
        n_tokens: int | None = None,
        stop_ids: Sequence[int] = (),
        mesh: Mesh | None = None,
        experts: str = "reference",
    ) -> None:
        """
        Args:
          model: filled target.
          config: sizes.
          n_tokens: ids from here on belong to no token and are never drawn; default: all are tokens.
          stop_ids: ids that end every request that does not ignore them.
          mesh: where the model lies.
          experts: implementation of the expert product.
        Raises:
          ConfigError: a context longer than the model's.
        """
        limit = model.config.max_positions
        if config.context_length > limit:
            raise ConfigError("context_length", config.context_length, f"at most the model's {limit} positions")
        self.config = config
        self.vocab_size = model.config.vocab_size
        self.n_tokens = self.vocab_size if n_tokens is None else min(n_tokens, self.vocab_size)
        self.stop_ids = frozenset(stop_ids)
        self.experts = experts
        self._programs = Programs(model, config, self.n_tokens, mesh, experts)
        self._scheduler = Scheduler(config)
        self._cache = self._programs.new_cache()
        self._undelivered: list[StepOutput] = []  # made by a step that has not returned yet

    def make_request(self, prompt: Sequence[int], sampling: Sampling, *, id: str | None = None) -> Request:
        """Check a request. Raises RequestError for an empty or too long prompt, a bad id, or bad sampling fields."""
        sampling.check(self.vocab_size)
        room = self.config.context_length - len(prompt)
        if not prompt:
            raise RequestError("prompt", "found no tokens, expected at least one")
        if room < 1:
            n, c = len(prompt), self.config.context_length
            raise RequestError("prompt", f"found {n} tokens, expected at most {c - 1}: the context holds {c}")
        bad = [t for t in prompt if not 0 <= t < self.n_tokens]
        if bad:
            raise RequestError("prompt", f"found token id {bad[0]}, expected 0 ... {self.n_tokens - 1}")
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else self.stop_ids)
        return Request(
            id=secrets.token_hex(12) if id is None else id,
            prompt=tuple(prompt),
            sampling=sampling,
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            stop_ids=frozenset(stops),
            limit=room if sampling.max_tokens is None else min(sampling.max_tokens, room),
        )

    def add(self, request: Request) -> None:
        """Queue a request. Raises QueueFullError."""
        self._scheduler.add(request)

    def cancel(self, request_id: str) -> None:
        """Drop a request and free its pages at once; an unknown id is ignored: it may just have finished."""
        request = self._scheduler.find(request_id)
        if request is not None:
            self._scheduler.finish(request)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def stats(self) -> EngineStats:
        s = self._scheduler
        return EngineStats(len(s.running), len(s.waiting), s.pool.n_free, s.pool.n_pages)

    def step(self) -> list[StepOutput]:
        """One chunk of prompt, if any waits, and one burst of decoding, if any request decodes."""
        self._undelivered = self.prefill_step()
        outputs = [*self._undelivered, *self.decode_step()]
        self._undelivered = []
        return outputs

    def prefill_step(self) -> list[StepOutput]:
        """One chunk of prompt, if any waits; the request's first token when the chunk was its last."""
        plan = self._scheduler.plan_prefill()
        if plan is None:
            return []
        self._cache, token = self._programs.prefill(self._cache, plan)
        plan.request.cached = plan.stop
        if not plan.last:
            return []
        plan.request.phase = Phase.DECODE
        return [self._commit(plan.request, np.asarray(token))]

    def decode_step(self) -> list[StepOutput]:
        """One burst of decoding, if any request decodes."""
        decode = self._scheduler.plan_decode()
        if decode is None:
            return []
        self._cache, drawn = self._programs.decode(self._cache, decode.requests, decode.n_steps)
        rows = zip(decode.requests, np.asarray(drawn), strict=False)  # the last rows are padding
        return [self._commit(request, tokens[: decode.n_steps]) for request, tokens in rows]

    def _commit(self, request: Request, tokens: np.ndarray) -> StepOutput:
        """Record drawn tokens up to the request's end."""
        before = len(request.output)
        error = None
        for token in tokens.tolist():
            if token < 0:
                error = "the model's logits are not a number: its weights or its arithmetic are at fault"
                request.finish_reason = "abort"
                break
            if request.append(token):
                break
        new = tuple(request.output[before:])
        request.cached = request.n_tokens - 1
        if request.finish_reason is not None:
            self._scheduler.finish(request)
        return StepOutput(request.id, new, request.finish_reason, error)

    def recover(self) -> list[StepOutput]:
        """After a step that raised: end every request that was running and rebuild the cache, which was donated.

        Returns what the step had made before it raised (a request may have ended with it), then the ends.
        """
        made, self._undelivered = self._undelivered, []
        dropped = list(self._scheduler.running)
        for request in dropped:
            self._scheduler.finish(request)
        for pages in jax.tree.leaves(self._cache):  # not donated if the step failed early; two caches may not fit
            if isinstance(pages, jax.Array) and not pages.is_deleted():
                pages.delete()
        self._cache = self._programs.new_cache()
        return [*made, *(StepOutput(r.id, (), "abort", error="the engine step failed") for r in dropped)]

    def warm_up(self, report: Callable[[str], None] | None = None) -> None:
        """Compile every program that traffic can ask for, by running each once on empty rows."""
        c = self.config
        shapes: list[tuple[ProgramKind, int, int]] = [("prefill", n, 0) for n in c.chunk_lengths]
        if c.context_length > c.chunk_size:
            shapes.extend(("prefill", c.chunk_lengths[-1], w) for w in c.window_lengths)
        shapes.extend(("decode", b, w) for b in c.batch_sizes for w in c.window_lengths)
        for i, (kind, size, window) in enumerate(shapes):
            if report is not None:
                report(f"compiling {i + 1} of {len(shapes)}: {kind} {size} x {window}")
            self._cache = self._programs.compile(self._cache, kind, size, window)
        jax.block_until_ready(self._cache)

    def n_compiled(self) -> int:
        """Programs compiled so far; constant after `warm_up`."""
        sizes = self._programs.sizes()
        return sizes.prefill + sizes.decode

    def check_integrity(self) -> None:
        """Raises RuntimeError when pages and requests do not add up."""
        self._scheduler.check_integrity()
