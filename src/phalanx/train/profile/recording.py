"""Record the next few steps on the ranks that were chosen: when it begins, what it writes, and how it ends, whatever happens.

All ranks learn of a request in the same step, by a flag in the all-reduce of losses that every step makes anyway (``StepFlags.profile``). Then,
and only then, rank 0 sends them the request; before the next step all pass a few barriers, which bind their clocks together, and those that are
chosen record. After the last step come the barriers once more, and each writes a file of its own, in a thread. A rank that cannot record or
write reports it and trains on: the others need only its barriers.

The clocks: no rank leaves a barrier before the last has come. So of two ranks, the one's clock cannot have been further ahead than its time
of leaving less the other's time of coming, for each barrier; ``phalanx_watch.profile.waits`` takes the closest.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from phalanx.hardware.local.device import measure_copy_bytes_per_s, wait_for_device, wait_for_stream
from phalanx.observe.events import IncidentKind
from phalanx.observe.profile_request import ProfileRequest, ProfileRequestError
from phalanx.observe.recorded_step import ORDER_FILE, rank_file, write_rank_trace
from phalanx.parallel.process_group.typed_gather import broadcast_typed
from phalanx.parallel.reduction.data_parallel import local
from phalanx.run.directory.files import write_atomically
from phalanx.train.lifecycle.observers import Observer, StepEnd
from phalanx.train.profile.capture import Marks, make_profiler, rank_trace
from phalanx.train.profile.choose import chosen_ranks
from phalanx.train.profile.instruments import instruments
from phalanx.train.step.meters import storage_bytes

if TYPE_CHECKING:
    from torch.autograd.profiler import profile

    from phalanx.train.assemble import Training
    from phalanx.train.step.step import Stepper

_BARRIERS = 12
"""Before and after: the shortest of so many bounds the clocks' difference."""
_WRITE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class RecordingOrder:
    """The order of rank 0 to all ranks; without ranks, nothing is recorded."""

    name: str
    steps: int
    ranks: dict[int, str]
    """The ranks that record, with the reason for each."""


class Recording(Observer):
    """One rank's side of all profiles of an attempt.

    Args:
        training: The run.
        stepper: What runs its steps.
        slowest: Gives the rank that computes longest, if that is known; called on rank 0 only, when a request is taken.
        measured_step: A step that is measured in another way, and slower for it: no recording begins with it.
    """

    def __init__(
        self, training: Training, stepper: Stepper, slowest: Callable[[], int | None], measured_step: int
    ) -> None:
        """Record nothing yet. ``slowest`` returns the slowest rank, if known; a recording does not begin at
        ``measured_step``, in which memory is measured.
        """
        self._training, self._stepper, self._slowest = training, stepper, slowest
        self._measured_step = measured_step
        self._order: RecordingOrder | None = None
        self._left = 0
        """Steps that are still to be recorded of the present order."""
        self._camera: _Camera | None = None
        self._writers: list[threading.Thread] = []

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Drop a recording that is not complete, with a warning, and wait for the writers: not at all after an error, else for a
        bounded time."""
        if self._camera is not None:
            self._camera.drop()
            self._camera = None
            self._training.reporter.warn("the profile that was being recorded is lost: training ended first")
        for writer in self._writers:
            writer.join(_WRITE_TIMEOUT_S if error is None else 0.0)

    def after_save(self, end: StepEnd) -> None:
        """Receive rank 0's decision on a pending request, if some rank's profile flag was set in the step. A
        collective then.

        An order is dropped while a recording runs.
        """
        if not end.report.flags.profile:
            return
        training = self._training
        order = RecordingOrder("", 0, {})
        if training.profiles is not None:
            request = training.profiles.take()
            if request is not None:
                order = self._decided(request, end.ending)
        order = broadcast_typed(order, RecordingOrder)
        if order.ranks and not self._left:
            self._order = order

    def before_step(self, step: int) -> None:
        """Begin, continue, or end a recording before step ``step``; all ranks do the same. Beginning and ending are collectives."""
        if not self._left and (self._order is None or step == self._measured_step):
            return
        if self._order is not None:
            self._begin(self._order, step)
            self._left, self._order = self._order.steps, None
        else:
            self._left -= 1
        if self._camera is not None:
            self._camera.step(step if self._left else None)
        if not self._left:
            self._end()

    def at_end(self) -> None:
        """End a running recording early and write it: the start ends, or a fork follows, whose steps are not the
        run's. A collective then.
        """
        if self._left:
            self._left = 0
            if self._camera is not None:
                self._camera.step(None)
            self._end()

    def _decided(self, request: ProfileRequest, ending: bool) -> RecordingOrder:
        """Decide on a request, on rank 0: make its folder, write the order and return it. Warn and return an order
        without ranks if it comes in the last step or beside another recording, names impossible ranks, or cannot be
        written; nothing is raised.
        """
        training, none = self._training, RecordingOrder("", 0, {})
        folder = training.inputs.directory.profiles / request.name
        try:
            if ending:
                raise ProfileRequestError("it came in the last step of this start, and no other follows")
            if self._left or self._order is not None:
                raise ProfileRequestError("another one is being recorded: ask again when it is done")
            ranks = chosen_ranks(request.ranks, training.mesh.layout, self._slowest())
            folder.mkdir(parents=True)
            order = RecordingOrder(request.name, request.steps, ranks)
            self._write_order(folder, order)
        except (ProfileRequestError, OSError) as error:
            text = f"the request for profile {request.name} is not followed: {error}"
            training.reporter.warn(text, IncidentKind.PROFILE_REFUSED)
            return none
        return order

    def _write_order(self, folder: Path, order: RecordingOrder) -> None:
        """Write the order with the run's layout, the attempt, the peak rate of one rank and the time into the profile's
        folder. Raises ``OSError``.
        """
        training = self._training
        layout, inputs = training.mesh.layout, training.inputs
        content = {
            "name": order.name,
            "steps": order.steps,
            "ranks": {str(rank): reason for rank, reason in order.ranks.items()},
            "of_ranks": training.mesh.ranks,
            "layout": {**layout.degrees, "expert": layout.expert, "expert_tensor": layout.expert_tensor},
            "attempt": inputs.attempt,
            "device": inputs.device.type,
            "peak_flops_per_s": training.peak.flops_per_s / training.mesh.ranks,
            "peak_source": training.peak.source,
            "asked_unix_s": time.time(),
        }
        write_atomically(folder / ORDER_FILE, (json.dumps(content) + "\n").encode(), durable=False)

    def _begin(self, order: RecordingOrder, step: int) -> None:
        """Start this rank's recording if it is chosen, and run the barriers that align clocks. A collective."""
        training = self._training
        if training.mesh.rank in order.ranks:
            self._camera = _Camera(training, self._stepper, order, step)
            self._camera.start()
        _barriers(training.inputs.device, self._camera, "before")

    def _end(self) -> None:
        """Run the closing barriers, stop the recording, and write it on a thread. A collective."""
        _barriers(self._training.inputs.device, self._camera, "after")
        camera, self._camera = self._camera, None
        if camera is not None and camera.stop():
            writer = threading.Thread(target=camera.write, name="profile writer", daemon=True)
            writer.start()
            self._writers = [*(thread for thread in self._writers if thread.is_alive()), writer]


def _barriers(device: torch.device, camera: _Camera | None, when: str) -> None:
    """Run a few all-reduces, which align the ranks' clocks, each with a mark if this rank records. A collective call."""
    token = torch.zeros(1, device=device)
    for number in range(_BARRIERS):
        with ExitStack() as marked:
            if camera is not None and camera.runs:
                marked.enter_context(camera.marks.around("clock", when, number=number))
            dist.all_reduce(token)
            wait_for_stream(device)


class _Camera:
    """The recording of one rank. No method raises: an error is reported, and costs this rank's part of the profile."""

    def __init__(self, training: Training, stepper: Stepper, order: RecordingOrder, step: int) -> None:
        """Prepare a recording that begins at ``step``; nothing is measured yet."""
        self.marks = Marks()
        self.runs = False
        self._training, self._stepper, self._order, self._first = training, stepper, order, step
        self._profiler: profile | None = None
        self._attached = ExitStack()
        self._step = ExitStack()
        self._meta: dict[str, Any] = {}
        self._begin_s = time.perf_counter()

    def start(self) -> None:
        """Start the profiler, after measuring copies and memory. A failure is printed, and this rank records nothing."""
        with _forgiving(self):
            device = self._training.inputs.device
            self._meta = {
                "device": device.type,
                "first_step": self._first,
                "attempt": self._training.inputs.attempt,
                "copy_bytes_per_s": measure_copy_bytes_per_s(device),
                "held_bytes": self._held(),
            }
            self._profiler = make_profiler(device)
            self._profiler.__enter__()  # type: ignore[no-untyped-call]
            self.runs = True

    def step(self, number: int | None) -> None:
        """End the range of the step before, after waiting for the device, and begin that of step ``number``. The
        first one installs the instruments; ``None`` removes them.
        """
        if not self.runs:
            return
        with _forgiving(self):
            wait_for_device(self._training.inputs.device)
            self._step.close()
            if number is None:
                self._attached.close()
                return
            if number == self._first:
                self._meta["start_s"] = time.perf_counter() - self._begin_s
                self._attached.enter_context(instruments(self._training, self._stepper, self.marks))
            self._step.enter_context(self.marks.around("step", f"step {number}", step=number))

    def stop(self) -> bool:
        """Stop the profiler. Return False if there is nothing to write, because it never ran or failed."""
        if not self.runs:
            return False
        with _forgiving(self):
            begin_s = time.perf_counter()
            assert self._profiler is not None
            self._profiler.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self.runs = False
            self._meta["stop_s"] = time.perf_counter() - begin_s
            return True
        return False

    def drop(self) -> None:
        """End the recording, if any, and discard it, also one not begun. Errors end recording without being raised."""
        was_running, self.runs = self.runs, False
        with _forgiving(self):
            self._step.close()
            self._attached.close()
            if was_running and self._profiler is not None:
                self._profiler.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._profiler = None

    def write(self) -> None:
        """Write the rank's trace into the profile's folder; call it on a thread beside the training. A failure is printed."""
        with _forgiving(self):
            assert self._profiler is not None
            mesh = self._training.mesh
            trace = rank_trace(self._profiler, mesh.rank, self.marks.rows, self._meta)
            path = rank_file(self._training.inputs.directory.profiles / self._order.name, mesh.rank)
            write_rank_trace(path, trace)
        self._profiler = None

    def _held(self) -> dict[str, int]:
        """Return the bytes of parameters, optimizer state and buffers that are allocated before the first step."""
        built, device = self._training.built, self._training.inputs.device
        parameters = [
            local(parameter.detach()) for part in built.model.parts for parameter in part.parameters()
        ]
        return {
            "parameters": storage_bytes(parameters, device),
            "optimizer": storage_bytes(built.optimizer_tensors(), device),
            "buffers": storage_bytes((b for part in built.model.parts for b in part.buffers()), device),
        }


@contextmanager
def _forgiving(camera: _Camera) -> Iterator[None]:
    """Context that keeps errors of a recording from the training: they are printed, and the recording ends."""
    try:
        yield
    except Exception as error:
        print(f"phalanx: the profile of this rank is lost: {error}", file=sys.stderr, flush=True)
        traceback.print_exception(error, limit=-3)
        if camera.runs:
            camera.drop()
