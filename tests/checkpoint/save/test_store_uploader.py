"""Copies of committed checkpoints in a store: by shares, taken over from a lost process, and never of condemned steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.worlds import box_of, save_by_all, shards_from
from phalanx.checkpoint.committed.copying import RateLimit, verify_tier
from phalanx.checkpoint.save.store_uploader import (
    Condemned,
    CopyRules,
    CopyShare,
    RankCopies,
    StoreUploader,
    UploadTimes,
)
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.object_tier import ObjectTier
from phalanx.checkpoint.tiers.store_standing import store_standing
from phalanx.fleet.control.fleet_file import distrusted_after, forget_distrust, record_distrust
from phalanx.observe.event_log import EventLog, read_events
from phalanx.observe.events import CheckpointCopied, CheckpointFailed, Message
from phalanx.run.directory.paths import CHECKPOINT_INDEX, RunDirectory
from phalanx.run.spec import CheckpointSpec, RunSpec, TrainSpec
from phalanx.store.store import UnavailableError
from store.memory_store import MemoryStore

RANKS = 4
PATIENCE_S = 200.0
TIMES = UploadTimes(look_s=0.02, again_s=0.1, others_s=1000.0, slice_s=0.1, others_at_the_end_s=0.0)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "fleet").mkdir()
    return RunDirectory(tmp_path)


def save(
    directory: RunDirectory,
    step: int,
    value: float | None = None,
    ranks: int = RANKS,
    extra: dict[str, object] | None = None,
) -> None:
    """A checkpoint of ``ranks`` ranks, each with its part of one tensor."""
    state = {"model/w": torch.full((12, 4), float(step if value is None else value))}
    box, each = box_of("model/w", state["model/w"]), 12 // ranks
    parts = [shards_from(state, [box.rows(each * rank, each * (rank + 1))]) for rank in range(ranks)]
    save_by_all(DiskTier(directory.checkpoints), step, parts, extra=extra)


@contextmanager
def uploaders(
    directory: RunDirectory,
    store: MemoryStore,
    *shares: tuple[int, ...],
    times: UploadTimes = TIMES,
    limit: Callable[[float, Callable[[], bool]], RateLimit] = RateLimit,
    **fields: Any,
) -> Iterator[list[StoreUploader]]:
    """The agents of a fleet, one for each of the shares of all ranks."""
    checkpoint = CheckpointSpec(store=store.url, **{"store_keep_last": 9, **fields})
    spec = RunSpec(checkpoint=checkpoint, train=TrainSpec(steps=1000))
    condemned = Condemned(partial(distrusted_after, directory), partial(forget_distrust, directory))
    disk, log = DiskTier(directory.checkpoints), EventLog(directory.events, 1)
    made = [
        StoreUploader(
            disk,
            store,
            CopyRules.of(spec),
            "fleet1",
            log.append,
            lambda _line: None,
            times,
            condemned,
            limit,
        )
        for _ in shares
    ]
    for uploader, ranks in zip(made, shares, strict=True):
        uploader.deal(CopyShare(ranks, RANKS))
    try:
        yield made
    finally:
        for uploader in made:
            uploader.cancel()


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def stored(store: MemoryStore) -> list[int]:
    return ObjectTier(store).steps()


def events(directory: RunDirectory, kind: type) -> list[Any]:
    if not directory.events.exists():
        return []
    return [event.body for event in read_events(directory.events) if isinstance(event.body, kind)]


def test_agents_together_copy_what_is_saved_while_they_run(directory: RunDirectory) -> None:
    store = MemoryStore()
    with uploaders(directory, store, (0, 1), (2, 3), ()):
        for step in (2, 4):
            save(directory, step)
            until(lambda step=step: step in stored(store))
        until(lambda: [copied.step for copied in events(directory, CheckpointCopied)] == [2, 4])
    assert verify_tier(ObjectTier(store), "store") == []


def test_each_agent_writes_the_files_of_its_own_ranks_alone(directory: RunDirectory) -> None:
    store = MemoryStore()
    with uploaders(directory, store, (1, 3)) as (alone,):
        save(directory, 2)
        alone.settle()
    images = sorted(key.rpartition("/")[2] for key in store.objects if key.endswith(".safetensors"))
    assert images == ["rank-00001.safetensors", "rank-00003.safetensors"]
    assert stored(store) == []


def test_survivors_finish_what_a_lost_node_has_begun(directory: RunDirectory) -> None:
    store = MemoryStore()
    save(directory, 2)
    with uploaders(directory, store, (0, 1)) as (lost,):
        until(lambda: any(key.endswith("rank-00001.safetensors") for key in store.objects))
        lost.cancel()
    assert stored(store) == []
    written: list[str] = []
    store.before = lambda operation, key: written.append(key) if operation == "put" else None
    with uploaders(directory, store, (2, 3)) as (survivor,):
        survivor.settle()
        survivor.deal(CopyShare((0, 1, 2, 3), RANKS))
        until(lambda: stored(store) == [2])
    assert verify_tier(ObjectTier(store), "store") == []
    images = [key for key in written if key.endswith(".safetensors")]
    assert len(images) == 2, "what the lost node had brought is not written again"


def test_at_the_end_the_agent_that_commits_brings_what_a_lost_node_has_not(directory: RunDirectory) -> None:
    store = MemoryStore()
    save(directory, 2)
    with uploaders(directory, store, (0,)) as (last,):
        last.settle()
        assert last.missing() == ()
    assert stored(store) == [2]
    assert verify_tier(ObjectTier(store), "store") == []


def test_two_agents_that_both_take_rank_0_for_theirs_make_one_commit(directory: RunDirectory) -> None:
    store = MemoryStore()
    created: list[str] = []
    store.before = lambda operation, key: created.append(key) if operation == "create" else None
    save(directory, 2)
    with uploaders(directory, store, (0, 1), (0, 1), (2, 3)) as agents:
        for agent in agents:
            agent.settle()
    assert verify_tier(ObjectTier(store), "store") == []
    assert [key for key in store.objects if key.startswith("committed/")] == ["committed/00000002.json"]


def test_a_store_that_fails_is_reported_once_and_tried_again(directory: RunDirectory) -> None:
    store = MemoryStore()
    down = [True]

    def check(operation: str, key: str) -> None:
        if down[0] and operation == "put":
            raise UnavailableError(f"{operation}: no success", key, operation)

    store.before = check
    save(directory, 2)
    spec = RunSpec(checkpoint=CheckpointSpec(store=store.url))
    with uploaders(directory, store, (0, 1, 2, 3)) as (agent,):
        for _ in range(2):
            assert agent.settle()
            assert agent.missing() == (2,)
        assert [(failed.step, failed.reason) for failed in events(directory, CheckpointFailed)] == [
            (2, "put: no success")
        ]
        standing = store_standing(spec, directory)
        assert standing is not None
        assert (standing.newest, standing.behind, standing.error) == (None, (2,), "put: no success")
        down[0] = False
        until(lambda: stored(store) == [2])
        until(lambda: len(events(directory, CheckpointCopied)) == 1)
    assert str(store_standing(spec, directory)) == f"in {store.url}: step 2"


def test_an_existing_copy_is_kept_after_a_save_by_another_layout(directory: RunDirectory) -> None:
    store, disk = MemoryStore(), DiskTier(directory.checkpoints)
    save(directory, 2)
    with uploaders(directory, store, (0, 1, 2, 3)) as (agent,):
        agent.settle()
        before = ObjectTier(store).index_bytes(2)
        disk.delete(2)
        save(directory, 2, ranks=2)
        agent.settle()
    assert ObjectTier(store).index_bytes(2) == before != disk.index_bytes(2)


def test_copies_of_what_an_audit_has_condemned_are_set_aside_before_anything_is_copied(
    directory: RunDirectory,
) -> None:
    store, disk = MemoryStore(), DiskTier(directory.checkpoints)
    for step in (2, 4, 6):
        save(directory, step)
    with uploaders(directory, store, (0, 1), (2, 3)) as agents:
        for agent in agents:
            agent.settle()
        until(lambda: stored(store) == [2, 4, 6])
        disk.set_aside(6)
        disk.delete(4)  # had expired
        record_distrust(directory, 2)
        record_distrust(directory, 3)  # a later epoch, which distrusts fewer steps
        until(lambda: stored(store) == [2])
        until(lambda: distrusted_after(directory) is None)  # forgotten after the copies are set aside
        save(directory, 4, 9.0)
        until(lambda: stored(store) == [2, 4])
    assert ObjectTier(store).index_bytes(4) == disk.index_bytes(4)


def test_only_the_steps_that_the_run_file_names_are_copied_and_kept(directory: RunDirectory) -> None:
    store = MemoryStore()
    fields: dict[str, Any] = {"store_every_steps": 4, "store_keep_last": 1, "store_keep_every": 12}
    with uploaders(directory, store, (0, 1, 2, 3), **fields) as (agent,):
        for step in (4, 6, 12, 16, 17, 20, 1000):
            save(directory, step)
            agent.settle()
    assert stored(store) == [12, 1000]


def test_the_copy_before_a_spike_is_kept_as_the_checkpoint_on_disk_is(directory: RunDirectory) -> None:
    store = MemoryStore()
    with uploaders(directory, store, (0, 1, 2, 3), store_keep_last=1) as (agent,):
        for step, spikes in ((2, []), (4, []), (6, [[5, 5]]), (8, [[5, 5]]), (10, [[5, 5], [9, 9]])):
            save(directory, step, extra={"spikes": spikes})
            agent.settle()
    assert stored(store) == [4, 8, 10]


def test_a_step_that_was_deleted_before_it_was_copied_is_named(directory: RunDirectory) -> None:
    store = MemoryStore()
    save(directory, 2)
    with uploaders(directory, store, (0, 1)) as (agent,):
        until(lambda: any(key.endswith("rank-00001.safetensors") for key in store.objects))
        DiskTier(directory.checkpoints).delete(2)
        agent.deal(CopyShare((0,), RANKS))
        until(lambda: bool(events(directory, CheckpointFailed)))
    (failed,) = events(directory, CheckpointFailed)
    assert "deleted from disk before it was copied" in failed.reason


def test_a_step_that_is_deleted_while_it_is_copied_is_reported_once(directory: RunDirectory) -> None:
    store = MemoryStore()
    save(directory, 2)
    with uploaders(directory, store, (0, 1)) as (agent,):
        until(lambda: any(key.endswith("rank-00001.safetensors") for key in store.objects))
        DiskTier(directory.checkpoints).delete(2)
        agent.settle()
        agent.settle()
        assert [failed.step for failed in events(directory, CheckpointFailed)] == [2]


def test_a_step_whose_index_cannot_be_read_is_reported_with_the_cause(directory: RunDirectory) -> None:
    store = MemoryStore()
    save(directory, 2)
    index = DiskTier(directory.checkpoints).folder(2) / CHECKPOINT_INDEX
    index.unlink()
    index.mkdir()
    with uploaders(directory, store, (0, 1, 2, 3)) as (agent,):
        assert agent.settle()
    (failed,) = events(directory, CheckpointFailed)
    assert failed.step == 2
    assert "Is a directory" in failed.reason


class FakeTime:
    """A clock that advances only while a caller sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def test_a_node_sends_the_files_of_ranks_at_the_limit_of_its_run_file(directory: RunDirectory) -> None:
    store, time_that_passes = MemoryStore(), FakeTime()

    def limit(mib_s: float, cancelled: Callable[[], bool]) -> RateLimit:
        return RateLimit(mib_s, cancelled, time_that_passes.now, time_that_passes.sleep)

    save(directory, 2)
    images = DiskTier(directory.checkpoints).images(2)
    with uploaders(directory, store, (0, 1, 2, 3), limit=limit, store_mib_s=0.125) as (agent,):
        agent.settle()
    assert stored(store) == [2]
    sent_bytes = sum(image.nbytes for image in images)
    assert time_that_passes.now() == pytest.approx(sent_bytes / (1 << 17))


# --- ranks of a plain run ---------------------------------------------------------------------


@contextmanager
def rank_copies(
    directory: RunDirectory,
    store: MemoryStore,
    *ranks: int,
    attempt: int = 1,
    mib_s: float = 0.0,
    timeout_s: float = PATIENCE_S,
    keep_last: int = 9,
) -> Iterator[list[RankCopies]]:
    """The copies of some of all ranks."""
    checkpoint = CheckpointSpec(store=store.url, store_keep_last=keep_last, store_mib_s=mib_s)
    rules = CopyRules.of(RunSpec(checkpoint=checkpoint, train=TrainSpec(steps=1000)))
    disk, tag = DiskTier(directory.checkpoints), str(attempt)
    copies = [RankCopies(disk, store, rules, tag, CopyShare((rank,), RANKS), timeout_s) for rank in ranks]
    try:
        yield copies
    finally:
        for each in copies:
            each.cancel()


def settled(copies: list[RankCopies], *steps: int) -> list[Any]:
    """Expect the steps on every rank, and return the events of the first rank at the end."""
    for each in copies:
        for step in steps:
            each.expect(step)
    for each in reversed(copies):
        each.settle()
    return copies[0].collect()


def test_all_ranks_together_copy_what_is_committed(directory: RunDirectory) -> None:
    store = MemoryStore()
    with rank_copies(directory, store, *range(RANKS)) as copies:
        for step in (2, 4):
            save(directory, step)
        happened = settled(copies, 2, 4)
    assert [(type(event), event.step) for event in happened] == [(CheckpointCopied, 2), (CheckpointCopied, 4)]
    assert verify_tier(ObjectTier(store), "store") == []


def test_a_step_that_an_earlier_attempt_has_not_copied_is_copied_by_the_next_one(
    directory: RunDirectory,
) -> None:
    store = MemoryStore()
    save(directory, 2)
    with rank_copies(directory, store, *range(RANKS), attempt=2) as copies:
        settled(copies)
        before = dict(store.objects)
    assert stored(store) == [2]
    with rank_copies(directory, store, *range(RANKS), attempt=3) as copies:
        assert settled(copies, 2) == []
    assert store.objects == before


def test_a_step_that_rank_0_commits_later_is_copied_as_soon_as_it_is_on_disk(directory: RunDirectory) -> None:
    store = MemoryStore()
    with rank_copies(directory, store, *range(RANKS)) as copies:
        for each in copies:
            each.expect(2)
            each.settle()
        assert stored(store) == []
        save(directory, 2)
        until(lambda: stored(store) == [2])


def test_rank_0_copies_what_another_rank_has_not_copied_in_time(directory: RunDirectory) -> None:
    store = MemoryStore()
    save(directory, 2)
    with rank_copies(directory, store, 0, timeout_s=0.1) as copies:
        settled(copies, 2)
    assert verify_tier(ObjectTier(store), "store") == []


def test_a_store_that_is_down_is_waited_for_once_and_not_for_each_step_that_is_due(
    directory: RunDirectory,
) -> None:
    store, puts = MemoryStore(), list[str]()

    def check(operation: str, key: str) -> None:
        if operation == "put":
            puts.append(key)
            raise UnavailableError(f"{operation}: no success", key, operation)

    store.before = check
    for step in (2, 4, 6):
        save(directory, step)
    with rank_copies(directory, store, 0) as copies:
        settled(copies)
        puts.clear()
        settled(copies)
    assert len(puts) == 1


def test_a_store_that_cannot_delete_is_reported_and_the_copy_counts(directory: RunDirectory) -> None:
    store = MemoryStore()

    def check(operation: str, key: str) -> None:
        if operation == "delete":
            raise UnavailableError(f"{operation}: no success", key, operation)

    store.before = check
    with rank_copies(directory, store, *range(RANKS), keep_last=1) as copies:
        for step in (2, 4):
            save(directory, step)
            happened = settled(copies, step)
    assert [type(event) for event in happened] == [CheckpointCopied, Message]
    assert "could not be deleted" in happened[1].text
    assert stored(store) == [2, 4]


def test_cancelled_copies_end_at_once_and_commit_nothing(directory: RunDirectory) -> None:
    store = MemoryStore()
    save(directory, 2)
    with rank_copies(directory, store, 0, mib_s=1e-6) as (copies,):
        copies.expect(2)
        assert not copies.settle(0.05)
        copies.cancel()
        assert copies.settle()
    assert stored(store) == []


class FailingDisk(DiskTier):
    """A disk whose calls fail from the ``good``-th on, and are counted."""

    def __init__(self, root: Path, good: int) -> None:
        super().__init__(root)
        self.good, self.often = good, threading.Event()

    def steps(self) -> list[int]:
        self._fail()
        return super().steps()

    def has(self, step: int) -> bool:
        self._fail()
        return super().has(step)

    def _fail(self) -> None:
        self.good -= 1
        if self.good < -20:
            self.often.set()
        if self.good < 0:
            raise OSError("stale file handle")


@pytest.mark.parametrize("good", range(4))
def test_a_disk_that_fails_is_not_read_without_a_pause_and_holds_nobody_up(
    directory: RunDirectory, good: int
) -> None:
    disk = FailingDisk(directory.checkpoints, good)
    rules = CopyRules.of(RunSpec(train=TrainSpec(steps=1000)))
    times = replace(TIMES, look_s=PATIENCE_S)
    uploader = StoreUploader(disk, MemoryStore(), rules, "fleet1", lambda _: None, lambda _: None, times)
    uploader.deal(CopyShare((0,), 1))
    uploader.expect(2)
    assert uploader.settle(PATIENCE_S)
    assert uploader.settle(PATIENCE_S), "its thread lives on"
    assert not disk.often.wait(0.2)
    uploader.cancel()
