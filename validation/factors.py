"""Calibration factors: measured over predicted time, one for each software on each generation of accelerators.

Formulas model the machine; they do not model that a library waits for the host, fuses less than it could, or hides more than
is usual. One factor holds the common part of all runs of a stack: the median of measured over predicted time, of dense models
and of mixtures of experts apart, which exercise other code. A factor is no evidence if it was fitted on the runs that it is then
tried on, so ``scalar_for`` leaves out every run of the same model on the same accelerator: the other runs were known
before that model was trained there. (The exception is a stack with one model only: then its other
configurations count, and ``Scalar.scope`` states it.) A factor from few models is drawn towards one, as if ``PRIOR`` more
models had been predicted rightly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from phalanx_plan.evidence import generation_of

Scope = Literal["stack and generation", "stack", "other configurations of the model", "none"]
PRIOR = 2
"""Models that count as predicted rightly when a factor is fitted."""


@dataclass(frozen=True)
class CalibrationPoint:
    """One run that was measured and predicted."""

    software: str
    accelerator: str
    model: str
    """Runs of one model on one accelerator do not calibrate each other while there are others."""
    configuration: str
    """Machines, work and layout: runs that share it are the same run."""
    ratio: float
    """Measured over predicted time."""
    mixture: bool = False
    """True if the model is a mixture of experts."""

    @property
    def generation(self) -> str:
        """Generation of the accelerator; one that is not in the table is a generation of its own."""
        return generation_of(self.accelerator)


@dataclass(frozen=True)
class Scalar:
    """A fitted factor."""

    value: float
    runs: int
    """Number of runs that it was fitted on."""
    models: int
    scope: Scope
    """The property that the fitted runs share with the run that the factor is for."""


NO_SCALAR = Scalar(1.0, 0, 0, "none")


def scalar_for(run: CalibrationPoint, points: Iterable[CalibrationPoint]) -> Scalar:
    """Return the factor for ``run``, from those of ``points`` that are independent of it.

    From runs of the same software on the same generation of accelerators; if there are none, from the same software elsewhere;
    if there are none either, from the same model in other configurations; else there is no factor. Dense models and mixtures
    have factors of their own.
    """
    software = [p for p in points if (p.software, p.mixture) == (run.software, run.mixture)]
    others = [p for p in software if (p.model, p.accelerator) != (run.model, run.accelerator)]
    here = [p for p in others if p.generation == run.generation]
    if here:
        return fitted(here, "stack and generation")
    if others:
        return fitted(others, "stack")
    own = [p for p in software if p.configuration != run.configuration]
    return fitted(own, "other configurations of the model", prior=0) if own else NO_SCALAR


def scalars(points: Sequence[CalibrationPoint]) -> dict[str, Scalar]:
    """Return the factor of every stack on every generation, from all its runs, by "software on generation, dense"."""
    groups: dict[str, list[CalibrationPoint]] = {}
    for point in points:
        kind = "mixtures" if point.mixture else "dense"
        groups.setdefault(f"{point.software} on {point.generation}, {kind}", []).append(point)
    return {name: fitted(groups[name], "stack and generation") for name in sorted(groups)}


def fitted(points: Sequence[CalibrationPoint], scope: Scope, prior: int = PRIOR) -> Scalar:
    """Return the factor of ``points``. Each model has one vote, so that the one with most runs does not decide."""
    models: dict[tuple[str, str], list[float]] = {}
    for point in points:
        models.setdefault((point.model, point.accelerator), []).append(math.log(point.ratio))
    log_ratio = median(median(ratios) for ratios in models.values())
    share = len(models) / (len(models) + prior)
    return Scalar(math.exp(share * log_ratio), len(points), len(models), scope)
