"""The training loop: from wherever the run is to its last step, or to a request to stop.

It can be read from top to bottom; what a step is stands in ``phalanx.train.step.step``.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from phalanx.data.prefetch import Prefetch
from phalanx.observe.event_log import read_events
from phalanx.observe.events import (
    Evaluated,
    Finished,
    MemoryMeasured,
    NonFinite,
    Restored,
    RunStarted,
    Step,
    Stopped,
)
from phalanx.observe.ledger import Bucket
from phalanx.observe.records import environment_record
from phalanx.observe.throughput import typical
from phalanx.train.lifecycle.assemble import Training
from phalanx.train.step.evaluate import Evaluation, evaluate
from phalanx.train.step.memory import MemoryMeter, extremes
from phalanx.train.step.state import weights_sha256
from phalanx.train.step.step import Stepper, StepReport


class NonFiniteError(RuntimeError):
    """The loss or the gradient was infinite or not a number, and the run is to stop at that."""


class UnsavedError(RuntimeError):
    """The run came to its end, but its last state could not be saved."""


@dataclass
class Progress:
    """How far the run is. All of it goes into checkpoints."""

    step: int = 0
    tokens: int = 0
    updates: int = 0
    skipped_in_a_row: int = 0
    loss: float | None = None
    """Of the last step whose loss was finite."""


def train(training: Training) -> dict[str, Any] | None:
    """Trains to the last step and returns the result; ``None`` if the run was asked to stop before.

    Raises:
        NonFiniteError: As ``train.on_nonfinite`` or ``train.max_skipped`` says.
        UnsavedError: The last checkpoint failed; the run can be started again from an older one.
    """
    spec, ledger = training.spec, training.ledger
    progress = _begin(training)
    recent_s: list[float] = []
    with _prefetch(training, progress.step) as batches:
        stepper = training.built.stepper(batches, ledger)
        stepper.updates, stepper.before_update = progress.updates, training.fence
        stepper.audit = training.guardian.audit(stepper, lambda step, slot: _samples(training, step, slot))
        training.guardian.begins(progress.step, training.shards, _extra(training, progress))
        if 0 < progress.step < spec.train.steps and _due(progress.step, spec.checkpoint.every_steps):
            # Restored from memory: what ended the last epoch may have kept this step from the disk.
            _save(training, progress)
        ledger.switch(Bucket.STEP_HOST_GAP)
        while progress.step < spec.train.steps:
            begin = time.perf_counter()
            measured = len(recent_s) + 1 == spec.observe.memory_at_step
            report = (_measured_step if measured else _plain_step)(training, stepper, progress.step + 1)
            recent_s.append(time.perf_counter() - begin)
            _advance(training, progress, report, stepper.updates)
            _log_step(training, progress, report, recent_s)
            if report.votes.leave and spec.fleet.snapshot_every_steps == 0:
                _save(training, progress)  # no memory holds this step for the next epoch
                _settle(training)
            training.guardian.ended(progress.step, training.shards, _extra(training, progress), report)
            last = progress.step == spec.train.steps
            if not last and _due(progress.step, spec.evaluation.every_steps):
                _evaluate(training, progress.step, spec.evaluation.sequences)
            if not last and (report.votes.stop or _due(progress.step, spec.checkpoint.every_steps)):
                _save(training, progress)
            _collect(training)
            if report.votes.stop and not last:
                _stopped(training, progress)
                return None
    return _finished(training, progress, recent_s)


def _plain_step(training: Training, stepper: Stepper, number: int) -> StepReport:
    return stepper.run(number, training.votes())


def _measured_step(training: Training, stepper: Stepper, number: int) -> StepReport:
    """A step during which this rank looks at what it holds in memory."""
    meter = MemoryMeter(
        training.built.model.parts,
        lambda: [part.tensor for held in training.built.optimizer.state().values() for part in held],
        training.mesh.device,
        compiled=training.spec.runtime.compile,
    )

    def before_update() -> None:
        training.fence()
        meter.gradients_complete()

    stepper.before_update = before_update
    with meter:
        report = _plain_step(training, stepper, number)
    stepper.before_update = training.fence
    most, least = extremes(meter.result(), training.mesh.device)
    training.memory_bytes = most
    training.reporter.emit(MemoryMeasured(number, most, least))
    return report


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _begin(training: Training) -> Progress:
    """Says what starts, and from where."""
    restored, reporter = training.restored, training.reporter
    if reporter.speaks:
        reporter.emit(_started(training))
    if restored is None:
        return Progress()
    for line in restored.passed_over:
        reporter.warn(f"passed over a damaged checkpoint: {line}")
    source = restored.source or str(training.directory.checkpoints)
    reporter.emit(Restored(restored.step, source, restored.seconds, moved_bytes=restored.moved_bytes))
    extra = restored.extra
    return Progress(
        restored.step, extra["tokens"], extra["updates"], extra["skipped_in_a_row"], extra["loss"]
    )


def _started(training: Training) -> RunStarted:
    spec = training.spec
    return RunStarted(
        run=str(training.directory.path),
        steps=spec.train.steps,
        ranks=training.mesh.ranks,
        device=str(training.mesh.device.type),
        parameters=training.built.placement.parameter_count,
        peak_flops_per_s=training.peak.flops_per_s,
        peak_source=training.peak.source,
        xz_bits_per_byte=training.data.index.held_out_xz_bits_per_byte,
        environment={**environment_record(), "data_fingerprint": training.data.fingerprint},
    )


def _prefetch(training: Training, done_steps: int) -> Prefetch[NDArray[np.int64]]:
    """This rank's slots, round after round and step after step, each made while the one before is computed."""
    rounds = training.built.rounds

    def samples(number: int) -> NDArray[np.int64]:
        step, turn = divmod(number, len(rounds))
        return _samples(training, step + 1, rounds[turn].slot)

    return Prefetch(samples, range(done_steps * len(rounds), training.spec.train.steps * len(rounds)))


def _samples(training: Training, step: int, slot: int) -> NDArray[np.int64]:
    """What slot ``slot`` of step ``step`` (from 1) holds: ``(sequences, seq_len + 1)``."""
    train = training.spec.train
    per_slot = train.batch_size // train.slots
    return training.data.train_samples((step - 1) * train.batch_size + slot * per_slot, per_slot)


def _advance(training: Training, progress: Progress, report: StepReport, updates: int) -> None:
    """Takes note of a step; one that was not finite is skipped or ends the run."""
    if not report.applied:
        _nonfinite(training, progress, report)
    progress.step += 1
    progress.tokens += report.tokens
    progress.updates = updates
    progress.loss = report.loss if math.isfinite(report.loss) else progress.loss
    progress.skipped_in_a_row = 0 if report.applied else progress.skipped_in_a_row + 1


def _nonfinite(training: Training, progress: Progress, report: StepReport) -> None:
    train = training.spec.train
    skip = train.on_nonfinite == "skip" and progress.skipped_in_a_row + 1 < train.max_skipped
    first = ", ".join(report.nonfinite[:3]) + (
        f" and {len(report.nonfinite) - 3} more" * (len(report.nonfinite) > 3)
    )
    what = f"loss {report.loss:g}, gradient norm {report.grad_norm:g}: not finite are {first}"
    training.reporter.emit(NonFinite(progress.step + 1, what, skipped=skip))
    if skip:
        return
    _save(training, progress)
    saved = "and saved" if _settle(training) else "but could not be saved: older checkpoints are kept"
    remedy = (
        f"{train.max_skipped} steps in a row were skipped; lower optimizer.lr or lengthen schedule.warmup_steps"
        if train.on_nonfinite == "skip"
        else 'lower optimizer.lr, lengthen schedule.warmup_steps, or set train.on_nonfinite = "skip"'
    )
    raise NonFiniteError(
        f"step {progress.step + 1}: {what}; the weights are those of step {progress.step}, {saved}. {remedy}"
    )


def _log_step(training: Training, progress: Progress, report: StepReport, recent_s: list[float]) -> None:
    spec = training.spec
    due = progress.step % spec.observe.log_every_steps == 0 or progress.step == spec.train.steps
    if not due or not training.reporter.speaks:
        return
    step_s = typical(recent_s[-spec.observe.log_every_steps :]) or recent_s[-1]
    tokens_per_s = report.tokens / step_s
    seconds = training.ledger.seconds()
    in_steps = sum(value for name, value in seconds.items() if name.startswith("step."))
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
            goodput=in_steps / sum(seconds.values()),
            ledger=seconds,
            peak_memory_bytes=_peak_memory_bytes(training),
            balance=report.balance,
        )
    )


def _mfu(training: Training, tokens_per_s: float) -> float:
    return training.built.flops_per_token * tokens_per_s / training.peak.flops_per_s


def _peak_memory_bytes(training: Training) -> int:
    if training.mesh.device.type == "cuda":
        return torch.cuda.max_memory_allocated(training.mesh.device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _evaluate(training: Training, step: int, sequences: int) -> Evaluation | None:
    with training.ledger.bucket(Bucket.EVAL):
        begin = time.perf_counter()
        evaluation = evaluate(
            training.built.model, training.built.runner, training.data, training.spec, sequences
        )
        seconds = time.perf_counter() - begin
        # Gathering weights and waiting for stages here was evaluation, not a step's.
        for clock in training.built.waits.values():
            clock.take_ns()
    if evaluation is not None:
        training.reporter.emit(Evaluated(step, evaluation.loss, evaluation.bits_per_byte, seconds))
    return evaluation


def _save(training: Training, progress: Progress, weights: str | None = None) -> None:
    """Hands the state to the saver; training waits for one memory copy."""
    if training.last_saved_step == progress.step:
        return
    training.last_saved_step = progress.step
    extra = _extra(training, progress)
    with training.ledger.bucket(Bucket.CKPT_BLOCKING):
        receipt = training.saver.save(progress.step, training.shards, extra, weights_sha256=weights)
    training.stalls_s[progress.step] = receipt.stall_s


def _extra(training: Training, progress: Progress) -> dict[str, Any]:
    """What of a run's state is not tensors."""
    return {
        **vars(progress),
        "next_sample": progress.step * training.spec.train.batch_size,
        "seed": training.spec.runtime.seed,
        "data_fingerprint": training.data.fingerprint,
    }


def _collect(training: Training) -> None:
    """Takes note of the saves that have ended."""
    outcomes = training.saver.poll()
    for outcome in outcomes:
        training.last_save_good = outcome.status != "failed"
        if outcome.status == "committed":
            training.guardian.saved(outcome.step)
    training.reporter.saved(outcomes, training.stalls_s, str(training.directory.checkpoints))


def _settle(training: Training) -> bool:
    """Waits until all saves have ended; whether the last of them is durable, as rank 0 knows."""
    with training.ledger.bucket(Bucket.CKPT_BLOCKING):
        training.saver.wait()
        _collect(training)
        good = [training.last_save_good]
        dist.broadcast_object_list(good, src=0)
    return good[0]


def _stopped(training: Training, progress: Progress) -> None:
    training.ledger.switch(Bucket.STOP)
    saved = _settle(training)
    reason = training.stop.signal_name or "another rank was asked to stop"
    kept = f"step {progress.step} is saved" if saved else "the last checkpoint failed, an older one is kept"
    training.reporter.emit(Stopped(progress.step, f"{reason}; {kept}", training.ledger.seconds()))


def _finished(training: Training, progress: Progress, recent_s: list[float]) -> dict[str, Any]:
    """The last evaluation, hash and checkpoint, and the result that one compares."""
    evaluation = _evaluate(training, progress.step, training.spec.evaluation.final_sequences)
    training.ledger.switch(Bucket.STOP)
    weights = weights_sha256(training.built.model.parts, training.built.placement)
    _save(training, progress, weights)
    if not _settle(training):
        raise UnsavedError(
            f"all {progress.step} steps are done, but the last checkpoint could not be saved; make room and start "
            "again: the run goes on from the newest one"
        )
    training.ledger.switch(Bucket.STEP_HOST_GAP)
    result = _result(training, progress, recent_s, evaluation, weights)
    if training.mesh.rank == 0:
        training.directory.write_result(result)
    training.reporter.emit(Finished(result, training.ledger.seconds()))
    return result


def _typical_speed(training: Training, progress: Progress, recent_s: list[float]) -> float | None:
    """Tokens per second in the median step of this attempt, or, if it had none to do, of those before."""
    if recent_s:
        return progress.tokens / progress.step / (typical(recent_s, len(recent_s)) or math.inf)
    steps = [event.body for event in read_events(training.directory.events) if isinstance(event.body, Step)]
    return typical([step.tokens_per_s for step in steps], len(steps))


def _result(
    training: Training,
    progress: Progress,
    recent_s: list[float],
    evaluation: Evaluation | None,
    weights: str,
) -> dict[str, Any]:
    tokens_per_s = _typical_speed(training, progress, recent_s)
    return {
        "run_dir": str(training.directory.path),
        "step": progress.step,
        "loss": progress.loss,
        "tokens": progress.tokens,
        "tokens_per_s": tokens_per_s,
        "mfu": _mfu(training, tokens_per_s) if tokens_per_s else None,
        "peak_flops_per_s": training.peak.flops_per_s,
        "peak_source": training.peak.source,
        "held_out_loss": evaluation.loss if evaluation else None,
        "bits_per_byte": evaluation.bits_per_byte if evaluation else None,
        "xz_bits_per_byte": training.data.index.held_out_xz_bits_per_byte,
        "ranks": training.mesh.ranks,
        "memory_bytes": training.memory_bytes,
        "layout": training.mesh.layout.degrees | {"expert": training.mesh.layout.expert},
        "weights_sha256": weights,
    }
