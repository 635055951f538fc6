"""Real processes whose output is captured."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.observe.logs.child_output import ChildOutput
from phalanx.observe.logs.line import LogLine
from phalanx.observe.logs.log_file import Bounds, LogOrder, last_lines, set_aside

CAUGHT = "import os, sys; from phalanx.observe.logs.capture import capture_output; place = capture_output(os.environ)\n"
"""First line of the program of a process whose output Phalanx captures."""


@dataclass
class Captured:
    """Exit code and log of a process that has ended."""

    code: int
    order: LogOrder
    lines: list[LogLine]
    messages: list[str] = field(default_factory=list)
    """Warnings of the parent about the log."""

    @property
    def texts(self) -> list[str]:
        return [line.text for line in self.lines]

    def bytes_on_disk(self) -> int:
        logs = (self.order.path, self.order.raw)
        files = [*logs, *(path for log in logs for _, path in set_aside(log))]
        return sum(path.stat().st_size for path in files if path.exists())

    def everything(self) -> bytes:
        return b"".join(path.read_bytes() for path in sorted(self.order.path.parent.iterdir()))


def run(
    folder: Path,
    program: str,
    *,
    caught: bool = True,
    bounds: Bounds = Bounds(),  # noqa: B008
    environment: dict[str, str] | None = None,
    meanwhile: Callable[[subprocess.Popen[bytes]], object] = lambda _process: None,
) -> Captured:
    """Run Python code as a child and return its log. With ``caught`` the child captures itself what it prints in Python."""
    import os

    (folder / "logs").mkdir(exist_ok=True)
    order = LogOrder(folder / "logs" / "attempt-002-rank-00003.jsonl", "rank-00003", 2, "node-1", bounds)
    messages: list[str] = []
    variables = {**os.environ, **(environment or {})}
    # A child that is stopped in the middle of a line still has one record of it.
    output = ChildOutput(order, variables, messages.append, pause_s=1000.0)
    process = subprocess.Popen(
        [sys.executable, "-c", (CAUGHT if caught else "import os, sys\n") + program],
        env={**variables, **output.environment},
        stdin=subprocess.DEVNULL,
        stdout=output.descriptor,
        stderr=subprocess.STDOUT,
        pass_fds=output.inherited,
    )
    output.started()
    meanwhile(process)
    code = process.wait()
    output.ended()
    lines = [line for line in last_lines(order.path, 100_000) if " begins: " not in line.text]
    return Captured(code, order, lines, messages)
