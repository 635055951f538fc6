"""Pipelines, for arrays of layouts: how much of the model each kind of rank has, and the times of the schedules.

Times are closed forms of idle time, exposed transfers and micro-batches in flight, and the exact makespan.
With R_i the time of one micro-batch on rank i (all its stages, forward and backward), a flush of m micro-batches takes about
``m max R + idle``. The idle times, for stages that are alike, are exact for the schedules as this project builds them
(``phalanx.parallel.pipeline_schedules``). A flush is a step, since slots follow each other without a pause; with ``gpipe``, a slot.

- ``gpipe``, ``1f1b``: the time of one micro-batch on all other ranks, ``sum R - max R`` (arXiv 1811.06965, 2104.04473).
- ``interleaved``: that time over v, the stages of a rank (arXiv 2104.04473, section 2.2.2).
- ``zbv``, ``dualpipev``: the longest of a few critical paths, each linear in the times of a stage's forward (F),
  gradient of the input (I) and of the weights (W); read off exact schedules, to which the tests hold them. With F = I = W both
  are (p - 1) F. (Papers count less, because their steps overlap: arXiv 2401.10241; DeepSeek's DualPipe.)

The closed form assumes stages of nearly equal time. The finalists of a search are timed exactly:
each rank's actions are those of ``phalanx.parallel.pipeline_schedules``, which the trainer itself follows; an action starts when its rank
is free and its input has arrived. The dependencies depend on the schedule alone, so actions are dealt once into *waves* of at most one
action for each rank, none of which needs another; a wave is a row of arrays, for any number of layouts at once.

A schedule with very many actions is followed only in part: once the slowest stage sets the pace, every further round of
``pipeline`` micro-batches takes as long as the one before (the completion time of such an event graph is eventually periodic;
Cohen et al., 1985, "A linear-system-theoretic view of discrete-event processes").
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from phalanx.parallel.pipeline_schedules import Action, Schedule, ScheduleName
from phalanx.run.layout import SPLIT_BACKWARD
from phalanx.run.pieces import STAGES_PER_RANK
from phalanx_plan.workload.candidates import SCHEDULES, Bools, Candidates, Floats, Ints, distinct
from phalanx_plan.workload.holdings import PipelinePlaces, most_stages, places
from phalanx_plan.workload.stacks import TrainingJob

# Closed forms, for arrays of layouts.


@dataclass(frozen=True)
class Pipelines:
    """Pipelines as arrays that broadcast."""

    schedule: Ints
    """Indices into ``SCHEDULES``."""
    ranks: Ints
    per_rank: Ints
    """Stages on each rank."""
    micro_batches: Ints
    """Micro-batches of one flush."""

    def follows(self, *names: str) -> Bools:
        """True where the schedule is one of ``names``."""
        mask = np.zeros(np.shape(self.schedule), dtype=bool)
        for name in names:
            mask |= self.schedule == SCHEDULES.index(name)
        return mask


def legal(pipes: Pipelines, *, with_gaps: bool) -> Bools:
    """True where a schedule can run with these stages and micro-batches; on one rank only ``1f1b`` with one stage can.

    ``with_gaps``: any number of micro-batches will do, as in this project's schedules.
    """
    least, most = np.array([STAGES_PER_RANK[name] for name in SCHEDULES]).T[:, pipes.schedule]
    suits = with_gaps | (_suited(pipes) == pipes.micro_batches)
    runs = (pipes.per_rank >= least) & (pipes.per_rank <= most) & suits
    runnable: Bools = runs & ((pipes.ranks > 1) | pipes.follows("1f1b"))
    return runnable


def _suited(pipes: Pipelines) -> Ints:
    """Micro-batches with which a schedule's list has no gaps: at least those of the flush (``Schedule.padded_count``)."""
    batches, ranks = pipes.micro_batches, pipes.ranks
    padded: Ints = np.where(pipes.follows("interleaved"), -(-batches // ranks) * ranks, batches)
    return np.where(pipes.follows("zbv", "dualpipev"), np.maximum(batches, 2 * ranks), padded)


def idle_s(
    pipes: Pipelines,
    slowest_s: Floats,
    sum_s: Floats,
    forward_s: Floats,
    input_gradient_s: Floats,
    weight_gradient_s: Floats,
) -> Floats:
    """Seconds of a flush in which the slowest rank waits for the others, in closed form by schedule.

    Gaps for micro-batches that do not suit the schedule are included.

    Args:
        slowest_s: Seconds of one micro-batch on the slowest rank.
        sum_s: Seconds of one micro-batch on all ranks together.
        forward_s, input_gradient_s, weight_gradient_s: Seconds of one micro-batch in the mean stage.
    """
    idle: Floats = (sum_s - slowest_s) / np.where(pipes.follows("interleaved"), pipes.per_rank, 1)
    for name, folded in (("zbv", _zbv), ("dualpipev", _dualpipev)):
        mine = pipes.follows(name)
        if mine.any():
            idle = np.where(mine, folded(pipes, forward_s, input_gradient_s, weight_gradient_s), idle)
    # The gaps of micro-batches that a list leaves out: at most their time.
    return idle + (_suited(pipes) - pipes.micro_batches) * slowest_s


def _zbv(pipes: Pipelines, forward: Floats, inputs: Floats, weights: Floats) -> Floats:
    """Seconds in which the slowest rank waits in a flush of ``zbv``: the longest of its critical paths; 0 on one rank."""
    others = pipes.ranks - 1
    paths = (
        2 * others * (inputs - weights),
        others * inputs,
        (2 * others - 1) * forward - (others - 1) * inputs,
        np.maximum(forward, inputs) + (others - 1) * weights,
    )
    return _longest(paths) * (others > 0)


def _dualpipev(pipes: Pipelines, forward: Floats, inputs: Floats, weights: Floats) -> Floats:
    """Seconds in which the slowest rank waits in a flush of ``dualpipev``: the longest of its critical paths; 0 on one rank."""
    others = pipes.ranks - 1
    paths = (
        others * (2 * inputs - weights) - forward,
        others * (forward + inputs - weights),
        others * forward,
    )
    return _longest(paths) * (others > 0)


def _longest(paths: tuple[Floats, ...]) -> Floats:
    """The elementwise maximum of ``paths``, which broadcast."""
    longest = paths[0]
    for path in paths[1:]:
        longest = np.maximum(longest, path)
    return longest


def exposed_hops(pipes: Pipelines) -> Floats:
    """Number of transfers between stages that a flush waits for, if a transfer takes much less time than a stage.

    ``1f1b`` holds so few micro-batches that it waits in its steady state too, about twice for each; the others wait only
    while the pipeline fills and drains. Read off exact schedules with equal stages.
    """
    ranks, batches = pipes.ranks, pipes.micro_batches
    steady = np.where(ranks == 2, batches, 2 * (batches + 0.75 * ranks - 4))
    hops = np.where(pipes.follows("1f1b"), np.maximum(steady, 2 * (ranks - 1)), 2.0 * (ranks - 1))
    hops = np.where(pipes.follows("interleaved"), 2 * (ranks * pipes.per_rank - 1), hops)
    hops = np.where(pipes.follows("zbv"), 5 * ranks - 7, hops)
    hops = np.where(pipes.follows("dualpipev"), 4 * (ranks - 1), hops)
    return np.where(ranks > 1, hops, 0.0)


def in_flight(pipes: Pipelines, rank: Ints) -> Floats:
    """The most micro-batches whose activations rank ``rank`` holds at once, in units of all its stages' activations, by schedule."""
    after, batches = pipes.ranks - rank, pipes.micro_batches
    count = np.where(pipes.follows("1f1b"), np.minimum(batches, after), batches)
    chunks = (pipes.per_rank - 1) * pipes.ranks + 2 * (after - 1) + 1
    all_chunks = batches * pipes.per_rank
    interleaved = np.minimum(chunks, all_chunks) / pipes.per_rank
    count = np.where(pipes.follows("interleaved"), interleaved, count)
    count = np.where(pipes.follows("zbv"), np.minimum(batches, pipes.ranks), count)
    return np.where(pipes.follows("dualpipev"), np.minimum(batches, pipes.ranks + 0.5), count)


# The exact schedule, with unequal stages, followed action by action.


_MOST_ACTIONS = 40_000
"""Largest number of actions of a schedule that is followed to its end."""
_KINDS = "FIWB"
"""Kinds of actions in the order of ``_durations``."""
_KIND_OF_LETTER = np.array([_KINDS.find(chr(letter)) for letter in range(128)])


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch in each stage, shape (layouts, stages)."""

    forward_s: Floats
    input_gradient_s: Floats
    """Recomputation included."""
    weight_gradient_s: Floats


@dataclass(frozen=True)
class Waves:
    """A schedule in waves, shape (waves, ranks); the ends of wave ``w`` are row ``w + 1`` of a table whose row 0 is the start."""

    duration: Ints
    """Index into ``_durations`` of an action."""
    needs: Ints
    """Index into the flattened table of ends of the action that makes the input; 0 where there is no input."""
    far: Bools
    """True if the input comes from another rank."""
    number: Ints
    """Index of an action among those of its rank; -1 where a rank waits."""


@dataclass(frozen=True)
class TimedAction:
    """An action of one layout with its times, for charts."""

    rank: int
    action: Action
    begin_s: float
    end_s: float


def flush_s(
    name: ScheduleName,
    pipeline: int,
    per_rank: int,
    micro_batches: int,
    times: StageTimes,
    hop_s: Floats,
    *,
    max_actions: int = _MOST_ACTIONS,
) -> Floats:
    """Seconds from the first forward to the last backward of each layout, shape (layouts,), by the exact schedule.

    Args:
        times: Seconds of each stage, shape (layouts, stages).
        hop_s: Seconds to send an action's result to a neighboring rank, shape (layouts,).
        max_actions: Largest number of actions of a schedule that is followed to its end; a longer one is extrapolated
            from its rounds.
    """
    followed = max(4 * pipeline, max_actions // (3 * pipeline * per_rank))
    if micro_batches <= followed + pipeline:
        return _flush_s(waves(name, pipeline, per_rank, micro_batches), times, hop_s)
    remainder = (micro_batches - followed) % pipeline
    long = _flush_s(waves(name, pipeline, per_rank, followed + remainder), times, hop_s)
    short = _flush_s(waves(name, pipeline, per_rank, followed + remainder - pipeline), times, hop_s)
    return long + (micro_batches - followed - remainder) // pipeline * (long - short)


def timeline(
    name: ScheduleName, pipeline: int, per_rank: int, micro_batches: int, times: StageTimes, hop_s: float
) -> list[TimedAction]:
    """Return every action of the first layout of ``times`` with its begin and end in seconds, in an order in which it
    could be computed.
    """
    dealt = waves(name, pipeline, per_rank, micro_batches)
    ends, took = (table[..., 0] for table in _ends(dealt, times, np.array([hop_s])))
    schedule = Schedule(name, pipeline, per_rank)
    actions = [schedule.actions(rank, micro_batches) for rank in range(pipeline)]
    spans = []
    for wave, rank in np.argwhere(dealt.number >= 0).tolist():
        end = float(ends[wave + 1, rank])
        action = actions[rank][dealt.number[wave, rank]]
        spans.append(TimedAction(rank, action, end - float(took[wave, rank]), end))
    return spans


@lru_cache(maxsize=64)
def waves(name: ScheduleName, pipeline: int, per_rank: int, micro_batches: int) -> Waves:
    """Return all actions of all ranks, each in the first wave after that of its input and its rank's previous action.

    Raises ``ValueError`` if the schedule cannot run to its end. The result is cached: do not change it.
    """
    schedule = Schedule(name, pipeline, per_rank)
    columns = [_columns(schedule, rank, micro_batches) for rank in range(pipeline)]
    wave_of_result, wave_of = _deal([(column.needs.tolist(), column.makes.tolist()) for column in columns])
    if any(len(rank_waves) < len(column.needs) for rank_waves, column in zip(wave_of, columns, strict=True)):
        raise ValueError(f"{name} on {pipeline} ranks cannot run {micro_batches} micro-batches to the end")
    shape = (max(map(max, wave_of)), pipeline)
    duration, number = np.full(shape, len(_KINDS) * schedule.stages), np.full(shape, -1)
    needs, far = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=bool)
    result_wave = np.array(wave_of_result)
    for rank, column in enumerate(columns):
        place = np.array(wave_of[rank]) - 1, rank
        duration[place] = column.duration
        needs[place] = np.where(column.needs >= 0, result_wave[column.needs] * pipeline + column.source, 0)
        number[place] = np.arange(len(wave_of[rank]))
        far[place] = (column.needs >= 0) & (column.source != rank)
    return Waves(duration, needs, far, number)


class _Columns(NamedTuple):
    """The actions of a rank as arrays."""

    duration: Ints
    needs: Ints
    """Number of the input from another stage, an output or a gradient; or -1."""
    makes: Ints
    source: Ints
    """Rank that makes the input."""


def _columns(schedule: Schedule, rank: int, micro_batches: int) -> _Columns:
    """Number results by stage and micro-batch: first outputs, then gradients of inputs; the last number is for unused results."""
    kinds, stages, numbers = zip(*schedule.actions(rank, micro_batches), strict=True)
    letters = np.frombuffer("".join(kinds).encode(), dtype=np.uint8)
    kind = _KIND_OF_LETTER[letters]
    stage, number = np.array(stages), np.array(numbers)
    forward, weights = kind == _KINDS.index("F"), kind == _KINDS.index("W")
    source = np.where(forward, stage - 1, stage + 1)
    half = schedule.stages * micro_batches
    within = ~weights & (source >= 0) & (source < schedule.stages)
    behind = np.where(forward, 0, half)
    rank_of = np.array([schedule.rank_of(stage_number) for stage_number in range(schedule.stages)])
    return _Columns(
        kind * schedule.stages + stage,
        np.where(within, behind + source * micro_batches + number, -1),
        np.where(weights, 2 * half, behind + stage * micro_batches + number),
        rank_of[source.clip(0, schedule.stages - 1)],
    )


def _deal(queues: list[tuple[list[int], list[int]]]) -> tuple[list[int], list[list[int]]]:
    """Return the wave, counted from 1, of each result by its number (0: never computed), and of each action of each
    rank.

    ``queues`` has each rank's (needed results, made results) in its order; a need of -1 waits for nothing. A rank
    that waits for ever gets fewer waves than actions.
    """
    wave_of_result = [0] * (1 + max(max(makes) for _, makes in queues))
    dealt: list[list[int]] = [[] for _ in queues]
    before = -1
    # Stop when a round over all ranks deals nothing more: the schedule is complete, or stuck.
    while before < (dealt_count := sum(map(len, dealt))):
        before = dealt_count
        for (needs, makes), waves_ in zip(queues, dealt, strict=True):
            wave = waves_[-1] if waves_ else 0
            # A rank continues, in its own order, up to the first action whose input is missing.
            for place in range(len(waves_), len(needs)):
                if needs[place] >= 0:
                    ready = wave_of_result[needs[place]]
                    if not ready:
                        break
                    if ready > wave:
                        wave = ready
                wave += 1  # the first wave after that of the input and of the rank's action before
                wave_of_result[makes[place]] = wave
                waves_.append(wave)
    return wave_of_result, dealt


def _durations(times: StageTimes) -> Floats:
    """Seconds of each of ``_KINDS`` in each stage, and of waiting, shape (kinds x stages + 1, layouts)."""
    forward, inputs, weights = times.forward_s, times.input_gradient_s, times.weight_gradient_s
    idle = np.zeros((len(forward), 1))
    return np.concatenate([forward, inputs, weights, inputs + weights, idle], axis=1).T


def _ends(dealt: Waves, times: StageTimes, hop_s: Floats) -> tuple[Floats, Floats]:
    """Time at which each rank is free after each wave (row 0: before the first), and seconds that it computed in each."""
    took = _durations(times)[dealt.duration]  # (waves, ranks, layouts)
    waits = np.where(dealt.far[..., None], hop_s, 0.0)  # (waves, ranks, layouts)
    ends = np.zeros((1 + len(took), *took.shape[1:]))  # (1 + waves, ranks, layouts)
    flat = ends.reshape(-1, ends.shape[-1])  # (rows of ends x ranks, layouts), as ``needs`` indexes it
    for needs, wait, seconds, free, end in zip(dealt.needs, waits, took, ends[:-1], ends[1:], strict=True):
        begin = flat.take(needs, axis=0)
        begin += wait
        np.maximum(begin, free, out=begin)
        np.add(begin, seconds, out=end)
    return ends, took


def _flush_s(dealt: Waves, times: StageTimes, hop_s: Floats) -> Floats:
    """Seconds until the last rank has ended its last action, of each layout."""
    last: Floats = _ends(dealt, times, hop_s)[0][-1].max(axis=0)
    return last


# Kinds of ranks (places). They depend on few fields of a layout, and are looked up for all layouts at once (``workload.holdings``).


@dataclass(frozen=True)
class PlaceCounts:
    """One kind of rank of each candidate: how much of each of ``KINDS`` it has, in the candidates' axes."""

    counts: tuple[Floats, Floats, Floats, Floats]
    rank: Ints
    """Rank in the pipeline."""


@dataclass(frozen=True)
class PlaceTable:
    """The places of every candidate."""

    table: PipelinePlaces
    row: Ints
    """Row of each candidate in ``table``."""

    def __len__(self) -> int:
        return self.table.kinds

    def __getitem__(self, kind: int | Ints) -> PlaceCounts:
        """Return the ``kind``-th place of each candidate; an array gives each candidate its own, and broadcasts.

        A candidate with fewer kinds has its first one there. Raises ``IndexError`` beyond the largest number of kinds.
        """
        table, row = self.table, self.row
        if not 0 <= np.max(kind) < table.kinds:
            raise IndexError(f"there are {table.kinds} places")
        place = row * table.kinds + kind
        dense, mixture, embedding, head = (column.take(place) for column in table.counts)
        return PlaceCounts((dense, mixture, embedding, head), table.rank.take(place))

    def each(self) -> tuple[Ints, Ints]:
        """Every place of every candidate of the last axis, as (candidate, kind); by kind."""
        number = self.table.number[self.row.ravel()]
        kind, candidate = np.nonzero(np.arange(len(self))[:, None] < number)
        return candidate, kind


def place_table(job: TrainingJob, candidates: Candidates) -> PlaceTable:
    """Return the distinct kinds of ranks of all ``candidates``: numbers of layers of each kind, by pipeline, stages
    and schedule.

    Candidates with more stages than layers get one stage a rank here.
    """
    folded = np.logical_or.reduce([candidates.schedule == SCHEDULES.index(name) for name in SPLIT_BACKWARD])
    # Candidates with more stages than layers are not legal; they are looked up with one stage on a rank.
    enough = candidates.pipeline * candidates.stages_per_rank <= most_stages(job.workload, job.stack)
    per_rank = np.where(enough, candidates.stages_per_rank, 1)
    columns, row = distinct([candidates.pipeline, per_rank, folded.astype(np.int64)])
    pipelines = [
        (ranks, each, bool(turns)) for ranks, each, turns in zip(*(c.tolist() for c in columns), strict=True)
    ]
    wide = np.broadcast_to(row, (*row.shape[:-1], candidates.shape[-1]))
    return PlaceTable(places(job.workload, job.stack, pipelines), wide)
