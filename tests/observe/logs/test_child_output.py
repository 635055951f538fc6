"""The output of child processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from open_files import open_pipes_and_files_below
from phalanx.observe.logs.child_output import ChildOutput
from phalanx.observe.logs.log_file import LogOrder, order_for
from phalanx.run.spec import ObserveSpec


def run_child(order: LogOrder) -> None:
    """Start a child that prints a word, and wait until its log has been written."""
    output = ChildOutput(order, {})
    process = subprocess.Popen(
        [sys.executable, "-c", "print('a word')"],
        env={**os.environ, **output.environment},
        stdout=output.descriptor,
        pass_fds=output.inherited,
    )
    output.started()
    process.wait()
    output.ended("it ended")
    for thread in threading.enumerate():
        if thread.name.startswith("output of"):
            thread.join()


def test_a_child_that_has_ended_leaves_no_descriptor(tmp_path: Path) -> None:
    order = order_for(tmp_path / "logs" / "attempt-000-child.jsonl", "child", 0, ObserveSpec(), "node-0")
    run_child(order)
    before = open_pipes_and_files_below(tmp_path)
    for _ in range(3):
        run_child(order)
    assert open_pipes_and_files_below(tmp_path) <= before
