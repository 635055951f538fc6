"""A rank of eight hangs in a collective, another thread aborts it, and it joins again, for three epochs: ``python -m null_gpu.abort CALL``.

``CALL`` is the function of ``torch.distributed`` that hangs. ProcessGroupNCCL is the real one. Each epoch prints an ``Epoch`` as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from phalanx.hardware.local.detect import set_for_rank

EPOCHS = 3
ENDING_S = 60.0
"""After which a thread that is still there counts as left behind."""


@dataclass(frozen=True)
class Epoch:
    """The end of an epoch on this rank."""

    error: str
    """Class of the error that the main thread gets."""
    text: str
    is_reported: bool
    """True if a worker that was ordered out would send it to its agent."""
    made: int
    aborted: int
    """Communicators."""
    threads: int
    """Threads of the process after it."""
    answers: bool
    """True if the device still computes."""


def hanging(call: Callable[..., Any], is_reached: threading.Event) -> Callable[..., Any]:
    """Return ``call``, whose first result never comes: the host hangs in the next wait for the device, until a communicator is aborted."""
    from null_gpu import counters

    def hung(*args: Any, **options: Any) -> Any:
        if not is_reached.is_set():
            counters.hang()
            is_reached.set()
        return call(*args, **options)

    return hung


def remaining_threads(most: int) -> int:
    """Return the number of threads once it is at most ``most``, or after ``ENDING_S``: a thread that ended stays listed for a moment."""
    deadline = time.monotonic() + ENDING_S
    while (threads := len(os.listdir("/proc/self/task"))) > most and time.monotonic() < deadline:
        time.sleep(0.05)
    return threads


def run_epoch(name: str, most_threads: int) -> Epoch:
    """Join, train a step, hang in the next one, get aborted, and leave with at most ``most_threads`` threads, if no more are left."""
    from null_gpu import counters
    from null_gpu.kinds import DENSE
    from null_gpu.steps import CUDA, stepper_of
    from phalanx.fleet.node.rank.worker import outcome_of
    from phalanx.hardware.local.device import answers
    from phalanx.parallel.process_group.abort import Connections, abort

    connections, is_reached, has_left = Connections(), threading.Event(), threading.Event()
    made, aborted = counters.communicators()

    def order() -> None:
        is_reached.wait()
        while not has_left.wait(0.2):  # as a worker does
            abort(connections, CUDA)

    spec = replace(DENSE, parallel=replace(DENSE.parallel, ranks=8), train=replace(DENSE.train, slots=8))
    call, thread = getattr(dist, name), threading.Thread(target=order)
    raised: Exception = AssertionError("the abort went unnoticed")
    try:
        with stepper_of(spec, ranks=8) as (_, step):
            step()
            setattr(dist, name, hanging(call, is_reached))
            thread.start()
            step()
            step()
    except Exception as error:
        raised = error.with_traceback(None)
    finally:
        setattr(dist, name, call)
        has_left.set()
    thread.join()
    total = counters.communicators()
    return Epoch(
        type(raised).__name__,
        str(raised),
        outcome_of(raised, 1, over=True, device=CUDA) is not None,
        total[0] - made,
        total[1] - aborted,
        remaining_threads(most_threads),
        answers(CUDA),
    )


if __name__ == "__main__":
    set_for_rank(survives=True)
    from null_gpu import answers

    answers.pretend()
    torch.zeros(1, device="cuda")  # the first use of a device starts threads of its own
    most_threads = sys.maxsize
    for _ in range(EPOCHS):
        epoch = run_epoch(sys.argv[1], most_threads)
        most_threads = epoch.threads
        print(json.dumps(asdict(epoch)), flush=True)
    os._exit(0)
