"""Renders chat templates in a process of their own, whose processor time and memory are limited.

A chat template is a stranger's program. Jinja's sandbox keeps it from Python's internals, but not from loops that run for a day and texts that
double until memory ends, and much of that is one call that nothing in its own process can interrupt. The operating system can: a process
that takes more than ``CPU_S`` for a conversation is killed, and one that takes more than ``MEMORY_BYTES`` gets no more. The next
conversation has a new process.
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
"""Characters for private use, around what ``{% generation %}`` encloses."""
CPU_S = 3
"""Seconds of processor time for a conversation, which takes some milliseconds."""
MEMORY_BYTES = 1 << 30
"""Address space of the process; it begins with some tens of MiB."""
_COMMAND = (
    sys.executable,
    "-P",
    "-m",
    "phalanx.data.chat.renderer_main",
)  # -P: no module of the working directory


class RenderingError(Exception):
    """A template has written nothing; the message is the reason."""


class Renderer:
    """The process; it is started when it is needed, and ends with this one. Thread-safe: one conversation is rendered at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: LineChild | None = None

    def render(self, source: str, variables: Mapping[str, object], *, today: bool) -> str:
        """Return what the template writes; ``today`` lets it have the date. Raises RenderingError."""
        request = {"source": source, "variables": variables, "today": today}
        with self._lock:
            try:
                reply = self._exchange(request)
            except (
                BaseException
            ):  # an interrupt too: the reply to this request must not be taken for that to the next one
                self._end()
                raise
            if "text" not in reply:
                if reply["is_last"]:
                    self._end()
                raise RenderingError(str(reply["error"]))
            return str(reply["text"])

    def _exchange(self, request: Mapping[str, object]) -> dict[str, object]:
        if self._process is None:
            self._process = LineChild(_COMMAND, quiet=True)
        reply = self._process.exchange(request)
        if reply is None:
            code = self._process.end()
            if code == -signal.SIGXCPU:
                raise RenderingError(f"it does not end within {CPU_S} s of processor time")
            raise RenderingError(f"the process that renders it {describe_exit(code)}")
        return reply

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
        self._process = None


def renderer() -> Renderer:
    """Return this process's renderer: one that was forked from another has its own."""
    return _renderer_of(os.getpid())


@functools.lru_cache(maxsize=1)
def _renderer_of(_pid: int) -> Renderer:
    return Renderer()
