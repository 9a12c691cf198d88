"""An orderly end of a long stage on SIGINT and SIGTERM."""

import signal
import sys
import types


class StopRequest:
    """Within `with`, SIGINT and SIGTERM ask for an orderly stop; a second signal acts as if this were not there."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, types.FunctionType | object] = {}

    def __call__(self) -> bool:
        return self.requested

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _ask(self, number: int, _: types.FrameType | None) -> None:
        self.requested = True
        name = signal.Signals(number).name
        print(f"{name}: finishing this step, then saving; once more to stop at once", file=sys.stderr, flush=True)
        self._restore()

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal itself returned
