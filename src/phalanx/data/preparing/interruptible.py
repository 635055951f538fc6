"""Long calls of native code that a signal can end: Python runs a signal's handler in the main thread alone, and only between its own instructions."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

_LOOK_S = 0.2
_T = TypeVar("_T")


def interruptible(call: Callable[[], _T]) -> _T:
    """Return the result of ``call``, which runs in another thread if this is the main one.

    Raises what ``call`` raises, or what the handler of a signal raises meanwhile; the call is then left to end with the process.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    results: list[_T] = []
    errors: list[BaseException] = []
    returned = threading.Event()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
        returned.set()

    threading.Thread(target=run, name="native call", daemon=True).start()
    try:
        while not returned.wait(_LOOK_S):
            pass
    except BaseException as error:
        atexit.register(_end_during, returned, error)
        raise
    if errors:
        raise errors[0]
    return results[0]


def _end_during(returned: threading.Event, error: BaseException) -> None:
    """End the process if the call still runs: the interpreter would unwind its native frames, and Rust aborts the process for that."""
    if not returned.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 130)
