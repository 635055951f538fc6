"""Smaller tensor and context degrees with which a run continues when its fleet has too few ranks.

A run in lanes has the same bits for every tensor degree (``phalanx.parallel.tensor.lanes``), and a run in context tiles for every context degree
(``phalanx.parallel.context.fixed_tiles``). So a fleet that lost half of a node need not wait for a spare. ``fleet.least_tensor`` and
``fleet.least_context`` are the minimum degrees, and ``fleet.halve_first`` is the degree that is reduced first. Degrees are halved until the remaining
ranks suffice, and return to those of the run file when there are enough ranks. Experts are reassigned to fewer ranks in the same proportion. All
ranks and the coordinator make the same decision from the run file and the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from phalanx.run.fields import Problem
from phalanx.run.layout import layout_problems, replica_ranks
from phalanx.run.spec import ParallelSpec, RunSpec

Axis = Literal["tensor", "context"]
"""A degree that may be reduced."""


def divisions(spec: RunSpec) -> Iterator[ParallelSpec]:
    """Yield the ways to divide the model: that of the run file, then smaller degrees, first one down to its minimum and then the other.

    Tensor is reduced first, unless ``fleet.halve_first`` names context.
    """
    parallel = spec.parallel
    yield parallel
    axes: tuple[Axis, ...] = ("tensor", "context")
    for axis in reversed(axes) if spec.fleet.halve_first == "context" else axes:
        while (halved := _halved(spec, parallel, axis)) is not None:
            yield (parallel := halved)


def _halved(spec: RunSpec, parallel: ParallelSpec, axis: Axis) -> ParallelSpec | None:
    """Return ``parallel`` with half of the degree of ``axis`` and half of the experts' ranks; ``None`` if that is
    below the fleet's least degree or none is set.
    """
    tensor, context = (parallel.tensor // 2, 0) if axis == "tensor" else (0, parallel.context // 2)
    least = spec.fleet.least_tensor if axis == "tensor" else spec.fleet.least_context
    if not 0 < least <= tensor + context:
        return None
    return replace(
        parallel,
        tensor=tensor or parallel.tensor,
        context=context or parallel.context,
        expert=max(1, parallel.expert // 2),
    )


def halves(spec: RunSpec) -> dict[Axis, ParallelSpec]:
    """Return the run's division with half of each degree that may be reduced. Each needs half as many ranks."""
    axes: tuple[Axis, ...] = ("tensor", "context")
    candidates = {axis: _halved(spec, spec.parallel, axis) for axis in axes}
    return {axis: parallel for axis, parallel in candidates.items() if parallel is not None}


def legal_ranks(spec: RunSpec, parallel: ParallelSpec, most: int) -> tuple[int, ...]:
    """Return the legal numbers of ranks up to ``most`` for a run divided by ``parallel``, in increasing order."""
    divided, unit = replace(spec, parallel=parallel), replica_ranks(parallel)
    return tuple(ranks for ranks in range(unit, most + 1, unit) if not layout_problems(divided, ranks))


def divided_over(spec: RunSpec, ranks: int) -> RunSpec:
    """Return the run divided over ``ranks`` ranks: as in its file if that is legal, or else with the largest legal
    degrees. If none is legal, the run is returned unchanged.
    """
    for parallel in divisions(spec):
        divided = replace(spec, parallel=parallel)
        if ranks % replica_ranks(parallel) == 0 and not layout_problems(divided, ranks):
            return divided
    return spec


def problems_on(spec: RunSpec, ranks: int) -> list[Problem]:
    """Return all problems of starting the run on ``ranks`` ranks, which a fleet may divide by smaller degrees; 0 if unknown."""
    few = spec.fleet.nodes > 0 and 0 < ranks < replica_ranks(spec.parallel)
    return layout_problems(divided_over(spec, ranks) if few else spec, ranks)


def smaller_degree_problems(spec: RunSpec) -> Iterator[Problem]:
    """Yield what is wrong about ``fleet.least_tensor`` and ``fleet.least_context``: not fixed by pieces, not reached
    by halving, or never needed; and about a ``fleet.halve_first`` that never falls.
    """
    fleet, parallel, model = spec.fleet, spec.parallel, spec.model
    yield from _problems("tensor", fleet.least_tensor, parallel.tensor, "model.lanes", model.lanes)
    yield from _problems(
        "context", fleet.least_context, parallel.context, "model.context_tiles", model.context_tiles
    )
    first = fleet.halve_first
    if first != "planned" and not (fleet.least_tensor if first == "tensor" else fleet.least_context):
        yield Problem(
            "fleet.halve_first",
            f"the {first} degree never falls, first or last",
            f'set fleet.least_{first} to how far it may fall, or fleet.halve_first = "planned"',
            (f"fleet.least_{first}",),
        )
    yield from _never_reached(spec)


def _never_reached(spec: RunSpec) -> Iterator[Problem]:
    """Yield a problem if a fleet never takes its least degree, because each node, or ``fleet.min_nodes`` below which
    it waits, have ranks for a larger one.
    """
    fleet, ways = spec.fleet, list(divisions(spec))
    if not fleet.nodes or len(ways) == 1:
        return
    larger, smallest = replica_ranks(ways[-2]), replica_ranks(ways[-1])
    axis = "tensor" if ways[-2].tensor > ways[-1].tensor else "context"
    degree, least = getattr(ways[-2], axis), getattr(ways[-1], axis)
    if fleet.workers_per_node >= larger:
        yield Problem(
            f"fleet.least_{axis}",
            f"every node has the {larger} ranks that parallel.{axis} = {degree} needs, so the degree never falls to {least}",
            f"set it to {degree}, or to 0",
            ("fleet.workers_per_node",),
        )
    elif fleet.min_nodes * fleet.workers_per_node >= larger:
        yield Problem(
            "fleet.min_nodes",
            f"{fleet.min_nodes} nodes have the {larger} ranks that parallel.{axis} = {degree} needs, and with fewer the fleet waits: "
            f"the degree never falls to {least}",
            f"at most {-(-smallest // fleet.workers_per_node)}, which have the {smallest} ranks for {least}; or fleet.least_{axis} = {degree}",
            (f"fleet.least_{axis}", "fleet.workers_per_node"),
        )


def _problems(axis: str, least: int, degree: int, pieces: str, count: int) -> Iterator[Problem]:
    """Yield the problem of a least degree that the bits depend on, or that halving never reaches; none if it is 0."""
    field = f"fleet.least_{axis}"
    if not least:
        return
    if not count:
        yield Problem(
            field,
            f"without {pieces} the bits depend on the {axis} degree, so the fleet may not change it",
            f"set {pieces} to a power of two, at least {degree}; or {field} = 0",
            (pieces,),
        )
    elif least > degree or least & (least - 1):
        yield Problem(
            field,
            f"{degree} {axis} ranks are never halved to {least}",
            f"take a power of two, at most parallel.{axis} = {degree}; or 0",
            (f"parallel.{axis}",),
        )
