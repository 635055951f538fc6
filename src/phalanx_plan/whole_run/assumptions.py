"""Inputs and assumptions of the estimate of a complete run: every default has a name, and a
source or the word "assumption".
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

import msgspec

from phalanx.hardware.cluster import Cluster
from phalanx.run.spec import RunSpec
from phalanx_plan.evidence import EXACT, Band
from phalanx_plan.whole_run import resources
from phalanx_plan.whole_run.failures import CLASSES, DAY_S, FailureClass, RateLevel, classes_at_node_rate
from phalanx_plan.whole_run.recovery import RecoveryMethod


class RunEstimateError(ValueError):
    """An invalid assumption or quantity of the run."""


MOST_DRAWS = 100_000
"""Most simulated runs: percentiles to about a hundredth of their spread, in some seconds."""


MOST_SECONDS = 10 * 365.25 * DAY_S
"""Limit of times: a longer one is an error. A longer interval of a run file, such as one without saves, counts as this."""
MOST_SPARES = 1_000_000


@dataclass(frozen=True)
class RunAssumptions:
    """Assumptions of the estimate. Every figure can be set."""

    recovery: RecoveryMethod = "spare"
    """Recovery method: a spare takes over, the lost replica is left out, or all start again."""
    failure_level: RateLevel = "typical"
    """The published failure rates that the mean is computed with: low, typical or high."""
    failure_classes: tuple[FailureClass, ...] = CLASSES
    recovery_level: RateLevel = "typical"
    """The published recovery times: low, typical or high."""
    beyond_peer_share: float = 0.01
    """Share of failures that take both copies of a shard in memory and are recovered from durable storage. ByteRobust
    (arXiv:2509.16293) saw under 1 % catastrophic cases."""
    snapshot_overlap: float = 0.0
    """Share of the copy to host memory that computation hides."""
    asynchronous_saves: bool = True
    """True if training continues while a save drains from host memory to its tier."""
    durable_interval_s: float = 1800.0
    """Seconds between saves to durable storage when memory holds the frequent ones; longer if one takes longer to
    drain."""
    checkpoint_interval_s: float | None = None
    """Seconds between the frequent saves; the best possible interval if None."""
    repair_s: float = DAY_S
    """Seconds until a lost node is back. An assumption: hours with a pool of machines (OPT's logbook), days if a
    part must be replaced.
    """
    spare_confidence: float = 0.99
    """Probability that a spare is available; ByteRobust keeps enough for the 99th percentile."""
    spare_nodes: int | None = None
    """Nodes kept as spares; None derives them from ``spare_confidence``."""
    planned_pauses_per_day: float = 47 / 54
    """Llama 3 405B (arXiv:2407.21783): 47 planned interruptions in 54 days."""
    planned_pause_s: float = 600.0
    """An assumption: a clean stop and start."""
    step_time_band: Band = EXACT
    """True step time over the estimate: the planner's error on published runs (``phalanx_plan.evidence``)."""
    pue: float | None = None
    """The cluster's, if None."""
    usd_per_accelerator_hour: float | None = None
    """The catalog's default price, if None."""
    electricity_in_price: bool = True
    usd_per_kwh: float = resources.ELECTRICITY_USD_PER_KWH.value
    grid_kg_per_kwh: float = resources.GRID_KG_PER_KWH.value
    checkpoints_kept: int = 5
    usd_per_gb_month: float = resources.STORAGE_USD_PER_GB_MONTH.value
    data_bytes_per_s: float | None = None
    """Total read bandwidth of the data's store; the cluster's storage bandwidth if None."""
    data_latency_s: float = resources.STORE_LATENCY_S
    """Mean seconds of one request for data in object stores."""
    data_requests_per_s: float = resources.STORE_REQUESTS_PER_S
    """Requests for data that object stores answer in a second, in all."""
    draws: int = 1000
    """Simulated runs."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ``RunEstimateError`` for a value out of its range."""
        for name in ("beyond_peer_share", "snapshot_overlap"):
            if not 0 <= getattr(self, name) <= 1:
                raise RunEstimateError(f"{name} must be between 0 and 1, is {getattr(self, name)}")
        for assumption in fields(self):
            value = getattr(self, assumption.name)
            if isinstance(value, int | float) and not value >= 0:
                raise RunEstimateError(f"{assumption.name} must not be negative, is {value}")
            # Assumptions about the data's store are checked with the reading of the data.
            if not isinstance(value, int | float) or assumption.name.startswith("data_"):
                continue
            if assumption.name.endswith("_s") and value > MOST_SECONDS:
                raise RunEstimateError(f"{assumption.name} is in seconds: {value:g} are more than ten years")
            if math.isinf(value):
                raise RunEstimateError(f"{assumption.name} must be finite, is {value:g}")
        if self.pue is not None and self.pue < 1:
            raise RunEstimateError(
                f"pue must be 1 or more, is {self.pue}: it is the site's power over that of its machines"
            )
        if self.spare_nodes is not None and self.spare_nodes > MOST_SPARES:
            raise RunEstimateError(f"spare_nodes must be at most {MOST_SPARES:,}, is {self.spare_nodes:,}")
        for name in ("data_bytes_per_s", "data_latency_s", "data_requests_per_s"):
            if getattr(self, name) == 0:
                raise RunEstimateError(f"{name} must be above 0, is 0: nothing would ever be read")
        if not 1 <= self.draws <= MOST_DRAWS:
            raise RunEstimateError(
                f"draws must be 1 to {MOST_DRAWS:,}, is {self.draws:,}; 1000 gives percentiles to about a tenth of their spread"
            )
        if not 0 <= self.spare_confidence < 1:
            raise RunEstimateError(f"spare_confidence must be in [0, 1), is {self.spare_confidence}")


NODE_RATE = "failures_per_1000_node_days"
"""Name of the assumption of a fleet's own failure rate, which replaces the published rates of each class."""


def described(
    spec: RunSpec, step_s: float, steps: int, recovery: RecoveryMethod | None = None
) -> dict[str, object]:
    """Return the assumptions that ``[checkpoint]`` and ``[fleet]`` of a run file replace, for ``steps`` steps of ``step_s`` seconds.

    A fleet with spares replaces the lost node, one without leaves the replica out, and one without snapshots returns to
    storage; ``recovery`` overrides that. Without a fleet, "recovery" and "spare_nodes" are not replaced.

    Snapshots are the frequent saves, checkpoints the durable ones. If failures are recovered from storage, checkpoints
    are both. Intervals are at most ``MOST_SECONDS``. Of the checkpoints that are kept forever, half count as existing.
    """
    fleet, checkpoint = spec.fleet, spec.checkpoint

    def interval_s(every: int) -> float:
        return min(every * step_s, MOST_SECONDS)

    forever = steps // checkpoint.keep_every if checkpoint.keep_every else 0
    # On average, half of the checkpoints that are kept forever exist.
    replaced: dict[str, object] = {"checkpoints_kept": checkpoint.keep_last + forever // 2}
    if fleet.nodes:
        by_fleet: RecoveryMethod = "spare" if fleet.spares else "shrink"
        recovery = recovery or (by_fleet if fleet.snapshot_every_steps else "restart")
        replaced |= {"recovery": recovery, "spare_nodes": fleet.spares}
    durable = {"durable_interval_s": interval_s(checkpoint.every_steps)} if checkpoint.every_steps else {}
    if recovery == "restart" and checkpoint.every_steps:
        replaced["checkpoint_interval_s"] = interval_s(checkpoint.every_steps)
    elif recovery != "restart" and fleet.nodes and fleet.snapshot_every_steps:
        replaced["checkpoint_interval_s"] = interval_s(fleet.snapshot_every_steps)
    return replaced | durable


def assumed(
    texts: Sequence[str],
    step_time_band: Band,
    spec: RunSpec | None = None,
    step_s: float = 0.0,
    steps: int = 0,
    *,
    recovers_in_memory: bool = True,
) -> RunAssumptions:
    """Return the assumptions with the values in ``texts``, such as ``recovery=restart`` or ``repair_s=3600``.

    Software without recovery from snapshots in memory (``recovers_in_memory``) restarts from storage. With ``spec``,
    whose ``steps`` steps of ``step_s`` seconds are planned, its run file sets other assumptions; ``texts`` take
    precedence. Raises ``RunEstimateError`` for an unknown, repeated or invalid assumption, with the valid ones.
    """
    names = {assumption.name for assumption in fields(RunAssumptions)} - {"failure_classes", "step_time_band"}
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip()
        if name in names | {NODE_RATE} and not equals:
            raise RunEstimateError(f"--assume {text}: write a value, as in {name}=...")
        if name not in names | {NODE_RATE}:
            near = difflib.get_close_matches(name, [*names, NODE_RATE], n=1)
            hint = (
                f"did you mean {near[0]}?"
                if near
                else f"there are {', '.join(sorted([*names, NODE_RATE]))}; a figure of the machines, as their price, is "
                "--set cluster.accelerator.price_per_hour=..."
            )
            raise RunEstimateError(f"--assume {text}: {name!r} is not an assumption; {hint}")
        if name in values:
            raise RunEstimateError(
                f"--assume {text}: {name} is given twice, before as {values[name]!r}: give it once"
            )
        values[name] = value
    if not recovers_in_memory:
        values.setdefault("recovery", "restart")
    if spec is not None:
        values = described(spec, step_s, steps, values.get("recovery")) | values
    try:
        rate = msgspec.convert(values.pop(NODE_RATE, None), float | None, strict=False)
        assumptions = msgspec.convert(values, RunAssumptions, strict=False)
        classes = CLASSES if rate is None else classes_at_node_rate(rate)
    except ValueError as error:
        words = (
            f"; recovery is {_either(RecoveryMethod)}, a level {_either(RateLevel)}"
            if "enum" in str(error)
            else ""
        )
        raise RunEstimateError(f"--assume {' '.join(texts)}: {error}{words}") from error
    return replace(assumptions, failure_classes=classes, step_time_band=step_time_band)


def _either(words: object) -> str:
    return " or ".join(get_args(words))


@dataclass(frozen=True)
class RunInputs:
    """The run: its cluster, step, tokens, checkpoint and ranks."""

    cluster: Cluster
    step_s: float
    """One optimizer step of the whole fleet, without failures."""
    tokens_per_step: float
    tokens: float
    """Tokens of the whole run."""
    checkpoint_bytes: float
    """Bytes of a checkpoint, all ranks together: fp32 master weights and moments, and all other saved state."""
    accelerators: int
    """Accelerators that hold ranks; spares come on top."""
    replicas: int = 1
    """Data-parallel replicas; a replica joins and leaves as a unit."""
    activities: Mapping[resources.Activity, float] = field(default_factory=lambda: {"compute": 1.0})
    """Shares of a step by the accelerator's activity; they sum to 1."""
    data: resources.DataNeed | None = None
    """Data that a step reads; ``None`` if unknown."""

    def __post_init__(self) -> None:
        """Raise ``RunEstimateError`` for a quantity that is not positive, or negative checkpoint bytes."""
        for name in ("step_s", "tokens_per_step", "tokens", "accelerators", "replicas"):
            if not getattr(self, name) > 0:
                raise RunEstimateError(f"{name} must be positive, is {getattr(self, name)}")
        if self.checkpoint_bytes < 0:
            raise RunEstimateError(f"checkpoint_bytes must not be negative, is {self.checkpoint_bytes}")
