"""Figures of plans are in readable units for a run of any size."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_plan.report.elements import (
    BETWEEN,
    CO2,
    DAYS,
    DOLLARS,
    ENERGY,
    POWER,
    DisplayUnit,
    counted,
    unit_for,
    written,
)

ALL = {
    "days": DAYS,
    "between": BETWEEN,
    "energy": ENERGY,
    "power": POWER,
    "co2": CO2,
    "dollars": DOLLARS,
}


@pytest.mark.parametrize("units", ALL.values(), ids=ALL.keys())
@given(value=st.floats(1e-3, 1e12))
def test_a_figure_can_be_read_back_and_is_at_least_one_where_a_unit_allows_it(
    units: tuple[DisplayUnit, ...], value: float
) -> None:
    number, name = written(value, units).split()
    (unit,) = [unit for unit in units if unit.name == name]
    shown = float(number.replace(",", ""))
    assert shown * unit.size == pytest.approx(value, rel=1e-3)
    assert shown >= 0.999 or unit == units[-1]


def test_a_toy_run_takes_seconds_and_cents_and_a_large_one_days_and_millions() -> None:
    assert written(3.088e-05, DAYS) == "2.668 s"
    assert written(54.0, DAYS) == "54 days"
    assert written(0.0148, DOLLARS) == "0.0148 $"
    assert written(6.2e7, DOLLARS) == "62 M$"
    assert written(12_243.7, DOLLARS) == "12,240 $"
    assert DisplayUnit("M$", 1e6)(1.4526e9, digits=3) == "1,450"
    assert counted(1.0237e14) == "102.4 T"
    assert written(6.178e-3, ENERGY) == "6.178 Wh"


def test_the_figures_of_a_column_have_one_unit() -> None:
    assert unit_for([0.2, 0.5, math.inf], DAYS).name == "hours"
    assert unit_for([math.inf], DAYS).name == "days"
