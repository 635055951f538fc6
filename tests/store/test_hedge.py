"""Hedged reads: a read that hangs is answered by a second request, and a slow store is not asked twice for everything."""

from __future__ import annotations

import itertools
import threading

import pytest

from phalanx.store.store import HedgedReads


def impatient_reads() -> HedgedReads:
    """Hedged reads that send a second request after 50 ms."""
    return HedgedReads(min_s=0.01, unmeasured_s=0.05)


def hanging_once(release: threading.Event) -> tuple[list[int], object]:
    """A read whose first request is not answered until ``release``, and the numbers of its requests."""
    requests: list[int] = []
    lock = threading.Lock()

    def request() -> int:
        with lock:  # a request that returns 1 has been listed behind 0
            number = len(requests)
            requests.append(number)
        if number == 0:
            release.wait(60)
        return number

    return requests, request


def test_a_read_that_hangs_is_answered_by_the_second_request() -> None:
    release = threading.Event()
    requests, request = hanging_once(release)
    reads = impatient_reads()
    assert reads.read(request) == 1  # type: ignore[arg-type]
    assert (requests, reads.reads, reads.hedged) == ([0, 1], 1, 1)
    release.set()


def test_reads_in_their_usual_time_are_asked_for_once() -> None:
    reads, numbers = HedgedReads(min_s=100.0, unmeasured_s=100.0), itertools.count()
    for _ in range(50):
        reads.read(lambda: next(numbers))
    assert next(numbers) == 50
    assert (reads.reads, reads.hedged) == (50, 0)


def test_the_patience_comes_from_the_reads_once_there_are_enough_of_them() -> None:
    reads = HedgedReads(min_s=0.01, unmeasured_s=1e6)
    assert reads.patience_s() == 1e6
    for _ in range(50):
        reads.read(lambda: None)
    assert 0.01 <= reads.patience_s() < 1e4


def test_a_store_that_is_slow_as_a_whole_is_asked_twice_for_one_read_in_twenty() -> None:
    reads, release = impatient_reads(), threading.Event()
    requests: list[int] = []

    def ask() -> None:
        requests.append(1)
        release.wait(60)

    threads = [threading.Thread(target=reads.read, args=(ask,)) for _ in range(100)]
    for thread in threads:
        thread.start()
    pause = threading.Event()
    while reads.hedged < 5 or len(requests) < 105:
        pause.wait(0.01)
    pause.wait(0.2)  # time in which others would be asked for as well
    release.set()
    for thread in threads:
        thread.join(60)
    assert (reads.hedged, len(requests)) == (5, 105)


def test_what_the_first_request_raises_is_raised_unless_the_second_succeeds() -> None:
    numbers = itertools.count()
    second = threading.Event()

    def fails_slowly() -> int:
        if next(numbers) == 0:
            second.wait(60)
            raise ValueError("first")
        second.set()
        return 1

    assert impatient_reads().read(fails_slowly) == 1
    with pytest.raises(ValueError, match="at once"):
        impatient_reads().read(lambda: (_ for _ in ()).throw(ValueError("at once")))
    both = threading.Barrier(2)

    def fail() -> None:
        both.wait(60)
        raise ValueError("both")

    with pytest.raises(ValueError, match="both"):
        impatient_reads().read(fail)
