"""``/api/run/ID/why``: what is wrong with a run now, every reason, worst first."""

from __future__ import annotations

import time

from phalanx.run.directory.paths import RunDirectory
from phalanx.watch.page.answer import Parameters
from phalanx.watch.page.places import Place
from phalanx.watch.page.views.runs import Runs
from phalanx.watch.why.reasons import reasons


def why_view(_runs: Runs, place: Place, _parameters: Parameters) -> dict[str, object]:
    """The reasons, with their evidence and the next command."""
    return {"reasons": reasons(RunDirectory(place.path), time.time())}
