"""When weights are gathered, beside the work that hides it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from layouts import DENSE, MIXTURE, random_batches, tiny
from phalanx.run.spec import ParallelSpec
from ranks import Ranks


def gathers_and_routers() -> list[str]:
    """Gathers of experts and routers' choices in a step of a mixture of two blocks, in their order."""
    import time

    import torch.distributed as dist

    from phalanx.hardware.local.device import CommClock
    from phalanx.model.layers.moe import Experts, routers
    from phalanx.observe.ledger import Ledger
    from phalanx.parallel.mesh import build_mesh
    from phalanx.parallel.reduction.reduce_scatter import TimedAllGather
    from phalanx.train.compose import build_model
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


def gathers_and_exchanges(sharding: str, tied: bool) -> tuple[list[str], list[str]]:
    """The units of a model of three blocks, in the order in which a slot has their weights gathered, and their gradients exchanged."""
    import time

    import torch.distributed as dist

    from phalanx.hardware.local.device import CommClock
    from phalanx.observe.ledger import Ledger
    from phalanx.parallel.mesh import build_mesh
    from phalanx.parallel.reduction.data_parallel import _fsdp_modules
    from phalanx.parallel.reduction.reduce_scatter import TimedAllGather
    from phalanx.parallel.torch_compat import group_shapes
    from phalanx.train.compose import build_model
    from phalanx.train.step.state import fill_initial
    from phalanx.train.step.step import Stepper

    gathered: list[str] = []
    exchanged: list[str] = []

    class Seen(TimedAllGather):
        def __init__(self, name: str) -> None:
            super().__init__(CommClock(blocking=True))
            self.name = name

        def __call__(self, *args: Any, **named: Any) -> None:
            gathered.append(self.name)
            super().__call__(*args, **named)

    def admit(name: str, _gradient: torch.Tensor) -> bool:
        exchanged.append(names[int(name)])
        return True

    model = dataclasses.replace(DENSE, layers=3, tie_embeddings=tied)
    spec = tiny(model, ParallelSpec(sharding=sharding))  # type: ignore[arg-type]
    spec = dataclasses.replace(
        spec, train=dataclasses.replace(spec.train, batch_size=2, slots=2, micro_batch_size=1)
    )
    built = build_model(spec, build_mesh(spec, dist.get_world_size(), torch.device("cpu")))
    fill_initial(built.model.parts, built.placement, spec)
    (part,) = built.model.parts
    units: list[Any] = list(_fsdp_modules([part]))
    places = {id(module): name or "the ends" for name, module in part.named_modules()}
    names = [places[id(unit)] for unit in units]
    for name, unit in zip(names, units, strict=True):
        if group_shapes(unit):
            unit.set_custom_all_gather(Seen(name))
    built.model.summation.intake.admit = admit
    slots = [current.slot for current in built.rounds]
    Stepper(built, random_batches(spec, slots), Ledger(time.monotonic_ns())).run(1)
    return gathered, exchanged


@pytest.mark.parametrize("sharding", ["zero2", "zero3"])
def test_a_head_is_gathered_last_and_exchanged_first(ranks: Ranks, sharding: str) -> None:
    """So both are hidden: by the blocks' forward passes, and by their backward passes."""
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    for gathered, exchanged in ranks.run(2, gathers_and_exchanges, sharding, False):
        assert gathered[:5] == ["the ends", *blocks, "head"]
        assert exchanged == ["head", *reversed(blocks), "the ends"]


def test_a_tied_head_stays_with_the_embedding(ranks: Ranks) -> None:
    for gathered, exchanged in ranks.run(2, gathers_and_exchanges, "zero2", True):
        assert gathered == ["the ends", "blocks.0", "blocks.1", "blocks.2"]
        assert exchanged == ["blocks.2", "blocks.1", "blocks.0", "the ends"]
