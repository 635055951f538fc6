"""The orders of a worker's agent, received in one thread and obeyed in another.

The main thread computes and waits in collectives, so it cannot read the link. A second thread reads it and keeps the newest
order of each kind here. When the order is to leave an epoch at once, a third aborts the collective that the main thread is in.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from phalanx.fleet.node.worker_link import (
    HoldSaves,
    InjectFault,
    JoinEpoch,
    LeaveEpoch,
    SnapshotSafe,
    StopTraining,
    ToWorker,
)
from phalanx.process.stop_signals import StopRequest

_AGAIN_S = 0.02
"""Seconds between two attempts at aborting: a rank may be about to open its next connection."""


class ParkedError(Exception):
    """This epoch is over for this worker."""


class Orders:
    """The newest orders to one worker, shared between the thread that receives them and the main thread."""

    def __init__(self, stop: StopRequest) -> None:
        self._stop = stop
        self._changed, self._breaking = threading.Condition(), threading.Lock()
        self._bind: JoinEpoch | None = None
        self._parked, self._planned = -1, -1
        self._safe = (-1, -1)
        self._faults: list[str] = []
        self.saves_held = False
        """True while no checkpoint may be committed, for want of a coordinator."""
        self._session: tuple[int, Callable[[], None]] | None = None

    # --- the thread that listens ---

    def listen(self, receive: Callable[[], ToWorker]) -> None:
        """Receives orders for ever; raises what ``receive`` raises when the link ends."""
        while True:
            self.on_order(receive())

    def on_order(self, said: ToWorker) -> None:
        """Records one order and wakes the threads that wait for it."""
        with self._changed:
            match said:
                case JoinEpoch():
                    self._bind = said
                case LeaveEpoch(planned=True):
                    self._planned = max(self._planned, said.epoch)
                case LeaveEpoch():
                    self._parked = max(self._parked, said.epoch)
                case StopTraining():
                    self._stop.made = True
                case SnapshotSafe():
                    self._safe = max(self._safe, (said.epoch, said.step))
                case HoldSaves(hold):
                    self.saves_held = hold
                case InjectFault():
                    self._faults.append(said.fault)
            self._changed.notify_all()

    def break_off(self) -> None:
        """Aborts the epoch that the main thread is in whenever it has been parked; runs in a thread for ever."""
        while True:
            with self._changed:
                self._changed.wait_for(self._must_break_off)
            with self._breaking:
                session = self._session
                if session is not None and self.over(session[0]):
                    try:
                        session[1]()
                    except Exception:  # the main thread may be making the groups that are to be aborted: the next attempt counts
                        traceback.print_exc()
            time.sleep(_AGAIN_S)

    def _must_break_off(self) -> bool:
        return self._session is not None and self.over(self._session[0])

    # --- the main thread ---

    def next_bind(self) -> JoinEpoch | None:
        """Waits for the next epoch to be a rank in; ``None`` when the worker is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stop.made or self._pending() is not None)
            bind, self._bind = self._pending(), None
            return None if self._stop.made else bind

    def _pending(self) -> JoinEpoch | None:
        return self._bind if self._bind is not None and not self.over(self._bind.epoch) else None

    @contextmanager
    def session(self, epoch: int, abort: Callable[[], None]) -> Iterator[None]:
        """Inside, ``abort`` is called from another thread, again and again, once ``epoch`` is parked."""
        with self._changed:
            self._session = (epoch, abort)
            self._changed.notify_all()
        try:
            yield
        finally:
            # With this lock no abort is under way, so none can hit the connections of the next epoch.
            with self._breaking, self._changed:
                self._session = None

    def over(self, epoch: int) -> bool:
        """True if this worker was ordered out of ``epoch`` at once."""
        return epoch <= self._parked

    def check(self, epoch: int) -> None:
        """Raises ``ParkedError`` if ``epoch`` is over."""
        if self.over(epoch):
            raise ParkedError

    def pause(self, epoch: int, seconds: float) -> None:
        """Waits; raises ``ParkedError`` as soon as ``epoch`` is over."""
        with self._changed:
            self._changed.wait_for(lambda: self.over(epoch), seconds)
        self.check(epoch)

    def wait_for_saves(self, epoch: int) -> None:
        """Waits until checkpoints may be committed; raises ``ParkedError`` as soon as ``epoch`` is over."""
        with self._changed:
            self._changed.wait_for(lambda: self.over(epoch) or not self.saves_held)
        self.check(epoch)

    def wait_for_park(self, epoch: int) -> None:
        """Waits until this worker is ordered out of ``epoch``, at once or by plan."""
        with self._changed:
            self._changed.wait_for(lambda: epoch <= max(self._parked, self._planned))

    def leaving(self, epoch: int) -> bool:
        """True if ``epoch`` is to end at the next step boundary."""
        return epoch <= self._planned

    def safe_step(self, epoch: int) -> int:
        """The newest step of ``epoch`` whose snapshot a buddy holds; -1 if none."""
        return self._safe[1] if self._safe[0] == epoch else -1

    def faults(self) -> list[str]:
        """Returns the faults that have come since the last call."""
        with self._changed:
            new, self._faults = self._faults, []
        return new
