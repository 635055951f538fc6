"""Graceful stop: Ctrl-C and SIGTERM become a request that the loop obeys at the next step boundary.

A rank keeps the request itself (``StopRequest``); a launcher hands it on to its ranks (``on_stop_signals``).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType


def heeded(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """The signals that this process was not started to ignore, as by ``nohup`` or in the background of a script. They stay ignored."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


@dataclass
class StopRequest:
    """The request to a rank to save and stop."""

    signals: tuple[signal.Signals, ...] = ()
    """The signals that make the request; none for a worker whose agent makes it."""
    made: bool = False
    _end: Callable[[], None] | None = None

    def end_at_once(self) -> None:
        """Leaves the signals to the system, which ends the process even while it waits for others or reads a large model.

        So a rank starts: before the loop there is nothing to save, and nobody looks at the request.
        """
        for number in heeded(self.signals):
            signal.signal(number, signal.SIG_DFL)

    def listen(self, end: Callable[[], None] | None = None) -> None:
        """Takes the signals as a request to stop, from here on. A second SIGINT acts as usual, at once.

        Until ``step_ended`` a signal calls ``end``, which ends the process: the first step compiles, for minutes, and there is nothing to save.
        """
        self._end = end
        for number in heeded(self.signals):
            signal.signal(number, self._on_signal)

    def step_ended(self) -> None:
        """Leave requests to the loop from here on: there is a step to save."""
        self._end = None

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.made = True
        if self._end is not None:
            self._end()
        for number in heeded((signal.SIGINT,)):
            signal.signal(number, signal.default_int_handler)


_STOP_WORDS = (
    "stopping: the step in progress is finished and saved; asked once more, the run ends at once and unsaved steps are lost",
    "ending at once, without saving",
)


@dataclass
class StopOrders:
    """The number of times that a launcher was asked to stop its run, and what it tells its user."""

    tell: Callable[[str], None]
    made: int = 0
    told: int = 0
    troubles: list[str] = field(default_factory=list)
    """What other threads have to tell, such as that logs cannot be written."""
    _told_trouble: bool = False

    def tell_new(self) -> None:
        """Tells the user of each request that has not been told of, and of the first trouble: a full disk is full for all logs.

        (A signal handler must not print: it may interrupt that.)
        """
        if self.troubles and not self._told_trouble:
            self._told_trouble = True
            self.tell(self.troubles[0])
        while self.told < min(self.made, len(_STOP_WORDS)):
            self.told += 1
            self.tell(_STOP_WORDS[self.told - 1])


@contextmanager
def on_stop_signals(ask: Callable[[], None]) -> Iterator[None]:
    """Inside, each Ctrl-C, SIGTERM and SIGHUP calls ``ask`` instead of what it did before, but for those that are ignored.

    On another thread than the main one it changes nothing: Python lets only the main thread handle signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        ask()

    before = [
        (number, signal.signal(number, on_signal))
        for number in heeded((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    ]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
