"""Sizes of an engine: how many requests, tokens and pages, and the static shapes its programs are compiled for."""

from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigError


def _powers(smallest: int, largest: int, factor: int) -> tuple[int, ...]:
    """smallest, smallest * factor, ... and `largest` itself."""
    sizes: list[int] = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= factor
    return (*sizes, largest)


@dataclass(frozen=True)
class EngineConfig:
    """All of a program's shapes follow from these numbers; nothing is compiled after warm-up."""

    max_batch: int = 16  # requests that decode together
    context_length: int = 2048  # prompt and output of one request
    page_size: int = 64
    n_pages: int | None = None  # None: every one of max_batch requests can fill its context
    chunk_size: int = 512  # prompt tokens a step
    burst: int = 8  # tokens a decoding program makes before the host looks at them; one round at least
    prefix_cache: bool = True  # later requests take over what earlier ones computed of the same first tokens
    max_queued: int = 1024  # waiting requests; more are refused
    # What a burst attends to: "dense", a copy of the batch's pages that all its steps share (fastest on a CPU, but as
    # large as the batch's cache); "paged", pages gathered layer by layer; "auto", dense on a CPU and paged elsewhere.
    decode_view: Literal["auto", "dense", "paged"] = "auto"
    batch_factor: int = 4  # batch sizes compiled for: 1, factor, factor ** 2, ..., max_batch, a group of devices
    context_factor: int = 4  # window lengths compiled for: 256, 256 * factor, ..., context_length

    def __post_init__(self) -> None:
        for name in ("max_batch", "context_length", "page_size", "chunk_size", "burst"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "a positive integer")
        if self.decode_view not in ("auto", "dense", "paged"):
            raise ConfigError("decode_view", self.decode_view, "auto, dense or paged")
        if self.max_queued < 0:
            raise ConfigError("max_queued", self.max_queued, "0 or more")
        for name in ("batch_factor", "context_factor"):
            if getattr(self, name) < 2:
                raise ConfigError(name, getattr(self, name), "2 or more")
        if self.context_length % self.page_size:
            raise ConfigError("context_length", self.context_length, f"a multiple of page_size ({self.page_size})")
        if self.total_pages < self.pages_per_request:
            raise ConfigError("n_pages", self.total_pages, f"at least one full context ({self.pages_per_request})")

    @property
    def pages_per_request(self) -> int:
        return self.context_length // self.page_size

    @property
    def total_pages(self) -> int:
        return self.max_batch * self.pages_per_request if self.n_pages is None else self.n_pages

    def pages(self, room: int, n_groups: int = 1) -> int:
        """`total_pages` for rounds that write `room` rows from the context's last token on.

        Raises:
          ConfigError: too few, or `n_groups` of devices that share the requests cannot have equal parts.
        """
        one = self.windows(room)[-1] // self.page_size
        if self.max_batch % n_groups:
            fix = "set --max-running-requests to one, or use another preset"
            raise ConfigError("max_batch", self.max_batch, f"a multiple of the {n_groups} groups of devices", fix)
        if self.n_pages is None:
            return self.max_batch * one
        if self.n_pages < one * n_groups:
            expected = f"at least {one * n_groups}: a full context, and the {room} rows that drafts write behind it"
            expected += f", in each of {n_groups} groups of devices" if n_groups > 1 else ""
            raise ConfigError("n_pages", self.n_pages, expected, "raise --max-total-tokens")
        if self.n_pages % n_groups:
            fix = "change --max-total-tokens"
            raise ConfigError("n_pages", self.n_pages, f"a multiple of the {n_groups} groups of devices", fix)
        return self.n_pages

    def batch_sizes(self, n_groups: int = 1) -> tuple[int, ...]:
        """Rows of the batches that programs are compiled for, as many in each group of devices."""
        return tuple(n * n_groups for n in _powers(1, self.max_batch // n_groups, self.batch_factor))

    @property
    def window_lengths(self) -> tuple[int, ...]:
        """Multiples of the page size."""
        unit = self.page_size
        start = min(-(-256 // unit) * unit, self.context_length)
        return tuple(-(-w // unit) * unit for w in _powers(start, self.context_length, self.context_factor))

    def windows(self, room: int) -> tuple[int, ...]:
        """`window_lengths`, the last wide enough for rounds that write `room` rows from the context's last token on."""
        unit, (*shorter, _) = self.page_size, self.window_lengths
        return (*shorter, -(-(self.context_length + room) // unit) * unit)

    @property
    def chunk_lengths(self) -> tuple[int, ...]:
        """Prompt lengths compiled for; a prompt longer than the last is cut into chunks of it."""
        return _powers(min(32, self.chunk_size), min(self.chunk_size, self.context_length), 4)


def fit_context(wanted: int, max_positions: int, page_size: int = 64) -> int:
    """The context of `wanted` tokens, or what the model's `max_positions` allow, in whole pages."""
    context = min(wanted, max_positions) // page_size * page_size
    if context == 0:
        raise ConfigError("page_size", page_size, f"at most the {min(wanted, max_positions)} positions of a context")
    return context


def bucket(size: int, sizes: tuple[int, ...]) -> int:
    """The smallest of `sizes` (ascending) that holds `size`."""
    for s in sizes:
        if size <= s:
            return s
    raise ValueError(f"{size} exceeds the largest compiled size {sizes[-1]}")
