"""Copies of checkpoints in a store, made in the background by all ranks: whole, kept as asked, and never in training's way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoint.worlds import box_of, save_by_all, save_state, shards_from
from phalanx.checkpoint.committed.retention import Retention
from phalanx.checkpoint.committed.verify import verify_tier
from phalanx.checkpoint.format.errors import AbandonedError, StorageError
from phalanx.checkpoint.save.mirror import CopyOutcome, Mirror
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.object_tier import ObjectTier
from phalanx.store.errors import UnavailableError
from store.memory_store import MemoryStore

RANKS = 3


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def disk(tmp_path: Path) -> DiskTier:
    return DiskTier(tmp_path)


def save(disk: DiskTier, step: int) -> None:
    """A checkpoint of three ranks, a third of one tensor each."""
    state = {"model/w": torch.full((6, 4), float(step))}
    box = box_of("model/w", state["model/w"])
    save_by_all(disk, step, [shards_from(state, [box.rows(2 * rank, 2 * rank + 2)]) for rank in range(RANKS)])


def mirrors(
    disk: DiskTier, store: MemoryStore, *, attempt: int = 1, keep: int = 9, timeout_s: float = 60
) -> list[Mirror]:
    return [
        Mirror(disk, ObjectTier(store), rank, RANKS, attempt, Retention(keep), timeout_s=timeout_s)
        for rank in range(RANKS)
    ]


def copied(all_ranks: list[Mirror], *steps: int) -> list[CopyOutcome]:
    """Offers the steps on every rank, and returns what rank 0 says of them at the end."""
    for mirror in all_ranks:
        for step in steps:
            mirror.offer(step)
    for mirror in all_ranks:
        mirror.close()
    return all_ranks[0].poll()


def failing(store: MemoryStore, when: Callable[[str, str], bool]) -> None:
    """Has the store's operations fail for which ``when(operation, key)`` is true."""

    def check(operation: str, key: str) -> None:
        if when(operation, key):
            raise UnavailableError(f"{operation} of {key}: no success", key, operation)

    store.before = check


def test_all_ranks_together_copy_what_is_committed(disk: DiskTier, store: MemoryStore) -> None:
    for step in (2, 4):
        save(disk, step)
    outcomes = copied(mirrors(disk, store), 2, 4)
    assert [(outcome.step, outcome.error) for outcome in outcomes] == [(2, None), (4, None)]
    tier = ObjectTier(store)
    assert tier.steps() == [2, 4]
    assert verify_tier(tier, "store") == []


def test_each_rank_brings_its_own_share(disk: DiskTier, store: MemoryStore) -> None:
    save(disk, 2)
    all_ranks = mirrors(disk, store)
    copied(all_ranks, 2)
    images = [info.nbytes for info in store.list() if info.key.endswith(".safetensors")]
    assert len(images) == RANKS
    for mirror in all_ranks[1:]:
        assert [outcome.nbytes for outcome in mirror.poll()] == [images[0]]


def test_a_step_that_is_in_the_store_is_not_copied_again(disk: DiskTier, store: MemoryStore) -> None:
    save(disk, 2)
    copied(mirrors(disk, store), 2)
    before = dict(store.objects)
    assert copied(mirrors(disk, store, attempt=2), 2) == []
    assert store.objects == before


def test_what_the_store_keeps_is_its_own_rule(disk: DiskTier, store: MemoryStore) -> None:
    for step in (2, 4, 6):
        save(disk, step)
    copied(mirrors(disk, store, keep=2), 2, 4, 6)
    assert ObjectTier(store).steps() == [4, 6]
    assert disk.steps() == [2, 4, 6]


def test_a_copy_that_failed_is_reported_and_made_with_the_next_step(
    disk: DiskTier, store: MemoryStore
) -> None:
    save(disk, 2)
    save(disk, 4)
    down = True
    failing(store, lambda operation, _key: down and operation == "put")
    all_ranks = mirrors(disk, store, timeout_s=0.5)
    for mirror in all_ranks:
        mirror.offer(2)
        mirror.wait()
    (failed,) = all_ranks[0].poll()
    assert failed.step == 2
    assert isinstance(failed.error, StorageError)
    assert ObjectTier(MemoryStore(store.objects)).steps() == []
    down = False
    for mirror in all_ranks[1:]:  # rank 0 waits only half a second for the others
        mirror.offer(4)
        mirror.wait()
    assert [(outcome.step, outcome.error) for outcome in copied(all_ranks[:1], 4)] == [(2, None), (4, None)]
    for mirror in all_ranks:
        mirror.close()
    assert verify_tier(ObjectTier(store), "store") == []


def test_a_store_that_is_down_is_waited_for_once_and_not_for_each_step_that_is_due(
    disk: DiskTier, store: MemoryStore
) -> None:
    asked: list[str] = []

    def down(operation: str, key: str) -> bool:
        asked.append(operation)
        return key == "committed"

    failing(store, down)
    mirror = Mirror(disk, ObjectTier(store), 0, 1, 1, Retention(9))
    for step in (2, 4):
        save_state(disk, step, {"w": torch.zeros(2)})
        mirror.offer(step)
        mirror.wait()
        asked.clear()
    save_state(disk, 6, {"w": torch.zeros(2)})
    outcomes = copied([mirror], 6)
    assert len(asked) == 1
    assert [outcome.step for outcome in outcomes] == [2, 2, 4, 2, 4, 6]
    assert all(isinstance(outcome.error, StorageError) for outcome in outcomes)


def test_a_rank_that_brings_nothing_is_waited_for_and_its_files_are_named(
    disk: DiskTier, store: MemoryStore
) -> None:
    save(disk, 2)
    (outcome,) = copied(mirrors(disk, store, timeout_s=0.1)[:1], 2)
    assert isinstance(outcome.error, AbandonedError)
    assert "rank-00001.safetensors" in str(outcome.error)


def test_a_step_that_was_deleted_on_disk_meanwhile_is_given_up_with_the_remedy(
    disk: DiskTier, store: MemoryStore
) -> None:
    save(disk, 2)

    def delete_it(operation: str, _key: str) -> None:
        if operation == "put" and disk.has(2):
            disk.delete(2)

    store.before = delete_it
    all_ranks = mirrors(disk, store, timeout_s=0.1)
    (outcome,) = copied(all_ranks[:1], 2)
    for mirror in all_ranks[1:]:
        mirror.close()
    assert "checkpoint.keep_last" in str(outcome.error)
    assert ObjectTier(store).steps() == []


def test_a_step_that_failed_on_disk_is_not_waited_for_by_rank_0(disk: DiskTier, store: MemoryStore) -> None:
    (outcome,) = copied(mirrors(disk, store, timeout_s=3600)[:1], 2)
    assert "not committed on disk" in str(outcome.error)


def test_a_store_that_cannot_delete_is_reported_and_the_copy_counts(
    disk: DiskTier, store: MemoryStore
) -> None:
    for step in (2, 4):
        save_state(disk, step, {"w": torch.zeros(2)})
    failing(store, lambda operation, _key: operation == "delete")
    mirror = Mirror(disk, ObjectTier(store), 0, 1, 1, Retention(1))
    outcomes = copied([mirror], 2, 4)
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert isinstance(outcomes[1].retention_error, StorageError)


def test_a_cancelled_mirror_ends_at_once_and_commits_nothing(disk: DiskTier, store: MemoryStore) -> None:
    save(disk, 2)
    mirror = Mirror(disk, ObjectTier(store), 0, RANKS, 1, Retention(1), mib_s=1e-6, timeout_s=3600)
    mirror.offer(2)
    mirror.cancel()
    mirror.close()
    (outcome,) = mirror.poll()
    assert isinstance(outcome.error, AbandonedError)
    assert ObjectTier(store).steps() == []
