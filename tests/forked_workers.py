"""Real workers forked from one process that has imported them: a start takes milliseconds where importing PyTorch takes seconds.

``python forked_workers.py FD MODULE`` imports ``MODULE``, which has the ``main`` of a worker, and serves the socket FD: for each
request (the worker's arguments as JSON, with its descriptors beside it: its log, its link, its two segments) it forks, calls
``main`` in the child and answers with the child's process id.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress

DESCRIPTORS = 4
_LOG, _LINK = 0, 1


class Forked:
    """A forked worker, with what a test wants of a process."""

    def __init__(self, pid: int) -> None:
        self.pid, self._handle = pid, os.pidfd_open(pid)

    def __del__(self) -> None:
        os.close(self._handle)

    def send_signal(self, number: int) -> None:
        """Sends it a signal; a process that has ended does not mind."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def wait(self) -> None:
        """Until it has ended."""
        ended = select.poll()  # unlike select, it takes descriptors beyond the 1,024th
        ended.register(self._handle, select.POLLIN)
        ended.poll()


class Zygote:
    """The process that workers are forked from, as the test sees it. ``module`` has their ``main``."""

    def __init__(self, module: str = "worker_without_pickle") -> None:
        self._control, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), module],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()

    def fork(self, arguments: list[str], descriptors: list[int]) -> Forked:
        """A new worker with ``arguments``; ``descriptors``: its log, its link, its segments."""
        socket.send_fds(self._control, [json.dumps(arguments).encode()], descriptors)
        return Forked(int(self._control.recv(64)))

    def close(self) -> None:
        """Ends it, and with it whatever it has forked."""
        self._control.close()
        self._process.kill()
        self._process.wait()


def _serve(control: socket.socket, main: Callable[[], None]) -> None:
    """Forks workers until the test has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a worker ended
    gc.freeze()  # a collection in a child would copy the pages of all that was imported
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 1 << 16, DESCRIPTORS)
        if not request:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            _become_worker(main, json.loads(request), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        control.sendall(str(pid).encode())


def _become_worker(main: Callable[[], None], arguments: list[str], descriptors: list[int]) -> None:
    """Does in a forked process what ``python -m phalanx.fleet.node.rank.worker_main`` does in a new one."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for stream in (1, 2):
            os.dup2(descriptors[_LOG], stream)
        faulthandler.register(signal.SIGUSR1)  # a test that waits in vain wants to know where it hangs
        segments = map(str, descriptors[_LINK + 1 :])
        sys.argv = ["worker", "--link", str(descriptors[_LINK]), "--segments", *segments, *arguments]
        main()
    except BaseException:
        traceback.print_exc()
    os._exit(1)


if __name__ == "__main__":
    import phalanx.fleet.node.rank.worker  # noqa: F401 - what takes long

    _serve(socket.socket(fileno=int(sys.argv[1])), importlib.import_module(sys.argv[2]).main)
