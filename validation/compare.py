"""Comparison of predictions with published runs: errors of time and memory, what fits, and regret of decisions.

Each row of a table of published runs becomes an estimate of the same model, layout and machines. Time is judged raw, with no
end-to-end measurement used at all, and after one factor for the software stack fitted on other models' runs
(``validation.factors``). Memory is judged if a source names the quantity that it measured, and every run that ran out of memory,
or did not, is a fact that the planner must reproduce. If one model was run in several layouts on the same machines, the
decision is judged: how much slower than the best measured layout is the one that the planner would have chosen (its
*regret*), and how far the two orders agree (Kendall's tau; Kendall, Biometrika 30, 1938). The planner chooses as ``phalanx plan``
does: among layouts that it predicts to fit, by time, one with room in memory before one without that is hardly faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from statistics import fmean, median
from typing import Literal
from zlib import crc32

from phalanx_plan.search.ranking import free_share, with_room_first
from phalanx_plan.step_cost.estimate import Estimate, estimates
from phalanx_plan.workload.candidates import PlannedLayout
from validation.factors import NO_SCALAR, CalibrationPoint, Scalar, scalar_for, scalars
from validation.runs import Excluded, PublishedRun, measured_step, read_published
from validation.setup import Setup, counts_of, setup_of
from validation.software import RunSoftware, unseen_software_of_run

MemoryBasis = Literal["allocated", "reserved", "device", "peak, not said of what"]


@dataclass(frozen=True)
class Memory:
    """Memory that a row states, and the same quantity as predicted; bytes of the fullest rank."""

    measured_bytes: float
    predicted_bytes: float
    basis: MemoryBasis
    """Quantity that was measured: the allocator's allocated or reserved peak, or all memory in use on the device."""

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_bytes / self.measured_bytes - 1


@dataclass(frozen=True)
class Time:
    """Time of a step as a row states it, and as predicted."""

    measured_s: float
    how: str
    """Column and convention from which the measured time was derived."""
    predicted_s: float
    terms: Mapping[str, float]
    """The prediction in seconds by term."""
    scalar: Scalar = NO_SCALAR
    """The stack's factor, fitted on other models' runs."""

    @property
    def error(self) -> float:
        """Predicted over measured, less one, without the factor."""
        return self.predicted_s / self.measured_s - 1

    @property
    def scaled_error(self) -> float:
        """Predicted with the factor over measured, less one."""
        return self.predicted_s * self.scalar.value / self.measured_s - 1


@dataclass(frozen=True)
class Outcome:
    """One row: predicted, measured, or the reason why it was left out."""

    run: PublishedRun
    excluded: str = ""
    """The reason; empty if the row was used."""
    setup: Setup | None = None
    estimate: Estimate | None = None
    time: Time | None = None
    memory: Memory | None = None

    @property
    def complete(self) -> bool:
        """True if nothing of the layout had to be filled in."""
        return self.setup is not None and len(self.setup.choices) == 1

    @property
    def point(self) -> CalibrationPoint | None:
        """The row as a point for the fit of factors."""
        if self.setup is None or self.time is None:
            return None
        ratio = self.time.measured_s / self.time.predicted_s
        accelerator = self.setup.job.cluster.accelerator.key
        run = self.run
        configuration = f"{run.gpus} {run.global_batch_seqs} {run.seq_len} {_answer(self)}"
        return CalibrationPoint(
            self.setup.trained.software.name, accelerator, run.subject[0], configuration, ratio, run.mixture
        )


@dataclass(frozen=True)
class Errors:
    """A summary of relative errors."""

    count: int
    median: float
    """Median of absolute values."""
    worst: float
    """The one with the largest absolute value, with its sign."""
    bias: float
    """Median with sign: below zero the planner is too optimistic."""


@dataclass(frozen=True)
class Sweep:
    """Layouts of one model on the same machines."""

    name: str
    origin: str
    """The source whose runs these are."""
    layouts: int
    regret: float
    """Measured time of the planner's choice over the best measured, less one."""
    regret_by_time: float
    """Regret of a choice by time alone, without regard to memory."""
    mean_regret: float
    """Expected regret of a choice at random."""
    tau: float


@dataclass(frozen=True)
class Fits:
    """Predictions of runs that fit in memory and of runs that do not."""

    ran_out: int
    """Rows that report running out of memory."""
    ran_out_predicted: int
    ran: int
    """Rows that ran, with every choice of memory stated."""
    ran_predicted: int
    wrong: tuple[str, ...]
    """Rows where the prediction is wrong."""


@dataclass(frozen=True)
class Validation:
    """All results of a comparison."""

    outcomes: tuple[Outcome, ...]
    sweeps: tuple[Sweep, ...]
    fits: Fits
    scalars: Mapping[str, Scalar]
    """The factors of all stacks, from all rows."""

    def timed(self, *, mixture: bool | None = None) -> tuple[Outcome, ...]:
        """Return the rows with a time; all, or mixtures of experts, or dense models."""
        chosen = (outcome for outcome in self.outcomes if outcome.time)
        return tuple(outcome for outcome in chosen if mixture in (None, outcome.run.mixture))

    def halves(self) -> tuple[Errors | None, Errors | None]:
        """Return errors of each half of the models with factors that were fitted on the other half alone."""
        timed = [(outcome.time, outcome.point) for outcome in self.outcomes if outcome.time and outcome.point]
        halves = []
        for half in (0, 1):
            fitted = [point for _, point in timed if _half(point) != half]
            scaled = (
                time.predicted_s * scalar_for(point, fitted).value / time.measured_s - 1
                for time, point in timed
                if _half(point) == half
            )
            halves.append(errors(scaled))
        return halves[0], halves[1]

    def families(self) -> dict[str, tuple[Outcome, ...]]:
        """Return the rows by family."""
        by_family: dict[str, list[Outcome]] = {}
        for outcome in self.outcomes:
            by_family.setdefault(outcome.run.family, []).append(outcome)
        return {name: tuple(members) for name, members in sorted(by_family.items())}


def validate(
    rows: Sequence[PublishedRun],
    *,
    calibration: Sequence[PublishedRun] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Validation:
    """Compare predictions with ``rows``.

    Args:
        rows: Runs to predict.
        calibration: Further runs that factors may be fitted on, beside other rows of ``rows``; by default, those of the
            repository's table. ``validation.factors`` has the rule for runs on which a row's factor may be fitted.
        progress: Called with the number of rows done and their total.
    """
    ids = {row.id for row in rows}
    further = [row for row in (read_published() if calibration is None else calibration) if row.id not in ids]
    total = len(rows) + len(further)
    raw: list[Outcome] = []
    for row in (*rows, *further):
        raw.append(outcome_of(row))
        if progress is not None:
            progress(len(raw), total)
    points = [point for point in (outcome.point for outcome in raw) if point is not None]
    outcomes = tuple(_scaled(outcome, points) for outcome in raw[: len(rows)])
    return Validation(outcomes, tuple(sweeps(outcomes)), fits(outcomes), scalars(points))


def outcome_of(run: PublishedRun, trained: RunSoftware | None = None) -> Outcome:
    """Return the planner's estimate of one row beside its measurement, by its own software unless ``trained`` is another.

    The stack's factor is not applied.
    """
    try:
        setup = setup_of(run, trained)
        work = setup.job.workload
        counts = counts_of(work.model, work.seq_len)
        accelerator = setup.job.cluster.accelerator
        measure = partial(measured_step, run, work.model, counts, work.batch, work.seq_len, accelerator)
        measured = None if run.ran_out_of_memory or (run.memory_gb and not run.timed) else measure()
        estimate = _estimate(setup)
    except Excluded as reason:
        return Outcome(run, excluded=str(reason))
    except (ValueError, ArithmeticError) as error:
        return Outcome(run, excluded=f"the planner cannot express it: {error}")
    time = Time(measured.step_s, measured.how, estimate.step_s, estimate.time) if measured else None
    # Memory depends mostly on micro-batch and recomputation: without them the figures are not comparable.
    memory = _memory(run, estimate) if len(setup.choices) == 1 else None
    return Outcome(run, "", setup, estimate, time, memory)


def unseen_outcome_of(run: PublishedRun) -> Outcome:
    """Return ``outcome_of`` with the row's software as one that the planner has not seen."""
    return outcome_of(run, unseen_software_of_run(run))


def _estimate(setup: Setup) -> Estimate:
    """Return the estimate of the fastest choice that fits; if none does, of the one that needs least memory."""
    if len(setup.choices) > 1:
        quick = estimates(setup.job, setup.choices, exact=False)
        fitting = [candidate for candidate in quick if candidate.fits]
        best = (
            min(fitting, key=lambda candidate: candidate.step_s)
            if fitting
            else min(quick, key=lambda candidate: candidate.memory_bytes)
        )
        choice = best.layout
    else:
        choice = setup.choices[0]
    return estimates(setup.job, [choice])[0]


_UNIT_BYTES = {"GB": 1e9, "GiB": 2.0**30, "1000 MiB": 1000 * 2.0**20}


def _memory(run: PublishedRun, estimate: Estimate) -> Memory | None:
    """Compare the reading of the row's meter with the same quantity of the prediction."""
    if not run.memory_gb:
        return None
    measured = run.memory_gb * _UNIT_BYTES[run.memory_unit]
    if run.memory_meter == "device":
        return Memory(measured, estimate.memory_bytes, "device")
    if run.memory_meter == "allocated":
        return Memory(measured, estimate.allocated_bytes, "allocated")
    reserved = estimate.allocated_bytes + estimate.memory.get("fragmentation", 0.0)
    return Memory(measured, reserved, run.memory_meter or "peak, not said of what")


def _scaled(outcome: Outcome, points: Sequence[CalibrationPoint]) -> Outcome:
    if outcome.time is None or outcome.point is None:
        return outcome
    return replace(outcome, time=replace(outcome.time, scalar=scalar_for(outcome.point, points)))


def _half(point: CalibrationPoint) -> int:
    """Return the half of the models that a run is in: fixed by the names, so that it is no choice."""
    return crc32(f"{point.model} {point.accelerator}".encode()) % 2


def errors(values: Iterable[float]) -> Errors | None:
    """Return the summary of relative errors; ``None`` if there are none."""
    listed = list(values)
    if not listed:
        return None
    return Errors(len(listed), median(map(abs, listed)), max(listed, key=abs), median(listed))


@dataclass(frozen=True)
class Prediction:
    """Predicted step and memory of one layout, by which it is chosen."""

    step_s: float
    memory_bytes: float
    capacity_bytes: float


def sweeps(outcomes: Sequence[Outcome], predicted: Mapping[str, Prediction] | None = None) -> list[Sweep]:
    """Return sweeps of rows that differ only in their layout, for several layouts.

    The choice is by the rows' own predictions, or by ``predicted``, other predictions by the row's name. A factor of the
    software changes no choice, since it is the same for all layouts of one model on the same machines.
    """
    groups: dict[tuple[object, ...], list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.time is not None:
            groups.setdefault(_question(outcome), []).append(outcome)
    return [
        _sweep(members, predicted or {})
        for members in groups.values()
        if len({_answer(member) for member in members}) > 1
    ]


def _question(outcome: Outcome) -> tuple[object, ...]:
    """Return the key of rows that differ in their layouts alone: model, machines, work, software and source."""
    run = outcome.run
    assert outcome.setup is not None, "a row with a time has a setup"
    shape = (run.layers, run.hidden, run.heads, run.ffn, run.experts, run.seq_len)
    work = (run.gpus, run.global_batch_seqs, run.precision)
    return (run.source, outcome.setup.trained.software.name, *run.subject, *work, *shape)


def _answer(outcome: Outcome) -> PlannedLayout:
    assert outcome.estimate is not None, "a row with a time has an estimate"
    return outcome.estimate.layout


def _sweep(members: Sequence[Outcome], predicted: Mapping[str, Prediction]) -> Sweep:
    measured: dict[PlannedLayout, list[tuple[float, Prediction]]] = {}
    for member in members:
        if member.time is not None:
            prediction = predicted.get(member.run.id) or _prediction(member)
            measured.setdefault(_answer(member), []).append((member.time.measured_s, prediction))
    # A layout that was measured more than once counts once, with its best time.
    pairs = [(min(time for time, _ in times), times[0][1]) for times in measured.values()]
    best = min(time for time, _ in pairs)
    quickest = min(pairs, key=lambda pair: pair[1].step_s)
    run = members[0].run
    return Sweep(
        name=f"{run.model}, {run.gpus} {run.gpu}, batch {run.global_batch_seqs}",
        origin=run.origin,
        layouts=len(pairs),
        regret=_chosen(pairs) / best - 1,
        regret_by_time=quickest[0] / best - 1,
        mean_regret=fmean(time for time, _ in pairs) / best - 1,
        tau=kendall_tau([(time, prediction.step_s) for time, prediction in pairs]),
    )


def _prediction(outcome: Outcome) -> Prediction:
    assert outcome.time is not None, "a row of a sweep has a time"
    assert outcome.estimate is not None, "a row with a time has an estimate"
    return Prediction(
        outcome.time.predicted_s, outcome.estimate.memory_bytes, outcome.estimate.capacity_bytes
    )


def _chosen(pairs: Sequence[tuple[float, Prediction]]) -> float:
    """Return the measured time of the layout that ``phalanx plan`` would choose; of all, if none is predicted to fit."""
    order = sorted((prediction.step_s, place) for place, (_, prediction) in enumerate(pairs))
    ranked = [pairs[place] for _, place in order]
    fitting = [pair for pair in ranked if free_share(pair[1]) >= 0] or ranked
    first, *_ = with_room_first(
        [prediction for _, prediction in fitting], lambda prediction: prediction.step_s
    )
    return next(time for time, prediction in fitting if prediction is first)


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Return concordant less discordant pairs, over all pairs that differ in the first; 1 is the same order, -1 the reverse."""
    agree = [
        (first[0] - second[0]) * (first[1] - second[1])
        for first, second in combinations(pairs, 2)
        if first[0] != second[0]
    ]
    signs = sum((product > 0) - (product < 0) for product in agree)
    return signs / len(agree) if agree else 0.0


def fits(outcomes: Sequence[Outcome]) -> Fits:
    """Count runs that ran and are predicted to fit, and runs that did not fit and are predicted not to."""
    used = [outcome for outcome in outcomes if outcome.estimate is not None]
    out = [outcome for outcome in used if outcome.run.ran_out_of_memory]
    ran = [outcome for outcome in used if not outcome.run.ran_out_of_memory]
    right_out = [outcome for outcome in out if outcome.estimate and not outcome.estimate.fits]
    right_ran = [outcome for outcome in ran if outcome.estimate and outcome.estimate.fits]
    right = {outcome.run.id for outcome in (*right_out, *right_ran)}
    wrong = tuple(outcome.run.id for outcome in used if outcome.run.id not in right)
    return Fits(len(out), len(right_out), len(ran), len(right_ran), wrong)
