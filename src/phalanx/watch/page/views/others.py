"""Views that other rooms of ``watch`` make: logs, reasons, profiles, comparisons."""

from __future__ import annotations

from phalanx.watch.page.answer import Parameters
from phalanx.watch.page.places import Place
from phalanx.watch.page.views.runs import Runs

_MISSING: dict[str, object] = {"missing": True}


def missing(_runs: Runs, _place: Place, _parameters: Parameters) -> dict[str, object]:
    """There is nothing to show."""
    return _MISSING


why_view = logs_view = profiles_view = missing


def profile_names(_place: Place) -> list[str]:
    """The names of a run's profiles."""
    return []


def profile_view(_place: Place, _name: str) -> dict[str, object]:
    """The summary of one profile."""
    return _MISSING
