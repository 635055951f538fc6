"""Snapshot memory and its writer: snapshots are kept, and the step of a rollback is never lost, kills included."""

import errno
import json
import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.shards import shards_of
from checkpoint.worlds import State, blank_shards, same_bits, states
from forked_python import in_place_of_execution
from phalanx.checkpoint.format.errors import CorruptError, NoSuchStepError, StorageFullError
from phalanx.checkpoint.snapshot.segments import (
    Segment,
    SnapshotKey,
    SnapshotMemory,
    StoredSnapshot,
    decode_record,
)
from phalanx.checkpoint.snapshot.tier import SnapshotTier, restore_from_holders
from phalanx.checkpoint.snapshot.writer import SnapshotWriter, TakenSnapshot

RUN = "run"


@pytest.fixture
def memory() -> Iterator[SnapshotMemory]:
    with closing(SnapshotMemory(RUN, 1)) as made:
        yield made


def attached(memory: SnapshotMemory) -> tuple[Segment, ...]:
    """Worker 0's segments as another process sees them: descriptors and mappings of its own."""
    return tuple(Segment(os.dup(segment.descriptor)) for segment in memory.worker_segments(0))


def writer_for(memory: SnapshotMemory, resumed_step: int = -1) -> SnapshotWriter:
    writer = SnapshotWriter(attached(memory), RUN, block_bytes=4096)
    writer.bind(1, 2, 0, resumed_step)
    return writer


def state_of(step: int) -> State:
    return {"w": torch.full((1000,), float(step)), "empty": torch.empty(0, 3)}


def take(writer: SnapshotWriter, step: int) -> TakenSnapshot:
    taken = writer.take(step, shards_of(state_of(step)), {"step": step})
    writer.wait()
    return taken


def held_steps(memory: SnapshotMemory) -> list[int]:
    return [holding.key.step for holding in memory.holdings()]


@settings(max_examples=40, deadline=None)
@given(state=states(), step=st.integers(0, 1 << 40))
def test_what_is_restored_from_own_memory_is_what_was_taken(state: State, step: int) -> None:
    with closing(SnapshotMemory(RUN, 1)) as memory, closing(writer_for(memory)) as writer:
        writer.take(step, shards_of(state), {"tokens": 5})
        writer.wait()
        shards = blank_shards([shard.box for shard in shards_of(state)])
        tier = SnapshotTier(2, step, own=attached(memory))
        assert restore_from_holders(tier, step, shards, rank=0) == {"tokens": 5}
        assert all(same_bits(shard.tensor, state[shard.box.name]) for shard in shards)


def test_a_snapshot_has_its_owner_and_its_cost(memory: SnapshotMemory) -> None:
    with closing(writer_for(memory)) as writer:
        taken = take(writer, 4)
    assert (taken.epoch, taken.key) == (1, SnapshotKey(2, 0, 4))
    assert memory.holdings() == (StoredSnapshot(taken.key, "own", taken.nbytes, taken.epoch),)
    assert taken.waited_s >= 0 < taken.copied_s


def test_the_two_newest_snapshots_are_held(memory: SnapshotMemory) -> None:
    with closing(writer_for(memory)) as writer:
        for step in range(5):
            take(writer, step)
            assert held_steps(memory) == list(range(max(0, step - 1), step + 1))


def test_while_a_snapshot_is_written_the_one_before_is_whole(memory: SnapshotMemory) -> None:
    with closing(writer_for(memory)) as writer:
        taken = take(writer, 1)
    spare = attached(memory)[1]
    spare.begin(taken.nbytes)[:] = 255
    assert held_steps(memory) == [1]


def test_a_snapshot_that_is_reported_as_complete_is_in_memory(memory: SnapshotMemory) -> None:
    seen: list[list[int]] = []
    writer = SnapshotWriter(attached(memory), RUN, on_complete=lambda _: seen.append(held_steps(memory)))
    writer.bind(1, 1, 0)
    take(writer, 3)
    writer.close()
    assert seen == [[3]]


def test_after_a_rollback_the_step_gone_back_to_is_kept_and_newer_ones_are_forgotten(
    memory: SnapshotMemory,
) -> None:
    with closing(writer_for(memory)) as writer:
        for step in (10, 11):
            take(writer, step)
        writer.bind(2, 2, 0, resumed_step=10)
        assert held_steps(memory) == [10]
        take(writer, 11)
        assert held_steps(memory) == [10, 11]


def test_a_restarted_worker_keeps_the_step_that_it_resumes_from(memory: SnapshotMemory) -> None:
    with closing(writer_for(memory)) as writer:
        for step in (10, 11):
            take(writer, step)
    with closing(writer_for(memory, resumed_step=11)) as writer:
        take(writer, 12)
    assert held_steps(memory) == [11, 12]


def test_a_snapshot_that_did_not_become_complete_costs_only_itself(memory: SnapshotMemory) -> None:
    with closing(writer_for(memory)) as writer:
        take(writer, 1)
        writer.take(2, shards_of(state_of(2)), {"not JSON": object()})
        with pytest.raises(TypeError):
            writer.wait()
        assert held_steps(memory) == [1]
        take(writer, 3)
    assert held_steps(memory) == [1, 3]


def test_the_error_of_a_snapshot_that_a_rollback_overtakes_is_logged(
    memory: SnapshotMemory, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(writer_for(memory)) as writer:
        take(writer, 1)
        writer.take(2, shards_of(state_of(2)), {"not JSON": object()})
        writer.bind(2, 2, 0, resumed_step=1)
    assert "the snapshot of step 2 is not complete: Object of type object" in caplog.text


def test_a_record_that_finds_no_room_costs_only_its_snapshot(memory: SnapshotMemory) -> None:
    with closing(writer_for(memory)) as writer:
        taken = take(writer, 1)
    spare = attached(memory)[1]
    spare.begin(taken.nbytes)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (spare.capacity_bytes, limits[1]))
    try:
        with pytest.raises(StorageFullError, match="more memory"):
            spare.complete(taken.nbytes, bytes(spare.capacity_bytes))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert held_steps(memory) == [1]


def test_a_larger_state_than_before_finds_room(memory: SnapshotMemory) -> None:
    with closing(writer_for(memory)) as writer:
        take(writer, 1)
        large = {"w": torch.randn(3_000_000)}
        writer.take(2, shards_of(large), {})
        writer.wait()
    assert held_steps(memory) == [1, 2]
    shards = blank_shards([shard.box for shard in shards_of(large)])
    restore_from_holders(SnapshotTier(2, 2, own=memory.worker_segments(0)), 2, shards, rank=0)
    assert same_bits(shards[0].tensor, large["w"])


def test_a_snapshot_for_which_the_machine_has_no_memory_is_refused_before_anything_is_overwritten(
    memory: SnapshotMemory,
) -> None:
    with closing(writer_for(memory)) as writer:
        for step in (1, 2):
            take(writer, step)
    full = [Segment(os.dup(segment.descriptor), lambda: 1_000_000) for segment in memory.worker_segments(0)]
    with closing(SnapshotWriter(full, RUN)) as writer:
        writer.bind(2, 2, 0, resumed_step=2)
        take(writer, 3)  # in memory that it has already
        with pytest.raises(StorageFullError, match="1,000,000 are free"):
            writer.take(4, shards_of({"w": torch.zeros(3_000_000)}), {})
    assert held_steps(memory) == [2, 3]


def test_preparing_takes_nothing_from_what_is_held(memory: SnapshotMemory) -> None:
    with closing(writer_for(memory)) as writer:
        take(writer, 1)
        writer.prepare(shards_of({"w": torch.zeros(3_000_000)}))
    assert held_steps(memory) == [1]


def test_snapshots_are_taken_only_by_somebody() -> None:
    with closing(SnapshotMemory(RUN, 1)) as memory, closing(SnapshotWriter(attached(memory), RUN)) as writer:
        shards = shards_of(state_of(1))
        with pytest.raises(RuntimeError, match="bind"):
            writer.take(1, shards, {})


def test_segments_have_no_name_on_any_file_system_so_that_they_go_with_their_processes(
    memory: SnapshotMemory,
) -> None:
    link = os.readlink(f"/proc/self/fd/{memory.worker_segments(0)[0].descriptor}")
    assert link.startswith("/memfd:")
    assert link.endswith("(deleted)")


def test_forgetting_what_is_newer_leaves_what_is_not(memory: SnapshotMemory) -> None:
    with closing(writer_for(memory)) as writer:
        for step in (4, 5):
            take(writer, step)
    memory.discard_after(4)
    assert held_steps(memory) == [4]
    with pytest.raises(NoSuchStepError), memory.reading(SnapshotKey(2, 0, 5)):
        pass


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_record_with_any_byte_changed_is_refused(data: st.DataObject) -> None:
    with closing(SnapshotMemory(RUN, 1)) as memory, closing(writer_for(memory)) as writer:
        take(writer, 1)
        record = memory.worker_segments(0)[0].record()
    assert record is not None
    damaged = bytearray(record)
    damaged[data.draw(st.integers(0, len(record) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptError, match="node-7"):
        decode_record(bytes(damaged), "node-7")
    with pytest.raises(CorruptError, match="node-7"):
        decode_record(record[: data.draw(st.integers(0, len(record) - 1))], "node-7")


def receive(memory: SnapshotMemory, record: bytes, key: SnapshotKey, previous: int, nbytes: int) -> None:
    with memory.receiving(key, previous, nbytes) as segment:
        segment.begin(nbytes)
        segment.complete(nbytes, record)


def records(steps: range) -> dict[int, tuple[bytes, int]]:
    """Each step's record, and how many bytes its image has."""
    by_step = {}
    with closing(SnapshotMemory(RUN, 1)) as memory, closing(writer_for(memory)) as writer:
        for step in steps:
            taken = take(writer, step)
            with memory.reading(taken.key) as (segment, _):
                record = segment.record()
            assert record is not None
            by_step[step] = record, taken.nbytes
    return by_step


def test_a_buddys_copies_take_two_segments_and_the_step_before_is_always_there() -> None:
    with closing(SnapshotMemory(RUN, 0)) as memory:
        for step, (record, nbytes) in records(range(6)).items():
            with memory.receiving(SnapshotKey(2, 0, step), step - 1, nbytes) as segment:
                segment.begin(nbytes)
                assert step == 0 or step - 1 in held_steps(memory)
                segment.complete(nbytes, record)
        assert held_steps(memory) == [4, 5]
        assert [holding.kind for holding in memory.holdings()] == ["buddy", "buddy"]


def test_what_is_being_read_is_not_overwritten() -> None:
    made = records(range(4))
    with closing(SnapshotMemory(RUN, 0)) as memory:
        for step in (0, 1):
            receive(memory, made[step][0], SnapshotKey(2, 0, step), step - 1, made[step][1])
        with memory.reading(SnapshotKey(2, 0, 0)):
            for step in (2, 3):
                receive(memory, made[step][0], SnapshotKey(2, 0, step), step - 1, made[step][1])
            assert held_steps(memory) == [0, 2, 3]


def test_buddies_take_no_more_than_is_free() -> None:
    made = records(range(1))
    with closing(SnapshotMemory(RUN, 0, free_bytes=lambda: made[0][1] - 1)) as memory:
        with pytest.raises(StorageFullError, match="step 0 of rank 0 of 2"):
            receive(memory, made[0][0], SnapshotKey(2, 0, 0), -1, made[0][1])
        assert memory.holdings() == ()


@pytest.mark.parametrize("too_many", [1 << 47, 1 << 62, 1 << 70])
def test_a_segment_that_cannot_be_mapped_costs_nothing_that_is_held(too_many: int) -> None:
    (record, nbytes) = records(range(1))[0]
    with closing(SnapshotMemory(RUN, 0, free_bytes=lambda: 1 << 90)) as memory:
        key = SnapshotKey(2, 0, 0)
        receive(memory, record, key, -1, nbytes)
        for step in (1, 2):
            with (
                pytest.raises(StorageFullError, match="more memory"),
                memory.receiving(SnapshotKey(2, 0, step), 0, too_many) as segment,
            ):
                segment.begin(too_many)
        assert held_steps(memory) == [0]
        assert memory.holds(key)
        memory.discard_after(-1)
        assert held_steps(memory) == []


def test_what_a_worker_has_grown_is_known_and_forgotten_though_the_agent_cannot_map_it(
    memory: SnapshotMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(writer_for(memory)) as writer:
        take(writer, 3)
    grown = max(memory.worker_segments(0), key=lambda segment: segment.capacity_bytes)
    monkeypatch.setattr(mmap, "mmap", unmappable)
    with pytest.raises(OSError, match="Cannot allocate"):
        grown.image(1)
    assert held_steps(memory) == [3]
    memory.discard_after(2)
    assert held_steps(memory) == []


def unmappable(*_: object) -> NoReturn:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def test_a_writer_killed_at_any_moment_leaves_a_whole_snapshot_and_takes_none_back() -> None:
    program = Path(__file__).with_name("snapshot_crash_program.py")
    root = Path(__file__).parents[3]
    with in_place_of_execution():
        done = subprocess.run(
            [sys.executable, str(program), "7", "12"],
            env={**os.environ, "PYTHONPATH": f"{root / 'src'}:{root / 'tests'}"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    trials = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(trials) == 12
    for trial in trials:
        assert 1 <= len(trial["steps"]) <= 2
        assert max(trial["steps"]) > trial["before"]
    # Some kills came while a snapshot was being written: then one whole snapshot is left, not two.
    assert any(len(trial["steps"]) == 1 for trial in trials[1:])
