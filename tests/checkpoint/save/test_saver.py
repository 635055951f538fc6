"""Saving in the background: what a receipt and an outcome promise, with real threads and real files."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoint.memory_tier import MemoryTier
from checkpoint.shards import shards_of
from checkpoint.worlds import same_state
from phalanx.checkpoint.committed.copying import verify
from phalanx.checkpoint.committed.restore import restore
from phalanx.checkpoint.format.errors import AbandonedError, CheckpointError
from phalanx.checkpoint.format.image import Image
from phalanx.checkpoint.save.save_schedule import Retention
from phalanx.checkpoint.save.saver import AsyncSaver
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.tier import Draft, Tier, never


def state(value: float) -> dict[str, torch.Tensor]:
    return {f"model/w{i}": torch.full((100, 3), value + i) for i in range(5)}


class GatedTier(MemoryTier):
    """A tier whose writes wait until the gate is opened: a slow disk under the test's control."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def write(self, draft: Draft, rank: int, image: Image, *, cancelled: Callable[[], bool] = never) -> None:
        self.gate.wait()
        super().write(draft, rank, image, cancelled=cancelled)


class RefusingTier(DiskTier):
    """A disk tier on which every write fails with the same error."""

    def __init__(self, root: Path, error: Exception) -> None:
        super().__init__(root)
        self.error = error

    def write(self, draft: Draft, rank: int, image: Image, *, cancelled: Callable[[], bool] = never) -> None:
        del draft, rank, image, cancelled
        raise self.error


def loaded(tier: Tier, step: int) -> dict[str, torch.Tensor]:
    target = state(-1)
    restore(tier, step, shards_of(target))
    return target


def test_tensors_may_change_as_soon_as_save_returns() -> None:
    tier = GatedTier()
    saver = AsyncSaver(tier, 0, 1)
    live = state(1)
    saver.save(1, shards_of(live), {})
    for tensor in live.values():
        tensor.zero_()
    tier.gate.set()
    saver.close()
    assert same_state(loaded(tier, 1), state(1))


def test_with_one_buffer_a_save_waits_for_the_previous_one_and_reports_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = GatedTier()
    saver = AsyncSaver(tier, 0, 1, buffers=1)
    saver.save(1, shards_of(state(1)), {})
    waits_s: list[float] = []
    wait = threading.Condition.wait

    def open_the_gate_and_wait(condition: threading.Condition, timeout: float | None = None) -> bool:
        if threading.current_thread() is not threading.main_thread():
            return wait(condition, timeout)
        tier.gate.set()
        begin_s = time.perf_counter()
        try:
            return wait(condition, timeout)
        finally:
            waits_s.append(time.perf_counter() - begin_s)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Condition, "wait", open_the_gate_and_wait)
        receipt = saver.save(2, shards_of(state(2)), {})
    saver.close()
    assert receipt.waited_s > waits_s[0]
    assert same_state(loaded(tier, 1), state(1))
    assert same_state(loaded(tier, 2), state(2))


def test_with_two_buffers_a_save_does_not_wait_for_the_previous_one() -> None:
    tier = GatedTier()
    saver = AsyncSaver(tier, 0, 1, buffers=2)
    saver.prepare(shards_of(state(0)))
    for step in (1, 2):  # With the gate closed, the second would never return if it waited.
        saver.save(step, shards_of(state(step)), {})
    tier.gate.set()
    saver.close()
    assert [outcome.step for outcome in saver.poll()] == [1, 2]
    assert same_state(loaded(tier, 2), state(2))


def test_a_larger_state_than_before_gets_a_larger_buffer(tmp_path: Path) -> None:
    saver = AsyncSaver(DiskTier(tmp_path), 0, 1)
    saver.save(1, shards_of({"w": torch.zeros(10)}), {})
    saver.save(2, shards_of({"w": torch.ones(100_000)}), {})
    saver.close()
    assert [outcome.status for outcome in saver.poll()] == ["committed", "committed"]
    assert verify(tmp_path) == []


def test_saving_a_committed_step_does_nothing_and_is_reported_as_existing(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    saver = AsyncSaver(tier, 0, 1)
    saver.save(1, shards_of(state(1)), {"tokens": 5})
    saver.wait()
    again = saver.save(1, shards_of(state(2)), {"tokens": 6})
    saver.close()
    assert not again.staged
    assert [outcome.status for outcome in saver.poll()] == ["committed", "existed"]
    assert same_state(loaded(tier, 1), state(1))
    assert tier.extra(1) == {"tokens": 5}


def test_a_job_that_was_superseded_commits_nothing_and_deletes_nothing(tmp_path: Path) -> None:
    leads = True

    def authorize() -> None:
        if not leads:
            raise AbandonedError("another job has taken over")

    tier = DiskTier(tmp_path)
    saver = AsyncSaver(tier, 0, 1, retention=Retention(1), authorize=authorize)
    saver.save(1, shards_of(state(1)), {})
    saver.wait()
    leads = False
    saver.save(2, shards_of(state(2)), {})
    saver.close()
    assert [outcome.status for outcome in saver.poll()] == ["committed", "failed"]
    assert tier.steps() == [1]
    with pytest.raises(AbandonedError):
        AsyncSaver(tier, 0, 1, attempt=7, authorize=authorize)


def test_replicas_share_the_writing_and_together_write_everything_once(tmp_path: Path) -> None:
    savers = [AsyncSaver(DiskTier(tmp_path), rank, 3, replica=rank, replicas=3) for rank in range(3)]
    receipts = [saver.save(1, shards_of(state(1)), {}) for saver in savers]
    for saver in reversed(savers):
        saver.close()
    headers = 3 * 4096
    assert sum(receipt.nbytes for receipt in receipts) == headers + sum(t.nbytes for t in state(1).values())
    assert same_state(loaded(DiskTier(tmp_path), 1), state(1))
    assert [saver.poll()[0].status for saver in savers] == ["committed", "written", "written"]


def test_a_peer_that_died_costs_a_timeout_and_nothing_else(tmp_path: Path) -> None:
    saver = AsyncSaver(DiskTier(tmp_path), 0, 2, timeout_s=0.1)
    saver.save(1, shards_of(state(1)), {})
    saver.close()
    (outcome,) = saver.poll()
    assert outcome.status == "failed"
    assert isinstance(outcome.error, AbandonedError)
    assert "1 of 2 ranks have not written" in str(outcome.error)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_cannot_write_ends_the_save_for_all_without_waiting(tmp_path: Path) -> None:
    first = AsyncSaver(DiskTier(tmp_path), 0, 2, timeout_s=3600)
    second = AsyncSaver(RefusingTier(tmp_path, OSError("no such luck")), 1, 2)
    for saver in (first, second):
        saver.save(1, shards_of(state(1)), {})
    second.close()
    first.close()
    assert "no such luck" in str(first.poll()[0].error)
    assert "no such luck" in str(second.poll()[0].error)


def test_canceling_ends_a_save_that_waits_for_others(tmp_path: Path) -> None:
    saver = AsyncSaver(DiskTier(tmp_path), 0, 2, timeout_s=3600)
    saver.save(1, shards_of(state(1)), {})
    saver.cancel()
    saver.close()
    assert isinstance(saver.poll()[0].error, AbandonedError)


def test_rank_0_deletes_expired_checkpoints_after_a_commit(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    saver = AsyncSaver(tier, 0, 1, retention=Retention(keep_last=2, keep_every=30))
    for step in range(10, 70, 10):
        saver.save(step, shards_of(state(step)), {})
    saver.close()
    assert tier.steps() == [30, 50, 60]
    assert [step for outcome in saver.poll() for step in outcome.deleted] == [10, 20, 40]
    assert {path.name for path in tmp_path.iterdir()} == {f"step-{step:08d}" for step in (30, 50, 60)}


def test_a_new_attempt_sweeps_away_what_a_dead_one_left(tmp_path: Path) -> None:
    dead = AsyncSaver(DiskTier(tmp_path), 1, 2, attempt=1)
    dead.save(5, shards_of(state(1)), {})
    dead.close()
    assert [path.name for path in tmp_path.iterdir()] == [".partial-step-00000005-1"]
    AsyncSaver(DiskTier(tmp_path), 0, 1, attempt=2).close()
    assert list(tmp_path.iterdir()) == []


def test_a_share_that_comes_after_the_save_was_given_up_is_cleared_by_the_next_commit(tmp_path: Path) -> None:
    first = AsyncSaver(DiskTier(tmp_path), 0, 2, timeout_s=0.05)
    first.save(1, shards_of(state(1)), {})
    first.wait()
    late = AsyncSaver(DiskTier(tmp_path), 1, 2)
    late.save(1, shards_of(state(1)), {})
    late.wait()
    late.save(2, shards_of(state(2)), {})
    late.wait()
    first.save(2, shards_of(state(2)), {})
    first.close()
    late.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_extra_that_is_not_json_is_refused_at_once(tmp_path: Path) -> None:
    saver = AsyncSaver(DiskTier(tmp_path), 0, 1)
    with pytest.raises(TypeError):
        saver.save(1, shards_of(state(1)), {"rng": torch.zeros(1)})
    saver.save(1, shards_of(state(1)), {})
    saver.close()
    assert saver.poll()[0].status == "committed"


def test_a_closed_saver_refuses_to_save(tmp_path: Path) -> None:
    saver = AsyncSaver(DiskTier(tmp_path), 0, 1)
    saver.close()
    saver.close()
    with pytest.raises(RuntimeError, match="closed"):
        saver.save(1, [], {})


def test_any_exception_of_a_tier_becomes_a_reported_error(tmp_path: Path) -> None:
    saver = AsyncSaver(RefusingTier(tmp_path, ZeroDivisionError("odd")), 0, 1)
    saver.save(1, shards_of(state(1)), {})
    saver.close()
    error = saver.poll()[0].error
    assert isinstance(error, CheckpointError)
    assert "ZeroDivisionError" in str(error)
