"""A child process: started, signaled, waited for, killed with its group, and reaped last.

The kernel may give a process id to another program once the process has been reaped, and the id of its group with it. So a child that has
ended is observed without being reaped (``waitid`` with WNOWAIT). As a zombie it keeps its id, its group is killed under that id, and only then
is it reaped. No signal can reach another program. A child may be signaled from any thread and from a signal handler while another thread ends it.

The last section runs in the child: its tie to the parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

from phalanx.process.exit_codes import EXIT_FAILED

_POLL_S = 0.02
_STDERR = 2
_MOST_REPLY_BYTES = 1 << 20


class CapturedOutput(Protocol):
    """Reader of a child's standard output and error, which writes them to a log (``phalanx.observe.logs.child_output``)."""

    descriptor: int

    @property
    def environment(self) -> dict[str, str]: ...
    @property
    def inherited(self) -> tuple[int, ...]: ...
    def started(self) -> None: ...
    def failed(self) -> None: ...
    def ended(self, how: str = "", level: Literal["info", "error"] = "error") -> None: ...


class Child:
    """A started process. Its process id belongs to it until ``end`` returns."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        output: CapturedOutput | None = None,
        *,
        leads_session: bool = False,
        parent: str = "its launcher",
    ) -> None:
        """Take charge of a process that runs already; ``start`` starts one."""
        self._process, self._output, self._parent = process, output, parent
        self._leads_session = leads_session
        self._lock = threading.RLock()  # a signal handler may interrupt the thread that has it
        self._sent: set[int] = set()
        self._is_over = False
        """True: the process has been killed and may be reaped at any moment."""
        self._processor_ticks = 0

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str] = os.environ,
        *,
        output: CapturedOutput | None = None,
        task: bytes | None = None,
        keep_open: Sequence[int] = (),
        own_session: bool = True,
        parent: str = "its launcher",
    ) -> Child:
        """Start ``command``.

        ``output`` takes standard output and error, which are else this process's standard error. ``task`` is
        its standard input, fewer than 64 KiB; empty by default. ``keep_open`` are descriptors that it inherits.
        With ``own_session``, Ctrl-C does not reach it and ``end`` kills what it has started. ``parent`` names
        this process in the line about a kill. Raises ``OSError``, after ``output.failed()``.
        """
        try:
            process = subprocess.Popen(
                list(command),
                env={
                    **environment,
                    PARENT_VARIABLE: str(os.getpid()),
                    **(output.environment if output else {}),
                },
                stdin=subprocess.DEVNULL if task is None else subprocess.PIPE,
                stdout=output.descriptor if output else _STDERR,
                stderr=subprocess.STDOUT,
                start_new_session=own_session,
                pass_fds=[*keep_open, *(output.inherited if output else ())],
            )
        except BaseException:
            if output is not None:
                output.failed()
            raise
        if output is not None:
            output.started()
        if process.stdin is not None and task is not None:
            with suppress(BrokenPipeError), process.stdin as pipe:  # it may have ended
                pipe.write(task)
        return cls(process, output, leads_session=own_session, parent=parent)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return the exit code (below 0: the signal that killed it), None while it runs.

        Does not reap it, except where Python has no ``os.waitid`` (macOS before 3.13) or another thread reaps
        it.
        """
        if self._process.returncode is not None:
            return self._process.returncode
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return self._process.poll()
        try:
            status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # another thread reaps it, or the kernel has, where SIGCHLD is ignored
            return self._process.wait()
        if status is None:
            return None
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status

    def is_suspended(self) -> bool:
        """Return True if a signal has stopped it and none has continued it since. False where there is no
        ``/proc``.
        """
        with suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    def is_working(self) -> bool:
        """Return True if the process computes, has computed since the last call, or waits for a processor or a disk;
        False if it sleeps, is suspended, or has ended.

        A thread in native code that holds Python's lock (a large sort, an import, a page fault in swapped memory)
        blocks the heartbeat thread, but the kernel shows it at work. A suspended or deadlocked process is not.
        """
        tasks = Path(f"/proc/{self.pid}/task")
        ticks, states = 0, set[str]()
        with suppress(OSError):
            for task in tasks.iterdir():
                with suppress(OSError):  # A thread that has ended meanwhile.
                    fields = (task / "stat").read_text().rpartition(")")[2].split()
                    states.add(fields[0])
                    ticks += int(fields[11]) + int(fields[12])
        grown, self._processor_ticks = ticks > self._processor_ticks, ticks
        return bool(states & {"R", "D"}) or (grown and not states & {"T", "t"})

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, unless it has ended. A death by it then counts as intended in its log."""
        with self._lock:
            if not self._is_over and self.exit_code() is None:
                self._sent.add(number)
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, which ends a suspended or hanging process too."""
        self.signal(signal.SIGKILL)

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit code once it has ended, None after ``timeout_s``. Does not reap it."""
        deadline_s = time.monotonic() + timeout_s
        while (code := self.exit_code()) is None and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        return code

    async def wait_in_loop(self) -> int:
        """Return the exit code once it has ended, for an event loop. Does not reap it: call ``end``, in a thread if it has a log."""
        import asyncio

        if self.exit_code() is None and hasattr(os, "pidfd_open"):
            descriptor, ended = os.pidfd_open(self.pid), asyncio.Event()
            loop = asyncio.get_running_loop()
            try:
                loop.add_reader(descriptor, ended.set)
                await ended.wait()
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        while (code := self.exit_code()) is None:  # no Linux
            await asyncio.sleep(_POLL_S)
        return code

    def end(self, fine: Container[int] = (0,)) -> int:
        """Kill the process and, if it leads a session, all that is left of its group; reap it and return the exit
        code.

        Its log gets a line about how it ended, unless the code is one of ``fine``. May be called again.
        """
        with self._lock:
            is_first = not self._is_over
            self.kill()
            # Without waitid the child may have been reaped already.
            if is_first and self._leads_session and self._process.returncode is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
            self._is_over = True
        code = self._process.wait()
        if is_first and self._output is not None:
            self._output.ended(*self._last_line(code, fine))
        return code

    def _last_line(self, code: int, fine: Container[int]) -> tuple[str, Literal["info", "error"]]:
        """Return the log's last line about how the process ended, and its level: ("", "info") if the code is
        ``fine``.

        A death by a signal that was sent here is "info", any other end "error".
        """
        if code in fine:
            return "", "info"
        if -code in self._sent:
            return f"{describe_exit(code)} by {self._parent}", "info"
        return describe_exit(code), "error"


class LineChild(Child):
    """A child that replies to each line of JSON on its standard input with one on its standard output.

    It leads a session of its own. One thread at a time may exchange lines with it.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] = os.environ,
        *,
        quiet: bool = False,
        most_reply_bytes: int = _MOST_REPLY_BYTES,
    ) -> None:
        """Start ``command``; if ``quiet``, its standard error is thrown away. Replies are limited to
        ``most_reply_bytes``.

        Raises ``OSError``.
        """
        self._most_reply_bytes = most_reply_bytes
        super().__init__(
            subprocess.Popen(
                list(command),
                env={**environment, PARENT_VARIABLE: str(os.getpid())},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if quiet else None,
                start_new_session=True,
            ),
            leads_session=True,
        )

    def exchange(self, request: Mapping[str, object]) -> dict[str, Any] | None:
        """Send a request and return the reply. Waits as long as the child takes.

        Return None and kill the child if it has ended, or replies with anything but one line with a JSON object
        of at most ``most_reply_bytes``.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        message = json.dumps(request).encode() + b"\n"
        try:
            stdin.write(message)
            stdin.flush()
            line = stdout.readline(self._most_reply_bytes)
            if line.endswith(b"\n") and isinstance(reply := json.loads(line), dict):
                return reply
        except (OSError, ValueError):
            pass
        self.kill()
        return None

    def end(self, fine: Container[int] = (0,)) -> int:
        """Kill and reap the process as ``Child.end`` does, and close its pipes. Return the exit code."""
        code = super().end(fine)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # unread data in a pipe of an ended child
                    pipe.close()
        return code


def end_all(children: Iterable[Child], patience_s: float = 0.0, fine: Container[int] = (0,)) -> None:
    """End several children; return once all are killed and reaped.

    Together they get ``patience_s`` seconds to end by themselves first. ``fine`` is as in ``Child.end``.
    """
    children, deadline_s = list(children), time.monotonic() + patience_s
    for child in children:
        child.wait(deadline_s - time.monotonic())
    for child in children:
        child.kill()
    for child in children:
        child.end(fine)


def describe_exit(code: int) -> str:
    """Return how a process with this exit code ended, in words, with the signal's name if it was killed by a known one."""
    if code >= 0:
        return f"ended with code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


# In the child: end when the parent dies, for any reason.


PARENT_VARIABLE = "PHALANX_LAUNCHER"
"""Environment variable with the parent's process id; ``Child.start`` sets it."""
_LOOK_S = 0.5


def die_with_parent() -> None:
    """Have Linux kill this process when the thread that started it ends (prctl(2), PR_SET_PDEATHSIG).

    Exits with ``EXIT_FAILED`` if the parent is gone already. Does nothing on other systems.
    """
    if sys.platform != "linux":
        return
    pr_set_pdeathsig = 1  # linux/prctl.h
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != _parent():  # the parent died before the call
        os._exit(EXIT_FAILED)


def watch_parent() -> None:
    """End this process at most half a second after its parent's end: for children that outlive the thread that
    started them.
    """
    threading.Thread(target=_end_after, args=(_parent(),), daemon=True).start()


def _parent() -> int:
    return int(os.environ.get(PARENT_VARIABLE, os.getppid()))


def _end_after(parent: int) -> None:
    """End this process, with an error code, when its parent is no longer ``parent``."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(EXIT_FAILED)
