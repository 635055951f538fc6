"""A rank that waits in its first step for the request to stop: ``python -m train.lifecycle.stopping_rank RUN_DIR --attempt N``.

The variable ``STOPPED_AT`` names the place of each rank, ``before`` or ``behind`` the call of ``join_step`` or ``step_ended``. A rank that is there
makes the file ``at-RANK`` in the run directory and goes on once it has the request, unless that has ended it. ``passing`` makes the file and goes on.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from phalanx.process.this_process import StopRequest
from phalanx.run.directory.paths import RunResult
from phalanx.train.lifecycle.worker import main, run_rank


class WaitedFor(StopRequest):
    """A request that is waited for at the place of this rank, in its first step."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__((signal.SIGTERM, signal.SIGINT))
        self._file = run_dir / f"at-{os.environ['PHALANX_RANK']}"
        self._place = os.environ["STOPPED_AT"].split(",")[int(os.environ["PHALANX_RANK"])]

    def join_step(self) -> None:
        self._come_to("before join_step")
        super().join_step()
        self._come_to("behind join_step")

    def step_ended(self) -> None:
        self._come_to("before step_ended")
        super().step_ended()
        self._come_to("behind step_ended")

    def _come_to(self, place: str) -> None:
        if self._place == f"passing {place}":
            self._file.touch()
        if self._place == place and not self.made:
            self._file.touch()
            while not self.made:
                time.sleep(0.001)


def run_stopped(run_dir: Path, attempt: int, _stop: StopRequest) -> RunResult | None:
    """Train as a rank does, until it gets the request."""
    stop = WaitedFor(run_dir)
    stop.end_at_once()
    return run_rank(run_dir, attempt, stop)


if __name__ == "__main__":
    sys.exit(main(run_stopped))
