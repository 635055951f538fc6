"""Restoring from snapshots: any layout, over sockets, from any holder that is left, and moving only what is needed."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.worlds import (
    State,
    blank_shards,
    box_of,
    holdings,
    random_tensor,
    same_bits,
    save_state,
    shards_from,
    states,
)
from phalanx.checkpoint.committed.restore import Shard, restore
from phalanx.checkpoint.format.boxes import NODE_AGENT, PEER, Box, plan_restore
from phalanx.checkpoint.format.errors import CorruptError, NotCoveredError
from phalanx.checkpoint.snapshot.data_port import SnapshotClient, SnapshotServer, push
from phalanx.checkpoint.snapshot.segments import Segment, SnapshotKey, SnapshotMemory
from phalanx.checkpoint.snapshot.tier import SnapshotHolder, SnapshotTier, describe, restore_from_holders
from phalanx.checkpoint.snapshot.writer import SnapshotWriter
from phalanx.checkpoint.tiers.disk import DiskTier

RUN, TOKEN, STEP = "run", "a token that only the run's nodes know", 9
BLOCK_BYTES = 256


class Node:
    """A node of one worker: its memory and its data port."""

    def __init__(self) -> None:
        self.memory = SnapshotMemory(RUN, 1)
        self.server = SnapshotServer(self.memory, TOKEN)
        self.address = f"127.0.0.1:{self.server.port}"

    def segments(self) -> tuple[Segment, ...]:
        return tuple(Segment(os.dup(segment.descriptor)) for segment in self.memory.worker_segments(0))

    def take(self, ranks: int, rank: int, shards: Sequence[Shard]) -> None:
        with closing(SnapshotWriter(self.segments(), RUN, block_bytes=BLOCK_BYTES)) as writer:
            writer.bind(0, ranks, rank)
            writer.take(STEP, shards, {"step": STEP})
            writer.wait()

    def flip_a_bit(self, key: SnapshotKey, names: Sequence[str]) -> None:
        """Flip a bit in the last byte of each of these tensors."""
        with self.memory.reading(key) as (segment, snapshot):
            image = segment.image(snapshot.nbytes)
            for entry in snapshot.manifest.entries:
                if entry.box.name in names:
                    image[entry.stop - 1] ^= 1

    def close(self) -> None:
        """Lose the node; harmless if it is lost already."""
        self.server.close()
        self.memory.close()


@contextmanager
def nodes(count: int) -> Iterator[list[Node]]:
    with ExitStack() as stack:
        yield [stack.enter_context(closing(Node())) for _ in range(count)]


def equals(shards: Sequence[Shard], state: State) -> bool:
    return all(
        same_bits(s.tensor, state[s.box.name][s.box.slices_in(box_of(s.box.name, state[s.box.name]))])
        for s in shards
    )


def rows_of(state: State, ranks: int) -> list[list[Box]]:
    """Each tensor's rows divided evenly."""
    rank_boxes: list[list[Box]] = [[] for _ in range(ranks)]
    for name, tensor in state.items():
        box, rows = box_of(name, tensor), tensor.shape[0] // ranks
        for rank in range(ranks):
            rank_boxes[rank].append(box.rows(rank * rows, (rank + 1) * rows))
    return rank_boxes


def split_rows(ranks: int) -> list[list[Box]]:
    """The rows of ``STATE``, divided as evenly as they can be."""
    rank_boxes: list[list[Box]] = [[] for _ in range(ranks)]
    for name, tensor in STATE.items():
        rows = tensor.shape[0]
        for rank in range(ranks):
            rank_boxes[rank].append(
                box_of(name, tensor).rows(rank * rows // ranks, (rank + 1) * rows // ranks)
            )
    return rank_boxes


STATE = {
    "model/w": random_tensor((64, 16), torch.float32, 0),
    "moment/w": random_tensor((64, 16), torch.float32, 1),
}


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_layout_restores_over_sockets_the_bits_that_any_other_took(data: st.DataObject) -> None:
    state = data.draw(states())
    ranks = data.draw(st.integers(1, 3))
    taken = data.draw(holdings(state, ranks))
    needed = data.draw(holdings(state, 1))[0]
    with nodes(ranks) as fleet:
        for rank, (node, boxes) in enumerate(zip(fleet, taken, strict=True)):
            node.take(ranks, rank, shards_from(state, boxes))
        reader = data.draw(st.integers(0, 3))
        own = fleet[reader].segments() if reader < ranks else ()
        holders = [SnapshotHolder(rank, node.address) for rank, node in enumerate(fleet)]
        shards = blank_shards(needed)
        with closing(SnapshotTier(ranks, STEP, own=own, holders=holders, token=TOKEN)) as tier:
            assert restore([tier], STEP, shards, rank=reader) == {"step": STEP}
        assert equals(shards, state)


def test_a_lost_rank_comes_from_its_buddy_and_the_others_from_their_own_memory() -> None:
    boxes = rows_of(STATE, 2)
    with nodes(3) as (survivor, victim, spare):
        survivor.take(2, 0, shards_from(STATE, boxes[0]))
        victim.take(2, 1, shards_from(STATE, boxes[1]))
        push(survivor.address, TOKEN, victim.memory, SnapshotKey(2, 1, STEP))
        victim.close()
        for rank, node in enumerate((survivor, spare)):
            shards = blank_shards(boxes[rank])
            holders = [
                SnapshotHolder(0, survivor.address, NODE_AGENT),
                SnapshotHolder(1, victim.address),
                SnapshotHolder(1, survivor.address),
            ]
            with closing(SnapshotTier(2, STEP, own=node.segments(), holders=holders, token=TOKEN)) as tier:
                restore_from_holders(tier, STEP, shards, rank=rank)
                assert {stored.location.holder for stored in tier.boxes(STEP, rank)} == {
                    "rank 0 in own memory" if rank == 0 else f"rank 1 at {survivor.address}"
                }
            assert equals(shards, STATE)


def test_damaged_bytes_are_found_and_named_and_another_holder_gives_the_right_ones() -> None:
    (boxes,) = rows_of(STATE, 1)
    with nodes(2) as (near, far):
        near.take(1, 0, shards_from(STATE, boxes))
        push(far.address, TOKEN, near.memory, SnapshotKey(1, 0, STEP))
        near.flip_a_bit(SnapshotKey(1, 0, STEP), ["moment/w"])
        holders = [SnapshotHolder(0, near.address, NODE_AGENT), SnapshotHolder(0, far.address, PEER)]
        shards = blank_shards(boxes)
        with closing(SnapshotTier(1, STEP, holders=holders, token=TOKEN)) as tier:
            with pytest.raises(CorruptError, match=f"rank 0 at {near.address}: block"):
                restore(tier, STEP, shards, rank=0)
            restore(tier, STEP, shards, rank=0)
            assert tier.failed == {f"rank 0 at {near.address}"}
        assert equals(shards, STATE)


def test_damage_in_own_memory_is_mended_from_a_replica_of_another_rank() -> None:
    (boxes,) = rows_of(STATE, 1)
    with nodes(2) as (own, replica):
        own.take(2, 0, shards_from(STATE, boxes))
        replica.take(2, 1, shards_from(STATE, boxes))
        own.flip_a_bit(SnapshotKey(2, 0, STEP), list(STATE))
        shards = blank_shards(boxes)
        holders = [SnapshotHolder(1, replica.address)]
        with closing(SnapshotTier(2, STEP, own=own.segments(), holders=holders, token=TOKEN)) as tier:
            restore_from_holders(tier, STEP, shards, rank=0)
            assert tier.failed == {"rank 0 in own memory"}
        assert equals(shards, STATE)


def test_when_every_holder_is_gone_a_further_tier_is_used_and_without_one_the_tensors_are_named(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    (boxes,) = rows_of(STATE, 1)
    disk = DiskTier(tmp_path_factory.mktemp("disk"))
    save_state(disk, STEP, STATE)
    with nodes(1) as (lost,):
        lost.take(1, 0, shards_from(STATE, boxes))
        lost.close()
        shards = blank_shards(boxes)
        holders = [SnapshotHolder(0, lost.address)]
        with closing(SnapshotTier(1, STEP, holders=holders, token=TOKEN)) as tier:
            restore_from_holders(tier, STEP, shards, rank=0, further=[disk])
        assert equals(shards, STATE)
        tier = SnapshotTier(1, STEP, holders=holders, token=TOKEN)
        with pytest.raises(NotCoveredError, match="moment/w"):
            restore_from_holders(tier, STEP, shards, rank=0)


def test_only_the_blocks_that_hold_something_needed_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    (boxes,) = rows_of(STATE, 1)
    with nodes(1) as (node,):
        node.take(1, 0, shards_from(STATE, boxes))
        with closing(SnapshotTier(1, STEP, holders=[SnapshotHolder(0, node.address)], token=TOKEN)) as tier:
            part = [boxes[0].rows(10, 20)]
            moved: list[int] = []
            source = tier._sources[0]
            blocks = source.blocks

            def counted(numbers: Sequence[int]) -> Iterator[object]:
                moved.extend(numbers)
                return blocks(numbers)

            monkeypatch.setattr(source, "blocks", counted)
            restore(tier, STEP, blank_shards(part), rank=0)
        assert len(moved) == len(set(moved)) <= part[0].nbytes // BLOCK_BYTES + 1


def test_equal_states_on_several_holders_are_spread_over_the_readers() -> None:
    (boxes,) = rows_of(STATE, 1)
    with nodes(3) as fleet:
        for rank, node in enumerate(fleet):
            node.take(3, rank, shards_from(STATE, boxes))
        holders = [SnapshotHolder(rank, node.address) for rank, node in enumerate(fleet)]
        used = []
        for reader in range(3, 6):
            with closing(SnapshotTier(3, STEP, holders=holders, token=TOKEN)) as tier:
                reads = read_plan(tier, boxes, reader)
            assert len(reads) == 1
            used.append(reads.pop())
        assert len(set(used)) == 3


def read_plan(tier: SnapshotTier, needed: Sequence[Box], reader: int) -> set[str]:
    """The holders from which ``reader`` would read."""
    return {read.source.location.holder for read in plan_restore(needed, tier.boxes(STEP), reader=reader)}


def test_segments_with_another_step_or_layout_are_no_source() -> None:
    (boxes,) = rows_of(STATE, 1)
    with nodes(1) as (node,):
        node.take(4, 0, shards_from(STATE, boxes))
        assert SnapshotTier(4, STEP, own=node.segments()).steps() == [STEP]
        assert SnapshotTier(4, STEP + 1, own=node.segments()).steps() == []
        assert SnapshotTier(2, STEP, own=node.segments()).steps() == []


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_readers_that_share_their_records_read_each_once_from_its_holder_and_restore_the_same(
    data: st.DataObject,
) -> None:
    ranks = data.draw(st.integers(2, 6))
    with nodes(ranks) as fleet, pytest.MonkeyPatch.context() as patched:
        for rank, boxes in enumerate(split_rows(ranks)):
            fleet[rank].take(ranks, rank, shards_from(STATE, boxes))
        read_keys: list[str] = []
        record = SnapshotClient.record

        def counting(client: SnapshotClient, key: SnapshotKey) -> bytes:
            read_keys.append(str(key))
            return record(client, key)

        patched.setattr(SnapshotClient, "record", counting)
        holders = [SnapshotHolder(rank, node.address) for rank, node in enumerate(fleet)]
        readers = data.draw(st.integers(1, ranks))
        descriptions: dict[int, bytes] = {}
        for reader in range(readers):
            descriptions |= describe(ranks, STEP, holders[reader::readers], token=TOKEN)
        assert sorted(read_keys) == [str(SnapshotKey(ranks, rank, STEP)) for rank in range(ranks)]
        for reader in range(readers):
            shards = blank_shards([box_of(name, tensor) for name, tensor in STATE.items()])
            tier = SnapshotTier(
                ranks, STEP, holders=holders, records=descriptions, token=TOKEN, reader=reader
            )
            with closing(tier):
                restore_from_holders(tier, STEP, shards)
            assert equals(shards, STATE)
        assert len(read_keys) == ranks, "no record was read again"


def test_a_lost_or_wrong_holder_is_skipped_when_its_snapshot_is_described(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with nodes(3) as fleet:
        for node, rank in zip(fleet, (0, 0, 1), strict=True):
            node.take(2, rank, shards_from(STATE, rows_of(STATE, 2)[rank]))
        fleet[0].close()
        holders = [SnapshotHolder(0, fleet[0].address), SnapshotHolder(0, fleet[1].address)]
        nobodys = SnapshotHolder(1, fleet[1].address)
        descriptions = describe(2, STEP, [*holders, nobodys], token=TOKEN)
        assert set(descriptions) == {0}
        assert "is skipped" in caplog.text
        damaged = {0: descriptions[0][:-1] + b"?", 1: descriptions[0]}
        holders.append(SnapshotHolder(1, fleet[2].address))
        shards = blank_shards([box_of(name, tensor) for name, tensor in STATE.items()])
        with closing(SnapshotTier(2, STEP, holders=holders, records=damaged, token=TOKEN)) as tier:
            restore_from_holders(tier, STEP, shards)
        assert equals(shards, STATE)
