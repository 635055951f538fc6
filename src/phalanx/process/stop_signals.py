"""Signals by which a user or a scheduler stops a process that has children: SIGINT, SIGTERM, SIGHUP.

Children lead sessions of their own, so that such a signal reaches the parent alone, which decides what the children get.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType


def heeded(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return the signals that this process was not started to ignore, as by ``nohup`` or in the background of a script."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def on_stop_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Inside, each Ctrl-C, SIGTERM and SIGHUP calls ``stop`` instead of its earlier handler, except signals that are ignored.

    In other threads than the main one it changes nothing: Python lets only the main thread handle signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop()

    before = [
        (number, signal.signal(number, on_signal))
        for number in heeded((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    ]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
