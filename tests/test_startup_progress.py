"""A start tells how far it is: bars on a terminal, two lines a stage elsewhere."""

import io
import logging
import sys

import pytest
from rich.console import Console

from kimijax.startup_progress import StartProgress, reading


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def run(progress: StartProgress, clock: Clock) -> None:
    """A start of 8 GB in 4 s, 3 programs in 6 s, and 1 s of the rest."""
    with progress:
        with progress.reading("loading weights", 8_000_000_000) as advance:
            for _ in range(4):
                clock.now += 1
                advance(2_000_000_000)
        with progress.counting("compiling", "programs") as report:
            for i, name in enumerate(("prefill", "start", "1 x 64")):
                report(name, i + 1, 3)
                clock.now += 2
        with progress.stage("warming up"):
            clock.now += 1
        progress.ready()


def test_a_file_gets_two_lines_a_stage() -> None:
    lines: list[str] = []
    clock, out = Clock(), io.StringIO()
    run(StartProgress(lines.append, console=Console(file=out), clock=clock), clock)
    assert lines == [
        "loading weights: 8.0 GB",
        "loading weights: 4.0 s, 2.00 GB/s",
        "compiling ...",
        "compiling: 6.0 s, 3 programs",
        "warming up ...",
        "warming up: 1.0 s",
        "ready: 11.0 s in all",
    ]
    assert out.getvalue() == ""


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)


def shown(progress: StartProgress) -> list[str]:
    """The lines on the terminal now."""
    assert progress._bars is not None
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(progress._bars.get_renderable())
    file = console.file
    assert isinstance(file, io.StringIO)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_a_terminal_shows_bytes_speed_and_time_left() -> None:
    clock = Clock()
    progress = StartProgress(pytest.fail, console=terminal(), clock=clock)
    with progress, progress.reading("loading weights", 8_000_000_000) as advance:
        for _ in range(3):
            clock.now += 1
            advance(2_000_000_000)
        [line] = shown(progress)
        assert line.startswith("loading weights ")
        assert line.endswith(" 6.0/8.0 GB 2.0 GB/s 0:00:01")


def test_a_terminal_shows_which_program_is_compiled() -> None:
    clock = Clock()
    progress = StartProgress(pytest.fail, console=terminal(), clock=clock)
    with progress, progress.counting("compiling", "programs") as report:
        report("prefill 16 x 64", 2, 9)
        assert shown(progress)[0].endswith(" 2 of 9: prefill 16 x 64")


def test_the_stages_of_a_terminal_stay_in_one_display() -> None:
    clock = Clock()
    progress = StartProgress(pytest.fail, console=terminal(), clock=clock)
    run(progress, clock)
    lines = shown(progress)
    ends = ("4.0 s, 2.00 GB/s", "6.0 s, 3 programs", "1.0 s", "11.0 s in all")
    names = ("loading weights", "compiling", "warming up", "ready")
    for line, name, end in zip(lines, names, ends, strict=True):
        assert line.startswith(name)
        assert line.endswith(end)


def test_what_is_logged_meanwhile_goes_above_the_display(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logging keeps the stream of before; writing to that would tear the display."""
    handler, console = logging.StreamHandler(sys.stderr), terminal()
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    before = sys.stderr
    with StartProgress(console=console):
        assert handler.stream is sys.stderr is not before
        logging.getLogger().error("a line of the log")
    assert handler.stream is sys.stderr is before
    file = console.file
    assert isinstance(file, io.StringIO)
    assert "a line of the log\n" in file.getvalue()


def test_a_stage_that_fails_has_no_end() -> None:
    lines: list[str] = []
    with (
        pytest.raises(OSError, match="gone"),
        StartProgress(lines.append, console=Console(file=io.StringIO())) as progress,
        progress.reading("loading weights", 10),
    ):
        raise OSError("gone")
    assert lines == ["loading weights: 10 bytes"]


def test_a_read_alone_has_a_display_of_its_own_or_none(capfd: pytest.CaptureFixture[str]) -> None:
    with reading(False, "loading weights", 10) as advance:
        advance(10)
    assert capfd.readouterr() == ("", "")
    with reading(True, "loading weights", 10) as advance:
        advance(10)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("loading weights: 10 bytes\nloading weights: 0.0 s")
    lines: list[str] = []
    shared = StartProgress(lines.append, console=Console(file=io.StringIO()))
    with reading(shared, "loading the draft", 10) as advance:
        advance(10)
    assert len(lines) == 2
