"""Energy by part: sums, limits, and figures of whole machines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from example_clusters import H100, fact, h100s
from phalanx_plan.whole_run.resources import DRAW, GRID_KG_PER_KWH, EnergyError, accelerator_power_w, energy

HOUR_S = 3600.0
COMPUTE = {"compute": 1.0}


def test_one_dgx_h100_that_only_computes_draws_its_rated_power() -> None:
    """8 x 700 W and 4.6 kW beside them are the 10.2 kW of NVIDIA's data sheet."""
    used = energy(h100s(8), 8, 0, HOUR_S, 1.0, COMPUTE)
    assert used.it_kwh == pytest.approx(10.2)
    assert used.total_kwh == pytest.approx(10.2 * 1.25)


shares_of_four = st.lists(st.floats(0.01, 1), min_size=4, max_size=4).map(
    lambda parts: {name: part / sum(parts) for name, part in zip(DRAW, parts, strict=True)}
)


@given(shares_of_four)
def test_power_is_between_idle_and_rated(shares: dict) -> None:
    assert H100.idle_power_w.value <= accelerator_power_w(H100, shares) <= H100.power_w.value * (1 + 1e-9)


@given(shares_of_four, st.floats(0, 1), st.integers(0, 1000))
def test_the_parts_sum_to_the_total_and_the_site_draws_pue_times_the_machines(
    shares: dict, step_share: float, spares: int
) -> None:
    used = energy(h100s(1024), 1024, spares, 1e6, step_share, shares)
    parts = used.steps_kwh + used.waiting_kwh + used.spares_kwh + used.nodes_kwh + used.facility_kwh
    assert parts == pytest.approx(used.total_kwh)
    assert used.total_kwh == pytest.approx(1.25 * used.it_kwh)


@given(st.floats(0, 1), st.floats(0, 1))
def test_waiting_draws_no_more_than_stepping(first: float, second: float) -> None:
    less, more = sorted((first, second))
    cluster = h100s(64)
    assert (
        energy(cluster, 64, 0, 1e5, less, COMPUTE).total_kwh
        <= energy(cluster, 64, 0, 1e5, more, COMPUTE).total_kwh
    )


def test_without_losses_in_the_site_the_facility_draws_nothing() -> None:
    cluster = replace(h100s(8), pue=fact(1.0))
    assert energy(cluster, 8, 0, HOUR_S, 1.0, COMPUTE).facility_kwh == 0


def test_carbon_is_the_energy_times_the_grid_s_intensity() -> None:
    used = energy(h100s(8), 8, 0, HOUR_S, 1.0, COMPUTE)
    assert used.co2_kg(0.5) == pytest.approx(used.total_kwh / 2)
    assert used.co2_kg(0.0) == 0


def test_the_default_grid_is_near_what_a_published_run_reports() -> None:
    """Llama 3.1 (model card): 39.3 M GPU-hours at 700 W emitted 11,390 t CO2eq, location-based."""
    gpu_kwh = 39.3e6 * accelerator_power_w(H100, COMPUTE) / 1000
    assert GRID_KG_PER_KWH.value == pytest.approx(11_390e3 / gpu_kwh, rel=0.05)


def test_shares_that_do_not_sum_to_one_are_refused() -> None:
    with pytest.raises(EnergyError, match="sum to 1"):
        accelerator_power_w(H100, {"compute": 0.5})
    with pytest.raises(EnergyError, match="step_share"):
        energy(h100s(8), 8, 0, 1.0, 1.5, COMPUTE)
