"""Calls in daemon threads: their results and errors are in futures."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future

import pytest

from phalanx.process.background import in_background, settle


def test_the_future_has_the_result_of_a_call_in_a_daemon_thread() -> None:
    thread = in_background(threading.current_thread, "reader").result(timeout=10)
    assert (thread.name, thread.daemon) == ("reader", True)


def test_any_error_is_raised_where_the_result_is_taken() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_background(interrupted, "reader").result(timeout=10)


def test_a_future_that_was_cancelled_gets_no_result_and_no_call() -> None:
    future: Future[int] = Future()
    future.cancel()
    calls = iter([1])
    settle(future, lambda: next(calls))
    assert list(calls) == [1]
    with pytest.raises(CancelledError):
        future.result(timeout=0)


def test_a_future_that_is_cancelled_during_the_call_stays_so() -> None:
    future: Future[bool] = Future()
    settle(future, future.cancel)  # as its owner does meanwhile
    assert future.cancelled()
