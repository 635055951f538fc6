"""Saving within the loop: when a checkpoint is due, handing the state over, and hearing how it ended.

Training waits for one memory copy; files, copies to a store and their commit are made beside it, and what became of them is asked for after
each step.
"""

from __future__ import annotations

import time

from phalanx.checkpoint.committed.retention import is_copied
from phalanx.checkpoint.save.interval import SaveInterval
from phalanx.checkpoint.save.saver import SaveOutcome
from phalanx.observe.events import Message
from phalanx.observe.ledger.ledger import Bucket
from phalanx.observe.throughput import format_duration
from phalanx.parallel.process_group.typed_gather import broadcast_typed
from phalanx.run.spec import RunSpec
from phalanx.train.assembly.assemble import Training
from phalanx.train.lifecycle.guardian import EpochSupersededError
from phalanx.train.lifecycle.progress import TrainProgress

_LOOK_S = 0.2


def due(step: int, every: int) -> bool:
    """True if something that is done every so many steps, 0 for never, is done after this one."""
    return every > 0 and step % every == 0


def save_due(spec: RunSpec, step: int) -> bool:
    """True if the run file says that this step is saved; where it leaves the interval open, those are what is kept or copied for good."""
    checkpoint = spec.checkpoint
    if checkpoint.every_steps:
        return due(step, checkpoint.every_steps)
    for_good = due(step, checkpoint.store_keep_every) and is_copied(
        step, checkpoint.store_every_steps, spec.train.steps
    )
    return due(step, checkpoint.keep_every) or (
        bool(checkpoint.store) and (for_good or due(step, checkpoint.store_every_steps))
    )


def save(training: Training, progress: TrainProgress) -> None:
    """Hands the state to the saver; training waits for one memory copy."""
    if training.last_saved_step == progress.step:
        return
    training.last_saved_step = progress.step
    extra = extra_of(training, progress)
    with training.inputs.ledger.bucket(Bucket.CKPT_BLOCKING):
        receipt = training.saver.save(progress.step, training.shards, extra)
    training.stalls_s[progress.step] = receipt.stall_s
    if training.interval is not None:
        training.interval.saved(time.monotonic(), receipt.stall_s)


def extra_of(training: Training, progress: TrainProgress) -> dict[str, object]:
    """The part of a run's state that is not tensors, for checkpoints and snapshots."""
    return {
        **vars(progress),
        "seed": training.inputs.spec.runtime.seed,
        "data_fingerprint": training.data.fingerprint,
    }


def collect(training: Training) -> None:
    """Report the saves that have ended since the last call. Raises ``EpochSupersededError``."""
    outcomes = training.saver.poll()
    for outcome in outcomes:
        training.last_save_good = outcome.status != "failed"
        if training.interval is not None:
            _tell_interval(training, training.interval, outcome)
        if outcome.status == "committed":
            training.inputs.guardian.saved(outcome.step)
        if training.copies and outcome.status != "failed" and _copied(training, outcome.step):
            training.copies.expect(outcome.step)
    if training.copies:
        for event in training.copies.collect():
            training.reporter.emit(event)
    training.reporter.saved(outcomes, training.stalls_s, str(training.inputs.directory.checkpoints))
    for outcome in outcomes:
        if isinstance(outcome.error, EpochSupersededError):
            raise outcome.error


def _tell_interval(training: Training, interval: SaveInterval, outcome: SaveOutcome) -> None:
    """Takes in how a save ended, and says what follows from the first."""
    if outcome.status == "failed":
        interval.failed(time.monotonic())
        return
    first = not interval.write_s
    interval.written(outcome.seconds)
    if first:
        training.reporter.emit(
            Message(
                "info",
                f"checkpoints are saved every {format_duration(interval.seconds)}: a save holds training up for {interval.stall_s:.2g} s, and a "
                f"failure is expected every {format_duration(interval.mtti_s)} (checkpoint.hours_between_failures)",
            )
        )


def _copied(training: Training, step: int) -> bool:
    """True if a saved step is to be copied to the store."""
    spec = training.inputs.spec
    return is_copied(step, spec.checkpoint.store_every_steps, spec.train.steps)


def settle(training: Training) -> bool:
    """Waits until all saves have ended. True, on every rank, if the last of them is durable."""
    with training.inputs.ledger.bucket(Bucket.CKPT_BLOCKING):
        training.saver.wait()
        collect(training)
        return broadcast_typed(training.last_save_good, bool)


def settle_copies(training: Training) -> None:
    """Wait until all copies to the store have ended, one way or the other; after a request to stop, for half of launch.grace_s at most."""
    copies, stop = training.copies, training.inputs.stop
    if copies is None:
        return
    patience_s, requested_s = training.inputs.spec.launch.grace_s / 2, None
    with training.inputs.ledger.bucket(Bucket.CKPT_BLOCKING):
        while not copies.settle(_LOOK_S):
            requested_s = requested_s or (time.monotonic() if stop.made else None)
            if requested_s is not None and time.monotonic() - requested_s > patience_s:
                training.reporter.warn(
                    f"copies to {copies.url} were given up {patience_s:g} s after the request to stop (half of launch.grace_s): the checkpoints are on disk"
                )
                copies.cancel()
                break
        collect(training)
