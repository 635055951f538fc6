"""One optimizer step: the gradients of all slots, their sum, its norm, and the update.

No sum over ranks depends on their number: gradients are added in tree order (``phalanx.parallel``), the gradient's norm by exact
addition, and losses slot by slot.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from phalanx.hardware.local.device import brought, wait_for_stream
from phalanx.model.layers.moe import routers
from phalanx.observe.ledger import Bucket, Ledger
from phalanx.parallel.divisions import Round
from phalanx.parallel.process_group.typed_gather import gather_typed
from phalanx.parallel.reduction import reproducible_sums
from phalanx.parallel.reduction.data_parallel import gradients
from phalanx.run.layout import micro_batches_per_slot
from phalanx.train.step.learning_rate import multiplier
from phalanx.train.step.slot import MicroBatch, SlotWork
from phalanx.train.step.state import Built


class Audit(Protocol):
    """A check for silent data corruption that has slots computed twice, on different ranks."""

    @abstractmethod
    def begin(self, step: int) -> None:
        """Prepare ``step``, before its rounds; may compute extra slots."""

    @abstractmethod
    def around(self, number: int) -> AbstractContextManager[None]:
        """Return a context manager that encloses each computation of gradients of the round at index ``number``."""

    @abstractmethod
    def ended(self, step: int) -> None:
        """Check ``step`` after its rounds and before the update. Raise, on every rank, if the step must not be applied."""


class StepStatistics(Protocol):
    """Statistics of a step's gradients, weights and update. They change no bit of the weights."""

    @abstractmethod
    def before_update(self, gradient_scale: float, *, finite: bool) -> bool:
        """Measure weights and gradients, whose complete values are ``gradient_scale`` times those of the parameters. A collective.

        Called once gradients are summed, whether an update follows or not. Return True, on every rank alike, if the update is to be measured too. ``finite`` is false if loss or gradient are not.
        """

    @abstractmethod
    def after_update(self) -> None:
        """Measure the update. Each parameter's gradient holds the change of its weights. A collective."""


_NAMED = 3
"""Maximum number of slots and of parameters that a rank names if they are not finite."""

Batches = Iterator[NDArray[np.int64]]
"""The samples ``(sequences, seq_len + 1)`` of each of this rank's rounds, step after step."""


@dataclass(frozen=True)
class StepFlags:
    """Requests that any rank can make of all; they travel in the loss all-reduce, so all ranks see them in the same step."""

    stop: bool = False
    """Save a checkpoint and end the run after this step."""
    unsafe: bool = False
    """This rank's newest copy of its state would not survive the loss of its node."""
    leave: bool = False
    """End this epoch of membership after this step."""
    save: bool = False
    """Save a checkpoint after this step."""
    profile: bool = False
    """Rank 0 has a profile request: next all ranks receive the steps to record, and the ranks that record them."""
    no_samples: bool = False
    """This rank's samples of the step could not be read: the step is not applied."""


@dataclass(frozen=True)
class StepReport:
    """The outcome of a step."""

    loss: float
    """Mean cross-entropy of the batch, in nats a token."""
    grad_norm: float
    """Before clipping; infinite if anything was infinite or not a number."""
    tokens: int
    lr: float
    applied: bool
    """True if the weights were updated: not if the loss or the gradient norm was not finite, nor if the update was withheld."""
    flags: StepFlags
    """The requests of all ranks, joined by "or"."""
    balance: float | None = None
    """The largest load of any expert over its layer's mean load; ``None`` without experts."""
    nonfinite: tuple[str, ...] = ()
    """If the step was not applied: the slots and parameters that were not finite, on any rank, as text."""
    nonfinite_slots: tuple[int, ...] = ()
    nonfinite_parameters: tuple[str, ...] = ()
    nonfinite_ranks: tuple[int, ...] = ()
    """If the step was not applied: the ranks whose own losses were not finite."""
    slot_losses: tuple[float, ...] = ()
    """The mean loss of each slot, in nats a token; 0 for a slot without targets."""

    @property
    def worst_slot(self) -> int:
        """The slot with the largest mean loss."""
        return max(range(len(self.slot_losses)), key=lambda slot: self.slot_losses[slot], default=0)

    @property
    def worst_slot_loss(self) -> float | None:
        """The mean loss of that slot; ``None`` if it is not finite."""
        loss = self.slot_losses[self.worst_slot] if self.slot_losses else math.nan
        return loss if math.isfinite(loss) else None


@dataclass(frozen=True)
class _NonFiniteSources:
    """Where a step was not finite: the first slots and parameters of each rank, as text and as fields, and all ranks."""

    texts: tuple[str, ...] = ()
    slots: tuple[int, ...] = ()
    parameters: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


@dataclass
class Stepper:
    """Optimizer steps of one run on one rank."""

    built: Built
    batches: Batches
    ledger: Ledger
    updates: int = 0
    """Updates applied so far; Adam's bias correction counts them."""
    withholds: Callable[[float, float], bool] = lambda _loss, _norm: False
    """Function of a step's loss and gradient norm: True if its update must not be applied. Its result is the same on every rank."""
    expert_tokens: Tensor | None = field(default=None, init=False)
    """Tokens of each expert in the newest step, over all ranks: ``(routers, experts)``, int64; ``None`` without experts."""
    rate_scale: float = 1.0
    """Factor of the learning rate of the schedule; forks at loss spikes lower it."""
    clip_scale: float = 1.0
    """Factor of ``optimizer.clip_norm``; forks at loss spikes lower it."""

    def __post_init__(self) -> None:
        """Find the model's routers and reset their token counts."""
        model, train = self.built.model, self.built.spec.train
        self._mesh, self._device = model.mesh, model.mesh.device
        self._routers = {name: router for part in model.parts for name, router in routers(part)}
        for router in self._routers.values():
            router.token_counts.zero_()
        # A slot's loss is scaled by the tokens it holds when nothing is masked: a constant of the run, so that its
        # gradient does not wait for the batch's token count. The rest of the factor comes after the sum.
        self._slot_tokens = train.batch_size // train.slots * train.seq_len

    def run(
        self,
        number: int,
        flags: StepFlags = StepFlags(),
        *,
        lacks_samples: Callable[[], bool] | None = None,
        before_sums: Callable[[], None] = lambda: None,
        before_update: Callable[[], None] = lambda: None,
        audit: Audit | None = None,
        statistics: StepStatistics | None = None,
    ) -> StepReport:
        """Run step ``number``, from 1, which sets the learning rate. A collective of all ranks of the mesh.

        The update is skipped if loss or gradient norm is not finite, or ``withholds`` returns True for them.
        ``flags`` are this rank's own requests; the report has those of all ranks. ``lacks_samples`` is called after this
        rank's slots: True if ``batches`` had other samples than the step's. Then no rank applies the step. It is given on all
        ranks or on none.

        ``before_sums`` is called before this rank adds its losses to the sums without which no rank can complete the
        step. ``before_update`` is called before the weights change; a checkpoint may still be copying them. ``audit``
        checks the slots for silent data corruption. ``statistics`` measures gradients, weights and update.
        """
        spec = self.built.spec
        # 1. Gradients: this rank's slots, forward and backward; the reduction over ranks runs inside backward.
        if audit is not None:
            with self._auditing():
                audit.begin(number)
        computed_ns = self._computed_ns()
        losses, tokens = self._run_slots(audit)
        with self.ledger.bucket(Bucket.STEP_COMPUTE):
            self._wait_for_device()  # the all-reduce would wait anyway; this books it as computing, not communication
        self._book_waits(computed_ns)
        if audit is not None:
            with self._auditing():
                audit.ended(number)
        # 2. Numbers that all ranks need before the update: mean loss, token count, flags, gradient norm.
        before_sums()
        with self.ledger.bucket(Bucket.COMM_EXPOSED_DP):
            if lacks_samples is not None:
                flags = dataclasses.replace(flags, no_samples=lacks_samples())
            loss, count, raised, slot_losses = self._reduce_losses(losses, tokens, flags)
            norm = self._gradient_norm(self._slot_tokens / count)
        lr = spec.optimizer.lr * multiplier(spec.schedule, number, spec.train.steps) * self.rate_scale
        finite = math.isfinite(loss) and math.isfinite(norm)
        sources = _NonFiniteSources() if finite else self._nonfinite_sources(losses)
        has_samples = lacks_samples is None or not raised.no_samples
        applied = finite and has_samples and not self.withholds(loss, norm)
        measured = False
        if statistics is not None and has_samples:
            with self.ledger.bucket(Bucket.EVAL):
                measured = statistics.before_update(self._slot_tokens / count, finite=finite)
        # 3. The update.
        if applied:
            with self.ledger.bucket(Bucket.STEP_OPTIMIZER):
                before_update()
                self.updates += 1
                limit = spec.optimizer.clip_norm * self.clip_scale
                clipping = min(1.0, limit / norm) if limit and norm else 1.0
                scale = self._slot_tokens / count * clipping
                self.built.optimizer.step(self.updates, lr, scale, keep_change=measured)
                self._wait_for_device()
            if statistics is not None and measured:
                with self.ledger.bucket(Bucket.EVAL):
                    statistics.after_update()
        self.built.model.abandon()
        balance = self._balance_experts(applied=applied)
        return StepReport(
            loss,
            norm,
            count,
            lr,
            applied,
            raised,
            balance,
            nonfinite=sources.texts,
            nonfinite_slots=sources.slots,
            nonfinite_parameters=sources.parameters,
            nonfinite_ranks=sources.ranks,
            slot_losses=slot_losses,
        )

    @contextmanager
    def _auditing(self) -> Iterator[None]:
        """Context whose time, with the waits for collectives, is booked as an audit's."""
        with self.ledger.bucket(Bucket.HEALTH_SDC_CHECK):
            yield
            self._wait_for_device()
            self.built.forget_waits()

    def _computed_ns(self) -> int:
        return self.ledger.totals_ns().get(Bucket.STEP_COMPUTE, 0)

    def _book_waits(self, computed_ns: int) -> None:
        """Move the waits for collectives inside forward and backward from computing to their own buckets. A GPU reports them afterwards.

        ``computed_ns`` is the computing time that was booked before this step. The waits never exceed what this step booked as
        computing: a GPU may have waited while the host waited for samples, and that time is booked once.
        """
        left = self._computed_ns() - computed_ns
        for bucket, clock in self.built.waits.items():
            waited = min(clock.take_ns(), left)
            self.ledger.reassign(Bucket.STEP_COMPUTE, bucket, waited)
            left -= waited

    def _wait_for_device(self) -> None:
        wait_for_stream(self._device)

    def _run_slots(self, audit: Audit | None) -> tuple[Tensor, Tensor]:
        """Run forward and backward of this rank's slots.

        Return two vectors ``(slots * context ranks,)``, float64: the summed loss and the number of targets of each
        slot's sequence pieces. Pieces of other ranks are zero, and all pieces on a rank that does not report losses
        (see ``reports`` of the runner).
        """
        built, context = self.built, self._mesh.layout.context
        pieces = built.spec.train.slots * context
        losses = torch.zeros(pieces, dtype=torch.float64, device=self._device)
        tokens = torch.zeros(pieces, dtype=torch.float64, device=self._device)
        piece_of = {
            turn: current.slot * context + self._mesh.context_rank
            for turn, current in enumerate(built.rounds)
            if current.counts and built.runner.reports
        }

        def read(turn: int) -> list[MicroBatch]:
            """Return the micro-batches of round ``turn``, after waiting for its samples. The number of targets is
            noted if the piece counts on this rank.
            """
            with self.ledger.bucket(Bucket.STEP_DATA_WAIT):
                samples = torch.from_numpy(next(self.batches))  # (sequences, seq_len + 1)
            batches = self.micro_batches(samples)
            if turn in piece_of:
                # (micro-batches,), added to a scalar
                tokens[piece_of[turn]] = torch.stack([batch.counted for batch in batches]).sum()
            return batches

        audited = (lambda _: nullcontext()) if audit is None else audit.around
        with self.ledger.bucket(Bucket.STEP_COMPUTE):
            slot_losses = built.runner.gradients(self._work(built.rounds, read, audited))
            for turn, piece in piece_of.items():
                losses[piece] = slot_losses[turn].double()
        return losses, tokens

    def recompute_slot(self, current: Round, samples: NDArray[np.int64]) -> None:
        """Compute a slot for an audit, without adding its gradient; ``samples`` is ``(sequences, seq_len + 1)``."""
        batches = self.micro_batches(torch.from_numpy(samples))
        self.built.runner.gradients(self._work([current], lambda _: batches))

    def micro_batches(self, samples: Tensor) -> list[MicroBatch]:
        """Return this rank's parts of the micro-batches of a slot; ``samples`` is ``(sequences, seq_len + 1)``, on the host."""
        cut, size = self.built.runner.losses.cut, self.built.spec.train.micro_batch_size or len(samples)
        # (sequences of a micro-batch, seq_len + 1) each
        return [cut(part, part[:, 1:]) for part in torch.split(samples, size)]

    def _work(
        self,
        rounds: Sequence[Round],
        read: Callable[[int], Sequence[MicroBatch]],
        audited: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> SlotWork:
        """Return the slots of a step with the scale of each: the round's weight over the tokens of an unmasked slot.

        Before a slot, its routers' auxiliary loss gets the same scale, and they count tokens only if the slot counts.
        """
        model = self.built.model

        def scale(current: Round) -> float:
            return model.summation.loss_weight(current) / self._slot_tokens

        def turn_to(current: Round) -> None:
            for router in self._routers.values():
                router.auxiliary_scale, router.counting = scale(current), current.counts

        return SlotWork(rounds, micro_batches_per_slot(self.built.spec), read, scale, turn_to, audited)

    def _reduce_losses(
        self, losses: Tensor, tokens: Tensor, flags: StepFlags
    ) -> tuple[float, int, StepFlags, tuple[float, ...]]:
        """Return the batch's mean loss, its token count, the joined flags of all ranks, and each slot's mean loss. One all-reduce.

        ``losses`` and ``tokens`` are this rank's ``(pieces,)``. The mean is NaN if any piece is not finite.
        """
        raised = brought(torch.tensor(dataclasses.astuple(flags), dtype=torch.float64), self._device)
        everything = torch.cat((losses, tokens, raised))  # (2 * pieces + flags,)
        # Each loss and count comes from one rank and is zero on all others, so this sum rounds nothing.
        dist.all_reduce(everything)
        numbers, pieces = everything.tolist(), len(losses)
        values = numbers[: 2 * pieces]
        # fsum is exact, so the order of slots does not matter either.
        count = round(math.fsum(values[pieces:]))
        loss = math.fsum(values[:pieces]) / count if all(map(math.isfinite, values)) else math.nan
        joined = StepFlags(*(number > 0 for number in numbers[2 * pieces :]))
        return loss, count, joined, self._slot_losses(values[:pieces], values[pieces:])

    def _slot_losses(self, losses: Sequence[float], tokens: Sequence[float]) -> tuple[float, ...]:
        """Return each slot's mean loss from the pieces' summed losses and token counts; 0 for a slot without targets."""
        context = self._mesh.layout.context
        return tuple(
            math.fsum(losses[start : start + context]) / count
            if (count := sum(tokens[start : start + context]))
            else 0.0
            for start in range(0, len(losses), context)
        )

    def _gradient_norm(self, scale: float) -> float:
        """Return the norm of the full gradient, times ``scale``, by exact addition. A collective."""
        placement = self.built.placement
        grads = [
            gradient for name, gradient in gradients(self.built.model.parts).items() if placement.owns(name)
        ]
        return reproducible_sums.norm(grads, placement.parameter_count, self._device) * scale

    def _balance_experts(self, *, applied: bool) -> float | None:
        """Sum and reset the token counts of all routers. If the step was ``applied``, move the routers' biases
        against the load. A collective.

        Return the largest ratio, over all layers, of an expert's load to its layer's mean; ``None`` without experts.
        """
        moe = self.built.spec.model.moe
        if moe is None:
            return None
        names = self.built.placement.routers
        counts = torch.zeros((len(names), moe.experts), dtype=torch.int64, device=self._device)
        for name, router in self._routers.items():
            counts[names.index(name)] = router.token_counts
            router.token_counts.zero_()
        dist.all_reduce(counts)
        self.expert_tokens = counts
        for name, router in self._routers.items():
            if applied and router.bias is not None:
                router.move_bias(counts[names.index(name)])
        return float((counts.amax(1) * counts.shape[1] / counts.sum(1).clamp(min=1)).max())

    def _nonfinite_sources(self, losses: Tensor) -> _NonFiniteSources:
        """Return the slots with a non-finite loss, the ranks that computed them, and the parameters with a non-finite
        gradient, at most ``_NAMED`` of each rank.

        A collective. ``losses`` is this rank's ``(pieces,)``.
        """
        context = self._mesh.layout.context
        slots = list(
            dict.fromkeys(
                piece // context for piece, loss in enumerate(losses.tolist()) if not math.isfinite(loss)
            )
        )
        parameters = [
            (name, bad, gradient.numel())
            for name, gradient in gradients(self.built.model.parts).items()
            if (bad := int((~torch.isfinite(gradient)).sum()))
        ]
        everywhere = gather_typed(
            (slots[:_NAMED], parameters[:_NAMED]), tuple[list[int], list[tuple[str, int, int]]]
        )
        all_slots = tuple(dict.fromkeys(slot for slots, _ in everywhere for slot in slots))
        all_parameters = tuple(dict.fromkeys(bad for _, parameters in everywhere for bad in parameters))
        return _NonFiniteSources(
            texts=(
                *(f"loss of slot {slot}" for slot in all_slots),
                *(f"gradient of {name} ({bad} of {of} elements)" for name, bad, of in all_parameters),
            ),
            slots=all_slots,
            parameters=tuple(dict.fromkeys(name for name, _, _ in all_parameters)),
            ranks=tuple(rank for rank, (slots, _) in enumerate(everywhere) if slots),
        )
