"""Observers of training, which report and change no bit of the weights: events of steps, numbers of all ranks, use of machines.

The loop calls each hook of all its observers in the order of its tuple, on every rank alike, so that a hook may contain collectives.
Others evaluate (``phalanx.train.evaluation.observers``) and record profiles (``phalanx.train.profile.recording``).
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from phalanx.data.reading.first_samples import facts_of_samples
from phalanx.hardware.local.device import most_memory_bytes, on_gpu
from phalanx.model.custom import gradient_notes
from phalanx.observe.event_log import newest_event
from phalanx.observe.events import IncidentKind, Restored, RunStarted, Step
from phalanx.observe.ledger import Bucket
from phalanx.observe.record.records import is_bound, usable_cores
from phalanx.observe.throughput import typical
from phalanx.parallel.reduction.data_parallel import local, named_parameters
from phalanx.plugins import PluginError, load_plugin, plugin_names
from phalanx.run.factory import own_line
from phalanx.run.fields import unknown_value
from phalanx.train.assemble import Training
from phalanx.train.evaluation.scoring import EvaluationStoppedError
from phalanx.train.lifecycle.ending import RunFailedError
from phalanx.train.lifecycle.progress import is_due
from phalanx.train.lifecycle.reporter import start_record, watch_machines
from phalanx.train.measure.numerics import Numerics, differing
from phalanx.train.start.checks import disk_notes, start_notes, thread_notes
from phalanx.train.step.machines import MachineTable
from phalanx.train.step.meters import RankTimes
from phalanx.train.step.step import StepReport

_MUCH_WAITING = 0.05
"""Part of the time of steps from which waiting for samples is reported."""


@dataclass(frozen=True)
class StepEnd:
    """A step that has been computed, judged and counted."""

    step: int
    tokens: int
    """Training tokens of the run so far."""
    report: StepReport
    step_s: float
    last: bool
    """True if it is the run's last step."""

    @property
    def ending(self) -> bool:
        """True if no step follows in this start, by the requests of all ranks during the step."""
        return self.last or self.report.flags.stop or self.report.flags.leave


class Observer:
    """The hooks of the training loop; each does nothing here."""

    def before_step(self, step: int) -> None:
        """Run before ``step`` (from 1) is computed."""

    def after_step(self, end: StepEnd) -> None:
        """Run after a step, before its state is snapshotted and saved."""

    def after_save(self, end: StepEnd) -> None:
        """Run after a step once the saver has its state, if it is saved. May raise ``EvaluationStoppedError`` to stop the run."""

    def at_end(self) -> None:
        """Run after all other hooks of the last step of this start, before its saves have ended."""


class StepLog(Observer):
    """The event of each logged step, and a warning if steps wait for their samples."""

    def __init__(self, training: Training) -> None:
        """Start with no step logged; the run file sets every how many steps one is."""
        self._training = training
        self._every = training.inputs.spec.observe.log_every_steps
        self._recent_s = deque[float](maxlen=self._every)
        self._in_steps_s = 0.0
        """Time in steps of this attempt up to the newest logged one; ``_waited_s`` of it was spent waiting for samples."""
        self._waited_s = 0.0
        self._has_warned = False

    def after_step(self, end: StepEnd) -> None:
        """Emit the step's event if it is due or the last, on the rank that reports. Warn once if much of the time is
        spent waiting for data.

        Speed and MFU are those of the median (``typical``) of the last steps, at most one logging interval of them.
        Goodput is the share of the attempt's time in steps without data waits.
        """
        training, report = self._training, end.report
        self._recent_s.append(end.step_s)
        if not (is_due(end.step, self._every) or end.last) or not training.reporter.speaks:
            return
        step_s = typical(list(self._recent_s)) or end.step_s
        tokens_per_s = report.tokens / step_s
        seconds = training.inputs.ledger.seconds()
        in_steps_s = sum(value for name, value in seconds.items() if name.startswith("step."))
        waited_s = seconds.get(Bucket.STEP_DATA_WAIT, 0.0)
        is_first = self._in_steps_s == 0
        logged_s, self._in_steps_s = in_steps_s - self._in_steps_s, in_steps_s
        wait_s, self._waited_s = waited_s - self._waited_s, waited_s
        training.reporter.emit(
            Step(
                step=end.step,
                steps=training.inputs.spec.train.steps,
                loss=report.loss,
                grad_norm=report.grad_norm,
                lr=report.lr,
                tokens=end.tokens,
                tokens_per_s=tokens_per_s,
                step_s=step_s,
                mfu=training.mfu(tokens_per_s),
                goodput=(in_steps_s - waited_s) / sum(seconds.values()),
                ledger=seconds,
                peak_memory_bytes=most_memory_bytes(training.mesh.device),
                balance=report.balance,
                logged_s=logged_s,
                data_wait_s=wait_s,
                data_store=self._traffic(),
            )
        )
        # The first logged steps wait for the store's first responses.
        if training.data.cached and not is_first and wait_s > _MUCH_WAITING * logged_s:
            self._warn_of_waiting(end.step, wait_s, logged_s)

    def _warn_of_waiting(self, step: int, wait_s: float, logged_s: float) -> None:
        """Warn that ``wait_s`` of the last ``logged_s`` seconds were spent waiting for samples; only the first call of an
        attempt warns.

        The caller decides that this is much.
        """
        if self._has_warned:
            return
        self._has_warned = True
        self._training.reporter.warn(
            f"training waits for its data: {wait_s / logged_s:.0%} of the time up to step {step:,}, {wait_s:.1f} s, since the last one that was "
            "logged. More data.read_ahead_mib helps against slow answers, not against a store that gives too few bytes a second"
        )

    def _traffic(self) -> dict[str, int]:
        """Return the sums of bytes and requests of this rank's datasets in object stores since its start; an empty
        table if all data are in folders.
        """
        totals: Counter[str] = Counter()
        for dataset in self._training.data.cached:
            traffic = dataset.traffic
            totals.update(
                asked_bytes=traffic.asked_bytes,
                fetched_bytes=traffic.fetched_bytes,
                requests=traffic.requests,
            )
        return dict(totals)


class MachineLog(Observer):
    """The use of the run's machines, each time that the first rank has measured its own (``MachineTable``)."""

    def __init__(self, training: Training, machines: MachineTable) -> None:
        self._reporter, self._machines = training.reporter, machines
        self._logged = 0
        """Readings of the first rank's machine that are logged."""

    def after_step(self, end: StepEnd) -> None:
        """Emit the figures of all machines if any has changed, after measuring this machine if it is time. Only on
        the rank that reports.
        """
        if not self._reporter.speaks:
            return
        self._machines.refresh()
        if self._machines.readings == self._logged:
            return
        self._logged = self._machines.readings
        if (event := self._machines.event(end.step)) is not None:
            self._reporter.emit(event)


class RankWindows(Observer):
    """The numbers of all ranks at the end of each window, for the rank file and for the guardian."""

    def __init__(self, training: Training, ranks: RankTimes) -> None:
        self._training, self._ranks = training, ranks

    def after_step(self, end: StepEnd) -> None:
        """Record the step's times. At the end of a window or of the run, pass those of all ranks to the reporter and
        the guardian. A collective.
        """
        frame = self._ranks.step_ended(end.step, last=end.ending)
        if frame is not None:
            self._training.reporter.measured(frame)
            self._training.inputs.guardian.measured(frame)


def report_start(training: Training) -> None:
    """Emit the start and the restored checkpoint, and warn of what may be wrong: changed arithmetic, disk, data,
    damaged checkpoints passed over.

    The rank that reports also starts the comparison of machines, on a thread.
    """
    restored, reporter, inputs = training.restored, training.reporter, training.inputs
    if reporter.speaks:
        earlier = newest_event(inputs.directory.events, lambda event: isinstance(event.body, RunStarted))
        before = earlier.body.environment if earlier and isinstance(earlier.body, RunStarted) else {}
        changed = _changed_numerics(training, before)
        # The run's data are those of its earlier starts, so that no recovery waits for their facts.
        reporter.emit(_started(training, before.get("first_samples") or facts_of_samples(training.data)))
        watch_machines(inputs.directory, reporter)
        if restored is not None and changed:
            reporter.warn(
                f"this machine computes {', '.join(changed)} with other bits than that of the start before: from here on, the bits of "
                "the weights are those of this history of machines"
            )
        if inputs.spec.model.factory:
            for note in gradient_notes(inputs.spec.model):
                reporter.warn(note, IncidentKind.MODEL)
    if training.data.cached and inputs.spec.data.read_ahead_mib / 1024 > inputs.spec.data.cache_gib / 4:
        reporter.warn(
            f"ranks read ahead only {inputs.spec.data.cache_gib * 256:.3g} MiB, a quarter of data.cache_gib, instead of "
            f"data.read_ahead_mib = {inputs.spec.data.read_ahead_mib:g}: more would be dropped before it is used"
        )
    for note in disk_notes(inputs.spec, inputs.directory) if reporter.speaks else ():
        reporter.warn(note)
    if reporter.speaks and not on_gpu(training.mesh.device):
        machines = training.machines.machines
        # A rank that its launcher has bound to some cores shares them with no other.
        ranks = 1 if is_bound() else machines.count(machines[training.mesh.rank])
        for note in thread_notes(inputs.spec, ranks, usable_cores()):
            reporter.warn(note, IncidentKind.THREADS)
    if restored is None or restored.taken_over:
        for note in start_notes(inputs.spec, training.data.index):
            reporter.warn(note)
        for folder in training.data.unchecked_folders if reporter.speaks else ():
            reporter.warn(
                f"{folder} was prepared without block sums and is too large to be read as a whole first: its tokens are trained on as they are "
                f"read. `phalanx data verify {folder} --write-sums` adds them"
            )
    if restored is not None:
        for line in restored.passed_over:
            reporter.warn(f"passed over a damaged checkpoint: {line}", IncidentKind.DAMAGED_CHECKPOINT)
        source = restored.source or str(inputs.directory.checkpoints)
        reporter.emit(Restored(restored.step, source, restored.seconds, moved_bytes=restored.moved_bytes))


def _started(training: Training, first_samples: object) -> RunStarted:
    """Return the event of this start: size, layout, device, parameters, peak and environment, with the facts of ``first_samples``. Also
    writes the patch of changed code into the run directory.
    """
    inputs, layout, index = training.inputs, training.mesh.layout, training.data.index
    return RunStarted(
        run=str(inputs.directory.path),
        steps=inputs.spec.train.steps,
        ranks=training.mesh.ranks,
        layout={axis: degree for axis, degree in layout.degrees.items() if degree > 1},
        device=str(training.mesh.device.type),
        parameters=training.built.placement.parameter_count,
        peak_flops_per_s=training.peak.flops_per_s,
        peak_source=training.peak.source,
        xz_bits_per_byte=index.held_out_xz_bits_per_byte,
        environment={
            **start_record(inputs.spec, inputs.directory, index, training.numerics.probes),
            "first_samples": first_samples,
        },
    )


def _changed_numerics(training: Training, environment: Mapping[str, object]) -> list[str]:
    """Return the probes whose bits on rank 0's machine differ from those of an earlier start's ``environment``; none if there is no record."""
    before = environment.get("numerics")
    if not isinstance(before, dict) or not before:
        return []
    return differing(
        Numerics("", {str(name): str(value) for name, value in before.items()}), training.numerics
    )


# Observers of other packages: a user's own tasks, statistics and alerts, by entry points of the group ``phalanx.observers``.
#
# Only training ranks import their code. An observer that fails ends the run, since the other ranks may be in a collective of
# its hook. So does one that changes a weight in place.

GROUP = "phalanx.observers"
_REMEDY = "mend it, or leave it out of observe.observers; the same command resumes from the newest checkpoint"


class ObserverError(RunFailedError):
    """An observer of another package cannot be made, failed, or changed a weight; the message has its name."""


def open_observers(names: Sequence[str], training: Training) -> list[Observer]:
    """Make the observers called ``names``, each by its entry point from ``training``. Raises ``ObserverError``."""
    return [NamedObserver(name, training) for name in names]


def maker_of(name: str) -> Callable[[Training], Observer]:
    """Return the function that makes the observer called ``name``. Imports its package. Raises ``ObserverError`` if
    it is unknown or cannot be imported.
    """
    try:
        make: Callable[[Training], Observer] | None = load_plugin(GROUP, name)
    except PluginError as error:
        raise ObserverError(f"the observer {error}; {_REMEDY}", _REMEDY) from error
    if make is None:
        problem = unknown_value("observe.observers", name, plugin_names(GROUP))
        raise ObserverError(
            f"the observer {problem.finding} on this machine: {problem.remedy}; {_REMEDY}", _REMEDY
        )
    return make


class NamedObserver(Observer):
    """An observer of another package. Its errors get its name."""

    def __init__(self, name: str, training: Training) -> None:
        """Load and construct the plugin ``name``. Raises ``ObserverError`` if there is none, it fails, or it makes no ``Observer``."""
        self._name, self._training = name, training
        self._parameters = list(named_parameters(training.built.model.parts).values())
        make = maker_of(name)
        self._maker = f"{make.__module__}:{name}"
        with self._guarded("its construction"):
            self._observer: Observer = make(training)
        if not isinstance(self._observer, Observer):
            made = type(self._observer).__name__
            raise ObserverError(
                f"the observer {name!r} is of type {made}, and must be a phalanx.train.lifecycle.observers.Observer; {_REMEDY}",
                _REMEDY,
            )

    def before_step(self, step: int) -> None:
        with self._guarded(f"before_step of step {step:,}"):
            self._observer.before_step(step)

    def after_step(self, end: StepEnd) -> None:
        with self._guarded(f"after_step of step {end.step:,}"):
            self._observer.after_step(end)

    def after_save(self, end: StepEnd) -> None:
        # A request to stop may end an evaluation of the observer's own.
        with self._guarded(f"after_save of step {end.step:,}", EvaluationStoppedError):
            self._observer.after_save(end)

    def at_end(self) -> None:
        with self._guarded("at_end"):
            self._observer.at_end()

    @contextmanager
    def _guarded(self, hook: str, *passed: type[Exception]) -> Iterator[None]:
        """Context of a call of the observer's code, booked as evaluation time. Raises ``ObserverError`` if the code
        fails or has changed a weight.

        The traceback of a failure is printed to stderr. Errors of the types ``passed`` are raised as they are. If
        nothing is raised in it, the clocks of waits forget what they measured.
        """
        before = self._versions()
        try:
            with self._training.inputs.ledger.bucket(Bucket.EVAL):
                yield
        except passed:
            raise
        except (Exception, SystemExit) as error:  # the other package's code may raise any error
            traceback.print_exception(error, file=sys.stderr)
            cause = f"{type(error).__name__}: {error}{own_line(error, self._maker)}"
            raise ObserverError(
                f"the observer {self._name!r} failed in {hook}: {cause}; {_REMEDY}", _REMEDY
            ) from error
        self._training.built.forget_waits()
        if self._versions() != before:
            raise ObserverError(
                f"the observer {self._name!r} changed a weight in {hook}: it may only read them, for example as "
                f"parameter.detach().clone(); {_REMEDY}",
                _REMEDY,
            )

    def _versions(self) -> int:
        # PyTorch counts the operations that write into a tensor, of a divided one also those into this rank's part.
        return sum(parameter._version + local(parameter)._version for parameter in self._parameters)
