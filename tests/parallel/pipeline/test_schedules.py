"""Schedules are PyTorch's, made by each rank alone; they end, keep the order of sums, and idle as long as in their papers."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch.distributed.pipelining.schedules as torch_schedules
from hypothesis import given
from hypothesis import strategies as st

from phalanx.parallel.pipeline_schedules import (
    Action,
    PassKind,
    Schedule,
    ScheduleName,
    StageMessage,
    bubble,
)

UNITS: dict[PassKind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Schedule, int]:
    """A schedule and a number of micro-batches for which its list has no gaps."""
    schedule = draw(pipelines())
    return schedule, schedule.padded_count(draw(st.integers(1, 24)))


@st.composite
def pipelines(draw: st.DrawFn) -> Schedule:
    """Any schedule."""
    name: ScheduleName = draw(st.sampled_from(("gpipe", "1f1b", "interleaved", "zbv", "dualpipev")))
    per_rank = {"gpipe": 1, "1f1b": 1, "interleaved": draw(st.integers(2, 4))}.get(name, 2)
    return Schedule(name, draw(st.integers(1, 6)), per_rank)


SLOTS = st.tuples(pipelines(), st.integers(1, 6), st.integers(1, 6))
"""A schedule, a number of slots, and micro-batches of each slot."""


def torchs_actions(schedule: Schedule, rank: int, micro_batches: int) -> list[Action]:
    """The list that PyTorch's class of the schedule makes for one rank, without making it for all."""
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    of_torch = {
        "gpipe": torch_schedules.ScheduleGPipe,
        "interleaved": torch_schedules.ScheduleInterleaved1F1B,
        "zbv": torch_schedules.ScheduleZBVZeroBubble,
        "dualpipev": torch_schedules.ScheduleDualPipeV,
    }[schedule.name]
    maker = object.__new__(of_torch)
    maker._n_microbatches, maker._num_stages = micro_batches, schedule.stages
    maker.rank, maker.num_stages, maker.n_local_stages = rank, schedule.stages, schedule.per_rank
    maker.pp_group_size = maker.microbatches_per_round = schedule.pipeline
    if schedule.per_rank == 1:
        made = maker._get_pipeline_order()[rank]
    else:
        made = maker._calculate_single_rank_operations(rank)
    single = (part for action in made if action is not None for part in (action.sub_actions or (action,)))
    return [
        Action(kinds[action.computation_type.name], action.stage_index, action.microbatch_index)
        for action in single
        if action.computation_type.name in kinds
    ]


# PyTorch has a loop for 1F1B, and no true list.
@given(schedules().filter(lambda drawn: drawn[0].name != "1f1b"))
def test_a_ranks_actions_are_those_of_torch(drawn: tuple[Schedule, int]) -> None:
    schedule, micro_batches = drawn
    for rank in range(schedule.pipeline):
        assert schedule.actions(rank, micro_batches) == torchs_actions(schedule, rank, micro_batches)


@given(SLOTS)
def test_each_micro_batch_goes_once_forward_and_once_back_through_each_stage(
    drawn: tuple[Schedule, int, int],
) -> None:
    schedule, slots, per_slot = drawn
    seen: dict[tuple[int, int], str] = defaultdict(str)
    for rank in range(schedule.pipeline):
        for action in schedule.actions(rank, slots * per_slot, slots):
            seen[action.stage, action.micro_batch] += action.kind
    assert seen.keys() == {(s, m) for s in range(schedule.stages) for m in range(slots * per_slot)}
    assert set(seen.values()) <= {"FB", "FIW"}


@given(SLOTS)
def test_weight_gradients_come_in_the_order_of_micro_batches(drawn: tuple[Schedule, int, int]) -> None:
    schedule, slots, per_slot = drawn
    for rank in range(schedule.pipeline):
        actions = schedule.actions(rank, slots * per_slot, slots)
        for stage in schedule.stages_of(rank):
            for kinds in ("BI", "BW"):
                order = [a.micro_batch for a in actions if a.stage == stage and a.kind in kinds]
                assert order == list(range(slots * per_slot))


@given(SLOTS)
def test_a_stage_completes_a_slots_gradient_before_it_computes_any_of_the_next(
    drawn: tuple[Schedule, int, int],
) -> None:
    schedule, slots, per_slot = drawn
    for rank in range(schedule.pipeline):
        actions = schedule.actions(rank, slots * per_slot, slots)
        for stage in schedule.stages_of(rank):
            order = [a.micro_batch // per_slot for a in actions if a.stage == stage and a.kind in "BIW"]
            assert order == sorted(order)


@given(SLOTS)
def test_slots_that_follow_each_other_end_and_take_no_longer_than_one_after_the_other(
    drawn: tuple[Schedule, int, int],
) -> None:
    schedule, slots, per_slot = drawn
    together, _ = timeline(schedule, slots * per_slot, slots)
    alone, _ = timeline(schedule, per_slot)
    assert together <= slots * alone + 1e-9
    if schedule.name == "gpipe":
        assert together == pytest.approx(slots * alone)


@given(SLOTS)
def test_every_message_that_a_rank_needs_is_sent_to_it_once_over_a_link(
    drawn: tuple[Schedule, int, int],
) -> None:
    schedule, slots, per_slot = drawn
    lists = [schedule.actions(rank, slots * per_slot, slots) for rank in range(schedule.pipeline)]
    for rank, actions in enumerate(lists):
        sources = [source for source, target in schedule.links() if target == rank]
        sent = [message for source in sources for message in schedule.messages_to(lists[source], rank)]
        needed = [message for action in actions if (message := need_of(schedule, action)) is not None]
        from_others = [m for m in needed if schedule.rank_of(m.stage + (-1 if m.kind == "F" else 1)) != rank]
        assert sorted(sent) == sorted(from_others)


@given(SLOTS)
def test_a_rank_holds_no_more_than_the_schedule_holds_of_one_long_slot(
    drawn: tuple[Schedule, int, int],
) -> None:
    schedule, slots, per_slot = drawn
    long = per_slot if schedule.name == "gpipe" else 8 * schedule.pipeline
    for rank in range(schedule.pipeline):
        flowing = most_held(schedule.actions(rank, slots * per_slot, slots))
        assert flowing <= most_held(schedule.actions(rank, long))


@given(schedules())
def test_the_bubble_is_that_of_following_all_dependencies(drawn: tuple[Schedule, int]) -> None:
    schedule, micro_batches = drawn
    length, busy = timeline(schedule, micro_batches)
    idle = 1 - sum(busy) / (schedule.pipeline * length)
    closed = bubble(schedule.name, schedule.pipeline, micro_batches, schedule.per_rank)
    assert closed == pytest.approx(idle, abs=1e-9)


@given(st.integers(1, 6), st.integers(1, 12))
def test_1f1b_holds_no_more_micro_batches_than_stages_follow(pipeline: int, micro_batches: int) -> None:
    for rank in range(pipeline):
        in_flight = [0]
        for action in Schedule("1f1b", pipeline, 1).actions(rank, micro_batches):
            in_flight.append(in_flight[-1] + (1 if action.kind == "F" else -1))
        assert max(in_flight) == min(micro_batches, pipeline - rank)


@pytest.mark.parametrize("name", ["zbv", "dualpipev"])
def test_v_schedules_hold_the_first_and_the_last_stage_on_one_rank(name: ScheduleName) -> None:
    assert [Schedule(name, 3, 2).stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


def test_interleaved_stages_are_dealt_round_by_round() -> None:
    assert [Schedule("interleaved", 2, 3).stages_of(rank) for rank in range(2)] == [(0, 2, 4), (1, 3, 5)]


def need_of(schedule: Schedule, action: Action) -> StageMessage | None:
    """The message that an action waits for."""
    if action.kind == "F" and action.stage > 0:
        return StageMessage("F", action.stage, action.micro_batch)
    if action.kind in "BI" and action.stage < schedule.stages - 1:
        return StageMessage("B", action.stage, action.micro_batch)
    return None


def most_held(actions: list[Action]) -> int:
    """The most stages' activations that a rank holds at once."""
    in_flight = [0]
    for action in actions:
        in_flight.append(in_flight[-1] + {"F": 1, "B": -1, "W": -1}.get(action.kind, 0))
    return max(in_flight)


def timeline(schedule: Schedule, micro_batches: int, slots: int = 1) -> tuple[float, list[float]]:
    """When the last rank ends, and how long each was busy, if each begins as soon as it can; fails on a deadlock."""
    waiting = {rank: schedule.actions(rank, micro_batches, slots)[::-1] for rank in range(schedule.pipeline)}
    now, busy = [0.0] * schedule.pipeline, [0.0] * schedule.pipeline
    ready: dict[StageMessage | None, float] = {None: 0.0}
    while any(waiting.values()):
        able = [r for r, actions in waiting.items() if actions and need_of(schedule, actions[-1]) in ready]
        assert able, "deadlock"
        for rank in able:
            action = waiting[rank].pop()
            now[rank] = max(now[rank], ready[need_of(schedule, action)]) + UNITS[action.kind]
            busy[rank] += UNITS[action.kind]
            ready.setdefault(schedule.result(action), now[rank])
    return max(now), busy
