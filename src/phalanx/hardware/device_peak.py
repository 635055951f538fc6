"""The accelerator at hand, by the name that its driver reports."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.hardware.catalog import accelerators


@dataclass(frozen=True)
class KnownPeak:
    """The dense bf16 peak of a known accelerator, in FLOP/s."""

    name: str
    bf16_flops: float
    source: str


def accelerator_named(device_name: str) -> KnownPeak | None:
    """The catalog's peak for a driver's device name such as "NVIDIA H200", or ``None``."""
    matches = [
        (len(part), entry)
        for entry in accelerators().values()
        for part in entry.device_names
        if part in device_name and "bf16" in entry.flops
    ]
    if not matches:
        return None
    _, entry = max(matches, key=lambda match: match[0])
    return KnownPeak(entry.name, entry.flops["bf16"].value, entry.flops["bf16"].source)
