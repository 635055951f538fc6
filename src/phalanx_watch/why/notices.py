"""Notices of what is wrong with a run: a command of the user's own for each reason that begins, and for its end.

Mail, chat and pagers have programs of their own; each is given a JSON object on standard input, and the same facts as environment
variables.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from phalanx_watch.why.observed import Code, Reason

_TIMEOUT_S = 60.0
_ATTEMPTS = 3
Key = tuple[Code, str]
"""Code and place: a reason whose evidence or severity changes is the same reason."""


@dataclass(frozen=True)
class ReasonChange:
    """A reason that has begun or ended."""

    state: Literal["begins", "ends"]
    reason: Reason
    t: float
    """Unix seconds."""


class NoticeCommand:
    """Calls a shell command for each change of a run's reasons."""

    def __init__(self, command: str, run: str, warn: Callable[[str], None]) -> None:
        self._command, self._run, self._warn = command, run, warn
        self._reasons: dict[Key, Reason] = {}
        self._pending: deque[tuple[ReasonChange, int]] = deque()
        """Notices that are not delivered yet, each with the number of its failed attempts."""

    def update(self, reasons: Sequence[Reason], t: float) -> None:
        """Take the present reasons, and call the command for what has changed since the last call. Failed calls are made again by
        the next updates, three times each.
        """
        current = {(reason.code, reason.where): reason for reason in reasons}
        new = [ReasonChange("begins", current[key], t) for key in current if key not in self._reasons]
        ended = [ReasonChange("ends", self._reasons[key], t) for key in self._reasons if key not in current]
        self._pending += [(notice, 0) for notice in (*new, *ended)]
        self._reasons = current
        for _ in range(len(self._pending)):
            notice, failed = self._pending.popleft()
            problem = self._call(notice)
            if problem and failed + 1 < _ATTEMPTS:
                self._pending.append((notice, failed + 1))
            if problem:
                after = "it is called again" if failed + 1 < _ATTEMPTS else "this notice is given up"
                self._warn(f"--exec for {notice.reason.code}, which {notice.state}: {problem}; {after}")

    def _call(self, notice: ReasonChange) -> str:
        """Call the command. Return what is wrong with it, or an empty string."""
        body = {"run": self._run, "state": notice.state, "t": notice.t, "reason": asdict(notice.reason)}
        facts = {
            "PHALANX_RUN": self._run,
            "PHALANX_STATE": notice.state,
            "PHALANX_CODE": notice.reason.code,
            "PHALANX_SEVERITY": notice.reason.severity,
            "PHALANX_TITLE": notice.reason.title,
        }
        try:
            done = subprocess.run(
                ["/bin/sh", "-c", self._command],
                input=json.dumps(body),
                text=True,
                env=os.environ | facts,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"it has not ended within {_TIMEOUT_S:g} s"
        return f"it ended with code {done.returncode}" if done.returncode else ""
