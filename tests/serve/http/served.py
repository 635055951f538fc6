"""Starts ``phalanx serve`` in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def server(run: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The base URL and the process of ``phalanx serve``."""
    command = [sys.executable, "-m", "phalanx", "serve", str(run), "--port", "0", *options]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, process.stderr.read() if process.stderr else line
        yield found[0], process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
