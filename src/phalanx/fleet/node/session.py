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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_POLL_S = 0.02


class Session:
    """A started process, the leader of its session and process group."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._reaped = False

    @classmethod
    def start(
        cls, command: Sequence[str], environment: Mapping[str, str], log: Path, keep_open: Sequence[int] = ()
    ) -> Session:
        """Starts ``command``; its output is appended to ``log``, and it inherits the descriptors ``keep_open``. Raises OSError."""
        log.parent.mkdir(exist_ok=True)  # somebody may have removed it
        with log.open("ab") as output:
            return cls(
                subprocess.Popen(
                    list(command),
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=list(keep_open),
                )
            )

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
            os.kill(self.pid, number)

    def wait(self, timeout_s: float) -> None:
        """Returns once the leader has ended, or after ``timeout_s``."""
        deadline_s = time.monotonic() + timeout_s
        while self.exit_code() is None and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)

    def end(self) -> int:
        """Kills whatever is left of the group, and reaps the leader; returns its exit code."""
        if not self._reaped:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            self._reaped = True
        return self._process.returncode


def ending(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
