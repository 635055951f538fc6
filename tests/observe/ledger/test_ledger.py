"""The ledger sums to wall time, for any work and any clock."""

import contextlib
import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.observe.ledger import (
    Bucket,
    Ledger,
    LedgerError,
    add,
    format_ledger,
)

BUCKETS = st.sampled_from(list(Bucket))
TICKS = st.integers(0, 10**12)


class Clock:
    """Clock that shows ``now``."""

    def __init__(self, now: int = 10**15) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now


# A day's work: time passes, a bucket is switched to, or a bucket is entered with work inside it.
WORK = st.recursive(
    st.lists(st.tuples(BUCKETS, TICKS), max_size=4),
    lambda inner: st.lists(st.tuples(BUCKETS, TICKS) | st.tuples(BUCKETS, inner), max_size=4),
    max_leaves=12,
)


def do(ledger: Ledger, clock: Clock, work: list) -> Iterator[tuple[Bucket, int]]:  # type: ignore[type-arg]
    """Carry out ``work``; yields what a bookkeeper with a stopwatch would note beside it."""
    for bucket, rest in work:
        if isinstance(rest, int):
            ledger.switch(bucket)
            clock.now += rest
            yield bucket, rest
        else:
            with ledger.bucket(bucket):
                yield from do(ledger, clock, rest)


@given(WORK)
def test_the_buckets_sum_to_the_elapsed_time_exactly(work: list) -> None:  # type: ignore[type-arg]
    clock = Clock()
    ledger = Ledger(clock.now - 777, Bucket.START_PROCESS, clock)
    noted = list(do(ledger, clock, work))
    assert sum(ledger.totals_ns().values()) == clock.now - ledger.start_ns
    assert ledger.totals_ns() == {
        name: total
        for name, total in add(
            [{Bucket.START_PROCESS.value: 777}, *({b.value: ns} for b, ns in noted)]
        ).items()
        if total
    }


def test_an_inner_bucket_takes_its_time_from_the_outer_one() -> None:
    clock = Clock()
    ledger = Ledger(clock=clock)
    with ledger.bucket(Bucket.STEP_COMPUTE):
        clock.now += 5
        with ledger.bucket(Bucket.STEP_DATA_WAIT):
            clock.now += 3
        clock.now += 2
    assert ledger.totals_ns() == {"step.compute": 7, "step.data_wait": 3}


def test_an_error_inside_a_bucket_closes_it() -> None:
    clock = Clock()
    ledger = Ledger(first_bucket=Bucket.UNATTRIBUTED, clock=clock)
    with contextlib.suppress(KeyError), ledger.bucket(Bucket.EVAL):
        clock.now += 4
        raise KeyError
    clock.now += 1
    assert ledger.totals_ns() == {"eval": 4, "unattributed": 1}


@given(st.lists(st.integers(-1000, 1000), max_size=20))
def test_a_clock_that_steps_back_never_makes_time_negative(moves: list[int]) -> None:
    clock = Clock()
    ledger = Ledger(clock=clock)
    latest = clock.now
    for move, bucket in zip(moves, itertools.cycle(Bucket), strict=False):
        clock.now += move
        latest = max(latest, clock.now)
        ledger.switch(bucket)
    assert all(total >= 0 for total in ledger.totals_ns().values())
    assert sum(ledger.totals_ns().values()) == latest - ledger.start_ns


def test_reassigned_time_leaves_the_sum_as_it_is() -> None:
    clock = Clock()
    ledger = Ledger(first_bucket=Bucket.STEP_COMPUTE, clock=clock)
    clock.now += 10
    ledger.reassign(Bucket.STEP_COMPUTE, Bucket.COMM_EXPOSED_DP, 4)
    assert ledger.totals_ns() == {"step.compute": 6, "step.comm_exposed.dp": 4}


def test_more_time_than_a_bucket_has_cannot_be_moved() -> None:
    clock = Clock()
    ledger = Ledger(first_bucket=Bucket.STEP_COMPUTE, clock=clock)
    clock.now += 10
    with pytest.raises(LedgerError, match=r"cannot move 11 ns .* it has 10 ns"):
        ledger.reassign(Bucket.STEP_COMPUTE, Bucket.EVAL, 11)
    assert ledger.totals_ns() == {"step.compute": 10}


def test_a_ledger_cannot_start_in_the_future() -> None:
    with pytest.raises(LedgerError, match="future"):
        Ledger(start_ns=11, clock=lambda: 10)


def test_the_real_clock_is_accounted_for_too() -> None:
    ledger = Ledger()
    with ledger.bucket(Bucket.EVAL):
        sum(range(10_000))
    assert ledger.totals_ns()["eval"] > 0


def test_the_table_has_a_line_a_bucket_with_its_share_and_a_total() -> None:
    lines = format_ledger({"eval": 1.0, "step.compute": 3.0, "stop": 0.0}).splitlines()
    assert [line.split()[0] for line in lines] == ["step.compute", "eval", "total"]
    assert "75.0 %" in lines[0]
    assert "4.000 s" in lines[-1]
