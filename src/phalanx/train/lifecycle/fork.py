"""A fork at a loss spike (``train.on_spike = "fork"``): children of the run, one after the other on the same ranks, one of which it continues as.

1. The run has saved its state before the spike.
2. For each candidate the base is restored, and a child is trained to the fork's end (``phalanx.train.lifecycle.progress``). Only the child's
   cure differs: its samples, their order and its arithmetic are the run's own.
3. The child's state is saved in ``forks/``, with the numbers of its steps.
4. The state of the child that ``spike.prefer`` prefers is restored.

A run that is killed in a fork resumes before the spike and meets it again. Children that were saved are read, the others are trained again
with the same bits. So the same child is taken, on any layout.
"""

from __future__ import annotations

import math
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import torch.distributed as dist

from phalanx.checkpoint.committed.restore import restore
from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.save.saver import AsyncSaver
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.observe.events import ChildTaken, ChildTrained, Forked
from phalanx.observe.ledger import Ledger
from phalanx.parallel.process_group.typed_gather import broadcast_typed, gather_typed
from phalanx.run.sections.monitoring import Candidate
from phalanx.train.assemble import Training
from phalanx.train.lifecycle.bad_steps import LossSpikeError
from phalanx.train.lifecycle.ending import RunFailedError
from phalanx.train.lifecycle.guardian import EpochSupersededError
from phalanx.train.lifecycle.progress import (
    ChildOutcome,
    ChildStep,
    SampleSupply,
    TrainProgress,
    begin_child,
    best_child,
    child_loss,
    is_decided,
    plan_fork,
    spikes_again,
)
from phalanx.train.lifecycle.saving import Saving
from phalanx.train.step.step import StepFlags

_STEPS = "child_steps"
"""The key of a child's steps in its checkpoint's ``extra``."""


class ForkStoppedError(Exception):
    """A rank received a request to stop during a fork. All ranks raise it after the same step; the state in memory is that of a child."""


class ForkFailedError(RunFailedError):
    """A fork could not be finished: a checkpoint could not be read or written."""


@dataclass(frozen=True)
class TrainedChild:
    """A trained child of a fork."""

    candidate: Candidate
    progress: TrainProgress
    steps: list[ChildStep]


class Fork:
    """The fork at the spike that is the next step of ``progress``, on one rank. All methods are collectives."""

    def __init__(self, training: Training, saving: Saving, progress: TrainProgress) -> None:
        self._training, self._saving = training, saving
        self._spec = training.inputs.spec
        self._plan = plan_fork(self._spec, progress)
        self._root = training.inputs.directory.forks / f"step-{self._plan.spike:08d}"

    def run(self) -> TrainedChild:
        """Train the children in the order of ``spike.candidates`` until one decides by ``spike.prefer``, and return the
        one that is taken, with its state restored on this rank. Saved children are not trained again.

        Emits the fork, each child's loss, and the choice as events.

        Raises:
            ForkStoppedError: On a request to stop.
            ForkFailedError: A checkpoint cannot be read or written.
            LossSpikeError: No child has a finite loss.
        """
        plan, reporter = self._plan, self._training.reporter
        candidates, prefer = self._spec.spike.candidates, self._spec.spike.prefer
        reporter.emit(Forked(plan.spike, plan.base, plan.end, list(candidates)))
        outcomes: dict[Candidate, ChildOutcome] = {}
        for candidate in candidates:
            child, is_read = self._saved(candidate), True
            if child is None:
                child, is_read = self._train(candidate), False
            outcome = ChildOutcome(
                child_loss(plan, child.steps), spikes_again(plan, child.progress, child.steps)
            )
            outcomes[candidate] = outcome
            reporter.emit(
                ChildTrained(
                    plan.spike,
                    candidate,
                    outcome.loss if math.isfinite(outcome.loss) else None,
                    spikes=sum(first > plan.base for first, _ in child.progress.spikes),
                    again=is_read,
                    spikes_again=outcome.spikes_again,
                )
            )
            if is_decided(prefer, outcome):
                break
        best = best_child(prefer, outcomes)
        if best is None:
            remedy = f"go back farther: phalanx train {self._training.inputs.directory.path} --from STEP --set optimizer.lr=..."
            raise LossSpikeError(
                f"step {plan.spike}: no child of the fork has a finite loss; the state before the spike is saved. {remedy}",
                remedy,
            )
        self._restore(DiskTier(self._root / best), plan.end)
        child = self._saved(best)
        assert child is not None, "it was saved before it was restored"
        progress = child.progress
        reporter.emit(
            ChildTaken(
                plan.spike,
                best,
                plan.end,
                outcomes[best].loss,
                progress.rate_scale,
                progress.clip_scale,
                progress.wide,
            )
        )
        return child

    def clean(self) -> None:
        """Remove the children's checkpoints on rank 0, once the run has saved the state of the child that it took.
        Failures to remove are ignored. Raises as ``Guardian.authorize`` if this epoch has no authority over the run
        directory.
        """
        if self._training.mesh.rank == 0:
            self._training.inputs.guardian.authorize()
            shutil.rmtree(self._root, ignore_errors=True)
            with suppress(OSError):
                self._root.parent.rmdir()

    def _saved(self, candidate: Candidate) -> TrainedChild | None:
        """Return the child of a candidate if its last step was saved, in this start or an earlier one; else None. A
        collective.

        Only the checkpoint's ``extra`` is read, on rank 0. If that is damaged, the checkpoint is set aside, with a
        warning.
        """
        tier, end = DiskTier(self._root / candidate), self._plan.end
        extra = dict[str, object]()
        # Rank 0 lists the folder: a shared file system may show it to other ranks later.
        if self._training.mesh.rank == 0 and tier.has(end):
            try:
                extra = dict(tier.extra(end))
            except CheckpointError as error:
                tier.set_aside(end)
                self._training.reporter.warn(f"child {candidate} of a fork is trained again: {error}")
        extra = broadcast_typed(extra, dict[str, object])
        if not extra:
            return None
        steps = msgspec.convert(extra[_STEPS], list[ChildStep])
        return TrainedChild(candidate, TrainProgress.from_extra(extra), steps)

    def _train(self, candidate: Candidate) -> TrainedChild:
        """Train the child of a candidate from the base to the fork's end, and save it. The "skip" child withholds the
        spike's update. The seconds of its steps are not booked one by one: the caller books the fork.

        Raises ``ForkStoppedError``, ``ForkFailedError``, and ``EpochSupersededError`` (see ``_save``).
        """
        training, spec, plan, built = self._training, self._spec, self._plan, self._training.built
        extra = self._restore(DiskTier(training.inputs.directory.checkpoints), plan.base)
        child = begin_child(spec, TrainProgress.from_extra(extra), plan, candidate)
        # The fork's time is accounted for as one bucket, because a child's steps are not steps of the run.
        stepper = child.stepper(
            built,
            SampleSupply(training.data, spec, built.rounds, child).up_to(plan.end),
            Ledger(time.monotonic_ns()),
            lambda _loss, _norm: candidate == "skip" and child.step + 1 == plan.spike,
        )
        steps: list[ChildStep] = []
        while child.step < plan.end:
            flags = StepFlags(stop=training.inputs.stop.made)
            report = stepper.run(child.step + 1, flags, before_update=self._saving.fence)
            training.inputs.guardian.computed()
            if report.flags.stop:
                raise ForkStoppedError
            child.advance(report, stepper.updates, spec.train, child.spike(report, spec.train))
            loss, norm = (
                value if math.isfinite(value) else None for value in (report.loss, report.grad_norm)
            )
            steps.append(ChildStep(child.step, loss, norm, report.lr, child.tokens, report.applied))
        self._save(candidate, child, steps)
        return TrainedChild(candidate, child, steps)

    def _restore(self, tier: DiskTier, step: int) -> dict[str, object]:
        """Restore this rank's state from a checkpoint, and return its ``extra``. A collective: all ranks raise
        ``ForkFailedError`` if one cannot.
        """
        training, error, extra = self._training, "", dict[str, object]()
        self._saving.fence()
        try:
            training.inputs.guardian.computed()
            extra = restore(tier, step, training.shards, rank=training.mesh.rank)
            training.inputs.guardian.computed()
        except CheckpointError as problem:
            error = str(problem)
        errors = sorted({text for text in gather_typed(error, str) if text})
        if errors:
            run = training.inputs.directory.path
            remedy = (
                f"remove {self._root} and start the run again: its children are trained again"
                if tier.root.is_relative_to(self._root)
                else f"leave the batch out instead: phalanx train {run} --from {self._plan.spike - 1} --set train.on_spike=skip"
            )
            raise ForkFailedError(
                f"step {self._plan.spike} is a spike, and the state of step {step} that a fork needs cannot be read: {errors[0]}. {remedy}",
                remedy,
            )
        return extra

    def _save(self, candidate: Candidate, child: TrainProgress, steps: list[ChildStep]) -> None:
        """Save the state of a child, and wait until it is durable.

        All ranks raise ``ForkFailedError`` if a second attempt fails too. A rank whose save was refused because a later
        epoch has begun raises ``EpochSupersededError`` at once.
        """
        # Twice, because authority over the run directory may be lost for a moment, when another node becomes the leader.
        for _ in range(2):
            failure = self._try_to_save(candidate, child, steps)
            if not failure:
                return
        remedy = "make room and start the run again: it resumes before the spike, with the children that were saved"
        raise ForkFailedError(
            f"child {candidate} of the fork at step {self._plan.spike} could not be saved: {failure}; {remedy}",
            remedy,
        )

    def _try_to_save(self, candidate: Candidate, child: TrainProgress, steps: list[ChildStep]) -> str:
        """Save the state of a child and wait until it is durable. Return an empty string, or the reason of a failure,
        the same on all ranks. A collective.

        Raises ``EpochSupersededError`` on a rank whose save was refused for that reason.
        """
        training, inputs = self._training, self._training.inputs
        saver = AsyncSaver(
            DiskTier(self._root / candidate),
            training.mesh.rank,
            training.mesh.ranks,
            attempt=inputs.attempt,
            timeout_s=self._spec.checkpoint.timeout_s,
            authorize=inputs.guardian.authorize,
        )
        failed: list[CheckpointError | None] = []
        try:
            inputs.guardian.computed()
            inputs.guardian.await_authority()
            saver.save(
                child.step,
                training.shards,
                {**self._saving.extra(child), _STEPS: msgspec.to_builtins(steps)},
            )
            saver.wait()
            failed = [outcome.error for outcome in saver.poll() if outcome.status == "failed"]
        finally:
            saver.close()
        superseded = [error for error in failed if isinstance(error, EpochSupersededError)]
        if superseded:
            raise superseded[0]
        failures = gather_typed([str(error) for error in failed], list[str])
        dist.barrier()
        inputs.guardian.computed()
        return next((error for of_rank in failures for error in of_rank), "")
