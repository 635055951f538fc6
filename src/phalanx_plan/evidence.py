"""Evidence of predictions: factors and bands learned from published runs, and the choice among them for a plan.

A band is a list of quantiles of measured over predicted time, rather than one standard deviation: software is more often slower than
predicted than faster, and by more. Between the quantiles their logarithm is linear in the normal score, so that a normal
distribution of the logarithm is a straight line. Beyond the outermost two the line continues.

``python -m validation --learn`` writes the table ``learned.json`` from its runs (see ``validation.bands``).
``evidence_for`` looks up the evidence of a software on an accelerator. There are three kinds of evidence, from the best to none:

* ``here``: published runs of this software on this accelerator. Their factor is applied. The band is the error that remained when each
  of their models was predicted from the others.
* ``elsewhere``: published runs of this software on other accelerators of the same maker. Their factor is applied. The band is the
  error that remained when any software was predicted from its runs on other accelerators, and this one from its other models.
* ``never``: no published run on this maker's accelerators; runs for another maker's count as other software. The factor is the
  planner's bias on software of which it knew only the kind, and the band the remaining error. The factor is one or more, since
  software that never ran gets no credit for being faster than predicted. On CPUs nobody published a run: the band is assumed, and wide.

A fourth kind, ``calibrated``, is for this project's own stack on a machine whose constants were fitted on steps that ran there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Literal

import msgspec
import numpy as np

from phalanx_plan.workload.candidates import Floats

# Bands.


LEVELS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
"""Probabilities of a band's quantiles."""
_SCORES = np.array([NormalDist().inv_cdf(level) for level in LEVELS])


@dataclass(frozen=True)
class Band:
    """Quantiles of measured over predicted time."""

    ratios: tuple[float, ...]
    """One ratio for each of ``LEVELS``, ascending."""

    def __post_init__(self) -> None:
        """Raise ValueError unless there is one positive ratio for each level, in ascending order."""
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
        index = LEVELS.index(level)
        return self.ratios[index] <= ratio <= self.ratios[-1 - index]

    def at(self, scores: Floats) -> Floats:
        """Return the ratios at normal scores (0 is the median, 1.645 is the 95 % quantile), of the same shape.

        Interpolated in the logarithm, and extrapolated by the last slopes.
        """
        logs = np.log(self.ratios)
        log_ratios: Floats = np.interp(scores, _SCORES, logs)
        for end, next_ in ((0, 1), (-1, -2)):
            slope = (logs[end] - logs[next_]) / (_SCORES[end] - _SCORES[next_])
            beyond = scores < _SCORES[0] if end == 0 else scores > _SCORES[-1]
            log_ratios = np.where(beyond, logs[end] + slope * (scores - _SCORES[end]), log_ratios)
        return np.exp(log_ratios)


def normal_band(relative_sd: float) -> Band:
    """The band of a log-normal distribution with median 1 and this standard deviation relative to its mean."""
    sigma = math.sqrt(math.log1p(relative_sd**2))
    return Band(tuple(math.exp(sigma * float(score)) for score in _SCORES))


def band_of_factor(factor: float) -> Band:
    """The log-normal band with median 1 whose P5 and P95 are ``factor`` below and above."""
    step = math.log(factor) / float(_SCORES[-1])
    return Band(tuple(math.exp(step * float(score)) for score in _SCORES))


EXACT = Band((1.0,) * len(LEVELS))
"""The band of a prediction that is assumed to be exact."""


# The learned table.


Kind = Literal["here", "elsewhere", "never", "calibrated"]

_GENERATIONS = {
    "v100": "volta",
    "a100": "ampere",
    "a800": "ampere",
    "h100": "hopper",
    "h200": "hopper",
    "h800": "hopper",
    "h20": "hopper",
    "b200": "blackwell",
    "b300": "blackwell",
    "gb200": "blackwell",
    "gb300": "blackwell",
    "vr200": "rubin",
    "mi300x": "cdna3",
    "mi325x": "cdna3",
    "mi355x": "cdna4",
    "tpu7x": "tpu",
}


@lru_cache(maxsize=256)
def generation_of(accelerator: str) -> str:
    """Return an accelerator's generation by the first part of its key; an unknown key is its own generation."""
    first = accelerator.split("-")[0]
    return _GENERATIONS.get(first, first)


_MAKERS = {"cdna3": "AMD", "cdna4": "AMD", "tpu": "Google", "cpu": "any"}
"""Makers of the generations that are not NVIDIA's, as the catalog names them."""


def maker_of(accelerator: str) -> str:
    """Return the maker of an accelerator by its key; NVIDIA for an unknown one.

    Kernels and collectives are written for a maker's accelerators.
    """
    return _MAKERS.get(generation_of(accelerator), "NVIDIA")


UNKNOWN_MACHINE = 4.0
"""Assumed ratio of P95 to the median on a CPU whose constants were not fitted. The catalog's core stands for any: cores do a third of its
fp32 products a second (AVX2, one unit, 2 GHz) to three times as many (AVX-512, two units, 3.5 GHz), and caches differ too.
"""


@dataclass(frozen=True)
class RunCounts:
    """Counts of published runs and of their models."""

    runs: int
    models: int


@dataclass(frozen=True)
class SoftwareRecord:
    """Factors and quantiles learned from the published runs of one software, for dense models or for mixtures."""

    software: str
    mixture: bool
    accelerators: Mapping[str, RunCounts]
    """Runs by the accelerator's key."""
    factors: Mapping[str, float]
    """Measured over predicted time, by generation of accelerators."""
    factor: float
    """Measured over predicted time over all generations, for those without runs."""
    left_out_error: float
    """Median of the absolute error if a model is predicted with a factor from the others; of all software if no model can be."""
    ratios: tuple[float, ...]
    """Quantiles of a ``Band`` for accelerators with runs: measured time over predicted time with the factor."""
    elsewhere_ratios: tuple[float, ...]
    """Quantiles of a ``Band`` for accelerators without runs."""


@dataclass(frozen=True)
class KindRecord:
    """Factor and left-out errors of one kind of evidence, over all software."""

    kind: Kind
    mixture: bool
    factor: float
    """Measured over predicted time that is applied; 1 where the software's own factor is."""
    runs: int
    models: int
    software: int
    """Number of programs."""
    left_out_error: float
    """Median of the absolute error with all that was learned from the software left out."""
    bias: float
    """Median with its sign of the predictions without any factor: below zero they are too optimistic."""
    covered_80: float
    """Share of left-out runs within the 80 % band that was learned from other software."""
    covered_90: float
    """Share of left-out runs within the 90 % band."""
    ratios: tuple[float, ...]


@dataclass(frozen=True)
class BestRun:
    """The highest utilization that a published run reached on an accelerator in one format."""

    accelerator: str
    precision: str
    mfu: float
    """Model FLOP, attention causal, over the format's dense peak."""
    run: str
    """Name of the row in the table of published runs."""


@dataclass(frozen=True)
class Learned:
    """Table of all that was learned from published runs."""

    made_from: Mapping[str, str]
    """File of published runs with its SHA-256, and the command."""
    software: tuple[SoftwareRecord, ...]
    kinds: tuple[KindRecord, ...]
    best: tuple[BestRun, ...] = ()

    def record(self, software: str, *, mixture: bool) -> SoftwareRecord | None:
        """Return the record of a software; ``None`` if it has no published run."""
        return next(
            (record for record in self.software if (record.software, record.mixture) == (software, mixture)),
            None,
        )

    def kind(self, kind: Kind, *, mixture: bool) -> KindRecord:
        """Return the record of a kind of evidence."""
        return next(record for record in self.kinds if (record.kind, record.mixture) == (kind, mixture))

    def best_on(self, accelerator: str, precision: str) -> BestRun | None:
        """Return the best published utilization of an accelerator in one format; ``None`` without runs."""
        runs = (run for run in self.best if (run.accelerator, run.precision) == (accelerator, precision))
        return next(runs, None)


@dataclass(frozen=True)
class Evidence:
    """Evidence for a prediction: the applied factor, the band around it, and the runs that both are from."""

    kind: Kind
    subject: str
    """Software and accelerator, in words."""
    factor: float
    band: Band = field(compare=False)
    runs: int
    models: int
    left_out_error: float
    software: int = 1
    """Number of programs whose runs the band is from."""

    def __str__(self) -> str:
        """Describe in a sentence which published runs the band and bias come from, by the kind of evidence; without
        any, they are assumed.
        """
        if not self.runs:
            return (
                f"{self.subject} was never measured, and no published run is like it: P5-P95 is assumed, a factor of "
                f"{self.band.p95:.2g} either way; no bias is applied"
            )
        error = f"median left-out error {self.left_out_error:.0%}"
        runs = f"{self.runs:,} run{'s' * (self.runs != 1)} of {self.models} model{'s' * (self.models != 1)}"
        if self.kind == "here":
            return f"{runs} by {self.subject} are published; P5-P95 is from this software's runs on all of its accelerators, {error}"
        if self.kind == "elsewhere":
            return f"no published run of {self.subject}, but {runs} elsewhere: P5-P95 is from these and from software on accelerators new to it, {error}"
        if self.kind == "calibrated":
            return f"constants fitted on steps of {self.subject}; P5-P95 is that of software with published runs, {error}"
        bias = (
            f"its bias of {1 / self.factor - 1:+.0%} is applied" if self.factor > 1 else "no bias is applied"
        )
        return (
            f"{self.subject} was never measured: P5-P95 is that of software the planner had not seen "
            f"({runs} by {self.software} programs), {error}; {bias}"
        )


def evidence_for(
    table: Learned, software: str, accelerator: str, *, mixture: bool, calibrated: bool = False
) -> Evidence:
    """Look up the evidence for ``software`` on ``accelerator``: bias factor, error band and number of published runs.

    Runs count only if they are on accelerators of the same maker. Without any, the band is that of software the
    planner had not seen. A CPU, whose maker is "any", has the assumed band of ``UNKNOWN_MACHINE``, unless it is
    calibrated.

    Args:
        table: Table made from published runs.
        software: A name of ``phalanx_plan.workload.software.SOFTWARE``; any other has no evidence.
        accelerator: The accelerator's key.
        mixture: True for mixtures of experts, which exercise other code than dense models.
        calibrated: True if the constants were fitted on steps of this software on this machine; then no bias is
            applied.
    """
    if maker_of(accelerator) == "any" and not calibrated:
        assumed = band_of_factor(UNKNOWN_MACHINE)
        return Evidence("never", f"{software} on {accelerator}", 1.0, assumed, 0, 0, math.nan, 0)
    record = table.record(software, mixture=mixture)
    if record is not None and maker_of(accelerator) not in map(maker_of, record.accelerators):
        record = None
    kind: Kind = "never"
    if record is not None:
        kind = "here" if accelerator in record.accelerators else "elsewhere"
    subject = f"{software} on {accelerator}"
    every = table.kind("here" if calibrated else kind, mixture=mixture)
    shared = Evidence(
        "calibrated" if calibrated else kind,
        subject,
        1.0 if calibrated else every.factor,
        Band(every.ratios),
        every.runs,
        every.models,
        every.left_out_error,
        every.software,
    )
    if record is None or calibrated:
        return shared
    factor = record.factors.get(generation_of(accelerator), record.factor)
    runs = record.accelerators.get(accelerator) or _total(record.accelerators.values())
    if kind == "elsewhere":
        return Evidence(
            kind, subject, factor, Band(record.elsewhere_ratios), runs.runs, runs.models, every.left_out_error
        )
    return Evidence(kind, subject, factor, Band(record.ratios), runs.runs, runs.models, record.left_out_error)


def makers_with_runs(table: Learned, software: str) -> frozenset[str]:
    """Return the makers on whose accelerators runs of a software are published, of dense models or mixtures."""
    records = (record for record in table.software if record.software == software)
    return frozenset(maker_of(accelerator) for record in records for accelerator in record.accelerators)


def _total(counts: Iterable[RunCounts]) -> RunCounts:
    """Add up numbers of runs and of models."""
    all_counts = list(counts)
    return RunCounts(sum(count.runs for count in all_counts), sum(count.models for count in all_counts))


TABLE = Path(__file__).with_name("learned.json")


@lru_cache(maxsize=1)
def learned() -> Learned:
    """Read the table that comes with the package."""
    return msgspec.json.decode(TABLE.read_bytes(), type=Learned)
