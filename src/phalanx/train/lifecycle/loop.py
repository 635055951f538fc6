"""The training loop of one rank: restore, next samples, step, conclude, save, stop.

``Trainer.run`` is the order of a run. ``Trainer._conclude`` is the order of what follows a step. Other modules do the work:
``phalanx.train.step.step`` computes a step, ``phalanx.train.lifecycle.progress`` counts steps, ``bad_steps`` beside it judges them, and
``phalanx.train.lifecycle.saving`` hands the state to checkpoints. Observers (``phalanx.train.lifecycle.observers``) report on the
run; none of them changes a bit of the weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import NoReturn

import torch.distributed as dist

from phalanx.data.reading.prefetch import WaitEndedError
from phalanx.hardware.local.device import gpu_use, on_gpu
from phalanx.observe.event_log import read_events
from phalanx.observe.events import EndedEarly, Finished, MemoryMeasured, Step, Stopped
from phalanx.observe.ledger import Bucket
from phalanx.observe.throughput import typical
from phalanx.parallel.process_group.sockets import LinkMeter
from phalanx.run.directory.paths import EarlyStop, RunResult
from phalanx.train.assemble import Training
from phalanx.train.evaluation.observers import Evaluator, KeepBest, Scores, StopEarly
from phalanx.train.evaluation.scoring import EvaluationStoppedError
from phalanx.train.lifecycle.bad_steps import judge_nonfinite, judge_spike
from phalanx.train.lifecycle.ending import RunFailedError
from phalanx.train.lifecycle.fork import Fork, ForkStoppedError
from phalanx.train.lifecycle.observers import (
    MachineLog,
    Observer,
    RankWindows,
    StepEnd,
    StepLog,
    open_observers,
    report_start,
)
from phalanx.train.lifecycle.progress import BridgedSamples, SampleSupply, TrainProgress
from phalanx.train.lifecycle.saving import Saving, save_due
from phalanx.train.profile.instruments import NvtxRanges, nvtx_ranges
from phalanx.train.profile.recording import Recording
from phalanx.train.statistics import LayerMeter
from phalanx.train.step.machines import MachineMeter, MachineTable
from phalanx.train.step.meters import MemoryMeter, RankTimes, extremes
from phalanx.train.step.state import weights_sha256
from phalanx.train.step.step import Audit, StepFlags, Stepper, StepReport


class UnsavedError(RunFailedError):
    """The run came to its end, but its last state could not be saved."""


def train(training: Training) -> RunResult | None:
    """Train to the last step and return the result; ``None`` if the run was stopped before.

    Raises:
        NonFiniteError: By ``train.on_nonfinite`` or ``train.max_skipped``.
        LossSpikeError: By ``train.on_spike`` or ``train.max_skipped``.
        ForkFailedError: A checkpoint that a fork needs cannot be read or written.
        UnsavedError: The last checkpoint failed; the run can be started again from an older one.
    """
    return Trainer(training).run()


class Trainer:
    """One attempt of a run on one rank, from its restored state to its last step."""

    _stepper: Stepper
    _step_log: StepLog
    _recording: Recording
    _batches: ExitStack
    """Closes the reading of samples ahead."""
    _samples: BridgedSamples
    _read_from: Callable[[SampleSupply], BridgedSamples]
    _audit: Audit | None
    _layers: LayerMeter
    _observers: tuple[Observer, ...]

    def __init__(self, training: Training) -> None:
        """Take over the restored progress, or start from zero; reads and opens nothing."""
        inputs, restored = training.inputs, training.restored
        self._training, self._spec = training, inputs.spec
        self._guardian, self._ledger, self._reporter = inputs.guardian, inputs.ledger, training.reporter
        self._progress = TrainProgress() if restored is None else TrainProgress.from_extra(restored.extra)
        self._at_start = replace(self._progress)
        """The progress at which this attempt began."""
        self._saving = Saving(training)
        self._evaluation = Evaluator(training)
        self._best: KeepBest | None = None
        self._early: StopEarly | None = None
        self._step_s: list[float] = []
        """Seconds of each step of this attempt."""
        self._memory_bytes: dict[str, int] = {}
        """Measured memory by kind, on the rank that holds most of it; empty until it is measured."""

    def run(self) -> RunResult | None:
        """Train as ``train`` does; the result is also returned after an early stop. Return ``None`` on a request to stop, even in the last
        evaluation, after the saves and copies under way.

        If the wait for samples is ended, save the steps of this start and return ``None``. If a rank's samples cannot be read, all ranks
        save them, and that rank raises ``DataError``. Other errors within a step are raised without a save. If a non-finite or spiking
        step ends the run, the state before it is saved, and the error raised.
        """
        training, progress = self._training, self._progress
        report_start(training)
        with ExitStack() as opened:
            self._set_up(opened)
            try:
                if self._early is not None:
                    self._early.evaluate_restored()
            except EvaluationStoppedError:
                self._stop()
                return None
            while progress.step < self._spec.train.steps and self._early_stop is None:
                number = progress.step + 1
                for observer in self._observers:
                    observer.before_step(number)
                begin_s, training.inputs.place.step = time.perf_counter(), number
                try:
                    self._layers.begin(number)
                    report = self._compute(number)
                    if not report.flags.no_samples:
                        self._layers.end(report)
                except WaitEndedError:
                    # The state is that of the step before: only a step's update changes it, and the samples come before that.
                    if progress.step > self._at_start.step:
                        self._saving.save(progress)
                    self._stop()
                    return None
                except Exception:
                    training.inputs.stop.step_failed()
                    raise
                training.inputs.stop.step_ended()
                self._guardian.computed()
                if report.flags.no_samples:
                    self._end_without_samples()
                self._step_s.append(time.perf_counter() - begin_s)
                if (concluded := self._advance(report)) is None:
                    self._stop()
                    return None
                stops = self._conclude(concluded)
                if stops and progress.step < self._spec.train.steps:
                    self._stop()
                    return None
        return self._finish()

    def _set_up(self, opened: ExitStack) -> None:
        """Prepare the steps after ``progress``: samples, stepper, meters, audit and observers; ``opened`` closes what
        they hold open.

        Also save the restored step if its checkpoint was due, and begin the guardian's snapshots.
        """
        training, spec, progress = self._training, self._spec, self._progress
        guardian, rounds = self._guardian, training.built.rounds
        supply = SampleSupply(training.data, spec, rounds, self._at_start)
        guardian.reads(training.data)
        # With several ranks, the others may be in a collective and could not save. Agents recall their workers themselves.
        alone = training.mesh.ranks == 1 and training.inputs.warm is None
        self._batches = opened.enter_context(ExitStack())

        def read_from(place: SampleSupply) -> BridgedSamples:
            """Return the samples of ``place``, read ahead until training ends; a rank that is alone gives up waiting
            once a stop is requested.
            """
            samples = self._batches.enter_context(
                place.prefetch(
                    training.mesh.rank,
                    self._reporter.warn,
                    enough=(lambda: training.inputs.stop.made) if alone else None,
                )
            )
            # An audit would compare what other ranks compute of the same slots, and blame this one's machine.
            self._samples = BridgedSamples(samples, lambda: self._audit is None)
            return self._samples

        self._read_from = read_from

        self._stepper = progress.stepper(training.built, read_from(supply), self._ledger)
        windows = spec.observe.ranks_every_steps, guardian.window_steps()
        device, meter, links = training.mesh.device, MachineMeter(), LinkMeter()
        machines = MachineTable(
            training.machines, training.mesh.rank, lambda: {**meter.read(), **links.read(), **gpu_use(device)}
        )
        ranks = RankTimes(self._stepper, training.inputs.attempt, windows, machines)
        self._saving.keep_before_spikes(progress)
        self._audit = guardian.audit(self._stepper, supply.samples)
        self._layers = LayerMeter(self._stepper, supply.samples, self._reporter.emit)
        guardian.begins(progress.step, training.shards, self._saving.extra(progress))
        own = training.restored is not None and not training.restored.taken_over
        if own and 0 < progress.step < spec.train.steps and save_due(spec, progress.step):
            # After an in-memory restore the checkpoint that was due at this step may be missing: the fault may have
            # come before it was committed.
            self._saving.save(progress)
        self._ledger.switch(Bucket.STEP_HOST_GAP)
        if spec.observe.nvtx and on_gpu(training.mesh.device):
            opened.enter_context(nvtx_ranges(training, self._stepper, NvtxRanges()))
        elif spec.observe.nvtx:
            self._reporter.warn("observe.nvtx shows nothing: it needs an NVIDIA GPU")
        if spec.evaluation.keep_best:
            self._best = KeepBest(training, self._saving, progress, self._evaluation)
            if spec.evaluation.stop_after:
                self._early = StopEarly(training, progress, self._evaluation, self._best)
        self._recording = Recording(training, self._stepper, lambda: ranks.slowest, self._measured_step)
        # The events of a step are logged in this order. A request to stop ends the evaluation, and the hook with it, so only
        # observers that depend on its result come after it.
        self._step_log = StepLog(training)
        self._observers = (
            self._step_log,
            RankWindows(training, ranks),
            MachineLog(training, machines),
            opened.enter_context(self._recording),
            *open_observers(spec.observe.observers, training),
            self._evaluation,
            *(observer for observer in (self._best, self._early) if observer is not None),
        )

    @property
    def _early_stop(self) -> EarlyStop | None:
        """The run's own decision to end before its last step."""
        return None if self._early is None else self._early.ended

    @property
    def _measured_step(self) -> int:
        """The step that measures memory; no step if ``observe.memory_at_step`` is 0, as all come after ``begun``."""
        return self._at_start.step + self._spec.observe.memory_at_step

    def _flags(self) -> StepFlags:
        """Return this rank's requests to all ranks for the next step: stop, unsafe node, leave, save, profile."""
        training, guardian = self._training, self._guardian
        wants_save = self._saving.wanted()
        profile = training.profiles is not None and training.profiles.pending()
        return StepFlags(
            training.inputs.stop.made, not guardian.safe(), guardian.leaving(), wants_save, profile
        )

    def _compute(self, number: int) -> StepReport:
        """Run step ``number``; before the update, wait for the checkpoint that copies the weights. In one step of an
        attempt, also measure the memory of each rank and emit it. Raises ``WaitEndedError``, and ``DataError`` where no
        samples were read before (``BridgedSamples``).
        """
        built, device = self._training.built, self._training.mesh.device
        meter = None
        if number == self._measured_step:
            compiled = self._spec.runtime.compile
            meter = MemoryMeter(built.model.parts, built.optimizer_tensors, device, compiled=compiled)

        def before_update() -> None:
            self._saving.fence()
            if meter is not None:
                meter.gradients_complete()

        with meter or nullcontext():
            report = self._stepper.run(
                number,
                self._flags(),
                lacks_samples=lambda: self._samples.error is not None,
                before_sums=self._training.inputs.stop.join_step,
                before_update=before_update,
                audit=self._audit,
                statistics=self._layers,
            )
        if meter is not None:
            self._memory_bytes, least = extremes(meter.result(), device)
            self._reporter.emit(MemoryMeasured(number, self._memory_bytes, least))
        return report

    def _end_without_samples(self) -> NoReturn:
        """Save the steps of this start, and raise the error of this rank's samples; a rank without one waits until those end.

        A collective, after a step that was not applied because a rank lacked its samples.
        """
        if self._progress.step > self._at_start.step:
            self._saving.save(self._progress)
            self._saving.settle()
        if self._samples.error is not None:
            raise self._samples.error
        # Broken by the end of that rank, or ended by the launcher: only the rank at fault shall name an error.
        dist.barrier()
        raise AssertionError("a rank without samples did not end")

    def _advance(self, report: StepReport) -> StepReport | None:
        """Count a step as done, and return its report; after a fork, that of the last step of the child that was taken.

        If loss or gradient norm is not finite or a spike, emit the event. If the run must end, save the weights as they
        were before the step and raise as ``train`` does. Return ``None`` on a request to stop in a fork.
        """
        progress, train = self._progress, self._spec.train
        spike, bad = progress.spike(report, train), None
        if spike is not None:
            bad = judge_spike(self._spec, progress, report, spike, self._training.inputs.directory.path)
        elif not report.applied:
            self._guardian.not_finite(progress.step + 1, report)
            bad = judge_nonfinite(train, progress, report)
        if bad is not None:
            self._reporter.emit(bad.event)
            if bad.remedy:
                self._saving.save(progress)
                saved = self._saving.settle()
                raise bad.error(saved=saved, newest=self._training.inputs.directory.newest_checkpoint())
        if spike is not None and train.on_spike == "fork":
            return self._fork(report)
        progress.advance(report, self._stepper.updates, train, spike)
        if spike is not None:
            self._saving.keep_before_spikes(progress)
        return report

    def _fork(self, report: StepReport) -> StepReport | None:
        """Save the state before the spike, train the children, and continue as the best of them, saved and logged. The
        children's checkpoints are removed once that save is durable.

        Return the report of its last step; ``None`` on a request to stop.
        """
        progress, stepper, training = self._progress, self._stepper, self._training
        spike = progress.step + 1
        self._recording.at_end()
        self._saving.save(progress)
        self._saving.settle()
        fork = Fork(training, self._saving, progress)
        with self._ledger.bucket(Bucket.EVAL), self._guardian.apart():
            try:
                child = fork.run()
            except ForkStoppedError:
                return None
        vars(progress).update(vars(child.progress))
        stepper.updates = progress.updates
        stepper.rate_scale, stepper.clip_scale = progress.rate_scale, progress.clip_scale
        training.built.set_wide(wide=progress.wide)
        self._batches.close()
        stepper.batches = self._read_from(
            SampleSupply(training.data, self._spec, training.built.rounds, progress)
        )
        self._saving.keep_before_spikes(progress)
        self._saving.save(progress)
        if self._saving.settle():
            fork.clean()
        if self._best is not None:
            self._best.choose_again()
        if self._early is not None:
            self._early.decide()
        *earlier, last = (step for step in child.steps if step.step >= spike)
        for step in earlier:
            self._step_log.after_step(
                StepEnd(step.step, step.tokens, step.report(report), self._step_s[-1], last=False)
            )
        return last.report(report)

    def _conclude(self, report: StepReport) -> bool:
        """Do what is due after a step: observers, snapshot, checkpoint, observers after saving. Return True if the run
        is to stop.

        The state is saved if a node leaves without snapshots, or if, except after the last step, a stop or save was
        requested or the step is due. A stopped evaluation also saves and stops.
        """
        training, spec, progress = self._training, self._spec, self._progress
        end = StepEnd(
            progress.step, progress.tokens, report, self._step_s[-1], last=progress.step == spec.train.steps
        )
        for observer in self._observers:
            observer.after_step(end)
        if report.flags.leave and spec.fleet.snapshot_every_steps == 0:
            self._saving.save(progress)  # no snapshot holds this step for the next epoch
            self._saving.settle()
        self._guardian.ended(progress.step, training.shards, self._saving.extra(progress), report)
        stops = report.flags.stop
        if not end.last and (stops or report.flags.save or save_due(spec, progress.step)):
            self._saving.save(progress)
        try:
            for observer in self._observers:
                observer.after_save(end)
        except EvaluationStoppedError:
            stops = True
            self._saving.save(progress)
        self._saving.collect()
        if stops or end.last or self._early_stop is not None:
            for observer in self._observers:
                observer.at_end()
        return stops

    def _stop(self) -> None:
        """Wait for the saves and copies under way, and emit that the run was stopped, with what is kept."""
        self._ledger.switch(Bucket.STOP)
        saved = self._saving.settle()
        self._saving.settle_copies()
        step = self._progress.step
        newest = self._training.inputs.directory.newest_checkpoint()
        kept = what_is_kept(self._at_start.step, step, saved=saved, newest=newest)
        self._reporter.emit(Stopped(step, f"stopped on request; {kept}", self._ledger.seconds()))

    def _finish(self) -> RunResult | None:
        """Save, evaluate and hash the final weights, and write the result on rank 0; ``None`` on a request to stop
        during the evaluation.

        The save comes first: evaluation and hash need memory that training did not, and their failure shall not cost
        steps. Raises ``UnsavedError`` if the save fails. A run that ended early emits that event first.
        """
        training, guardian, progress = self._training, self._guardian, self._progress
        first, early = training.mesh.rank == 0, self._early_stop
        if early is not None and progress.step < self._spec.train.steps:
            body = EndedEarly(
                progress.step, early.figure, early.stop_after, early.best_step, early.best_value
            )
            self._reporter.emit(body)
        if first:
            guardian.await_authority()
        self._saving.save(progress)
        if not self._saving.settle():
            remedy = "mend this and start again: the run resumes from its newest checkpoint, or starts from scratch if it has none"
            problem = f"all {progress.step} steps are done, but the last checkpoint could not be saved"
            raise UnsavedError(f"{problem}: {self._saving.last_failure} To resume, {remedy}", remedy)
        try:
            scores = self._evaluation.run(progress.step, self._spec.evaluation.final_sequences)
        except EvaluationStoppedError:
            self._stop()
            return None
        self._ledger.switch(Bucket.STOP)
        weights = weights_sha256(training.built.model.parts, training.built.placement)
        guardian.computed()
        self._saving.settle_copies()
        self._ledger.switch(Bucket.STEP_HOST_GAP)
        result = self._result(scores, weights)
        if first:
            guardian.await_authority()
            guardian.authorize()
            training.inputs.directory.write_result(result)
        self._reporter.emit(Finished(result.to_json(), self._ledger.seconds()))
        return result

    def _result(self, scores: Scores, weights: str) -> RunResult:
        """Return the run's result: the step's figures, evaluations, typical speed (``_typical_speed``), memory, layout,
        hash of the weights, and the early stop if it came before the last step.
        """
        training, progress, layout = self._training, self._progress, self._training.mesh.layout
        evaluation = scores.held_out
        tokens_per_s = self._typical_speed()
        return RunResult(
            run_dir=str(training.inputs.directory.path),
            step=progress.step,
            loss=progress.loss,
            tokens=progress.tokens,
            tokens_per_s=tokens_per_s,
            mfu=training.mfu(tokens_per_s) if tokens_per_s else None,
            peak_flops_per_s=training.peak.flops_per_s,
            peak_source=training.peak.source,
            held_out_loss=evaluation.loss if evaluation else None,
            bits_per_byte=evaluation.bits_per_byte if evaluation else None,
            xz_bits_per_byte=training.data.index.held_out_xz_bits_per_byte,
            tasks={name: dict(figures) for name, figures in scores.tasks.items()},
            ranks=training.mesh.ranks,
            memory_bytes=self._memory_bytes,
            layout=layout.degrees | {"expert": layout.expert},
            weights_sha256=weights,
            early_stop=self._early_stop if progress.step < self._spec.train.steps else None,
        )

    def _typical_speed(self) -> float | None:
        """Return tokens per second in the median step of this attempt. If it did no step, take the logged steps of
        earlier attempts; ``None`` if there are none.
        """
        if self._step_s:
            tokens = (self._progress.tokens - self._at_start.tokens) / (
                self._progress.step - self._at_start.step
            )
            return tokens / (typical(self._step_s, len(self._step_s)) or math.inf)
        events = read_events(self._training.inputs.directory.events)
        speeds = [event.body.tokens_per_s for event in events if isinstance(event.body, Step)]
        return typical(speeds, len(speeds))


def what_is_kept(started_at: int, step: int, *, saved: bool, newest: str) -> str:
    """Describe what is kept of a run that stops after ``step`` steps; this start began after ``started_at`` of them.

    ``newest``: its newest checkpoint, in words.
    """
    if step == started_at:
        return "no step was done since the start, and nothing was to be saved"
    return f"step {step} is saved" if saved else f"the last checkpoint failed; {newest}"
