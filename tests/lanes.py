"""Schedule the suite in two lanes, so that the processors are busy and no fleet is late.

Half of the suite's tests compute. The others start processes and wait for leases, sockets and disks: alone they leave the processors idle, and
side by side they miss their deadlines. So the files that wait run one after the other, in the first worker (the *waiting lane*). All
other files run beside them in the other workers, at a lower priority (``os.nice``), and get the processor time that the waiting lane leaves.

The workers that compute take files from both ends of the list: those that train on several ranks are at its front. So the servers that
ranks and programs are forked from are started by few workers.

pytest-xdist distributes the files; only the choice of a worker's next file is made here.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import PurePath

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

NICENESS = 10
"""Niceness of the workers that compute: Linux gives a process of niceness 0 about nine times their share (sched(7))."""
WAITING = (
    "tests/chaos",
    "tests/cli/fleet",
    "tests/fleet/control",
    "tests/fleet/node",
    "tests/launch",
    "tests/serve/stages",
    "tests/serve/workers",
)
"""Folders and files whose tests start several processes and depend on deadlines."""


@functools.cache
def is_waiting(file: str) -> bool:
    """Return True if a test file belongs to the waiting lane."""
    return any(PurePath(file).is_relative_to(folder) for folder in WAITING)


def next_file(files: Sequence[str], worker: int) -> str | None:
    """Return the file of ``files`` that a worker runs next, by the worker's place among the live ones; None if it has no more to do.

    The first worker takes the waiting files, then any other. The second takes computing files from the front, later ones from the end.
    """
    waiting = [file for file in files if is_waiting(file)]
    computing = [file for file in files if not is_waiting(file)]
    if worker == 0 and waiting:
        return waiting[0]
    if not computing:
        return None
    return computing[0] if worker <= 1 else computing[-1]


def yield_to_the_waiting_lane() -> None:
    """Lower the priority of this process, and of all that it starts, if it is a worker that computes."""
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") != "gw0":
        os.nice(NICENESS)


class LaneScheduling(LoadScopeScheduling):
    """Give each worker the next file of its lane (see ``next_file``)."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("::")[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        if (file := self._next_file(node)) is not None:
            self.workqueue.move_to_end(file, last=False)
            super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        nearly_idle = self._pending_of(self.assigned_work[node]) <= 2
        if self.workqueue and nearly_idle and self._next_file(node) is None:
            if not node.shutting_down:  # what is left waits for the first worker
                node.shutdown()
            return
        super()._reschedule(node)

    def _next_file(self, node: WorkerController) -> str | None:
        in_order = sorted(self.nodes, key=lambda worker: int(worker.gateway.id.removeprefix("gw")))
        return next_file(list(self.workqueue), in_order.index(node))


def make_scheduler(config: pytest.Config, log: Producer) -> LaneScheduling | None:
    """Return the scheduler of a run that distributes whole files; None leaves others to pytest-xdist."""
    return LaneScheduling(config, log) if config.getoption("dist") == "loadfile" else None
