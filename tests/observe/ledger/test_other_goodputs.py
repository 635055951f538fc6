"""Our account in the terms of others: their parts sum to their totals, as their definitions have them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from observe.recorded import crashed_run
from phalanx.observe.goodput import Goodput, goodput, google_goodput, meta_ettr
from phalanx.observe.ledger import NS_PER_S, Bucket

NS = st.integers(0, 10**15)


@st.composite
def accounts(draw: st.DrawFn) -> Goodput:
    """Any account whose outcomes sum to its steps."""
    buckets = draw(
        st.dictionaries(st.sampled_from([*Bucket, "new.bucket", "step.new"]).map(str), NS, max_size=12)
    )
    step_ns = sum(value for name, value in buckets.items() if name.startswith("step."))
    waiting_ns = draw(st.integers(0, buckets.get(Bucket.STEP_DATA_WAIT, 0)))
    edges = st.lists(st.integers(0, step_ns - waiting_ns), min_size=3, max_size=3)
    a, b, c = sorted(draw(edges))
    return Goodput(buckets, a, b - a, c - b, step_ns - waiting_ns - c, draw(NS), 1, waiting_ns)


@given(accounts())
def test_the_parts_sum_to_elapsed_time_exactly(ours: Goodput) -> None:
    google, meta = google_goodput(ours), meta_ettr(ours)
    assert (
        google.productive_ns + sum(google.badput_ns.values())
        == google.elapsed_ns
        == ours.total_ns + ours.gap_ns
    )
    assert meta.wall_ns == google.elapsed_ns
    assert 0 <= google.goodput <= 1
    assert 0 <= meta.ettr <= 1
    assert google.productive_ns >= ours.committed_ns


def test_a_run_that_crashed_once_is_accounted_as_each_definition_has_it() -> None:
    ours = goodput(
        crashed_run()
    )  # 45 steps of 1 s, 5 of them lost, 4 s a start, 1 s at every tenth step, 30 s between
    google, meta = google_goodput(ours), meta_ettr(ours)
    assert google.elapsed_ns == ours.total_ns + 30 * NS_PER_S
    assert google.productive_ns == 40 * NS_PER_S
    assert google.badput_ns["WASTED_PROGRESS_FROM_DISRUPTION"] == 5 * NS_PER_S
    assert google.badput_ns["PROGRAM_STARTUP"] == 8 * NS_PER_S
    assert meta.catch_up_ns == 5 * NS_PER_S
    assert meta.restart_overhead_ns == 8 * NS_PER_S
    assert meta.productive_ns == (40 + 4) * NS_PER_S  # checkpoints and evaluations are productive there
