"""Processes of one part, which may fail or hang: they have a time limit, and their findings until then are kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from bench.gpu.report import PartResult

_POLL_S = 0.05
_TAIL_BYTES = 4000
_GRACE_S = 5.0


def run_processes(
    name: str,
    commands: Sequence[Sequence[str]],
    limit_s: float,
    environment: Mapping[str, str],
    stop: threading.Event,
) -> PartResult:
    """Run ``commands`` side by side, for ``limit_s`` at most and until ``stop`` is set.

    Each may append findings to the file that ``BENCH_FOUND`` names, one JSON pair of name and value a line. When one fails the
    others get a few seconds.
    """
    result = PartResult(name)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        findings_file, log = Path(folder) / "found.jsonl", Path(folder) / "log"
        inherited = {**os.environ, **environment, "BENCH_FOUND": str(findings_file)}
        with log.open("wb") as output:
            processes = [
                subprocess.Popen(
                    command,
                    env=inherited,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                for command in commands
            ]
            try:
                result.ended = _ending(processes, begin + limit_s, stop)
            finally:
                for process in processes:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        result.seconds = time.monotonic() - begin
        result.findings = _read(findings_file)
        if result.ended != "ok":
            result.output = log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
    return result


def _ending(processes: Sequence[subprocess.Popen[bytes]], deadline_s: float, stop: threading.Event) -> str:
    while True:
        codes = [process.poll() for process in processes]
        if None not in codes:
            bad = [code for code in codes if code]
            return f"exit code {bad[0]}" if bad else "ok"
        if stop.is_set():
            return "stopped by a signal"
        if time.monotonic() > deadline_s:
            bad = [code for code in codes if code]
            return f"exit code {bad[0]}" if bad else "time over"
        if any(codes):
            deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
        stop.wait(_POLL_S)


def _read(file: Path) -> dict[str, object]:
    findings: dict[str, object] = {}
    if file.exists():
        for line in file.read_text().splitlines():
            with suppress(ValueError):  # torn by a kill
                name, value = json.loads(line)
                findings[name] = value
    return findings


def report_finding(name: str, value: object) -> None:
    """Print a finding, and append it to the file of the parent process if there is one."""
    line = json.dumps([name, value], default=str)
    print(line, flush=True)
    if "BENCH_FOUND" in os.environ:
        with open(os.environ["BENCH_FOUND"], "a") as file:
            file.write(line + "\n")
