"""``/api/run/ID/ranks`` and ``/rank/R``: what each rank measured of itself, as a heat map and as one rank's history."""

from __future__ import annotations

import base64
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from starlette.responses import Response

from phalanx.fleet.control.fleet_file import FleetFileError, read_fleet_file
from phalanx.observe.rank_stream import RANK_COLUMNS, HeatMap, RankStream, RankStreamError
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.layout import layout_of
from phalanx.run.rank_places import rank_groups, rank_place
from phalanx.watch.page.answer import Parameters, RequestError, json_bytes, not_found
from phalanx.watch.page.places import Place
from phalanx.watch.page.views.runs import Runs
from phalanx.watch.series.reduce import rounded

HEAT_COLUMNS = RANK_COLUMNS
_MOST_ACROSS, _MOST_DOWN = 2000, 2000
_MOST_STEP = 2**62
_MOST_GROUP = 4096


def ranks_view(runs: Runs, place: Place, parameters: Parameters) -> Response | dict[str, object]:
    """A heat map as bytes: the length of a header in four bytes, the header in JSON, and the values in single precision, row by row."""
    heat = heat_map(
        runs,
        place,
        parameters.choice("column", HEAT_COLUMNS),
        parameters.whole("columns", 800, 1, _MOST_ACROSS),
        parameters.whole("rows", 400, 1, _MOST_DOWN),
        _step(parameters, "first"),
        _step(parameters, "last"),
    )
    if heat is None:
        return {"missing": True}
    head = json_bytes(header(heat))
    body = len(head).to_bytes(4, "little") + head + heat.map.values.astype("<f4").tobytes()
    return Response(body, media_type="application/octet-stream")


@dataclass(frozen=True)
class Heat:
    """A heat map, and the rank of each row that a look at the row should show first."""

    map: HeatMap
    worst: list[int]


def heat_map(
    runs: Runs,
    place: Place,
    column: str,
    columns: int,
    rows: int,
    first: int | None = None,
    last: int | None = None,
) -> Heat | None:
    """The heat map of one column; ``None`` if the run has no numbers of ranks. Raises ``RequestError`` if they cannot be read."""
    path = RunDirectory(place.path).ranks
    try:
        stream, lock = runs.rank_streams.of(path)
        with lock:
            stream.refresh()
            if not len(stream):
                return None
            found = stream.heat_map(column, first, last, columns, rows)
            return Heat(found, _worst(stream, column, found))
    except RankStreamError as error:
        raise RequestError(str(error), 404) from None


def _worst(stream: RankStream, column: str, found: HeatMap) -> list[int]:
    """Of each row the rank with the greatest value in the newest frame that is shown."""
    if not found.values.size:
        return []
    shown = np.flatnonzero(stream.steps == found.column_steps[-1])
    values = stream.frame(int(shown[-1])).columns[column]
    starts = found.row_ranks.tolist()
    worst = []
    for start, end in zip(starts, [*starts[1:], found.ranks], strict=True):
        row = values[start:end]
        worst.append(start + (int(np.nanargmax(row)) if np.isfinite(row).any() else 0))
    return worst


def header(heat: Heat) -> dict[str, object]:
    """What is said of a heat map beside its values."""
    found = heat.map
    known = found.values[np.isfinite(found.values)]
    return {
        "rows": found.values.shape[0],
        "columns": found.values.shape[1],
        "row_ranks": found.row_ranks.tolist(),
        "row_worst": heat.worst,
        "column_steps": found.column_steps.tolist(),
        "column_times": found.column_times.tolist(),
        "minimum": float(known.min()) if len(known) else None,
        "maximum": float(known.max()) if len(known) else None,
        "median": float(np.median(known)) if len(known) else None,
        "reduced": found.reduced,
        "ranks": found.ranks,
    }


def heat_table(runs: Runs, place: Place, column: str) -> dict[str, object]:
    """A small heat map as JSON, for a file without a server."""
    heat = heat_map(runs, place, column, columns=400, rows=200)
    if heat is None:
        return {"missing": True}
    values = base64.b64encode(heat.map.values.astype("<f4").tobytes()).decode()
    return header(heat) | {"values_base64": values}


def rank_view(runs: Runs, place: Place, parameters: Parameters) -> dict[str, object]:
    """The history of one rank, its node, its place in the mesh and its neighbors in each group."""
    rank = int(parameters.path["rank"])
    column = parameters.choice("column", HEAT_COLUMNS)
    try:
        stream, lock = runs.rank_streams.of(RunDirectory(place.path).ranks)
        with lock:
            stream.refresh()
            ranks = stream.ranks
            if not 0 <= rank < ranks:
                raise not_found(f"there is no rank {rank} among {ranks} in the newest numbers of this run")
            steps, values = stream.rank(column, rank, _step(parameters, "first"), _step(parameters, "last"))
    except RankStreamError as error:
        raise RequestError(str(error), 404) from None
    spec = runs.spec(place)
    where: dict[str, int] = {}
    groups: dict[str, list[int]] = {}
    if spec is not None:
        with suppress(ValueError):  # another number of ranks than the run file's layout takes
            layout = layout_of(spec.parallel, ranks)
            where = rank_place(layout, rank)
            groups = {axis: found[:_MOST_GROUP] for axis, found in rank_groups(layout, rank).items()}
    return {
        "rank": rank,
        "column": column,
        "place": where,
        "node": _node(place, rank),
        "steps": steps.tolist(),
        "values": rounded(values.astype(np.float64)),
        "groups": groups,
    }


def _node(place: Place, rank: int) -> str:
    """The node that holds the rank now; empty without a fleet."""
    try:
        members = read_fleet_file(place.path).members
    except FleetFileError:
        return ""
    return next((member.name for member in members if rank in member.ranks), "")


def _step(parameters: Parameters, name: str) -> int | None:
    said = parameters.number(name)
    return None if said is None else int(max(-1.0, min(said, float(_MOST_STEP))))
