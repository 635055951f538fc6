"""Budgets as users write them: ``40M$``, ``1e25 FLOP``, ``30d``, ``1M gpu-hours``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from phalanx.plan.scaling.optimum import BudgetError

BudgetUnit = Literal["usd", "flop", "days", "gpu-hours"]

_SIZES = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18, "Z": 1e21}
_NAMES: dict[str, tuple[BudgetUnit, float]] = {
    "$": ("usd", 1),
    "usd": ("usd", 1),
    "dollars": ("usd", 1),
    "flop": ("flop", 1),
    "flops": ("flop", 1),
    "d": ("days", 1),
    "day": ("days", 1),
    "days": ("days", 1),
    "h": ("days", 1 / 24),
    "hours": ("days", 1 / 24),
    "weeks": ("days", 7),
    "gpu-hours": ("gpu-hours", 1),
    "gpu-hour": ("gpu-hours", 1),
    "gpuh": ("gpu-hours", 1),
    "accelerator-hours": ("gpu-hours", 1),
    "gpu-days": ("gpu-hours", 24),
}
_HOW = "write a number above 0 with its unit, as in 40M$, 1e25FLOP, 30d or 1M gpu-hours (k, M, B, T before the unit are thousands)"
_MOST = {"usd": 1e15, "flop": 1e35, "days": 36_525.0, "gpu-hours": 1e13}
"""Budgets beyond these are slips of a unit: a hundred years, more dollars than there are."""


@dataclass(frozen=True)
class Budget:
    """An amount of what may be spent."""

    amount: float
    unit: BudgetUnit

    def __str__(self) -> str:
        if self.unit == "flop":
            return f"{self.amount:.3g} FLOP"
        if self.unit == "days":
            return f"{self.amount:,.4g} days"
        units = (("B", 1e9), ("M", 1e6), ("k", 1e3))
        letter, size = next((unit for unit in units if self.amount >= unit[1]), ("", 1.0))
        return f"{self.amount / size:,.4g} {letter}{'$' if self.unit == 'usd' else ' gpu-hours'}"


def read_budget(text: str) -> Budget:
    """Reads a budget. Raises ``BudgetError`` that names what could be written."""
    found = re.fullmatch(r"\s*\$?\s*([\d._,]+(?:[eE][+-]?\d+)?)\s*([kMBGTPEZ]?)\s*([A-Za-z$-]*)\s*", text)
    if found is None:
        raise BudgetError(f"--budget {text}: {_HOW}")
    number, size, unit = found.groups()
    if text.strip().startswith("$"):
        unit = unit or "$"
    if not unit:
        raise BudgetError(f"--budget {text}: of what? {_HOW}")
    # "GPU-hours" begins with no G of "PU-hours".
    readings = ((prefix, name.lower()) for prefix, name in ((size, unit), ("", size + unit)))
    known = next((reading for reading in readings if reading[1] in _NAMES), None)
    if known is None:
        raise BudgetError(f"--budget {text}: {unit!r} is not a unit: {_HOW}")
    kind, factor = _NAMES[known[1]]
    try:
        amount = float(number.replace("_", "").replace(",", "")) * _SIZES[known[0]] * factor
    except ValueError:
        amount = 0.0
    if not (math.isfinite(amount) and amount > 0):
        raise BudgetError(f"--budget {text}: {_HOW}")
    if amount > _MOST[kind]:
        raise BudgetError(f"--budget {text}: plausible is up to {_MOST[kind]:.3g} {kind}")
    return Budget(amount, kind)
