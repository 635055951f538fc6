"""The training loop: from wherever the run is to its last step, or to a request to stop.

It can be read from top to bottom; ``phalanx.train.step.step`` has what a step is.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from phalanx.data.errors import DataError
from phalanx.data.reading.prefetch import WaitEndedError
from phalanx.hardware.local.device import most_memory_bytes
from phalanx.observe.event_log import newest_event, read_events
from phalanx.observe.events import (
    Evaluated,
    Evaluating,
    Finished,
    MemoryMeasured,
    Restored,
    RunStarted,
    Step,
    Stopped,
)
from phalanx.observe.ledger.ledger import Bucket
from phalanx.observe.throughput import typical
from phalanx.run.directory.result import RunResult
from phalanx.train.assembly.assemble import Training
from phalanx.train.lifecycle.bad_steps import keep_before_spikes, skip_or_raise, tell_spike_or_raise
from phalanx.train.lifecycle.ending import RunFailedError
from phalanx.train.lifecycle.progress import TrainProgress
from phalanx.train.lifecycle.run_record import start_record, watch_machines
from phalanx.train.lifecycle.sample_supply import prefetch, samples_of
from phalanx.train.lifecycle.saving import collect, due, extra_of, save, save_due, settle, settle_copies
from phalanx.train.measure.numerics import Numerics, differing
from phalanx.train.profile.recording import Recording
from phalanx.train.start.checks import start_notes
from phalanx.train.start.disk_room import disk_notes
from phalanx.train.step.evaluate import EvaluationStoppedError, HeldOutLoss, evaluate
from phalanx.train.step.memory_meter import MemoryMeter, extremes
from phalanx.train.step.rank_times import RankTimes
from phalanx.train.step.step import Audit, Stepper, StepReport
from phalanx.train.step.weights_hash import weights_sha256

_TELL_EVALUATION_S = 5.0
"""Time between two words on how far an evaluation is."""
_MUCH_WAITING = 0.05
"""Part of the time of steps from which waiting for samples is worth a word."""


class UnsavedError(RunFailedError):
    """The run came to its end, but its last state could not be saved."""


@dataclass(frozen=True)
class _Instruments:
    """What computes the steps of one attempt, and what watches them."""

    stepper: Stepper
    ranks: RankTimes
    audit: Audit | None
    recording: Recording


def train(training: Training) -> RunResult | None:
    """Trains to the last step and returns the result; ``None`` if the run was asked to stop before.

    Raises:
        NonFiniteError: As ``train.on_nonfinite`` or ``train.max_skipped`` says.
        LossSpikeError: As ``train.on_spike`` or ``train.max_skipped`` says.
        UnsavedError: The last checkpoint failed; the run can be started again from an older one.
    """
    spec, place = training.inputs.spec, training.inputs.place
    progress = _begin(training)
    begun = replace(progress)
    recent_s: list[float] = []
    with ExitStack() as around:
        instruments = _set_up(training, begun, progress, around)
        while progress.step < spec.train.steps:
            measured = len(recent_s) + 1 == spec.observe.memory_at_step
            instruments.recording.turn(progress.step + 1, measured=measured)
            begin, place.step = time.perf_counter(), progress.step + 1
            try:
                report = _run_step(training, instruments, progress.step + 1, measured=measured)
            except WaitEndedError:
                # The state is that of the step before: only a step's update changes it, and the samples come before that.
                if progress.step > begun.step:
                    save(training, progress)
                _stopped(training, begun, progress)
                return None
            except DataError:
                # The state is that of the step before, and on a single rank nobody waits in a collective.
                if progress.step > begun.step and training.mesh.ranks == 1:
                    save(training, progress)
                    settle(training)
                raise
            training.inputs.stop.step_ended()
            training.inputs.guardian.computed()
            recent_s.append(time.perf_counter() - begin)
            _advance(training, instruments, progress, report)
            _log_step(training, progress, report, recent_s)
            stops = _conclude_step(training, instruments, progress, report)
            if stops and progress.step < spec.train.steps:
                _stopped(training, begun, progress)
                return None
    return _finished(training, begun, progress, recent_s)


def _set_up(
    training: Training, begun: TrainProgress, progress: TrainProgress, around: ExitStack
) -> _Instruments:
    """Prepares the steps after ``progress``; what they hold open is closed with ``around``."""
    spec, ledger, guardian = training.inputs.spec, training.inputs.ledger, training.inputs.guardian
    samples = partial(samples_of, training, begun)
    guardian.reads(training.data)
    batches = around.enter_context(prefetch(training, begun, samples))
    withholds = partial(progress.withholds, spec.train)
    stepper = Stepper(training.built, batches, ledger, progress.updates, withholds)
    ranks = RankTimes(
        stepper, training.inputs.attempt, (spec.observe.ranks_every_steps, guardian.window_steps())
    )
    keep_before_spikes(training, progress)
    audit = guardian.audit(stepper, samples)
    guardian.begins(progress.step, training.shards, extra_of(training, progress))
    own = training.restored is not None and not training.restored.taken_over
    if own and 0 < progress.step < spec.train.steps and save_due(spec, progress.step):
        # After an in-memory restore the checkpoint that was due at this step may be missing: the fault may have
        # come before it was committed.
        save(training, progress)
    ledger.switch(Bucket.STEP_HOST_GAP)
    recording = around.enter_context(Recording(training, stepper, lambda: ranks.slowest))
    return _Instruments(stepper, ranks, audit, recording)


def _run_step(training: Training, instruments: _Instruments, number: int, *, measured: bool) -> StepReport:
    """Runs step ``number``; ``measured``, with a look at the memory that each rank holds. Raises ``WaitEndedError``."""
    stepper, audit = instruments.stepper, instruments.audit
    if measured:
        return _measured_step(training, stepper, number, audit)
    return stepper.run(number, training.flags(), before_update=training.fence, audit=audit)


def _advance(
    training: Training, instruments: _Instruments, progress: TrainProgress, report: StepReport
) -> None:
    """Counts a step as done, unless its loss forbids it: raises as ``train`` does."""
    spec = training.inputs.spec
    spike = progress.spike(report, spec.train)
    if spike is not None:
        tell_spike_or_raise(training, progress, report, spike)
    elif not report.applied:
        training.inputs.guardian.not_finite(progress.step + 1, report)
        skip_or_raise(training, progress, report)
    progress.advance(report, instruments.stepper.updates, spec.train, spike)
    if spike is not None:
        keep_before_spikes(training, progress)


def _conclude_step(
    training: Training, instruments: _Instruments, progress: TrainProgress, report: StepReport
) -> bool:
    """Does after a step what is due: figures of the ranks, snapshot, checkpoint, evaluation, the end of a recording.

    Returns True if the run is to stop, which also ends an evaluation.
    """
    spec, guardian, recording = training.inputs.spec, training.inputs.guardian, instruments.recording
    last = progress.step == spec.train.steps
    ending = last or report.flags.stop or report.flags.leave
    frame = instruments.ranks.step_ended(progress.step, last=ending)
    if frame is not None:
        training.reporter.measured(frame)
        guardian.measured(frame)
    if report.flags.leave and spec.fleet.snapshot_every_steps == 0:
        save(training, progress)  # no snapshot holds this step for the next epoch
        settle(training)
    guardian.ended(progress.step, training.shards, extra_of(training, progress), report)
    if report.flags.profile:
        recording.asked(ending=ending)
    stops = report.flags.stop
    if not last and (stops or report.flags.save or save_due(spec, progress.step)):
        save(training, progress)
    if not last and not stops and due(progress.step, spec.evaluation.every_steps):
        try:
            _evaluate(training, progress.step, spec.evaluation.sequences)
        except EvaluationStoppedError:
            stops = True
            save(training, progress)
    collect(training)
    if stops or last:
        recording.last()
    return stops


def _measured_step(training: Training, stepper: Stepper, number: int, audit: Audit | None) -> StepReport:
    """Runs a step and measures the memory that each rank holds at its peak."""
    meter = MemoryMeter(
        training.built.model.parts,
        lambda: [part.tensor for held in training.built.optimizer.state().values() for part in held],
        training.mesh.device,
        compiled=training.inputs.spec.runtime.compile,
    )

    def before_update() -> None:
        training.fence()
        meter.gradients_complete()

    with meter:
        report = stepper.run(number, training.flags(), before_update=before_update, audit=audit)
    most, least = extremes(meter.result(), training.mesh.device)
    training.memory_bytes = most
    training.reporter.emit(MemoryMeasured(number, most, least))
    return report


def _begin(training: Training) -> TrainProgress:
    """Reports the start and the restored checkpoint; returns the progress at which training begins."""
    restored, reporter = training.restored, training.reporter
    if reporter.speaks:
        changed = _changed_numerics(training)
        reporter.emit(_started(training))
        watch_machines(training.inputs.directory, reporter)
        if restored is not None and changed:
            reporter.warn(
                f"this machine computes {', '.join(changed)} with other bits than that of the start before: from here on, the bits of "
                "the weights are those of this history of machines"
            )
    for note in disk_notes(training.inputs.spec, training.inputs.directory) if reporter.speaks else ():
        reporter.warn(note)
    if restored is None or restored.taken_over:
        for note in start_notes(training.inputs.spec, training.data.index):
            reporter.warn(note)
        for folder in training.data.unchecked_folders if reporter.speaks else ():
            reporter.warn(
                f"{folder} was prepared without block sums and is too large to be read as a whole first: its tokens are trained on as they are "
                f"read. `phalanx data verify {folder} --write-sums` adds them"
            )
    if restored is None:
        return TrainProgress()
    for line in restored.passed_over:
        reporter.warn(f"passed over a damaged checkpoint: {line}")
    source = restored.source or str(training.inputs.directory.checkpoints)
    reporter.emit(Restored(restored.step, source, restored.seconds, moved_bytes=restored.moved_bytes))
    return TrainProgress.from_extra(restored.extra)


def _started(training: Training) -> RunStarted:
    spec = training.inputs.spec
    return RunStarted(
        run=str(training.inputs.directory.path),
        steps=spec.train.steps,
        ranks=training.mesh.ranks,
        layout={axis: degree for axis, degree in training.mesh.layout.degrees.items() if degree > 1},
        device=str(training.mesh.device.type),
        parameters=training.built.placement.parameter_count,
        peak_flops_per_s=training.peak.flops_per_s,
        peak_source=training.peak.source,
        xz_bits_per_byte=training.data.index.held_out_xz_bits_per_byte,
        environment=start_record(
            spec, training.inputs.directory, training.data.index, training.numerics.probes
        ),
    )


def _changed_numerics(training: Training) -> list[str]:
    """The probes that give other bits on rank 0's machine now than in the run's newest start; none if that did not record them."""
    events = training.inputs.directory.events
    started = newest_event(events, lambda event: isinstance(event.body, RunStarted))
    if started is None or not isinstance(started.body, RunStarted):
        return []
    before = started.body.environment.get("numerics")
    if not isinstance(before, dict) or not before:
        return []
    return differing(
        Numerics("", {str(name): str(value) for name, value in before.items()}), training.numerics
    )


def _log_step(training: Training, progress: TrainProgress, report: StepReport, recent_s: list[float]) -> None:
    spec = training.inputs.spec
    due = progress.step % spec.observe.log_every_steps == 0 or progress.step == spec.train.steps
    if not due or not training.reporter.speaks:
        return
    step_s = typical(recent_s[-spec.observe.log_every_steps :]) or recent_s[-1]
    tokens_per_s = report.tokens / step_s
    seconds = training.inputs.ledger.seconds()
    in_steps = sum(value for name, value in seconds.items() if name.startswith("step."))
    waited = seconds.get(Bucket.STEP_DATA_WAIT, 0.0)
    since_s, training.logged_s = in_steps - training.logged_s, in_steps
    wait_s, training.logged_wait_s = waited - training.logged_wait_s, waited
    training.reporter.emit(
        Step(
            step=progress.step,
            steps=spec.train.steps,
            loss=report.loss,
            grad_norm=report.grad_norm,
            lr=report.lr,
            tokens=progress.tokens,
            tokens_per_s=tokens_per_s,
            step_s=step_s,
            mfu=_mfu(training, tokens_per_s),
            goodput=(in_steps - waited) / sum(seconds.values()),
            ledger=seconds,
            peak_memory_bytes=most_memory_bytes(training.mesh.device),
            balance=report.balance,
            logged_s=since_s,
            data_wait_s=wait_s,
            data_store=_traffic(training),
        )
    )
    _tell_of_waiting(training, progress.step, wait_s, since_s)


def _mfu(training: Training, tokens_per_s: float) -> float:
    return training.built.flops_per_token * tokens_per_s / training.peak.flops_per_s


def _tell_of_waiting(training: Training, step: int, wait_s: float, since_s: float) -> None:
    """Says once that samples from an object store come too late, after the first steps, which wait for the first answers."""
    first = training.logged_s == since_s
    if training.told_of_waiting or first or not training.data.cached or wait_s < _MUCH_WAITING * since_s:
        return
    training.told_of_waiting = True
    training.reporter.warn(
        f"training waits for its data: {wait_s / since_s:.0%} of the time up to step {step:,}, {wait_s:.1f} s, since the last one that was "
        "logged. More data.read_ahead_mib helps against slow answers, not against a store that gives too few bytes a second"
    )


def _traffic(training: Training) -> dict[str, int]:
    """What this rank has read of datasets in object stores; empty if all data lie in folders."""
    totals: Counter[str] = Counter()
    for dataset in training.data.cached:
        traffic = dataset.traffic
        totals.update(
            asked_bytes=traffic.asked_bytes, fetched_bytes=traffic.fetched_bytes, requests=traffic.requests
        )
    return dict(totals)


def _evaluate(training: Training, step: int, sequences: int) -> HeldOutLoss | None:
    """Scores held-out text and reports it. Raises ``EvaluationStoppedError`` on a request to stop."""
    with training.inputs.ledger.bucket(Bucket.EVAL):
        begin = told = time.perf_counter()

        def tell(done: int, of: int) -> None:
            nonlocal told
            if time.perf_counter() - told > _TELL_EVALUATION_S:
                told = time.perf_counter()
                training.reporter.emit(Evaluating(step, done, of))

        def stops() -> bool:
            return training.inputs.stop.made

        built = training.built
        evaluation = evaluate(
            built.model, built.runner, training.data, training.inputs.spec, sequences, tell, stops
        )
        training.inputs.guardian.computed()
        seconds = time.perf_counter() - begin
        # Gathering weights and waiting for stages here was evaluation, not a step's.
        for clock in training.built.waits.values():
            clock.forget()
    if evaluation is not None:
        by_source = dict(evaluation.sources)
        training.reporter.emit(Evaluated(step, evaluation.loss, evaluation.bits_per_byte, seconds, by_source))
    return evaluation


def _stopped(training: Training, begun: TrainProgress, progress: TrainProgress) -> None:
    training.inputs.ledger.switch(Bucket.STOP)
    saved = settle(training)
    settle_copies(training)
    kept = what_is_kept(begun.step, progress.step, saved=saved)
    training.reporter.emit(Stopped(progress.step, f"asked to stop; {kept}", training.inputs.ledger.seconds()))


def what_is_kept(begun: int, step: int, *, saved: bool) -> str:
    """What a run that stops after ``step`` steps, of which this start found ``begun`` done, has kept of them."""
    if step == begun:
        return "no step was done since the start, and nothing was to be saved"
    return (
        f"step {step} is saved"
        if saved
        else "the last checkpoint failed; those that were saved before are kept"
    )


def _finished(
    training: Training, begun: TrainProgress, progress: TrainProgress, recent_s: list[float]
) -> RunResult | None:
    """Saves, evaluates and hashes the final weights, and writes the result; ``None`` on a request to stop before.

    The save comes first: evaluation and hash need memory that training did not, and what they fail for shall not cost steps.
    """
    guardian, first = training.inputs.guardian, training.mesh.rank == 0
    if first:
        guardian.await_authority()
    save(training, progress)
    if not settle(training):
        remedy = "make room and start again: the run resumes from its newest checkpoint, or starts from scratch if it has none"
        what = f"all {progress.step} steps are done, but the last checkpoint could not be saved"
        raise UnsavedError(f"{what}; {remedy}", remedy)
    try:
        evaluation = _evaluate(training, progress.step, training.inputs.spec.evaluation.final_sequences)
    except EvaluationStoppedError:
        _stopped(training, begun, progress)
        return None
    training.inputs.ledger.switch(Bucket.STOP)
    weights = weights_sha256(training.built.model.parts, training.built.placement)
    guardian.computed()
    settle_copies(training)
    training.inputs.ledger.switch(Bucket.STEP_HOST_GAP)
    tokens_per_s = _typical_speed(training, begun, progress, recent_s)
    layout = training.mesh.layout
    result = RunResult(
        run_dir=str(training.inputs.directory.path),
        step=progress.step,
        loss=progress.loss,
        tokens=progress.tokens,
        tokens_per_s=tokens_per_s,
        mfu=_mfu(training, tokens_per_s) if tokens_per_s else None,
        peak_flops_per_s=training.peak.flops_per_s,
        peak_source=training.peak.source,
        held_out_loss=evaluation.loss if evaluation else None,
        bits_per_byte=evaluation.bits_per_byte if evaluation else None,
        xz_bits_per_byte=training.data.index.held_out_xz_bits_per_byte,
        ranks=training.mesh.ranks,
        memory_bytes=training.memory_bytes,
        layout=layout.degrees | {"expert": layout.expert},
        weights_sha256=weights,
    )
    if first:
        guardian.await_authority()
        guardian.authorize()
        training.inputs.directory.write_result(result)
    training.reporter.emit(Finished(result.to_json(), training.inputs.ledger.seconds()))
    return result


def _typical_speed(
    training: Training, begun: TrainProgress, progress: TrainProgress, recent_s: list[float]
) -> float | None:
    """Tokens per second in the median step of this attempt, or of earlier attempts if this one had no step to do."""
    if recent_s:
        tokens = (progress.tokens - begun.tokens) / (progress.step - begun.step)
        return tokens / (typical(recent_s, len(recent_s)) or math.inf)
    events = read_events(training.inputs.directory.events)
    speeds = [event.body.tokens_per_s for event in events if isinstance(event.body, Step)]
    return typical(speeds, len(speeds))
