"""Every name that PyTorch keeps private does what we take it for."""

from __future__ import annotations

import torch

from phalanx.parallel.torch_compat import AllGather, ReduceScatter
from ranks import Ranks


def gathered() -> list[float]:
    import torch.distributed as dist

    from phalanx.parallel.torch_compat import all_gather_single

    assert dist.group.WORLD is not None
    out = torch.empty(dist.get_world_size() * 2)
    all_gather_single(out, torch.full((2,), float(dist.get_rank())), dist.group.WORLD)
    return out.tolist()


def test_all_gather_single_concatenates_the_ranks_pieces(ranks: Ranks) -> None:
    assert ranks.run(3, gathered) == [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0]] * 3


def boxes_of_five_rows() -> tuple[tuple[int, ...], tuple[int, ...], list[int]]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from phalanx.parallel.torch_compat import box_of

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(10).view(5, 2)
    tensor = distribute_tensor(whole, mesh, [Shard(0)])
    offset, shape = box_of(tensor)
    return offset, shape, tensor.to_local().flatten().tolist()


def test_box_of_says_where_a_ranks_rows_lie_in_the_whole(ranks: Ranks) -> None:
    rows = []
    for offset, shape, values in ranks.run(3, boxes_of_five_rows):
        expected = torch.arange(10).view(5, 2)[offset[0] : offset[0] + shape[0]]
        assert values == expected.flatten().tolist()
        rows += values
    assert rows == list(range(10))


def test_box_of_a_plain_tensor_is_the_whole() -> None:
    from phalanx.parallel.torch_compat import box_of

    assert box_of(torch.zeros(3, 4)) == ((0, 0), (3, 4))


def fsdp_calls_our_collectives() -> tuple[int, int]:
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    counts = [0, 0]

    class CountingGather(AllGather):
        def allocate(self, size, *, dtype, device):  # type: ignore[no-untyped-def]
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, async_op=False):  # type: ignore[no-untyped-def]  # noqa: ARG002
            counts[0] += 1
            from phalanx.parallel.torch_compat import all_gather_single

            all_gather_single(output_tensor, input_tensor, group)

    class CountingScatter(ReduceScatter):
        def allocate(self, size, *, dtype, device):  # type: ignore[no-untyped-def]
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, op, async_op=False):  # type: ignore[no-untyped-def]  # noqa: ARG002
            counts[1] += 1
            output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])

    module = nn.Linear(4, 4)
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    module.set_custom_all_gather(CountingGather())  # type: ignore[operator]
    module.set_custom_reduce_scatter(CountingScatter())  # type: ignore[operator]
    module(torch.ones(1, 4)).sum().backward()
    return counts[0], counts[1]


def test_fsdp_gathers_and_scatters_through_ours(ranks: Ranks) -> None:
    for gathers, scatters in ranks.run(2, fsdp_calls_our_collectives):
        assert gathers >= 1
        assert scatters == 1
