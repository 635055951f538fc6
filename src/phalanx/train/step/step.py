"""One optimizer step: every slot's gradient, their sum, its norm, the update.

Everything that is summed over ranks here is summed in a way that does not show how many there were: gradients in tree
order (``phalanx.parallel``), the gradient's norm by exact addition, losses slot by slot in the order of slots.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from phalanx.model.layers.router import routers
from phalanx.observe.ledger import Bucket, Ledger
from phalanx.parallel.mesh.comm_clock import CommClock
from phalanx.parallel.mesh.slots import Round
from phalanx.parallel.reduction import exact_sum
from phalanx.parallel.reduction.data_parallel import DataParallel, gradients
from phalanx.run.spec import RunSpec
from phalanx.train.optimizers.optimizer import Optimizer
from phalanx.train.step.learning_rate import multiplier
from phalanx.train.step.placement import Placement
from phalanx.train.step.slot import SlotRunner


class Audit(Protocol):
    """Whoever has slots computed twice, to find ranks that compute wrongly."""

    @abstractmethod
    def begin(self, step: int) -> None:
        """Before the rounds of ``step``; may compute more of them."""

    @abstractmethod
    def around(self, number: int) -> AbstractContextManager[None]:
        """Encloses round ``number`` of the step."""

    @abstractmethod
    def ended(self, step: int) -> None:
        """After the rounds, before the update; raises, on every rank alike, if the step is not to be applied."""


_NAMED = 3
"""How many culprits a rank names when something is not finite: with NaN everywhere, everything is one."""

Batches = Iterator[NDArray[np.int64]]
"""The samples ``(sequences, seq_len + 1)`` of each of this rank's rounds, step after step."""


@dataclass(frozen=True)
class Votes:
    """What any one rank can ask of all; carried by the step's own collectives, so that all know of it in the same step."""

    stop: bool = False
    """Save and end the run after this step."""
    unsafe: bool = False
    """This rank's newest copy of its state would not survive the loss of its node."""
    leave: bool = False
    """End this epoch of membership after this step."""


@dataclass(frozen=True)
class StepReport:
    """What came of a step."""

    loss: float
    """Mean cross-entropy of the batch, in nats a token."""
    grad_norm: float
    """Before clipping; infinite if anything was infinite or not a number."""
    tokens: int
    lr: float
    applied: bool
    """Whether the weights were changed: not if the loss or the gradient was not finite."""
    votes: Votes
    """What any rank asked for."""
    balance: float | None = None
    """The largest load of an expert over the mean of its layer; ``None`` without experts."""
    nonfinite: tuple[str, ...] = ()
    """Where the step was not applied: which slots or parameters were to blame, as this rank sees it."""


@dataclass
class Stepper:
    """Runs steps of one run on one rank."""

    spec: RunSpec
    model: DataParallel
    placement: Placement
    runner: SlotRunner
    optimizer: Optimizer
    rounds: list[Round]
    """What this rank computes in each step."""
    batches: Batches
    ledger: Ledger
    waits: Mapping[Bucket, CommClock]
    """What of the time in forward and backward was waiting, and for which axis."""
    updates: int = 0
    """Updates applied so far; what Adam's bias correction counts."""
    audit: Audit | None = None
    before_update: Callable[[], None] = lambda: None
    """Called before weights change; a checkpoint may still be reading them."""

    def __post_init__(self) -> None:
        self._mesh = self.model.mesh
        self._device = self._mesh.device
        self._routers = {name: router for part in self.model.parts for name, router in routers(part)}
        for router in self._routers.values():
            router.seen.zero_()
        train = self.spec.train
        # A slot's loss is scaled by what it holds when nothing is masked: a constant of the run, so that its
        # gradient does not wait for the batch's token count. The rest of the factor comes after the sum.
        self._slot_tokens = train.batch_size // train.slots * train.seq_len

    def run(self, number: int, votes: Votes = Votes()) -> StepReport:
        """Step ``number``, from 1. On every rank of the mesh, in step; each with its own votes."""
        self._audited(lambda audit: audit.begin(number))
        losses, tokens = self._slots()
        self._audited(lambda audit: audit.ended(number))
        with self.ledger.bucket(Bucket.STEP_COMPUTE):
            self._wait_for_device()  # what follows waits anyway; this tells computing from communicating
        with self.ledger.bucket(Bucket.COMM_EXPOSED_DP):
            loss, count, asked = self._sum_up(losses, tokens, votes)
            norm = self._gradient_norm(self._slot_tokens / count)
        lr = self.spec.optimizer.lr * multiplier(self.spec.schedule, number, self.spec.train.steps)
        applied = math.isfinite(loss) and math.isfinite(norm)
        blamed = () if applied else self._to_blame(losses)
        if applied:
            with self.ledger.bucket(Bucket.STEP_OPTIMIZER):
                self.before_update()
                self.updates += 1
                self.optimizer.step(self.updates, lr, self._slot_tokens / count * self._clipping(norm))
                self._wait_for_device()
        self.model.abandon()
        balance = self._balance(applied=applied)
        return StepReport(loss, norm, count, lr, applied, asked, balance, blamed)

    def _audited(self, act: Callable[[Audit], None]) -> None:
        if self.audit is None:
            return
        with self.ledger.bucket(Bucket.HEALTH_SDC_CHECK):
            act(self.audit)
            for clock in self.waits.values():  # its waiting was no step's
                clock.take_ns()

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _slots(self) -> tuple[Tensor, Tensor]:
        """Forward and backward of this rank's slots: summed loss and targets of each slot's pieces, zero for others'."""
        pieces = self.spec.train.slots * self._mesh.layout.context
        losses = torch.zeros(pieces, dtype=torch.float64, device=self._device)
        tokens = torch.zeros(pieces, dtype=torch.float64, device=self._device)
        for turn, current in enumerate(self.rounds):
            with self.ledger.bucket(Bucket.STEP_DATA_WAIT):
                samples = torch.from_numpy(next(self.batches))
            with self.ledger.bucket(Bucket.STEP_COMPUTE):
                with self.audit.around(turn) if self.audit is not None else nullcontext():
                    loss, count = self._slot(current, samples.to(self._device, non_blocking=True))
                if current.counts and self.runner.reports:
                    piece = current.slot * self._mesh.layout.context + self._mesh.context_rank
                    losses[piece], tokens[piece] = loss.double(), count
                # On a CPU, collectives ran inside forward and backward; they were no computing.
                waits_ns = {bucket: clock.take_ns() for bucket, clock in self.waits.items()}
            for bucket, waited_ns in waits_ns.items():
                self.ledger.reassign(Bucket.STEP_COMPUTE, bucket, waited_ns)
        return losses, tokens

    def again(self, current: Round, samples: NDArray[np.int64]) -> None:
        """Computes a slot that is not to count, for an audit."""
        self._slot(current, torch.from_numpy(samples).to(self._device))

    def _slot(self, current: Round, samples: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of one slot: its summed loss and its number of targets, as far as this rank sees them."""
        size = self.spec.train.micro_batch_size or len(samples)
        batches = [self.runner.losses.cut(part, part[:, 1:]) for part in torch.split(samples, size)]
        self.model.begin(current)
        scale = self.model.loss_weight(current) / self._slot_tokens
        for router in self._routers.values():
            router.auxiliary_scale, router.counting = scale, current.counts
        loss = self.runner.gradients(batches, scale)
        self.model.end(current)
        return loss, torch.stack([batch.counted for batch in batches]).sum()

    def _sum_up(self, losses: Tensor, tokens: Tensor, votes: Votes) -> tuple[float, int, Votes]:
        """Mean loss and token count of the batch, and what any rank asked for."""
        asked = torch.tensor(dataclasses.astuple(votes), dtype=torch.float64, device=self._device)
        everything = torch.cat((losses, tokens, asked))
        # Each loss and count comes from one rank and is zero on all others, so this sum rounds nothing.
        dist.all_reduce(everything)
        numbers, pieces = everything.tolist(), len(losses)
        values = numbers[: 2 * pieces]
        count = round(math.fsum(values[pieces:]))
        loss = math.fsum(values[:pieces]) / count if _finite(values) else math.nan
        return loss, count, Votes(*(number > 0 for number in numbers[2 * pieces :]))

    def _gradient_norm(self, scale: float) -> float:
        held = [
            gradient for name, gradient in gradients(self.model.parts).items() if self.placement.owns(name)
        ]
        return exact_sum.norm(held, self.placement.parameter_count, self._device) * scale

    def _clipping(self, norm: float) -> float:
        limit = self.spec.optimizer.clip_norm
        return min(1.0, limit / norm) if limit and norm else 1.0

    def _balance(self, *, applied: bool) -> float | None:
        """Moves the routers' biases against the load of this step, and says how uneven it was: the largest load of an
        expert over the mean of its layer; ``None`` without experts."""
        if self.spec.model.moe is None:
            return None
        names = self.placement.routers
        counts = torch.zeros(
            (len(names), self.spec.model.moe.experts), dtype=torch.int64, device=self._device
        )
        for name, router in self._routers.items():
            counts[names.index(name)] = router.seen
            router.seen.zero_()
        dist.all_reduce(counts)
        for name, router in self._routers.items():
            if applied and router.bias is not None:
                router.move_bias(counts[names.index(name)])
        return float((counts.amax(1) * counts.shape[1] / counts.sum(1).clamp(min=1)).max())

    def _to_blame(self, losses: Tensor) -> tuple[str, ...]:
        """Which slots' losses and which parameters' gradients are not finite, on any rank."""
        mine = [
            f"loss of slot {slot}" for slot, loss in enumerate(losses.tolist()) if not math.isfinite(loss)
        ]
        for name, gradient in gradients(self.model.parts).items():
            bad = int((~torch.isfinite(gradient)).sum())
            if bad:
                mine.append(f"gradient of {name} ({bad} of {gradient.numel()} elements)")
        everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everywhere, mine[:_NAMED])
        return tuple(dict.fromkeys(line for lines in everywhere for line in lines))


def _finite(values: list[float]) -> bool:
    return all(math.isfinite(value) for value in values)
