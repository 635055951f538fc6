"""The conditions of a hostile world: fleet size, layout, patience, network and speeds, all drawn from its seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from msgspec.structs import replace

from phalanx.fleet.core.settings import CoreSettings, Formation
from phalanx.launch.placing.seats import block_seats


@dataclass(frozen=True)
class Conditions:
    """Parameters of one world. Durations in seconds, probabilities from 0 to 1."""

    workers: int
    """Workers of each node."""
    settings: CoreSettings
    heartbeat_s: float
    step_s: float
    """Mean time of an optimizer step."""
    copy_s: float
    """Longest time to copy a snapshot to a buddy."""
    restore_s: float
    """Longest time to restore a node's state."""
    warm_up_s: tuple[float, float]
    """Shortest and longest time to start a worker."""
    loss: float
    """Probability that a message is lost."""
    repeat: float
    """Probability that a message arrives twice."""
    delay_s: float
    """Longest delay of a message."""
    save_every: int
    """Steps between two checkpoints on disk."""
    spares: int
    racks: int
    own_nan_steps: frozenset[int]
    """Steps that are not finite whoever computes them: the run's own."""
    succession_s: float
    """Patience of the next in line when there is no head; 0: the head runs on a machine that is never lost."""


def draw_conditions(draw: random.Random, draw_layout: random.Random) -> Conditions:
    """Draws the conditions of one world from its random numbers; ``draw_layout`` gives those of the layout in the network."""
    workers = draw.choice((1, 1, 2))
    settings = _laid(draw_layout, _settings(draw, workers))
    heartbeat_s = draw.choice((0.5, 1.0, 2.0))
    step_s = draw.choice((0.2, 1.0, 4.0))
    return Conditions(
        workers=workers,
        settings=settings,
        heartbeat_s=heartbeat_s,
        step_s=step_s,
        copy_s=draw.choice((0.05, 0.5, 4.0)) * step_s,
        restore_s=draw.choice((0.1, 1.0, 5.0)),
        warm_up_s=(0.5, draw.choice((1.0, 10.0))),
        loss=draw.choice((0.0, 0.02, 0.15)),
        repeat=draw.choice((0.0, 0.05)),
        delay_s=draw.choice((0.005, 0.1, 1.0)),
        save_every=draw.choice((7, 30)),
        spares=draw.randint(0, 3),
        racks=draw.choice((1, 3, 4)),
        own_nan_steps=frozenset(draw.sample(range(3, 60), draw.choice((0, 0, 1, 3)))),
        succession_s=draw.choice((0.0, 3.0, 8.0)),
    )


def _settings(draw: random.Random, workers: int) -> CoreSettings:
    model_ranks, pipeline = draw.choice((1, 1, 2)), draw.choice((1, 1, 2))
    unit = model_ranks * pipeline
    wanted = draw.randint(max(2, -(-unit // workers)), 8)
    shard = draw.choice((0, 0, 1, 2))
    step = unit * (shard or 1)
    legal = tuple(range(step, wanted * workers + 1, step)) or (wanted * workers,)
    if wanted * workers < step:
        shard, legal = 0, tuple(range(unit, wanted * workers + 1, unit))
    formation = Formation(workers, legal, pipeline, model_ranks, shard)
    alone = range(pipeline * (shard or 1), legal[0], pipeline * (shard or 1))
    if model_ranks == 2 and alone and draw.random() < 0.5:  # a tensor degree that may fall to 1
        formation = replace(formation, legal=(*alone, *legal), fewer=((legal[0], 1),))
    return CoreSettings(
        formation=formation,
        wanted_nodes=wanted,
        min_nodes=draw.randint(1, max(1, wanted - 2)),
        lease_s=draw.choice((5.0, 10.0)),
        confirm_s=draw.choice((0.5, 2.0)),
        park_s=draw.choice((4.0, 8.0)),
        bind_s=20.0,
        stall_s=20.0,
        form_s=10.0,
        grow_s=draw.choice((2.0, 10.0)),
        strikes=draw.choice((4, 1000)),
        max_tries=10**6,
    )


def _laid(draw: random.Random, settings: CoreSettings) -> CoreSettings:
    """The settings with a block, a unit and an order of seats."""
    formation = settings.formation
    stage = formation.largest(settings.wanted_nodes * formation.workers_per_node) // formation.pipeline
    block = block_seats(formation.model_ranks, stage, formation.workers_per_node)
    unit = block * draw.choice((1, 1, 2, formation.pipeline))
    return replace(settings, block=block, unit=unit, order=draw.choice(("data", "pipeline")))
