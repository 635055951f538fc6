"""Finds out which rank failed first when a fault has ended an epoch, by what the workers have written into their logs.

A fault in one rank breaks the collectives of all others, and the coordinator hears of them in any order. What each worker said is in its log,
in the run directory that the whole fleet shares, with time, rank and step: the coordinator reads the ends of the logs of those nodes that
reported something, a moment later and in a thread. So a fault costs the fleet no message, and what was said travels whole. Of a node whose log
cannot be read, its own report counts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from phalanx.fleet.core import messages as m
from phalanx.observe.logs.line import LogLine, first_failure, what_happened, who
from phalanx.observe.logs.log_file import last_lines
from phalanx.run.directory.paths import RunDirectory

_WAIT_S = 1.0
"""The others' errors, and the ends of processes, come a moment after the first."""
_MOST_NODES = 64
_LAST_SAID = 100
_RECENT_S = 120.0
_MOST_CHARACTERS = 600


class FailureInquiry:
    """What nodes have reported since an epoch was left the last time."""

    def __init__(self, directory: RunDirectory, attempt: int, workers: int) -> None:
        self._directory, self._attempt, self._workers = directory, attempt, workers
        self._heard: dict[str, LogLine] = {}
        self._asking: asyncio.Task[None] | None = None

    def begin(self, tell: Callable[[str], None]) -> None:
        """Tells which rank failed first, if any did, once the others have said that they failed too."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(tell))

    async def _ask(self, tell: Callable[[str], None]) -> None:
        await asyncio.sleep(_WAIT_S)
        heard = self.taken()
        if heard and (found := await asyncio.to_thread(self.finding, heard)):
            tell(found)

    def heard(self, report: m.AgentMessage) -> None:
        """Notes that a node has reported that something failed."""
        if not isinstance(report, m.WorkerExited | m.WorkerHung | m.Broken | m.Fatal):
            return
        if isinstance(report, m.Broken) and report.text == m.LEFT_AS_ASKED:
            return
        now_s = time.time()
        # What ended no epoch, such as a spare's worker that died hours ago, is not the beginning of what fails now.
        self._heard = {node: line for node, line in self._heard.items() if line.t > now_s - _RECENT_S}
        if len(self._heard) < _MOST_NODES:
            text = f"error: {_words(report)}"
            line = LogLine(
                now_s, "error", report.node, None, report.epoch, self._attempt, None, text, report.node
            )
            self._heard.setdefault(report.node, line)

    def taken(self) -> Mapping[str, LogLine]:
        """What was noted; from now on it is forgotten."""
        heard, self._heard = self._heard, {}
        return heard

    def finding(self, heard: Mapping[str, LogLine]) -> str:
        """Which rank failed first, in words; empty if nobody knows. Reads files."""
        errors: list[LogLine] = []
        since = time.time() - _RECENT_S
        for node, reported in heard.items():
            said: list[LogLine] = []
            for worker in range(self._workers):
                log = self._directory.named_log(self._attempt, f"{node}-{worker}")
                with suppress(OSError):
                    said += (
                        line
                        for line in last_lines(log, _LAST_SAID)
                        if line.level == "error" and line.t > since
                    )
            errors += said or [reported]
        found = first_failure(errors)
        if found is None:
            return ""
        message = what_happened(found.line.text).splitlines()[0][:_MOST_CHARACTERS]
        return f"first failure: {who(found.line)}: {message} ({'; '.join(found.evidence)})"


def _words(report: m.WorkerExited | m.WorkerHung | m.Broken | m.Fatal) -> str:
    if isinstance(report, m.WorkerHung):
        return f"its worker was silent for {report.silent_s:.0f} s"
    if isinstance(report, m.WorkerExited):
        return report.text or f"exit code {report.code}"
    return report.text
