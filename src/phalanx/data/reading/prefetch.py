"""Compute the next batches while the current one trains.

One background thread makes batches in order and keeps at most ``depth`` of them ready. A single thread cannot change the order. Its exceptions are
raised in the consumer, at the batch they belong to.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

_GIVE_UP_AGAIN_S = 0.1
_TOLD_FIRST_S = 30.0
_LOOK_S = 0.5


Batch = TypeVar("Batch")


class WaitEndedError(Exception):
    """The wait for a batch was ended; the batch may still arrive."""


class Prefetch(Generic[Batch]):
    """Iterates over ``make(number)`` for each of ``numbers``, computed up to ``depth`` ahead.

    Use it in a ``with`` statement or call ``close``, so that the thread ends. Iteration stops after that, and after an exception. Supports one
    consumer at a time.
    """

    def __init__(
        self,
        make: Callable[[int], Batch],
        numbers: Iterable[int],
        *,
        depth: int = 2,
        give_up: Callable[[], None] | None = None,
        on_wait: Callable[[float], None] | None = None,
        told_first_s: float = _TOLD_FIRST_S,
        enough: Callable[[], bool] | None = None,
    ) -> None:
        """Start a thread that makes the batches of ``numbers`` in order, up to ``depth`` ahead.

        ``give_up`` makes a running ``make`` return or raise soon; it is called when the batch is no longer needed.
        ``on_wait`` is called in the consumer with the seconds it has waited for a batch: after ``told_first_s``, and
        each time the wait has doubled. ``enough`` is called twice a second while the consumer waits. When it returns
        true, ``WaitEndedError`` is raised. Raises ``ValueError`` for a ``depth`` below 1.
        """
        if depth < 1:
            raise ValueError(f"depth = {depth} is not positive")
        self._make = make
        self._numbers = iter(numbers)
        self._depth = depth
        self._give_up = give_up
        self._on_wait = on_wait
        self._told_first_s = told_first_s
        self._enough = enough
        self._ready: deque[Batch] = deque()
        self._error: BaseException | None = None
        self._finished = False
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Wait for the next batch and return it. Raises StopIteration after the last batch, or once closed.

        Raises the error of ``make``, once, after the batches before it. Raises ``WaitEndedError`` if ``enough``
        returns true meanwhile.
        """
        self._wait_for_batch()
        with self._changed:
            if self._ready and not self._closed:
                batch = self._ready.popleft()
                self._changed.notify_all()
                return batch
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def _wait_for_batch(self) -> None:
        """Wait until a batch is ready or none will come; calls ``on_wait``, and raises ``WaitEndedError`` if ``enough``
        returns true.
        """
        began_s, due_s = time.monotonic(), self._told_first_s
        while True:
            until_report_s = None if self._on_wait is None else began_s + due_s - time.monotonic()
            timeout_s = (
                until_report_s
                if self._enough is None
                else min(_LOOK_S, math.inf if until_report_s is None else until_report_s)
            )
            with self._changed:
                if self._changed.wait_for(lambda: self._ready or self._finished or self._closed, timeout_s):
                    return
            if self._enough is not None and self._enough():
                raise WaitEndedError
            if self._on_wait is not None and time.monotonic() >= began_s + due_s:
                self._on_wait(due_s)
                due_s *= 2

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop ready batches, and wait for the thread, which gives up the current batch or ends after it. May be called repeatedly."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._error = None
            self._changed.notify_all()
        while self._thread.is_alive():
            if self._give_up is not None:
                self._give_up()  # repeated: the thread may start another batch before it sees the flag
            self._thread.join(_GIVE_UP_AGAIN_S if self._give_up is not None else None)

    def _run(self) -> None:
        """Make batches in the thread until ``numbers`` end, ``close`` is called or an error occurs, which the consumer gets."""
        try:
            for number in self._numbers:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
                    if self._closed:
                        return
                batch = self._make(number)
                with self._changed:
                    if not self._closed:
                        self._ready.append(batch)
                        self._changed.notify_all()
        except BaseException as error:  # the consumer must see any error rather than wait forever
            with self._changed:
                self._error = None if self._closed else error
        finally:
            with self._changed:
                self._finished = True
                self._changed.notify_all()
