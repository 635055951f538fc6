"""Retention: what goes and what never does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.checkpoint.save.retention import Retention

steps_strategy = st.lists(st.integers(0, 500), unique=True)


@given(steps_strategy, st.integers(1, 5), st.none() | st.integers(1, 100))
def test_exactly_the_newest_and_the_periodic_stay(
    steps: list[int], keep_last: int, keep_every: int | None
) -> None:
    gone = Retention(keep_last, keep_every).expired(steps)
    for step in steps:
        newer = sum(other > step for other in steps)
        stays = newer < keep_last or (keep_every and step % keep_every == 0)
        assert (step in gone) == (not stays)


@given(steps_strategy)
def test_applying_the_rule_twice_changes_nothing(steps: list[int]) -> None:
    rule = Retention(keep_last=2, keep_every=50)
    left = set(steps) - set(rule.expired(steps))
    assert rule.expired(sorted(left)) == []


@pytest.mark.parametrize(("keep_last", "keep_every"), [(0, None), (1, 0)])
def test_a_rule_that_makes_no_sense_is_refused(keep_last: int, keep_every: int | None) -> None:
    with pytest.raises(ValueError, match="keep_"):
        Retention(keep_last, keep_every)


def test_the_newest_checkpoint_before_a_step_that_is_named_is_kept() -> None:
    rule = Retention(keep_last=1, before=(13, 31))
    assert rule.expired([4, 8, 12, 16, 20, 24, 28, 32]) == [4, 8, 16, 20, 24]
    assert Retention(keep_last=1, before=(3,)).expired([4, 8]) == [4]
