"""Random traffic through the prefix cache, beside a naive one that knows of no tree, page or order."""

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kimijax.engine.prefix import Lease

from .prefix_memory import Tokens, make

Prefix = tuple[int, ...]


def common(a: Prefix, b: Prefix) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


class NaiveCache:
    """What a prefix cache should do: every cached page as the whole text before it, in a dict with times of release.

    Nothing here knows of trees, pages or orders; it looks at all entries whenever it is asked something.
    """

    def __init__(self, n_pages: int, size: int, lookahead: int) -> None:
        self.size, self.lookahead, self.n_pages = size, lookahead, n_pages
        self.released: dict[Prefix, int] = {}  # when it was last given back
        self.held: dict[int, list[Prefix]] = {}  # by request
        self.n_private: dict[int, int] = {}
        self.clock = 0

    def n_unused(self) -> int:
        return self.n_pages - len(self.released) - sum(self.n_private.values())

    def idle(self, *others: Prefix) -> list[Prefix]:
        used = {p for held in self.held.values() for p in held} | set(others)
        return [p for p in self.released if p not in used]

    def prefix(self, ids: Sequence[int], i: int) -> Prefix:
        return tuple(ids[: (i + 1) * self.size + self.lookahead])

    def match(self, ids: Sequence[int]) -> tuple[list[Prefix], int, Prefix | None]:
        """The pages, the rows of the next one that can be copied, and the page to copy them from.

        Of pages with as much in common it is the first that does not come before the text, or else the last that does.
        """
        pages: list[Prefix] = []
        while (len(pages) + 1) * self.size < len(ids) and self.prefix(ids, len(pages)) in self.released:
            pages.append(self.prefix(ids, len(pages)))
        at, text = len(pages) * self.size, self.prefix(ids, len(pages))
        n_same = {p: common(p, text) for p in self.released if len(p) == at + self.size + self.lookahead}
        most = max(n_same.values(), default=0)
        n_rows = min(most - self.lookahead, len(ids) - 1) - at
        if n_rows < 1:
            return pages, 0, None
        best = sorted(p for p, n in n_same.items() if n == most)
        return pages, n_rows, next((p for p in best if p >= text), best[-1])

    def give_back_idle(self, pages: Sequence[Prefix], *others: Prefix) -> None:
        """The time of those that nobody holds now, the deepest first; `others` are still held."""
        idle = self.idle(*others)
        for p in reversed(pages):
            if p in idle:
                self.clock += 1
                self.released[p] = self.clock

    def evict(self, *others: Prefix) -> None:
        del self.released[min(self.idle(*others), key=lambda p: self.released[p])]


class PrefixMachine(RuleBasedStateMachine):
    """Random requests over an alphabet so small that they share, in pools so small that they compete."""

    def __init__(self) -> None:
        super().__init__()
        self.leases: dict[int, Lease] = {}
        self.texts: dict[int, list[int]] = {}
        self.n_rows: dict[int, int] = {}  # rows written in the target's cache
        self.old: list[list[int]] = [[]]
        self.n_made = 0

    @initialize(size=st.integers(1, 3), n_pages=st.integers(3, 16), drafter=st.booleans())
    def begin(self, size: int, n_pages: int, drafter: bool) -> None:
        self.cache, self.memory = make(n_pages, size, drafter=drafter)
        self.naive = NaiveCache(n_pages, size, int(drafter))

    @rule(
        old=st.integers(0, 99),
        keep=st.integers(2, 12),
        new=st.lists(st.integers(0, 1), max_size=5),
        spare=st.integers(0, 2),
    )
    def admit(self, old: int, keep: int, new: list[int], spare: int) -> None:
        """A new text, or an old one up to some place and then another end."""
        ids = [*self.old[old % len(self.old)][:keep], *new] or [0]
        size, naive = self.cache.page_size, self.naive
        pages, n_copied, source = naive.match(ids)
        n_evicted, missing = self.cache.n_evicted, -(-(len(ids) + spare) // size) - len(pages)
        lease = self.cache.admit(Tokens(ids), len(ids) + spare)
        if source is not None and missing > naive.n_unused() + len(naive.idle(*pages, source)):
            naive.give_back_idle([source], *pages)
            source, n_copied = None, 0
        if missing > naive.n_unused() + len(naive.idle(*pages)):
            naive.give_back_idle(pages)
            assert (lease, n_evicted) == (None, self.cache.n_evicted)
            return
        held = pages if source is None else [*pages, source]
        while naive.n_unused() < missing:
            naive.evict(*held)
        assert lease is not None
        assert (lease.n_cached, lease.start) == (len(pages), len(pages) * size + n_copied)
        assert lease.start <= lease.n_target <= min(lease.start + 1, len(ids) - 1)
        self.memory.copy(lease)
        if source is not None:
            naive.give_back_idle([source], *pages)
        i, start = self.n_made, lease.start
        self.n_made += 1
        naive.held[i], naive.n_private[i] = pages, missing
        self.memory.check(lease, ids, start, start * naive.lookahead)
        self.leases[i], self.texts[i], self.n_rows[i] = lease, ids, start
        self.old.append(list(ids))

    def page_of(self, prefix: Prefix) -> int | None:
        node, n = self.cache._root, self.cache.page_size
        for i in range(0, len(prefix) - self.naive.lookahead, n):
            child = node.children.get(prefix[i : i + n + self.naive.lookahead])
            if child is None:
                return None
            node = child
        return node.page

    def chosen(self, which: int) -> int:
        return sorted(self.leases)[which % len(self.leases)]

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 99), n=st.integers(1, 6))
    def compute(self, which: int, n: int) -> None:
        """A chunk of prompt."""
        i = self.chosen(which)
        stop = min(self.n_rows[i] + n, len(self.texts[i]))
        self.memory.write(self.leases[i], self.texts[i], self.n_rows[i], stop)
        self.n_rows[i] = stop

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 99), new=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def decode(self, which: int, new: list[int]) -> None:
        """A round that commits some tokens, or the request gives way."""
        i = self.chosen(which)
        lease, text, naive = self.leases[i], self.texts[i], self.naive
        n = len(text) + len(new)
        missing = max(-(-n // self.cache.page_size) - len(lease.pages), 0)
        fits = missing <= naive.n_unused() + len(naive.idle())
        assert self.cache.grow(lease, n) == fits
        if not fits:
            self.release(which)
            return
        while naive.n_unused() < missing:
            naive.evict()
        naive.n_private[i] += missing
        start = max(self.n_rows[i] - 1, lease.start)  # the draft row before the new token is written now
        text.extend(new)
        self.memory.write(lease, text, max(start, lease.n_cached * self.cache.page_size), n)
        self.n_rows[i] = n

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 99), lag=st.integers(0, 3))
    def insert(self, which: int, lag: int) -> None:
        i = self.chosen(which)
        lease, text, naive = self.leases[i], self.texts[i], self.naive
        n = max(min(self.n_rows[i], len(text) - naive.lookahead) - lag, 0)
        self.cache.insert(lease, Tokens(text), n)
        for k in range(len(naive.held[i]), n // self.cache.page_size):
            p = naive.prefix(text, k)
            naive.released.setdefault(p, 0)
            naive.held[i].append(p)
            naive.n_private[i] -= 1

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        i = self.chosen(which)
        self.cache.release(self.leases.pop(i))
        held = self.naive.held.pop(i)
        self.naive.give_back_idle(held)
        del self.naive.n_private[i], self.n_rows[i]
        self.old.append(self.texts.pop(i))

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 99))
    def finish(self, which: int) -> None:
        """All of it is computed, left for others and given back."""
        self.compute(which, len(self.texts[self.chosen(which)]))
        self.insert(which, 0)
        self.release(which)

    @precondition(lambda self: not self.leases)
    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.naive.released.clear()

    @invariant()
    def holds_together(self) -> None:
        if "cache" not in vars(self):
            return
        self.cache.check_integrity(list(self.leases.values()))
        naive = self.naive
        assert self.cache.pool.n_free == naive.n_unused()
        assert {self.page_of(p) for p in naive.released} == set(self.cache._nodes)
        order = sorted(naive.idle(), key=lambda p: naive.released[p])
        assert [self.page_of(p) for p in order] == self.cache.pool.idle_pages()
        for i, lease in self.leases.items():
            n = self.n_rows[i]
            self.memory.check(lease, self.texts[i], n, min(n, len(self.texts[i]) - 1) * naive.lookahead)


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(settings.get_profile("kimijax"), max_examples=150, stateful_step_count=40)
