"""The engine: requests of token ids go in, drawn token ids come out, step by step.

A step plans and starts its programs, and only then reads what those of the step before drew: the devices never wait for
the host. What a program did is known one step late; a request that has ended meanwhile idles in the step after.
"""

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ..drafter import Drafter
from ..errors import ConfigError, RequestError
from ..logprobs import Logprobs
from ..model import Target
from ..rounds import Record
from ..speculative_options import SpeculativeOptions
from ..startup_progress import StartProgress
from .adaptive import Adaptive, Status
from .config import EngineConfig, bucket
from .flight import Bucket, Flight, StepPlan, groups_of, token_logprobs
from .programs import Batch, Caller, Programs
from .request import WIDEST, Constraint, ConstraintError, Phase, Request, Sampling, StepOutput, TokenLogprobs
from .rule_programs import RulePrograms, RuleRows
from .scheduler import PrefillPlan, Scheduler
from .stats import EngineStats
from .warm_up import measure_costs, warm_up_programs

log = logging.getLogger(__name__)

_STATUS_INTERVAL = 16  # choices between two estimates for `EngineStats`


class Engine:
    """Continuous batching over one model. Not thread-safe: one thread calls it (see `runner`)."""

    def __init__(
        self,
        model: Target,
        config: EngineConfig,
        *,
        drafter: Drafter | None = None,
        speculation: SpeculativeOptions | None = None,
        recorded: Sequence[float] = (),
        n_tokens: int | None = None,
        stop_ids: Sequence[int] = (),
        mesh: Mesh | None = None,
        experts: str = "reference",
    ) -> None:
        """
        Args:
          model: filled target.
          config: sizes.
          drafter: filled EAGLE-3 head, wired to the model.
          speculation: how it is used; None exactly where there is no drafter.
          recorded: acceptance by position where the drafter was measured.
          n_tokens: ids from here on belong to no token and are never drawn; default: all are tokens.
          stop_ids: ids that end every request that does not ignore them.
          mesh: where the models lie.
          experts: implementation of the expert product.
        Raises:
          ConfigError: a context longer than the model's or the drafter's, a drafter for another model or without
            settings, too few pages.
        """
        self._check(model, config, drafter, speculation)
        self.config, self.speculation = config, speculation
        self.vocab_size = model.config.vocab_size
        self.n_tokens = self.vocab_size if n_tokens is None else min(n_tokens, self.vocab_size)
        self.stop_ids = frozenset(stop_ids)
        self._programs = Programs(model, drafter, config, speculation, self.n_tokens, mesh, experts)
        self._rules = RulePrograms(self._programs)
        self._recorded = tuple(recorded)
        self._adaptive: Adaptive[Bucket, str] | None = None  # from warm-up on
        self._state = self._programs.new_state()
        self._scheduler = self._new_scheduler()
        self._flight: Flight | None = None
        self._unprepared: set[str] = (
            set()
        )  # requests whose next round guesses nothing: the drafter has no output for them
        self._undelivered: list[StepOutput] = []  # made by a step that has not returned yet
        self._rule_rows: tuple[tuple[int | Request, ...], RuleRows] | None = None  # of the batch before
        self._last_read = 0.0
        self._accepted: dict[int, list[int]] = {}  # k -> rounds by accepted drafts
        self._n_output = self._n_without_guesses = 0
        self._n_chosen = 0
        self._status: Status | None = None

    def _check(
        self, model: Target, config: EngineConfig, drafter: Drafter | None, options: SpeculativeOptions | None
    ) -> None:
        limit = model.config.max_positions
        if config.context_length > limit:
            raise ConfigError("context_length", config.context_length, f"at most the model's {limit} positions")
        if (drafter is None) != (options is None):
            raise ConfigError("speculation", options, "settings exactly where there is a drafter")
        if drafter is None:
            return
        drafter.wiring.check_target(model.config.n_layers, model.config.hidden)
        if config.context_length > drafter.config.max_positions:
            expected = f"at most the drafter's {drafter.config.max_positions} positions"
            raise ConfigError("context_length", config.context_length, expected)

    def _new_scheduler(self) -> Scheduler:
        p = self._programs
        reach = max(p.reach(k, 1) for k in p.draft_counts)
        sizes = {"reach": reach, "room": p.room, "n_groups": p.n_groups}
        return Scheduler(self.config, p.n_pages, drafter=p.has_drafter, **sizes)

    def make_request(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        id: str | None = None,
        constraint: Constraint | None = None,
    ) -> Request:
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
        sampling.rules.check(self.n_tokens, stops, WIDEST)
        return Request(
            id=secrets.token_hex(12) if id is None else id,
            prompt=tuple(prompt),
            sampling=sampling,
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            stop_ids=frozenset(stops),
            limit=room if sampling.max_tokens is None else min(sampling.max_tokens, room),
            constraint=constraint,
        )

    def add(self, request: Request) -> None:
        """Queue a request. Raises QueueFullError, and RequestError for a constraint where acceptance is simulated."""
        if request.constraint is not None and self._programs.simulated is not None:
            expected = "none: acceptance is simulated here, and the tokens are nobody's output"
            raise RequestError("constraint", f"found one, expected {expected}")
        self._scheduler.add(request)

    def cancel(self, request_id: str) -> None:
        """Drop a request and free its pages at once; an unknown id is ignored: it may just have finished."""
        request = self._scheduler.find(request_id)
        if request is not None:
            self._finish(request)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def stats(self) -> EngineStats:
        s = self._scheduler
        return EngineStats(
            len(s.running),
            len(s.waiting),
            s.n_available,
            s.n_pages,
            s.n_prompt_tokens,
            s.n_cached_tokens,
            self._n_output,
            s.n_preempted,
            {k: tuple(counts) for k, counts in self._accepted.items()},
            self._n_without_guesses,
            self._status,
            self._programs.simulated is not None,
        )

    def step(self) -> list[StepOutput]:
        """Chunks of prompts, if any wait, and a decoding step, if any request decodes; what the step before drew.

        Without a warm-up the first step makes one where the number of drafts is to be chosen by what it costs.
        """
        self._undelivered = []
        if self._adaptive is None and self.speculation is not None and self.speculation.adaptive:
            log.info("the first step waits for the warm-up: what rounds cost is not measured yet")
            self.warm_up()
        n_plans = self._prefill()
        while self._scheduler.outranked():
            if not self._drain():
                self._preempt()
            n_plans += self._prefill()
        flight = self._decode(alone=n_plans == 0)
        self._drain()
        # A request that has ended meanwhile idles in the new step; if all have, there is nothing to read.
        self._flight = flight if flight is not None and flight.is_alive else None
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def _prefill(self) -> int:
        """Start the programs of this step's chunks of prompts; how many there were."""
        p, plans = self._programs, self._scheduler.plan_prefill()
        for together in _side_by_side(plans, p.group_of):
            for plan in together:
                if plan.copy is not None:
                    self._state = p.copy(self._state, plan.copy.source, plan.copy.target)
            if chunks := [plan for plan in together if plan.stop > plan.start]:
                self._state = p.prefill(self._state, chunks)
        for plan in plans:
            if plan.last:
                self._start(plan.request)
        return len(plans)

    def _start(self, request: Request) -> None:
        """Its prompt's program is under way: it takes its place among those that decode."""
        self._state = self._programs.start(self._state, request)
        if request.needs_rules:
            self._state = self._rules.begin(self._state, request)
        self._unprepared.add(request.id)

    def _decode(self, *, alone: bool) -> Flight | None:
        """Start a decoding step, with pages for every row that it may write."""
        s, p = self._scheduler, self._programs
        while requests := s.ready():
            rules = any(r.needs_rules for r in requests)
            if rules and any(r.constraint is not None for r in requests) and self._drain():
                continue  # the masks are made of what is committed
            longest = max(r.cached + r.in_flight for r in requests)
            choice = self._choose(requests, rules, longest)
            if s.grow(requests, p.reach(choice.k, choice.n_rounds)):
                if self._drain():
                    continue
                choice = choice._replace(k=0, n_rounds=1)
                if short := s.grow(requests, 1):
                    self._preempt(s.group_of(short[0]))
                    continue
            size, window = self._bucket(requests, longest + p.touched(choice.k, choice.n_rounds))
            return self._start_decode(requests, p.batch(requests, size, window), rules, choice, alone)
        return None

    def _choose(self, requests: Sequence[Request], rules: bool, longest: int) -> StepPlan:
        """How many drafts, and rounds."""
        p = self._programs
        k = p.most_drafts
        if k and self._adaptive is not None:
            of, groups = self._bucket(requests, longest + p.touched(k, p.most_rounds(k))), groups_of(requests)
            k = self._adaptive.choose(of, groups).k
            self._n_chosen += 1
            if self._n_chosen % _STATUS_INTERVAL == 1:
                self._status = self._adaptive.status(of, groups)
            if rules:
                k = p.most_drafts if k else 0
        prepare = k > 0
        if prepare and all(r.id in self._unprepared for r in requests):
            return StepPlan(0, 1, True)  # there is nothing to guess from yet
        one = rules or self._scheduler.wants_prefill
        return StepPlan(k, 1 if one else p.most_rounds(k), prepare)

    def _bucket(self, requests: Sequence[Request], reach: int) -> Bucket:
        windows = self._programs.windows
        return self._programs.batch_size(requests), bucket(min(reach, windows[-1]), windows)

    def _start_decode(
        self, requests: Sequence[Request], batch: Batch, rules: bool, choice: StepPlan, alone: bool
    ) -> Flight:
        k, n_rounds, prepare = choice
        begun, found = time.perf_counter(), None
        if rules:
            record, found = self._rule_round(requests, batch, k)
        else:
            self._state, record = self._programs.rounds(self._state, batch, n_rounds, k, prepare=prepare)
        for x in (record.tokens, record.produced, record.accepted, record.n_rounds):
            x.copy_to_host_async()
        fresh = frozenset(r.id for r in requests if r.id in self._unprepared)
        if rules or prepare:
            self._unprepared -= fresh
        else:
            self._unprepared.update(r.id for r in requests)
        most, least = n_rounds * (k + 1), n_rounds
        self._scheduler.begin(requests, most, least)
        size = len(batch.places), batch.table.shape[1] * self.config.page_size
        rows = self._programs.rows(requests, len(batch.places))
        return Flight(tuple(requests), rows, record, found, k, most, least, fresh, size, begun, alone and not rules)

    def _rule_round(self, requests: Sequence[Request], batch: Batch, k: int) -> tuple[Record, Logprobs]:
        """A round in two halves, with the masks of grammars along the draft in between."""
        size = len(batch.places)
        at = self._programs.rows(requests, size)
        if self._rule_rows is None or self._rule_rows[0] != (size, *requests):
            self._rule_rows = (size, *requests), RuleRows.of(requests, at, size)
        rows = self._rule_rows[1]
        constrained = any(r.constraint is not None for r in requests)
        proposal = None
        if k:
            first = self._rules.all_allowed(size, 1)
            if constrained:
                first = first.copy()
                self._mask(first, at, requests, [()] * size)
            self._state, proposal = self._rules.propose(self._state, batch, rows, first, k)
        masks = self._rules.all_allowed(size, k + 1)
        if constrained:
            masks = masks.copy()
            guesses = np.asarray(proposal.tokens).tolist() if proposal is not None else [()] * size
            self._mask(masks, at, requests, guesses)
        self._state, record, found = self._rules.verify(self._state, batch, rows, proposal, masks, k)
        return record, found

    def _mask(
        self, masks: np.ndarray, at: np.ndarray, requests: Sequence[Request], guesses: Sequence[Sequence[int]]
    ) -> None:
        """Fill in what constraints allow along the guesses of each row; requests are at rows int [n]. A request whose
        constraint fails ends, alone."""
        for i, request in zip(at.tolist(), requests, strict=True):
            if request.constraint is None or request.phase is Phase.FINISHED:
                continue
            try:
                masks[i] = request.constraint.masks(guesses[i])
            except ConstraintError as error:
                self._give_up(request, str(error))

    def _give_up(self, request: Request, error: str) -> None:
        request.finish_reason = "abort"
        self._finish(request)
        self._undelivered.append(StepOutput(request.id, (), "abort", error))

    def _drain(self) -> bool:
        """Read the step that is under way; False if there is none."""
        flight, self._flight = self._flight, None
        if flight is None:
            return False
        at, record = flight.rows, flight.record
        tokens, produced = np.asarray(record.tokens)[at].tolist(), np.asarray(record.produced)[at].tolist()
        n_rounds = int(record.n_rounds)
        accepted = np.asarray(record.accepted)[:n_rounds, at]
        found = [] if flight.logprobs is None else [np.asarray(x)[at] for x in flight.logprobs]
        now = time.perf_counter()
        seconds = now - max(self._last_read, flight.begun)
        self._last_read = now
        if self._adaptive is not None and n_rounds:
            flight.teach(self._adaptive, accepted, seconds)
        rows = zip(flight.requests, tokens, produced, accepted.T.tolist(), strict=True)
        for i, (request, of_row, n_drawn, rounds) in enumerate(rows):
            if request.phase is Phase.FINISHED:
                continue  # cancelled, or found to have ended by the step before
            drawn = of_row[:n_drawn]
            own = token_logprobs(found, i, drawn, request) if found else ()
            n_new = self._commit(request, drawn, own, flight)
            if flight.k:
                self._count(flight, request, rounds, n_new, n_drawn)
        return True

    def _count(self, flight: Flight, request: Request, accepted: Sequence[int], n_new: int, n_drawn: int) -> None:
        """Count a request's rounds with drafts, as long as they began before its end.

        Args:
          flight: of k drafts a round.
          request: one of its.
          accepted: drafts of each round, -1 where there were none.
          n_new: tokens that came to its output.
          n_drawn: tokens that were drawn.
        """
        own, total = request.accepted.get(flight.k), self._accepted.get(flight.k)
        if own is None:
            own = request.accepted[flight.k] = [0] * (flight.k + 1)
        if total is None:
            total = self._accepted[flight.k] = [0] * (flight.k + 1)
        at = 1 if flight.fresh and request.id in flight.fresh else 0
        for a in accepted:
            if a < 0:
                continue
            if at < n_new:
                own[a] += 1
                total[a] += 1
            at += a + 1
        if n_drawn > at and flight.logprobs is None:
            self._note_broken_drafter(request)

    def _note_broken_drafter(self, request: Request) -> None:
        """The text is right all the same, but nothing is gained any more."""
        if not self._n_without_guesses:
            log.error(
                "request %s: the drafter's logits are not a number, and nothing is guessed: its weights or its "
                "arithmetic are at fault (said once; see the engine's counters)",
                request.id,
            )
        self._n_without_guesses += 1

    def _commit(
        self, request: Request, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], flight: Flight
    ) -> int:
        """Record drawn tokens up to the request's end; how many those were."""
        output = request.output
        before = len(output)
        error = None
        if tokens and min(tokens) < 0:
            request.extend(tokens[: next(i for i, t in enumerate(tokens) if t < 0)])
            if request.finish_reason is None:
                error = "the model's logits are not a number: its weights or its arithmetic are at fault"
                if request.needs_rules:
                    error = f"{error}; or the request's rules leave no token"
                request.finish_reason = "abort"
        else:
            request.extend(tokens)
        n_new = len(output) - before
        new = tuple(tokens if n_new == len(tokens) else tokens[:n_new])
        self._n_output += n_new
        if request.constraint is not None and error is None:
            try:
                request.constraint.commit(new)
            except ConstraintError as e:
                error, request.finish_reason = str(e), "abort"
        self._scheduler.commit(request, n_new, flight.most, flight.least)
        if request.finish_reason is not None:
            self._finish(request)
        if n_new or request.finish_reason is not None:
            own = tuple(logprobs[:n_new]) if logprobs else ()
            self._undelivered.append(StepOutput(request.id, new, request.finish_reason, error, own))
        return n_new

    def _finish(self, request: Request) -> None:
        self._unprepared.discard(request.id)
        self._scheduler.finish(request)
        if self._flight is not None and not self._flight.is_alive:
            # Nothing of it is wanted, and nobody may step for long: read later it would seem to have taken that long.
            self._flight = None

    def _preempt(self, group: int | None = None) -> None:
        self._unprepared.discard(self._scheduler.preempt(group).id)

    def recover(self) -> list[StepOutput]:
        """After a step that raised: end every request that was running and rebuild the state, which was donated.

        Returns what the step had made before it raised (a request may have ended with it), then the ends.

        Raises:
          RuntimeError: other processes follow this one: what the step has left there is not known.
        """
        if self._programs.leader is not None:
            raise RuntimeError("a step failed, and the hosts may not be in step any more; the log has the reason")
        made, self._undelivered = self._undelivered, []
        self._flight = None
        dropped = list(self._scheduler.running)
        for request in dropped:
            self._finish(request)
        self._scheduler.clear()
        for x in jax.tree.leaves(self._state):  # not donated if the step failed early; two caches may not fit
            if isinstance(x, jax.Array) and not x.is_deleted():
                x.delete()
        self._state = self._programs.new_state()
        return [*made, *(StepOutput(r.id, (), "abort", error="the engine step failed") for r in dropped)]

    def lead(self, leader: Caller) -> None:
        """From now on other processes repeat what this engine calls: there its own `repeat` gets every call."""
        self._programs.leader = leader

    def repeat(self, program: str, args: Sequence[Any], static: Mapping[str, Any]) -> None:
        """Call a program as the leading process did, on this process's part of weights and state."""
        self._state = self._programs.repeat(program, self._state, args, static)

    def warm_up(self, progress: StartProgress | None = None) -> None:
        """Compile every program that traffic can ask for, and measure what each number of drafts costs.

        Args:
          progress: where to show how far it is.
        Raises:
          RuntimeError: requests are running: the measurements would overwrite their places.
        """
        if self._scheduler.running:
            raise RuntimeError(f"warm-up with {len(self._scheduler.running)} requests running, expected none")
        progress = StartProgress.hidden() if progress is None else progress
        with progress.counting("compiling", "programs") as report:
            self._state = warm_up_programs(self._programs, self._rules, self._state, report)
        options = self.speculation
        if options is not None and options.adaptive:
            with progress.stage("measuring rounds"):
                self._state, costs = measure_costs(self._programs, self._state)
            self._adaptive = Adaptive(costs, self._recorded)

    def n_compiled(self) -> int:
        """Programs compiled so far; constant after `warm_up`."""
        return self._programs.n_compiled() + self._rules.n_compiled()

    def check_integrity(self) -> None:
        """Raises RuntimeError when pages, places and requests do not add up."""
        self._scheduler.check_integrity()


def _side_by_side(plans: Sequence[PrefillPlan], group_of: Callable[[Request], int]) -> list[list[PrefillPlan]]:
    """Plans in their order, in runs that one program may carry out: of one group of devices each, all of them the first
    chunk of a prompt, or none; a copy reads what the runs before it made."""
    runs: list[list[PrefillPlan]] = []
    taken: set[tuple[int, bool]] = set()
    for plan in plans:
        group, is_first = group_of(plan.request), plan.start == 0
        if not runs or group in {g for g, _ in taken} or any(first != is_first for _, first in taken):
            runs.append([])
            taken = set()
        runs[-1].append(plan)
        taken.add((group, is_first))
    return runs
