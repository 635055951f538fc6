"""Observers of training, which report and change no bit of the weights: events of steps, numbers of all ranks, the held-out loss.

The loop calls each hook of all its observers in the order of its tuple, on every rank alike, so that a hook may contain collectives.
Profiles are recorded by another observer, ``phalanx.train.profile.recording``.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from phalanx.data.reading.dataset import RunData
from phalanx.hardware.local.device import most_memory_bytes
from phalanx.observe.event_log import newest_event
from phalanx.observe.events import Evaluated, Evaluating, Restored, RunStarted, Step
from phalanx.observe.ledger import Bucket
from phalanx.observe.throughput import typical
from phalanx.parallel.mesh.mesh import Mesh
from phalanx.parallel.reduction.data_parallel import DataParallel, reshard
from phalanx.run.spec import RunSpec
from phalanx.train.assemble import Training
from phalanx.train.lifecycle.progress import is_due
from phalanx.train.lifecycle.reporter import start_record, watch_machines
from phalanx.train.measure.numerics import Numerics, differing
from phalanx.train.start.checks import disk_notes, start_notes
from phalanx.train.step.loss import IGNORE
from phalanx.train.step.meters import RankTimes
from phalanx.train.step.slot import SlotRunner
from phalanx.train.step.step import StepReport

_REPORT_EVALUATION_S = 5.0
"""Time between two events on how far an evaluation is."""
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
        self._training = training
        self._every = training.inputs.spec.observe.log_every_steps
        self._recent_s = deque[float](maxlen=self._every)
        self._in_steps_s = 0.0
        """Time in steps of this attempt up to the newest logged one; ``_waited_s`` of it was spent waiting for samples."""
        self._waited_s = 0.0
        self._has_warned = False

    def after_step(self, end: StepEnd) -> None:
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
        if training.data.cached and not is_first and wait_s >= _MUCH_WAITING * logged_s:
            self._warn_of_waiting(end.step, wait_s, logged_s)

    def _warn_of_waiting(self, step: int, wait_s: float, logged_s: float) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        self._training.reporter.warn(
            f"training waits for its data: {wait_s / logged_s:.0%} of the time up to step {step:,}, {wait_s:.1f} s, since the last one that was "
            "logged. More data.read_ahead_mib helps against slow answers, not against a store that gives too few bytes a second"
        )

    def _traffic(self) -> dict[str, int]:
        """Bytes and requests of this rank's datasets in object stores; empty if all data are in folders."""
        totals: Counter[str] = Counter()
        for dataset in self._training.data.cached:
            traffic = dataset.traffic
            totals.update(
                asked_bytes=traffic.asked_bytes,
                fetched_bytes=traffic.fetched_bytes,
                requests=traffic.requests,
            )
        return dict(totals)


class RankWindows(Observer):
    """The numbers of all ranks at the end of each window, for the rank file and for the guardian."""

    def __init__(self, training: Training, ranks: RankTimes) -> None:
        self._training, self._ranks = training, ranks

    def after_step(self, end: StepEnd) -> None:
        frame = self._ranks.step_ended(end.step, last=end.ending)
        if frame is not None:
            self._training.reporter.measured(frame)
            self._training.inputs.guardian.measured(frame)


class HeldOutEvaluation(Observer):
    """Evaluations on held-out text, every ``evaluation.every_steps`` steps."""

    def __init__(self, training: Training) -> None:
        self._training = training

    def after_save(self, end: StepEnd) -> None:
        spec = self._training.inputs.spec.evaluation
        if not end.last and not end.report.flags.stop and is_due(end.step, spec.every_steps):
            self.run(end.step, spec.sequences)

    def run(self, step: int, sequences: int) -> HeldOutLoss | None:
        """Score held-out text and report it. Raises ``EvaluationStoppedError`` on a request to stop."""
        training, inputs, built = self._training, self._training.inputs, self._training.built
        with inputs.ledger.bucket(Bucket.EVAL):
            begin_s = reported_s = time.perf_counter()

            def report(scored: int, total: int) -> None:
                nonlocal reported_s
                if time.perf_counter() - reported_s > _REPORT_EVALUATION_S:
                    reported_s = time.perf_counter()
                    training.reporter.emit(Evaluating(step, scored, total))

            evaluation = evaluate(
                built.model,
                built.runner,
                training.data,
                inputs.spec,
                sequences,
                report,
                lambda: inputs.stop.made,
            )
            inputs.guardian.computed()
            seconds = time.perf_counter() - begin_s
            # Gathering weights and waiting for stages here was evaluation, not a step's.
            for clock in built.waits.values():
                clock.forget()
        if evaluation is not None:
            by_source = dict(evaluation.sources)
            training.reporter.emit(
                Evaluated(step, evaluation.loss, evaluation.bits_per_byte, seconds, by_source)
            )
        return evaluation


def report_start(training: Training) -> None:
    """Report the start, what may be wrong with it, and the checkpoint that was restored."""
    restored, reporter, inputs = training.restored, training.reporter, training.inputs
    if reporter.speaks:
        changed = _changed_numerics(training)
        reporter.emit(_started(training))
        watch_machines(inputs.directory, reporter)
        if restored is not None and changed:
            reporter.warn(
                f"this machine computes {', '.join(changed)} with other bits than that of the start before: from here on, the bits of "
                "the weights are those of this history of machines"
            )
    for note in disk_notes(inputs.spec, inputs.directory) if reporter.speaks else ():
        reporter.warn(note)
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
            reporter.warn(f"passed over a damaged checkpoint: {line}")
        source = restored.source or str(inputs.directory.checkpoints)
        reporter.emit(Restored(restored.step, source, restored.seconds, moved_bytes=restored.moved_bytes))


def _started(training: Training) -> RunStarted:
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
        environment=start_record(inputs.spec, inputs.directory, index, training.numerics.probes),
    )


def _changed_numerics(training: Training) -> list[str]:
    """The probes whose bits on rank 0's machine differ from those of the run's newest start; none if that did not record them."""
    started = newest_event(training.inputs.directory.events, lambda event: isinstance(event.body, RunStarted))
    if started is None or not isinstance(started.body, RunStarted):
        return []
    before = started.body.environment.get("numerics")
    if not isinstance(before, dict) or not before:
        return []
    return differing(
        Numerics("", {str(name): str(value) for name, value in before.items()}), training.numerics
    )


# The loss on held-out text, the same number on any fleet.
#
# The held-out sequences are cut into batches of a fixed shape, each of one source where the run has several. Batches are dealt to the
# data-parallel ranks in turn. The losses are added in the order of batches, and of context ranks within a batch.


@dataclass(frozen=True)
class HeldOutLoss:
    """The loss on held-out text."""

    loss: float
    """Mean cross-entropy in nats a token."""
    bits_per_byte: float
    """Bits needed for a byte of the text, as a compressor counts."""
    sources: Mapping[str, float] = field(default_factory=dict)
    """The loss on the text of each of several sources by its name, if any of it was scored."""


def _batch(data: RunData, numbers: NDArray[np.int64], size: int) -> tuple[Tensor, Tensor]:
    """Held-out samples ``(size, seq + 1)`` and their targets ``(size, seq)``, padded with ignored rows.

    So every batch has the same shape: another one would make some ranks compile the blocks again.
    """
    held_out = np.concatenate([data.held_out_samples(int(number), 1) for number in numbers])
    samples = F.pad(torch.from_numpy(held_out), (0, 0, 0, size - len(numbers)))
    targets = samples[:, 1:].clone()
    targets[len(numbers) :] = IGNORE
    return samples, targets


def _batches(data: RunData, numbers: NDArray[np.int64], size: int) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """The held-out ``numbers`` in batches of at most ``size``, each of one source, with its name."""
    for name, part in data.held_out_parts.items():
        chosen = numbers[(numbers >= part.start) & (numbers < part.stop)]
        for first in range(0, len(chosen), size):
            yield name, chosen[first : first + size]


def _targets(data: RunData, numbers: NDArray[np.int64]) -> int:
    """The targets in these held-out samples; at least 1, of the many zeros of a record of padding alone."""
    return max(1, int(data.held_out_targets(numbers).sum()))


def _any_rank(here: bool, mesh: Mesh) -> bool:
    """True on every rank if ``here`` is true on one. A collective."""
    if mesh.ranks == 1:
        return here
    flag = torch.tensor(float(here), device=mesh.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


class EvaluationStoppedError(Exception):
    """A request to stop came to some rank; raised on every rank alike, between two rounds of batches."""


@torch.no_grad()
def evaluate(
    model: DataParallel,
    runner: SlotRunner,
    data: RunData,
    spec: RunSpec,
    most: int,
    on_progress: Callable[[int, int], None] = lambda _done, _sequences: None,
    stops: Callable[[], bool] = lambda: False,
) -> HeldOutLoss | None:
    """The loss on ``most`` held-out sequences (0: on all), evenly spaced; ``None`` if there are none.

    ``on_progress`` is called after each round of batches with the number of sequences that all ranks have scored, and of all. If
    ``stops()`` is true on some rank after a round, ``EvaluationStoppedError`` is raised.
    """
    sequences = min(most or data.held_out_len, data.held_out_len)
    if sequences == 0:
        return None
    numbers = np.arange(sequences) * data.held_out_len // sequences
    mesh = model.mesh
    size = spec.train.micro_batch_size or spec.train.batch_size // spec.train.slots
    dealt = list(_batches(data, numbers, size))
    batches = len(dealt)
    context = mesh.layout.context
    losses = torch.zeros(batches * context, dtype=torch.float64, device=mesh.device)
    for turn in range(-(-batches // mesh.layout.data_ranks)):
        batch = turn * mesh.layout.data_ranks + mesh.data_rank
        # A rank without a batch repeats the first, since under FSDP every forward pass is a collective.
        samples, targets = _batch(data, dealt[batch if batch < batches else 0][1], size)
        loss = runner.evaluate(runner.losses.cut(samples, targets))
        if batch < batches and runner.reports:
            losses[batch * context + mesh.context_rank] = loss.double()
        on_progress(min((turn + 1) * mesh.layout.data_ranks * size, sequences), sequences)
        if _any_rank(stops(), mesh):
            reshard(model.parts)
            raise EvaluationStoppedError
    # Leaves shards behind and not gathered weights, for the next forward pass and for everything that reads parameters.
    reshard(model.parts)
    dist.all_reduce(losses)
    nats = math.fsum(losses.tolist())
    text_bytes = int(data.held_out_bytes(numbers).sum())
    by_batch = losses.view(batches, context).tolist()
    by_source = {
        name: math.fsum(
            loss for (part, _), row in zip(dealt, by_batch, strict=True) if part == name for loss in row
        )
        / sum(_targets(data, chosen) for part, chosen in dealt if part == name)
        for name in dict.fromkeys(name for name, _ in dealt if name)
    }
    bits_per_byte = nats / math.log(2) / max(1, text_bytes)
    return HeldOutLoss(nats / _targets(data, numbers), bits_per_byte, by_source)
