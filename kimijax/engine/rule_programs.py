"""Rounds for batches in which a request needs more than temperature and filters: processors, a grammar, log-probs.

One round, in two programs. `propose` guesses; the host may look at the guesses, and say what a grammar allows after
each; `verify` runs the target over them. Rows that need nothing of this come out of these programs as of the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..cache import PagedView
from ..logprobs import Logprobs, logprobs
from ..penalties import NO_ID, History, ProcessorRows, Rules, chain_before, process, process_draft
from ..rounds import Record
from ..speculation import ChainState, DraftChain, verify_round
from ..verification import Proposal
from .device import DeviceState, after_rounds, put_rows, row_state, take_rows
from .programs import Batch, ProgramSet, n_compiled
from .request import MAX_LOGPROBS, WIDEST, Request


@dataclass(frozen=True)
class RuleRows:
    """A batch's rules as host arrays; the same for as long as the batch is."""

    processors: ProcessorRows
    wanted: np.ndarray  # bool [B], rows that ask for log-probabilities

    @staticmethod
    def of(requests: Sequence[Request], at: np.ndarray, size: int) -> "RuleRows":
        """Of requests at rows int [n] of `size`."""
        wanted = np.zeros(size, np.bool_)
        wanted[at] = [r.sampling.logprobs is not None for r in requests]
        rules, stops = [Rules()] * size, [frozenset[int]()] * size
        for row, request in zip(at.tolist(), requests, strict=True):
            rules[row], stops[row] = request.sampling.rules, request.stop_ids
        return RuleRows(ProcessorRows.of(rules, stops, WIDEST, size), wanted)


class Begin(NamedTuple):
    """Host values of `History` for a request that begins to decode, perhaps for the second time."""

    output: np.ndarray  # int32 [V]
    prompt: np.ndarray  # bool [V]
    tail: np.ndarray  # int32 [L]
    n_output: np.int32

    @staticmethod
    def of(request: Request, vocab_size: int) -> "Begin":
        prompt = np.zeros(vocab_size, np.bool_)
        prompt[np.asarray(request.prompt, np.int32)] = True
        tail = np.full(WIDEST.word_length - 1, NO_ID, np.int32)
        last = request.output[-len(tail) :]
        tail[len(tail) - len(last) :] = last
        output = np.bincount(np.asarray(request.output, np.int64), minlength=vocab_size).astype(np.int32)
        return Begin(output, prompt, tail, np.int32(len(request.output)))


def mask_words(vocab_size: int) -> int:
    """uint32 words that hold a bit for each id."""
    return -(-vocab_size // 32)


class RulePrograms:
    """Compiled on the weights and sizes of `Programs`."""

    def __init__(self, base: ProgramSet) -> None:
        self._base = base
        self._begin = base.jit(self._begin_program)
        self._propose = base.jit(self._propose_program, static=("k",), results=1)
        self._verify = base.jit(self._verify_program, static=("k",), results=2)
        self._everything: dict[tuple[int, int], np.ndarray] = {}

    def n_compiled(self) -> int:
        return sum(n_compiled(p) for p in (self._begin, self._propose, self._verify))

    @property
    def draft_counts(self) -> tuple[int, ...]:
        """0 and the most: these programs are compiled for no other k."""
        return (0, self._base.most_drafts) if self._base.most_drafts else (0,)

    def all_allowed(self, size: int, n: int) -> np.ndarray:
        """Masks uint32 [size, n, words] without a constraint; not to be written."""
        found = self._everything.get((size, n))
        if found is None:
            words = mask_words(self._base.target_config.vocab_size)
            found = self._everything[size, n] = np.full((size, n, words), 0xFFFFFFFF, np.uint32)
            found.flags.writeable = False
        return found

    def begin(self, state: DeviceState, request: Request) -> DeviceState:
        """What a request's processors look back on, at its place."""
        values = Begin.of(request, self._base.target_config.vocab_size)
        return self._base.call(self._begin, state, np.int32(request.place), values)

    def propose(
        self, state: DeviceState, batch: Batch, rules: RuleRows, allowed: np.ndarray, k: int
    ) -> tuple[DeviceState, Proposal]:
        """k guesses; allowed: uint32 [B, 1, words] for the first of them."""
        return self._base.call(self._propose, state, *batch, replace(rules.processors, allowed=allowed), k=k)

    def verify(
        self,
        state: DeviceState,
        batch: Batch,
        rules: RuleRows,
        proposal: Proposal | None,
        allowed: np.ndarray,
        k: int,
    ) -> tuple[DeviceState, Record, Logprobs]:
        """One round over a proposal (None: no guesses); allowed: uint32 [B, k + 1, words] along it."""
        processors = replace(rules.processors, allowed=allowed)
        return self._base.call(self._verify, state, *batch, proposal, processors, rules.wanted, k=k)

    def _begin_program(self, leaves: list[jax.Array], state: DeviceState, place: jax.Array, values: Begin) -> Any:
        rows = History(*(jnp.asarray(x)[None] for x in values))
        return replace(state, history=state.history.put(place[None], rows))

    def _propose_program(
        self,
        leaves: list[jax.Array],
        state: DeviceState,
        places: jax.Array,
        table: jax.Array,
        processors: ProcessorRows,
        *,
        k: int,
    ) -> tuple[DeviceState, Proposal]:
        _, drafter = self._base.models(leaves)
        slots, history = take_rows(state.slots, places), state.history.take(places)
        _, view = self._base.views(state, table, slots.length)
        assert drafter is not None
        assert slots.chain is not None

        def shaped(logits: jax.Array, guesses: jax.Array, columns: jax.Array | None) -> jax.Array:
            # Only for the first guess is it known what a grammar allows; the others are masked in `verify`.
            own = processors if guesses.shape[1] == 0 else replace(processors, allowed=None)
            return process_draft(logits, own, history, guesses, columns)

        chain = DraftChain(drafter, self._base.n_tokens)
        draws = self._base.rule.draws(slots.rows, slots.length + 1)
        proposal, after = chain.propose(ChainState(*slots.chain, view), slots.length, draws, k, shaped)
        if isinstance(after.view, PagedView):  # a copy of pages is dropped, with what the guesses left in it
            state = replace(state, draft=after.view.cache)
        return state, proposal

    def _verify_program(
        self,
        leaves: list[jax.Array],
        state: DeviceState,
        places: jax.Array,
        table: jax.Array,
        proposal: Proposal | None,
        processors: ProcessorRows,
        wanted: jax.Array,
        *,
        k: int,
    ) -> tuple[DeviceState, Record, Logprobs]:
        base = self._base
        target, drafter = base.models(leaves)
        slots, history = take_rows(state.slots, places), state.history.take(places)
        rows = row_state(slots, *base.views(state, table, slots.length))
        guesses = jnp.zeros((places.shape[0], 0), jnp.int32) if proposal is None else proposal.tokens

        def shaped(logits: jax.Array) -> jax.Array:
            return process(logits, processors, history, chain_before(guesses))

        proposer = None if drafter is None else DraftChain(drafter, base.n_tokens)
        made, rows, raw = verify_round(
            target,
            proposer,
            rows,
            Proposal(guesses, None) if proposal is None else proposal,
            slots.rows,
            slots.left,
            slots.ends,
            n_tokens=base.n_tokens,
            experts=base.experts,
            rule=base.rule,
            process=shaped,
            simulated=base.simulated_of(k),
        )
        cache, draft = base.stored(state, slots, rows, table, k + 1)
        record = Record.empty(len(places), k + 1, 1, k).after(made, slots.left, slots.ends)
        found = logprobs(raw, record.tokens, wanted, min(MAX_LOGPROBS, raw.shape[-1]))
        history = state.history.put(places, history.with_output(record.tokens, record.produced))
        after = put_rows(state.slots, places, after_rounds(slots, rows, record.produced, record.ended))
        return DeviceState(cache, draft, after, history), record, found
