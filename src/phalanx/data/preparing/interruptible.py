"""Long calls of native code that a signal can end: Python runs a signal's handler in the main thread alone, and only between its own instructions."""

from __future__ import annotations

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

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="native call", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK_S)
    if errors:
        raise errors[0]
    return results[0]
