"""A rank's share of a slot: its micro-batches, cut to this rank's part of the sequence, and their loss and gradients.

A ``SlotRunner`` computes the loss and the gradients of a slot: without a pipeline in a loop over micro-batches (gradient
accumulation, ``LoopRunner``), with one by a schedule (``PipelineRunner``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from phalanx.data.documents import document_ids
from phalanx.model.mtp import targets_ahead, training_loss
from phalanx.parallel.context.head_tail import context_positions
from phalanx.parallel.mesh.mesh import Mesh
from phalanx.parallel.pipeline.runner import Pipeline
from phalanx.parallel.reduction.data_parallel import DataParallel
from phalanx.parallel.tensor.apply import VocabularyPiece
from phalanx.run.kinds.prediction_ahead import depths
from phalanx.run.spec import RunSpec
from phalanx.train.step.loss import IGNORE, summed_cross_entropy


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass on this rank."""

    tokens: Tensor
    """``(batch, seq)``, int64, this context rank's part of the sequence."""
    targets: Tensor
    """``(batch, seq)``, int64."""
    positions: Tensor
    """``(seq,)``, int64: the positions of these tokens in their sequences."""
    documents: Tensor | None
    """``(batch, whole seq)``, int64: the document of each token of the whole sequence; ``None`` without a mask."""

    @property
    def counted(self) -> Tensor:
        """The number of targets that are not ``IGNORE``: 0-dim, int64."""
        return (self.targets != IGNORE).sum()


@dataclass(frozen=True)
class Losses:
    """Calls stages of the model; the last one returns the summed loss of a micro-batch."""

    spec: RunSpec
    mesh: Mesh
    rows: VocabularyPiece | None
    """This rank's rows of the output projection; ``None`` if it has all."""

    def cut(self, samples: Tensor, targets: Tensor) -> MicroBatch:
        """Cuts this rank's part out of ``samples`` ``(batch, seq + 1)`` and their ``targets`` ``(batch, seq)``."""
        tokens, layout = samples[:, :-1], self.mesh.layout
        documents = (
            document_ids(tokens, self.spec.train.end_of_document) if self.spec.train.document_mask else None
        )
        if layout.context == 1:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
            return MicroBatch(tokens, targets, positions, documents)
        positions = context_positions(tokens.shape[1], layout.context, self.mesh.context_rank)
        positions = positions.to(tokens.device)
        return MicroBatch(tokens[:, positions], targets[:, positions], positions, documents)

    def call(self, stage: nn.Module, x: Tensor, batch: MicroBatch, *, ahead: bool) -> Tensor:
        """Runs a stage on ``x``: tokens ``(batch, seq)`` for the first, hidden states ``(batch, seq, dim)`` for the others.

        Returns hidden states, or from the last stage the summed loss: 0-dim, or with multi-token prediction, if ``ahead`` asks
        for it, ``(1 + depths,)``.
        """

        def readout(hidden: Tensor, weight: Tensor) -> Tensor:
            return self._sum(hidden, weight, batch.targets)

        def readout_ahead(hidden: Tensor, weight: Tensor, depth: int) -> Tensor:
            return self._sum(hidden, weight, targets_ahead(batch.targets, depth, IGNORE))

        result: Tensor = stage(
            x,
            readout,
            positions=batch.positions,
            documents=batch.documents,
            ahead=readout_ahead if ahead and depths(self.spec.model) else None,
        )
        return result

    def _sum(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        chunk, cap = self.spec.train.loss_chunk, self.spec.model.logit_cap
        return summed_cross_entropy(hidden, weight, targets, chunk, self.rows, cap=cap)


class SlotRunner(Protocol):
    """Computes the losses and gradients of a rank's share of a slot."""

    losses: Losses

    @property
    def reports(self) -> bool:
        """True on exactly one of the ranks that compute the same loss, so that the all-reduce counts it once."""

    @abstractmethod
    def gradients(self, batches: Sequence[MicroBatch], scale: float) -> Tensor:
        """Forward and backward of a slot's micro-batches, in order.

        Adds the gradients of their summed loss times ``scale`` to the model's. Returns the summed loss of the next token (0-dim,
        fp32), without those of tokens further ahead.
        """

    @abstractmethod
    def evaluate(self, batch: MicroBatch) -> Tensor:
        """Computes the summed loss (0-dim, fp32) of one micro-batch, forward only."""


@dataclass
class LoopRunner(SlotRunner):
    """Runs one micro-batch after another through the whole model."""

    model: DataParallel
    losses: Losses

    @property
    def reports(self) -> bool:
        return self.model.mesh.tensor_rank == 0

    def gradients(self, batches: Sequence[MicroBatch], scale: float) -> Tensor:
        (module,) = self.model.parts
        total = torch.zeros((), device=self.model.mesh.device)
        for batch in batches:
            parts = self.losses.call(module, batch.tokens, batch, ahead=True)  # () or (1 + depths,)
            self.model.before_backward(0, last=batch is batches[-1])
            torch.autograd.backward(training_loss(parts, self.losses.spec.model) * scale)
            total += parts.detach() if parts.ndim == 0 else parts.detach()[0]
        return total

    def evaluate(self, batch: MicroBatch) -> Tensor:
        (module,) = self.model.parts
        return self.losses.call(module, batch.tokens, batch, ahead=False)


@dataclass
class PipelineRunner(SlotRunner):
    """Runs micro-batches through the stages of a pipeline, by its schedule."""

    model: DataParallel
    losses: Losses
    engine: Pipeline

    @property
    def reports(self) -> bool:
        return self.model.mesh.tensor_rank == 0 and self.engine.schedule.stages - 1 in self.engine.part_of

    def gradients(self, batches: Sequence[MicroBatch], scale: float) -> Tensor:
        tokens = [batch.tokens for batch in batches]
        losses = self.engine.run(tokens, self._forward(batches), scale, self.model)
        total = torch.zeros((), device=self.model.mesh.device)
        for loss in losses:  # in the order of micro-batches, as LoopRunner adds them: the same bits
            total += loss
        return total

    def evaluate(self, batch: MicroBatch) -> Tensor:
        return self.engine.evaluate([batch.tokens], self._forward([batch]))[0]

    def _forward(self, batches: Sequence[MicroBatch]) -> Callable[[nn.Module, Tensor, int], Tensor]:
        def forward(stage: nn.Module, x: Tensor, number: int) -> Tensor:
            return self.losses.call(stage, x, batches[number], ahead=False)

        return forward
