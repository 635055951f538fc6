"""Loss spikes, by the run's own numbers.

A spike is a step whose loss or gradient norm is far above that of the previous steps. The rule is a function of the losses and gradient
norms of the last steps. They have the same bits on every rank and every fleet, and are part of checkpoints and snapshots. So all ranks
reach the same decision, also after an interruption. *Usual* is the median of the window. *Deviation* is 1.4826 times the median absolute
deviation, an estimate of the standard deviation (Rousseeuw and Croux, JASA 1993) that spikes do not move. Skipping the samples of a
spike is PaLM's remedy (arXiv 2204.02311, section 5.1) and that of OLMo's skip-step optimizer (arXiv 2501.00656).

Only rises count: early in training the loss falls faster than any noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from phalanx.observe.throughput import usual_deviation
from phalanx.run.spec import TrainSpec

LEAST_LOSS_DEVIATION = 0.005
"""Minimum deviation, as a share of the usual loss, for windows that hardly vary. With 8 deviations a spike is at least 4 % up, less
than any published spike.
"""
_LEAST_NORM_DEVIATION = 0.25
"""Minimum deviation, as a share of the usual gradient norm. Norms have long tails: with 8 deviations a spike is at least three times the
usual norm.
"""

History = Sequence[Sequence[float]]
"""The loss and gradient norm of each of a run's last steps, the oldest first."""


@dataclass(frozen=True)
class Spike:
    """A spike in a step, beside the usual values."""

    figure: str
    """ "loss" or "gradient norm": the one with more deviations."""
    deviations: float
    typical_loss: float
    typical_grad_norm: float


@dataclass(frozen=True)
class SpikeRule:
    """Spikes are more than ``deviations`` above the usual value of the last ``window`` steps, at least half of which must exist."""

    window: int
    deviations: float

    @classmethod
    def of(cls, train: TrainSpec) -> SpikeRule:
        """Return the rule of a run."""
        return cls(train.spike_window, train.spike_deviations)

    def find(self, history: History, loss: float, grad_norm: float) -> Spike | None:
        """Return the spike of a step with this loss and gradient norm after the steps of ``history``: the figure with
        more deviations, if above the limit. ``None`` if it is no spike or less than half a window is known.

        A non-finite step is no spike: ``train.on_nonfinite`` handles it.
        """
        if 2 * len(history) < self.window or not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return None
        losses, norms = zip(*history, strict=True)
        usual_loss, above_loss = deviations_above(losses, loss, LEAST_LOSS_DEVIATION)
        usual_norm, above_norm = deviations_above(norms, grad_norm, _LEAST_NORM_DEVIATION)
        most = max(above_loss, above_norm)
        if not most > self.deviations:
            return None
        figure = "loss" if above_loss >= above_norm else "gradient norm"
        return Spike(figure, most, usual_loss, usual_norm)

    def remember(self, history: History, loss: float, grad_norm: float) -> list[list[float]]:
        """Return the last ``window`` steps of the history with one more; a step that is not finite is not added.
        Spikes are, so a lasting change of level is usual after half a window.
        """
        kept = [list(step) for step in history]
        if math.isfinite(loss) and math.isfinite(grad_norm):
            kept.append([loss, grad_norm])
        return kept[-self.window :]


def deviations_above(values: Sequence[float], value: float, least: float) -> tuple[float, float]:
    """Return the median of ``values``, and the number of deviations by which ``value`` is above it."""
    usual = median(values)
    deviation = max(usual_deviation(values, usual), least * abs(usual))
    return usual, (value - usual) / deviation if deviation else 0.0
