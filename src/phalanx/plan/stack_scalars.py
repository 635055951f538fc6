"""One factor for each software stack on each accelerator: what its runs take over what the planner says.

Formulas know the machine; they do not know that a library waits for the host, fuses less than it could, or hides more than
is usual. One factor takes up what is common to all runs of a stack: the median of measured over predicted time. A factor says
nothing if it was fitted on the runs that it is then tried on, so ``scalar_for`` leaves out every run of the same model on the
same accelerator: what remains is what one would have known before that model was trained. (A stack of which only one model is
known is the exception: there its other configurations have to do, and ``Scalar.scope`` says so.) Factors by release, and apart for
dense models and mixtures of experts, were tried and predict no better.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

Scope = Literal["stack and accelerator", "stack", "other configurations of the model", "none"]


@dataclass(frozen=True)
class Point:
    """One run that was measured and predicted."""

    software: str
    accelerator: str
    model: str
    """Runs of one model on one accelerator do not calibrate each other while there are others."""
    configuration: str
    """Machines, work and layout: runs that share it are the same run."""
    ratio: float
    """Measured over predicted time."""


@dataclass(frozen=True)
class Scalar:
    """A fitted factor."""

    value: float
    runs: int
    """How many it was fitted on."""
    models: int
    scope: Scope
    """What the runs have in common with the one it is for: as much as could be had."""


NO_SCALAR = Scalar(1.0, 0, 0, "none")


def scalar_for(run: Point, points: Iterable[Point]) -> Scalar:
    """The factor for ``run``, from those of ``points`` that are independent of it.

    From runs of the same software on the same accelerator; if there are none, from the same software elsewhere; if there are
    none either, from the same model in other configurations; else there is no factor.
    """
    software = [point for point in points if point.software == run.software]
    same = [point for point in software if (point.model, point.accelerator) != (run.model, run.accelerator)]
    here = [point for point in same if point.accelerator == run.accelerator]
    if here:
        return _fitted(here, "stack and accelerator")
    if same:
        return _fitted(same, "stack")
    own = [point for point in software if point.configuration != run.configuration]
    return _fitted(own, "other configurations of the model") if own else NO_SCALAR


def scalars(points: Sequence[Point]) -> dict[str, Scalar]:
    """The factor of every stack on every accelerator, from all its runs, by "software on accelerator"."""
    keys = sorted({(point.software, point.accelerator) for point in points})
    return {
        f"{software} on {accelerator}": _fitted(
            [point for point in points if (point.software, point.accelerator) == (software, accelerator)],
            "stack and accelerator",
        )
        for software, accelerator in keys
    }


def _fitted(points: Sequence[Point], scope: Scope) -> Scalar:
    """Each model has one vote, so that the one with most runs does not decide."""
    models: dict[tuple[str, str], list[float]] = {}
    for point in points:
        models.setdefault((point.model, point.accelerator), []).append(point.ratio)
    return Scalar(median(median(ratios) for ratios in models.values()), len(points), len(models), scope)
