"""Losses and gradients of a rank's slots: micro-batches, cut to this rank's part of the sequence, and the runners of a step.

A ``SlotRunner`` computes the losses and gradients of the slots of a step. Without a pipeline it loops over micro-batches (gradient
accumulation, ``LoopRunner``). With a pipeline it follows a schedule (``PipelineRunner``), in which slots follow each other without a pause.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from phalanx.hardware.local.device import brought
from phalanx.model.layers.attention.attention import Documents, document_ids
from phalanx.model.transformer import targets_ahead, tokens_ahead, training_loss
from phalanx.parallel.context.exchange import context_positions
from phalanx.parallel.context.fixed_tiles import RankTiles, tiled_positions
from phalanx.parallel.divisions import Round
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.pipeline import Accumulation, Pipeline
from phalanx.parallel.reduction.data_parallel import DataParallel
from phalanx.parallel.tensor.apply import VocabularyPiece
from phalanx.run.kinds.block import prediction_depths
from phalanx.run.spec import RunSpec
from phalanx.train.step.loss import IGNORE, summed_cross_entropy, token_scores


@dataclass(frozen=True)
class Ahead:
    """Inputs and targets of a prediction ahead, for this rank's part of the sequence."""

    tokens: Tensor
    """``(batch, seq)``, int64: for each token of the micro-batch, the token that many positions later."""
    targets: Tensor
    """``(batch, seq)``, int64."""


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass on this rank."""

    tokens: Tensor
    """``(batch, seq)``, int64, this context rank's part of the sequence; ordered by tile if the run has context tiles."""
    targets: Tensor
    """``(batch, seq)``, int64."""
    positions: Tensor
    """``(seq,)``, int64: the positions of these tokens in their sequences."""
    documents: Documents | None
    """The documents of the full sequences; ``None`` without a document mask."""
    further: Sequence[Ahead] = ()
    """One for each prediction ahead."""
    noise: Tensor | None = None
    """``(batch, vocab)``, fp32: added to the logits of scores before the most probable token is chosen (``token_scores``)."""

    @property
    def counted(self) -> Tensor:
        """The number of targets that are not ``IGNORE``: 0-dim, int64."""
        return (self.targets != IGNORE).sum()


@dataclass(frozen=True)
class Losses:
    """Forward pass of stages of the model. The last stage returns the summed loss of a micro-batch."""

    spec: RunSpec
    mesh: Mesh
    rows: VocabularyPiece | None
    """This rank's rows of the output projection; ``None`` if it has all."""
    tiles: RankTiles | None
    """This rank's context tiles; ``None`` if the run has none."""

    def cut(self, samples: Tensor, targets: Tensor) -> MicroBatch:
        """Return this rank's part of ``samples`` ``(batch, seq + 1)`` and their ``targets`` ``(batch, seq)``, on its
        device, with positions, documents and the inputs of predictions ahead.

        Negative targets, and with ``targets_within_documents`` those after a document's end, become ``IGNORE``.
        Negative tokens are inverted (``~token``). The arguments are on the host, where documents are counted.
        """
        tokens, layout, device = samples[:, :-1], self.mesh.layout, self.mesh.device
        # Tokens of conversations that are no targets are stored inverted (``phalanx.data.reading.dataset.NO_TARGET``).
        tokens, targets = torch.where(tokens < 0, ~tokens, tokens), targets.masked_fill(targets < 0, IGNORE)
        documents = None
        if self.spec.train.targets_within_documents:
            targets = targets.masked_fill(tokens == self.spec.train.end_of_document, IGNORE)
        if self.spec.train.document_mask:
            ids = document_ids(tokens, self.spec.train.end_of_document)
            documents = Documents.numbered(ids).to(device)
        if self.tiles is not None:
            positions = tiled_positions(tokens.shape[1], self.tiles.count, layout.context, self.tiles.rank)
        elif layout.context == 1:
            positions = torch.arange(tokens.shape[1])
        else:
            positions = context_positions(tokens.shape[1], layout.context, self.mesh.context_rank)
        divided = self.tiles is not None or layout.context > 1

        def own(full: Tensor) -> Tensor:
            part = full[:, positions] if divided else full  # (batch, seq of this rank)
            return brought(part, device)

        # Computed on full sequences: the last token's target may belong to another rank.
        further = [Ahead(own(ahead.tokens), own(ahead.targets)) for ahead in self._ahead(tokens, targets)]
        return MicroBatch(own(tokens), own(targets), brought(positions, device), documents, further)

    def _ahead(self, tokens: Tensor, targets: Tensor) -> Iterator[Ahead]:
        """Yield inputs and targets of each prediction ahead, for full sequences ``(batch, seq)``."""
        train = self.spec.train
        ends = tokens == train.end_of_document if train.targets_within_documents else None
        for depth in range(1, prediction_depths(self.spec.model) + 1):
            yield Ahead(tokens_ahead(tokens, depth), targets_ahead(targets, depth, IGNORE, ends))

    def call(self, stage: nn.Module, x: Tensor, batch: MicroBatch, *, ahead: bool) -> Tensor:
        """Run a stage on ``x``: tokens ``(batch, seq)`` for the first stage, hidden states ``(batch, seq, dim)`` for the others.

        Return hidden states, or from the last stage the summed loss: 0-dim, or ``(1 + depths,)`` with multi-token prediction and
        ``ahead``.
        """

        def readout(hidden: Tensor, weight: Tensor) -> Tensor:
            return self._sum(hidden, weight, batch.targets)

        def readout_ahead(hidden: Tensor, weight: Tensor, depth: int) -> Tensor:
            return self._sum(hidden, weight, batch.further[depth - 1].targets)

        predicts = ahead and len(batch.further) > 0
        result: Tensor = stage(
            x,
            readout,
            positions=batch.positions,
            documents=batch.documents,
            ahead=readout_ahead if predicts else None,
            further=[each.tokens for each in batch.further] if predicts else None,
        )
        return result

    def score(self, stage: nn.Module, x: Tensor, batch: MicroBatch) -> Tensor:
        """Run a stage as ``call`` does, without predictions ahead. The last stage returns the scores of each token,
        ``(2, batch, seq)`` (``token_scores``); others return hidden states.
        """

        def readout(hidden: Tensor, weight: Tensor) -> Tensor:
            chunk, cap = self.spec.train.loss_chunk, self.spec.model.logit_cap
            return token_scores(
                hidden, weight, batch.targets, chunk, self.rows, self.tiles, cap=cap, noise=batch.noise
            )

        result: Tensor = stage(
            x, readout, positions=batch.positions, documents=batch.documents, ahead=None, further=None
        )
        return result

    def _sum(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        chunk, cap = self.spec.train.loss_chunk, self.spec.model.logit_cap
        return summed_cross_entropy(hidden, weight, targets, chunk, self.rows, self.tiles, cap=cap)


@dataclass(frozen=True)
class SlotWork:
    """The slots that a rank computes in sequence: those of a step, or one more for an audit."""

    rounds: Sequence[Round]
    micro_batches: int
    """The number of micro-batches of each slot."""
    read: Callable[[int], Sequence[MicroBatch]]
    """The micro-batches of the slot at an index of ``rounds``; each called once, in order."""
    scale: Callable[[Round], float]
    """The factor on the losses of a round's slot."""
    turn_to: Callable[[Round], None]
    """Called before a forward or backward pass of a micro-batch of the slot."""
    audited: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext()
    """Encloses each computation of gradients of the slot at an index of ``rounds``."""


class SlotRunner(Protocol):
    """Computation of the losses and gradients of a rank's slots."""

    losses: Losses

    @property
    def reports(self) -> bool:
        """True on exactly one of the ranks that compute the same loss, so that the all-reduce counts it once."""

    @abstractmethod
    def gradients(self, work: SlotWork) -> list[Tensor]:
        """Run forward and backward of the slots' micro-batches, in order.

        Add the gradients of their scaled losses to the model's, slot by slot. Return each slot's summed loss of the next token
        (0-dim, fp32), without predictions further ahead.
        """

    @abstractmethod
    def evaluate(self, batch: MicroBatch) -> Tensor:
        """Return the summed loss (0-dim, fp32) of one micro-batch, without gradients."""

    @abstractmethod
    def score(self, batch: MicroBatch) -> Tensor:
        """Return the scores of each token of one micro-batch, ``(2, batch, seq)``, fp32, without gradients (``token_scores``)."""


@dataclass
class LoopRunner(SlotRunner):
    """Runner without a pipeline: one micro-batch after another passes through the full model."""

    model: DataParallel
    losses: Losses

    @property
    def reports(self) -> bool:
        return self.model.mesh.tensor_rank == 0

    def gradients(self, work: SlotWork) -> list[Tensor]:
        return [self._slot(work, turn, current) for turn, current in enumerate(work.rounds)]

    def _slot(self, work: SlotWork, turn: int, current: Round) -> Tensor:
        """Run forward and backward of one slot, micro-batch by micro-batch, and return its summed loss, without predictions ahead."""
        (module,) = self.model.parts
        batches, scale = work.read(turn), work.scale(current)
        self.model.begin(current)
        work.turn_to(current)
        total = torch.zeros((), device=self.model.mesh.device)
        for batch in batches:
            parts = self.losses.call(module, batch.tokens, batch, ahead=True)  # () or (1 + depths,)
            last = batch is batches[-1]
            with work.audited(turn), self.model.computing(0, current, last=last):
                torch.autograd.backward(training_loss(parts, self.losses.spec.model) * scale)
            total += parts.detach() if parts.ndim == 0 else parts.detach()[0]
        self.model.end(current)
        return total

    def evaluate(self, batch: MicroBatch) -> Tensor:
        (module,) = self.model.parts
        return self.losses.call(module, batch.tokens, batch, ahead=False)

    def score(self, batch: MicroBatch) -> Tensor:
        (module,) = self.model.parts
        return self.losses.score(module, batch.tokens, batch)


@dataclass
class PipelineRunner(SlotRunner):
    """Runner with a pipeline: micro-batches pass through its stages by a schedule."""

    model: DataParallel
    losses: Losses
    engine: Pipeline

    @property
    def reports(self) -> bool:
        return self.model.mesh.tensor_rank == 0 and self.engine.schedule.stages - 1 in self.engine.part_of

    def gradients(self, work: SlotWork) -> list[Tensor]:
        """Run forward and backward of all slots through the pipeline, continuously. Return each slot's summed loss;
        zero on ranks without the last stage. A collective of the pipeline.
        """
        flow = _Flow(self.model, self.losses, work)
        losses = self.engine.run(flow, flow.forward, [work.scale(current) for current in work.rounds], flow)
        totals = [torch.zeros((), device=self.model.mesh.device) for _ in work.rounds]
        for number, loss in enumerate(
            losses
        ):  # in the order of micro-batches, as LoopRunner adds them: the same bits
            totals[number // work.micro_batches] += loss
        return totals

    def evaluate(self, batch: MicroBatch) -> Tensor:
        def forward(stage: nn.Module, x: Tensor, number: int) -> Tensor:  # noqa: ARG001
            return self.losses.call(stage, x, batch, ahead=False)

        return self.engine.evaluate([batch.tokens], forward)[0]

    def score(self, batch: MicroBatch) -> Tensor:
        def forward(stage: nn.Module, x: Tensor, number: int) -> Tensor:  # noqa: ARG001
            return self.losses.score(stage, x, batch)

        return self.engine.evaluate([batch.tokens], forward, (2, *batch.targets.shape))[0]


@dataclass
class _Flow(Accumulation):
    """Micro-batches of several slots in a rank's stages, numbered continuously from one slot to the next.

    A slot is read when its first micro-batch is computed, and released when its gradient is complete in all stages.
    """

    model: DataParallel
    losses: Losses
    work: SlotWork
    _read: dict[int, Sequence[MicroBatch]] = field(default_factory=dict)
    """By index of the slot's round."""
    _closed: Counter[int] = field(default_factory=Counter)
    """Number of stages in which a slot's gradient is complete, by index of its round."""

    def __len__(self) -> int:
        return len(self.work.rounds) * self.work.micro_batches

    def __getitem__(self, number: int) -> Tensor:
        """Return the tokens ``(b, s)`` of a micro-batch."""
        return self._batch(number).tokens

    def _batch(self, number: int) -> MicroBatch:
        """Return micro-batch ``number`` over all slots. The first request of a slot reads the slot's samples and begins its gradient."""
        turn, place = divmod(number, self.work.micro_batches)
        if turn not in self._read:
            self._read[turn] = self.work.read(turn)
            self.model.begin(self.work.rounds[turn])
        return self._read[turn][place]

    def forward(self, stage: nn.Module, x: Tensor, number: int) -> Tensor:
        """Run a stage on its input ``x`` for a micro-batch."""
        batch = self._batch(number)
        self.work.turn_to(self.work.rounds[number // self.work.micro_batches])
        return self.losses.call(stage, x, batch, ahead=False)

    @contextmanager
    def computing(self, part: int, slot: int, *, last: bool, postponed: bool) -> Iterator[None]:
        """Context of the backward of one stage part in a slot. With ``postponed``, it only adds weight gradients that
        earlier backward passes left out. After the ``last`` of all parts, free the slot's batches and end its gradient.
        """
        current = self.work.rounds[slot]
        self.work.turn_to(current)  # layers may be computed again
        with self.work.audited(slot), self.model.computing(part, current, last=last, postponed=postponed):
            yield
        if last:
            self._closed[slot] += 1
            if self._closed[slot] == len(self.model.parts):
                del self._read[slot]
                self.model.end(current)
