"""Connections to processes that have a part of a model: detection of their end or silence, and admission."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from phalanx.wire.messages import UnprovenError
from phalanx_serve.stages import messages as m
from phalanx_serve.stages.door import Door
from phalanx_serve.stages.far_layers import FarShare, FarShares, FarStage, FarStages
from phalanx_serve.stages.messages import StageLink
from phalanx_serve.stages.shares import Share
from phalanx_serve.traffic.events import PartLostError
from serve.packed_runs import DENSE
from serve.stages.staged_models import TOKEN
from serve.workers.services import until


def linked() -> tuple[StageLink, StageLink]:
    """The server's end of a connection, and the stage's."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        far_end = socket.create_connection(listener.getsockname())
        stage = pool.submit(StageLink, far_end, TOKEN, "client", "there")
        return StageLink(listener.accept()[0], TOKEN, "server", "here"), stage.result()


def test_a_stage_that_ends_without_a_request_is_noticed() -> None:
    here, there = linked()
    far = FarStages([FarStage(1, range(3, 5), here)], DENSE, 3)
    there.send(m.StageHeartbeat())  # an unread message is no end
    assert far.trouble() == ""
    there.close()
    assert "stage 1 (layers 3 to 4, here) of the model is gone" in until(far.trouble)


def test_the_check_for_an_end_does_not_wait_for_a_message_that_another_thread_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, there = linked()
    monkeypatch.setattr(
        StageLink, "_readable", lambda _: True
    )  # another thread has read the message in between
    with ThreadPoolExecutor(1) as pool:
        check = pool.submit(here.ended)
        try:
            assert check.result(60) is False
        finally:
            there.close()
    assert until(here.ended)


def test_a_message_that_a_stage_sends_before_it_ends_is_received_first() -> None:
    here, there = linked()
    there.send(m.StageUnable("no room"))
    there.close()
    assert not here.ended()
    assert here.receive(m.FROM_STAGE) == m.StageUnable("no room")
    assert until(here.ended)


@pytest.mark.parametrize("with_request", [False, True])
def test_a_process_that_gives_no_sign_of_life_is_given_up_with_what_to_do(with_request: bool) -> None:
    (stage, still), (share, still_too) = linked(), linked()
    for link in (stage, share):
        link.expect_life(0.2)
    stages = FarStages([FarStage(1, range(3, 5), stage)], DENSE, 3)
    shares = FarShares([FarShare(Share(1, 2), share)], DENSE)
    if with_request:
        for far in (stages, shares):
            with pytest.raises(PartLostError, match=r"no sign of life for 0.2 s .*start the server again"):
                far.hold(3)
    assert "stage 1" in until(stages.trouble)
    assert "share 1 of 2" in until(shares.trouble)
    for reason in (stages.trouble(), shares.trouble()):
        assert "no sign of life for 0.2 s (--stage-timeout)" in reason
    for link in (still, still_too):  # connected to the end
        link.close()


def test_a_process_that_has_stood_still_itself_blames_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = linked()
    here.expect_life(30.0)
    for message in (m.StageHeartbeat(), m.StageHeartbeat(), m.PagesAllocated()):
        there.send(message)
    # The messages are read long after the request, the answer behind heartbeats.
    assert here.receive(m.FROM_STAGE, longest_s=0.0) == m.PagesAllocated()

    now = [0.0]
    monkeypatch.setattr(m, "time", SimpleNamespace(monotonic=lambda: now[0]))
    here.expect_life(30.0)

    def stopped_after_looking(_: StageLink) -> bool:
        now[0] += 3600
        return False

    with monkeypatch.context() as patched:
        patched.setattr(StageLink, "_readable", stopped_after_looking)
        assert here.look() is None
    there.send(m.StageHeartbeat())
    assert until(here._readable)
    assert here.look() is None
    now[0] += 3600
    with pytest.raises(m.SilentError, match="no sign of life for 30 s"):
        here.look()
    there.close()


@pytest.mark.timeout(60)
def test_strangers_keep_no_stage_waiting_and_a_stage_that_has_left_does_not_count() -> None:
    door = Door(socket.create_server(("127.0.0.1", 0)), TOKEN, proof_timeout_s=3600.0)
    at = door.listener.getsockname()

    def joined(number: int, token: str = TOKEN) -> StageLink:
        connection = socket.create_connection(at)
        link = StageLink(connection, token, "client", "there", proof_timeout_s=3600.0)
        link.send(m.Here(number, 1))
        return link

    strangers = [socket.create_connection(at) for _ in range(80)]
    strangers[1].sendall(b"\xff" * 4000)
    with ThreadPoolExecutor(1) as pool:
        admitted = pool.submit(door.admit, 2)
        with pytest.raises(UnprovenError, match=r"another run's token|does not know"):
            joined(9, "a token of another server")
        joined(7).close()
        stages = [joined(2), joined(1)]
        admitted_links = admitted.result()
    for link in admitted_links:
        link.send(m.Hold(5))
    assert [link.receive(m.TO_STAGE) for link in stages] == [m.Hold(5)] * 2
    for link in (*strangers, *stages, *admitted_links):
        link.close()
