"""``/api/run/ID/curves``: numbers of a run over steps, tokens, operations or time."""

from __future__ import annotations

from dataclasses import asdict

from phalanx.watch.page.answer import Parameters, RequestError
from phalanx.watch.page.places import Place
from phalanx.watch.page.views.runs import Runs
from phalanx.watch.series.curves import AXES, MOST_POINTS, Axis, Curves, NoSuchCurveError, curves
from phalanx.watch.series.reduce import rounded
from phalanx.watch.series.table import Floats

_USUAL = "loss"
_ALL = "all"


def curves_view(runs: Runs, place: Place, parameters: Parameters) -> dict[str, object]:
    """The curves that the request names (``all``: every one that the run has), reduced to the points that it asks for."""
    run = runs.series(place)
    names = parameters.names("names") or [_USUAL]
    if names == [_ALL]:
        names = run.curve_names()
    axis: Axis = parameters.choice("x", AXES)  # type: ignore[assignment]
    try:
        found = curves(
            run,
            names,
            axis,
            parameters.number("first"),
            parameters.number("last"),
            parameters.whole("points", 1200, 1, MOST_POINTS),
            runs.flops_per_token(place) if axis == "flops" else None,
        )
    except NoSuchCurveError as error:
        raise RequestError(str(error)) from None
    return answer(found) | {
        "names": run.curve_names(),
        "unread": _unread(run.unread),
        "torn_lines": run.torn_lines,
        "dropped_lines": run.dropped_lines,
        "problem": run.problem,
    }


def answer(found: Curves) -> dict[str, object]:
    """Curves as plain values."""
    return {
        "x": _plain(found.x, whole=not found.reduced),
        "series": {
            name: _series(curve.y, curve.lo, curve.hi, found.reduced) for name, curve in found.series.items()
        },
        "reduced": found.reduced,
        "total": found.total,
        "marks": [{"x": placed.x, **asdict(placed.mark)} for placed in found.marks],
        "marks_left_out": found.marks_left_out,
    }


def _series(y: Floats, lo: Floats, hi: Floats, reduced: bool) -> dict[str, object]:
    line = rounded(y)
    return {"y": line, "lo": rounded(lo) if reduced else line, "hi": rounded(hi) if reduced else line}


def _plain(x: Floats, *, whole: bool) -> list[float | None]:
    return [value if value - value == 0 else None for value in x.tolist()] if whole else rounded(x, 12)


def _unread(found: tuple[int, int] | None) -> dict[str, int] | None:
    """How far reading has come of a file that is too long to be read at once; the next request goes on."""
    return None if found is None else {"read_bytes": found[0], "size_bytes": found[1]}
