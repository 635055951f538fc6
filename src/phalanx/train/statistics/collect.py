"""Measure a run's layers every ``statistics.every_steps`` steps, and in steps that are not finite.

A measured step, in order:

1. Before the step: a forward pass of the first slot's first micro-batch, for the statistics of activations (``forward``).
2. Before the update: norms of gradients and weights. After it: norms of the change, which the optimizer leaves in the gradients' memory.
   They are exact sums of squares over the shards of all ranks.
3. After the step: loads of routers, by the tokens that the step counted anyway; the event.

If a step is not finite, steps 2 and 3 are done for it, and a forward pass of a slot that was not finite. Other steps do nothing here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.observe.events import LayerStatistics
from phalanx.observe.ledger import Bucket
from phalanx.parallel.reduction.data_parallel import gradients, local, named_parameters
from phalanx.parallel.reduction.exact_sum import norms
from phalanx.train.lifecycle.progress import is_due
from phalanx.train.statistics.forward import forward_figures
from phalanx.train.statistics.groups import (
    ENTROPY,
    IDLE_EXPERTS,
    LARGEST_SHARE,
    RMS,
    layer_of,
    layers_of,
    parameter_groups,
)
from phalanx.train.step.step import Stepper, StepReport, StepStatistics

Samples = Callable[[int, int], NDArray[np.int64]]
"""Function that returns the samples ``(sequences, seq_len + 1)`` of a step's slot."""


class LayerMeter(StepStatistics):
    """Statistics of the layers of one run, on every rank."""

    def __init__(self, stepper: Stepper, samples: Samples, emit: Callable[[LayerStatistics], None]) -> None:
        self._stepper, self._samples, self._emit = stepper, samples, emit
        placement = stepper.built.placement
        self._every = stepper.built.spec.statistics.every_steps
        self._groups = parameter_groups(placement.kinds)
        self._layers = layers_of(placement.kinds)
        self._figures: dict[str, list[float | None]] = {}
        self._step, self._slot = 0, 0
        self._is_due = False
        self._spent_ns = 0

    def begin(self, step: int) -> None:
        """Prepare ``step``, from 1, before it is computed. A collective if it is measured."""
        self._step, self._slot, self._figures, self._spent_ns = step, 0, {}, 0
        self._is_due = is_due(step, self._every)
        if self._is_due:
            self._measure_forward(0)

    def before_update(self, gradient_scale: float, *, finite: bool) -> bool:
        """Add the norms of gradients and weights if the step is measured or not finite. Return True if it wants the update's
        change. A collective then."""
        if not self._every or not (self._is_due or not finite):
            return False
        began_ns = time.perf_counter_ns()
        parts = self._stepper.built.model.parts
        weights = {name: local(parameter.detach()) for name, parameter in named_parameters(parts).items()}
        self._add_norms({"gradient_norm": gradients(parts), "weight_norm": weights}, gradient_scale)
        self._spent_ns += time.perf_counter_ns() - began_ns
        return True

    def after_update(self) -> None:
        """Add the norms of the updates, left in the gradients, and their ratio to the weights' norms. A collective."""
        began_ns = time.perf_counter_ns()
        self._add_norms({"update_norm": gradients(self._stepper.built.model.parts)}, 1.0)
        for figure in [name for name in self._figures if name.endswith(".update_norm")]:
            group = figure.removesuffix(".update_norm")
            pairs = zip(self._figures[figure], self._figures[f"{group}.weight_norm"], strict=True)
            self._figures[f"{group}.update_ratio"] = [
                None
                if update is None or not weight
                else update / weight
                if math.isfinite(weight)
                else math.inf
                for update, weight in pairs
            ]
        self._spent_ns += time.perf_counter_ns() - began_ns

    def end(self, report: StepReport) -> None:
        """Emit the statistics of the step, if it was measured. A collective then. In a step that was not due, activations are
        searched for the first non-finite."""
        if not self._figures:
            return
        if report.nonfinite_slots or not self._is_due:
            self._measure_forward(report.nonfinite_slots[0] if report.nonfinite_slots else 0, search=True)
        self._add_routers()
        self._emit(
            LayerStatistics(
                step=self._step,
                layers=self._layers,
                figures={
                    name: [_rounded(value) for value in values] for name, values in self._figures.items()
                },
                slot=self._slot,
                applied=report.applied,
                seconds=self._spent_ns / 1e9,
            )
        )

    def _measure_forward(self, slot: int, *, search: bool = False) -> None:
        """Measure activations in the first micro-batch of ``slot``; with ``search``, in the first that is not finite, or the last."""
        began_ns = time.perf_counter_ns()
        self._slot = slot
        with self._stepper.ledger.bucket(Bucket.EVAL):
            batches = self._stepper.micro_batches(torch.from_numpy(self._samples(self._step, slot)))
            for batch in batches if search else batches[:1]:
                figures = forward_figures(self._stepper.built, batch, self._layers)
                self._figures |= figures
                if not all(value is None or math.isfinite(value) for value in figures[RMS]):
                    break
            # Gathering weights and waiting for stages here was no part of the step.
            for clock in self._stepper.built.waits.values():
                clock.forget()
        self._spent_ns += time.perf_counter_ns() - began_ns

    def _add_norms(self, tensors: Mapping[str, Mapping[str, Tensor]], gradient_scale: float) -> None:
        """Add the norm of each group of parameters, for each figure of ``tensors``, which map names to this rank's parts. A collective."""
        placement = self._stepper.built.placement
        pairs = [(figure, by_name, group) for figure, by_name in tensors.items() for group in self._groups]
        own = [
            [by_name[name] for name in group.names if name in by_name and placement.owns(name)]
            for _, by_name, group in pairs
        ]
        elements = [group.elements for _, _, group in pairs]
        results = norms(own, elements, self._stepper.built.model.mesh.device)
        for (figure, _, group), result in zip(pairs, results, strict=True):
            value = result * gradient_scale if figure == "gradient_norm" else result
            self._set(f"{group.group}.{figure}", group.layer, value)

    def _add_routers(self) -> None:
        """Add each router's figures by the tokens of its experts in this step, if there are experts."""
        counts = self._stepper.expert_tokens
        if counts is None:
            return
        for name, tokens in zip(self._stepper.built.placement.routers, counts.tolist(), strict=True):
            for figure, value in router_figures(tokens).items():
                self._set(figure, layer_of(name), value)

    def _set(self, figure: str, layer: str, value: float) -> None:
        values = self._figures.setdefault(figure, [None] * len(self._layers))
        values[self._layers.index(layer)] = value


def _rounded(value: float | None) -> float | None:
    """Round to seven significant digits, so that an event is half as long."""
    return value if value is None else float(f"{value:.7g}")


def router_figures(tokens: Sequence[int]) -> dict[str, float]:
    """Return the figures of a router by the tokens of each expert: largest share, entropy (1 if all have equally many), share of
    idle experts.

    The entropy is that of the experts' shares over its maximum, ``log(experts)``. Empty without tokens, or with one expert.
    """
    total, experts = sum(tokens), len(tokens)
    if not total or experts == 1:
        return {}
    shares = [count / total for count in tokens]
    entropy = -math.fsum(share * math.log(share) for share in shares if share) / math.log(experts)
    return {
        LARGEST_SHARE: max(shares),
        ENTROPY: max(0.0, entropy),
        IDLE_EXPERTS: sum(not count for count in tokens) / experts,
    }
