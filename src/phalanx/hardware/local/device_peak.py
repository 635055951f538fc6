"""The accelerator at hand, by the name that its driver reports."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.hardware.catalog import accelerators, systems
from phalanx.hardware.cluster import Accelerator


@dataclass(frozen=True)
class KnownPeak:
    """The dense bf16 peak of a known accelerator, in FLOP/s."""

    name: str
    bf16_flops: float
    source: str


def accelerator_named(device_name: str) -> KnownPeak | None:
    """The catalog's peak for a driver's device name such as "NVIDIA H200", or ``None``."""
    entry = _entry_named(device_name)
    if entry is None:
        return None
    return KnownPeak(entry.name, entry.flops["bf16"].value, entry.flops["bf16"].source)


def system_named(device_name: str) -> str | None:
    """The name of the first of the catalog's systems whose accelerators' driver reports that device name, or ``None``."""
    entry = _entry_named(device_name)
    return next((name for name, system in systems().items() if system.accelerator is entry), None)


def _entry_named(device_name: str) -> Accelerator | None:
    matches = [
        (len(part), entry)
        for entry in accelerators().values()
        for part in entry.device_names
        if part in device_name and "bf16" in entry.flops
    ]
    return max(matches, key=lambda match: match[0])[1] if matches else None
