"""Fit of the cost formulas' constants to measurements of a machine, with the errors on points that were not fitted.

The formulas are those of plans (``phalanx_plan.step_cost.hardware_times``, ``phalanx_plan.step_cost.hardware_times``). A search along the
coordinates minimizes the mean absolute logarithmic error: the constants are few, and the points at most some hundred. Every third
point is held out; with few points, each of them in turn. The errors in a profile are those of the held-out points.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from phalanx.hardware import profile
from phalanx.hardware.cluster import Accelerator, Fact
from phalanx_plan.step_cost.hardware_times import matmul_s
from phalanx_plan.workload.candidates import Floats

if TYPE_CHECKING:
    from phalanx.run.fields import JsonObject

MeasuredPoints = Mapping[str, Sequence[tuple[tuple[float, ...], float]]]
"""Work name -> measured points, each with its sizes and its seconds."""

_ROUNDS = 60
_HELD_OUT = 3
"""Every n-th point is held out of the fit."""
_INSTANT_S = 1e-9
_FARTHEST = np.log(100)


@dataclass(frozen=True)
class CalibrationOrigin:
    """The source, date and versions of measured points."""

    source: str
    date: str
    versions: str


@dataclass(frozen=True)
class Fitted:
    """An accelerator with its measured peaks, its constants, and the rates of its link and disk."""

    accelerator: Accelerator
    constants: profile.Constants
    link_bytes_per_s: float
    """The link between two ranks of this machine, one direction."""
    link_latency_s: float
    disk_bytes_per_s: float


def fit_profile(points: MeasuredPoints, base: Accelerator, origin: CalibrationOrigin) -> Fitted:
    """Fit the constants of the accelerator that ``points`` were measured on.

    ``points`` must have "memory", "disk" and both ways of attention; a core of any maker also needs "matmul.fp32" and
    "host_copy". Formats and collectives without points keep the constants of ``base``.
    """
    start = profile.profile_of(base).constants
    accelerator = _with_peaks(points, base, origin)
    formats = [name.removeprefix("matmul.") for name in points if name.startswith("matmul.")]
    matmul = {
        name: _fit_matmul(points[f"matmul.{name}"], accelerator, start, name, origin) for name in formats
    }
    latency_s, rate = _link(points)
    constants = dataclasses.replace(
        start,
        name=base.key,
        matmul={**start.matmul, **matmul},
        memory=_fit_memory(points["memory"], accelerator, start, origin),
        attention=_fit_attention(points, accelerator, start, origin),
        collectives={
            **start.collectives,
            **{
                name: _fit_collective(points, name, start, (latency_s, rate), origin)
                for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "point_to_point")
                if points.get(name)
            },
        },
    )
    return Fitted(accelerator, constants, rate, latency_s, _rate(points["disk"]))


def _with_peaks(points: MeasuredPoints, base: Accelerator, origin: CalibrationOrigin) -> Accelerator:
    """Return ``base`` with measured rates as its peaks if it is a core of any maker, else ``base`` itself.

    Products in fp32 and bf16 get the best rate in fp32, copies to the host their best rate. Memory gets the rate of the
    largest block.
    """
    source = f"{origin.source}; the best rate seen"
    if base.vendor != "any":
        return base
    best = max(2 * m * n * k / seconds for (m, n, k), seconds in points["matmul.fp32"])
    fact = Fact(best, source, origin.date)
    return dataclasses.replace(
        base,
        flops={"fp32": fact, "bf16": fact},
        # The largest block, which no cache holds. The fitted share of it may then exceed one.
        memory_bytes_per_s=Fact(_last_rate(points["memory"]), source, origin.date),
        host_bytes_per_s=Fact(_rate(points["host_copy"]), source, origin.date),
    )


def _rate(points: Sequence[tuple[tuple[float, ...], float]]) -> float:
    """Return the highest bytes per second of any measurement."""
    return max(size[-1] / seconds for size, seconds in points)


def _last_rate(points: Sequence[tuple[tuple[float, ...], float]]) -> float:
    """Return the bytes per second of the largest measurement."""
    size, seconds = max(points)
    return size[-1] / seconds


def _fit_matmul(
    points: Sequence[tuple[tuple[float, ...], float]],
    accelerator: Accelerator,
    start: profile.Constants,
    name: str,
    origin: CalibrationOrigin,
) -> profile.MatmulFit:
    """Fit launch time, efficiency, half-size and memory efficiency of products in format ``name`` to measured (size, seconds)."""
    first = dataclasses.replace(start.matmul.get(name, next(iter(start.matmul.values()))), wave_share=0.0)
    sizes, seconds = np.array([size for size, _ in points]), np.array([took for _, took in points])

    def fit_of(values: Floats) -> profile.MatmulFit:
        """Return the constants for logarithms of launch time, efficiency, half-size and memory efficiency."""
        launch_s, efficiency, k_half, memory = np.exp(values).tolist()
        return dataclasses.replace(
            first, launch_s=launch_s, efficiency=min(1.0, efficiency), k_half=k_half, memory_efficiency=memory
        )

    def predict(values: Floats) -> Floats:
        constants = dataclasses.replace(start, matmul={name: fit_of(values)}, joules_per_flop={})
        return matmul_s(profile.Profile(accelerator, constants), name, *sizes.T)

    initial = np.log(
        [max(first.launch_s, 1e-7), first.efficiency, max(first.k_half, 1.0), first.memory_efficiency]
    )
    values, provenance = _fit(predict, initial, seconds, origin)
    return dataclasses.replace(fit_of(values), provenance=provenance)


def _fit_memory(
    points: Sequence[tuple[tuple[float, ...], float]],
    accelerator: Accelerator,
    start: profile.Constants,
    origin: CalibrationOrigin,
) -> profile.MemoryFit:
    """Fit launch time and efficiency of memory-bound kernels to measured (bytes, seconds)."""
    bytes_, seconds = np.array([size[0] for size, _ in points]), np.array([took for _, took in points])
    peak = accelerator.memory_bytes_per_s.value

    def predict(values: Floats) -> Floats:
        return np.asarray(np.exp(values[0]) + bytes_ / (np.exp(values[1]) * peak))

    values, provenance = _fit(predict, np.log([start.memory.kernel_s, 0.5]), seconds, origin)
    kernel_s, efficiency = np.exp(values).tolist()
    return dataclasses.replace(start.memory, kernel_s=kernel_s, efficiency=efficiency, provenance=provenance)


def _fit_attention(
    points: MeasuredPoints, accelerator: Accelerator, start: profile.Constants, origin: CalibrationOrigin
) -> profile.AttentionFit:
    """Return attention's median rates, forward and backward, as shares of the higher of the fp32 and bf16 peaks.

    Rates of latent attention and ``half_tokens`` are set to 0. Each rate's error is against the median of the others.
    """
    peak = max(accelerator.flops[name].value for name in ("fp32", "bf16") if name in accelerator.flops)
    shares: dict[str, float] = {}
    errors = []
    for way in ("forward", "backward"):
        measured = points[f"attention.{way}"]
        rates = np.array([size[0] / took for size, took in measured])
        shares[way] = float(np.median(rates)) / peak
        for place, rate in enumerate(rates):
            others = np.delete(rates, place) if len(rates) > 1 else rates
            errors.append(abs(rate / float(np.median(others)) - 1))
    provenance = _provenance(np.array(errors), len(errors), origin)
    # A substitute for a missing measurement is dropped when the other quantities were measured.
    return dataclasses.replace(
        start.attention,
        **shares,
        latent_forward=0.0,
        latent_backward=0.0,
        half_tokens=0.0,
        provenance=provenance,
    )


def _link(points: MeasuredPoints) -> tuple[float, float]:
    """Return latency (s) and rate (bytes/s) between two ranks; 20 us and 2 GB/s if they were not measured."""
    measured = points.get("point_to_point")
    if not measured:
        return 2e-5, 2e9
    return min(took for _, took in measured), _rate(measured)


_SHARE = {"all_reduce": 2.0}
"""Passes of a tensor over a member's link, to be multiplied by (n - 1)/n."""


def _fit_collective(
    points: MeasuredPoints,
    name: str,
    start: profile.Constants,
    link: tuple[float, float],
    origin: CalibrationOrigin,
) -> profile.CollectiveFit:
    """Fit the constants of the collective ``name`` to measured ((members, bytes), seconds).

    The model is ``step + pipelining * sqrt(step * bytes / rate) + k * bytes / (efficiency * rate)``. ``step`` is
    ``base + hops * latency * (members - 1)``, and ``k`` the share of the bytes that a member sends.
    """
    measured = points[name]
    members, bytes_ = np.array([size for size, _ in measured]).T
    seconds = np.array([took for _, took in measured])
    latency_s, rate = link
    k = _SHARE.get(name, 1.0) * (members - 1) / members if name != "point_to_point" else np.ones_like(members)

    def predict(values: Floats) -> Floats:
        base_s, hops, pipelining, efficiency = np.exp(values)
        step = base_s + hops * latency_s * (members - 1)
        return np.asarray(
            step + pipelining * np.sqrt(step * bytes_ / rate) + k * bytes_ / (efficiency * rate)
        )

    values, provenance = _fit(predict, np.log([latency_s, 0.5, 0.5, 0.8]), seconds, origin)
    base_s, hops, pipelining, efficiency = np.exp(values).tolist()
    return dataclasses.replace(
        start.collectives[name],
        base_s=base_s,
        hops=hops,
        pipelining=pipelining,
        efficiency=efficiency,
        provenance=provenance,
    )


def _fit(
    predict: Callable[[Floats], Floats], initial: Floats, seconds: Floats, origin: CalibrationOrigin
) -> tuple[Floats, profile.Provenance]:
    """Fit the logarithms of the constants to all points; the provenance has the errors on held-out points of separate fits."""
    errors = [_blind_errors(predict, initial, seconds, mask) for mask in _held_out(len(seconds))]
    values = _search(lambda v: _misfit(predict(v), seconds), initial)
    return values, _provenance(np.concatenate(errors), len(seconds), origin)


def _held_out(points: int) -> list[NDArray[np.bool_]]:
    """Return masks of the points held out of a fit: every third point, or with few points each of them in turn."""
    numbers = np.arange(points)
    if points > 2 * _HELD_OUT:
        return [numbers % _HELD_OUT == _HELD_OUT - 1]
    return [numbers == number for number in numbers]


def _blind_errors(
    predict: Callable[[Floats], Floats], initial: Floats, seconds: Floats, held_out: NDArray[np.bool_]
) -> Floats:
    """Return the errors, at the points ``held_out``, of a fit to the others."""
    values = _search(lambda v: _misfit(predict(v)[~held_out], seconds[~held_out]), initial)
    return np.asarray(np.abs(predict(values)[held_out] / seconds[held_out] - 1))


def _misfit(predicted: Floats, seconds: Floats) -> float:
    """Return the mean distance of predicted from measured seconds, in logarithms."""
    return float(np.mean(np.abs(np.log(np.maximum(predicted, _INSTANT_S) / seconds))))


def _search(loss: Callable[[Floats], float], initial: Floats) -> Floats:
    """Minimize ``loss`` near ``initial`` by steps along each coordinate, halved when none helps.

    No constant moves further from ``initial`` than a factor of 100.
    """
    best, least, step = initial.copy(), loss(initial), 1.0
    for _ in range(_ROUNDS):
        before = least
        for index in range(len(best)):
            for sign in (-step, step):
                trial = best.copy()
                trial[index] += sign
                if abs(trial[index] - initial[index]) <= _FARTHEST and (trial_loss := loss(trial)) < least:
                    best, least = trial, trial_loss
        if least >= before:
            step /= 2
    return best


def _provenance(errors: Floats, points: int, origin: CalibrationOrigin) -> profile.Provenance:
    """Return the origin of a fit, with the number of its points and the median and mean of ``errors``."""
    return profile.Provenance(
        origin.source, origin.date, origin.versions, points, float(np.median(errors)), float(np.mean(errors))
    )


def to_tables(fitted: Fitted, cores: int, host_memory_bytes: float, origin: CalibrationOrigin) -> JsonObject:
    """Return the TOML tables of this machine, in the form that ``phalanx.hardware.catalog.load_user`` reads.

    ``cores`` are the ranks of a node; if they are processor cores, each has its part of ``host_memory_bytes``.
    """
    chip = fitted.accelerator
    measured = {"source": origin.source, "date": origin.date}
    return {
        **measured,
        "accelerator": {
            "like": chip.key,
            "key": "this",
            "name": f"One {'core' if chip.vendor == 'any' else 'accelerator'} of this machine ({chip.name})",
            **measured,
            "memory_bytes": host_memory_bytes / cores if chip.vendor == "any" else chip.memory_bytes.value,
            "memory_bytes_per_s": chip.memory_bytes_per_s.value,
            "host_bytes_per_s": chip.host_bytes_per_s.value,
            "flops": {name: fact.value for name, fact in chip.flops.items()},
        },
        "system": {
            "like": "cpu",
            "accelerator": "this",
            **measured,
            "per_node": cores,
            "host_memory_bytes": host_memory_bytes,
            "storage_bytes_per_s_per_accelerator": fitted.disk_bytes_per_s / cores,
            "fabric": {"bytes_per_s": fitted.link_bytes_per_s, **measured},
            "domain": {
                "size": cores,
                "bytes_per_s": fitted.link_bytes_per_s,
                "latency_s": fitted.link_latency_s,
                **measured,
            },
        },
        "profile": _flat(dataclasses.asdict(fitted.constants)),
    }


def _flat(constants: JsonObject) -> JsonObject:
    """Return the constants as the reader of profiles takes them: each ``provenance`` merged into its table.

    Names, empty tables, and a provenance's zeros and empty texts are left out.
    """
    table: JsonObject = {}
    for name, value in constants.items():
        if name == "provenance":
            table |= {key: entry for key, entry in value.items() if entry not in ("", 0, 0.0)}
        elif isinstance(value, Mapping):
            table[name] = _flat(dict(value))
        elif name != "name":
            table[name] = value
    return {key: value for key, value in table.items() if value != {}}
