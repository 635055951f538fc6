"""A child's tie to its parent: it ends when the parent dies, however the parent dies."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

PARENT_VARIABLE = "PHALANX_LAUNCHER"
"""Environment variable with the parent's process id; ``Child.start`` sets it."""
_LOOK_S = 0.5
_EXIT_FAILED = 1


def die_with_parent() -> None:
    """Have Linux kill this process when the thread that started it ends (prctl(2), PR_SET_PDEATHSIG)."""
    if sys.platform != "linux":
        return
    pr_set_pdeathsig = 1  # linux/prctl.h
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != _parent():  # it died before the call
        os._exit(_EXIT_FAILED)


def watch_parent() -> None:
    """End this process soon after its parent's end: for children that outlive the thread that started them."""
    threading.Thread(target=_end_after, args=(_parent(),), daemon=True).start()


def _parent() -> int:
    return int(os.environ.get(PARENT_VARIABLE, os.getppid()))


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(_EXIT_FAILED)
