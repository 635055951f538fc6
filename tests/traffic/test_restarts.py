"""When a worker process is started again: sooner or later, and not for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx.traffic.restarts import RestartRule, Starts, after_end

RULE = RestartRule(first_s=1.0, longest_s=6.0, most=5, stayed_s=10.0)


def test_a_worker_that_never_stays_is_started_later_and_later_and_then_not_at_all() -> None:
    starts = Starts()
    assert [after_end(RULE, starts, 0.0) for _ in range(5)] == [1.0, 2.0, 4.0, 6.0, None]


@given(st.lists(st.sampled_from([0.0, 9.9, 10.0, 500.0]), max_size=40))
def test_only_so_many_failures_in_a_row_give_a_worker_up(served: list[float]) -> None:
    starts, row = Starts(), 0
    for seconds in served:
        again_s = after_end(RULE, starts, seconds)
        row = 0 if seconds >= RULE.stayed_s else row + 1
        assert (again_s is None) == (row >= RULE.most)
        assert again_s is None or RULE.first_s <= again_s <= RULE.longest_s
    assert starts.ended == len(served)
