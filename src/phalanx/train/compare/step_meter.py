"""Figures of replayed steps: losses by slot and by token, and gradient norms by layer.

Norms are exact sums (``phalanx.parallel.reduction.exact_sum``) and losses are those of the step and of a forward pass, so all figures have
the same bits on every layout that promises one hash of the weights.
"""

from __future__ import annotations

import re
from typing import TypeAlias

import numpy as np
from torch import Tensor

from phalanx.data.reading.dataset import RunData, inputs_of
from phalanx.parallel.reduction import exact_sum
from phalanx.parallel.reduction.data_parallel import gradients
from phalanx.train.compare.observation import BatchScores, StepMeasures
from phalanx.train.evaluation.scoring import score_sequences
from phalanx.train.evaluation.tasks import ScoredSequence
from phalanx.train.lifecycle.progress import TrainProgress
from phalanx.train.step.state import Built
from phalanx.train.step.step import StepReport, StepStatistics

_LAYER = re.compile(r"(?:[A-Za-z_]\w*\.)*?\d+(?=\.|$)|\w+")
"""The layer of a parameter: "blocks.3" of "blocks.3.ffn.up.weight", "head" of "head.weight"."""
TokenLosses: TypeAlias = "np.ma.MaskedArray[tuple[int], np.dtype[np.float64]]"
"""Losses of the tokens of a sequence behind the first, masked where a token is no target."""
_SLOTS_IN_FULL = 4
"""So many slots, those with the largest losses, are reported token by token."""


def layer_of(parameter: str) -> str:
    """Return the name of the layer that a parameter belongs to."""
    match = _LAYER.match(parameter)
    return match[0] if match else parameter


class StepMeter(StepStatistics):
    """Meter of the steps of a replay up to ``last``. All methods are collectives."""

    def __init__(self, built: Built, data: RunData, last: int) -> None:
        self._built, self._data, self._last = built, data, last
        self.measures: dict[int, StepMeasures] = {}
        self._layer_norms: dict[str, float] = {}
        self._first_sample = 0
        self._token_losses: list[TokenLosses] = []
        """The losses of each sequence of the last step."""
        self._batch_before: float | None = None
        self._history: list[list[float]] = []

    def before_step(self, step: int, progress: TrainProgress) -> None:
        """Score the batches of the last step and of the one before it, ahead of the last step. Before all other steps, do nothing."""
        if step != self._last:
            return
        batch = self._built.spec.train.batch_size
        self._first_sample, self._history = progress.next_sample, progress.recent
        self._token_losses = self._scored(progress.next_sample)
        if progress.next_sample >= batch:
            self._batch_before = _mean(self._scored(progress.next_sample - batch))

    def before_update(self, gradient_scale: float, *, finite: bool) -> bool:  # noqa: ARG002
        """Take the gradient norm of each layer, times ``gradient_scale``. A collective. Return False: the update is not measured."""
        placement = self._built.placement
        own = gradients(self._built.model.parts)
        layers: dict[str, list[Tensor]] = {}
        for name, kind in placement.kinds.items():  # of the whole model, in the same order on every rank
            if kind.kind != "balance":
                of_layer = layers.setdefault(layer_of(name), [])
                if name in own and placement.owns(name):
                    of_layer.append(own[name])
        counts = [placement.parameter_count] * len(layers)
        values = exact_sum.norms(list(layers.values()), counts, self._built.model.mesh.device)
        self._layer_norms = {
            layer: value * gradient_scale for layer, value in zip(layers, values, strict=True)
        }
        return False

    def after_update(self) -> None:
        """Do nothing: the update is not measured."""

    def after_step(self, step: int, report: StepReport) -> None:
        """Note the figures of a step."""
        self.measures[step] = StepMeasures(
            report.lr, report.slot_losses, self._layer_norms, is_applied=report.applied
        )

    def scores(self) -> BatchScores:
        """Return the losses of the batches; token by token for the slots of the last step with the largest losses."""
        train = self._built.spec.train
        slot_losses = self.measures[self._last].slot_losses
        per_slot = train.batch_size // train.slots
        # A loss that is not a number is the largest of all.
        order = sorted(
            range(len(slot_losses)), key=lambda slot: -np.nan_to_num(slot_losses[slot], nan=np.inf)
        )
        positions = [
            slot * per_slot + row for slot in sorted(order[:_SLOTS_IN_FULL]) for row in range(per_slot)
        ]
        return BatchScores(
            self._first_sample,
            {position: tuple(self._token_losses[position].tolist()) for position in positions},
            tuple(_mean([losses]) for losses in self._token_losses),
            self._batch_before,
            self._history,
        )

    def _scored(self, first_sample: int) -> list[TokenLosses]:
        """Return the losses (nats) of the tokens of each sequence of a batch under the present weights, masked where there is no
        target. A collective."""
        built, train = self._built, self._built.spec.train
        samples = self._data.train_samples(first_sample, train.batch_size)  # (sequences, seq_len + 1)
        tokens, last = inputs_of(samples), samples[:, -1:]
        tokens = np.concatenate((tokens, np.where(last < 0, 0, last)), axis=1)
        is_target = samples[:, 1:] >= 0
        if train.targets_within_documents:
            is_target &= tokens[:, :-1] != train.end_of_document
        sequences = [
            ScoredSequence(tuple(row), train.seq_len, number, 0) for number, row in enumerate(tokens.tolist())
        ]
        scores = score_sequences(built.model, built.runner, built.spec, sequences)
        return [
            np.ma.array(-np.array(score.log_probabilities), mask=~mask)
            for score, mask in zip(scores, is_target, strict=True)
        ]


def _mean(losses: list[TokenLosses]) -> float:
    """Return the mean over all targets; 0 without any."""
    values = np.concatenate([of_sequence.compressed() for of_sequence in losses])
    return float(values.mean()) if len(values) else 0.0
