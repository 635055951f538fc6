"""Catch what this process prints and logs, and write it into its log: ``sys.stdout`` and ``sys.stderr``, ``logging``, ``warnings``, uncaught errors.

Each line is one ``write`` into the process's own file, with the level, rank, epoch and step that only the process knows. So nothing waits for
another process, and output before a kill is kept. What goes past Python, into descriptors 1 and 2 (native code, programs that it starts,
``faulthandler``), the parent reads from a pipe (``child_output``); so does the beginning of a line that is flushed before it has ended, since
the rest may never come.

A process whose output somebody else reads (a rank of ``torchrun``, an agent on a terminal) keeps it, and only adds its log.
"""

from __future__ import annotations

import faulthandler
import io
import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterable, MutableMapping
from contextlib import suppress
from types import TracebackType
from typing import BinaryIO, TextIO

from phalanx.observe.logs.assemble import Assembler, Record, clean, shortened
from phalanx.observe.logs.line import Level, begun_text
from phalanx.observe.logs.log_file import LogOrder, LogPosition, Recorder, taken_from
from phalanx.observe.logs.masking import SecretMask

_LONG = 4096
_TALKATIVE = "phalanx"
"""Loggers below this one log information too; those of libraries only warnings and errors, Python's default."""


class Capture:
    """The log of this process."""

    def __init__(self, order: LogOrder, *, tee: bool) -> None:
        """Set up the log of ``order`` for this process; nothing is caught before ``install``.

        ``tee``: what is caught is also written where it would have gone.
        """
        self.place = LogPosition()
        if order.place is not None:
            with suppress(OSError, ValueError):
                self.place = LogPosition(order.place)
        self._recorder = Recorder(
            order, order.path, SecretMask.of_environment(os.environ), self.place, self._complain
        )
        self._lock = threading.RLock()
        self._forked, self._tee = False, tee

    def install(self) -> None:
        """Catch everything from now on: output streams, logging, warnings, uncaught errors and crashes.

        Write a first record with process id and command line. In a forked child, output passes to its standard
        error.
        """
        out, err = sys.stdout, sys.stderr
        for stream in (out, err):
            with suppress(OSError, ValueError):
                stream.flush()
        sys.stdout = CaughtStream(self, 1, out if self._tee else None)
        sys.stderr = CaughtStream(self, 2, err if self._tee else None)
        root = logging.getLogger()
        root.addHandler(RecordHandler(self))
        if self._tee:
            shown = logging.StreamHandler(err)
            shown.setLevel(logging.WARNING)
            root.addHandler(shown)
        logging.getLogger(_TALKATIVE).setLevel(logging.INFO)
        logging.captureWarnings(capture=True)
        self._catch_errors()
        with suppress(OSError, ValueError, RuntimeError):
            faulthandler.enable(file=2, all_threads=True)
        os.register_at_fork(after_in_child=self._after_fork)
        self.put(begun_text(os.getpid(), " ".join(sys.orig_argv)), "info")

    def put(self, text: str, level: Level) -> None:
        """Write a text of a known level as one record, cleaned and shortened."""
        text = shortened("\n".join(clean(line) for line in text.rstrip().split("\n")))
        self.write([Record(text, level)])

    def write(self, records: Iterable[Record]) -> None:
        """Write records; in a process that was forked from this one, into its standard error."""
        with self._lock:
            for record in records:
                if self._forked:
                    pass_on(2, record.text + "\n")
                else:
                    self._recorder.put(record)

    def leaves_out(self, text: str) -> bool:
        """Return True if a text is left out, and count it: the process writes more than its log accepts. False
        after a fork.
        """
        if self._forked or not self._recorder.floods(text):
            return False
        self._recorder.leave_out(text.count("\n"), len(text))
        return True

    @property
    def passes_on(self) -> bool:
        """True if the parent reads what goes to descriptors 1 and 2."""
        return not self._tee

    @property
    def lock(self) -> threading.RLock:
        """Held while a stream is written, so that its lines stay whole."""
        return self._lock

    def _complain(self, words: str) -> None:
        """Print a warning about the log itself on standard error, or pass it on there to the parent."""
        if self.passes_on:
            pass_on(2, f"warning: {words}\n")
        elif sys.__stderr__ is not None:
            with suppress(OSError, ValueError):
                print(f"warning: {words}", file=sys.__stderr__, flush=True)

    def _after_fork(self) -> None:
        # Two processes would each rotate the file by their own count. Another thread may have had the lock.
        self._forked, self._lock = True, threading.RLock()

    def _catch_errors(self) -> None:
        """Write an uncaught error's traceback as a record, a thread's with the thread's name. With ``tee`` it is also printed as before.

        A ``SystemExit`` of a thread is ignored.
        """
        print_error, print_error_of_thread = sys.excepthook, threading.excepthook

        def on_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self.put("".join(traceback.format_exception(kind, error, trace)), "error")
            if self._tee:
                print_error(kind, error, trace)

        def on_error_of_thread(args: threading.ExceptHookArgs) -> None:
            if args.exc_type is SystemExit:
                return
            text = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
            self.put(f"{text.rstrip()}\n(in thread {args.thread.name if args.thread else '?'})", "error")
            if self._tee:
                print_error_of_thread(args)

        sys.excepthook, threading.excepthook = on_error, on_error_of_thread


class RecordHandler(logging.Handler):
    """Handler that writes the records of ``logging`` into the process's log, with its place."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture = capture
        self.place = capture.place

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, a traceback included, with its logger's name unless that is one of ours. Never raises."""
        own = record.name.partition(".")[0] in (_TALKATIVE, "py", "root")
        try:
            text = self.format(record)
        except Exception as error:  # its arguments do not fit its text, or cannot be written as text
            text = f"{record.msg!s} (its arguments do not fit: {type(error).__name__})"
        with suppress(Exception):
            self._capture.put(text if own else f"{record.name}: {text}", _level(record.levelno))


class CaughtStream(io.TextIOBase):
    """Stands in for ``sys.stdout`` or ``sys.stderr``."""

    def __init__(self, capture: Capture, descriptor: int, shown: TextIO | None) -> None:
        """Stand in for the stream of ``descriptor``; with ``shown``, text is also written there."""
        super().__init__()
        self._capture, self._descriptor, self._shown = capture, descriptor, shown
        self._assembler = Assembler()
        self._passing_on = False
        """The rest of the line goes where its beginning went."""
        self._buffer: BinaryIO | None = None

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """UTF-8."""
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        """No text is refused."""
        return "backslashreplace"

    @property
    def buffer(self) -> BinaryIO:
        """Unbuffered binary stream to the descriptor; bytes written to it are not caught here."""
        if self._shown is not None:
            return self._shown.buffer
        if self._buffer is None:
            self._buffer = os.fdopen(self._descriptor, "wb", buffering=0, closefd=False)
        return self._buffer

    def writable(self) -> bool:
        """Return True."""
        return True

    def isatty(self) -> bool:
        """As the stream that it stands in for, if that is written too; a file is no terminal."""
        return self._shown is not None and self._shown.isatty()

    def fileno(self) -> int:
        """The descriptor, for native code and programs that this process starts."""
        return self._descriptor if self._shown is None else self._shown.fileno()

    def reconfigure(self, **_options: object) -> None:
        """Every line is written at once already."""

    def write(self, text: str) -> int:
        """Take text and return its length; each line that ends in it is in the log when this returns, except in a
        traceback.

        Long text is left out, and counted, if the log is flooded. Raises ``TypeError`` for no text.
        """
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if self._shown is not None:
            with suppress(OSError, ValueError):
                self._shown.write(text)
        with self._capture.lock:
            rest = self._pass_on(text) if self._passing_on else text
            if len(rest) > _LONG and not self._assembler.waits and self._capture.leaves_out(rest):
                rest = rest[rest.rfind("\n") + 1 :][-_LONG:]
            if rest:
                self._capture.write(self._assembler.add(rest))
        return len(text)

    def flush(self) -> None:
        """Write the records that are complete. If a parent also captures the output, pass it a line that has not
        ended, so that it survives this process.
        """
        if self._shown is not None:
            with suppress(OSError, ValueError):
                self._shown.flush()
        with self._capture.lock:
            self._capture.write(self._assembler.release())
            if self._capture.passes_on and (partial := self._assembler.take_partial()):
                self._passing_on = True
                pass_on(self._descriptor, partial)

    def _pass_on(self, text: str) -> str:
        """Write the rest of a line to the descriptor, and return what comes after its newline."""
        line, newline, rest = text.partition("\n")
        pass_on(self._descriptor, line + newline)
        self._passing_on = not newline
        return rest


def pass_on(descriptor: int, text: str) -> None:
    """Write to a descriptor; errors are ignored, since its reader may be gone."""
    with suppress(OSError):
        os.write(descriptor, text.encode(errors="backslashreplace"))


def _level(number: int) -> Level:
    """Return our level for a number of ``logging``: the next lower of error, warning and info, else debug."""
    if number >= logging.ERROR:
        return "error"
    if number >= logging.WARNING:
        return "warning"
    return "info" if number >= logging.INFO else "debug"


def capture_output(environment: MutableMapping[str, str]) -> LogPosition:
    """Catch this process's output if its parent has ordered so, and take the order out of ``environment``.

    Return the place in the run (rank, step) that records carry, which the caller keeps up to date; without a usable
    order one that nothing reads.
    """
    order = taken_from(environment)
    if order is None:
        return LogPosition()
    if order.place is not None:
        with suppress(OSError):
            os.set_inheritable(order.place, False)
    capture = Capture(order, tee=False)
    capture.install()
    return capture.place


def also_log(order: LogOrder) -> LogPosition:
    """Write the output of this process into a log too; it still goes where it went. Returns its place."""
    capture = Capture(order, tee=True)
    capture.install()
    return capture.place


def place_of_process() -> LogPosition:
    """The place that the lines of this process carry; one that nobody reads if its output is not caught."""
    handlers = logging.getLogger().handlers
    return next((handler.place for handler in handlers if isinstance(handler, RecordHandler)), LogPosition())
