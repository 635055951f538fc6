"""The degree that a fleet with too few ranks had better halve first: the planner's quick answer.

A run in lanes and context tiles may go on with a smaller tensor degree or with a smaller context degree, and has the same bits with either
(``phalanx.run.degrees.smaller``). Which of them gives the shorter step depends on the model, its sequences and the network: tensor ranks gather and add
hidden states in every layer, context ranks exchange keys and values and every weight's gradient. Two estimates answer it in milliseconds.
The answer becomes a field of the run (``fleet.halve_first``) before its fleet starts, so that coordinator and workers need no planner to agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from phalanx.hardware.cluster import Cluster
from phalanx.plan.search.layout_text import estimate_written
from phalanx.plan.step_cost.estimate import Estimate
from phalanx.run.degrees.smaller import Axis, halves
from phalanx.run.layout import replica_ranks
from phalanx.run.spec import RunSpec


@dataclass(frozen=True)
class FirstHalved:
    """The estimates of one replica on half of its ranks, for each degree that may be halved to get there."""

    ranks: int
    """Ranks of the half."""
    estimates: Mapping[Axis, Estimate]

    @property
    def axis(self) -> Axis:
        """The degree whose half has memory enough, and then the shorter step; tensor among equals."""
        return min(
            self.estimates, key=lambda axis: (not self.estimates[axis].fits, self.estimates[axis].step_s)
        )


def first_halved(spec: RunSpec, cluster: Cluster) -> FirstHalved | None:
    """The quick answer for a run with its model resolved, on accelerators of ``cluster``; ``None`` where at most one degree may fall.

    Raises ``ValueError`` where nothing can be estimated: for a model of one's own, or a format that the accelerator has not got.
    """
    ways = halves(spec)
    if len(ways) < 2:
        return None
    ranks = {replica_ranks(parallel) for parallel in ways.values()}
    (half,) = ranks
    here = replace(cluster, accelerators=half)
    return FirstHalved(
        half,
        {
            axis: estimate_written(replace(spec, parallel=parallel), here, half)
            for axis, parallel in ways.items()
        },
    )
