"""Statistics of the layers of tiny models, measured on a rank of any layout."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from layouts import random_batches
from phalanx.observe.events import LayerStatistics
from phalanx.run.sections.monitoring import StatisticsSpec
from phalanx.run.spec import RunSpec


@dataclass(frozen=True)
class MeasuredSteps:
    """Events of some steps without their times, and the state around the last step."""

    events: tuple[LayerStatistics, ...]
    weights_sha256: str
    before: dict[str, Tensor]
    """Weights before the last step, on this rank."""
    after: dict[str, Tensor]
    grad_norm: float
    """Norm of the gradient in the last step."""


def samples_of(spec: RunSpec, step: int, slot: int) -> NDArray[np.int64]:
    """The samples of a slot of ``random_batches`` in a step, from 1."""
    batches = random_batches(spec, list(range(spec.train.slots)))
    turns = [next(batches) for _ in range(step * spec.train.slots)]
    return turns[(step - 1) * spec.train.slots + slot]


def measure_on_this_rank(
    spec: RunSpec,
    steps: int = 2,
    every_steps: int = 1,
    broken: str = "",
    damage: float = math.nan,
    rows: int = 1,
) -> MeasuredSteps:
    """Train some steps from the initial weights. The first ``rows`` of the parameter ``broken`` are set to ``damage`` first."""
    import torch.distributed as dist

    from phalanx.observe.ledger import Ledger
    from phalanx.parallel.mesh import build_mesh
    from phalanx.parallel.reduction.data_parallel import local, named_parameters
    from phalanx.train.assemble import make_deterministic
    from phalanx.train.compose import build_model
    from phalanx.train.statistics import LayerMeter
    from phalanx.train.step.state import fill_initial, weights_sha256
    from phalanx.train.step.step import Stepper

    spec = dataclasses.replace(spec, statistics=StatisticsSpec(every_steps))
    device = torch.device("cpu")
    make_deterministic(spec, device)
    mesh = build_mesh(spec, dist.get_world_size(), device)
    built = build_model(spec, mesh)
    fill_initial(built.model.parts, built.placement, spec)
    parameters = named_parameters(built.model.parts)
    if broken in parameters:
        local(parameters[broken].detach())[:rows] = damage
    slots = [current.slot for current in built.rounds]
    stepper = Stepper(built, random_batches(spec, slots), Ledger(time.monotonic_ns()))
    events: list[LayerStatistics] = []
    meter = LayerMeter(stepper, lambda step, slot: samples_of(spec, step, slot), events.append)

    def state() -> dict[str, Tensor]:
        return {
            name: local(part.detach()).clone() for name, part in named_parameters(built.model.parts).items()
        }

    before, norm = state(), 0.0
    for number in range(1, steps + 1):
        before = state()
        meter.begin(number)
        report = stepper.run(number, statistics=meter)
        meter.end(report)
        norm = report.grad_norm
    return MeasuredSteps(
        tuple(dataclasses.replace(event, seconds=0.0) for event in events),
        weights_sha256(built.model.parts, built.placement),
        before,
        state(),
        norm,
    )
