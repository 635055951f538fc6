"""Many clients of a data port at once: strangers keep nobody out, and every reader of the run gets its turn."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress

import pytest
import torch

from checkpoint.shards import shards_of
from checkpoint.snapshot.test_server import KEY, TOKEN, fill, serving
from checkpoint.worlds import random_tensor
from phalanx.checkpoint.snapshot.data_port import (
    BusyError,
    HolderLostError,
    SnapshotClient,
    SnapshotServer,
    push,
)
from phalanx.checkpoint.snapshot.segments import SnapshotMemory
from phalanx.checkpoint.snapshot.tier import SnapshotHolder, SnapshotTier, restore_from_holders

PATIENCE_S = 60.0
STATE = {"w": random_tensor((30, 1000), torch.float32, 0)}


@pytest.fixture
def memory() -> Iterator[SnapshotMemory]:
    """A worker's memory with step 8 of rank 1 of 2."""
    with closing(SnapshotMemory("run", 1)) as made:
        fill(made, STATE, (8,))
        yield made


@contextmanager
def crowd(address: str, size: int) -> Iterator[list[socket.socket]]:
    """Silent connections of strangers."""
    host, _, port = address.partition(":")
    strangers = []
    try:
        for _ in range(size):
            strangers.append(socket.create_connection((host, int(port)), PATIENCE_S))
        yield strangers
    finally:
        for stranger in strangers:
            stranger.close()


def restored(address: str, reader: int) -> bool:
    """Restore rank 1's part from one holder; return True if it has the bits that were taken."""
    mine = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    holders = [SnapshotHolder(1, address)]
    with closing(SnapshotTier(2, 8, holders=holders, token=TOKEN, reader=reader)) as tier:
        restore_from_holders(tier, 8, shards_of(mine))
    return all(
        torch.equal(mine[name].view(torch.int32), tensor.view(torch.int32)) for name, tensor in STATE.items()
    )


def test_silent_strangers_keep_no_node_out(memory: SnapshotMemory) -> None:
    with (
        closing(SnapshotMemory("run", 0)) as buddy,
        serving(buddy, most_newcomers=8, most_connections=8) as address,
        crowd(address, 64),
    ):
        push(address, TOKEN, memory, KEY)
        assert [holding.key for holding in buddy.holdings()] == [KEY]


def test_a_hundred_readers_at_once_all_get_the_state(memory: SnapshotMemory) -> None:
    readers = 100
    together = threading.Barrier(readers)

    def read(reader: int) -> bool:
        together.wait()
        return restored(address, reader)

    with (
        # Many requests wait longer than this for a turn, and are sent again.
        serving(memory, most_requests=8, most_connections=64, queue_timeout_s=0.01) as address,
        ThreadPoolExecutor(readers) as pool,
    ):
        assert all(pool.map(read, range(readers)))


def test_an_authenticated_client_beyond_the_most_connections_gets_the_answer_busy(
    memory: SnapshotMemory,
) -> None:
    with serving(memory, most_connections=1) as address:
        with SnapshotClient(address, TOKEN) as first:
            assert first.record(KEY)
            with SnapshotClient(address, TOKEN) as second, pytest.raises(BusyError):
                second.record(KEY)
        assert restored(address, 0)


def test_a_busy_holder_is_tried_again_until_the_reader_is_called_away(
    memory: SnapshotMemory,
) -> None:
    class CalledAwayError(Exception):
        pass

    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 5:
            raise CalledAwayError

    with serving(memory, most_connections=1) as address, SnapshotClient(address, TOKEN) as first:
        assert first.record(KEY)
        holders = [SnapshotHolder(1, address)]
        with (
            closing(SnapshotTier(2, 8, holders=holders, token=TOKEN, pause=pause)) as tier,
            pytest.raises(CalledAwayError),
        ):
            tier.boxes(8)
    assert max(pauses) > 2 * pauses[0]


def test_readers_begin_with_different_holders() -> None:
    ranks = 4
    memories = [SnapshotMemory("run", 1) for _ in range(ranks)]
    servers = []
    try:
        for rank, memory in enumerate(memories):
            fill_rank(memory, rank, ranks)
            servers.append(SnapshotServer(memory, TOKEN))
        holders = [SnapshotHolder(rank, f"127.0.0.1:{server.port}") for rank, server in enumerate(servers)]
        firsts = []
        for reader in range(ranks):
            with closing(SnapshotTier(ranks, 8, holders=holders, token=TOKEN, reader=reader)) as tier:
                firsts.append(tier.boxes(8)[0].location.holder)
        assert len(set(firsts)) == ranks
    finally:
        for server in servers:
            server.close()
        for memory in memories:
            memory.close()


def fill_rank(memory: SnapshotMemory, rank: int, ranks: int) -> None:
    import os

    from phalanx.checkpoint.snapshot.segments import Segment
    from phalanx.checkpoint.snapshot.writer import SnapshotWriter

    segments = [Segment(os.dup(segment.descriptor)) for segment in memory.worker_segments(0)]
    with closing(SnapshotWriter(segments, "run")) as writer:
        writer.bind(0, ranks, rank)
        writer.take(8, shards_of({f"w{rank}": torch.zeros(3)}), {})
        writer.wait()


def test_a_holder_that_never_lets_anybody_in_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        turned_away = []

        def turn_away() -> None:
            with suppress(OSError):
                while True:
                    listener.accept()[0].close()
                    turned_away.append(1)

        thread = threading.Thread(target=turn_away)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        holders = [SnapshotHolder(1, address)]
        with closing(SnapshotTier(2, 8, holders=holders, token=TOKEN, pause=lambda _: None)) as tier:
            assert tier.boxes(8) == ()
            assert tier.failed == {f"rank 1 at {address}"}
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert len(turned_away) > 1
    with pytest.raises(HolderLostError):
        SnapshotClient(address, TOKEN)
