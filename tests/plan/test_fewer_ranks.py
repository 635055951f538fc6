"""The planner's quick answer: the degree that a fleet should halve first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.hardware.catalog import cluster
from phalanx.hardware.cluster import Cluster, with_value
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import FleetSpec, ModelSpec, ParallelSpec, RunSpec, TrainSpec
from phalanx_plan.planner import first_halved
from phalanx_plan.search.layout_text import estimate_written
from phalanx_plan.step_cost.estimate import Estimate

H100 = cluster("h100:16")


def run(seq_len: int, fleet: FleetSpec | None = None) -> RunSpec:
    """Eight heads in four lanes and four tiles, on two tensor by two context ranks."""
    model = ModelSpec(layers=4, dim=4096, heads=8, ffn_dim=16384, vocab_size=32_000, lanes=4, context_tiles=4)
    return RunSpec(
        model=resolve(model),
        train=TrainSpec(seq_len=seq_len, batch_size=8, slots=4, micro_batch_size=1),
        parallel=ParallelSpec(tensor=2, context=2, context_mode="allgather"),
        fleet=fleet or FleetSpec(nodes=4, least_tensor=1, least_context=1),
    )


def halves_of(spec: RunSpec, kind: Cluster) -> dict[str, Estimate]:
    """The planner's estimates of the run on two ranks, with half of each degree."""
    two = replace(kind, accelerators=2)
    return {
        axis: estimate_written(replace(spec, parallel=replace(spec.parallel, **{axis: 1})), two, 2)
        for axis in ("tensor", "context")
    }


@pytest.mark.parametrize(("seq_len", "axis"), [(2048, "context"), (65_536, "tensor")])
def test_the_degree_falls_first_without_which_the_step_is_shorter(seq_len: int, axis: str) -> None:
    spec = run(seq_len)
    answer = first_halved(spec, H100)
    assert answer is not None
    assert (answer.axis, answer.ranks) == (axis, 2)
    steps = {name: half.step_s for name, half in halves_of(spec, H100).items()}
    assert answer.step_s == steps
    assert min(steps, key=lambda name: steps[name]) == axis


def test_a_degree_whose_half_does_not_fit_in_memory_falls_last() -> None:
    spec = run(65_536)
    needed = {axis: half.memory_bytes for axis, half in halves_of(spec, H100).items()}
    assert needed["tensor"] != needed["context"]
    roomier = min(needed, key=lambda axis: needed[axis])
    tight = with_value(H100, "accelerator.memory_bytes", sum(needed.values()) / 2)
    fitting = first_halved(spec, tight)
    assert fitting is not None
    assert sum(half.fits for half in halves_of(spec, tight).values()) == 1
    assert fitting.axis == roomier


@pytest.mark.parametrize("fleet", [FleetSpec(nodes=4), FleetSpec(nodes=4, least_tensor=1)])
def test_where_there_is_nothing_to_choose_nothing_is_planned(fleet: FleetSpec) -> None:
    assert first_halved(run(2048, fleet), H100) is None
