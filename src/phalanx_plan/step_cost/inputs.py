"""Inputs of the formulas of memory and time, for arrays of layouts."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx_plan.step_cost.layer_costs import LayerCosts
from phalanx_plan.step_cost.pipeline import Pipelines, PlaceTable
from phalanx_plan.workload.candidates import Candidates
from phalanx_plan.workload.holdings import Holdings
from phalanx_plan.workload.stacks import TrainingJob


@dataclass(frozen=True)
class CostInputs:
    """Inputs of the cost formulas for some candidates, computed once."""

    job: TrainingJob
    candidates: Candidates
    holdings: Holdings
    costs: LayerCosts
    pipes: Pipelines
    table: PlaceTable
