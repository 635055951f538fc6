"""The planner as the core calls it."""

from __future__ import annotations

import pytest

from phalanx.launch.placing import Topology
from phalanx.launch.planner import PlannerError, installed_planner
from phalanx.run.spec import LaunchSpec, RunSpec


def test_the_network_is_not_read_for_a_run_without_a_price() -> None:
    def unread() -> Topology:
        raise AssertionError("a scheduler that does not answer must not keep such a run from being submitted")

    with pytest.raises(PlannerError, match="the run file sets no number of nodes"):
        installed_planner().best_placement(RunSpec(launch=LaunchSpec(cluster="h100")), unread)
