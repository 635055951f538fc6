"""NVTX ranges: all that a rank does has a name, ranges enclose each other, and no bit changes."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from layouts import random_batches
from phalanx.observe.ledger import Ledger
from phalanx.parallel.mesh import build_mesh
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec, ParallelSpec, RunSpec, TrainSpec
from phalanx.train.compose import build_model
from phalanx.train.profile.instruments import NvtxRanges, nvtx_ranges
from phalanx.train.step.state import fill_initial, weights_sha256
from phalanx.train.step.step import Stepper
from ranks import Ranks

MODEL = ModelSpec(layers=2, dim=32, heads=4, ffn_dim=64, vocab_size=64)
TRAIN = TrainSpec(steps=100, batch_size=4, slots=4, seq_len=16)


class Shown:
    """Ranges as a profiler receives them, each with the ranges that enclose it."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.all: set[tuple[str, ...]] = set()

    def push(self, name: str) -> None:
        """Begin a range."""
        self.open.append(name)
        self.all.add(tuple(self.open))

    def pop(self) -> None:
        """End the innermost range."""
        self.open.pop()


def step_on_this_rank(spec: RunSpec, with_ranges: bool) -> tuple[str, set[tuple[str, ...]], list[str]]:
    """Train one step as one rank of the process group; return the weights' hash, the ranges, and those left open."""
    device = torch.device("cpu")
    mesh = build_mesh(spec, dist.get_world_size(), device)
    built = build_model(spec, mesh)
    fill_initial(built.model.parts, built.placement, spec)
    ledger = Ledger(time.monotonic_ns())
    stepper = Stepper(built, random_batches(spec, [current.slot for current in built.rounds]), ledger)
    shown = Shown()
    if with_ranges:
        # The parts of a run that a step does not call.
        around = SimpleNamespace(save=print, emit=print, ended=print)
        inputs = SimpleNamespace(ledger=ledger, guardian=around, spec=spec)
        training = SimpleNamespace(built=built, inputs=inputs, saver=around, reporter=around, mesh=mesh)
        with nvtx_ranges(cast(Any, training), stepper, NvtxRanges(shown.push, shown.pop)):
            stepper.run(1)
    else:
        stepper.run(1)
    return weights_sha256(built.model.parts, built.placement), shown.all, shown.open


@pytest.mark.parametrize(
    ("parallel", "innermost"),
    [
        (ParallelSpec(sharding="zero3"), "collective all_to_all_single (shard)"),
        (ParallelSpec(pipeline=2), "send to a stage (pipeline)"),
    ],
    ids=["sharded", "pipeline"],
)
def test_steps_layers_and_collectives_are_ranges_and_the_weights_are_the_same(
    ranks: Ranks, parallel: ParallelSpec, innermost: str
) -> None:
    spec = RunSpec(model=resolve(MODEL), train=TRAIN, parallel=parallel)
    plain = ranks.run(2, step_on_this_rank, spec, False)
    traced = ranks.run(2, step_on_this_rank, spec, True)
    assert [weights for weights, _, _ in traced] == [weights for weights, _, _ in plain]
    for _, shown, left_open in traced:
        assert not left_open
        assert all(ranges[0] == "step 1" for ranges in shown)
    names = {name for _, shown, _ in traced for ranges in shown for name in ranges}
    assert {"module layer 0", "module layer 1", "work backward", innermost} <= names
