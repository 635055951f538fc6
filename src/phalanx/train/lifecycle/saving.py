"""Saving within the loop: when a checkpoint is due, handing the state over, and collecting how saves ended.

Training waits for one memory copy. Files, copies to a store and their commit are made beside it, and their outcomes are collected after
each step.
"""

from __future__ import annotations

import time

from phalanx.checkpoint.save.save_schedule import RANK_HOURS_BETWEEN_FAILURES, SaveInterval, is_copied
from phalanx.checkpoint.save.saver import SaveOutcome
from phalanx.observe.events import Message
from phalanx.observe.ledger import Bucket
from phalanx.observe.throughput import format_duration
from phalanx.parallel.process_group.typed_gather import broadcast_typed
from phalanx.run.spec import CheckpointSpec, RunSpec
from phalanx.train.assemble import Training
from phalanx.train.lifecycle.guardian import EpochSupersededError
from phalanx.train.lifecycle.progress import TrainProgress, bases_needed, is_due

_LOOK_S = 0.2


def save_due(spec: RunSpec, step: int) -> bool:
    """Return True if a checkpoint is due at this step by the run file: at bases of forks, every
    ``checkpoint.every_steps``, or, if that is 0, at the steps that ``keep_every`` and the store's fields keep or
    copy.
    """
    checkpoint = spec.checkpoint
    if spec.train.on_spike == "fork" and is_due(step, spec.spike.base_every_steps):
        return True
    if checkpoint.every_steps:
        return is_due(step, checkpoint.every_steps)
    for_good = is_due(step, checkpoint.store_keep_every) and _is_copied(spec, step)
    return is_due(step, checkpoint.keep_every) or (
        bool(checkpoint.store) and (for_good or is_due(step, checkpoint.store_every_steps))
    )


def _is_copied(spec: RunSpec, step: int) -> bool:
    """Return True if a saved step is to be copied to the store."""
    return is_copied(step, spec.checkpoint.store_every_steps, spec.train.steps)


def _interval(checkpoint: CheckpointSpec, ranks: int) -> SaveInterval | None:
    """Return the choice of when to save, by the expected time between failures of ``ranks`` ranks; ``None`` if
    ``checkpoint.every_steps`` fixes the interval.
    """
    if checkpoint.every_steps:
        return None
    hours = checkpoint.hours_between_failures or RANK_HOURS_BETWEEN_FAILURES / ranks
    return SaveInterval(3600 * hours)


class Saving:
    """The saves of one attempt on one rank, with their copies to the store."""

    def __init__(self, training: Training) -> None:
        """Prepare for saving; nothing is saved, and no failure, best step or spike is known. Rank 0 chooses the
        interval if the run file does not.
        """
        self._training, self._spec = training, training.inputs.spec
        mesh = training.mesh
        self._interval = None if mesh.rank else _interval(self._spec.checkpoint, mesh.ranks)
        """Rank 0's choice of when to save, where the run file leaves it open."""
        self._stalls_s: dict[int, float] = {}
        """The time for which each save held training up, by step."""
        self._last_step: int | None = None
        self.last_failure = ""
        """The reason why the newest save that has ended failed, empty if it is durable; on every rank as of the last ``settle``."""
        self._best_steps: list[int] = []
        """The step of the best evaluation; before it the one of before, until the checkpoint of the newer one is durable."""
        self._spikes: list[int] = []
        self._bases: list[int] = []
        """Steps whose checkpoints a fork may go back to."""

    def wanted(self) -> bool:
        """Return True if this rank's choice of interval has a save due now."""
        return self._interval is not None and self._interval.due(time.monotonic())

    def save(self, progress: TrainProgress) -> None:
        """Pass the state to the saver, unless the newest save was of this step. Training waits for one memory copy,
        booked as blocking; a thread writes.

        For a run that forks on spikes, also choose the checkpoints to keep.
        """
        if self._last_step == progress.step:
            return
        self._last_step = progress.step
        training = self._training
        if self._spec.train.on_spike == "fork":
            self._bases = bases_needed(self._spec, progress)
            self._keep()
        with training.inputs.ledger.bucket(Bucket.CKPT_BLOCKING):
            receipt = training.saver.save(progress.step, training.shards, self.extra(progress))
        self._stalls_s[progress.step] = receipt.stall_s
        if self._interval is not None:
            self._interval.saved(time.monotonic(), receipt.stall_s)

    def extra(self, progress: TrainProgress) -> dict[str, object]:
        """Return the part of a run's state that is not tensors, for checkpoints and snapshots: progress, seed and the
        data's fingerprint.
        """
        return {
            **vars(progress),
            "seed": self._spec.runtime.seed,
            "data_fingerprint": self._training.data.fingerprint,
        }

    def keep_before_spikes(self, progress: TrainProgress) -> None:
        """Keep the checkpoints before the newest spikes, so that one can go back to them."""
        self._spikes = [first for first, _ in progress.spikes]
        self._keep()

    def keep_best(self, step: int, *, is_durable: bool = False) -> None:
        """Keep the checkpoint of ``step`` from now on; once it is durable, in place of the best one before it."""
        self._best_steps = [*([] if is_durable else self._best_steps), step]
        self._keep()

    def forget_best(self) -> None:
        """Keep no checkpoint for its evaluation any more, until ``keep_best``."""
        self._best_steps = []
        self._keep()

    def _keep(self) -> None:
        exact = [*self._best_steps, *self._bases]
        self._training.saver.keep_before([*self._spikes, *(step + 1 for step in exact)])

    def fence(self) -> None:
        """Wait until no save or snapshot copies the weights any more: they are about to change."""
        self._training.saver.fence()
        self._training.inputs.guardian.fence()

    def collect(self) -> None:
        """Report the saves and copies that have ended since the last call, and expect copies of new checkpoints. Also
        update the best step, ``last_failure`` and the save interval. Raises ``EpochSupersededError``.
        """
        training = self._training
        outcomes = training.saver.poll()
        for outcome in outcomes:
            self.last_failure = str(outcome.error) if outcome.status == "failed" else ""
            if self._interval is not None:
                self._note_in_interval(self._interval, outcome)
            if outcome.status == "committed":
                training.inputs.guardian.saved(outcome.step)
            if outcome.status != "failed" and outcome.step in self._best_steps[1:]:
                self.keep_best(outcome.step, is_durable=True)
            if training.copies and outcome.status != "failed" and _is_copied(self._spec, outcome.step):
                training.copies.expect(outcome.step)
        if training.copies:
            for event in training.copies.collect():
                training.reporter.emit(event)
        training.reporter.saved(outcomes, self._stalls_s, str(training.inputs.directory.checkpoints))
        for outcome in outcomes:
            if isinstance(outcome.error, EpochSupersededError):
                raise outcome.error

    def _note_in_interval(self, interval: SaveInterval, outcome: SaveOutcome) -> None:
        """Pass the end of a save to the interval, and report the chosen interval after the first that was written."""
        if outcome.status == "failed":
            interval.failed(time.monotonic())
            return
        first = not interval.write_s
        interval.written(outcome.seconds)
        if first:
            self._training.reporter.emit(
                Message(
                    "info",
                    f"checkpoints are saved every {format_duration(interval.seconds)}: a save holds training up for {interval.stall_s:.2g} s, and a "
                    f"failure is expected every {format_duration(interval.mtti_s)} (checkpoint.hours_between_failures)",
                )
            )

    def settle(self) -> bool:
        """Wait until all saves have ended, and report them. Return True, on every rank, if the last of them is durable. A collective."""
        with self._training.inputs.ledger.bucket(Bucket.CKPT_BLOCKING):
            self._training.saver.wait()
            self.collect()
            self.last_failure = broadcast_typed(self.last_failure, str)
            return not self.last_failure

    def settle_copies(self) -> None:
        """Wait until all copies to the store have ended, one way or the other, and report them.

        After a request to stop, wait for half of ``launch.grace_s`` at most, then warn and cancel them.
        """
        training = self._training
        copies, stop = training.copies, training.inputs.stop
        if copies is None:
            return
        patience_s, requested_s = self._spec.launch.grace_s / 2, None
        with training.inputs.ledger.bucket(Bucket.CKPT_BLOCKING):
            while not copies.settle(_LOOK_S):
                requested_s = requested_s or (time.monotonic() if stop.made else None)
                if requested_s is not None and time.monotonic() - requested_s > patience_s:
                    training.reporter.warn(
                        f"copies to {copies.url} were given up {patience_s:g} s after the request to stop (half of launch.grace_s): the checkpoints are on disk"
                    )
                    copies.cancel()
                    break
            self.collect()
