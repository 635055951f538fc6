"""Computes steps of a run again on this rank, under a witness, without touching the run.

The state is read from one of the run's checkpoints, or is the initial one; samples, slots, schedule and layout are the run's own. Nothing is
saved and nothing is evaluated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.checkpoint.committed.restore import restore
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.data.reading.dataset import RunData
from phalanx.observe.ledger.ledger import Ledger
from phalanx.parallel.mesh.machines import count_machine_ranks
from phalanx.parallel.mesh.mesh import build_mesh
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.spec import RunSpec
from phalanx.train.assembly.compose import build_model
from phalanx.train.assembly.take_over import take_over
from phalanx.train.compare.module_witness import ModuleWitness
from phalanx.train.compare.observation import Observation
from phalanx.train.compare.orders import RankReplay, ReplayOrder
from phalanx.train.lifecycle.progress import TrainProgress
from phalanx.train.start.open_run import check_data
from phalanx.train.step.built import Built
from phalanx.train.step.state import fill_initial, state_shards
from phalanx.train.step.step import Stepper


def nothing(_step: int, _built: Built) -> None:
    """Does nothing before a step."""


def replay(
    spec: RunSpec,
    order: ReplayOrder,
    directory: RunDirectory,
    device: torch.device,
    before_step: Callable[[int, Built], None] = nothing,
) -> RankReplay:
    """Computes the steps after ``order.from_step`` up to ``order.to_step`` again. A collective call of all ranks of the run's layout.

    Args:
        spec: The resolved run.
        order: The steps.
        directory: A directory for this replay alone, with a record as that of a run.
        device: Of this rank.
        before_step: Called with the number of each step and the model ahead of it.

    Raises:
        CheckpointError: The checkpoint cannot be read.
        LayoutError: The run cannot be laid out on the ranks of the process group.
    """
    machine_ranks = count_machine_ranks(device) if spec.train.reduction == "reproducible" else 0
    mesh = build_mesh(spec, dist.get_world_size(), device, machine_ranks=machine_ranks)
    built = build_model(spec, mesh)
    parts = built.model.parts
    shards = state_shards(parts, built.optimizer, built.placement)
    progress = TrainProgress()
    if order.from_step:
        extra = restore(DiskTier(Path(order.checkpoints)), order.from_step, shards, rank=mesh.rank)
        progress = TrainProgress.from_extra(extra)
    else:
        fill_initial(parts, built.placement, spec)
        if spec.checkpoint.init_from:
            taken = take_over(spec.checkpoint, directory, built, shards)
            progress = TrainProgress.from_extra(taken.extra) if taken else progress
    dist.barrier()
    witness = ModuleWitness(built)
    observed: list[Observation] = []
    numbers: dict[int, dict[str, float]] = {}
    data = RunData.of_run(spec)
    check_data(directory, data.fingerprint)
    per_slot, first_sample = spec.train.batch_size // spec.train.slots, progress.next_sample
    steps = range(progress.step + 1, order.to_step + 1)
    batches = (
        data.train_samples(first_sample + done * spec.train.batch_size + current.slot * per_slot, per_slot)
        for done in range(len(steps))
        for current in built.rounds
    )
    withholds = partial(progress.withholds, spec.train)
    stepper = Stepper(built, batches, Ledger(time.monotonic_ns()), progress.updates, withholds)
    for step in steps:
        witness.step = step
        before_step(step, built)
        witness.see_weights("weight")
        report = stepper.run(step, before_update=witness.see_gradients)
        progress.advance(report, stepper.updates, spec.train, progress.spike(report, spec.train))
        witness.see_weights("updated")
        observed += witness.take()
        numbers[step] = {"loss": report.loss, "grad_norm": report.grad_norm}
    return RankReplay(mesh.layout.degrees, observed, numbers)
