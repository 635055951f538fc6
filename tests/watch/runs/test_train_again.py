"""A run that is trained again ends with the command that trains it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PARENT = """
import sys
from pathlib import Path
from phalanx.run.directory.paths import RunDirectory
from phalanx_watch.runs.reproduce import train_again
folder = Path(sys.argv[1])


class Polled(RunDirectory):
    @property
    def events(self):
        (folder / "polled").touch()
        return super().events


train_again(folder / "run.toml", Polled(folder / "run"), None, command=(sys.executable, sys.argv[2]))
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
    # The parent waits for the training, and the training for signals.
    while not all((tmp_path / name).exists() for name in ("polled", "ready")):
        assert parent.poll() is None
        time.sleep(0.01)
    os.killpg(parent.pid, signal.SIGINT)  # as a terminal does
    assert parent.wait() != 0
    assert (tmp_path / "requests").read_text() == "SIGTERM"
