"""Planning from Python: the best layouts of a run on a cluster, before anything is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.hardware.catalog import cluster as cluster_named
from phalanx.hardware.cluster import Cluster
from phalanx.run.spec import RunSpec
from phalanx_plan.search.as_json import plan_json
from phalanx_plan.search.plan import make_plan
from phalanx_plan.search.query import Aim


def plan_run(
    spec: RunSpec,
    cluster: Cluster | str,
    *,
    layout: str | None = None,
    require: Sequence[str] = (),
    optimize: str = "time",
) -> Mapping[str, Any]:
    """The best layouts of a run on a cluster, or an estimate of one: what ``phalanx plan --json`` prints.

    Args:
        spec: The run.
        cluster: ``"h100:16384"``, ``"gb200-nvl72 x 29"``, the path of a TOML file, or a ``Cluster``.
        layout: Estimate this one: ``"tp=8,pp=16,dp=128"``; ``"file"`` is the run's own.
        require: Only layouts where these conditions hold, such as ``"tp<=8"``.
        optimize: ``"time"``, ``"cost"`` or ``"gpus"``.

    Raises ``ValueError`` with what is in the way and the remedy, also for a model of your own.
    """
    where = cluster_named(cluster) if isinstance(cluster, str) else cluster
    aim = Aim(optimize=optimize, require=tuple(require), layout=layout)
    return plan_json(make_plan(spec, where, aim, searching=layout is None))
