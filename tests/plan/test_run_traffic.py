"""The traffic of a run on its fleet, or why there is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.run.spec import FleetSpec
from phalanx_plan.planner import traffic_of
from phalanx_plan.search.query import PlanRequestError
from tiny_runs import make_dataset, tiny_run


def test_ranks_with_uneven_shares_of_slots_have_no_price(tmp_path: Path) -> None:
    spec = replace(tiny_run(make_dataset(tmp_path / "words"), tmp_path / "run"), fleet=FleetSpec(nodes=3))
    with pytest.raises(PlanRequestError, match=r"on 3 ranks has no price: .* cannot be divided"):
        traffic_of(spec, "h100")
