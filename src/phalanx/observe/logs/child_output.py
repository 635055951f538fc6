"""Read what a child process writes to its descriptors 1 and 2, and make a log of it; a thread for each child.

The descriptors are a pipe. What a child wrote last is in it when the child is dead, however it died, and is read then. A child that floods
the pipe is read at full speed and mostly thrown away: its last words are kept. The thread reads on until nobody has the pipe open, also after
the child's end, so that what the child has started is not killed by writing. If this process is killed, so is the child, by the kernel; what
the child writes in Python goes into its own file all the while (``capture``), and does not wait for anybody.
"""

from __future__ import annotations

import codecs
import fcntl
import math
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress

from phalanx.observe.logs.assemble import Assembler, Record
from phalanx.observe.logs.line import Level, ended_text
from phalanx.observe.logs.log_file import PER_LINE, VARIABLE, LogOrder, LogPosition, Recorder
from phalanx.observe.logs.masking import SecretMask

_PIPE_BYTES = 1 << 20
_READ_BYTES = 1 << 18
_PAUSE_S = 0.5
"""After a pause of so long, a line that has not ended is a record."""
_DRAIN_S = 5.0
_TAIL_BYTES = 8 << 10
"""How much of the end of what is thrown away is kept."""
_LOUD = (b"Traceback", b"Fatal", b"FATAL", b"Error", b"ERROR", b"error:", b"NCCL WARN")
"""A piece that holds one of these is not thrown away without a look."""


class ChildOutput:
    """The output of one child. Give ``descriptor``, ``environment`` and ``inherited`` to its start, then call ``started``, at its end ``ended``."""

    def __init__(
        self,
        order: LogOrder,
        secrets: Mapping[str, str],
        on_trouble: Callable[[str], None] = lambda _words: None,
        *,
        pause_s: float = _PAUSE_S,
    ) -> None:
        """Open the pipes for one child's output; ``order`` is its log. Nothing is read before ``started``.

        ``secrets`` is its environment: values of secret variables are masked. ``on_trouble`` is called once, from
        another thread, if the log cannot be written. A line that has not ended is a record after ``pause_s`` without
        output. Raises ``OSError`` if there is no run directory or no descriptor left.
        """
        with suppress(FileExistsError):
            order.path.parent.mkdir()  # the folder may have been removed
        with ExitStack() as opened:
            self._reading, self.descriptor = _pipe(opened)
            self._wake_reading, self._wake = _pipe(opened)
            self.place, self._place_descriptor = LogPosition.shared()
            opened.pop_all()  # nothing below fails
        with suppress(OSError, AttributeError):  # the user's limit of large pipes, or a system without them
            fcntl.fcntl(self._reading, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(self._reading, False)
        self._order = order
        self._recorder = Recorder(
            order, order.raw, SecretMask.of_environment({**os.environ, **secrets}), self.place, on_trouble
        )
        self._assembler = Assembler()
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._lock, self._drained, self._over = threading.Lock(), threading.Event(), False
        self._pause_ms, self._drain_until_s = round(1000 * pause_s), math.inf
        self._thrown, self._thrown_ended = b"", False
        self._place_users = 2
        """This object's user, until ``ended``, and the reading thread: the last of them closes the place."""
        self._thread = threading.Thread(target=self._read, name=f"output of {order.process}", daemon=True)

    @property
    def environment(self) -> dict[str, str]:
        """Variables to add to the child's environment."""
        return {VARIABLE: self._order.to_text(self._place_descriptor)}

    @property
    def inherited(self) -> tuple[int, ...]:
        """Descriptors that the child inherits besides."""
        return (self._place_descriptor,)

    def started(self) -> None:
        """Start to read, on a thread, and close this process's copies of the child's ends."""
        self._let_go()
        self._thread.start()

    def failed(self) -> None:
        """Close all descriptors and the place: the child could not be started."""
        self._let_go()
        self.place.close()
        for descriptor in (self._reading, self._wake, self._wake_reading):
            os.close(descriptor)

    def ended(self, how: str = "", level: Level = "error") -> None:
        """Wait until the child's remaining output is in its log, five seconds at most; then close the log.

        ``how`` it ended is written last, at ``level``; empty writes nothing.
        """
        self._drain_until_s = time.monotonic() + _DRAIN_S
        self._over = True
        os.write(self._wake, b".")
        self._drained.wait(_DRAIN_S)
        with self._lock:
            if how:
                self._recorder.write(Record(ended_text(how), level))
            self._recorder.close()
            self._leave_place()
        os.close(self._wake)
        os.close(self._wake_reading)

    def _leave_place(self) -> None:
        self._place_users -= 1
        if not self._place_users:
            self.place.close()

    def _let_go(self) -> None:
        os.close(self.descriptor)
        os.close(self._place_descriptor)

    # --- the thread ------------------------------------------------------------------------------

    def _read(self) -> None:
        """Read until all writers have closed the pipe, then close the log. Runs in the thread.

        Incomplete lines are written after a pause without output, and after the child's end.
        """
        poll = select.poll()
        poll.register(self._reading, select.POLLIN)
        poll.register(self._wake_reading, select.POLLIN)
        while True:
            # Only a read that begins after the child's end has all that the child wrote.
            is_over = self._over
            if not self._read_what_is_there():
                break
            if is_over and not self._drained.is_set():
                self._settle()
                poll.unregister(self._wake_reading)
                self._drained.set()
            if not poll.poll(self._pause_ms if self._assembler.waits or self._thrown else None):
                self._settle()
        self._settle()
        with self._lock:
            self._recorder.close()
            self._leave_place()
        os.close(self._reading)
        self._drained.set()

    def _read_what_is_there(self) -> bool:
        """Read until the pipe is empty, but after the child's end for 5 s at most. Return False if no process has
        it open any more.
        """
        while True:
            try:
                piece = os.read(self._reading, _READ_BYTES)
            except BlockingIOError:
                return True
            if not piece:
                return False
            with self._lock:
                self._take(piece)
            if not self._drained.is_set() and time.monotonic() > self._drain_until_s:
                return True  # a process that the child has started never stops writing

    def _take(self, piece: bytes) -> None:
        """Write a piece as records if the log has room; a piece with words of errors may use more room.

        Otherwise count it as left out, and keep the last bytes of what was left out.
        """
        lines = piece.count(b"\n")
        loud = any(word in piece for word in _LOUD)
        if self._recorder.has_room(len(piece) + PER_LINE * lines) or (
            loud and self._recorder.has_room(len(piece), loud=True)
        ):
            self._rescue()
            self._write(self._assembler.add(self._decoder.decode(piece)))
        else:
            if not self._thrown:
                self._write(self._assembler.settle())
            self._recorder.leave_out(max(1, lines), len(piece))
            self._thrown = (self._thrown + piece)[-_TAIL_BYTES:]
            self._thrown_ended = self._thrown_ended or lines > 0

    def _rescue(self) -> None:
        """Write the kept end of what was left out, from its first complete line, if anything was."""
        thrown, self._thrown = self._thrown, b""
        ended, self._thrown_ended = self._thrown_ended, False
        if thrown:
            self._decoder.reset()
            begin = thrown.find(b"\n") + 1 if len(thrown) == _TAIL_BYTES else 0
            if ended:  # end the line that was incomplete before the discarded bytes
                self._write(self._assembler.add("\n"))
            self._write(self._assembler.add(self._decoder.decode(thrown[begin:])))

    def _settle(self) -> None:
        with self._lock:
            self._rescue()
            self._write(self._assembler.settle())

    def _write(self, records: Iterable[Record]) -> None:
        for record in records:
            self._recorder.write(record)


def _pipe(opened: ExitStack) -> tuple[int, int]:
    """Return the ends of a pipe, for reading and writing, which ``opened`` closes."""
    ends = os.pipe()
    for descriptor in ends:
        opened.callback(os.close, descriptor)
    return ends
