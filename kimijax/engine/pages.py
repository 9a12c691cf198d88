"""Which cache pages are free, who holds the others, and which are kept for what they hold; no arrays."""

from collections import Counter
from collections.abc import Collection, Sequence


class PagePool:
    """Pages first ... first + n - 1. A page is one of

    free  nobody wants what it holds;
    held  by one request or more: `take` gives it to the first, `share` to another, `give_back` ends one's hold;
    idle  held by nobody, but kept for what it holds, until it is forgotten.

    A page that was marked by `keep` while it was held is idle when its last holder gives it back, others are free.
    """

    def __init__(self, n_pages: int, first: int = 0) -> None:
        self._free = list(range(first + n_pages - 1, first - 1, -1))  # popped from the end: the first page first
        self._n_holders = dict.fromkeys(range(first, first + n_pages), 0)
        self._kept: set[int] = set()
        self._idle: dict[int, None] = {}  # in the order in which they were given back
        self.n_pages = n_pages

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_idle(self) -> int:
        return len(self._idle)

    def n_holders(self, page: int) -> int:
        return self._n_holders[page]

    def is_private(self, page: int) -> bool:
        """Whether one request alone holds it, and nobody will read it afterwards: then it may be written."""
        return self._n_holders[page] == 1 and page not in self._kept

    def take(self, n: int) -> list[int] | None:
        """n free pages, or None (and nothing taken) when there are fewer."""
        if n > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._n_holders[page] = 1
        return pages

    def share(self, page: int) -> None:
        """One more holder of a page that is held or idle."""
        if not self._n_holders[page]:
            if page not in self._idle:
                raise RuntimeError(f"page {page} is shared but is free")
            del self._idle[page]
        self._n_holders[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """End one hold of each page, the last page first: of a sequence's pages the first stay idle longest."""
        for page in reversed(pages):
            if not self._n_holders[page]:
                raise RuntimeError(f"page {page} is given back but was not taken")
            self._n_holders[page] -= 1
            if self._n_holders[page]:
                continue
            if page in self._kept:
                self._idle[page] = None
            else:
                self._free.append(page)

    def keep(self, page: int) -> None:
        """From now on the held page is wanted for what it holds, and never written again."""
        if not self.is_private(page):
            raise RuntimeError(f"page {page} cannot be kept: {self._n_holders[page]} hold it, or it is kept already")
        self._kept.add(page)

    def forget(self, page: int) -> None:
        """Free a page that is idle."""
        if page not in self._idle:
            raise RuntimeError(f"page {page} is forgotten but is not idle: {self._n_holders[page]} hold it")
        del self._idle[page]
        self._kept.remove(page)
        self._free.append(page)

    def oldest_idle(self) -> int:
        """The idle page whose last holder gave it back first; there must be one."""
        return next(iter(self._idle))

    def idle_pages(self) -> list[int]:
        """All idle pages, the oldest first."""
        return list(self._idle)

    def check_integrity(self, holders: Sequence[Sequence[int]], kept: Collection[int] = ()) -> None:
        """Raises RuntimeError unless `holders`' pages are the held ones, each as often as counted, and `kept` the kept.

        Args:
          holders: the pages of each holder.
          kept: all pages that were marked to be kept and not forgotten.
        """
        counts = Counter(page for pages in holders for page in pages)
        n = self._n_holders
        if crowded := sorted(page for page, count in counts.items() if count > n.get(page, 0) > 0):
            raise RuntimeError(f"pages {crowded} have two holders or more, fewer are counted")
        leaked = [page for page in n if n[page] > counts[page]]
        foreign = sorted(page for page in counts if not n.get(page))
        if leaked or foreign:
            raise RuntimeError(f"leaked pages {leaked}, foreign {foreign}")
        if set(kept) != self._kept:
            raise RuntimeError(f"kept pages {sorted(self._kept)}, expected {sorted(kept)}")
        held = [page for page in n if n[page]]
        if sorted([*self._free, *self._idle, *held]) != list(n):
            raise RuntimeError("free, idle and held pages are not all pages, each once")
        if self._kept - set(held) != set(self._idle):
            raise RuntimeError("pages that are kept and not held are not the idle ones")
