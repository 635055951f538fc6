"""When a pipeline's schedule ends, action by action, with stages that take different times.

A closed form (``phalanx.plan.bubbles``) takes stages to be alike, or nearly. The finalists of a search are timed exactly: each
rank's actions are those of ``phalanx.parallel.schedules``, which the trainer itself follows; an action starts when its rank is
free and what it needs has arrived. The order in which actions can be looked at depends on the schedule alone, so one pass
over it serves any number of layouts at once, as arrays.

A schedule with very many actions is followed only in part: once the slowest stage sets the pace, every further round of
``pipeline`` micro-batches takes as long as the one before (the completion time of such an event graph is eventually periodic;
Cohen et al., 1985, "A linear-system-theoretic view of discrete-event processes").
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from phalanx.parallel.schedules import Action, Name, Schedule
from phalanx.plan.candidates import Floats

_MOST_ACTIONS = 40_000
"""Of a schedule that is followed to its end: a tenth of a second."""


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch in each stage, shape (layouts, stages)."""

    forward_s: Floats
    input_gradient_s: Floats
    """Recomputation included."""
    weight_gradient_s: Floats


class Step(NamedTuple):
    """An action in an order in which everything comes after what it needs."""

    rank: int
    action: Action
    result: int
    """The number of what it makes: an output of a stage, a gradient of its input, or nothing that others need."""
    needs: int
    """The number of what it needs of another stage, or -1."""
    far: bool
    """Whether that comes from another rank."""


@dataclass(frozen=True)
class Span:
    """An action of one layout with its times, for charts."""

    rank: int
    action: Action
    begin_s: float
    end_s: float


def flush_s(
    name: Name, pipeline: int, per_rank: int, micro_batches: int, times: StageTimes, hop_s: Floats
) -> Floats:
    """Seconds from the first forward to the last backward, of each layout.

    Args:
        hop_s: From the end of an action to when its result is at a neighbouring rank, shape (layouts,).
    """
    followed = max(4 * pipeline, _MOST_ACTIONS // (3 * pipeline * per_rank))
    if micro_batches <= followed + pipeline:
        return _ends(steps(name, pipeline, per_rank, micro_batches), times, hop_s)
    rest = (micro_batches - followed) % pipeline
    long = _ends(steps(name, pipeline, per_rank, followed + rest), times, hop_s)
    short = _ends(steps(name, pipeline, per_rank, followed + rest - pipeline), times, hop_s)
    return long + (micro_batches - followed - rest) // pipeline * (long - short)


def timeline(
    name: Name, pipeline: int, per_rank: int, micro_batches: int, times: StageTimes, hop_s: float
) -> list[Span]:
    """Every action of the first layout of ``times``, in an order in which it could be computed."""
    order = steps(name, pipeline, per_rank, micro_batches)
    record: list[Floats] = []
    _ends(order, times, np.array([hop_s]), record)
    spans, seconds = [], _by_kind(times)
    for step, ends in zip(order, record, strict=True):
        took = float(seconds[step.action.kind][step.action.stage][0])
        spans.append(Span(step.rank, step.action, float(ends[0]) - took, float(ends[0])))
    return spans


@lru_cache(maxsize=64)
def steps(name: Name, pipeline: int, per_rank: int, micro_batches: int) -> tuple[Step, ...]:
    """All actions of all ranks, everything after what it needs."""
    schedule = Schedule(name, pipeline, per_rank)
    stages = schedule.stages
    rank_of = [schedule.rank_of(stage) for stage in range(stages)]
    half = stages * micro_batches
    done = bytearray(2 * half + 1)
    queues = [_numbered(schedule, rank, micro_batches, rank_of) for rank in range(pipeline)]
    places = [0] * pipeline
    order: list[Step] = []
    before = -1
    while before < len(order):
        before = len(order)
        for rank, queue in enumerate(queues):
            place = places[rank]
            while place < len(queue) and (queue[place].needs < 0 or done[queue[place].needs]):
                done[queue[place].result] = 1
                order.append(queue[place])
                place += 1
            places[rank] = place
    if len(order) < sum(map(len, queues)):
        raise ValueError(f"{name} on {pipeline} ranks cannot run {micro_batches} micro-batches to the end")
    return tuple(order)


def _numbered(schedule: Schedule, rank: int, micro_batches: int, rank_of: list[int]) -> list[Step]:
    """The actions of a rank, with numbers for what they make and need."""
    stages = schedule.stages
    half, nothing = stages * micro_batches, 2 * stages * micro_batches
    found = []
    for action in schedule.actions(rank, micro_batches):
        kind, stage, number = action
        if kind == "F":
            source, result = stage - 1, stage * micro_batches + number
            needs = source * micro_batches + number if stage else -1
        elif kind == "W":
            source, result, needs = stage, nothing, -1
        else:
            source, result = stage + 1, half + stage * micro_batches + number
            needs = half + source * micro_batches + number if source < stages else -1
        found.append(Step(rank, action, result, needs, needs >= 0 and rank_of[source] != rank))
    return found


def _by_kind(times: StageTimes) -> dict[str, list[Floats]]:
    """Seconds of each kind of action in each stage."""
    forward, inputs, weights = (
        list(np.ascontiguousarray(seconds.T))
        for seconds in (times.forward_s, times.input_gradient_s, times.weight_gradient_s)
    )
    both = [i + w for i, w in zip(inputs, weights, strict=True)]
    return {"F": forward, "I": inputs, "W": weights, "B": both}


def _ends(
    order: tuple[Step, ...], times: StageTimes, hop_s: Floats, record: list[Floats] | None = None
) -> Floats:
    """When the last action ends; the ends of all, in order, are added to ``record``."""
    free = [np.zeros(times.forward_s.shape[0])] * (1 + max(step.rank for step in order))
    ends: list[Floats] = [free[0]] * (1 + max(step.result for step in order))
    seconds = _by_kind(times)
    for rank, action, result, needs, far in order:
        start = free[rank]
        if needs >= 0:
            start = np.maximum(start, ends[needs] + hop_s if far else ends[needs])
        end = start + seconds[action.kind][action.stage]
        free[rank] = ends[result] = end
        if record is not None:
            record.append(end)
    last: Floats = np.maximum.reduce(free)
    return last
