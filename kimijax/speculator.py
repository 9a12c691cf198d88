"""Whole requests through the rounds of `speculation`, a batch at a time: what `evaluate` measures with.

Prompts are prefilled in chunks, then a loop on the device runs rounds until every row has ended; the host reads tokens
once, at the end. Shapes are fixed by the batch, the context and the chunk, so that few programs serve all prompts.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .acceptance import Acceptance
from .cache import CacheView, Window
from .drafter import Drafter, draft_cache
from .errors import ConfigError, RequestError
from .model import Target
from .rounds import Record, decode_rounds
from .sampling import SamplingRows
from .speculation import (
    ChainState,
    DraftChain,
    Proposer,
    Round,
    RowState,
    is_end,
    prefill_chunk,
    speculative_round,
)
from .verification import NO_TOKEN


@dataclass(frozen=True)
class TracedRound:
    """One round of one request."""

    position: int  # of guess 0, counted in the request from the prompt's first token
    guesses: tuple[int, ...]
    accepted: int  # guesses that passed verification, whatever was cut afterwards


@dataclass(frozen=True)
class Generation:
    """The answer to one prompt."""

    tokens: tuple[int, ...]  # the end token included
    finish_reason: Literal["stop", "length"]
    rounds: tuple[TracedRound, ...]

    @property
    def acceptance(self) -> Acceptance:
        """Exact counts of its rounds; the first token is of no round."""
        k = len(self.rounds[0].guesses) if self.rounds else 0
        return Acceptance.of((r.accepted for r in self.rounds), k)


def run_rounds[S, View: CacheView](
    target: Target,
    proposer: Proposer[S],
    state: RowState[S, View],
    rows: SamplingRows,
    limit: jax.Array,
    ends: jax.Array,
    *,
    k: int,
    room: int,
    n_tokens: int,
    experts: str = "reference",
) -> tuple[Record, RowState[S, View]]:
    """Rounds on the device until every row has ended.

    Args:
      target: the model.
      proposer: of guesses.
      state: after prefill; both views have room for limit + k rows from the length on.
      rows: settings.
      limit: int32 [B], most tokens of each row, the one that prefill drew included, at most `room`; 0: the row idles.
      ends: int32 [B, E], ids that end a row, padded with NO_TOKEN.
      k: guesses a round.
      room: tokens of a row that are kept.
      n_tokens: ids that belong to a token.
      experts: implementation of the target's expert product.
    Returns:
      The record, prefill's token in front, and the rows.
    """

    def step(state: RowState[S, View], budget: jax.Array) -> tuple[Round, RowState[S, View]]:
        return speculative_round(target, proposer, state, rows, budget, ends, k=k, n_tokens=n_tokens, experts=experts)

    first = jnp.where(limit > 0, state.token, NO_TOKEN)
    over = (limit > 0) & is_end(state.token[:, None], ends)[:, 0]
    begun = (limit > 0).astype(jnp.int32)
    left = jnp.where(over, 0, limit - begun)
    sizes = {"n_guesses": k, "room": room - 1, "most": max(room - 1, 1)}
    record, state = decode_rounds(step, state, left, ends, **sizes)
    return record._replace(
        tokens=jnp.concatenate([first[:, None], record.tokens], axis=1),
        produced=record.produced + begun,
        ended=record.ended | over,
    ), state


class Speculator:
    """Compiled programs for batches of prompts, over dense caches that live as long as a batch.

    A token of a row depends on its prompt, settings and seed alone; rows that have ended idle until the last one has.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        n_tokens: int,
        stop_ids: Sequence[int],
        batch: int,
        context_length: int,
        chunk: int = 128,
        mesh: Mesh | None = None,
        experts: str = "reference",
    ) -> None:
        """Args:
          target: the model.
          drafter: its head, wired to it.
          n_tokens: ids that belong to a token.
          stop_ids: that end an answer.
          batch: prompts that are answered together.
          context_length: of a prompt, its answer and k, at most; rounded up to whole chunks.
          chunk: tokens of a prompt that are prefilled at a time.
          mesh: that the parameters lie on; None: one device.
          experts: implementation of the target's expert product.

        Raises:
          ConfigError: a drafter wired for another target, or a context beyond the positions of either.
        """
        t, d = target.config, drafter.config
        drafter.wiring.check_target(t.n_layers, t.hidden)
        if context_length > min(t.max_positions, d.max_positions):
            expected = f"at most {t.max_positions}, the target's positions, and {d.max_positions}, the drafter's"
            raise ConfigError("context_length", context_length, expected, "shorten the prompts or the answers")
        self.batch, self.chunk, self.context_length = batch, chunk, context_length
        self.mesh, self.n_tokens = mesh, n_tokens
        self._rows_cached = -(-context_length // chunk) * chunk  # the last chunk is stored whole, padding and all
        self._ends = np.tile(np.asarray(sorted(stop_ids) or [NO_TOKEN], np.int32), (batch, 1))
        self._graphs, self._leaves, self._trees = [], [], []
        for model in (target, drafter):
            graph, state = nnx.split(model)
            leaves, tree = jax.tree.flatten(state)
            self._graphs.append(graph)
            self._leaves.append(leaves)
            self._trees.append(tree)
        self._target_config, self._draft_config = t, d
        self._dtype = target.embed.get_value().dtype, drafter.fc.get_value().dtype
        everywhere = None if mesh is None else NamedSharding(mesh, P())
        self._begin = jax.jit(self._empty, out_shardings=everywhere)
        options = {"n_tokens": n_tokens, "experts": experts}
        self._prefill = jax.jit(
            functools.partial(self._prefill_program, **options), static_argnames="first", donate_argnums=1
        )
        self._decode = jax.jit(
            functools.partial(self._decode_program, **options), static_argnames=("k", "room"), donate_argnums=1
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], rows: SamplingRows, limits: Sequence[int], *, k: int
    ) -> list[Generation]:
        """Answer prompts.

        Args:
          prompts: token ids.
          rows: settings, one row a prompt.
          limits: most tokens of each answer.
          k: guesses a round; 0 is plain decoding.
        Raises:
          RequestError: a prompt that is empty, has an id that is none, or does not fit the context with its answer; a
            negative k; settings of another number of rows.
          FloatingPointError: logits that are not a number.
        """
        if k < 0:
            raise RequestError("k", f"found {k} guesses a round, expected 0 (plain decoding) or more")
        if len(rows.temperature) != len(prompts):
            found = f"found {len(rows.temperature)} rows of settings"
            raise RequestError("rows", f"{found}, expected {len(prompts)}, one for each prompt")
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            self._check(i, prompt, limit, k)
        room = 1 << (max(limits, default=1) - 1).bit_length()  # few sizes are compiled
        out: list[Generation] = []
        for start in range(0, len(prompts), self.batch):
            some = slice(start, start + self.batch)
            own = jax.tree.map(lambda x, some=some: np.asarray(x)[some], rows)
            out += self._generate(prompts[some], own, limits[some], k, room)
        return out

    def n_compiled(self) -> int:
        """Programs compiled so far."""
        programs: tuple[Any, ...] = (self._begin, self._prefill, self._decode)
        return sum(program._cache_size() for program in programs)

    def _check(self, i: int, prompt: Sequence[int], limit: int, k: int) -> None:
        if not prompt or limit < 1:
            found = f"found {len(prompt)} tokens and a limit of {limit}"
            raise RequestError(f"prompts[{i}]", f"{found}, expected at least one token, and one to draw")
        bad = [t for t in prompt if not 0 <= t < self.n_tokens]
        if bad:
            raise RequestError(f"prompts[{i}]", f"found token id {bad[0]}, expected 0 ... {self.n_tokens - 1}")
        if len(prompt) + limit + k > self.context_length:
            found = f"found {len(prompt)} tokens, {limit} to draw and {k} guesses"
            raise RequestError(f"prompts[{i}]", f"{found}, expected at most {self.context_length} in all, the context")

    def _generate(
        self, prompts: Sequence[Sequence[int]], rows: SamplingRows, limits: Sequence[int], k: int, room: int
    ) -> list[Generation]:
        """One batch."""
        n_prompt, limit = np.ones(self.batch, np.int32), np.zeros(self.batch, np.int32)
        ids = np.zeros((self.batch, self._rows_cached + 1), np.int32)
        for i, prompt in enumerate(prompts):
            ids[i, : len(prompt)], n_prompt[i], limit[i] = prompt, len(prompt), limits[i]
        pad = self.batch - len(prompts)
        # Padding rows are greedy copies: they idle, and a temperature would cost every row the sampler.
        rows = jax.tree.map(lambda x: np.concatenate([x, np.zeros((pad, *x.shape[1:]), x.dtype)]), rows)
        state = self._call(self._begin)
        for start in range(0, int(n_prompt.max()), self.chunk):
            part = ids[:, start : start + self.chunk + 1]
            at = np.full(self.batch, start, np.int32)
            state = self._call(self._prefill, self._leaves, state, part, at, n_prompt, rows, first=start == 0)
        record, _ = self._call(self._decode, self._leaves, state, rows, limit, self._ends, k=k, room=room)
        record = Record(*(np.asarray(x) for x in record))  # pyright: ignore[reportArgumentType]  # read at once
        return [self._result(record, i, len(prompt)) for i, prompt in enumerate(prompts)]

    def _result(self, record: Record, i: int, n_prompt: int) -> Generation:
        tokens = tuple(record.tokens[i, : record.produced[i]].tolist())
        rounds: list[TracedRound] = []
        position = n_prompt + 1
        for r in range(int(record.n_rounds)):
            accepted = int(record.accepted[r, i])
            if accepted >= 0:
                rounds.append(TracedRound(position, tuple(record.guesses[r, i].tolist()), accepted))
                position += accepted + 1
        if NO_TOKEN in tokens or any(NO_TOKEN in r.guesses for r in rounds):
            whose = "target" if NO_TOKEN in tokens else "drafter"
            raise FloatingPointError(
                f"the {whose}'s logits are not a number after {n_prompt} tokens of prompt and {len(tokens)} drawn: its "
                "weights or its arithmetic are at fault"
            )
        return Generation(tokens, "stop" if record.ended[i] else "length", tuple(rounds))

    def _call(self, program: Any, *args: Any, **static: Any) -> Any:
        if self.mesh is None:
            return program(*args, **static)
        with jax.set_mesh(self.mesh):
            return program(*args, **static)

    def _empty(self) -> RowState[ChainState[Window], Window]:
        b, s, c = self.batch, self._rows_cached, self._target_config
        target, draft = self._dtype
        view = Window(tuple(jnp.zeros((b, s, c.latent_dim), target) for _ in range(c.n_layers)))
        chain = ChainState.empty(draft_cache(self._draft_config, b, s, draft), b, self._draft_config, draft)
        return RowState(jnp.zeros(b, jnp.int32), jnp.zeros(b, jnp.int32), view, chain)

    def _models(self, leaves: list[list[jax.Array]]) -> tuple[Target, Drafter]:
        states = (jax.tree.unflatten(tree, own) for tree, own in zip(self._trees, leaves, strict=True))
        target, drafter = (nnx.merge(graph, state) for graph, state in zip(self._graphs, states, strict=True))
        return target, drafter

    def _prefill_program(
        self, leaves: Any, state: Any, ids: Any, start: Any, n_prompt: Any, rows: Any, *, first: bool, **options: Any
    ) -> Any:
        target, drafter = self._models(leaves)
        chain = DraftChain[Window](drafter, self.n_tokens)
        return prefill_chunk(target, chain, state, ids, start, n_prompt, rows, first=first, **options)

    def _decode_program(
        self, leaves: Any, state: Any, rows: Any, limit: Any, ends: Any, *, k: int, room: int, **options: Any
    ) -> Any:
        target, drafter = self._models(leaves)
        chain = DraftChain[Window](drafter, self.n_tokens)
        return run_rounds(target, chain, state, rows, limit, ends, k=k, room=room, **options)
