"""Pipelines whose stages are sharded by FSDP2, and the undivided model sharded in the same way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from parallel.pipelined import DENSE, DIM, SCALE, SEQ, batches, losses_of, stages_here, whole_model
from phalanx.model.transformer import Block
from phalanx.parallel.pipeline import Pipeline
from phalanx.parallel.pipeline_schedules import Schedule, ScheduleName
from phalanx.parallel.reduction.reduce_scatter import PlainBuffers
from phalanx.parallel.torch_compat import ReduceScatter, finish_backward

MICRO_BATCHES = 4
SHARDS = 2


class CountedSum(PlainBuffers, ReduceScatter):
    """A reduce-scatter that adds the ranks' gradients in their order and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        del op, async_op
        self.calls += 1
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        output_tensor.copy_(received.view(group.size(), -1).sum(0))


def shard(part: nn.Module, mesh: DeviceMesh, *, narrow: bool, zero3: bool) -> list[CountedSum]:
    """Wraps blocks and root."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if narrow else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    sums = []
    blocks = [module for module in part.modules() if isinstance(module, Block)]
    for module in (*blocks, part):
        wrapped = fully_shard(
            module, mesh=mesh, reshard_after_forward=zero3 and module is not part, mp_policy=policy
        )
        wrapped.set_custom_reduce_scatter(total := CountedSum())
        if any(True for _ in own_parameters(module)):
            sums.append(total)
    return sums


def own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that are gathered with ``module`` itself: a stage in the middle has none."""
    inner = {
        id(p)
        for child in module.modules()
        if isinstance(child, Block) and child is not module
        for p in child.parameters()
    }
    return (parameter for parameter in module.parameters() if id(parameter) not in inner)


class Accumulation:
    """Shares gradients out once they are the slot's."""

    def __init__(self, parts: list[FSDPModule]) -> None:
        self.parts = parts

    @contextmanager
    def computing(self, part: int, slot: int, *, last: bool, postponed: bool) -> Iterator[None]:
        del slot
        self.parts[part].set_requires_gradient_sync(last)
        self.parts[part].set_is_last_backward(last)
        yield
        if postponed:
            finish_backward(self.parts[part])


def whole_gradients(parts: list[nn.Module]) -> dict[str, Tensor]:
    """All gradients by name, gathered."""
    return {
        name: cast(DTensor, parameter.grad).full_tensor()
        for part in parts
        for name, parameter in part.named_parameters()
    }


def undivided(narrow: bool) -> dict[str, Tensor]:
    """Gradients of the undivided model; each rank has a slot of its own."""
    mesh = init_device_mesh("cpu", (SHARDS,))
    model = whole_model(DENSE)
    shard(model, mesh, narrow=narrow, zero3=True)
    accumulation = Accumulation([cast(FSDPModule, model)])
    tokens, targets = slot_of(mesh.get_local_rank())
    forward = losses_of(targets)
    for number, x in enumerate(tokens):
        loss = forward(model, x, number)
        with accumulation.computing(0, 0, last=number == len(tokens) - 1, postponed=False):
            (loss * SCALE).backward()
    return whole_gradients([model])


def slot_of(shard_rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens and targets of a data rank's micro-batches."""
    tokens, targets = batches(SHARDS * MICRO_BATCHES)
    return tokens[shard_rank::SHARDS], targets[shard_rank::SHARDS]


def pipelined(
    name: ScheduleName, per_rank: int, narrow: bool, zero3: bool
) -> tuple[dict[str, Tensor], set[int]]:
    """Gradients of this rank's stages, and how often any group of parameters was reduced."""
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size() // SHARDS, SHARDS), mesh_dim_names=("pipeline", "shard")
    )
    schedule = Schedule(name, mesh.size(0), per_rank)
    parts = stages_here(DENSE, schedule, mesh.get_local_rank("pipeline"))
    sums = [s for part in parts for s in shard(part, mesh["shard"], narrow=narrow, zero3=zero3)]
    group, dtype = mesh.get_group("pipeline"), torch.bfloat16 if narrow else torch.float32
    pipeline = Pipeline(parts, schedule, (group, group), (SEQ, DIM), dtype, torch.device("cpu"))
    tokens, targets = slot_of(mesh.get_local_rank("shard"))
    pipeline.run(tokens, losses_of(targets), [SCALE], Accumulation(cast(list[FSDPModule], parts)))
    return whole_gradients(cast(list[nn.Module], parts)), {s.calls for s in sums}
