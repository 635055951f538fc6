"""Long calls of native code, and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from types import FrameType

import pytest

from phalanx.data.preparing.prepare import interruptible


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


TRAINING = """
import os, random, signal, sys
from phalanx.data.preparing.prepare import interruptible
from phalanx.data.tokenizers.tokenizer import train_bpe

def texts():
    chance = random.Random(0)
    for number in range(2000):
        if number == 300:
            os.kill(os.getpid(), signal.SIGTERM)
        yield " ".join(str(chance.random()) for _ in range(1000))

signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
interruptible(lambda: train_bpe(texts(), vocab_size=300))
"""


def test_a_signal_amid_the_training_of_a_tokenizer_ends_the_process_without_an_abort() -> None:
    done = subprocess.run([sys.executable, "-c", TRAINING], stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (143, b"")


def test_results_and_errors_are_those_of_the_call() -> None:
    assert interruptible(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda: 1 / 0)
