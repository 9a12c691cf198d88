"""The one display of a start: what is read, compiled and warmed up, and for how long.

On a terminal the stages stand one below the other, the running one with a bar. Anywhere else, in a log file say, each
is a line when it begins and a line when it has ended.
"""

import io
import logging
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Self

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

type Report = Callable[[str, int, int], None]  # what begins now, and that it is which of how many, from 1
type Shown = bool | StartProgress  # False: nothing is shown; True: a display of its own


class _Detail(ProgressColumn):
    """How far the running stage is, or how long an ended one took."""

    _of_bytes = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())

    def render(self, task: Task) -> Text:
        if task.fields["ended"]:
            return Text(task.fields["ended"])
        if task.fields["in_bytes"]:
            return Text(" ").join(column.render(task) for column in self._of_bytes)
        return Text(task.fields["now"])


class StartProgress:
    """The stages of a start. A context manager; use it on one thread.

    Args:
      say: takes the lines where stderr is no terminal; default: prints them there.
      console: default: stderr.
      clock: seconds.
    """

    def __init__(
        self,
        say: Callable[[str], None] | None = None,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = Console(stderr=True) if console is None else console
        self._say = _print if say is None else say
        self._clock, self._began = clock, clock()
        self._bars: Progress | None = None
        self._streams: list[tuple[logging.StreamHandler, object]] = []
        if self._console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description}"), BarColumn(), _Detail(), console=self._console, get_time=clock
            )

    @classmethod
    def hidden(cls) -> "StartProgress":
        """One that shows nothing."""
        return cls(lambda _: None, console=Console(file=io.StringIO(), force_terminal=False))

    def __enter__(self) -> Self:
        if self._bars is not None:
            stderr = sys.stderr
            self._bars.start()
            self._console.show_cursor(True)  # a process that is killed meanwhile would leave it hidden
            # While it is shown, sys.stderr writes above it; what logging has kept of the former one would not.
            for handler in logging.getLogger().handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream is stderr:
                    self._streams.append((handler, handler.setStream(sys.stderr)))
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            for handler, stream in self._streams:
                handler.setStream(stream)
            self._streams.clear()
            self._bars.stop()

    @contextmanager
    def reading(self, name: str, total: int) -> Generator[Callable[[int], None]]:
        """A stage that reads `total` bytes; yields `advance(bytes)`."""
        with self._stage(name, total, in_bytes=True) as (move, _):
            yield move

    @contextmanager
    def counting(self, name: str, things: str) -> Generator[Report]:
        """A stage of steps that are called `things`; yields the report of what begins."""
        with self._stage(name, things=things) as (_, report):
            yield report

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """A stage of which nothing more is known."""
        with self._stage(name):
            yield

    def ready(self) -> None:
        """The start is over."""
        took = f"{self._clock() - self._began:.1f} s in all"
        if self._bars is None:
            self._say(f"ready: {took}")
        else:
            self._bars.add_task("ready", total=1, completed=1, ended=took, in_bytes=False, now="")

    @contextmanager
    def _stage(
        self, name: str, total: int | None = None, *, in_bytes: bool = False, things: str = ""
    ) -> Generator[tuple[Callable[[int], None], Report]]:
        bars, began, steps = self._bars, self._clock(), 0
        task = None
        if bars is None:
            self._say(f"{name}: {decimal(total)}" if total is not None and in_bytes else f"{name} ...")
        else:
            task = bars.add_task(name, total=total, in_bytes=in_bytes, now="", ended="")

        def move(n: int) -> None:
            if bars is not None and task is not None:
                bars.advance(task, n)

        def report(what: str, i: int, n: int) -> None:
            nonlocal steps
            steps = n
            if bars is not None and task is not None:
                bars.update(task, total=n, completed=i - 1, now=f"{i} of {n}: {what}")

        yield move, report
        seconds = self._clock() - began
        took = f"{seconds:.1f} s"
        if in_bytes and total is not None and seconds > 0:
            took += f", {total / seconds / 1e9:.2f} GB/s"
        if things and steps:
            took += f", {steps} {things}"
        if bars is None or task is None:
            self._say(f"{name}: {took}")
        else:
            end = bars.tasks[task].total or 1
            bars.update(task, total=end, completed=end, ended=took)


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def reading(shown: Shown, name: str, total: int) -> Generator[Callable[[int], None]]:
    """`StartProgress.reading` on a display that is given, on one of its own, or on none."""
    if isinstance(shown, StartProgress):
        with shown.reading(name, total) as advance:
            yield advance
    else:
        with StartProgress() if shown else StartProgress.hidden() as own, own.reading(name, total) as advance:
            yield advance
