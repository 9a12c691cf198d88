"""Pages whose contents can be told: a dict from (page, row) to the tokens that the row was made from.

A row of another sequence, a draft row before another token and a row that was overwritten are seen at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kimijax.engine.pages import PagePool
from kimijax.engine.prefix import Lease, PrefixCache


@dataclass
class Tokens:
    ids: list[int]

    @property
    def n_tokens(self) -> int:
        return len(self.ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        return self.ids[start:stop]


class Memory:
    """What the pages of both caches hold: the tokens that each row was made from."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.target: dict[tuple[int, int], tuple[int, ...]] = {}
        self.draft: dict[tuple[int, int], tuple[int, ...]] = {}

    def place(self, lease: Lease, at: int) -> tuple[int, int]:
        return lease.pages[at // self.cache.page_size], at % self.cache.page_size

    def copy(self, lease: Lease) -> None:
        todo = self.cache.copy(lease)
        if todo is not None:
            assert self.cache.pool.is_private(todo.target)
            assert todo.n_rows > 0
            for row in range(todo.n_rows):
                for rows in (self.target, self.draft):
                    rows[todo.target, row] = rows[todo.source, row]
        self.cache.copied(lease)

    def write(self, lease: Lease, ids: Sequence[int], start: int, stop: int) -> None:
        """Rows start ... stop - 1; the draft row of the last token, whose next is not known, holds nothing of use."""
        self.cache.check_write(lease, start, stop)
        for at in range(start, stop):
            self.target[self.place(lease, at)] = tuple(ids[: at + 1])
            self.draft[self.place(lease, at)] = tuple(ids[: at + 2]) if at + 1 < len(ids) else ()

    def check(self, lease: Lease, ids: Sequence[int], n_rows: int, n_draft: int) -> None:
        for at in range(n_rows):
            assert self.target[self.place(lease, at)] == tuple(ids[: at + 1])
        for at in range(n_draft):
            assert self.draft[self.place(lease, at)] == tuple(ids[: at + 2])


def make(n_pages: int, page_size: int, *, drafter: bool = True) -> tuple[PrefixCache, Memory]:
    cache = PrefixCache(PagePool(n_pages), page_size, drafter=drafter)
    return cache, Memory(cache)
