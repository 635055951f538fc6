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


LIMITED = """
import os, resource, sys
from pathlib import Path
from phalanx.observe.logs.child_output import ChildOutput
from phalanx.observe.logs.log_file import LogOrder

def in_use():
    return sorted(map(int, os.listdir("/proc/self/fd")))

order = LogOrder(Path(sys.argv[1]) / "logs" / "attempt-000-child.jsonl", "child", 0)
ChildOutput(order, {}).failed()
before, (soft, hard) = in_use(), resource.getrlimit(resource.RLIMIT_NOFILE)
refused = []
for limit in range(max(before), max(before) + 16):
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        ChildOutput(order, {}).failed()
    except OSError:
        refused.append(limit)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert in_use() == before, limit
print(len(refused))
"""


def test_a_log_for_which_no_descriptors_are_left_leaves_none_open(tmp_path: Path) -> None:
    limited = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=True
    )
    assert 0 < int(limited.stdout) < 16
