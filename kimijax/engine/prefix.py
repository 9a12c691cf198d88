"""Cached prefixes: which pages hold rows that a new request would compute again. A radix tree over pages, no arrays.

A page is an index into the target's cache and into the drafter's alike: one block table serves both. The target's row
of position t is made from tokens 0 ... t. The drafter's row t is made from the target's features of position t and from
the token after it, so from tokens 0 ... t+1. A page of P rows from position s on therefore belongs to P + 1 tokens
x[s] ... x[s+P], where there is a drafter: its last draft row is wrong before any other x[s+P]. The rules:

1  A page is found by all the tokens that its rows were made from, `lookahead` (1 with a drafter, 0 without) of them
   beyond its last row. What is shared is right for both caches up to its last row.
2  The last token of a request is always computed: its logits draw the next token, its features begin the next draft.
   So a match ends at n - 1 of n tokens at the most.
3  A page is in the tree only when all its rows, in both caches, have been written from true features and will not be
   written again; and a page that is in the tree, or has two holders, is never written (`check_write`). The part of a
   page that matches is copied, row by row as valid, into a page of the request's own, which is written from there on.
4  Features are not cached: the target has to run at a position again to give them to the drafter. So where the draft
   row of a position is invalid the target's row is computed again too, into that same copy: a request computes both
   from `Lease.start` on, one less than the `Lease.n_target` rows that are valid for the target alone, at the most.

With pages of 4 and a drafter, and [1,2,3,4,5] computed and cached: page 0 belongs to 1,2,3,4 before 5. [1,2,3,4,9]
does not find it, since draft row 3 must know of 9: rows 0 ... 2 are copied and both models start at 3. It leaves a page
of its own. [1,2,3,4,5] finds page 0 and starts at 4. [1,2,3,4] copies rows 0 ... 2 and starts at 3, its last token.

A request holds the pages of its prefix from the first on, and gives them back the last first. So the holder of a page
holds all before it, and a page becomes idle before those that lead to it: the page that has been idle for longest is
always a leaf. Evicting it frees a page and loses nothing but time.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from .pages import PagePool


class TokenSequence(Protocol):
    """Token ids of a request, prompt and output together; `kimijax.engine.request.Request` is one."""

    @property
    def n_tokens(self) -> int: ...
    def tokens(self, start: int, stop: int) -> Sequence[int]: ...


@dataclass(eq=False, slots=True)
class _Node:
    """One page. Its key are the tokens that its rows were made from and the nodes before it do not tell."""

    key: tuple[int, ...]
    page: int
    parent: "_Node | None"
    children: "dict[tuple[int, ...], _Node]" = field(default_factory=lambda: {})
    keys: list[tuple[int, ...]] = field(default_factory=lambda: [])  # of the children, sorted

    def add(self, child: "_Node") -> None:
        self.children[child.key] = child
        self.keys.insert(bisect_left(self.keys, child.key), child.key)

    def remove(self, child: "_Node") -> None:
        del self.children[child.key]
        del self.keys[bisect_left(self.keys, child.key)]

    def closest(self, tokens: tuple[int, ...]) -> "tuple[_Node | None, int]":
        """The child whose key begins with most of `tokens`, and how many: a neighbour of their place in the order."""
        at = bisect_left(self.keys, tokens)
        near = [(_n_common(key, tokens), key) for key in self.keys[max(at - 1, 0) : at + 1]]
        n, key = max(near, default=(0, ()))
        return (self.children[key], n) if n else (None, 0)


class PageCopy(NamedTuple):
    """A copy to make in both caches before the request computes anything: `n_rows` rows, or the whole page."""

    source: int
    target: int
    n_rows: int


@dataclass(eq=False)
class Lease:
    """What a request holds. `PrefixCache` alone changes it."""

    pages: list[int]  # in order of position; the first n_cached are in the tree and never written
    n_cached: int
    start: int  # when it was matched: rows before it are valid in both caches, all others are to be computed
    n_target: int  # when it was matched: rows valid in the target's cache, start or start + 1
    source: int | None  # page whose rows up to `start` are to be copied, held until they are
    node: _Node  # of the last of the n_cached pages
    n_changes: int = 0  # of `pages`, for whoever keeps a copy of them

    @property
    def held(self) -> list[int]:
        """Every page that it keeps from being freed."""
        return self.pages if self.source is None else [*self.pages, self.source]


class PrefixCache:
    """The pages of all requests, and those left behind by earlier ones.

    A request's life: `admit`; if the lease wants a copy, make it and say so with `copied`; `grow` ahead of each step;
    `insert` when pages have filled up, to let others find them; `release` when it ends or must give way. A request
    that gave way is admitted again like a new one, and finds those of its pages that nobody needed meanwhile.

    A page that goes from one request to another is written by programs that run after those that read it for the
    first: so long as all programs take and return one donated cache, in the order in which the steps were planned.
    """

    def __init__(self, pool: PagePool, page_size: int, *, drafter: bool) -> None:
        """Args:
        pool: of the pages; nobody else takes from it, or gives back to it.
        page_size: rows of a page.
        drafter: whether a drafter's cache is in the same pages; its rows know of one token more than the target's.
        """
        self.pool, self.page_size, self.lookahead = pool, page_size, int(drafter)
        self._root = _Node((), -1, None)
        self._nodes: dict[int, _Node] = {}  # by page
        self.n_queried = 0  # tokens of admitted requests
        self.n_found = 0  # of these, tokens that were not computed again
        self.n_evicted = 0  # pages

    @property
    def n_available(self) -> int:
        """Pages that a request could get now: free ones, and those that only the tree wants."""
        return self.pool.n_free + self.pool.n_idle

    @property
    def n_cached_pages(self) -> int:
        """Pages in the tree, held or idle."""
        return len(self._nodes)

    def admit(self, sequence: TokenSequence, n_rows: int) -> Lease | None:
        """Find what is cached of a request and get pages for the rest.

        Args:
          sequence: its tokens.
          n_rows: rows that there must be room for.
        Returns:
          What it holds, or None when pages are short; then nothing is held, and nothing was evicted.
        """
        lease = self.match(sequence)
        if not self.grow(lease, n_rows):
            self.skip_copy(lease)  # the page to copy from may be the one that is missing
            if not self.grow(lease, n_rows):
                self.release(lease)
                return None
        self.n_queried += sequence.n_tokens
        self.n_found += lease.start
        return lease

    def n_cached(self, sequence: TokenSequence) -> int:
        """Tokens of a request that it would not have to compute."""
        lease = self.match(sequence)
        n = lease.start
        self.release(lease)
        return n

    def match(self, sequence: TokenSequence) -> Lease:
        """Hold the pages that are valid for a request, and the page to copy from, if another is valid in part."""
        size, last = self.page_size, sequence.n_tokens - 1
        node, pages = self._root, list[int]()
        while (len(pages) + 1) * size <= last:
            child = node.children.get(self._key(sequence, len(pages)))
            if child is None:
                break
            self.pool.share(child.page)
            pages.append(child.page)
            node = child
        at = len(pages) * size
        partial, n_same = node.closest(tuple(sequence.tokens(at, min(at + size + self.lookahead, sequence.n_tokens))))
        n_rows = min(n_same - self.lookahead, last - at)
        lease = Lease(pages, len(pages), at, at + max(min(n_same, size, last - at), 0), None, node)
        if partial is not None and n_rows > 0:
            self.pool.share(partial.page)
            lease.source, lease.start = partial.page, at + n_rows
        return lease

    def grow(self, lease: Lease, n_rows: int) -> bool:
        """Have pages for n_rows rows; False, and nothing taken or evicted, when there are too few."""
        missing = -(-n_rows // self.page_size) - len(lease.pages)
        if missing <= 0:
            return True
        if missing > self.n_available:
            return False
        while self.pool.n_free < missing:
            self._evict(self.pool.oldest_idle())
        pages = self.pool.take(missing)
        assert pages is not None
        lease.pages.extend(pages)
        lease.n_changes += 1
        return True

    def copy(self, lease: Lease) -> PageCopy | None:
        """The copy that `lease.start` counts on; the request's own page for it must be there (`admit`, `grow`)."""
        if lease.source is None:
            return None
        return PageCopy(lease.source, lease.pages[lease.n_cached], lease.start - lease.n_cached * self.page_size)

    def copied(self, lease: Lease) -> None:
        """The copy is made, or its program is under way: its source may go."""
        if lease.source is not None:
            self.pool.give_back([lease.source])
            lease.source = None

    def skip_copy(self, lease: Lease) -> None:
        """Make no copy, and compute its rows."""
        if lease.source is not None:
            lease.start = lease.n_target = lease.n_cached * self.page_size
            self.copied(lease)

    def insert(self, lease: Lease, sequence: TokenSequence, n_rows: int) -> None:
        """Let others find the pages that are full. Where one of the same tokens is there already the request changes
        over to it and its own is freed, so the block table may change.

        Args:
          lease: of the request.
          sequence: its tokens, `lookahead` of them beyond n_rows at least.
          n_rows: rows 0 ... n_rows - 1 are in both caches, made from true features and tokens that stay. Draft rows of
            the round's last block are not: the next round writes them.
        Raises:
          RuntimeError: rows that cannot be valid yet.
        """
        if lease.source is not None:
            raise RuntimeError(f"page {lease.source} is still to be copied: its rows are not in the request's page")
        room = min(sequence.n_tokens - self.lookahead, len(lease.pages) * self.page_size)
        if n_rows > room:
            raise RuntimeError(f"{n_rows} rows are said to be valid, but tokens and pages allow {room}")
        for i in range(lease.n_cached, n_rows // self.page_size):
            key, own = self._key(sequence, i), lease.pages[i]
            node = lease.node.children.get(key)
            if node is None:
                self.pool.keep(own)
                node = self._nodes[own] = _Node(key, own, lease.node)
                lease.node.add(node)
            else:
                self.pool.share(node.page)
                self.pool.give_back([own])
                lease.pages[i] = node.page
                lease.n_changes += 1
            lease.node, lease.n_cached = node, i + 1

    def release(self, lease: Lease) -> None:
        """Give everything back. Pages in the tree can be found until they are evicted."""
        self.pool.give_back(lease.held)
        lease.pages.clear()
        lease.source = None
        lease.node, lease.n_cached, lease.start, lease.n_target = self._root, 0, 0, 0

    def clear(self) -> None:
        """Forget all prefixes, as when the cache's arrays are new. Raises RuntimeError while requests hold pages."""
        n_held = self.pool.n_pages - self.n_available
        if n_held:
            raise RuntimeError(f"{n_held} pages are held; release all requests before the cache is cleared")
        for page in self._nodes:
            self.pool.forget(page)
        self._nodes.clear()
        self._root.children.clear()
        self._root.keys.clear()

    def check_write(self, lease: Lease, start: int, stop: int) -> None:
        """Raises RuntimeError if rows start ... stop - 1 lie in a page that others read, or in none."""
        for i in range(start // self.page_size, -(-stop // self.page_size) if start < stop else 0):
            if i >= len(lease.pages):
                raise RuntimeError(f"rows up to {stop} are written, but there are {len(lease.pages)} pages")
            if not self.pool.is_private(lease.pages[i]):
                raise RuntimeError(f"page {lease.pages[i]} is shared, but rows {start} ... {stop - 1} are written")

    def check_integrity(self, leases: Sequence[Lease]) -> None:
        """Raises RuntimeError on a leaked or foreign page, a broken tree, or a page held without those before it."""
        self.pool.check_integrity([lease.held for lease in leases], self._nodes)
        found = {node.page: node for node in _below(self._root)}
        if found != self._nodes:
            raise RuntimeError("the tree's pages are not those on record, each once")
        for node in (self._root, *found.values()):
            if node.keys != sorted(node.children):
                raise RuntimeError(f"the children of page {node.page} are out of order")
        for page, node in found.items():
            self._check_node(page, node)
        rank = {page: i for i, page in enumerate(self.pool.idle_pages())}
        for page, i in rank.items():
            if any(rank.get(child.page, len(rank)) > i for child in found[page].children.values()):
                raise RuntimeError(f"page {page} would be evicted before a page that follows it")
        for lease in leases:
            path = _path(lease.node)
            if lease.pages[: lease.n_cached] != path or any(p in found for p in lease.pages[lease.n_cached :]):
                raise RuntimeError(f"a request holds {lease.pages}, {lease.n_cached} of them cached; the tree: {path}")

    def _check_node(self, page: int, node: _Node) -> None:
        parent, size = node.parent, self.page_size
        if parent is None or parent.children.get(node.key) is not node:
            raise RuntimeError(f"page {page} is not a child of its parent")
        if len(node.key) != size + self.lookahead or (parent.key[size:] not in ((), node.key[: self.lookahead])):
            raise RuntimeError(f"the tokens of page {page}, {node.key}, do not follow {parent.key}")
        if parent is not self._root and self.pool.n_holders(page) > self.pool.n_holders(parent.page):
            raise RuntimeError(f"page {page} is held without page {parent.page} before it")

    def _key(self, sequence: TokenSequence, i: int) -> tuple[int, ...]:
        """All the tokens of page i; the caller sees to it that there are so many."""
        return tuple(sequence.tokens(i * self.page_size, (i + 1) * self.page_size + self.lookahead))

    def _evict(self, page: int) -> None:
        node = self._nodes.pop(page)
        if node.children or node.parent is None:
            raise RuntimeError(f"page {page} is idle before the pages that follow it")
        node.parent.remove(node)
        self.pool.forget(page)
        self.n_evicted += 1


def _n_common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many leading entries are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _below(root: _Node) -> Iterator[_Node]:
    """All nodes but the root, without recursion: a long context is a deep tree."""
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def _path(node: _Node) -> list[int]:
    """The pages from the root to a node."""
    pages: list[int] = []
    while node.parent is not None:
        pages.append(node.page)
        node = node.parent
    return pages[::-1]
