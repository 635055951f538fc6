"""Which ranks record a profile."""

from __future__ import annotations

import pytest

from phalanx.observe.profile_request import ProfileRequestError
from phalanx.run.layout import Layout
from phalanx.train.profile.choose import SMALL, chosen_ranks


def test_a_small_fleet_is_recorded_whole() -> None:
    assert list(chosen_ranks("auto", Layout(shard=SMALL), None)) == list(range(SMALL))


def test_of_a_large_fleet_each_place_of_the_mesh_is_recorded_once_and_the_slowest_rank() -> None:
    layout = Layout(pipeline=4, replicate=64, shard=8, tensor=8)
    chosen = chosen_ranks("auto", layout, slowest=9_999)
    stage = layout.ranks // 4
    assert set(chosen) == {first * stage + rank for first in range(4) for rank in range(8)} | {9_999}
    assert chosen[9_999] == "the slowest rank"


def test_all_owners_of_experts_are_places_of_their_own() -> None:
    assert list(chosen_ranks("auto", Layout(shard=64, expert=16), None)) == list(range(16))


def test_a_slowest_rank_that_there_is_not_any_more_is_left_out() -> None:
    assert 400 not in chosen_ranks("auto", Layout(shard=64), 400)


def test_ranks_that_there_are_not_and_too_many_are_refused() -> None:
    with pytest.raises(ProfileRequestError, match="no rank 8"):
        chosen_ranks((0, 8), Layout(shard=8), None)
    with pytest.raises(ProfileRequestError, match="at most"):
        chosen_ranks("all", Layout(shard=100_000), None)
