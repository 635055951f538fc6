"""Peak matrix-multiply rates of accelerators, by the name that their driver reports.

Dense rates, without structured sparsity. Sources (read 2026-11): NVIDIA A100 datasheet (312 TFLOP/s bf16); NVIDIA
H100 and H200 datasheets (SXM: 989.4 TFLOP/s bf16 dense; the printed 1,979 is with sparsity; PCIe H100: 756).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Accelerator:
    """One accelerator's peak rates, in FLOP/s."""

    name: str
    bf16_flops: float
    source: str


_H100 = "NVIDIA H100 datasheet, dense"
ACCELERATORS: Mapping[str, Accelerator] = MappingProxyType(
    {
        "A100": Accelerator("A100", 312e12, "NVIDIA A100 datasheet, dense"),
        "H100 PCIe": Accelerator("H100 PCIe", 756e12, _H100),
        "H100 NVL": Accelerator("H100 NVL", 835e12, _H100),
        "H100": Accelerator("H100 SXM", 989.4e12, _H100),
        "H200": Accelerator("H200 SXM", 989.4e12, "NVIDIA H200 datasheet, dense"),
    }
)


def accelerator_named(device_name: str) -> Accelerator | None:
    """The catalogue's entry for a driver's device name such as "NVIDIA H200", or ``None``."""
    return next((entry for key, entry in ACCELERATORS.items() if key in device_name), None)
