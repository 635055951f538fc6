"""When weights are gathered, beside the work that hides it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from layouts import MIXTURE, random_batches, tiny
from phalanx.run.spec import ParallelSpec
from ranks import Ranks


def gathers_and_routers() -> list[str]:
    """What happens in a step of a mixture of two blocks: gathers of experts, and routers' choices."""
    import time

    import torch.distributed as dist

    from phalanx.model.layers.moe import Experts
    from phalanx.model.layers.router import routers
    from phalanx.observe.ledger import Ledger
    from phalanx.parallel.mesh.comm_clock import CommClock
    from phalanx.parallel.mesh.mesh import build_mesh
    from phalanx.parallel.reduction.reduce_scatter import TimedAllGather
    from phalanx.train.lifecycle.compose import build_model
    from phalanx.train.step.state import fill_initial
    from phalanx.train.step.step import Stepper

    seen: list[str] = []

    class Seen(TimedAllGather):
        def __init__(self, name: str) -> None:
            super().__init__(CommClock(blocking=True))
            self.name = name

        def __call__(self, *args: Any, **named: Any) -> None:
            seen.append(f"experts of {self.name}")
            super().__call__(*args, **named)

    spec = tiny(dataclasses.replace(MIXTURE, layers=3), ParallelSpec(sharding="zero3"))
    spec = dataclasses.replace(
        spec, train=dataclasses.replace(spec.train, batch_size=2, slots=2, micro_batch_size=1)
    )
    built = build_model(spec, build_mesh(spec, dist.get_world_size(), torch.device("cpu")))
    fill_initial(built.model.parts, built.placement, spec)
    (model,) = built.model.parts
    for name, router in routers(model):
        block = name.split(".")[1]
        router.register_forward_pre_hook(lambda *_, block=block: seen.append(f"router of {block}"))
        experts: Any = model.get_submodule(f"blocks.{block}.ffn.experts")
        assert isinstance(experts, Experts)
        experts.set_custom_all_gather(Seen(block))
    slots = [current.slot for current in built.rounds]
    Stepper(built, random_batches(spec, slots), Ledger(time.monotonic_ns())).run(1)
    return seen


def test_experts_are_gathered_before_their_tokens_are_routed(ranks: Ranks) -> None:
    for seen in ranks.run(2, gathers_and_routers):
        # Once more each for the backward pass.
        assert sorted(seen) == ["experts of 1"] * 2 + ["experts of 2"] * 2 + ["router of 1", "router of 2"]
        for block in ("1", "2"):
            assert seen.index(f"experts of {block}") < seen.index(f"router of {block}")
