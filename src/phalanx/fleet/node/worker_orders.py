"""What a worker's agent has ordered, as the worker's main thread gets to know it.

The main thread computes and waits in collectives; it cannot read a link. A thread reads for it, keeps the newest order of
each kind here, and when the order is to leave an epoch at once, breaks off the collective that the main thread is in.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from phalanx.fleet.node.worker_link import (
    InjectFault,
    JoinEpoch,
    LeaveEpoch,
    SnapshotSafe,
    StopTraining,
    ToWorker,
)
from phalanx.train.lifecycle.interrupt import StopRequest

_AGAIN_S = 0.02
"""Between two attempts at breaking off: a rank may be about to open its next connection."""


class ParkedError(Exception):
    """This epoch is over for this worker."""


class Orders:
    """The orders of one worker; one thread hears them, the main thread obeys."""

    def __init__(self, stop: StopRequest) -> None:
        self._stop = stop
        self._changed, self._breaking = threading.Condition(), threading.Lock()
        self._bind: JoinEpoch | None = None
        self._parked, self._planned = -1, -1
        self._safe = (-1, -1)
        self._faults: list[str] = []
        self._session: tuple[int, Callable[[], None]] | None = None

    # --- the thread that listens ---

    def listen(self, receive: Callable[[], ToWorker]) -> None:
        """Hears orders for ever; raises what ``receive`` raises when the link ends."""
        while True:
            self.hear(receive())

    def hear(self, said: ToWorker) -> None:
        """Takes note of one order."""
        with self._changed:
            match said:
                case JoinEpoch():
                    self._bind = said
                case LeaveEpoch(planned=True):
                    self._planned = max(self._planned, said.epoch)
                case LeaveEpoch():
                    self._parked = max(self._parked, said.epoch)
                case StopTraining():
                    self._stop.signal_name = said.reason or "the fleet"
                case SnapshotSafe():
                    self._safe = max(self._safe, (said.epoch, said.step))
                case InjectFault():
                    self._faults.append(said.fault)
            self._changed.notify_all()

    def break_off(self) -> None:
        """Breaks off the epoch that the main thread is in whenever it has been parked; runs in a thread for ever."""
        while True:
            with self._changed:
                self._changed.wait_for(self._must_break_off)
            with self._breaking:
                session = self._session
                if session is not None and self.over(session[0]):
                    session[1]()
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
            # Whoever is breaking it off has finished then, and shuts nothing of the next epoch.
            with self._breaking, self._changed:
                self._session = None

    def over(self, epoch: int) -> bool:
        """Whether ``epoch`` is over for this worker."""
        return epoch <= self._parked

    def check(self, epoch: int) -> None:
        """Raises ``ParkedError`` if ``epoch`` is over."""
        if self.over(epoch):
            raise ParkedError

    def wait_for_park(self, epoch: int) -> None:
        """Until ``epoch`` is over, now or by plan."""
        with self._changed:
            self._changed.wait_for(lambda: epoch <= max(self._parked, self._planned))

    def leaving(self, epoch: int) -> bool:
        """Whether ``epoch`` is to end at a step boundary."""
        return epoch <= self._planned

    def safe_step(self, epoch: int) -> int:
        """The newest step of ``epoch`` whose snapshot a buddy holds; -1 if none."""
        return self._safe[1] if self._safe[0] == epoch else -1

    def faults(self) -> list[str]:
        """The faults to commit that have come since the last call."""
        with self._changed:
            new, self._faults = self._faults, []
        return new
