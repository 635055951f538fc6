"""Views of single ranks: ``/api/run/ID/ranks``, ``/rank/R``, ``/profiles``, ``/profile/NAME`` and ``/profile/NAME/trace``.

Measurements of each rank come as a heat map and as one rank's history; recorded profiles come with their analysis.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from starlette.responses import Response

from phalanx.fleet.control.fleet_file import FleetFileError, read_fleet_file
from phalanx.observe.rank_stream import RANK_COLUMNS, HeatMap, RankStream, RankStreamError
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.layout import Layout, layout_of, rank_groups, rank_place
from phalanx_watch.page.http import PageRequestError, Parameters, json_bytes, not_found
from phalanx_watch.page.runs import PageRuns, RunPlace
from phalanx_watch.profile.read import ProfileError, profiles, read_summary, trace_path
from phalanx_watch.ranks import BY_RANK, in_order, nodes_of_ranks, orders
from phalanx_watch.series.table import rounded

HEAT_COLUMNS = RANK_COLUMNS
_MOST_ACROSS, _MOST_DOWN = 2000, 2000
_MOST_STEP = 2**62
_MOST_GROUP = 4096


def ranks_view(runs: PageRuns, place: RunPlace, parameters: Parameters) -> Response | dict[str, object]:
    """Return a heat map as little-endian bytes: the length of a header in four bytes, the JSON header, and the fp32
    values row by row; ``{"missing": true}`` if the run has no rank numbers. Raises ``PageRequestError``."""
    heat = heat_map(
        runs,
        place,
        parameters.choice("column", HEAT_COLUMNS),
        Part(
            parameters.integer("columns", 800, 1, _MOST_ACROSS),
            parameters.integer("rows", 400, 1, _MOST_DOWN),
            _step(parameters, "first"),
            _step(parameters, "last"),
            parameters.text("order") or BY_RANK,
            _step(parameters, "from"),
            _step(parameters, "to"),
        ),
    )
    if heat is None:
        return {"missing": True}
    header, values = json_bytes(heat[0]), heat[1]
    body = len(header).to_bytes(4, "little") + header + values
    return Response(body, media_type="application/octet-stream")


@dataclass(frozen=True)
class Part:
    """Drawn part of a heat map: limits on columns and rows, a range of steps, and a range of places in the rank
    order.
    """

    columns: int
    rows: int
    first_step: int | None = None
    last_step: int | None = None
    order: str = BY_RANK
    first_place: int | None = None
    last_place: int | None = None


def heat_map(
    runs: PageRuns, place: RunPlace, column: str, part: Part
) -> tuple[dict[str, object], bytes] | None:
    """Return the heat map of one column: its header, and its values as little-endian fp32, row by row. None if the run has no rank numbers.

    An unknown order becomes that of ranks, and places are clipped. Raises ``PageRequestError`` (404) if they cannot
    be read.
    """
    directory = RunDirectory(place.path)
    try:
        stream, lock = runs.rank_stream(directory.ranks)
        with lock:
            stream.refresh()
            if not len(stream):
                return None
            ranks = stream.ranks
            layout, nodes = _layout(runs, place, ranks), nodes_of_ranks(directory, ranks)
            all_orders = orders(layout, nodes)
            if part.order not in all_orders:
                part = replace(part, order=BY_RANK)
            first = min(max(0, part.first_place or 0), ranks - 1)
            last = ranks if part.last_place is None else max(first + 1, part.last_place + 1)
            # Without an order and a part, frames of an attempt with more ranks are drawn in full.
            is_full = part.order == BY_RANK and first == 0 and last >= ranks
            order = None if is_full else in_order(part.order, ranks, layout, nodes)
            picture = stream.heat_map(
                *(column, part.first_step, part.last_step, part.columns, part.rows, order),
                slice(None) if is_full else slice(first, last),
            )
            worst = _worst(stream, column, picture)
    except RankStreamError as error:
        raise PageRequestError(str(error), 404) from None
    known_values = picture.values[np.isfinite(picture.values)]
    has_values = bool(len(known_values))
    header = {
        "rows": picture.values.shape[0],
        "columns": picture.values.shape[1],
        "row_ranks": picture.row_ranks.tolist(),
        "row_sizes": [len(places) for places in picture.rows],
        "row_worst": worst,
        "row_nodes": _nodes(picture, nodes),
        "column_steps": picture.column_steps.tolist(),
        "column_times": picture.column_times.tolist(),
        "column_usual": rounded(picture.usual.astype(np.float64)),
        "minimum": float(known_values.min()) if has_values else None,
        "maximum": float(known_values.max()) if has_values else None,
        "median": float(np.median(known_values)) if has_values else None,
        "reduced": picture.reduced,
        "ranks": picture.ranks,
        "order": part.order,
        "orders": all_orders,
        "first_place": first,
        "places": max(ranks, picture.ranks),
    }
    return header, picture.values.astype("<f4").tobytes()


def _worst(stream: RankStream, column: str, picture: HeatMap) -> list[int]:
    """Return, for each row of the map, the rank with the greatest value in the newest frame shown; its first rank if none is finite."""
    if not picture.values.size:
        return []
    shown = np.flatnonzero(stream.steps == picture.column_steps[-1])
    newest = stream.column(int(shown[-1]), column)
    values = np.full(int(picture.drawn.max()) + 1, np.nan, np.float32)
    values[: len(newest)] = newest[: len(values)]
    worst = []
    for places in picture.rows:
        ranks = picture.drawn[places.start : places.stop]
        row = values[ranks]
        worst.append(int(ranks[int(np.nanargmax(row)) if np.isfinite(row).any() else 0]))
    return worst


def _nodes(picture: HeatMap, nodes: Mapping[int, str]) -> list[str]:
    """Return the node of each row, or the first and last of several; empty without ``nodes``."""
    if not nodes:
        return []
    ends = [
        (int(picture.drawn[places.start]), int(picture.drawn[places.stop - 1])) for places in picture.rows
    ]
    named = [(nodes.get(first, ""), nodes.get(last, "")) for first, last in ends]
    return [first if first == last else f"{first} … {last}" for first, last in named]


def heat_table(runs: PageRuns, place: RunPlace, column: str) -> dict[str, object]:
    """Return a heat map of at most 400 by 200 as JSON with base64 values, for an exported file; ``{"missing": True}`` without numbers."""
    heat = heat_map(runs, place, column, Part(columns=400, rows=200))
    if heat is None:
        return {"missing": True}
    header, values = heat
    return header | {"orders": [BY_RANK], "values_base64": base64.b64encode(values).decode()}


def rank_view(runs: PageRuns, place: RunPlace, parameters: Parameters) -> dict[str, object]:
    """Return the history of one rank, its node, its place in the mesh and its neighbors (at most ``_MOST_GROUP``) in
    each group.

    Place and groups are empty if the layout is unknown. Raises ``PageRequestError`` for an unknown rank or unreadable
    numbers.
    """
    rank = int(parameters.path["rank"])
    column = parameters.choice("column", HEAT_COLUMNS)
    try:
        stream, lock = runs.rank_stream(RunDirectory(place.path).ranks)
        with lock:
            stream.refresh()
            ranks = stream.ranks
            if not 0 <= rank < ranks:
                raise not_found(f"there is no rank {rank} among {ranks} in the newest numbers of this run")
            steps, values = stream.rank(column, rank, _step(parameters, "first"), _step(parameters, "last"))
    except RankStreamError as error:
        raise PageRequestError(str(error), 404) from None
    layout = _layout(runs, place, ranks)
    where: dict[str, int] = {}
    groups: dict[str, list[int]] = {}
    if layout is not None:
        where = rank_place(layout, rank)
        groups = {axis: members[:_MOST_GROUP] for axis, members in rank_groups(layout, rank).items()}
    return {
        "rank": rank,
        "column": column,
        "place": where,
        "node": _node(place, rank),
        "steps": steps.tolist(),
        "values": rounded(values.astype(np.float64)),
        "groups": groups,
    }


def _layout(runs: PageRuns, place: RunPlace, ranks: int) -> Layout | None:
    """Return the layout of the run's ranks; None if its run file cannot be read, or their number does not fit it."""
    spec = runs.spec(place)
    if spec is None:
        return None
    with suppress(ValueError):
        layout = layout_of(spec.parallel, ranks)
        return layout if layout.ranks == ranks else None
    return None


def _node(place: RunPlace, rank: int) -> str:
    """Return the current node of the rank; empty without a fleet."""
    try:
        members = read_fleet_file(place.path).members
    except FleetFileError:
        return ""
    return next((member.name for member in members if rank in member.ranks), "")


def _step(parameters: Parameters, name: str) -> int | None:
    """Return a step from a parameter, clipped to -1 to ``_MOST_STEP``; None if it is missing."""
    number = parameters.number(name)
    return None if number is None else int(max(-1.0, min(number, float(_MOST_STEP))))


# Profiles.


_MOST_EXPORTED = 8


def profiles_view(_runs: PageRuns, place: RunPlace, _parameters: Parameters) -> dict[str, object]:
    """Return the profiles of a run, the newest last."""
    return {"profiles": profiles(RunDirectory(place.path))}


def profile_names(place: RunPlace) -> list[str]:
    """Return the names of the newest profiles."""
    return [profile.name for profile in profiles(RunDirectory(place.path))][-_MOST_EXPORTED:]


def profile_view(_runs: PageRuns, place: RunPlace, parameters: Parameters) -> Mapping[str, object]:
    """Return the analysis of one profile."""
    return profile_summary(place, parameters.path["name"])


def profile_summary(place: RunPlace, name: str) -> Mapping[str, object]:
    """Return the analysis of the profile ``name``. Raises ``PageRequestError``."""
    try:
        summary: Mapping[str, object] = read_summary(RunDirectory(place.path), name)
    except ProfileError as error:
        raise PageRequestError(str(error), 404) from None
    return summary


def trace_file(place: RunPlace, name: str) -> Path:
    """Return the resolved path of the merged trace.

    Raises ``PageRequestError`` (404) if there is none, or for a name or link that leads out of the run directory.
    """
    try:
        path = trace_path(RunDirectory(place.path), name).resolve()
    except (ProfileError, OSError) as error:
        raise PageRequestError(str(error), 404) from None
    if not path.is_relative_to(place.path.resolve()) or not path.is_file():
        raise not_found(f"the profile {name[:100]!r} has no trace")
    return path
