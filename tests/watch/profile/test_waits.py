"""Waiting is charged to the rank that came last, and the critical path goes where nothing can be shortened without it."""

from __future__ import annotations

from phalanx_watch.profile.waits import Passage, critical_path, meet


def passage(rank: int, number: int, came: int, left: int, **more: object) -> Passage:
    return Passage(rank, ("shard/0/2", number, "all_reduce"), "shard", came, left, 100, 0, **more)  # type: ignore[arg-type]


def test_a_wait_is_charged_to_the_last_rank_and_the_rest_of_the_time_to_the_link() -> None:
    waits = meet({0: [passage(0, 1, 100, 500)], 1: [passage(1, 1, 400, 520)], 2: [passage(2, 1, 300, 510)]})
    assert waits.charged == {1: {0: 300e-9, 2: 100e-9}}
    (transfer,) = waits.moved.values()
    assert transfer.seconds == (100 + 120 + 110) / 3 / 1e9
    assert waits.waited == {(0, "shard"): 300e-9, (2, "shard"): 100e-9}


def test_collectives_that_only_one_rank_recorded_are_no_meetings() -> None:
    waits = meet({0: [passage(0, 1, 100, 500)], 1: [passage(1, 2, 100, 500)]})
    assert waits.meetings == []


def test_the_path_goes_over_the_rank_that_came_last_each_time() -> None:
    ways = {
        0: [passage(0, 1, 100, 410), passage(0, 2, 900, 910)],
        1: [passage(1, 1, 400, 410), passage(1, 2, 500, 910)],
    }
    path = critical_path(meet(ways), ways, {0: (0, 1000), 1: (0, 990)})
    assert [(part.rank, part.begin_ns, part.end_ns, part.meeting is not None) for part in path] == [
        (0, 910, 1000, False),
        (0, 900, 910, True),
        (0, 410, 900, False),
        (0, 400, 410, True),
        (1, 0, 400, False),
    ]


def test_a_path_of_clocks_that_disagree_ends() -> None:
    ways = {
        0: [passage(0, number, 1000 - number, 10) for number in range(50)],
        1: [passage(1, number, 1000 - number, 2000) for number in range(50)],
    }
    assert critical_path(meet(ways), ways, {0: (0, 3000), 1: (0, 3000)})
