"""Closed forms of a pipeline schedule: idle time (the bubble), exposed transfers and micro-batches in flight, for arrays of layouts.

With R_i the time of one micro-batch on rank i (all its stages, forward and backward), a flush of m micro-batches takes about
``m max R + idle``. The idle times, for stages that are alike, are exact for the schedules as this project builds them
(``phalanx.parallel.pipeline.schedules``). A flush is a step, since slots follow each other without a pause; with ``gpipe``, a slot.

- ``gpipe``, ``1f1b``: the time of one micro-batch on all other ranks, ``sum R - max R`` (arXiv 1811.06965, 2104.04473).
- ``interleaved``: that time over v, the stages of a rank (arXiv 2104.04473, section 2.2.2).
- ``zbv``, ``dualpipev``: the longest of a few critical paths, each linear in the times of a stage's forward (F),
  gradient of the input (I) and of the weights (W); read off exact schedules, to which the tests hold them. With F = I = W both
  are (p - 1) F. (Papers count less, because their steps overlap: arXiv 2401.10241; DeepSeek's DualPipe.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.plan.workload.candidates import SCHEDULES, Bools, Floats, Ints
from phalanx.run.degrees.legality import STAGES_PER_RANK


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
        found = np.zeros(np.shape(self.schedule), dtype=bool)
        for name in names:
            found |= self.schedule == SCHEDULES.index(name)
        return found


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
    """Micro-batches with which a schedule's list has no gaps: at least those of the flush (``Schedule.suited``)."""
    batches, ranks = pipes.micro_batches, pipes.ranks
    whole: Ints = np.where(pipes.follows("interleaved"), -(-batches // ranks) * ranks, batches)
    return np.where(pipes.follows("zbv", "dualpipev"), np.maximum(batches, 2 * ranks), whole)


def idle_s(
    pipes: Pipelines,
    slowest_s: Floats,
    sum_s: Floats,
    forward_s: Floats,
    input_gradient_s: Floats,
    weight_gradient_s: Floats,
) -> Floats:
    """Seconds of a flush in which the slowest rank waits for the others.

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
    others = pipes.ranks - 1
    paths = (
        2 * others * (inputs - weights),
        others * inputs,
        (2 * others - 1) * forward - (others - 1) * inputs,
        np.maximum(forward, inputs) + (others - 1) * weights,
    )
    return _longest(paths) * (others > 0)


def _dualpipev(pipes: Pipelines, forward: Floats, inputs: Floats, weights: Floats) -> Floats:
    others = pipes.ranks - 1
    paths = (
        others * (2 * inputs - weights) - forward,
        others * (forward + inputs - weights),
        others * forward,
    )
    return _longest(paths) * (others > 0)


def _longest(paths: tuple[Floats, ...]) -> Floats:
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
    """The most micro-batches whose activations rank ``rank`` holds at once, in units of all its stages' activations."""
    after, batches = pipes.ranks - rank, pipes.micro_batches
    held = np.where(pipes.follows("1f1b"), np.minimum(batches, after), batches)
    chunks = (pipes.per_rank - 1) * pipes.ranks + 2 * (after - 1) + 1
    all_chunks = batches * pipes.per_rank
    interleaved = np.minimum(chunks, all_chunks) / pipes.per_rank
    held = np.where(pipes.follows("interleaved"), interleaved, held)
    held = np.where(pipes.follows("zbv"), np.minimum(batches, pipes.ranks), held)
    return np.where(pipes.follows("dualpipev"), np.minimum(batches, pipes.ranks + 0.5), held)
