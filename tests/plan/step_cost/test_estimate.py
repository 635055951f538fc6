"""One layout in full: refusals with a remedy, utilization against a formula, and many layouts at once against one."""

from __future__ import annotations

import pytest

from phalanx.run.layout import Layout
from phalanx_plan.step_cost.estimate import estimate, estimates
from phalanx_plan.workload.candidates import PlannedLayout
from plan.jobs import LAYOUTS, job, planned


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (planned(Layout(shard=48)), "cannot be divided into 48 slots"),
        (planned(Layout(shard=16), micro_batch=8), "micro-batches of 8"),
        (
            planned(Layout(pipeline=4, shard=32), schedule="interleaved", stages_per_rank=2),
            "a multiple of the ranks",
        ),
        (planned(Layout(pipeline=40)), "take a smaller pipeline"),
    ],
)
def test_a_layout_that_cannot_do_the_work_is_refused_with_a_remedy(
    layout: PlannedLayout, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        estimate(job(), layout)


def test_model_flops_utilization_is_what_palms_formula_gives() -> None:
    dense = estimate(job(), LAYOUTS["dense"])
    # Llama 3 8B: matrices of 32 layers and the output projection; attention over 4,096 tokens in full.
    layer = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14_336
    flops = 6 * (32 * layer + 128_256 * 4096) + 12 * 32 * 4096 * 4096
    assert dense.mfu == pytest.approx(flops * 64 * 4096 / (64 * 989.4e12) / dense.step_s)
    assert dense.tokens_per_s == pytest.approx(64 * 4096 / dense.step_s)


def test_layouts_estimated_together_are_those_estimated_alone() -> None:
    mine = job()
    flat = [planned(Layout(shard=64), zero=1, recompute=mode) for mode in ("none", "full")]
    for layouts in (flat, [*LAYOUTS.values(), *flat]):
        for together, layout in zip(estimates(mine, layouts), layouts, strict=True):
            alone = estimate(mine, layout)
            assert together.time == pytest.approx(alone.time, rel=1e-12)
            assert together.memory == pytest.approx(alone.memory, rel=1e-12)
            assert together.worst_rank == alone.worst_rank
