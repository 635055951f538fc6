"""Graceful stop: Ctrl-C and SIGTERM become a request that the loop obeys at the next step boundary.

A rank keeps the request itself (``StopRequest``); a launcher hands it on to its ranks (``on_stop_signals``).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class StopRequest:
    """The request to stop, named after its signal; empty if none was made."""

    signal_name: str = ""

    @property
    def made(self) -> bool:
        """True if a stop was requested."""
        return bool(self.signal_name)

    def listen(self) -> None:
        """Installs the handlers of SIGINT and SIGTERM. A second SIGINT acts as usual, at once."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def on_stop_signals(ask: Callable[[], None]) -> Iterator[None]:
    """Inside, each Ctrl-C, SIGTERM and SIGHUP calls ``ask`` instead of what it did before.

    On another thread than the main one it changes nothing: Python lets only the main thread handle signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        ask()

    before = [
        (number, signal.signal(number, on_signal))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
