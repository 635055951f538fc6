"""Ranks that are ordered out of their collectives: how their connections end, for them and for their peers."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from phalanx.parallel.process_group.abort import Connections, abort
from ranks import Ranks

CPU = torch.device("cpu")
LARGE_BYTES = 32 << 20
"""More than the kernel keeps of a connection for a peer that does not read."""
RESCUE = timedelta(seconds=60)
"""Timeout of a group, after which gloo itself ends an operation.

Once in some ten thousand orders a message begins between the look at its connection and the end of it, and gloo wakes nobody. An agent then
kills the rank; here it waits for this timeout. If orders woke no rank, each round would last as long, and the test exceed its limit.
"""


@contextmanager
def connected() -> Iterator[tuple[Connections, socket.socket, socket.socket]]:
    """The connections of an epoch, which are one: this rank's end of it, and its peer's. Reading from neither blocks."""
    connections = Connections()
    with socket.create_server(("127.0.0.1", 0)) as server:
        with connections.foreign():
            peer = socket.create_connection(server.getsockname())
        own, _ = server.accept()
        with own, peer:
            connections.settle()
            own.setblocking(False)
            peer.setblocking(False)
            yield connections, own, peer
            connections.release()


def send_until_full(connection: socket.socket) -> None:
    """Send as much as the kernel takes."""
    with suppress(BlockingIOError):
        while connection.send(b"x" * LARGE_BYTES):
            pass


def test_an_interrupted_rank_reads_the_end_at_once_and_its_peer_when_the_rank_has_left() -> None:
    with connected() as (connections, own, peer):
        connections.interrupt()
        assert own.recv(1) == b""
        own.close()  # as gloo does
        for _ in range(2):
            peer.sendall(b"more of the collective")
        with pytest.raises(BlockingIOError):
            peer.recv(1)
        connections.release()
        peer.setblocking(True)
        assert peer.recv(1) == b"", "an end, not a reset"


def test_a_rank_reads_what_has_arrived_before_it_is_interrupted() -> None:
    with connected() as (connections, own, peer):
        peer.sendall(b"the end of a message")
        connections.interrupt()
        assert own.recv(100) == b"the end of a message"
        with pytest.raises(BlockingIOError):
            own.recv(1)
        connections.interrupt()
        assert own.recv(1) == b""


def test_a_rank_finishes_the_message_that_it_sends_before_it_is_interrupted() -> None:
    with connected() as (connections, own, peer):
        send_until_full(own)
        connections.interrupt()
        with pytest.raises(BlockingIOError):
            own.recv(1)
        peer.settimeout(0.1)
        with suppress(TimeoutError):
            while peer.recv(LARGE_BYTES):
                pass
        connections.interrupt()
        assert own.recv(1) == b""


def test_a_rank_whose_peer_takes_no_bytes_is_interrupted_all_the_same() -> None:
    with connected() as (connections, own, _peer):
        send_until_full(own)
        while True:
            connections.interrupt()
            with suppress(BlockingIOError):
                assert own.recv(1) == b""
                return


def test_a_peer_can_finish_its_message_to_a_rank_that_leaves() -> None:
    with connected() as (connections, own, peer):
        peer.setblocking(True)
        message = threading.Thread(target=peer.sendall, args=(bytes(LARGE_BYTES),))
        message.start()
        connections.hold()
        own.close()
        while message.is_alive():
            connections.interrupt()
        connections.release()
        assert peer.recv(1) == b"", "an end, not a reset"


def test_a_rank_that_leaves_without_an_interrupt_ends_the_connections_that_it_held() -> None:
    with connected() as (connections, own, peer):
        connections.hold()
        own.close()
        with pytest.raises(BlockingIOError):
            peer.recv(1)
        connections.release()
        peer.setblocking(True)
        assert peer.recv(1) == b""


def leave_in_the_middle(rounds: int, numbers: int) -> int:
    """Exchange ``numbers`` with the other ranks until an order to leave comes, some milliseconds apart on the ranks; return the rounds left."""
    rank, left = dist.get_rank(), 0
    for number in range(rounds):
        connections, has_left = Connections(), threading.Event()
        group = dist.new_group(timeout=RESCUE)
        connections.settle()
        dist.barrier()
        pause_s = 0.02 + 0.01 * random.Random(f"{number} {rank}").random()
        leaver = threading.Thread(target=keep_aborting, args=(connections, pause_s, has_left))
        leaver.start()
        sent = torch.ones(numbers)
        try:
            while True:
                dist.all_to_all_single(torch.empty_like(sent), sent, group=group)
        except RuntimeError:
            left += 1
        has_left.set()
        leaver.join()
        connections.hold()
        with suppress(RuntimeError):
            dist.destroy_process_group(group)
        del group
        connections.release()
    return left


def keep_aborting(connections: Connections, pause_s: float, has_left: threading.Event) -> None:
    """Abort as a worker does, after a pause."""
    if not has_left.wait(pause_s):
        while not has_left.wait(0.02):
            abort(connections, CPU)


@pytest.mark.parametrize("numbers", [300, 300_000])
def test_ranks_that_are_ordered_out_of_collectives_all_come_back(ranks: Ranks, numbers: int) -> None:
    assert ranks.run(3, leave_in_the_middle, 12, numbers) == [12, 12, 12]
