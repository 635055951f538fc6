"""Cost of a run: the machines' rent or their depreciation, electricity, and the storage of its
checkpoints.

A rented accelerator's price contains its electricity; an owned one's does not. Either way the spares are paid
for, and every hour counts that the run held its machines, not only those in which it learned something.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.hardware.cluster import Fact

HOUR_S = 3600.0
MONTH_S = 30 * 24 * HOUR_S

ELECTRICITY_USD_PER_KWH = Fact(
    0.078,
    "industrial rate used for a 100,000 H100 cluster by NextBigFuture after SemiAnalysis and the EIA",
    "2024",
)
STORAGE_USD_PER_GB_MONTH = Fact(0.023, "assumption: list price of a public object store's standard class")


class CostError(ValueError):
    """Negative prices or quantities."""


@dataclass(frozen=True)
class Cost:
    """US dollars by item; they sum to the total."""

    accelerators_usd: float
    spares_usd: float
    electricity_usd: float
    """Zero where the rent includes it."""
    storage_usd: float

    @property
    def total_usd(self) -> float:
        return self.accelerators_usd + self.spares_usd + self.electricity_usd + self.storage_usd


def cost(
    *,
    accelerators: int,
    spare_accelerators: int,
    wall_s: float,
    usd_per_accelerator_hour: float,
    energy_kwh: float,
    usd_per_kwh: float = ELECTRICITY_USD_PER_KWH.value,
    electricity_in_price: bool = True,
    stored_bytes: float = 0.0,
    usd_per_gb_month: float = STORAGE_USD_PER_GB_MONTH.value,
) -> Cost:
    """Cost of a run of ``wall_s`` seconds. ``stored_bytes``: of checkpoints kept, on average over the run.

    For owned machines, ``usd_per_accelerator_hour`` is their depreciation, and ``electricity_in_price`` is False.
    """
    amounts = {
        "accelerators": accelerators,
        "spare_accelerators": spare_accelerators,
        "wall_s": wall_s,
        "usd_per_accelerator_hour": usd_per_accelerator_hour,
        "energy_kwh": energy_kwh,
        "usd_per_kwh": usd_per_kwh,
        "stored_bytes": stored_bytes,
        "usd_per_gb_month": usd_per_gb_month,
    }
    for name, amount in amounts.items():
        if amount < 0:
            raise CostError(f"{name} must not be negative, is {amount}")
    hour_usd = usd_per_accelerator_hour * wall_s / HOUR_S
    return Cost(
        accelerators_usd=accelerators * hour_usd,
        spares_usd=spare_accelerators * hour_usd,
        electricity_usd=0.0 if electricity_in_price else energy_kwh * usd_per_kwh,
        storage_usd=stored_bytes / 1e9 * usd_per_gb_month * wall_s / MONTH_S,
    )
