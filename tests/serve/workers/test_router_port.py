"""The gateway is told that no worker is left, whichever of the last one's link and process is seen to end first."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from phalanx.serve.workers.router_port import RouterPort


@pytest.mark.parametrize("link_first", [True, False])
def test_the_end_of_the_last_worker_ends_all_requests(link_first: bool) -> None:
    failed: list[str] = []
    seat = SimpleNamespace(task=SimpleNamespace(number=0, role="both"), starts=SimpleNamespace(failed=5))
    peer = SimpleNamespace(number=0)
    port = RouterPort.__new__(RouterPort)
    port.__dict__.update(
        _trouble="",
        _begun=SimpleNamespace(done=lambda: True),
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
