"""The tensor degree with which a run goes on when its fleet has too few ranks left for ``parallel.tensor``.

A run in lanes has the same bits under every tensor degree (``phalanx.parallel.tensor.lanes``), so a fleet that lost half of a node
need not wait for a spare: ``fleet.least_tensor`` says how far the degree may fall. It is halved until the ranks that are left
suffice, and it is that of the run file again once there are enough. Experts that are dealt to the ranks of a slot are dealt to fewer in the
same proportion. Every rank and the coordinator decide alike, from the run file and the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from phalanx.run.layout import layout_problems, replica_ranks
from phalanx.run.problems import Problem
from phalanx.run.spec import ParallelSpec, RunSpec


def divisions(spec: RunSpec) -> Iterator[ParallelSpec]:
    """Yields the ways in which the run may divide its model: that of the run file, then ever smaller tensor degrees."""
    parallel = spec.parallel
    yield parallel
    degree, expert = parallel.tensor, parallel.expert
    while spec.fleet.least_tensor and degree // 2 >= spec.fleet.least_tensor:
        degree, expert = degree // 2, max(1, expert // 2)
        yield replace(parallel, tensor=degree, expert=expert)


def legal_ranks(spec: RunSpec, parallel: ParallelSpec, most: int) -> tuple[int, ...]:
    """The legal numbers of ranks up to ``most`` of a run that is divided as ``parallel`` says, ascending."""
    divided, unit = replace(spec, parallel=parallel), replica_ranks(parallel)
    return tuple(ranks for ranks in range(unit, most + 1, unit) if not layout_problems(divided, ranks))


def divided_over(spec: RunSpec, ranks: int) -> RunSpec:
    """Returns the run as ``ranks`` ranks divide it: as its file says if that is legal, else with the largest tensor degree that is."""
    for parallel in divisions(spec):
        divided = replace(spec, parallel=parallel)
        if ranks % replica_ranks(parallel) == 0 and not layout_problems(divided, ranks):
            return divided
    return spec


def elastic_problems(spec: RunSpec) -> Iterator[Problem]:
    """Yields what is wrong about ``fleet.least_tensor``."""
    least, tensor = spec.fleet.least_tensor, spec.parallel.tensor
    if not least:
        return
    if not spec.model.lanes:
        yield Problem(
            "fleet.least_tensor",
            "without lanes the bits depend on the tensor degree, so the fleet may not change it",
            f"set model.lanes to a power of two, at least {tensor}; or fleet.least_tensor = 0",
            ("model.lanes",),
        )
    elif least > tensor or least & (least - 1):
        yield Problem(
            "fleet.least_tensor",
            f"{tensor} tensor ranks are never halved to {least}",
            f"take a power of two, at most parallel.tensor = {tensor}; or 0",
            ("parallel.tensor",),
        )
