"""Graceful stop: Ctrl-C and SIGTERM become a request that the loop obeys at the next step boundary.

A rank keeps the request itself (``StopRequest``); a launcher counts the requests and passes them on to its ranks (``StopOrders``).
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType

from phalanx.process.stop_signals import heeded


@dataclass
class StopRequest:
    """The request to a rank to save and stop."""

    signals: tuple[signal.Signals, ...] = ()
    """The signals that make the request; none for a worker whose agent makes it."""
    made: bool = False

    def end_at_once(self) -> None:
        """Leaves the signals to the system, which ends the process even while it waits for others or reads a large model.

        So a rank starts: before the loop there is nothing to save, and nobody looks at the request.
        """
        for number in heeded(self.signals):
            signal.signal(number, signal.SIG_DFL)

    def listen(self) -> None:
        """Takes the signals as a request to stop, from here on. A second SIGINT acts as usual, at once."""
        for number in heeded(self.signals):
            signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.made = True
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
