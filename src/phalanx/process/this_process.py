"""Stop signals, open-file limit and host name of this process.

A user or a scheduler stops a run by SIGINT, SIGTERM or SIGHUP. A process without children takes them as a request that it obeys at the next step boundary (``StopRequest``). Children lead sessions of their
own, so that such a signal reaches the parent alone (``on_stop_signals``). It counts the requests and decides what the children get (``StopOrders``).
"""

from __future__ import annotations

import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

_REQUEST_WAIT_S = 1.0
_POLL_S = 0.01
_LOOK_S = 0.1


def host_name() -> str:
    """Return the name of this machine, with bytes that are no UTF-8 as escapes: it is written to files and sent to peers."""
    return socket.gethostname().encode(errors="backslashreplace").decode()


def heeded(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return the signals of ``numbers`` that this process does not ignore now.

    A process started by ``nohup``, or in the background of a script, ignores some from its start.
    """
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


@dataclass
class StopRequest:
    """The request to a process to save and stop."""

    signals: tuple[signal.Signals, ...] = ()
    """The signals that make the request; none for a worker whose agent makes it."""
    made: bool = False
    _end: Callable[[], None] | None = None
    """Ends the process, while there is nothing to save."""
    _is_joint: bool = False
    """Other ranks may complete the first step, with this rank's part of it."""

    def end_at_once(self) -> None:
        """Restore the system's handling of the stop signals, which ends the process even in a long wait or read.

        A rank starts so: before the loop there is nothing to save, and nothing looks at the request.
        """
        for number in heeded(self.signals):
            signal.signal(number, signal.SIG_DFL)

    def listen(self, end: Callable[[], None] | None = None) -> None:
        """Handle the signals as a request to stop, from here on. A second SIGINT interrupts as usual.

        Until ``join_step`` or ``step_ended`` a signal also calls ``end``, which ends the process: the first
        step compiles for minutes, and there is nothing to save. Without ``end`` it only records the request.
        """
        self._end = end
        for number in heeded(self.signals):
            signal.signal(number, self._on_signal)

    def join_step(self) -> None:
        """Leave requests to the loop from here on: the other ranks can complete the step now, and count on this one in the next."""
        self._is_joint = True

    def step_failed(self) -> None:
        """End the process if it was to stop in its first step: another rank has ended on the same request, before its ``join_step``.

        Waits a moment for the request, since a parent sends it to one rank after the other.
        """
        until_s = time.monotonic() + _REQUEST_WAIT_S
        while self.signals and self._end is not None and not self.made and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        if self.made and self._end is not None:
            self._end()

    def step_ended(self) -> None:
        """Take failures as they are from here on: there is a step to save."""
        self._end = None

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        """Record the request, and call ``end`` if there is one and no step was joined. From then on SIGINT
        interrupts as usual.
        """
        self.made = True
        if self._end is not None and not self._is_joint:
            self._end()
        for number in heeded((signal.SIGINT,)):
            signal.signal(number, signal.default_int_handler)


@dataclass
class StopOrders:
    """The number of requests to a parent to stop its children, and its messages about them."""

    notify: Callable[[str], None]
    """Shows the user a message."""
    words: Sequence[str]
    """Messages about the first request, the second, and so on."""
    made: int = 0
    troubles: list[str] = field(default_factory=list)
    """Messages of other threads, such as that logs cannot be written."""
    _shown: int = 0
    _trouble_is_shown: bool = False

    def tell_new(self) -> None:
        """Notify of each new request to stop by its message, up to the last one, and once of the first trouble with
        a log.

        Call it regularly: a signal handler must not print. A full disk is full for all logs.
        """
        if self.troubles and not self._trouble_is_shown:
            self._trouble_is_shown = True
            self.notify(self.troubles[0])
        while self._shown < min(self.made, len(self.words)):
            self._shown += 1
            self.notify(self.words[self._shown - 1])

    def supervise(
        self,
        while_running: Callable[[Callable[[], bool]], None],
        ended: Callable[[], bool],
        request_stop: Callable[[], None],
    ) -> None:
        """Call ``while_running(ended)``, then wait until the children have ``ended``, which also looks after them.

        If it raises, the children are requested to stop, unless they were before.
        """
        try:
            while_running(ended)
        except BaseException:
            if not self.made:
                request_stop()
            raise
        finally:
            while not ended():
                time.sleep(_LOOK_S)


@contextmanager
def on_stop_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Context in which each SIGINT, SIGTERM and SIGHUP calls ``stop`` instead of its earlier handler, restored at
    the end.

    Signals that are ignored stay so. In other threads than the main one it changes nothing, since only that handles
    signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop()

    before = [
        (number, signal.signal(number, on_signal))
        for number in heeded((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    ]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


# The limit on open files: every process with many connections raises it as far as the system allows.
#
# The usual soft limit (1,024) is too low for a coordinator of a thousand nodes or a busy server; the hard limit seldom is.


RESERVE = 256
"""Descriptors beside connections: files, workers, and clients that are refused."""
_WHERE_UNLIMITED = 1 << 20


def raise_open_file_limit(at_least: int = 0) -> int:
    """Raise this process's soft limit on open files to the hard limit, and return it.

    An infinite hard limit counts as ``at_least``, but no less than 2^20. An infinite soft limit is kept, and
    this number returned. A system that refuses keeps its limit, which is returned.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(at_least, _WHERE_UNLIMITED) if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return max(soft, limit)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    except (OSError, ValueError):  # a kernel may allow less than it reports
        return soft
    return limit
