"""A run that is trained again ends with the command that trains it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

PARENT = """
import sys
from pathlib import Path
from phalanx.run.directory.paths import RunDirectory
from phalanx_watch.runs.reproduce import train_again
folder = Path(sys.argv[1])
train_again(folder / "run.toml", RunDirectory(folder / "run"), None, command=(sys.executable, sys.argv[2]))
"""
TRAINING = """
import signal, sys, time
from pathlib import Path
folder, requests = Path(sys.argv[1]).parent, []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _frame: requests.append(number))
(folder / "ready").touch()
while signal.SIGTERM not in requests:
    time.sleep(0.01)
(folder / "requests").write_text(" ".join(signal.Signals(number).name for number in requests))
"""


def test_ctrl_c_stops_the_training_once_and_waits_for_its_end(tmp_path: Path) -> None:
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), str(script)],
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while not (tmp_path / "ready").exists():
        assert parent.poll() is None
    os.killpg(parent.pid, signal.SIGINT)  # as a terminal does
    assert parent.wait() != 0
    assert (tmp_path / "requests").read_text() == "SIGTERM"
