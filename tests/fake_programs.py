"""Programs of a few lines of Python that stand in for the engine's compiled ones, and say at once what it does wrong.

They keep what each row of each page was made from and check it: a token computed without its predecessors in its own
pages, a page written by two requests, a draft row made before another next token, or a donated state used again fails.
The next token is a hash of all before it: an output is right only if every token of it was.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np

from kimijax.engine import engine as engine_module
from kimijax.engine.config import EngineConfig, bucket
from kimijax.engine.device import MAX_ENDS
from kimijax.engine.engine import Engine
from kimijax.engine.programs import Batch, BlockTables, Chunk, Programs, ProgramSet
from kimijax.engine.request import Request
from kimijax.model import Target
from kimijax.rounds import Record
from kimijax.speculative_options import SpeculativeOptions
from kimijax.wiring import Wiring

VOCABULARY = 40
EOS = 0
BROKEN = 39  # a prompt that begins with it has logits that are not a number, after a few tokens
WRONG = -1  # what a row holds that a rejected guess has left


def next_token(tokens: Sequence[int]) -> int:
    made = zlib.crc32(bytes(tokens))
    return -1 if tokens[0] == BROKEN and made % 4 == 0 else made % VOCABULARY


def expected_output(request: Request) -> tuple[list[int], str]:
    """What a request must draw, worked out without an engine, and why it ends."""
    output: list[int] = []
    while len(output) < request.limit:
        token = next_token([*request.prompt, *output])
        if token < 0:
            return output, "abort"
        output.append(token)
        if token in request.stop_ids:
            return output, "stop"
    return output, "length"


class InjectedError(RuntimeError):
    """A program failed."""


class Late(np.ndarray):
    """An array that is still on its way to the host."""

    def copy_to_host_async(self) -> None:
        pass


@dataclass
class Slot:
    """A place on the device: what it knows of a request."""

    request_id: str
    tokens: list[int]  # all of them; the last is not cached
    left: int
    ends: frozenset[int]
    ready: bool = False


class FakeState:
    """(page, offset) -> what the two rows there were made from; unusable once it was given to a program."""

    def __init__(self, rows: dict[tuple[int, int], tuple[int, int]], places: dict[int, Slot]) -> None:
        self._content: tuple[dict[tuple[int, int], tuple[int, int]], dict[int, Slot]] | None = rows, places

    def donate(self) -> tuple[dict[tuple[int, int], tuple[int, int]], dict[int, Slot]]:
        assert self._content is not None, "buffer has been deleted or donated"
        content, self._content = self._content, None
        return content


class FakePrograms:
    """Stands in for `kimijax.engine.programs.Programs`. A round accepts some of its guesses, as a hash has it."""

    def __init__(
        self,
        model: Target,
        drafter: object,
        config: EngineConfig,
        options: SpeculativeOptions | None,
        n_tokens: int,
        mesh: object,
        experts: str,
    ) -> None:
        self.config, self.has_drafter, self.simulated = config, drafter is not None, None
        self.most_drafts, self.shape, self.is_adaptive = 0, None, True
        if options is not None:
            self.most_drafts, self.shape = options.num_steps, options.tree
        self.room = 1 if options is None else options.room
        spare = self.room if self.room > 1 else 0
        self.n_groups = n_groups_of(mesh)
        self.n_pages = config.pages(spare, self.n_groups)
        self.windows = config.windows(max(spare, config.burst) if self.has_drafter else spare)
        self.tables = BlockTables(config.max_batch, self.windows[-1] // config.page_size)
        self.leader = None
        self.failing = ""  # name of the program that raises next, after it took the state
        self.rounds_run: dict[tuple[str, int], int] = {}  # (request, its tokens) -> guesses that passed after them

    draft_counts = Programs.draft_counts
    most_rounds = cast(Any, Programs.most_rounds)
    reach = cast(Any, Programs.reach)
    touched = cast(Any, Programs.touched)
    batch = cast(Any, ProgramSet.batch)
    batch_size = cast(Any, ProgramSet.batch_size)
    batch_sizes = cast(Any, ProgramSet.batch_sizes)
    rows = cast(Any, ProgramSet.rows)
    group_of = cast(Any, ProgramSet.group_of)

    def new_state(self) -> FakeState:
        return FakeState({}, {})

    def prefill(self, state: FakeState, chunks: Sequence[Chunk]) -> FakeState:
        rows, places = self._take(state, "prefill")
        length = bucket(max(c.stop - c.start for c in chunks), self.config.chunk_lengths)
        groups = [self.group_of(c.request) for c in chunks]
        assert len(set(groups)) == len(groups)
        assert len({c.start == 0 for c in chunks}) == 1
        for c in chunks:
            assert 0 < c.stop - c.start <= self.config.chunk_size
            assert c.stop < c.request.n_tokens  # there is a token behind
            self._check_group(c.request.place, c.pages)
            self._check(rows, c.pages, c.request.tokens(0, c.start + 1))
            for at in range(c.start, c.stop):
                rows[self._place(c.pages, at)] = made_from(c.request.tokens(0, at + 2))
            for at in range(c.stop, c.start + length):  # padding
                if at // self.config.page_size < len(c.pages):
                    rows[self._place(c.pages, at)] = WRONG, WRONG
        return FakeState(rows, places)

    def _check_group(self, place: int, pages: Sequence[int]) -> None:
        """A request has pages of its group of devices alone."""
        group = place * self.n_groups // self.config.max_batch
        assert {page * self.n_groups // self.n_pages for page in pages if page >= 0} <= {group}

    def start(self, state: FakeState, request: Request) -> FakeState:
        rows, places = self._take(state, "start")
        ends = frozenset(sorted(request.stop_ids)[:MAX_ENDS])
        left = request.limit - len(request.output)
        places[request.place] = Slot(request.id, request.tokens(0, request.n_tokens), left, ends)
        return FakeState(rows, places)

    def copy(self, state: FakeState, source: int, target: int) -> FakeState:
        rows, places = self._take(state, "copy")
        for offset in range(self.config.page_size):
            if (source, offset) in rows:
                rows[target, offset] = rows[source, offset]
        return FakeState(rows, places)

    def rounds(
        self, state: FakeState, batch: Batch, n_rounds: int, k: int, *, prepare: bool = True
    ) -> tuple[FakeState, Record]:
        rows, places = self._take(state, "rounds")
        b, most = len(batch.places), self.most_rounds(k)
        assert 0 < n_rounds <= most
        assert k in self.draft_counts
        tokens, accepted = np.full((b, most * (k + 1)), -1), np.full((most, b), -1)
        produced, ended = np.zeros(b, int), np.zeros(b, bool)
        n_run = 0
        for i, (place, pages) in enumerate(zip(batch.places.tolist(), batch.table.tolist(), strict=True)):
            if place == self.config.max_batch:
                assert max(pages) < 0
                continue
            self._check_group(place, pages)
            assert i * self.n_groups // b == place * self.n_groups // self.config.max_batch  # rows, too
            new, counts, ended[i] = self._row(rows, places[place], pages, n_rounds, k)
            tokens[i, : len(new)], produced[i], accepted[: len(counts), i] = new, len(new), counts
            n_run = max(n_run, len(counts))
            if counts:
                places[place].ready = prepare or k > 0
        found = tokens, produced, ended, np.zeros((most, b, 0)), accepted, np.asarray(n_run)
        return FakeState(rows, places), Record(*(cast(Any, x.view(Late)) for x in found))

    def _row(
        self, rows: dict[tuple[int, int], tuple[int, int]], slot: Slot, pages: list[int], n_rounds: int, k: int
    ) -> tuple[list[int], list[int], bool]:
        """A request's rounds: its tokens, the guesses that passed in each round, and whether it ended."""
        out: list[int] = []
        counts: list[int] = []
        ended = False
        for _ in range(n_rounds):
            if not slot.left:
                break
            length = len(slot.tokens) - 1
            self._check(rows, pages, slot.tokens)
            passed = zlib.crc32(bytes([*slot.tokens, 1])) % (k + 1) if slot.ready else 0
            counts.append(passed if slot.ready and k else -1)
            if slot.ready and k:
                self.rounds_run[slot.request_id, len(slot.tokens)] = passed
            for _ in range(min(passed + 1, slot.left)):
                token = next_token(slot.tokens)
                out.append(token)
                slot.left -= 1
                if token in slot.ends or token < 0:
                    ended, slot.left = True, 0
                slot.tokens.append(max(token, 0))
                if ended:
                    break
            for at in range(length, length + self.reach(k, 1)):
                true = at + 1 < len(slot.tokens)
                if true or at // self.config.page_size < len(pages):
                    place = self._place(pages, at)
                    if true or place[0] >= 0:
                        rows[place] = made_from(slot.tokens[: at + 2]) if true else (WRONG, WRONG)
            slot.ready = k > 0 or slot.ready
        return out, counts, ended

    def _take(self, state: FakeState, name: str) -> tuple[dict[tuple[int, int], tuple[int, int]], dict[int, Slot]]:
        content = state.donate()
        if self.failing == name:
            self.failing = ""
            raise InjectedError("injected")
        return content

    def _place(self, pages: Sequence[int], at: int) -> tuple[int, int]:
        return pages[at // self.config.page_size], at % self.config.page_size

    def _check(self, rows: dict[tuple[int, int], tuple[int, int]], pages: Sequence[int], tokens: Sequence[int]) -> None:
        """All rows before the last of `tokens` are there, and are theirs."""
        for at in range(len(tokens) - 1):
            found, right = rows[self._place(pages, at)], made_from(tokens[: at + 2])
            n = 2 if self.has_drafter else 1
            assert found[:n] == right[:n], f"row {at} was made from other tokens"


def made_from(tokens: Sequence[int]) -> tuple[int, int]:
    """Of the target's row at the last token but one, and of the drafter's."""
    return zlib.crc32(bytes(tokens[:-1])), zlib.crc32(bytes(tokens))


class AnyNumber:
    """Chooses among the numbers of drafts by a hash: stands in for `kimijax.engine.adaptive.Adaptive`."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts, self.n, self.costs = counts, 0, self

    def choose(self, of: object, groups: object) -> Any:
        self.n += 1
        return SimpleNamespace(k=self.counts[zlib.crc32(bytes([self.n % 256])) % len(self.counts)])

    def status(self, of: object, groups: object) -> None:
        pass

    def seconds(self, of: object, k: int) -> float:
        return 0.01

    def observe(self, of: object, k: int, seconds: float, *rounds: object) -> None:
        assert k in self.counts
        assert all(rounds)


def n_groups_of(mesh: Any) -> int:
    """Of the mesh that an engine is given: here a number in place of one."""
    return 1 if mesh is None else mesh


def make_engine(k: int = 0, width: int = 1, n_groups: int = 1, **sizes: Any) -> tuple[Engine, FakePrograms]:
    """k drafts (0: no drafter), of a tree if width is more than 1."""
    config = EngineConfig(**sizes)
    own = SimpleNamespace(max_positions=config.context_length, vocab_size=VOCABULARY, n_layers=1, hidden=1)
    drafter = SimpleNamespace(
        wiring=Wiring((0,), 1, 1),
        config=SimpleNamespace(max_positions=config.context_length),
    )
    options = SpeculativeOptions("EAGLE3", k, width, k * width + 1, adaptive=False) if k else None
    fakes = {"Programs": FakePrograms, "RulePrograms": lambda programs: None}
    with mock.patch.multiple(engine_module, **fakes):
        engine = Engine(
            cast(Target, SimpleNamespace(config=own)),
            config,
            drafter=cast(Any, drafter) if k else None,
            speculation=options,
            stop_ids=[EOS],
            mesh=cast(Any, n_groups),
        )
    if k:
        engine._adaptive = cast(Any, AnyNumber(engine._programs.draft_counts))
    return engine, cast(FakePrograms, engine._programs)
