"""The planner's quick answer: which degree a fleet had better halve first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.hardware.catalog import cluster
from phalanx.hardware.overrides import with_value
from phalanx.plan.fewer_ranks import first_halved
from phalanx.plan.search.layout_text import estimate_written
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import FleetSpec, ModelSpec, ParallelSpec, RunSpec, TrainSpec

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


@pytest.mark.parametrize(("seq_len", "axis"), [(2048, "context"), (65_536, "tensor")])
def test_the_degree_falls_first_without_which_the_step_is_shorter(seq_len: int, axis: str) -> None:
    spec = run(seq_len)
    answer = first_halved(spec, H100)
    assert answer is not None
    assert (answer.axis, answer.ranks) == (axis, 2)
    steps = {
        name: estimate_written(replace(spec, parallel=parallel), cluster("h100:2"), 2).step_s
        for name, parallel in (
            ("tensor", replace(spec.parallel, tensor=1)),
            ("context", replace(spec.parallel, context=1)),
        )
    }
    assert {name: found.step_s for name, found in answer.estimates.items()} == steps
    assert min(steps, key=lambda name: steps[name]) == axis


def test_a_degree_whose_half_does_not_fit_in_memory_falls_last() -> None:
    answer = first_halved(run(65_536), H100)
    assert answer is not None
    needed = {axis: found.memory_bytes for axis, found in answer.estimates.items()}
    assert needed["tensor"] != needed["context"]
    roomier = min(needed, key=lambda axis: needed[axis])
    tight = with_value(H100, "accelerator.memory_bytes", sum(needed.values()) / 2)
    fitting = first_halved(run(65_536), tight)
    assert fitting is not None
    assert sum(found.fits for found in fitting.estimates.values()) == 1
    assert fitting.axis == roomier


@pytest.mark.parametrize("fleet", [FleetSpec(nodes=4), FleetSpec(nodes=4, least_tensor=1)])
def test_where_there_is_nothing_to_choose_nothing_is_planned(fleet: FleetSpec) -> None:
    assert first_halved(run(2048, fleet), H100) is None
