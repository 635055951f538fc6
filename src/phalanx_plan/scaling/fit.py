"""Fit of a scaling law to small runs, and its prediction of a larger run with a band.

Hoffmann et al.'s third approach (arXiv:2203.15556, section 3.3): the constants of L(N, D) = floor + a / N^alpha + b / D^beta that
minimize the Huber loss (delta 0.001) between the logarithms of predicted and measured loss, the best of a grid of starts. Damped
Gauss-Newton steps with Huber's weights minimize all starts at once. They minimize the sum of the losses, not their mean,
whose small scale stopped the original fit too early (arXiv:2404.10102).

The band is a bootstrap. The fit's own residuals, widened by the number of constants, are resampled and added to the fitted losses. Each
such set of losses is fitted again and predicts the larger run. The band covers the uncertainty of the constants. It does not cover
another form of the law at larger sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx_plan.scaling.laws import PowerLaw

_Floats = NDArray[np.float64]

HUBER_DELTA = 1e-3
CONSTANTS = 5
LEAST_RUNS = 7
"""Two more than the number of constants, so that the fit can be judged."""
_LEAST_VALUES = 3
"""Least number of different sizes, and of different numbers of tokens: two terms each have a height and a slope, above one floor."""
_ROUNDS = 150
_SAMPLES = 200
_LOW, _HIGH = 0.02, 1.5
"""Bounds of exponents; published ones are 0.1 to 0.4."""


class FitError(ValueError):
    """Runs that no law can be fitted to."""


@dataclass(frozen=True)
class SmallRun:
    """A finished run as a point of the law."""

    name: str
    parameters: float
    """Active parameters, embedding included."""
    tokens: float
    loss: float
    """Held-out, nats a token."""


@dataclass(frozen=True)
class FittedLaw:
    """A law fitted to runs, with the laws of resampled residuals."""

    law: PowerLaw
    runs: tuple[SmallRun, ...]
    samples: tuple[PowerLaw, ...]
    residuals: tuple[float, ...]
    """Logarithms of measured over fitted loss, run by run."""

    @property
    def typical_error(self) -> float:
        """Root mean square of the residuals, widened by the number of constants."""
        freedom = len(self.runs) - CONSTANTS
        return math.sqrt(sum(residual**2 for residual in self.residuals) / freedom)

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the predicted loss."""
        return self.law.loss(parameters, tokens)

    def band(self, parameters: float, tokens: float) -> tuple[float, float]:
        """Return P5 and P95 of the loss of one more run: predictions of the resampled laws, each times a random
        residual.

        The residuals are widened for the fitted constants; the random seed is fixed.
        """
        random = np.random.default_rng(1)
        predicted = np.array([law.loss(parameters, tokens) for law in self.samples])
        widening = math.sqrt(len(self.runs) / (len(self.runs) - CONSTANTS))
        noise = np.exp(random.choice(np.array(self.residuals) * widening, len(predicted)))
        low, high = np.quantile(predicted * noise, (0.05, 0.95))
        return float(low), float(high)

    def constants_band(self, name: str) -> tuple[float, float]:
        """Return P5 and P95 of one of the law's constants."""
        low, high = np.quantile([getattr(law, name) for law in self.samples], (0.05, 0.95))
        return float(low), float(high)

    def beyond(self, parameters: float, tokens: float) -> float:
        """Return 6ND over that of the largest fitted run."""
        return parameters * tokens / max(run.parameters * run.tokens for run in self.runs)


def fit(runs: Sequence[SmallRun], samples: int = _SAMPLES, seed: int = 0) -> FittedLaw:
    """Fit the law to the runs from many starts, deterministically; ``samples`` refits to resampled residuals are its
    uncertainty.

    Raises ``FitError`` for too few runs, sizes or numbers of tokens.
    """
    _refuse_too_few(runs)
    sizes, tokens = (np.log([getattr(run, name) for run in runs]) for name in ("parameters", "tokens"))
    losses = np.log([run.loss for run in runs])
    # Centered on the middle run, the constants hardly depend on each other.
    middle = float(sizes.mean()), float(tokens.mean())
    at = np.stack((sizes - middle[0], tokens - middle[1]))  # (2, n)
    fitted, value = _minimize(_starts(losses), at, losses[None, :])
    best = fitted[int(value.argmin())]
    residuals = losses - _log_loss(best[None, :], at)[0]
    random = np.random.default_rng(seed)
    widening = math.sqrt(len(runs) / (len(runs) - CONSTANTS))
    noise = random.choice(residuals * widening, (samples, len(runs)))  # (samples, n)
    refitted, _ = _minimize(np.repeat(best[None, :], samples, axis=0), at, losses - residuals + noise)
    return FittedLaw(
        law=_law(best, middle),
        runs=tuple(runs),
        samples=tuple(_law(theta, middle) for theta in refitted),
        residuals=tuple(residuals.tolist()),
    )


def _refuse_too_few(runs: Sequence[SmallRun]) -> None:
    """Raise ``FitError`` for too few runs, sizes or numbers of tokens, and for values that are not positive."""
    if len(runs) < LEAST_RUNS:
        raise FitError(
            f"{len(runs)} runs: the law has {CONSTANTS} constants; fit at least {LEAST_RUNS} finished runs, of at least "
            f"{_LEAST_VALUES} sizes and {_LEAST_VALUES} numbers of tokens"
        )
    for run in runs:
        if not all(math.isfinite(value) and value > 0 for value in (run.parameters, run.tokens, run.loss)):
            raise FitError(f"{run.name}: parameters, tokens and loss must be positive and finite: {run}")
    for name in ("parameters", "tokens"):
        different = {getattr(run, name) for run in runs}
        if len(different) < _LEAST_VALUES:
            raise FitError(
                f"the runs have {len(different)} different numbers of {name}: the law's term of {name} needs at least "
                f"{_LEAST_VALUES}, over as wide a range as you can afford"
            )


def _starts(losses: _Floats) -> _Floats:
    """Return starts (S, 5): logarithms of both terms in the middle and of the floor, and the exponents."""
    typical = float(np.median(losses))
    grid = [
        (typical + math.log(size), alpha, typical + math.log(data), beta, typical + math.log(floor))
        for size in (0.05, 0.3)
        for data in (0.05, 0.3)
        for floor in (0.2, 0.7)
        for alpha in (0.1, 0.3, 0.6)
        for beta in (0.1, 0.3, 0.6)
    ]
    return np.array(grid)


def _terms(theta: _Floats, at: _Floats) -> _Floats:
    """Return the logarithms (3, S, n) of the three terms of each of S laws at n runs."""
    size = theta[:, 0:1] - theta[:, 1:2] * at[0]
    data = theta[:, 2:3] - theta[:, 3:4] * at[1]
    return np.stack((size, data, np.broadcast_to(theta[:, 4:5], size.shape)))


def _log_loss(theta: _Floats, at: _Floats) -> _Floats:
    """Return the log losses (S, n) of S laws at n runs."""
    return np.asarray(np.logaddexp.reduce(_terms(theta, at), axis=0))


def _huber(residuals: _Floats) -> _Floats:
    """Return the sums (S,) of Huber losses in units of delta squared, so that they are of the order of one."""
    scaled = np.abs(residuals) / HUBER_DELTA
    return np.asarray(np.where(scaled <= 1, scaled**2 / 2, scaled - 0.5).sum(axis=1))


def _minimize(theta: _Floats, at: _Floats, losses: _Floats) -> tuple[_Floats, _Floats]:
    """Return the laws (S, 5) near ``theta`` that fit log ``losses`` (S or 1, n) best, and their Huber losses (S,).

    Levenberg-Marquardt with reweighting for the Huber loss, for all S at once; ``at`` (2, n) are centered log sizes
    and log tokens.
    """
    damping = np.full(len(theta), 1e-2)
    residuals = losses - _log_loss(theta, at)
    value = _huber(residuals)
    for _ in range(_ROUNDS):
        terms = _terms(theta, at)  # (3, S, n)
        shares = np.exp(terms - np.logaddexp.reduce(terms, axis=0))  # (3, S, n)
        slopes = np.stack(
            (shares[0], -shares[0] * at[0], shares[1], -shares[1] * at[1], shares[2]), axis=-1
        )  # (S, n, 5)
        weights = 1 / np.maximum(1.0, np.abs(residuals) / HUBER_DELTA)
        normal = np.einsum("sni,sn,snj->sij", slopes, weights, slopes)  # (S, 5, 5)
        pull = np.einsum("sni,sn->si", slopes, weights * residuals)  # (S, 5)
        scale = np.einsum("sii->si", normal) + 1e-12
        damped = normal + np.einsum("s,si,ij->sij", damping, scale, np.eye(CONSTANTS))
        step = np.clip(np.linalg.solve(damped, pull[..., None])[..., 0], -1.0, 1.0)
        moved = theta + step
        moved[:, [1, 3]] = np.clip(moved[:, [1, 3]], _LOW, _HIGH)
        moved[:, [0, 2, 4]] = np.clip(moved[:, [0, 2, 4]], -12.0, 6.0)
        moved_residuals = losses - _log_loss(moved, at)
        better = _huber(moved_residuals) < value
        theta = np.where(better[:, None], moved, theta)
        residuals = np.where(better[:, None], moved_residuals, residuals)
        value = _huber(residuals)
        damping = np.clip(np.where(better, damping / 3, damping * 4), 1e-12, 1e12)
        if (damping >= 1e12).all():
            break
    return theta, value


def _law(theta: _Floats, middle: tuple[float, float]) -> PowerLaw:
    """Return the power law of fitted parameters, which are logarithms relative to the center ``middle``."""
    size, alpha, data, beta, floor = theta.tolist()
    return PowerLaw(
        floor=math.exp(floor),
        a=math.exp(size + alpha * middle[0]),
        alpha=alpha,
        b=math.exp(data + beta * middle[1]),
        beta=beta,
    )
