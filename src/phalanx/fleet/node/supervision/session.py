"""A process that leads a session of its own, and all that it has started, as one thing that can be watched and ended.

A process id may be given to another program as soon as the process has been waited for, and so may the number of its group. Here a
process that has ended is looked at without being reaped (``waitid`` with WNOWAIT): as a zombie it keeps its number, the group is killed
under that number, and only then is the process reaped. So no signal can reach a stranger.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from phalanx.observe.logs.child_output import ChildOutput
from phalanx.observe.logs.order import LogOrder

_POLL_S = 0.02


class Session:
    """A started process, the leader of its session and process group."""

    def __init__(self, process: subprocess.Popen[bytes], output: ChildOutput) -> None:
        self._process, self._output = process, output
        self._reaped = self._meant = False

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: LogOrder,
        keep_open: Sequence[int] = (),
        tell: Callable[[str], None] = lambda _words: None,
    ) -> Session:
        """Starts ``command`` with a log; it inherits the descriptors ``keep_open``.

        ``tell`` is told, from another thread, if the log cannot be written. Raises OSError.
        """
        output = ChildOutput(log, environment, tell)
        try:
            process = subprocess.Popen(
                list(command),
                env={**environment, **output.environment},
                stdin=subprocess.DEVNULL,
                stdout=output.descriptor,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[*keep_open, *output.inherited],
            )
        except BaseException:
            output.failed()
            raise
        output.started()
        return cls(process, output)

    @property
    def pid(self) -> int:
        """Its process id; nobody else has it before ``end`` returns."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """The exit code of the leader (below 0: the signal that killed it); None while it runs."""
        if self._reaped:
            return self._process.returncode
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def stopped(self) -> bool:
        """True if the leader was stopped by a signal and not continued since."""
        with suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the leader; one that has ended does not mind."""
        if not self._reaped:
            self._meant = self._meant or number in (signal.SIGTERM, signal.SIGKILL)
            os.kill(self.pid, number)

    def wait(self, timeout_s: float) -> None:
        """Returns once the leader has ended, or after ``timeout_s``."""
        deadline_s = time.monotonic() + timeout_s
        while self.exit_code() is None and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)

    def end(self) -> int:
        """Kills whatever is left of the group, and reaps the leader; returns its exit code."""
        if not self._reaped:
            by_itself = self.exit_code() is not None and not self._meant
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            code = self._process.wait()
            self._reaped = True
            self._output.ended(ending(code) if code and by_itself else "")
        return self._process.returncode


def ending(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
