"""The run as a whole: from the time of one step to days, failures, energy, carbon and money.

Every quantity that is not computed is an assumption with a name (``RunAssumptions``) and, as a default,
a source. The finish date is a distribution over the times of failures, their rate (published fleets differ by
a factor of 2.8), and the error of the step time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from phalanx.checkpoint.save.save_schedule import daly_interval_s, optimal_interval_s, young_interval_s
from phalanx.hardware.cluster import Fact
from phalanx_plan.whole_run.assumptions import RunAssumptions, RunInputs
from phalanx_plan.whole_run.failures import (
    CORRELATED_DOMAINS,
    DAY_S,
    RateLevel,
    failures_per_s,
    mtti_s,
    nodes_in_repair,
    spares_needed,
)
from phalanx_plan.whole_run.goodput import HOPELESS, CheckpointPlan, Risk, interval_s, simulate
from phalanx_plan.whole_run.recovery import (
    TIER_OF,
    RecoveryMethod,
    TierCost,
    fleet_share,
    host_bytes_per_node,
    recovery_phases,
    tiers,
)
from phalanx_plan.whole_run.resources import (
    ELECTRICITY_USD_PER_KWH,
    GRID_KG_PER_KWH,
    J_PER_KWH,
    STORAGE_USD_PER_GB_MONTH,
    DataReading,
    Energy,
    RunCost,
    cost,
    data_reading,
    energy,
    waiting_note,
)
from phalanx_plan.workload.candidates import Floats

_NORMAL = NormalDist()
LEVELS: tuple[RateLevel, ...] = ("low", "typical", "high")


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of a simulated quantity; infinite if so many runs would not finish."""

    p5: float
    p50: float
    p95: float
    mean: float


@dataclass(frozen=True)
class RunEstimate:
    """The whole run. Days are wall time from the first step; the parts of each breakdown sum to its total."""

    steps: int
    tokens_per_day: float
    """While training, failures counted."""
    failure_free_days: float
    days: float
    """Failure-free days over the mean goodput."""
    finish_days: Percentiles
    goodput: float
    goodput_by_level: Mapping[str, float]
    """Goodput at the low, typical and high failure rates."""
    goodput_percentiles: Percentiles
    breakdown: Mapping[str, float]
    """Shares of wall time by the goodput ledger's names; they sum to 1."""
    mtti_s: float
    failures: float
    """Expected, over the run."""
    tier: TierCost
    """The tier that the state is restored from after a frequent failure."""
    durable_tier: TierCost
    interval_s: float
    optimal_interval_s: float
    """The best checkpoint interval before draining and whole steps limit it."""
    young_interval_s: float
    daly_interval_s: float
    """Checkpoint intervals by the two usual approximations."""
    durable_interval_s: float
    recovery_s: float
    spare_nodes: int
    spare_accelerators: int
    energy: Energy
    mean_power_w: float
    co2_kg: float
    cost: RunCost
    energy_kwh: Percentiles
    """The total at the percentiles of the finish date."""
    usd: Percentiles
    """The same of the cost."""
    usd_per_million_tokens: float
    data: DataReading | None
    """Needed and provided rates of reading data; ``None`` if nothing is known of the data."""
    warnings: tuple[str, ...]
    """Conditions under which the figures are not reliable."""
    assumptions: RunAssumptions
    sources: Mapping[str, str]
    """The source of each figure that the user did not set."""

    def to_dict(self) -> dict[str, object]:
        """Return plain values for JSON: infinities become null, totals are added."""
        values: dict[str, Any] = json_value(asdict(self))
        if self.data is not None:
            values["data"]["binds"] = self.data.binds
        values["energy"]["total_kwh"] = json_value(self.energy.total_kwh)
        values["cost"]["total_usd"] = json_value(self.cost.total_usd)
        return values


def estimate_run(inputs: RunInputs, assumptions: RunAssumptions | None = None) -> RunEstimate:
    """Estimate the run as a whole, deterministically, simulations included.

    ``assumptions`` are the defaults if None. A run that would never finish has infinite times. Raises the errors of the
    parts.
    """
    assumed = assumptions or RunAssumptions()
    tier, durable = _tiers(inputs, assumed)
    plan = goodput_plan(inputs, assumed, assumed.failure_level)
    away = nodes_in_repair(_node_losses_per_s(inputs, assumed), assumed.repair_s)
    fleet = fleet_share(assumed.recovery, away, _nodes(inputs), inputs.replicas)
    shares = _with_pauses(plan.breakdown, assumed, fleet)
    goodput = shares["committed"]
    steps = math.ceil(inputs.tokens / inputs.tokens_per_step)
    work_s = steps * inputs.step_s
    wall_s = work_s / goodput if goodput > 0 else math.inf
    finish_s = _finish_s(plan, inputs, assumed, work_s, goodput / max(plan.goodput, 1e-300))
    spare_nodes = _spare_nodes(inputs, assumed)
    spares = spare_nodes * inputs.cluster.per_node
    used = _energy(inputs, assumed, wall_s, shares, spares)
    spent = _cost(inputs, assumed, wall_s, used.total_kwh, spares)
    finish = _percentiles(finish_s)
    kwh = {name: _energy(inputs, assumed, at, shares, spares).total_kwh for name, at in vars(finish).items()}
    usd = {name: _cost(inputs, assumed, at, kwh[name], spares).total_usd for name, at in vars(finish).items()}
    per_s = _failures_per_s(inputs, assumed, assumed.failure_level)
    reading = _reading(inputs, assumed)
    return RunEstimate(
        steps=steps,
        tokens_per_day=inputs.tokens_per_step / inputs.step_s * goodput * DAY_S,
        failure_free_days=work_s / DAY_S,
        days=wall_s / DAY_S,
        finish_days=_percentiles(finish_s / DAY_S),
        goodput=goodput,
        goodput_by_level={
            level: _with_pauses(goodput_plan(inputs, assumed, level).breakdown, assumed, fleet)["committed"]
            for level in LEVELS
        },
        goodput_percentiles=_percentiles(work_s / finish_s),
        breakdown=shares,
        mtti_s=mtti_s(per_s),
        failures=per_s * wall_s if per_s else 0.0,
        tier=tier,
        durable_tier=durable,
        interval_s=plan.interval_s,
        optimal_interval_s=optimal_interval_s(plan.frequent.mtti_s, plan.frequent.stall_s),
        young_interval_s=young_interval_s(plan.frequent.mtti_s, plan.frequent.stall_s),
        daly_interval_s=daly_interval_s(plan.frequent.mtti_s, plan.frequent.stall_s),
        durable_interval_s=plan.rare_interval_s,
        recovery_s=plan.frequent.recovery_s,
        spare_nodes=spare_nodes,
        spare_accelerators=spares,
        energy=used,
        mean_power_w=used.total_kwh * J_PER_KWH / wall_s if math.isfinite(wall_s) else math.nan,
        co2_kg=used.co2_kg(assumed.grid_kg_per_kwh),
        cost=spent,
        energy_kwh=Percentiles(**kwh),
        usd=Percentiles(**usd),
        usd_per_million_tokens=spent.total_usd / (inputs.tokens / 1e6),
        data=reading,
        warnings=tuple(
            note
            for note in (
                *_warnings(inputs, assumed, tier, durable, plan),
                "" if reading is None else waiting_note(reading),
            )
            if note
        ),
        assumptions=assumed,
        sources=_sources(inputs, assumed, plan),
    )


def goodput_plan(inputs: RunInputs, assumed: RunAssumptions, level: RateLevel) -> CheckpointPlan:
    """Plan the two risks at a level of failure rates, with the best or the assumed checkpoint intervals.

    With memory tiers, a few failures go beyond them; a restart from durable storage has only one risk. The durable
    interval is a multiple of the frequent one, and neither is shorter than its save takes.
    """
    per_s = _failures_per_s(inputs, assumed, level)
    tier, durable = _tiers(inputs, assumed)
    beyond = assumed.beyond_peer_share if tier is not durable else 0.0
    stall_s = tier.stall_s + (0.0 if assumed.asynchronous_saves else tier.drain_s)
    frequent = _risk(per_s * (1 - beyond), stall_s, assumed, assumed.recovery, tier)
    # The durable save drains from the copy of the memory tier, so it causes no second stall.
    rare = _risk(per_s * beyond, 0.0, assumed, "restart", durable)
    # A save begins when the one before it has drained.
    drain_s = tier.drain_s if assumed.asynchronous_saves else 0.0
    best_s = interval_s(frequent, drain_s, inputs.step_s)
    if math.isinf(best_s):
        best_s = max(assumed.durable_interval_s, inputs.step_s)
    wanted_s = assumed.checkpoint_interval_s
    chosen_s = best_s if wanted_s is None else max(wanted_s, drain_s, inputs.step_s)
    durable_s = max(assumed.durable_interval_s, durable.drain_s, chosen_s)
    return CheckpointPlan(frequent, chosen_s, rare, math.ceil(durable_s / chosen_s - 1e-9) * chosen_s)


def _risk(
    per_s: float, stall_s: float, assumed: RunAssumptions, method: RecoveryMethod, tier: TierCost
) -> Risk:
    """Return a risk of ``per_s`` failures a second, recovered by ``method`` from ``tier``; 0 means never."""
    return Risk(mtti_s(per_s), stall_s, recovery_phases(method, tier, assumed.recovery_level))


def _reading(inputs: RunInputs, assumed: RunAssumptions) -> DataReading | None:
    """Return the read rates of the run's data, from the cluster's storage unless a rate is assumed; ``None`` without data."""
    if inputs.data is None:
        return None
    bandwidth = inputs.cluster.storage_bytes_per_s.value
    if assumed.data_bytes_per_s is not None:
        bandwidth = assumed.data_bytes_per_s
    return data_reading(
        inputs.data,
        inputs.step_s,
        _nodes(inputs),
        inputs.replicas,
        bytes_per_s=bandwidth,
        latency_s=assumed.data_latency_s,
        requests_per_s=assumed.data_requests_per_s,
    )


def _nodes(inputs: RunInputs) -> float:
    """Return the nodes that the run's accelerators fill, at least 1."""
    return max(1.0, inputs.accelerators / inputs.cluster.per_node)


def _tiers(inputs: RunInputs, assumed: RunAssumptions) -> tuple[TierCost, TierCost]:
    """Return the tier that the assumed recovery restores from, and storage."""
    places = tiers(
        inputs.cluster,
        inputs.checkpoint_bytes,
        inputs.accelerators,
        snapshot_overlap=assumed.snapshot_overlap,
    )
    return places[TIER_OF[assumed.recovery]], places["storage"]


def _failures_per_s(
    inputs: RunInputs, assumed: RunAssumptions, level: RateLevel, takes_node: bool | None = None
) -> float:
    """Return the failures a second at a level of failure rates; ``takes_node`` True counts those that take a node away."""
    return failures_per_s(inputs.cluster, inputs.accelerators, level, assumed.failure_classes, takes_node)


def _node_losses_per_s(inputs: RunInputs, assumed: RunAssumptions) -> float:
    """Return the failures a second that take a node away."""
    return _failures_per_s(inputs, assumed, assumed.failure_level, takes_node=True)


def _spare_nodes(inputs: RunInputs, assumed: RunAssumptions) -> int:
    """Nodes beyond those that hold ranks: as assumed, else none for a run that shrinks, else as many as needed."""
    if assumed.spare_nodes is not None:
        return assumed.spare_nodes
    return 0 if assumed.recovery == "shrink" else _spares_needed(inputs, assumed)


def _spares_needed(inputs: RunInputs, assumed: RunAssumptions) -> int:
    """Number of spares of which one is available with the assumed confidence; a restart needs them as much as a swap."""
    return spares_needed(_node_losses_per_s(inputs, assumed), assumed.repair_s, assumed.spare_confidence)


def _with_pauses(shares: Mapping[str, float], assumed: RunAssumptions, fleet: float) -> dict[str, float]:
    """Return the shares of wall time scaled for planned pauses, with the work lost to missing nodes (1 - ``fleet``) split off."""
    paused = min(1.0, assumed.planned_pauses_per_day * assumed.planned_pause_s / DAY_S)
    scaled = {name: share * (1 - paused) for name, share in shares.items()}
    missing = scaled["committed"] * (1 - fleet)
    return {
        **scaled,
        "committed": scaled["committed"] - missing,
        "fleet.missing": missing,
        "pause.operator": paused,
    }


def _finish_s(
    plan: CheckpointPlan, inputs: RunInputs, assumed: RunAssumptions, work_s: float, other_goodput: float
) -> Floats:
    """Wall seconds of simulated runs, shape (draws,); ``other_goodput`` is the goodput despite pauses and missing
    nodes.

    Failure rates are drawn between the published ones (triangular in the logarithm, typical as its mode), step times
    around the estimate (its band). Infinite if ``other_goodput`` is 0.
    """
    random = np.random.default_rng([assumed.seed, 1])
    rates = [_failures_per_s(inputs, assumed, level) for level in LEVELS]
    assumed_rate = _failures_per_s(inputs, assumed, assumed.failure_level)
    factor = np.ones(assumed.draws)
    if assumed_rate and rates[0] < rates[2]:
        low, typical, high = (math.log(rate / assumed_rate) for rate in rates)
        factor = np.exp(random.triangular(low, typical, high, assumed.draws))
    # Step times are spread evenly over the band's probabilities: drawn at random, a wide band's P95 would be noise.
    levels = (random.permutation(assumed.draws) + 0.5) / assumed.draws
    slower = assumed.step_time_band.at(np.array([_NORMAL.inv_cdf(level) for level in levels]))
    if other_goodput <= 0:
        return np.full(assumed.draws, np.inf)
    return simulate(plan, work_s * slower, factor, assumed.seed) / other_goodput


def _energy(
    inputs: RunInputs, assumed: RunAssumptions, wall_s: float, shares: Mapping[str, float], spares: int
) -> Energy:
    """Return the energy of ``wall_s`` seconds in kWh, with the user's PUE if one is assumed. Undone work costs as much as kept work."""
    cluster = inputs.cluster
    if assumed.pue is not None:
        cluster = replace(cluster, pue=Fact(assumed.pue, "set by the user"))
    in_steps = min(1.0, shares["committed"] + shares["discarded.rollback"])
    return energy(cluster, inputs.accelerators, spares, wall_s, in_steps, inputs.activities)


def _cost(
    inputs: RunInputs, assumed: RunAssumptions, wall_s: float, energy_kwh: float, spares: int
) -> RunCost:
    """Return the cost of ``wall_s`` seconds in dollars, by the user's price if one is assumed, else the catalog's.

    ``spares`` is a number of accelerators.
    """
    price = assumed.usd_per_accelerator_hour
    return cost(
        accelerators=inputs.accelerators,
        spare_accelerators=spares,
        wall_s=wall_s,
        usd_per_accelerator_hour=inputs.cluster.accelerator.price_per_hour.value if price is None else price,
        energy_kwh=energy_kwh,
        usd_per_kwh=assumed.usd_per_kwh,
        electricity_in_price=assumed.electricity_in_price,
        stored_bytes=assumed.checkpoints_kept * inputs.checkpoint_bytes,
        usd_per_gb_month=assumed.usd_per_gb_month,
    )


def _percentiles(values: Floats) -> Percentiles:
    """Return the mean and the 5th, 50th and 95th percentile by nearest rank, since values may be infinite."""
    ordered = np.sort(values)

    def at(percent: int) -> float:
        # The nearest rank, since an interpolation between a number and infinity is no number.
        return float(ordered[math.ceil(percent * len(ordered) / 100) - 1])

    return Percentiles(at(5), at(50), at(95), float(np.mean(values)))


def _warnings(
    inputs: RunInputs, assumed: RunAssumptions, tier: TierCost, durable: TierCost, plan: CheckpointPlan
) -> Iterator[str]:
    """Yield what the estimate leaves out or that cannot work: too few spares, host memory, slow storage, a hopeless
    run, too many accelerators.
    """
    if assumed.recovery == "spare" and _spare_nodes(inputs, assumed) < (
        needed := _spares_needed(inputs, assumed)
    ):
        yield (
            f"{assumed.spare_nodes} spare nodes: with fewer than {needed} a failure finds none more often than "
            f"{1 - assumed.spare_confidence:.0%} of the time, and that wait is not counted"
        )
    host_bytes = host_bytes_per_node(tier, durable)
    if host_bytes > inputs.cluster.host_memory_bytes.value:
        yield (
            f"saves into tier {tier.name} take {host_bytes / 1e9:,.0f} GB of each host's memory, which has "
            f"{inputs.cluster.host_memory_bytes.value / 1e9:,.0f} GB: use more nodes, or recovery by restart"
        )
    if durable.drain_s > plan.rare.mtti_s / 2:
        yield (
            f"a durable save takes {durable.drain_s:,.0f} s, over half the time between failures that need one "
            f"({plan.rare.mtti_s:,.0f} s): storage must write faster"
        )
    if plan.goodput < HOPELESS:
        yield "failures come faster than the run recovers from them: it would not finish"
    if inputs.accelerators > inputs.cluster.accelerators:
        yield f"the layout uses {inputs.accelerators} accelerators of a cluster of {inputs.cluster.accelerators}"


def _sources(inputs: RunInputs, assumed: RunAssumptions, plan: CheckpointPlan) -> dict[str, str]:
    """Return the source of each figure; "set by the user" for an assumption that is not its default."""
    cluster, user = inputs.cluster, "set by the user"
    usual = RunAssumptions()

    def of(name: str, source: str) -> str:
        return source if getattr(assumed, name) == getattr(usual, name) else user

    return {
        "power": cluster.accelerator.power_w.source,
        "node power": cluster.node_power_w.source,
        "pue": of("pue", cluster.pue.source),
        "storage bandwidth": cluster.storage_bytes_per_s.source,
        "data bandwidth": of("data_bytes_per_s", cluster.storage_bytes_per_s.source),
        "data latency": of("data_latency_s", "assumption, Amazon's guide to S3's performance: 100 to 200 ms"),
        "data requests": of("data_requests_per_s", "Amazon's guide to S3's performance, of one prefix"),
        "host link": cluster.accelerator.host_bytes_per_s.source,
        "grid": of("grid_kg_per_kwh", GRID_KG_PER_KWH.source),
        "electricity price": of("usd_per_kwh", ELECTRICITY_USD_PER_KWH.source),
        "storage price": of("usd_per_gb_month", STORAGE_USD_PER_GB_MONTH.source),
        "accelerator price": of("usd_per_accelerator_hour", cluster.accelerator.price_per_hour.source),
        **{f"recovery.{phase.name}": phase.source for phase in plan.frequent.recovery},
        **{
            f"correlated.{domain.name}": f"{domain.takes_down}; {domain.evidence}"
            for domain in CORRELATED_DOMAINS
        },
    }


def json_value(value: object) -> Any:
    """Return the value as types that JSON supports: keys as text, tuples as lists, and None for a number that is not finite, at any depth."""
    if isinstance(value, Mapping):
        return {str(name): json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
