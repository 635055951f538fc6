"""Band of a prediction: quantiles of the measured time over the predicted one.

A band is a list of quantiles rather than one standard deviation, because software is slower than predicted more often and by more
than it is faster. Between the quantiles their logarithm is linear in the normal score (a normal distribution in the logarithm is a
straight line), and beyond the outermost two it goes on as straight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from phalanx.plan.workload.candidates import Floats

LEVELS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
"""Probabilities of a band's quantiles."""
_SCORES = np.array([NormalDist().inv_cdf(level) for level in LEVELS])


@dataclass(frozen=True)
class Band:
    """Quantiles of measured over predicted time."""

    ratios: tuple[float, ...]
    """One for each of ``LEVELS``, ascending."""

    def __post_init__(self) -> None:
        if (
            len(self.ratios) != len(LEVELS)
            or not self.ratios[0] > 0
            or list(self.ratios) != sorted(self.ratios)
        ):
            raise ValueError(f"a band has {len(LEVELS)} positive, ascending quantiles, not {self.ratios}")

    @property
    def p5(self) -> float:
        """The ratio that one run in twenty is below."""
        return self.ratios[0]

    @property
    def p50(self) -> float:
        """The median ratio."""
        return self.ratios[LEVELS.index(0.5)]

    @property
    def p95(self) -> float:
        """The ratio that one run in twenty is above."""
        return self.ratios[-1]

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm of a normal distribution with the same 5 % and 95 % quantiles."""
        return math.log(self.p95 / self.p5) / float(_SCORES[-1] - _SCORES[0])

    def holds(self, ratio: float, level: float) -> bool:
        """True if ``ratio`` is within the central band that leaves ``level`` (one of ``LEVELS``, below a half) on each side."""
        place = LEVELS.index(level)
        return self.ratios[place] <= ratio <= self.ratios[-1 - place]

    def at(self, scores: Floats) -> Floats:
        """Ratios at normal scores (0 is the median, 1.645 is the 95 % quantile), of the same shape."""
        logs = np.log(self.ratios)
        found: Floats = np.interp(scores, _SCORES, logs)
        for end, next_ in ((0, 1), (-1, -2)):
            slope = (logs[end] - logs[next_]) / (_SCORES[end] - _SCORES[next_])
            beyond = scores < _SCORES[0] if end == 0 else scores > _SCORES[-1]
            found = np.where(beyond, logs[end] + slope * (scores - _SCORES[end]), found)
        return np.exp(found)


def normal_band(relative_sd: float) -> Band:
    """The band of a log-normal distribution with median 1 and this standard deviation relative to its mean."""
    sigma = math.sqrt(math.log1p(relative_sd**2))
    return Band(tuple(math.exp(sigma * float(score)) for score in _SCORES))


def band_of_factor(factor: float) -> Band:
    """The log-normal band with median 1 whose P5 and P95 are ``factor`` below and above."""
    step = math.log(factor) / float(_SCORES[-1])
    return Band(tuple(math.exp(step * float(score)) for score in _SCORES))


EXACT = Band((1.0,) * len(LEVELS))
"""The band of a prediction that is taken as right."""
