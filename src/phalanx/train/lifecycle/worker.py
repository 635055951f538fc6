"""The process of one rank.

The local launcher starts ``python -m phalanx.train.lifecycle.worker RUN_DIR --attempt N`` for each rank; ``torchrun`` and ``srun``
start ``phalanx train`` itself on every rank, which calls ``run_rank`` as well. A fleet's worker calls ``run_epoch``.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.hardware.local.detect import set_for_rank
from phalanx.observe.logs.capture import capture_output
from phalanx.process.child import die_with_parent
from phalanx.process.exit_codes import EXIT_FAILED, EXIT_STOPPED
from phalanx.process.this_process import StopRequest, host_name
from phalanx.train.lifecycle.ending import RunFailedError, report_failure

if TYPE_CHECKING:
    from phalanx.run.directory.paths import RunDirectory, RunResult
    from phalanx.run.spec import RunSpec
    from phalanx.train.assemble import EpochInputs, Training
    from phalanx.train.lifecycle.reporter import Reporter

_LAST_EVENT_S = 2.0


def group_timeout_s(spec: RunSpec) -> float:
    """Seconds for which a rank without a fleet waits for the others in a collective: longer than any of them may wait for its samples."""
    return max(1800.0, spec.data.timeout_s + 300.0)


def run_rank(run_dir: Path, attempt: int, stop: StopRequest) -> RunResult | None:
    """Train the run of a run directory on this rank, without a fleet; the process group has been joined. Sets
    PyTorch's deterministic settings for the process.

    Return the result, or ``None`` if the run was stopped. Errors are not caught.
    """
    from phalanx.hardware.local.device import keep_freed_memory
    from phalanx.observe.ledger import Bucket, Ledger
    from phalanx.observe.record.records import process_age_ns
    from phalanx.parallel.process_group.rendezvous import RankEnvironment, device_for, rank_from_environment
    from phalanx.run.directory.paths import RunDirectory, read_resolved
    from phalanx.train.assemble import EpochInputs, make_deterministic

    ledger = Ledger(time.monotonic_ns() - process_age_ns(), Bucket.START_PROCESS)
    directory = RunDirectory(run_dir)
    spec = read_resolved(directory)
    place = rank_from_environment(os.environ) or RankEnvironment(0, 1, 0, "", "phalanx")
    device = device_for(spec.runtime.device, place.local_rank)
    make_deterministic(spec, device)
    keep_freed_memory(device)
    return run_epoch(EpochInputs(spec, directory, attempt, device, ledger, stop))


def run_epoch(inputs: EpochInputs) -> RunResult | None:
    """Train one epoch on this rank, whose process group the caller has joined. Return the result; ``None`` if the run
    was stopped. Rank 0 also writes the events and draws the loss curve.

    The event stream, the sinks and the saver are closed in any case. Without a fleet, a failed allocation is raised
    as ``MemoryShortError``.
    """
    import torch.distributed as dist

    from phalanx.hardware.local.detect import Throttles
    from phalanx.observe.event_log import EventLog
    from phalanx.observe.rank_writer import RankRecorder
    from phalanx.observe.record.notes import ThrottlingWatch
    from phalanx.observe.sink_registry import open_sinks
    from phalanx.train.assemble import assemble
    from phalanx.train.lifecycle.loop import train
    from phalanx.train.lifecycle.reporter import Reporter, first_of_node
    from phalanx.train.start.memory import shortage_of

    first, directory = dist.get_rank() == 0, inputs.directory
    reporter = Reporter(EventLog(directory.events, inputs.attempt) if first else None)
    if first and inputs.spec.observe.ranks_every_steps:
        reporter.ranks = RankRecorder(directory.ranks)
    training, ended = None, False
    # A fleet's worker looks for all its epochs.
    alone = inputs.warm is None and first_of_node()
    throttling = ThrottlingWatch(directory, host_name(), Throttles().now).start() if alone else None
    try:
        training = assemble(inputs, reporter)
        if inputs.warm is None:
            # Only in a process of one epoch: frozen objects are never collected, and in a worker that continues with the next
            # epoch, reference cycles would keep this epoch's model in memory.
            freeze_gc()
        inputs.guardian.assembled(training.built, training.saver)
        inputs.stop.listen(partial(_end_before_a_step, training))
        if first:  # not before a signal can close them: a tracker would show the run as running
            with inputs.guardian.outside():
                reporter.sinks = open_sinks(inputs.spec.observe.sinks, directory.path, directory.path.name)
        result = train(training)
        ended = True
        if first:
            _draw(directory, reporter)
        return result
    except (RuntimeError, MemoryError) as error:
        # A fleet starts a worker without memory again, elsewhere if need be.
        if inputs.warm is None and (short := shortage_of(error)):
            raise short from error
        raise
    finally:
        reporter.close(ended=ended)
        if throttling is not None:
            throttling.close()
        if training is not None:
            training.saver.cancel()
            training.saver.close()
            if training.copies:
                training.copies.cancel()


def _end_before_a_step(training: Training) -> None:
    """End this process with ``EXIT_STOPPED`` after a request to stop in its first step: there is nothing to save. The
    stop is emitted and the sinks are closed, in bounded time.
    """
    from phalanx.observe.events import Stopped
    from phalanx.observe.sinks import END_TIMEOUT_S
    from phalanx.train.lifecycle.loop import what_is_kept

    step = training.restored.step if training.restored is not None else 0
    kept = what_is_kept(step, step, saved=False, newest=training.inputs.directory.newest_checkpoint())
    stopped = Stopped(step, f"stopped on request; {kept}", training.inputs.ledger.seconds())
    is_reported = threading.Event()

    def report() -> None:
        training.reporter.emit(stopped)
        is_reported.set()
        training.reporter.close(ended=True)

    # On a thread, since the signal may have interrupted the writing of an event.
    reporting = threading.Thread(target=report, daemon=True)
    reporting.start()
    if is_reported.wait(_LAST_EVENT_S):
        reporting.join(END_TIMEOUT_S + _LAST_EVENT_S)
    os._exit(EXIT_STOPPED)


@contextmanager
def without_gc() -> Iterator[None]:
    """Context without garbage collection, for imports. At its end all present objects are frozen: they are never
    collected, as their modules stay with the process.

    Collections are a sixth of the time that importing PyTorch takes, and one look at its 300,000 objects afterwards
    takes 0.3 s more. The 9,000 of them that are no longer needed stay as well.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def freeze_gc() -> None:
    """Collect garbage, then exempt all objects that exist now from collection, so that later collections are quick."""
    gc.collect()
    gc.freeze()


def _draw(directory: RunDirectory, reporter: Reporter) -> None:
    """Draw the loss curve of the run's events into its directory. A failure is only a warning."""
    from phalanx.observe.display.curve import CurveError, draw_curve
    from phalanx.observe.event_log import EventLogError, read_events

    try:
        draw_curve(read_events(directory.events), directory.curve)
    except (CurveError, EventLogError, OSError) as error:
        reporter.warn(f"the loss curve could not be drawn: {error}")


def known_errors() -> tuple[type[Exception], ...]:
    """Return the errors whose message is meant for the user: no traceback is shown. Imports PyTorch."""
    from phalanx.checkpoint.format.errors import CheckpointError
    from phalanx.data.errors import DataError
    from phalanx.model.custom import CustomModelError
    from phalanx.observe.event_log import EventLogError
    from phalanx.observe.sink_registry import SinkError
    from phalanx.parallel.mesh import LayoutError
    from phalanx.parallel.process_group.rendezvous import RendezvousError
    from phalanx.run.directory.paths import RunDirectoryError
    from phalanx.run.factory import FactoryError
    from phalanx.run.rules import NotPortableError
    from phalanx.train.measure.numerics import MixedMachinesError
    from phalanx.train.step.state import NoGoodCheckpointError

    return (
        CheckpointError,
        CustomModelError,
        DataError,
        EventLogError,
        FactoryError,
        LayoutError,
        MixedMachinesError,
        NoGoodCheckpointError,
        NotPortableError,
        RendezvousError,
        RunDirectoryError,
        RunFailedError,
        SinkError,
    )


def main(work: Callable[[Path, int, StopRequest], object | None] = run_rank) -> int:
    """Run the process that the local launcher starts for each rank; its rank comes from the environment. Return 0, or
    ``EXIT_STOPPED`` if the run was stopped.

    ``work`` is called with the run directory, the attempt and the stop request once the group is joined; its ``None``
    means stopped. After an error the process exits at once with ``EXIT_FAILED``: a known one is printed and recorded,
    any other has its traceback printed.
    """
    die_with_parent()
    log_position = capture_output(os.environ)
    stop = StopRequest((signal.SIGTERM, signal.SIGINT))
    stop.end_at_once()
    set_for_rank()
    parser = argparse.ArgumentParser(prog="phalanx.train.lifecycle.worker")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    arguments = parser.parse_args()
    with without_gc():
        import phalanx.train.lifecycle.loop  # noqa: F401 - with all that training imports
        from phalanx.parallel.process_group.rendezvous import device_for, join, leave, rank_from_environment
        from phalanx.run.directory.paths import RunDirectory, read_resolved

    directory = RunDirectory(arguments.run_dir)
    rank: int | None = None  # unknown until the environment has been read
    try:
        place = rank_from_environment(os.environ)
        assert place is not None, "started without a place"
        rank = log_position.rank = place.rank
        spec = read_resolved(directory)
        join(place, device_for(spec.runtime.device, place.local_rank), group_timeout_s(spec))
        result = work(arguments.run_dir, arguments.attempt, stop)
        leave()
    except known_errors() as error:
        try:
            if rank is None:
                print(f"error: {error}", file=sys.stderr, flush=True)
            else:
                report_failure(error, directory.log(arguments.attempt, rank), arguments.attempt, rank)
        finally:  # also where it cannot be reported
            # A clean exit would hang in a collective with the others, until the launcher ends them.
            os._exit(EXIT_FAILED)
    except BaseException:
        try:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(EXIT_FAILED)
    return 0 if result is not None else EXIT_STOPPED


if __name__ == "__main__":
    sys.exit(main())
