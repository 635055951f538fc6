"""Processes that stay alive while one process group after another breaks."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.parallel.process_group import meeting
from phalanx.parallel.process_group.abort import Connections, abort
from phalanx.parallel.process_group.meeting import MeetingPoint, challenge_of, meet, prove_members
from phalanx.parallel.process_group.rendezvous import RendezvousError, leave
from ranks import FORKS, Ranks

CPU = torch.device("cpu")
TOKEN = "a token that only the ranks know"
PATIENCE_S = 120.0


def serve(connection: Connection, wake: Event) -> None:
    """Live through epochs: in each sum with the other processes, or hang until ``wake`` is set."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    here = MeetingPoint("127.0.0.1")
    connection.send(here.address)
    while True:
        try:
            address, epoch, rank, ranks, hangs, abort_after_s = connection.recv()
        except EOFError:
            return
        over, done = threading.Event(), threading.Event()
        aborter = threading.Thread(target=keep_aborting, args=(Connections(), abort_after_s, over, done))
        aborter.start()
        answer: Any
        try:
            _store = meet(
                address, here if rank == 0 else None, epoch, rank, ranks, CPU, 60.0, still(over), TOKEN
            )
            if hangs:
                wake.wait()
            total = torch.full((1000,), float(rank + 1))
            dist.all_reduce(total, group=dist.new_group(list(range(ranks))))
            answer = float(total[0])
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        done.set()
        aborter.join()
        leave()
        here = MeetingPoint("127.0.0.1")
        connection.send((answer, os.getpid(), here.address))


def still(over: threading.Event) -> Callable[[], None]:
    """Raises once an epoch is over."""

    def check() -> None:
        if over.is_set():
            raise RuntimeError("the epoch is over")

    return check


def keep_aborting(
    connections: Connections, after_s: float, over: threading.Event, done: threading.Event
) -> None:
    """As a worker does once its epoch is over: a rank may be about to open its next connection."""
    if not done.wait(after_s):
        over.set()
        while not done.wait(0.02):
            abort(connections, CPU)


class Fleet:
    """A few such processes."""

    def __init__(self, workers: int) -> None:
        pipes = [FORKS.Pipe() for _ in range(workers)]
        self.wake = FORKS.Event()
        self.processes = [
            FORKS.Process(target=serve, args=(theirs, self.wake), daemon=True) for _, theirs in pipes
        ]
        for process in self.processes:
            process.start()
        self.ends = [ours for ours, _ in pipes]
        self.addresses = [end.recv() for end in self.ends]
        self.epoch = 0

    def live(
        self, members: list[int], hangs: int | None = None, abort_after_s: float = 60.0
    ) -> list[tuple[Any, int]]:
        """Results of one epoch by member, each with its process. The member that ``hangs`` wakes up after the others have ended."""
        self.epoch += 1
        self.wake.clear()
        for rank, member in enumerate(members):
            self.ends[member].send(
                (
                    self.addresses[members[0]],
                    self.epoch,
                    rank,
                    len(members),
                    member == hangs,
                    abort_after_s,
                )
            )
        answers = {}
        for member in sorted(members, key=lambda member: member == hangs):
            if member == hangs:
                self.wake.set()
            assert self.ends[member].poll(PATIENCE_S), "a rank hangs"
            answer, pid, self.addresses[member] = self.ends[member].recv()
            answers[member] = answer, pid
        return [answers[member] for member in members]

    def close(self) -> None:
        for process in self.processes:
            process.kill()


@pytest.fixture(scope="module")
def fleet() -> Any:
    made = Fleet(3)
    yield made
    made.close()


def test_the_same_processes_meet_again_in_a_smaller_group_after_one_hung(fleet: Fleet) -> None:
    full_group = fleet.live([0, 1, 2])
    assert [answer for answer, _ in full_group] == [6.0, 6.0, 6.0]
    broken = fleet.live([0, 1, 2], hangs=2, abort_after_s=2.0)
    assert all(isinstance(answer, str) for answer, _ in broken), (
        "a collective with a missing rank cannot end well"
    )
    smaller = fleet.live([1, 0])
    assert [answer for answer, _ in smaller] == [3.0, 3.0]
    assert [pid for _, pid in full_group[:2]] == [pid for _, pid in reversed(smaller)]


def test_an_abort_reaches_a_rank_that_waits_for_somebody_who_never_comes(fleet: Fleet) -> None:
    fleet.epoch += 1
    fleet.ends[1].send((fleet.addresses[0], fleet.epoch, 1, 3, False, 1.0))  # rank 0 is not there
    fleet.ends[1].poll(0.5)  # looks for it in vain meanwhile; on a busy machine its epoch may even be over
    fleet.ends[0].send((fleet.addresses[0], fleet.epoch, 0, 3, False, 1.5))  # and rank 2 never comes
    for member in (0, 1):
        assert fleet.ends[member].poll(PATIENCE_S), "the rank still waits"
        answer, _, fleet.addresses[member] = fleet.ends[member].recv()
        assert isinstance(answer, str)


def test_one_who_broke_off_while_meeting_meets_one_who_did_not(fleet: Fleet) -> None:
    fleet.epoch += 1
    fleet.ends[0].send((fleet.addresses[0], fleet.epoch, 0, 2, False, 0.5))  # rank 1 never comes
    assert fleet.ends[0].poll(PATIENCE_S), "the rank still waits"
    answer, _, fleet.addresses[0] = fleet.ends[0].recv()
    assert isinstance(answer, str)
    assert [answer for answer, _ in fleet.live([0, 1])] == [3.0, 3.0]


def intrude(address: str, epoch: int, value: bytes | None) -> None:
    """Comes to the store as rank 1 without a token: poisons it with ``value``, or behaves as a rank does."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    host, _, port = address.rpartition(":")
    while True:
        try:
            store = dist.TCPStore(host, int(port), 2, False, timedelta(seconds=1))
            break
        except RuntimeError:
            time.sleep(0.02)
    inside = dist.PrefixStore(f"epoch-{epoch}", store)
    if value is None:
        dist.init_process_group("gloo", store=inside, rank=1, world_size=2, timeout=timedelta(seconds=60))
    else:
        inside.set("0//cpu//0/1", value.decode())
        time.sleep(60.0)


@pytest.mark.parametrize("value", [None, b"x" * 100], ids=["joins", "poisons"])
def test_a_stranger_in_the_store_is_refused_by_the_ranks(fleet: Fleet, value: bytes | None) -> None:
    fleet.epoch += 1
    args = (fleet.addresses[0], fleet.epoch, value)
    stranger = FORKS.Process(target=intrude, args=args)
    stranger.start()
    try:
        fleet.ends[0].send((fleet.addresses[0], fleet.epoch, 0, 2, False, 60.0))
        assert fleet.ends[0].poll(PATIENCE_S), "the rank still waits"
        answer, _, fleet.addresses[0] = fleet.ends[0].recv()
        assert "was not set by a rank with this run's token" in str(answer)
    finally:
        stranger.kill()
        stranger.join()


def prove(tokens: list[str]) -> str:
    """Prove this rank's membership with its token; return the error if a rank could not."""
    try:
        prove_members(tokens[dist.get_rank()], "epoch-3")
    except RendezvousError as error:
        return str(error)
    return ""


def test_a_rank_that_cannot_answer_the_others_challenge_is_named(ranks: Ranks) -> None:
    assert ranks.run(3, prove, [TOKEN] * 3) == ["", "", ""]
    first, second, third = ranks.run(3, prove, [TOKEN, TOKEN, "a token that a stranger made up"])
    assert first.startswith("ranks [2] do not have this run's token")
    assert second == first
    assert third


def test_what_a_rank_hashes_to_check_another_does_not_grow_with_the_ranks_and_depends_on_every_nonce() -> (
    None
):
    nonces = [bytes([number]) * 32 for number in range(64)]
    challenge = challenge_of(nonces)
    assert len(challenge_of(nonces * 100)) == len(challenge) == 32
    others = {challenge_of([*nonces[:index], b"x" * 32, *nonces[index + 1 :]]) for index in range(64)}
    assert len(others | {challenge, challenge_of(nonces[::-1]), challenge_of([b"".join(nonces)])}) == 67


def test_an_abort_leaves_connections_alone_that_were_there_before() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    mine = socket.create_connection(server.getsockname())
    other, _ = server.accept()
    before = Connections()
    later = socket.create_connection(server.getsockname())
    accepted, _ = server.accept()
    assert before.shut() == 2
    assert accepted.recv(1) == b""
    mine.sendall(b"x")
    assert other.recv(1) == b"x"
    for endpoint in (mine, other, later, accepted, server):
        endpoint.close()


def test_an_abort_leaves_connections_of_trackers_alone_whenever_they_are_opened() -> None:
    server = socket.create_server(("127.0.0.1", 0))

    def opened() -> tuple[socket.socket, socket.socket]:
        mine = socket.create_connection(server.getsockname())
        return mine, server.accept()[0]

    connections = Connections()
    with connections.foreign():
        named = opened()
    between_ranks = opened()
    connections.settle()
    later = opened()
    assert connections.shut() == 2
    assert between_ranks[0].recv(1) == b""
    for mine, other in (named, later):
        mine.sendall(b"x")
        assert other.recv(1) == b"x"
    for endpoint in (*named, *between_ranks, *later, server):
        endpoint.close()


def test_a_rank_meets_with_its_own_gpu_as_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP puts its buffers and streams on the current GPU, NCCL its communicators: for all ranks of a machine that would be the first."""
    seen: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", seen.append)
    monkeypatch.setattr(dist, "init_process_group", lambda **how: seen.append(how["backend"]))
    monkeypatch.setattr(meeting, "prove_members", lambda _token, _purpose: None)
    gpu = torch.device("cuda", 3)
    here = MeetingPoint("127.0.0.1")
    kept = meet(here.address, here, 0, 0, 1, gpu, 5.0, lambda: None, "token")
    assert seen == [gpu, "nccl"]
    del kept
