"""The traffic of a run file's own layout, as the planner knows it, for placing and verifying its nodes."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from phalanx.hardware.catalog import cluster
from phalanx.launch.placing import Shape
from phalanx.run.fields import listing
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.layout import layout_of, layout_problems
from phalanx.run.spec import RunSpec
from phalanx_plan.search.layout_text import written_layout
from phalanx_plan.search.query import RequestError, job_of
from phalanx_plan.step_cost.estimate import estimate
from phalanx_plan.step_cost.traffic import Flow, flows


@dataclass(frozen=True)
class RunTraffic:
    """Who sends how much to whom in one step of a run."""

    shape: Shape
    flows: tuple[Flow, ...]
    node_bytes_per_s: float
    """Network rate of one node of the cluster that it was computed for, in one direction."""
    step_s: float
    """The planner's estimate of a step where no uplink is too slow."""


def traffic_of(spec: RunSpec, cluster_name: str) -> RunTraffic:
    """The traffic of ``spec`` on its fleet (``fleet.nodes`` x ``fleet.workers_per_node``, else ``parallel.ranks``) of nodes of a known kind.

    Raises:
        RequestError: The run cannot be laid out so.
        HardwareError: There is no such cluster.
    """
    kind = cluster(cluster_name)
    per_node = spec.fleet.workers_per_node if spec.fleet.nodes else kind.per_node
    ranks = spec.fleet.nodes * per_node or spec.parallel.ranks
    if not ranks:
        raise RequestError("the run file does not say on how many nodes it runs: --nodes N, or fleet.nodes")
    if not re.search(r"[:x ]\s*[\d_,]+$", cluster_name):
        kind = cluster(f"{cluster_name}:{ranks}")
    spec = dataclasses.replace(spec, model=resolve(spec.model, spec.data.vocab_size))
    problems = layout_problems(spec, ranks)
    if problems:
        raise RequestError(listing(f"{spec.name} cannot be laid out on {ranks} ranks", problems))
    job = job_of(spec, kind)
    layout = written_layout(spec, job, ranks)
    try:
        step_s = estimate(job, layout).step_s
    except (
        ValueError
    ) as error:  # the trainer can do with uneven shares of slots; the planner has no price for them
        raise RequestError(f"{spec.name} on {ranks} ranks has no price: {error}") from error
    return RunTraffic(
        Shape(layout_of(spec.parallel, ranks), per_node),
        flows(job, layout, spread_sums=spec.train.reduction == "reproducible"),
        kind.fabric.bytes_per_s.value * per_node,
        step_s,
    )
