"""Schedule the suite in two lanes, so that the processors are busy and no fleet is late.

Half of the suite's tests compute. The others start processes and wait for leases, sockets and disks: alone they leave the processors idle, and
side by side they miss their deadlines. So the files that wait run one after the other, in one worker (the *waiting lane*). All other
files run beside them in the other workers, at a lower priority (``os.nice``), and get the processor time that the waiting lane leaves.

The workers that compute take files from both ends of the list: those that train on several ranks are at its front. So the servers that
ranks and programs are forked from are started by few workers.

pytest-xdist distributes the files; the choice of a worker's next file is made here. After a crash, the test that crashed has failed, and
the rest of the worker's files run in the other workers or in its replacement. A replacement takes over the lane of the worker that it replaces.
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
    "tests/manual/test_running.py",
    "tests/serve/stages",
    "tests/serve/workers",
)
"""Folders and files whose tests start several processes and depend on deadlines."""


@functools.cache
def is_waiting(file: str) -> bool:
    """Return True if a test file belongs to the waiting lane."""
    return any(PurePath(file).is_relative_to(folder) for folder in WAITING)


def next_file(files: Sequence[str], worker: int) -> str | None:
    """Return the file of ``files`` that a worker runs next; None if it has no more to do.

    ``worker`` is 0 for the waiting lane, which takes the waiting files, then any other. The live workers that compute are numbered from 1:
    the first of them takes files from the front, the others from the end.
    """
    waiting = [file for file in files if is_waiting(file)]
    computing = [file for file in files if not is_waiting(file)]
    if worker == 0 and waiting:
        return waiting[0]
    if not computing:
        return None
    return computing[0] if worker <= 1 else computing[-1]


class Lanes:
    """Plugin of the controller and of each worker: one worker is the waiting lane, and the others have a lower priority."""

    def __init__(self) -> None:
        self.waiting_worker: str | None = None
        """Id of the worker that is the waiting lane; None before it starts and between its crash and its replacement."""

    def pytest_configure(self, config: pytest.Config) -> None:
        """Lower the priority of this process, and of all that it starts, if it is a worker that computes."""
        if getattr(config, "workerinput", {}).get("computes"):
            os.nice(NICENESS)

    def pytest_configure_node(self, node: WorkerController) -> None:
        """Make a worker that is about to start the waiting lane if there is none."""
        if self.waiting_worker is None:
            self.waiting_worker = node.gateway.id
        node.workerinput["computes"] = node.gateway.id != self.waiting_worker

    def pytest_testnodedown(self, node: WorkerController) -> None:
        """Let the next worker be the waiting lane. pytest-xdist starts the replacement of a crashed worker after this call."""
        if node.gateway.id == self.waiting_worker:
            self.waiting_worker = None

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Producer) -> LaneScheduling | None:
        """Return the scheduler of a run that distributes whole files; None leaves others to pytest-xdist."""
        return LaneScheduling(config, log, self) if config.getoption("dist") == "loadfile" else None


class LaneScheduling(LoadScopeScheduling):
    """Give each worker the next file of its lane (see ``next_file``)."""

    def __init__(self, config: pytest.Config, log: Producer, lanes: Lanes) -> None:
        super().__init__(config, log)
        self._lanes = lanes

    def schedule(self) -> None:
        """Distribute the first files, or the next ones after a replacement has collected its tests."""
        # The base class has the workers dropped that were added last, if there are fewer files than workers.
        self.assigned_work = dict(
            sorted(self.assigned_work.items(), key=lambda item: self._computes(item[0]))
        )
        super().schedule()

    def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
        """Register the tests of a worker. A replacement that has collected other tests than the rest gets none, and ends."""
        super().add_node_collection(node, collection)
        if node not in self.registered_collections:
            node.shutdown()

    def remove_node(self, node: WorkerController) -> str | None:
        """Remove a worker that has ended; return the test in which it crashed. The other tests of its files are scheduled again.

        The base class schedules the crashed test again, and files without remaining tests, for which no worker would ever report.
        """
        files = self.assigned_work.pop(node)
        pending = [
            (file, test) for file, tests in files.items() for test, is_done in tests.items() if not is_done
        ]
        if not pending:
            return None
        crashed_file, crashed_test = pending[0]
        files[crashed_file][crashed_test] = True
        self.workqueue.update({file: tests for file, tests in files.items() if not all(tests.values())})
        for other in self.nodes:
            self._reschedule(other)
        return crashed_test

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("::")[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        if (file := self._next_file(node)) is not None:
            self.workqueue.move_to_end(file, last=False)
            super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        # A worker keeps its last test until it gets another or is shut down. So it has more than two tests, or is shut down.
        if node.shutting_down or node not in self.registered_collections:
            return
        while self._pending_of(self.assigned_work[node]) <= 2:
            if self._next_file(node) is None:
                node.shutdown()  # any other files wait for the waiting lane
                return
            self._assign_work_unit(node)

    def _next_file(self, node: WorkerController) -> str | None:
        if node not in self.registered_collections:  # a replacement that still collects
            return None
        computing = [worker for worker in self.nodes if self._computes(worker) and not worker.shutting_down]
        computing.sort(key=lambda worker: int(worker.gateway.id.removeprefix("gw")))
        return next_file(list(self.workqueue), 1 + computing.index(node) if self._computes(node) else 0)

    def _computes(self, node: WorkerController) -> bool:
        return node.gateway.id != self._lanes.waiting_worker
