"""Snapshots in memory become a checkpoint, written by the nodes that hold them and without their workers."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.snapshot.test_tier import STATE, STEP, Node, equals, nodes, rows_of
from checkpoint.worlds import blank_shards, holdings, shards_from, states
from phalanx.checkpoint.committed.restore import restore
from phalanx.checkpoint.format.errors import AbandonedError, CorruptError
from phalanx.checkpoint.snapshot.segments import SnapshotKey
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.tier import Draft
from phalanx.fleet.node.copies import save_snapshots


def save_all(fleet: list[Node], root: Path) -> list[bool]:
    """Each node writes its own snapshot, all at once; which of them have committed."""
    draft, ranks = Draft(STEP, 4), len(fleet)

    def save(rank: int) -> bool:
        share = [(SnapshotKey(ranks, rank, STEP), rank)]
        return save_snapshots(fleet[rank].memory, DiskTier(root), draft, share, ranks, timeout_s=60.0)

    with ThreadPoolExecutor(ranks) as pool:
        return [saving.result() for saving in [pool.submit(save, rank) for rank in range(ranks)]]


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_what_nodes_save_of_any_layout_is_restored_on_any_other_with_the_same_bits(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("checkpoints")
    state = data.draw(states())
    ranks = data.draw(st.integers(1, 3))
    with nodes(ranks) as fleet:
        for rank, boxes in enumerate(data.draw(holdings(state, ranks))):
            fleet[rank].take(ranks, rank, shards_from(state, boxes))
        assert save_all(fleet, root) == [rank == 0 for rank in range(ranks)]
    shards = blank_shards(data.draw(holdings(state, 1))[0])
    assert restore(DiskTier(root), STEP, shards) == {"step": STEP}
    assert equals(shards, state)


def test_a_damaged_snapshot_is_not_saved_and_nobody_commits(tmp_path: Path) -> None:
    with nodes(2) as fleet:
        for rank, boxes in enumerate(rows_of(STATE, 2)):
            fleet[rank].take(2, rank, shards_from(STATE, boxes))
        fleet[1].flip_a_bit(SnapshotKey(2, 1, STEP), ["moment/w"])
        tier, draft = DiskTier(tmp_path), Draft(STEP, 4)
        with pytest.raises(CorruptError, match="differs from its checksum"):
            save_snapshots(fleet[1].memory, tier, draft, [(SnapshotKey(2, 1, STEP), 1)], 2, timeout_s=60.0)
        with pytest.raises(AbandonedError, match="rank-00001 could not write its share"):
            save_snapshots(fleet[0].memory, tier, draft, [(SnapshotKey(2, 0, STEP), 0)], 2, timeout_s=60.0)
        assert tier.steps() == []


def test_a_node_that_holds_nothing_of_the_step_reports_that_to_all(tmp_path: Path) -> None:
    with closing(Node()) as node:
        tier = DiskTier(tmp_path)
        with pytest.raises(Exception, match="is not in this memory"):
            save_snapshots(
                node.memory, tier, Draft(STEP, 1), [(SnapshotKey(1, 0, STEP), 0)], 1, timeout_s=1.0
            )
        assert list(tier.draft_folder(Draft(STEP, 1)).glob("*.failed"))
