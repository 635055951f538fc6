"""When a process that died is started again: later and later, and not for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx.process.restarts import RestartPolicy, Restarts

POLICY = RestartPolicy(first_pause_s=1.0, longest_pause_s=6.0, most_deaths=5)


def test_a_process_that_does_nothing_useful_is_started_later_and_later_and_then_not_at_all() -> None:
    restarts = Restarts(POLICY)
    assert [restarts.after_death() for _ in range(5)] == [1.0, 2.0, 4.0, 6.0, None]


def test_a_process_that_is_never_given_up_may_die_any_number_of_times() -> None:
    restarts = Restarts(RestartPolicy(longest_pause_s=6.0, most_deaths=None))
    assert {restarts.after_death() for _ in range(3000)} >= {0.2, 6.0}
    assert restarts.after_death() == 6.0


@given(st.lists(st.booleans(), max_size=40))
def test_only_so_many_deaths_in_a_row_without_useful_work_give_a_process_up(useful: list[bool]) -> None:
    restarts, row = Restarts(POLICY), 0
    for was_useful in useful:
        pause_s = restarts.after_death(was_useful=was_useful)
        row = 0 if was_useful else row + 1
        assert (pause_s is None) == (row >= 5)
        assert pause_s is None or 1.0 <= pause_s <= 6.0


@given(st.lists(st.sampled_from([None, 1, 2]), min_size=5, max_size=60))
def test_a_process_is_given_up_only_after_so_many_deaths_at_the_same_place(
    standings: list[int | None],
) -> None:
    restarts, since = Restarts(POLICY), 0
    for number, standing in enumerate(standings):
        since = since if number and standing == standings[number - 1] else number
        assert (restarts.after_death(standing) is None) == (number - since + 1 >= 5)
