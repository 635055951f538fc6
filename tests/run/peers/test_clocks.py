"""One machine's clock against those of others: whose is wrong."""

from __future__ import annotations

import pytest

from phalanx.run.peers import ALIKE_S, own_clock_is_wrong


def test_a_clock_that_differs_from_all_others_by_the_same_time_is_the_wrong_one() -> None:
    warning = own_clock_is_wrong({"a": -7200.0, "b": -7203.0, "c": -7201.0, "d": -7200.0}, 1, "this machine")
    assert warning == (
        "the clocks of 4 hosts (a, b, c and 1 more) are 7200 s behind that of this machine, all equally; it agrees with 1: "
        "the clock of this machine is the wrong one, set it there (chrony, ntpd)"
    )


@pytest.mark.parametrize(
    ("ahead_s", "agreeing"),
    [
        ({"a": 3600.0}, 0),
        ({"a": 3600.0, "b": 3600.0 + 2 * ALIKE_S}, 0),
        ({"a": 3600.0, "b": -3600.0}, 0),
        ({"a": 3600.0, "b": 3600.0}, 2),
        ({}, 0),
    ],
)
def test_there_is_no_warning_where_one_host_is_apart_or_they_differ_or_as_many_agree(
    ahead_s: dict[str, float], agreeing: int
) -> None:
    assert own_clock_is_wrong(ahead_s, agreeing, "this machine") == ""
