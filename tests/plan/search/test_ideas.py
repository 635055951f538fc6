"""Plans that differ in how they divide the model."""

from __future__ import annotations

import pytest

from phalanx_plan.search.alternatives import Idea, ideas_of, short
from phalanx_plan.search.options import Options
from phalanx_plan.search.search import search
from plan.jobs import job


def ideas(model: str, cluster: str, batch: int) -> tuple[Idea, ...]:
    mine = job(model, cluster, batch=batch, stack="phalanx")
    return ideas_of(mine, search(mine), "time")


@pytest.mark.parametrize(
    ("model", "cluster", "batch"), [("llama3-70b", "h100:128", 256), ("mixtral-8x7b", "h100:64", 128)]
)
def test_three_plans_divide_the_model_differently_and_name_what_they_give_up(
    model: str, cluster: str, batch: int
) -> None:
    plans = ideas(model, cluster, batch)
    layouts = [idea.estimate.layout for idea in plans]
    ways = {
        tuple(getattr(planned_layout, axis) > 1 for axis in ("tensor", "context", "pipeline", "expert"))
        for planned_layout in layouts
    }
    assert len(ways) == len(plans) == 3
    assert [idea.estimate.step_s for idea in plans] == sorted(idea.estimate.step_s for idea in plans)
    assert all(idea.estimate.fits for idea in plans)
    for idea in plans[1:]:
        assert idea.gives_up[0].startswith("a step ")
    assert len({idea.title for idea in plans}) == 3


@pytest.mark.parametrize(
    ("model", "cluster", "batch"), [("llama3-70b", "h100:128", 256), ("gpt3-175b", "a100:1024", 2048)]
)
def test_where_the_best_plan_gathers_its_weights_another_keeps_them(
    model: str, cluster: str, batch: int
) -> None:
    best, *others = (idea.estimate for idea in ideas(model, cluster, batch))
    assert best.layout.zero == 3
    assert min(other.layout.zero for other in others) < 3
    assert max(other.step_s for other in others) < 1.3 * best.step_s


def test_a_plan_of_many_times_the_time_is_no_alternative() -> None:
    mine = job("llama3-405b", "h100:16384", batch=2048, seq_len=8192, stack="phalanx")
    plans = ideas_of(mine, search(mine, Options(require=("tp<=8", "cp=1"))), "time")
    best, *others = (idea.estimate for idea in plans)
    assert len(others) == 2
    assert all(other.step_s < 3 * best.step_s for other in others)


def test_a_model_that_is_never_divided_still_has_other_plans() -> None:
    plans = ideas("llama-100m", "h100:8", 64)
    assert len({short(idea.estimate.layout) for idea in plans}) == len(plans) > 1
