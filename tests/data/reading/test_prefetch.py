"""Prefetching: the same batches in the same order, errors where they belong, and no thread left behind."""

import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.reading.prefetch import Prefetch, WaitEndedError


@given(numbers=st.lists(st.integers()), depth=st.integers(1, 5))
def test_batches_come_in_the_order_of_their_numbers(numbers: list[int], depth: int) -> None:
    with Prefetch(lambda number: ("batch", number), numbers, depth=depth) as batches:
        assert list(batches) == [("batch", number) for number in numbers]


def test_no_more_than_depth_are_made_ahead() -> None:
    made: list[int] = []
    third = threading.Event()

    def make(number: int) -> int:
        made.append(number)
        if number == 2:
            third.set()
        return number

    with Prefetch(make, itertools.count(), depth=3) as batches:
        assert third.wait(timeout=60)
        for taken in range(20):
            assert next(batches) == taken
            assert len(made) <= taken + 1 + 3
    assert len(made) <= 20 + 3


def test_the_next_batch_is_made_while_the_present_one_is_used() -> None:
    second = threading.Event()
    with Prefetch(lambda number: second.set() if number == 1 else None, range(2)) as batches:
        next(batches)
        assert second.wait(timeout=60)


def test_an_exception_comes_after_the_batches_before_it() -> None:
    def make(number: int) -> float:
        return 1 / (3 - number)

    with Prefetch(make, range(10), depth=5) as batches:
        assert [next(batches) for _ in range(3)] == [1 / 3, 1 / 2, 1]
        with pytest.raises(ZeroDivisionError):
            next(batches)
        with pytest.raises(StopIteration):
            next(batches)


def test_an_exception_of_the_numbers_reaches_the_consumer() -> None:
    with Prefetch(str, (int(text) for text in ("1", "two"))) as batches:
        assert next(batches) == "1"
        with pytest.raises(ValueError, match="two"):
            next(batches)


def test_closing_ends_the_thread_in_any_of_its_waits() -> None:
    before = set(threading.enumerate())
    for taken in range(4):
        batches = Prefetch(str, itertools.count(), depth=2)
        for _ in range(taken):
            next(batches)
        batches.close()
        batches.close()
        with pytest.raises(StopIteration):
            next(batches)
    assert set(threading.enumerate()) <= before, "threads of earlier tests may have ended"


def test_closing_gives_up_a_batch_that_waits_for_what_does_not_come() -> None:
    started, given_up = threading.Event(), threading.Event()

    def make(number: int) -> int:
        started.set()
        assert given_up.wait(60)
        raise OSError(f"{number} was given up")

    batches = Prefetch(make, itertools.count(), give_up=given_up.set)
    assert started.wait(60)
    batches.close()
    assert given_up.is_set()
    with pytest.raises(StopIteration):
        next(batches)


def test_a_consumer_that_fails_leaves_no_thread() -> None:
    before = set(threading.enumerate())

    def train() -> None:
        with Prefetch(str, itertools.count()) as batches:
            next(batches)
            raise RuntimeError("loss is not finite")

    with pytest.raises(RuntimeError, match="loss is not finite"):
        train()
    assert set(threading.enumerate()) <= before, "threads of earlier tests may have ended"


def test_a_consumer_that_waits_can_be_stopped_and_one_that_does_not_wait_has_its_batches() -> None:
    stopped, come, first = threading.Event(), threading.Event(), threading.Event()

    def make(number: int) -> int:
        if number:
            first.set()  # batch 0 is ready
            assert come.wait(60)
        return number

    with Prefetch(
        make,
        range(3),
        give_up=come.set,
        on_wait=lambda _: None,
        told_first_s=0.1,
        enough=stopped.is_set,
    ) as batches:
        assert first.wait(60)
        stopped.set()
        assert next(batches) == 0
        with pytest.raises(WaitEndedError):
            next(batches)
        stopped.clear()
        come.set()
        assert list(batches) == [1, 2]


def test_a_depth_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="depth = 0"):
        Prefetch(str, [], depth=0)


def test_a_consumers_wait_is_reported_each_time_that_it_has_doubled() -> None:
    waits_s: list[float] = []
    enough = threading.Event()

    def make(number: int) -> int:
        assert enough.wait(60)
        return number

    def on_wait(seconds: float) -> None:
        waits_s.append(seconds)
        if len(waits_s) == 3:
            enough.set()

    with Prefetch(make, range(2), on_wait=on_wait, told_first_s=0.01) as batches:
        assert list(batches) == [0, 1]
    assert waits_s[:3] == [0.01, 0.02, 0.04]
