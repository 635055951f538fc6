"""Long calls of native code, and signals."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

import pytest

from phalanx.data.preparing.interruptible import interruptible


class EndedError(Exception):
    """Raised by the handler of a signal."""


def test_a_signal_ends_a_call_that_would_never_return() -> None:
    def end(_number: int, _frame: FrameType | None) -> None:
        raise EndedError

    def call() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        threading.Event().wait()

    before = signal.signal(signal.SIGUSR1, end)
    try:
        with pytest.raises(EndedError):
            interruptible(call)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_results_and_errors_are_those_of_the_call() -> None:
    assert interruptible(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda: 1 / 0)
