"""Tells what a program finds when it begins, as JSON, and ends in the way that its last argument says."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import threading


def facts() -> dict[str, object]:
    """What the one who starts a program decides."""
    probe = os.open(os.devnull, os.O_RDONLY)
    found = {
        "arguments": (sys.argv, sys.orig_argv[1:]),
        "path": sys.path,
        "parent": os.getppid(),
        "leads its session": os.getsid(0) == os.getpid(),
        "folder": os.getcwd(),
        "environment": {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        "most files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "descriptors": [number for number in range(probe) if _is_open(number)],
        "input": os.fstat(0).st_rdev,
        "interrupted": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "pipes": signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN,
        "threads": threading.active_count(),
        "own thread": threading.current_thread().native_id == os.getpid(),
        "temporary files": tempfile.gettempdir(),
        "main": sys.modules["__main__"].__dict__ is globals(),
    }
    os.close(probe)
    return found


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    print(json.dumps(facts()))
    match sys.argv[-1]:
        case "text":
            sys.exit("no way on")
        case "code":
            sys.exit(75)
        case "error":
            raise RuntimeError("unforeseen")
        case "interrupted":
            raise KeyboardInterrupt
        case "killed":
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        case "thread":
            threading.Timer(0.05, print, ["the last word"]).start()
