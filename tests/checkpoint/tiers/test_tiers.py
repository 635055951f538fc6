"""The contract of every tier: the same tests on disk and in memory."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.format_1 import rewrite_as_format_1
from checkpoint.memory_tier import MemoryTier
from checkpoint.shards import shards_of
from checkpoint.worlds import (
    State,
    blank_shards,
    box_of,
    holdings,
    random_tensor,
    same_bits,
    save_by_all,
    save_state,
    shards_from,
    states,
)
from phalanx.checkpoint.committed.copying import verify
from phalanx.checkpoint.committed.restore import Shard, candidates, restore
from phalanx.checkpoint.format.boxes import OWN_MEMORY, Box
from phalanx.checkpoint.format.errors import (
    AbandonedError,
    MismatchError,
    MissingFileError,
    NoSuchStepError,
    NotCoveredError,
)
from phalanx.checkpoint.save.staging import StagingBuffers
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.tier import Draft, StepRecord, Tier


@contextmanager
def new_tier(kind: str, block_bytes: int = 4096, catalog_ranks: int = 256) -> Iterator[Tier]:
    if kind == "memory":
        yield MemoryTier()
        return
    with tempfile.TemporaryDirectory() as folder:
        yield DiskTier(folder, block_bytes=block_bytes, catalog_ranks=catalog_ranks)


kinds = pytest.mark.parametrize("kind", ["disk", "memory"])


@pytest.fixture(params=["disk", "memory"])
def tier(request: pytest.FixtureRequest) -> Iterator[Tier]:
    with new_tier(request.param) as made:
        yield made


def small_state() -> State:
    return {"model/w": random_tensor((6, 4), torch.bfloat16, 0), "optimizer/step": torch.tensor(7)}


@kinds
@settings(max_examples=40)
@given(data=st.data())
def test_any_layout_restores_the_bits_that_any_other_saved(kind: str, data: st.DataObject) -> None:
    state = data.draw(states())
    saved = data.draw(holdings(state, data.draw(st.integers(1, 3))))
    block_bytes = data.draw(st.sampled_from([64, 4096]))
    with new_tier(kind, block_bytes, catalog_ranks=data.draw(st.sampled_from([1, 2, 256]))) as tier:
        outcomes = save_by_all(tier, 5, [shards_from(state, boxes) for boxes in saved], {"tokens": 9})
        assert outcomes[0].status == "committed", outcomes
        for rank, boxes in enumerate(data.draw(holdings(state, data.draw(st.integers(1, 3))))):
            shards = blank_shards(boxes)
            assert restore(tier, 5, shards, rank=data.draw(st.sampled_from([None, rank]))) == {"tokens": 9}
            for shard in shards:
                full = state[shard.box.name]
                assert same_bits(shard.tensor, full[shard.box.slices_in(box_of(shard.box.name, full))])


def test_a_step_is_not_there_before_it_is_committed(tier: Tier) -> None:
    image = StagingBuffers().stage(shards_of(small_state())).wait()
    tier.write(Draft(3, 0), 0, image)
    assert tier.steps() == []
    tier.commit(Draft(3, 0), StepRecord(3, 1, {}), timeout_s=5)
    assert tier.steps() == [3]


def test_a_commit_without_all_ranks_is_abandoned_and_leaves_nothing(tier: Tier) -> None:
    tier.write(Draft(3, 0), 0, StagingBuffers().stage(shards_of(small_state())).wait())
    with pytest.raises(AbandonedError, match="of 2 ranks"):
        tier.commit(Draft(3, 0), StepRecord(3, 2, {}), timeout_s=0.05)
    assert tier.steps() == []
    assert tier.sweep(attempt=1) == []


def test_a_commit_ends_at_once_when_a_rank_reports_a_failure(tier: Tier) -> None:
    tier.write(Draft(3, 0), 0, StagingBuffers().stage(shards_of(small_state())).wait())
    tier.fail(Draft(3, 0), 1, "its disk is full")
    with pytest.raises(AbandonedError, match="its disk is full"):
        tier.commit(Draft(3, 0), StepRecord(3, 2, {}), timeout_s=3600)


def test_a_commit_can_be_cancelled(tier: Tier) -> None:
    tier.write(Draft(3, 0), 0, StagingBuffers().stage(shards_of(small_state())).wait())
    with pytest.raises(AbandonedError):
        tier.commit(Draft(3, 0), StepRecord(3, 2, {}), timeout_s=3600, cancelled=lambda: True)


def test_a_committed_step_is_never_replaced(tier: Tier) -> None:
    first, second = small_state(), {"model/w": torch.zeros(6, 4, dtype=torch.bfloat16)}
    save_state(tier, 3, first)
    tier.write(Draft(3, 1), 0, StagingBuffers().stage(shards_of(second)).wait())
    tier.commit(Draft(3, 1), StepRecord(3, 1, {}), timeout_s=5)
    target = torch.empty_like(first["model/w"])
    restore(tier, 3, shards_of({"model/w": target}))
    assert same_bits(target, first["model/w"])


def test_sweeping_takes_what_other_attempts_left_and_nothing_else(tier: Tier) -> None:
    save_state(tier, 1, small_state())
    image = StagingBuffers().stage(shards_of(small_state())).wait()
    tier.write(Draft(2, 7), 0, image)
    tier.write(Draft(2, 8), 0, image)
    assert len(tier.sweep(attempt=8)) == 1
    tier.commit(Draft(2, 8), StepRecord(2, 1, {}), timeout_s=5)
    assert tier.steps() == [1, 2]


def test_a_deleted_step_is_gone_and_the_others_stay(tier: Tier) -> None:
    for step in (1, 2, 3):
        save_state(tier, step, small_state())
    tier.delete(2)
    assert candidates(tier) == [3, 1]
    with pytest.raises(NoSuchStepError):
        tier.delete(2)


def test_a_step_that_is_not_there_is_named_with_those_that_are(tier: Tier) -> None:
    save_state(tier, 40, small_state())
    with pytest.raises(NoSuchStepError, match=r"step 41.*40"):
        restore(tier, 41, shards_of(small_state()))


def test_a_missing_tensor_is_an_error_unless_it_may_be_missing(tier: Tier) -> None:
    save_state(tier, 1, small_state())
    new = torch.ones(3)
    with pytest.raises(NotCoveredError, match="model/new"):
        restore(tier, 1, shards_of({"model/new": new}))
    restore(tier, 1, shards_of({**small_state(), "model/new": new}), may_be_missing=["model/new"])
    assert torch.equal(new, torch.ones(3))


def test_a_commit_of_half_a_tensor_is_refused(tier: Tier) -> None:
    full = box_of("w", torch.zeros(4))
    (outcome,) = save_by_all(tier, 1, [[Shard(full.rows(0, 2), torch.zeros(2))]])
    assert isinstance(outcome.error, NotCoveredError)
    assert tier.steps() == []


def test_a_model_of_another_shape_is_refused_before_anything_changes(tier: Tier) -> None:
    save_state(tier, 1, {"a": torch.zeros(4), "b": torch.zeros(4)})
    a, b = torch.ones(4), torch.ones(5)
    with pytest.raises(MismatchError, match=r"b: needed float32 \(5,\), stored float32 \(4,\)"):
        restore(tier, 1, shards_of({"a": a, "b": b}))
    assert torch.equal(a, torch.ones(4))


def test_parameters_that_require_gradients_and_transposed_views_are_filled_in_place(tier: Tier) -> None:
    state = {"w": torch.randn(6, 4), "v": torch.randn(3, 5)}
    save_state(tier, 1, state)
    parameter, transposed = torch.nn.Parameter(torch.zeros(6, 4)), torch.zeros(5, 3).t()
    restore(tier, 1, shards_of({"w": parameter, "v": transposed}))
    assert torch.equal(parameter, state["w"])
    assert torch.equal(transposed, state["v"])


def test_each_element_comes_from_the_nearest_of_several_tiers() -> None:
    near, far = MemoryTier("near", OWN_MEMORY), MemoryTier("far", distance=4)
    save_state(near, 1, {"v": torch.ones(4)})
    save_state(far, 1, {"v": torch.zeros(4), "w": torch.full((4,), 2.0)})
    v, w = torch.zeros(4), torch.zeros(4)
    restore([far, near], 1, shards_of({"v": v, "w": w}))
    assert (v.tolist(), w.tolist()) == ([1, 1, 1, 1], [2, 2, 2, 2])


def two_catalogs(folder: Path) -> tuple[DiskTier, torch.Tensor, Box]:
    """A checkpoint of two ranks, each with a half of one tensor and a catalog of its own."""
    tier = DiskTier(folder, catalog_ranks=1)
    state = {"w": torch.randn(4)}
    box = box_of("w", state["w"])
    save_by_all(tier, 1, [shards_from(state, [box.rows(0, 2)]), shards_from(state, [box.rows(2, 4)])])
    return tier, state["w"], box


@pytest.mark.parametrize("rank", [1, None], ids=["as the rank that saved", "on another layout"])
def test_a_restore_opens_only_the_catalogs_that_hold_something_of_what_is_needed(
    tmp_path: Path, rank: int | None
) -> None:
    tier, saved, box = two_catalogs(tmp_path)
    (tier.folder(1) / "ranks-00000.catalog").unlink()
    shards = blank_shards([box.rows(2, 4)])
    restore(tier, 1, shards, rank=rank)
    assert torch.equal(shards[0].tensor, saved[2:])
    with pytest.raises(MissingFileError, match=r"ranks-00000\.catalog"):
        restore(tier, 1, blank_shards([box.rows(1, 3)]), rank=rank)


def test_a_rank_that_collects_others_waits_for_them_and_reports_a_missing_one_to_the_committing_rank(
    tmp_path: Path,
) -> None:
    tier, draft = DiskTier(tmp_path, catalog_ranks=2), Draft(3, 0)
    image = StagingBuffers().stage(shards_of(small_state())).wait()
    for rank in (0, 1, 2):
        tier.write(draft, rank, image)
    with pytest.raises(AbandonedError, match=r"1 of 2 ranks .*first: \[3\]"):
        tier.collect(draft, 2, 4, timeout_s=0.02)
    with pytest.raises(AbandonedError, match=r"rank-00002 could not .*first: \[3\]"):
        tier.commit(draft, StepRecord(3, 4, {}), timeout_s=3600)
    assert tier.sweep(attempt=1) == []


def test_a_commit_names_the_ranks_whose_groups_are_not_collected(tmp_path: Path) -> None:
    tier, draft = DiskTier(tmp_path, catalog_ranks=2), Draft(3, 0)
    for rank in range(4):
        tier.write(draft, rank, StagingBuffers().stage(shards_of(small_state())).wait())
    with pytest.raises(AbandonedError, match=r"1 of 1 ranks that collect others' shares .*first: \[2\]"):
        tier.commit(draft, StepRecord(3, 4, {}), timeout_s=0.02)


def test_a_committed_folder_holds_images_catalogs_and_an_index_and_nothing_else(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, catalog_ranks=2)
    state = {"w": torch.randn(6)}
    box = box_of("w", state["w"])
    save_by_all(tier, 1, [shards_from(state, [box.rows(2 * rank, 2 * rank + 2)]) for rank in range(3)])
    folder = tier.folder(1)
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == [
        "checkpoint.json",
        "extents.catalog",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
        "ranks-00000.catalog",
        "ranks-00002.catalog",
        "ranks-00002/rank-00002.safetensors",
    ]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_checkpoint_of_format_1_is_restored_and_verified(tmp_path: Path, ranks: int) -> None:
    tier = DiskTier(tmp_path, catalog_ranks=2)
    state = {"model/w": torch.randn(6, 3), "optimizer/step": torch.tensor(7)}
    boxes = [box_of(name, tensor) for name, tensor in state.items()]
    rows = 6 // ranks
    rank_boxes = [[boxes[0].rows(rank * rows, (rank + 1) * rows), boxes[1]] for rank in range(ranks)]
    save_by_all(tier, 1, [shards_from(state, mine) for mine in rank_boxes], {"tokens": 9})
    rewrite_as_format_1(tier, 1)
    assert verify(tmp_path) == []
    for reader in (0, None):
        shards = blank_shards(boxes)
        assert restore(DiskTier(tmp_path), 1, shards, rank=reader) == {"tokens": 9}
        assert all(same_bits(shard.tensor, state[shard.box.name]) for shard in shards)
    (tier.folder(1) / "rank-00000.json").unlink()
    assert [Path(finding.place).name for finding in verify(tmp_path)] == ["rank-00000.json"]
