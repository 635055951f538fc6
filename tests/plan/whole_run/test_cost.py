"""Money by item."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_plan.whole_run.resources import MONTH_S, CostError, cost

HOUR_S = 3600.0


def test_deepseek_v3_costs_the_sum_of_its_report() -> None:
    """arXiv:2412.19437: 2.788 M H800-hours at 2 $ are 5.576 M$."""
    spent = cost(
        accelerators=2048,
        spare_accelerators=0,
        wall_s=2.788e6 / 2048 * HOUR_S,
        usd_per_accelerator_hour=2.0,
        energy_kwh=0,
    )
    assert spent.total_usd == pytest.approx(5.576e6)


@given(st.integers(1, 10**5), st.integers(0, 1000), st.floats(0, 1e8), st.floats(0, 10), st.floats(0, 1e9))
def test_the_items_sum_to_the_total_and_electricity_is_paid_once(
    accelerators: int, spares: int, wall_s: float, price: float, energy_kwh: float
) -> None:
    def spent(included: bool) -> float:
        return cost(
            accelerators=accelerators,
            spare_accelerators=spares,
            wall_s=wall_s,
            usd_per_accelerator_hour=price,
            energy_kwh=energy_kwh,
            electricity_in_price=included,
        ).total_usd

    assert spent(False) - spent(True) == pytest.approx(energy_kwh * 0.078, rel=1e-6, abs=spent(True) * 1e-12)


def test_a_terabyte_kept_for_a_month_costs_its_price_of_storage() -> None:
    spent = cost(
        accelerators=1,
        spare_accelerators=0,
        wall_s=MONTH_S,
        usd_per_accelerator_hour=0,
        energy_kwh=0,
        stored_bytes=1e12,
        usd_per_gb_month=0.02,
    )
    assert spent.total_usd == spent.storage_usd == pytest.approx(20)


def test_negative_amounts_are_refused_by_name() -> None:
    with pytest.raises(CostError, match="usd_per_accelerator_hour"):
        cost(accelerators=1, spare_accelerators=0, wall_s=1, usd_per_accelerator_hour=-1, energy_kwh=0)
