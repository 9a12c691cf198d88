"""Which cache pages are free and who holds the others; no arrays."""

from collections.abc import Sequence


class PagePool:
    """Pages 0 ... n-1. Every page is either free or held by exactly one request."""

    def __init__(self, n_pages: int) -> None:
        self._free = list(range(n_pages - 1, -1, -1))  # popped from the end: page 0 first
        self._held: set[int] = set()
        self.n_pages = n_pages

    @property
    def n_free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int] | None:
        """n pages, or None (and nothing taken) when there are fewer."""
        if n > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(n)]
        self._held.update(pages)
        return pages

    def give_back(self, pages: Sequence[int]) -> None:
        """Free pages that were taken."""
        for page in pages:
            if page not in self._held:
                raise RuntimeError(f"page {page} is given back but was not taken")
            self._held.remove(page)
        self._free.extend(reversed(pages))

    def check_integrity(self, holders: Sequence[Sequence[int]]) -> None:
        """Raises RuntimeError unless `holders`' pages are exactly the held ones, each once."""
        held = [page for pages in holders for page in pages]
        if len(held) != len(set(held)):
            raise RuntimeError("a page has two holders")
        if set(held) != self._held:
            raise RuntimeError(
                f"leaked pages {sorted(self._held - set(held))}, foreign {sorted(set(held) - self._held)}"
            )
        if sorted([*self._free, *self._held]) != list(range(self.n_pages)):
            raise RuntimeError("free and held pages are not all pages, each once")
