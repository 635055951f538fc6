"""Calls in daemon threads, whose results are futures: a process ends without waiting for them.

The threads of ``concurrent.futures.ThreadPoolExecutor`` are joined when the interpreter ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def in_background(call: Callable[[], T], name: str) -> Future[T]:
    """Start ``call`` in a new daemon thread called ``name``, and return its future result."""
    future: Future[T] = Future()
    threading.Thread(target=settle, args=(future, call), name=name, daemon=True).start()
    return future


def settle(future: Future[T], call: Callable[[], T]) -> None:
    """Give ``future`` the result of ``call``, or its error. Does not call for a future that is done already."""
    if future.done():
        return
    try:
        result = call()
    except BaseException as error:  # raised in the thread that waits
        with suppress(InvalidStateError):
            future.set_exception(error)
    else:
        with suppress(InvalidStateError):
            future.set_result(result)
