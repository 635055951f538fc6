"""Which workers a service counts on."""

from __future__ import annotations

from phalanx_serve.traffic.events import Beat, Refuse, WorkerIdentity, WorkerJoined
from phalanx_serve.traffic.pools import Pool, PoolSettings, quarantine, step


def test_a_worker_that_was_set_aside_gets_the_reason_also_for_a_heartbeat_that_was_under_way() -> None:
    pool, _ = step(Pool(PoolSettings()), WorkerJoined(3, 1, WorkerIdentity("weights", "numerics")), 0.0)
    assert quarantine(pool, 3, "it computes other bits")[-1] == Refuse(3, 1, "it computes other bits")
    assert step(pool, Beat(3, 1, steps=7), 1.0)[1] == [Refuse(3, 1, "it computes other bits")]
