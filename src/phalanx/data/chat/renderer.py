"""Renders chat templates in a separate process whose processor time and memory are limited.

A chat template is an untrusted program. Jinja's sandbox protects Python's internals, but does not stop endless loops or texts that double
until memory runs out. Much of this happens in one call that cannot be interrupted in its own process. The operating system enforces limits
instead: a process is killed if it takes more than ``CPU_S`` for a conversation, and cannot allocate more than ``MEMORY_BYTES``. The next
conversation gets a new process.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from collections.abc import Mapping

from phalanx.process.child import LineChild, describe_exit

MARKS = ("\U0010f0aa\U0010f0bb", "\U0010f0bb\U0010f0aa")
"""Private-use characters around the content of ``{% generation %}``."""
CPU_S = 3
"""Limit of processor time for a conversation, in seconds. It normally takes some milliseconds."""
MEMORY_BYTES = 1 << 30
"""Limit of the process's address space. It uses some tens of MiB at its start."""
_COMMAND = (
    sys.executable,
    "-P",
    "-m",
    "phalanx.data.chat.environment",
)  # -P: no module of the working directory


class RenderingError(Exception):
    """A template failed to render; the message is the reason."""


class Renderer:
    """The rendering process. It starts when needed, and ends with this process. Thread-safe: it renders one conversation at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: LineChild | None = None

    def render(self, source: str, variables: Mapping[str, object], *, today: bool) -> str:
        """Return the template's output, rendered in a child process; with ``today``, the template can read the date.

        Starts the process if there is none. It is ended if it dies, reports that it is out of memory, or the exchange
        is interrupted. One request at a time. Raises RenderingError.
        """
        request = {"source": source, "variables": variables, "today": today}
        with self._lock:
            try:
                reply = self._exchange(request)
            except (
                BaseException
            ):  # includes interrupts: this request's reply must not be read as the next one's
                self._end()
                raise
            if "text" not in reply:
                if reply["is_last"]:
                    self._end()
                raise RenderingError(str(reply["error"]))
            return str(reply["text"])

    def _exchange(self, request: Mapping[str, object]) -> dict[str, object]:
        """Send a request to the child process, starting it if necessary, and return its reply; raises RenderingError if
        it dies.
        """
        if self._process is None:
            self._process = LineChild(_COMMAND, quiet=True, most_reply_bytes=MEMORY_BYTES)
        reply = self._process.exchange(request)
        if reply is None:
            code = self._process.end()
            if code == -signal.SIGXCPU:
                raise RenderingError(f"it does not end within {CPU_S} s of processor time")
            raise RenderingError(f"the process that renders it {describe_exit(code)}")
        return reply

    def _end(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.end()
        self._process = None


def renderer() -> Renderer:
    """Return this process's renderer; a forked process has its own."""
    return _renderer_of(os.getpid())


@functools.lru_cache(maxsize=1)
def _renderer_of(_pid: int) -> Renderer:
    return Renderer()
