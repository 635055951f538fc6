"""Orders to a worker, and the thread that breaks an epoch off."""

from __future__ import annotations

import threading

from phalanx.fleet.node.worker_link import LeaveEpoch, Orders
from phalanx.process.this_process import StopRequest


def test_an_abort_that_fails_is_attempted_again() -> None:
    orders, attempts, succeeded = Orders(StopRequest()), 0, threading.Event()

    def abort() -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise RuntimeError("dictionary changed size during iteration")
        succeeded.set()

    threading.Thread(target=orders.break_off, daemon=True).start()
    with orders.session(3, abort):
        orders.on_order(LeaveEpoch(3, False))
        assert succeeded.wait(timeout=60)
