"""Threads that read: what is urgent goes first, and what was given up is never begun."""

from __future__ import annotations

import threading

import pytest

from phalanx_serve.weights.ring import ReadPool


def blocked_pool() -> tuple[ReadPool, threading.Event]:
    """A pool of one thread that is busy until the event is set."""
    pool, begun, go_on = ReadPool(1), threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        go_on.wait()

    pool.submit((0, 0), wait)
    begun.wait()
    return pool, go_on


def test_the_most_urgent_read_is_done_first_and_equals_in_turn() -> None:
    pool, go_on = blocked_pool()
    order: list[str] = []
    futures = [
        pool.submit(urgency, lambda name=name: order.append(name))
        for name, urgency in (("later", (2, 0)), ("first", (1, 1)), ("second", (1, 1)), ("now", (-1, 0)))
    ]
    go_on.set()
    for future in futures:
        future.result()
    assert order == ["now", "first", "second", "later"]
    pool.close()


def test_a_read_that_was_given_up_is_not_begun_and_stops_no_thread() -> None:
    pool, go_on = blocked_pool()
    read: list[int] = []
    given_up = pool.submit((1, 0), lambda: read.append(1))
    assert given_up.cancel()
    go_on.set()
    pool.submit((2, 0), lambda: read.append(2)).result()
    assert read == [2]
    pool.close()


def test_a_closed_pool_takes_no_read_that_nobody_would_do() -> None:
    pool = ReadPool(1)
    pool.close()
    with pytest.raises(RuntimeError, match="closed: open the model again"):
        pool.submit((0, 0), lambda: None)


def test_what_a_read_raises_its_future_raises() -> None:
    pool = ReadPool(1)

    def fail() -> None:
        raise OSError("the disk")

    with pytest.raises(OSError, match="the disk"):
        pool.submit((0, 0), fail).result()
    pool.close()
