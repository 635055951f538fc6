"""Numbers as tables show them."""

from __future__ import annotations

from phalanx.cli.output import share, utilization


def test_a_utilization_above_the_measured_peak_is_marked() -> None:
    assert [utilization(0.412), utilization(1.0), utilization(1.18)] == ["41.2%", "100.0%", "118.0%!"]
    assert share(1.18) == "118.0%"
