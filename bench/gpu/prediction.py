"""Predicted time of the steps that ``make gpu`` measures, by class of kernel, and its comparison with the report. Functions on values alone.

The work of each step was counted on the null GPU, which computes nothing, and is in ``prediction.json`` (``python -m null_gpu.roofline
freeze``). The time is a roofline (Williams et al., 2009, doi 10.1145/1498765.1498785), one operation after another: products and attention at a
rate of FLOP/s, all other operations at a rate of bytes/s. Collectives are not predicted. The GPU is idle only if the host takes longer.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.gpu.report import Comparison, PartResult

FILE = Path(__file__).with_name("prediction.json")
PRODUCTS = "matrix product"
ATTENTION = "attention"
"""Classes of ``trace.CLASSES`` whose time follows from their FLOP."""


@dataclass(frozen=True)
class Rates:
    """Assumed rates of one accelerator; nothing here was measured by this project."""

    product_flops: float
    attention_flops: float
    """FlashAttention 2, forward and backward together."""
    bytes_per_s: float
    peak_flops: float
    """Dense bf16 FLOP/s of the data sheet, to which MFU refers."""


RATES = {
    "H100": Rates(6.5e14, 3.5e14, 2.8e12, 9.89e14),
    "H200": Rates(6.5e14, 3.5e14, 4.0e12, 9.89e14),
    "B200": Rates(1.5e15, 3.5e14, 6.4e12, 2.25e15),
}
"""Two thirds of the peak for products, five sixths of the memory's bandwidth, frozen before anything was measured."""


@dataclass
class Work:
    """A step's work on one rank."""

    launches: float = 0.0
    host_s: float = 0.0
    """Processor time of the host, on the machine that counted."""
    product_flops: float = 0.0
    attention_flops: float = 0.0
    bytes_by_class: dict[str, float] = field(default_factory=dict)
    """Bytes of all other operations, by the class of their kernels."""

    @property
    def other_bytes(self) -> float:
        """Bytes of all operations but products and attention."""
        return sum(self.bytes_by_class.values())

    def seconds_by_class(self, rates: Rates) -> dict[str, float]:
        """Time on the device by class of kernel."""
        return {
            PRODUCTS: self.product_flops / rates.product_flops,
            ATTENTION: self.attention_flops / rates.attention_flops,
        } | {name: size / rates.bytes_per_s for name, size in self.bytes_by_class.items()}

    def seconds(self, rates: Rates) -> float:
        """Time on the device, without waits for the host."""
        return sum(self.seconds_by_class(rates).values())


@dataclass(frozen=True)
class CountedRun:
    """The frozen work of one of the runs that ``make gpu`` measures."""

    preset: str
    ranks: int
    settings: dict[str, object]
    """Slots, sequences and vocabulary of the run, and whether it is compiled."""
    ours: Work
    bare: Work


@functools.cache
def counted_runs() -> dict[tuple[str, int], CountedRun]:
    """Return the frozen runs by preset and number of ranks."""
    runs = [
        CountedRun(**{**run, "ours": Work(**run["ours"]), "bare": Work(**run["bare"])})
        for run in json.loads(FILE.read_text())
    ]
    return {(run.preset, run.ranks): run for run in runs}


def comparisons(gpus: str, parts: Mapping[str, PartResult]) -> list[Comparison]:
    """Compare the findings of the parts "speed" and "trace" with the prediction for the accelerator.

    Empty for an accelerator without assumed rates.

    Args:
        gpus: The driver's names of the GPUs.
        parts: The report's parts by name.
    """
    rates = next((rates for name, rates in RATES.items() if name in gpus), None)
    if rates is None:
        return []
    return [
        *_of_speed(parts.get("speed", PartResult("speed")).findings, rates),
        *_of_trace(parts.get("trace", PartResult("trace")).findings, rates),
    ]


def _of_speed(findings: Mapping[str, object], rates: Rates) -> Iterator[Comparison]:
    for (preset, ranks), run in counted_runs().items():
        for contender, work in (("ours", run.ours), ("bare PyTorch, FlashAttention", run.bare)):
            match findings.get("ranks"), findings.get(f"{preset}, {contender}"):
                case int(measured_ranks), {"step_s": float(step_s)} if measured_ranks == ranks:
                    step_ms = max(work.seconds(rates), work.host_s) * 1e3
                    yield Comparison(f"{preset}, {contender}", "step, ms", step_ms, step_s * 1e3)


def _of_trace(findings: Mapping[str, object], rates: Rates) -> Iterator[Comparison]:
    run = counted_runs().get((str(findings.get("preset")), int(str(findings.get("ranks", 0)))))
    match findings.get("steps"), findings.get("profile"):
        case int(steps), {
            "kernels": int(kernels),
            "span_ms": float(span_ms),
            "busy": float(busy),
            "classes": dict(classes),
        } if run is not None:
            name = f"{run.preset}, trace of ours"
            predicted = run.ours.seconds_by_class(rates)
            measured = {label: row["ms"] / steps for label, row in classes.items()}
            for label in dict.fromkeys([*predicted, *measured]):
                yield Comparison(
                    name, f"{label}, ms", predicted.get(label, 0.0) * 1e3, measured.get(label, 0.0)
                )
            idle_s = max(0.0, run.ours.host_s - run.ours.seconds(rates))
            yield Comparison(name, "idle, ms", idle_s * 1e3, (1 - busy) * span_ms / steps)
            yield Comparison(name, "kernels", run.ours.launches, kernels / steps)
