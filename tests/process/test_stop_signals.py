"""Signals: which ones ask a run to stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from phalanx.process.this_process import StopRequest, on_stop_signals

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restore this process's handlers."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("ignored", NUMBERS)
def test_a_launcher_leaves_ignored_a_signal_that_it_was_started_to_ignore(ignored: signal.Signals) -> None:
    """As ``nohup`` does with SIGHUP, and a script with SIGINT for what it starts in the background."""
    signal.signal(ignored, signal.SIG_IGN)
    asked = []
    with on_stop_signals(lambda: asked.append(1)):
        for number in NUMBERS:
            before = len(asked)
            os.kill(os.getpid(), number)
            assert len(asked) - before == (number is not ignored)
    assert signal.getsignal(ignored) is signal.SIG_IGN


def test_a_rank_leaves_ignored_a_signal_that_it_was_started_to_ignore() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop = StopRequest((signal.SIGTERM, signal.SIGINT))
    stop.end_at_once()
    stop.listen()
    os.kill(os.getpid(), signal.SIGINT)
    assert not stop.made
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.made
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_signal_before_a_rank_has_joined_the_first_step_ends_it_and_one_after_that_waits_for_the_step() -> (
    None
):
    stop, ended = StopRequest((signal.SIGTERM,)), []
    stop.listen(lambda: ended.append(1))
    os.kill(os.getpid(), signal.SIGTERM)
    assert ended == [1]
    stop.join_step()
    os.kill(os.getpid(), signal.SIGTERM)
    assert ended == [1]
    assert stop.made


def test_a_first_step_that_fails_for_the_end_of_another_rank_waits_for_the_request_that_ended_it() -> None:
    stop, ended = StopRequest((signal.SIGTERM,)), []
    stop.listen(lambda: ended.append(1))
    stop.join_step()
    request = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM))
    request.start()
    stop.step_failed()
    request.join()
    assert ended == [1]


def test_a_first_step_that_fails_ends_the_rank_only_if_it_was_to_stop() -> None:
    stop, ended = StopRequest((signal.SIGTERM,)), []
    stop.listen(lambda: ended.append(1))
    stop.join_step()
    stop.step_failed()
    assert ended == []
    os.kill(os.getpid(), signal.SIGTERM)
    stop.step_failed()
    assert ended == [1]
    stop.step_ended()
    stop.step_failed()
    assert ended == [1]
