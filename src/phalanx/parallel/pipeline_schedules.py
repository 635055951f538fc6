"""Pipeline schedules as data: the ordered actions of each rank.

The layers are divided into stages; micro-batches flow through them forward and back. A schedule lists the actions of each rank:
forward (F) and backward (B). Backward may be split in two: the gradient of the stage's input (I), and later those of its weights
(W). The lists equal those of ``torch.distributed.pipelining``, which the tests check. There every rank computes the lists of all
ranks, which at 64 stages and 512 micro-batches takes ten seconds. Here it computes its own.

- ``gpipe``: all forward, then all backward (arXiv 1811.06965). It drains after each slot, because it keeps the activations of all
  micro-batches of a list.
- ``1f1b``: backward as early as possible, so that few activations are kept (PipeDream-Flush, arXiv 2006.09503).
- ``interleaved``: several stages on each rank, assigned round-robin (arXiv 2104.04473).
- ``zbv``: two stages on each rank, placed down and up again like a V; W fills the gaps (arXiv 2401.10241, section 6).
- ``dualpipev``: the same placement, with forward of one micro-batch paired with backward of another (DeepSeek's DualPipe, arXiv
  2412.19437, section 3.2.1, folded in half). The two of a pair run one after the other here.

Every list computes the weight gradients of a stage in the order of micro-batches, so a schedule changes no sum.

All schedules except ``gpipe`` run over the micro-batches of all slots of a rank's step in sequence. So the pipeline fills and drains
once per step, and needs the memory of one long slot. A stage completes a slot's gradient before it adds to the next one's: a
postponed W precedes the stage's first backward pass of the next slot. PyTorch's lists of ``interleaved`` require a multiple of the
ranks, those of ``zbv`` and ``dualpipev`` at least twice the ranks. For other numbers, all ranks take a longer list and leave out the
micro-batches that do not exist.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from phalanx.run.layout import SPLIT_BACKWARD, stages_per_rank
from phalanx.run.spec import ParallelSpec

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zbv", "dualpipev"]
PassKind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One computation of a rank."""

    kind: PassKind
    stage: int
    micro_batch: int


class StageMessage(NamedTuple):
    """A stage's input (F) or the gradient of its output (B), sent to that stage."""

    kind: Literal["F", "B"]
    stage: int
    """The receiving stage."""
    micro_batch: int


@dataclass(frozen=True)
class Schedule:
    """A schedule of a pipeline of ``pipeline`` ranks with ``per_rank`` stages each."""

    name: ScheduleName
    pipeline: int
    per_rank: int

    @classmethod
    def of(cls, parallel: ParallelSpec) -> Schedule:
        """Return the schedule of a run; without a pipeline, that of one stage."""
        per_rank = stages_per_rank(parallel) if parallel.pipeline > 1 else 1
        return cls(parallel.pipeline_schedule, parallel.pipeline, per_rank)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.pipeline * self.per_rank

    def rank_of(self, stage: int) -> int:
        """Return the rank of ``stage``."""
        turn, place = divmod(stage, self.pipeline)
        return self.pipeline - 1 - place if self.name in SPLIT_BACKWARD and turn else place

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages on ``rank``, ascending: assigned round-robin, or for ``zbv`` and ``dualpipev`` down and up like a V."""
        return tuple(stage for stage in range(self.stages) if self.rank_of(stage) == rank)

    def actions(self, rank: int, micro_batches: int, slots: int = 1) -> list[Action]:
        """Return the actions of ``rank``, in order, for ``micro_batches`` in ``slots`` slots of equal size: forward
        (F), backward (B), or its input (I) and weight (W) halves.

        GPipe drains the pipeline after each slot; the others continue, but schedules with W finish a stage's slot
        before its next backward.
        """
        makers = {
            "gpipe": _gpipe,
            "1f1b": _one_forward_one_backward,
            "interleaved": _interleaved,
            "zbv": _zbv,
            "dualpipev": _dualpipev,
        }
        make, per_slot = makers[self.name], micro_batches // slots
        if self.name == "gpipe":
            slot = make(self, rank, per_slot)
            return [
                Action(kind, stage, first + number)
                for first in range(0, micro_batches, per_slot)
                for kind, stage, number in slot
            ]
        extended = make(self, rank, self.padded_count(micro_batches))
        actions = [action for action in extended if action.micro_batch < micro_batches]
        return _slot_after_slot(actions, per_slot) if slots > 1 and self.name in SPLIT_BACKWARD else actions

    def padded_count(self, micro_batches: int) -> int:
        """Return the smallest number of micro-batches, at least ``micro_batches``, that the schedule's rule supports."""
        if self.name == "interleaved":
            return -(-micro_batches // self.pipeline) * self.pipeline
        return max(micro_batches, 2 * self.pipeline) if self.name in SPLIT_BACKWARD else micro_batches

    def forward_only(self, rank: int, micro_batches: int) -> list[Action]:
        """Return the actions of ``rank`` for an evaluation: forward passes only."""
        return [
            Action("F", stage, number) for stage in self.stages_of(rank) for number in range(micro_batches)
        ]

    def result(self, action: Action) -> StageMessage | None:
        """Return the message with an action's result for another stage; ``None`` if no stage needs it."""
        if action.kind == "F" and action.stage + 1 < self.stages:
            return StageMessage("F", action.stage + 1, action.micro_batch)
        if action.kind in ("B", "I") and action.stage > 0:
            return StageMessage("B", action.stage - 1, action.micro_batch)
        return None

    def messages_to(self, actions: Iterable[Action], target: int) -> Iterator[StageMessage]:
        """Return the results of ``actions``, one rank's, that are sent to the rank ``target``, in order."""
        results = map(self.result, actions)
        return (message for message in results if message and self.rank_of(message.stage) == target)

    def links(self) -> list[tuple[int, int]]:
        """Return all pairs (source, target) of different ranks that exchange messages."""
        ranks = [self.rank_of(stage) for stage in range(self.stages)]
        down = {pair for pair in pairwise(ranks) if pair[0] != pair[1]}
        return sorted(down | {(target, source) for source, target in down})


def bubble(schedule: ScheduleName, pipeline: int, micro_batches: int, stages_per_rank: int) -> float:
    """Return the fraction of the time of ``micro_batches`` for which a rank is idle, if only computation takes time.

    Stages are equal, and F, I and W of a stage take the same time, B twice that. With ``m`` micro-batches, ``p``
    ranks and ``v`` stages on each, the ratio of idle to busy time is as follows.

    ``gpipe`` (arXiv 1811.06965, section 2.3) and ``1f1b`` (arXiv 2104.04473, section 2.2.1): ``(p - 1) / m``.
    ``interleaved`` (arXiv 2104.04473, section 2.2.2): ``(p - 1) / (v m)``.

    ``zbv``: ``(p - 1) / (6 m)``, only the wait for the first input. arXiv 2401.10241 does not count it, because its
    steps overlap. ``dualpipev``: the same, because the two of a pair run one after the other. For pairs that end
    together, the README of DeepSeek's DualPipe gives ``(p - 1) (F&B + B - 3 W)`` of idle time.
    """
    ranks = pipeline - 1
    idle = {
        "gpipe": ranks / micro_batches,
        "1f1b": ranks / micro_batches,
        "interleaved": ranks / (micro_batches * stages_per_rank),
        "zbv": ranks / (6 * micro_batches),
        "dualpipev": ranks / (6 * micro_batches),
    }[schedule]
    return idle / (1 + idle)


def _gpipe(schedule: Schedule, rank: int, micro_batches: int) -> list[Action]:
    """Return all forward passes, then all backward passes."""
    del schedule
    forward = [Action("F", rank, number) for number in range(micro_batches)]
    return forward + [Action("B", rank, number) for number in range(micro_batches)]


def _one_forward_one_backward(schedule: Schedule, rank: int, micro_batches: int) -> list[Action]:
    """Return forward and backward passes in turn, after as many forward passes as there are stages from this one on."""
    forward = [Action("F", rank, number) for number in range(micro_batches)]
    backward = [Action("B", rank, number) for number in range(micro_batches)]
    # Warm-up: forward until the first gradient can come back. Steady state: one backward, one forward. Cool-down: backward.
    ahead = min(micro_batches, schedule.pipeline - rank)
    pairs = zip(backward, forward[ahead:], strict=False)
    return forward[:ahead] + [action for pair in pairs for action in pair] + backward[micro_batches - ahead :]


def _interleaved(schedule: Schedule, rank: int, micro_batches: int) -> list[Action]:
    """Return the actions of interleaved 1F1B (Narayanan et al., 2021); micro-batches are a multiple of the ranks."""
    ranks, turns = schedule.pipeline, schedule.per_rank
    total = micro_batches * turns

    def at(kind: PassKind, step: int) -> Action:
        # Blocks of `ranks` micro-batches pass through one stage, then through the next.
        block, place = divmod(step, ranks)
        round_, turn = divmod(block, turns)
        turn = turn if kind == "F" else turns - 1 - turn
        return Action(kind, turn * ranks + rank, round_ * ranks + place)

    # Warm-up: arXiv 2104.04473, section 2.2.2; Megatron-LM's "num_warmup_microbatches".
    ahead = min((turns - 1) * ranks + 2 * (ranks - 1 - rank), total)
    order = [at("F", step) for step in range(ahead)]
    # Steady state: one forward, one backward.
    for step in range(total - ahead):
        order += (at("F", ahead + step), at("B", step))
    # Cool-down: the remaining backward passes.
    return order + [at("B", step) for step in range(total - ahead, total)]


def _slot_after_slot(actions: Iterable[Action], per_slot: int) -> list[Action]:
    """Return ``actions`` with every postponed W of a stage's slot before the stage's first backward pass of the next
    slot. The order is otherwise unchanged.
    """
    ordered: list[Action] = []
    pending: dict[int, deque[Action]] = defaultdict(deque)
    for action in actions:
        kind, stage, number = action
        pending_of_stage = pending[stage]
        if kind == "W":
            if pending_of_stage and pending_of_stage[0] == action:  # else it has been moved
                ordered.append(pending_of_stage.popleft())
            continue
        while (
            kind != "F"
            and pending_of_stage
            and pending_of_stage[0].micro_batch // per_slot < number // per_slot
        ):
            ordered.append(pending_of_stage.popleft())
        ordered.append(action)
        if kind == "I":
            pending_of_stage.append(Action("W", stage, number))
    return ordered


class _Writer:
    """Writes the actions of a rank with two stages, each kind in the order of micro-batches."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        """Start with no actions, for the two stages of ``rank``."""
        self.stages = schedule.stages_of(rank)
        self.actions: list[Action] = []
        self.counts: Counter[str] = Counter()
        """Number of steps written, by step."""
        self.pending: deque[str] = deque()
        """The W of each I whose W is not written yet."""

    def write(self, *steps: str) -> None:
        """Append the actions of steps such as "F0" (forward of the rank's first stage), each for that step's next
        micro-batch. An I also queues its W for ``write_pending``; a W in ``steps`` does not change that queue.
        """
        for step in steps:
            kind, stage = step[0], step[1]
            number = self.counts[step]
            self.counts[step] += 1
            if kind == "B":  # an I and a W at once
                number = self.counts[f"I{stage}"]
                self.counts.update((f"I{stage}", f"W{stage}"))
            elif kind == "I":
                self.pending.append(f"W{stage}")
            self.actions.append(Action(kind, self.stages[int(stage)], number))  # type: ignore[arg-type]

    def write_pending(self) -> None:
        """Write the oldest pending W, if any."""
        if self.pending:
            self.write(self.pending.popleft())


def _zbv(schedule: Schedule, rank: int, micro_batches: int) -> list[Action]:
    """Return the actions of zero-bubble V (Qi et al., 2024) for a rank with two stages. ``micro_batches`` must be at
    least twice the ranks; ``padded_count`` sees to that.
    """
    # "F0" is forward of the rank's first stage, "I1" and "W1" are the two halves of backward of its second.
    writer, after = _Writer(schedule, rank), schedule.pipeline - rank
    write, counts = writer.write, writer.counts
    # Warm-up, first leg of the V: forward of the first stage until its micro-batch comes back up to the second.
    for _ in range(2 * after - 1):
        write("F0")
    # Warm-up, second leg: both stages' forward passes in turn.
    for _ in range(rank):
        write("F1", "F0")
    # Warm-up, third leg: the first losses are computed, and backward of the second stage begins.
    for _ in range(after):
        write("F1", "I1", "W1")
    # Steady state: forward and full backward of both stages in turn; F0 ends first, since it is ahead.
    while counts["F1"] < micro_batches:
        write(*(("F0",) if counts["F0"] < micro_batches else ()), "I0", "W0", "F1", "I1", "W1")
    # Cool-down: only gradients of inputs, which other ranks wait for; W's are postponed,
    for _ in range(rank):
        write("I0", "I1")
    for _ in range(after):
        write("I0", "W0")
    # and fill the bubble at the end.
    for stage in ("1", "0"):
        while counts[f"W{stage}"] < micro_batches:
            write(f"W{stage}")
    return writer.actions


def _dualpipev(schedule: Schedule, rank: int, micro_batches: int) -> list[Action]:
    """Return the actions of DualPipeV (DeepSeek's ``dualpipe/dualpipev.py``) for a rank with two stages: forward and
    backward of the two directions alternate. ``micro_batches`` must be at least twice the ranks, as for ``_zbv``.
    """
    writer, before, after = _Writer(schedule, rank), rank + 1, schedule.pipeline - rank - 1
    write, write_pending = writer.write, writer.write_pending
    # Steps and their names are those of DeepSeek's dualpipe/dualpipev.py. Step 1: nF0
    for _ in range(2 * after):
        write("F0")
    # Step 2: nF0F1
    for _ in range(before):
        write("F0", "F1")
    # Step 3: nI1W1F1 (zero bubble)
    for _ in range(after):
        write("I1")
        write_pending()
        write("F1")
    # Step 4 (main step): nF0B1F1B0
    for _ in range(micro_batches - 2 * schedule.pipeline + before):
        write("F0", "B1", "F1", "B0")
    # Step 5: nB1F1B0
    for _ in range(after):
        write("B1", "F1", "B0")
    # Step 6: nB1B0, the second half of them zero bubble: their W's are postponed and fill later gaps
    for place in range(2 * before):
        write(f"{'B' if place < before else 'I'}{1 - place % 2}")
    # Step 7: nWI0 (zero bubble)
    for _ in range(after):
        write_pending()
        write("I0")
    # Step 8: nW
    for _ in range(before):
        write_pending()
    return writer.actions
