"""Notices of what is wrong with a run: a command of the user's own for each reason that begins, and for its end.

Mail, chat and pagers have programs of their own; each is given a JSON object on standard input, and the same facts as environment
variables.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
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
    """Notifier that calls a shell command for each change of a run's reasons."""

    def __init__(self, command: str, run: str, warn: Callable[[str], None]) -> None:
        self._command, self._run, self._warn = command, run, warn
        self._delivered: dict[Key, Reason] = {}
        """Reasons of which the command knows, or for which it was given up."""
        self._failures: Counter[Key] = Counter()
        """Failed calls in a row, by reason."""

    def update(self, reasons: Sequence[Reason], t: float) -> None:
        """Take the present reasons, and call the command for each that it does not know of yet, and for the end of each that it does.

        A call that fails is made again by the next updates, three times in all. A reason that ends before it could be delivered is left out.
        """
        current = {(reason.code, reason.where): reason for reason in reasons}
        new = [ReasonChange("begins", current[key], t) for key in current if key not in self._delivered]
        ended = [
            ReasonChange("ends", self._delivered[key], t) for key in self._delivered if key not in current
        ]
        for change in (*new, *ended):
            self._deliver(change)

    def _deliver(self, change: ReasonChange) -> None:
        """Call the command for a change and record it as delivered, or after several failures as given up. Each failure is a warning."""
        key = change.reason.code, change.reason.where
        problem = self._call(change)
        self._failures[key] += bool(problem)
        is_given_up = self._failures[key] >= _ATTEMPTS
        if problem:
            after = "this notice is given up" if is_given_up else "it is called again"
            self._warn(f"--exec for {change.reason.code}, which {change.state}: {problem}; {after}")
        if problem and not is_given_up:
            return
        del self._failures[key]
        if change.state == "begins":
            self._delivered[key] = change.reason
        else:
            del self._delivered[key]

    def _call(self, notice: ReasonChange) -> str:
        """Call the command with the change as JSON on its input, and in variables. Return what is wrong with it, or an empty string."""
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
                env=os.environ | {name: text.replace("\0", "") for name, text in facts.items()},
                stdout=sys.stderr,  # standard output may be read as JSON
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"it has not ended within {_TIMEOUT_S:g} s"
        except OSError as error:
            return f"it cannot be started: {error.strerror}"
        return f"it ended with code {done.returncode}" if done.returncode else ""
