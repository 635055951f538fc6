"""Placements of 100 small random trees against the best there is, by mixed-integer programs that share nothing with the algorithm."""

from __future__ import annotations

from random import Random

import pytest

from launch.placing.milp import fewest_torn
from launch.placing.small_trees import small_case, small_tree
from phalanx.launch.placing import Level, place_units
from phalanx_plan.placing import choices

pytestmark = pytest.mark.servers

SEEDS = range(100)


@pytest.mark.parametrize("first", range(0, len(SEEDS), 20))
def test_as_few_units_are_torn_at_every_level_at_once_as_at_each_alone(first: int) -> None:
    for seed in SEEDS[first : first + 20]:
        random = Random(seed)
        unit, units = random.randint(2, 4), random.randint(1, 4)
        levels = [Level(name) for name in ("core", "pod", "leaf")[-random.randint(1, 3) :]]
        topology = small_tree(random, unit * units, levels=levels)
        placed = place_units(topology, unit, units)
        torn = tuple(sum(one.depth < depth for one in placed.units) for depth in range(1, len(levels) + 1))
        assert torn == fewest_torn(topology, unit, units), f"seed {seed}"


@pytest.mark.parametrize("first", range(0, len(SEEDS), 20))
def test_no_placement_gets_below_the_bound_and_a_certified_one_is_the_best(first: int) -> None:
    certified = 0
    for seed in SEEDS[first : first + 20]:
        case = small_case(seed)
        ours = choices(case.topology, case.shape, case.flows)[0].price
        best_s = case.least_slowest_s()
        assert ours.bound_s <= best_s * (1 + 1e-6), f"seed {seed}"
        assert best_s <= ours.slowest_s * (1 + 1e-6), f"seed {seed}"
        if ours.certified:
            certified += 1
            assert ours.slowest_s == pytest.approx(best_s), f"seed {seed}"
    assert certified
