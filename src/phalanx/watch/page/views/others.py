"""Views that other rooms of ``watch`` make: ranks, logs, reasons, profiles, comparisons."""

from __future__ import annotations

from phalanx.watch.page.answer import Parameters
from phalanx.watch.page.places import Place
from phalanx.watch.page.views.runs import Runs

_MISSING: dict[str, object] = {"missing": True}


def missing(_runs: Runs, _place: Place, _parameters: Parameters) -> dict[str, object]:
    """There is nothing to show."""
    return _MISSING
