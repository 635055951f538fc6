"""``/api/compare``: several runs side by side, and whether those that must have the same bits part, and where."""

from __future__ import annotations

from phalanx.run.directory.paths import RunDirectoryError
from phalanx.watch.page.answer import Parameters, RequestError
from phalanx.watch.page.views.runs import Runs
from phalanx.watch.runs.compare import MOST_RUNS, compare


def compare_view(runs: Runs, parameters: Parameters) -> dict[str, object]:
    """The comparison of the runs whose identifiers are given, in that order."""
    places = [runs.place(one) for one in dict.fromkeys(parameters.names("ids", most=MOST_RUNS))]
    if len(places) < 2:
        raise RequestError(f"ids: give the identifiers of 2 to {MOST_RUNS} runs, with commas between them")
    try:
        return compare([place.path for place in places]).to_json()
    except RunDirectoryError as error:
        raise RequestError(str(error)) from None
