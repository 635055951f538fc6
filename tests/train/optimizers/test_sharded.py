"""Optimizers on several ranks: the bits of one rank, a state that any fleet can go on with, and what crosses the wire."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.run.kinds.operations import Parameter
from phalanx.run.spec import OptimizerSpec
from quick_cases import quick
from ranks import Ranks

# Rows that four ranks cannot share evenly, fewer rows than ranks, a stack of experts, and what AdamW takes.
KINDS = [
    Parameter("embedding.weight", (11, 6), "embedding"),
    Parameter("blocks.0.wide", (5, 9), "matrix"),
    Parameter("blocks.0.tall", (10, 4), "output"),
    Parameter("blocks.0.short", (2, 7), "matrix"),
    Parameter("blocks.0.experts", (5, 6, 4), "matrix", stacked=True),
    Parameter("blocks.0.norm", (6,), "norm"),
    Parameter("head.weight", (11, 6), "matrix"),
]
SPECS = {
    "adamw": OptimizerSpec(),
    "adamw-bf16": OptimizerSpec(state="bf16"),
    "adamw-int8": OptimizerSpec(state="int8"),
    "adafactor": OptimizerSpec(name="adafactor"),
    "muon": OptimizerSpec(name="muon"),
    "shampoo": OptimizerSpec(name="shampoo", block_size=4, precondition_every=2),
    "soap": OptimizerSpec(name="soap", block_size=4, precondition_every=2),
}


def values(name: str, shape: tuple[int, ...], step: int) -> Any:
    """Weights (step 0) or gradients of a parameter, the same on every rank."""
    import torch

    seed = int.from_bytes(hashlib.sha256(f"{name} {step}".encode()).digest()[:4], "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Model:
    """Parameters sharded by rows over all ranks, as FSDP does, and their optimizer."""

    def __init__(self, spec: OptimizerSpec) -> None:
        import torch.distributed as dist
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh

        from phalanx.train.compose import make_optimizer

        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.parameters = {k.name: nn.Parameter(self.sharded(k, 0)) for k in KINDS}
        kinds = {k.name: k for k in KINDS}
        self.optimizer = make_optimizer(spec, self.parameters, kinds, seed=5, group=self.mesh.get_group())

    def sharded(self, kind: Parameter, step: int) -> Any:
        from torch.distributed.tensor import Shard, distribute_tensor

        return distribute_tensor(values(kind.name, kind.shape, step), self.mesh, [Shard(0)])

    def steps(self, numbers: range) -> None:
        for number in numbers:
            for kind in KINDS:
                self.parameters[kind.name].grad = self.sharded(kind, number)
            self.optimizer.step(number, 0.01 * number, 0.5)

    def weights(self) -> dict[str, bytes]:
        full_tensors = {name: p.detach().full_tensor() for name, p in self.parameters.items()}  # type: ignore[attr-defined]
        return {name: tensor.numpy().tobytes() for name, tensor in full_tensors.items()}

    def shards(self) -> list[Any]:
        """Weights and state, as a checkpoint takes them."""
        from checkpoint.shards import shards_of
        from phalanx.checkpoint.committed.restore import Shard, dtype_name
        from phalanx.checkpoint.format.boxes import Box

        shards = shards_of({f"model/{name}": p.detach() for name, p in self.parameters.items()})
        for name, parts in self.optimizer.state().items():
            for part in parts:
                shape = tuple(part.tensor.shape)
                offset = (0,) * len(shape) if 0 in shape else part.offset
                box = Box(f"optimizer/{name}", dtype_name(part.tensor.dtype), part.full_shape, offset, shape)
                shards.append(Shard(box, part.tensor))
        return shards


def three_steps(spec: OptimizerSpec) -> dict[str, bytes]:
    model = Model(spec)
    model.steps(range(1, 4))
    return model.weights()


@pytest.mark.parametrize("name", quick(SPECS, of_the_suite=["adamw-int8", "muon", "soap"]))
def test_any_number_of_ranks_gives_the_bits_of_one(name: str, ranks: Ranks) -> None:
    alone = ranks.run(1, three_steps, SPECS[name])[0]
    assert all(alone[kind.name] != values(kind.name, kind.shape, 0).numpy().tobytes() for kind in KINDS)
    for count in (2, 3, 4):
        assert all(weights == alone for weights in ranks.run(count, three_steps, SPECS[name]))


def three_steps_in_small_batches(spec: OptimizerSpec) -> tuple[int, dict[str, bytes]]:
    from phalanx.train.optimizers.matrix_optimizer import MatrixOptimizer

    model = Model(spec)
    optimizer = model.optimizer.parts[0]  # type: ignore[attr-defined]
    assert isinstance(optimizer, MatrixOptimizer)
    optimizer.exchange = replace(optimizer.exchange, batch_elements=50)
    model.steps(range(1, 4))
    return len(optimizer.exchange.batches), model.weights()


def test_matrices_that_do_not_fit_a_buffer_together_cross_one_after_another(ranks: Ranks) -> None:
    alone = ranks.run(1, three_steps, SPECS["muon"])[0]
    for batches, weights in ranks.run(2, three_steps_in_small_batches, SPECS["muon"]):
        assert batches > 2
        assert weights == alone


def save_after_two_steps(spec: OptimizerSpec, folder: str) -> None:
    import torch.distributed as dist

    from phalanx.checkpoint.save.saver import AsyncSaver
    from phalanx.checkpoint.tiers.disk import DiskTier

    model = Model(spec)
    model.steps(range(1, 3))
    saver = AsyncSaver(DiskTier(Path(folder)), dist.get_rank(), dist.get_world_size())
    saver.save(2, model.shards(), {})
    saver.wait()
    saver.close()
    dist.barrier()


def go_on(spec: OptimizerSpec, folder: str) -> dict[str, bytes]:
    import torch.distributed as dist

    from phalanx.checkpoint.committed.restore import restore
    from phalanx.checkpoint.tiers.disk import DiskTier

    model = Model(spec)
    restore(DiskTier(Path(folder)), 2, model.shards(), rank=dist.get_rank())
    model.steps(range(3, 4))
    return model.weights()


@pytest.mark.parametrize("name", quick(SPECS, of_the_suite=["adamw-bf16", "muon", "shampoo"]))
def test_what_two_ranks_have_saved_three_go_on_with_as_if_nothing_had_happened(
    name: str, ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(2, save_after_two_steps, SPECS[name], str(tmp_path))
    alone = ranks.run(1, three_steps, SPECS[name])[0]
    assert all(weights == alone for weights in ranks.run(3, go_on, SPECS[name], str(tmp_path)))


def three_steps_in_tiles(spec: OptimizerSpec) -> dict[str, bytes]:
    """As ``three_steps``, on a grid of 2 x 2 ranks: plain tensors, rows and columns divided, the norm copied."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from phalanx.train.compose import make_optimizer

    down, across = divmod(dist.get_rank(), 2)

    def box(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if len(shape) == 1:
            return (0,), shape
        begin = (down * shape[0] // 2, *(0,) * (len(shape) - 2), across * shape[-1] // 2)
        end = ((down + 1) * shape[0] // 2, *shape[1:-1], (across + 1) * shape[-1] // 2)
        return begin, tuple(b - a for a, b in zip(begin, end, strict=True))

    def tile(kind: Parameter, step: int) -> torch.Tensor:
        offset, shape = box(kind.shape)
        where = tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))
        return values(kind.name, kind.shape, step)[where].clone()

    parameters = {k.name: nn.Parameter(tile(k, 0)) for k in KINDS}
    boxes = {k.name: box(k.shape) for k in KINDS}
    kinds = {k.name: k for k in KINDS}
    optimizer = make_optimizer(spec, parameters, kinds, seed=5, boxes=boxes, group=dist.group.WORLD)
    for number in range(1, 4):
        for kind in KINDS:
            parameters[kind.name].grad = tile(kind, number)
        optimizer.step(number, 0.01 * number, 0.5)
    weights = {}
    for kind in KINDS:
        parts: list[Any] = [None] * 4
        dist.all_gather_object(parts, (boxes[kind.name], parameters[kind.name].detach()))
        full_tensor = torch.empty(kind.shape)
        for (offset, shape), part in parts:
            full_tensor[tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))] = part
        weights[kind.name] = full_tensor.numpy().tobytes()
    return weights


@pytest.mark.parametrize(
    "name", quick((name for name in SPECS if name != "adamw-int8"), of_the_suite=["adafactor", "shampoo"])
)
def test_matrices_divided_by_rows_and_columns_get_the_same_bits(name: str, ranks: Ranks) -> None:
    alone = ranks.run(1, three_steps, SPECS[name])[0]
    assert all(weights == alone for weights in ranks.run(4, three_steps_in_tiles, SPECS[name]))


def one_step_on_copies(spec: OptimizerSpec) -> dict[str, bytes]:
    """Every rank holds everything; the work is divided all the same."""
    import torch.distributed as dist
    from torch import nn

    from phalanx.train.compose import make_optimizer

    parameters = {k.name: nn.Parameter(values(k.name, k.shape, 0)) for k in KINDS}
    optimizer = make_optimizer(spec, parameters, {k.name: k for k in KINDS}, seed=5, group=dist.group.WORLD)
    for number in range(1, 4):
        for kind in KINDS:
            parameters[kind.name].grad = values(kind.name, kind.shape, number)
        optimizer.step(number, 0.01 * number, 0.5)
    owned = sum(name.startswith("momentum/") for name in optimizer.state())
    assert owned < 4, "no rank keeps the momentum of all matrices"
    return {name: p.detach().numpy().tobytes() for name, p in parameters.items()}


def test_ranks_that_hold_copies_can_divide_the_matrices_between_them(ranks: Ranks) -> None:
    alone = ranks.run(1, three_steps, SPECS["muon"])[0]
    assert all(weights == alone for weights in ranks.run(3, one_step_on_copies, SPECS["muon"]))


def elements_sent(spec: OptimizerSpec) -> tuple[int, int, set[str]]:
    """Elements that a step sends from this rank to others, those that it keeps, and the operations that send."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    sent, kept = 0, 0
    operations = set()

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal sent, kept
            if func.namespace == "c10d":
                operations.add(func.name())
                counts = args[4]
                kept += counts[rank]
                sent += sum(counts) - counts[rank]
            return func(*args, **(kwargs or {}))

    model = Model(spec)
    rank = torch.distributed.get_rank()
    for kind in KINDS:
        model.parameters[kind.name].grad = model.sharded(kind, 1)
    with Watching():
        model.optimizer.step(1, 0.01, 1.0)
    return sent, kept, operations


@pytest.mark.parametrize("count", [2, 4])
def test_in_a_step_of_muon_every_matrix_crosses_the_wire_at_most_twice(count: int, ranks: Ranks) -> None:
    traffic = ranks.run(count, elements_sent, SPECS["muon"])
    matrices = sum(kind.numel for kind in KINDS if kind.name.startswith("blocks") and len(kind.shape) == 2)
    assert all(operations == {"c10d::alltoall_base_"} for _, _, operations in traffic)
    assert 0 < sum(sent for sent, _, _ in traffic) < 2 * matrices


def test_experts_stay_where_they_are(ranks: Ranks) -> None:
    traffic = ranks.run(4, elements_sent, SPECS["muon"])
    expert_elements = 5 * 6 * 4  # all experts' elements stay; of the others some
    assert sum(kept for _, kept, _ in traffic) >= 2 * expert_elements


def test_a_parameter_without_a_gradient_is_named(ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match="has no gradient to step with"):
        ranks.run(1, step_without_gradients)


def step_without_gradients() -> None:
    Model(SPECS["muon"]).optimizer.step(1, 0.01, 1.0)
