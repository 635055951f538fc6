"""Figures of a plan for people, in the unit that suits their size: a toy run takes seconds and cents, a large one days and M$."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.plan.step_cost.estimate import Estimate


@dataclass(frozen=True)
class Unit:
    """A unit, and how many of the base unit it is."""

    name: str
    size: float

    def __call__(self, value: float, digits: int = 4) -> str:
        """``value``, in the base unit, as a number of this unit, without its name; large ones written out, as people write money."""
        short = f"{value / self.size:.{digits}g}"
        return f"{float(short):,.15g}" if abs(value) >= self.size else short


DAYS = (Unit("days", 1.0), Unit("hours", 1 / 24), Unit("minutes", 1 / 1440), Unit("s", 1 / 86_400))
"""Units of days. The largest unit of which there is at least one is taken, here and below."""
BETWEEN = (Unit("days", 86_400.0), Unit("minutes", 60.0), Unit("s", 1.0))
"""Units of seconds between failures."""
ENERGY = (Unit("GWh", 1e6), Unit("MWh", 1e3), Unit("kWh", 1.0), Unit("Wh", 1e-3))
"""Units of kWh."""
POWER = (Unit("MW", 1e6), Unit("kW", 1e3), Unit("W", 1.0))
"""Units of W."""
CO2 = (Unit("kt", 1e6), Unit("t", 1e3), Unit("kg", 1.0), Unit("g", 1e-3))
"""Units of kg."""
DOLLARS = (Unit("M$", 1e6), Unit("$", 1.0))
"""Units of US dollars."""


def counted(number: float) -> str:
    """A count of parameters or tokens, as in ``8.03 B``."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:,.4g} {unit}"
    return f"{number:,.4g}"


def mfu_text(found: Estimate) -> str:
    """The MFU as most publish it, attention counted in full; with a "c", only the causal scores where these are far fewer."""
    # Beside long sequences, scores that nobody computes would be most of the work: the figure would pass 100 %.
    if found.causal_share < _MOSTLY_ATTENTION:
        return f"{found.mfu_causal:.1%} c"
    return f"{found.mfu:.1%}"


_MOSTLY_ATTENTION = 0.75
"""Share of causal FLOP below which attention, counted in full, is more than half of all."""


def unit_for(values: Sequence[float], units: Sequence[Unit]) -> Unit:
    """The unit, of ``units`` from large to small, in which the largest of ``values`` is at least one."""
    most = max((abs(value) for value in values if math.isfinite(value)), default=math.inf)
    return next((unit for unit in units if most >= unit.size), units[-1])


def written(value: float, units: Sequence[Unit]) -> str:
    """``value`` with its unit: ``12.3 days``."""
    unit = unit_for([value], units)
    return f"{unit(value)} {unit.name}"
