"""From tensors to boxes: DTensors of simulated ranks, with torch's own sharding as the reference."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as ShardDim
from torch.distributed.tensor.debug import (
    _clear_fast_path_sharding_prop_cache,
    _clear_python_sharding_prop_cache,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from checkpoint.shards import shards_of
from checkpoint.worlds import box_of, folder_in_memory, save_by_all
from phalanx.checkpoint.committed.restore import Copies, Shard, restore
from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.tiers.disk import DiskTier


@contextmanager
def simulated_rank(rank: int, world_size: int) -> Iterator[None]:
    """This process as one rank of a world whose collectives do nothing; sharding is local and real."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        # The mesh of one simulated rank must not be remembered for an equal one of the next.
        _clear_python_sharding_prop_cache()
        _clear_fast_path_sharding_prop_cache()
        dist.destroy_process_group()


def on_every_rank(
    mesh_shape: tuple[int, ...], make: Callable[[DeviceMesh], dict[str, torch.Tensor]]
) -> list[list[Shard]]:
    size = torch.Size(mesh_shape).numel()
    worlds = []
    for rank in range(size):
        with simulated_rank(rank, size):
            names = tuple("abc"[: len(mesh_shape)])
            worlds.append(shards_of(make(init_device_mesh("cpu", mesh_shape, mesh_dim_names=names))))
    return worlds


def saved_and_restored(
    worlds: list[list[Shard]], full: dict[str, torch.Tensor], written_twice: int = 0
) -> dict[str, torch.Tensor]:
    target = {name: torch.full_like(tensor, -1) for name, tensor in full.items()}
    with folder_in_memory() as folder:
        outcomes = save_by_all(DiskTier(folder), 1, worlds)
        assert outcomes[0].status == "committed", outcomes[0].error
        written = sum(stored.box.numel for stored in DiskTier(folder).boxes(1))
        assert written == sum(tensor.numel() for tensor in full.values()) + written_twice
        restore(DiskTier(folder), 1, shards_of(target))
    return target


placements = st.sampled_from([Replicate(), ShardDim(0), ShardDim(1)])


@settings(max_examples=25)
@given(st.sampled_from([(1,), (3,), (2, 2), (3, 2)]), st.data(), st.integers(1, 9), st.integers(1, 5))
def test_any_placement_saves_each_element_once_and_restores_it(
    mesh_shape: tuple[int, ...], data: st.DataObject, rows: int, columns: int
) -> None:
    full = {name: torch.randn(rows, columns) for name in ("v", "w")}
    where: dict[str, list[Placement]] = {name: [data.draw(placements) for _ in mesh_shape] for name in full}
    worlds = on_every_rank(
        mesh_shape,
        lambda mesh: {
            name: distribute_tensor(t, mesh, where[name], src_data_rank=None) for name, t in full.items()
        },
    )
    target = saved_and_restored(worlds, full)
    assert all(torch.equal(target[name], full[name]) for name in full)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5), nn.LayerNorm(5))


def fsdp(mesh: DeviceMesh) -> nn.Module:
    return fully_shard(network(), mesh=mesh)


def tensor_parallel_fsdp(mesh: DeviceMesh) -> nn.Module:
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    model = parallelize_module(network(), mesh["b"], plan, src_data_rank=None)
    return fully_shard(model, mesh=mesh["a"])


@pytest.mark.parametrize(
    ("mesh_shape", "apply"), [((3,), fsdp), ((8,), fsdp), ((2, 3), fsdp), ((2, 2), tensor_parallel_fsdp)]
)
def test_fsdp2_hsdp_and_tensor_parallel_models_save_their_full_weights(
    mesh_shape: tuple[int, ...], apply: Callable[[DeviceMesh], nn.Module]
) -> None:
    full = {name: tensor.detach() for name, tensor in network().state_dict().items()}
    worlds = on_every_rank(mesh_shape, lambda mesh: dict(apply(mesh).named_parameters()))
    # The norm is outside the tensor-parallel plan: its mesh does not show that the ranks along "b" have equal copies.
    norm = 10 if apply is tensor_parallel_fsdp else 0
    target = saved_and_restored(worlds, full, written_twice=norm)
    assert all(torch.equal(target[name], full[name]) for name in full)


def test_uneven_chunks_of_fsdp_carry_no_padding() -> None:
    worlds = on_every_rank(
        (3,), lambda mesh: {"w": distribute_tensor(torch.ones(7, 2), mesh, [ShardDim(0)], src_data_rank=None)}
    )
    assert [shards[0].box.shape for shards in worlds] == [(3, 2), (3, 2), (1, 2)]
    assert [shards[0].box.offset for shards in worlds] == [(0, 0), (3, 0), (6, 0)]


def test_replicas_in_the_mesh_know_each_other() -> None:
    worlds = on_every_rank(
        (2, 2),
        lambda mesh: {
            "w": distribute_tensor(torch.ones(4), mesh, [Replicate(), ShardDim(0)], src_data_rank=None)
        },
    )
    copies = [shards[0].copies for shards in worlds]
    assert copies == [Copies(0, 2, (0, 2)), Copies(0, 2, (1, 3)), Copies(1, 2, (0, 2)), Copies(1, 2, (1, 3))]


def test_a_partial_sum_is_refused_by_name() -> None:
    with simulated_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(CheckpointError, match=r"grad: .*reduce partial sums"):
            shards_of({"grad": DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)})


def test_a_plain_tensor_is_its_own_full_tensor_and_shares_memory() -> None:
    tensor = torch.zeros(3, 2)
    (shard,) = shards_of({"w": tensor}, replica=1, replicas=4)
    shard.tensor.fill_(5)
    assert (shard.box, shard.copies) == (box_of("w", tensor), Copies(1, 4))
    assert tensor.eq(5).all()
