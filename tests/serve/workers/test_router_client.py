"""The client of the router: sums over all workers, and the end of the last one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from phalanx.wire.messages import encode
from phalanx_serve.http.worker import Streaming
from phalanx_serve.served.served_run import ServedRun
from phalanx_serve.traffic.events import ServeError
from phalanx_serve.workers import messages as m
from phalanx_serve.workers.router import RequestRouter, RouterSettings, Watcher
from phalanx_serve.workers.service import Notice, RouterClient, ServiceConfig
from phalanx_serve.workers.worker_process import WorkerEnded, WorkerTask


@pytest.mark.parametrize("link_first", [True, False])
def test_the_end_of_the_last_worker_ends_all_requests(link_first: bool) -> None:
    failed: list[str] = []
    seat = SimpleNamespace(task=SimpleNamespace(number=0, role="both"), restarts=SimpleNamespace(in_vain=5))
    peer = SimpleNamespace(number=0)
    port = RouterClient.__new__(RouterClient)
    port.__dict__.update(
        _trouble="",
        _identity=SimpleNamespace(done=lambda: True),
        _notices=SimpleNamespace(put=lambda _: None),
        _processes=SimpleNamespace(seats=[seat], lasting=lambda: True, kill=lambda _: None),
        _router=SimpleNamespace(
            peers={0: peer},
            fail_all=failed.append,
            traffic=SimpleNamespace(pool=SimpleNamespace(quarantined=())),
        ),
    )

    def end_link() -> None:
        port._router.peers.clear()
        port._left(peer, "its connection has ended")  # type: ignore[arg-type]

    def end_process() -> None:
        port._processes.lasting = lambda: False  # type: ignore[method-assign]
        port._happened(SimpleNamespace(seat=seat, how="ended", again_s=None))  # type: ignore[arg-type]

    first, second = (end_link, end_process) if link_first else (end_process, end_link)
    first()
    assert failed == []
    second()
    assert failed == [port.trouble()]
    assert "no worker is left" in failed[0]


def test_workers_that_are_late_slow_to_start_or_cannot_be_started_are_reported_with_the_reason() -> None:
    port = RouterClient.__new__(RouterClient)
    notices: list[Notice] = []
    seat = SimpleNamespace(task=SimpleNamespace(number=2, role="decode"))
    port.__dict__.update(
        _notices=SimpleNamespace(put=notices.append),
        _identity=SimpleNamespace(done=lambda: True),
        _trouble="there is some already",
    )
    port._late(SimpleNamespace(number=1), "it has given no sign of life for 4 s")  # type: ignore[arg-type]
    port._slow(seat, 60.0)  # type: ignore[arg-type]
    port._happened(WorkerEnded(seat, "cannot be started (no memory)", 2.0))  # type: ignore[arg-type]
    assert [(notice.event, notice.facts["worker"], notice.text) for notice in notices] == [
        (
            "worker-late",
            1,
            "worker 1 is late: it has given no sign of life for 4 s; its texts continue elsewhere, and it rejoins when it continues",
        ),
        ("worker-slow", 2, "worker 2 (decode) does not serve yet, 60 s after its start; it is waited for"),
        ("worker-ended", 2, "worker 2 (decode) cannot be started (no memory): it is started again in 2 s"),
    ]


def test_a_client_that_is_closed_may_be_closed_again() -> None:
    class ClosedTwice(RouterClient):
        def close(self) -> None:
            super().close()
            super().close()

    task = WorkerTask("", 0, "", 0, "both", ServedRun("run", 1, "float32", None, 1, 64, "exact"))
    no_python = {"PYTHONHOME": "/nowhere"}  # the worker ends at once
    with pytest.raises(ServeError, match="before it was ready"):
        ClosedTwice(ServiceConfig(("both",), task, no_python, RouterSettings()), lambda _: None)


def beating(number: int, read: int) -> SimpleNamespace:
    """A worker whose last sign of life, as it comes over the wire, counts ``read`` bytes."""
    beat = m.WorkerBeat(1, (), 2, 3, 4, 5, number, Streaming(read, 0.5, 7, 6))
    return SimpleNamespace(number=number, ready=None, beat=m.TO_ROUTER.decode(encode(beat)))


def test_counts_of_drafts_and_of_streamed_weights_include_workers_that_have_left() -> None:
    router = RequestRouter("token", RouterSettings(64, 0.0), Watcher(*([lambda *_: None] * 4)))
    router._count_past(beating(1, 100))  # type: ignore[arg-type]
    router._count_past(beating(2, 200))  # type: ignore[arg-type]
    router.peers[3] = beating(3, 4000)  # type: ignore[assignment]
    port = RouterClient.__new__(RouterClient)
    port.__dict__.update(
        _first=set(),
        _running=set(),
        _router=router,
        _processes=SimpleNamespace(seats=[]),
        _service=SimpleNamespace(task=SimpleNamespace(served=SimpleNamespace(stream=True))),
    )
    load = port.load()
    assert (load.drafted, load.accepted) == (15, 6)
    assert load.streaming == Streaming(4300, 1.5, 21, 18)
    assert (load.counts["pulled"], load.counts["not_pulled"]) == (9, 12)
    port._service.task.served.stream = False  # type: ignore[misc]
    assert port.load().streaming is None
