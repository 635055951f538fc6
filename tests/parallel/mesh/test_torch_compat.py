"""Private names of PyTorch do what the framework relies on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils import flop_counter

from phalanx.parallel.torch_compat import AllGather, ReduceScatter, count_grouped_attention
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

    from phalanx.parallel.torch_compat import local_slice_of

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full_tensor = torch.arange(10).view(5, 2)
    tensor = distribute_tensor(full_tensor, mesh, [Shard(0)])
    offset, shape = local_slice_of(tensor)
    return offset, shape, tensor.to_local().flatten().tolist()


def test_the_local_slice_is_the_place_of_a_ranks_rows_in_the_full_tensor(ranks: Ranks) -> None:
    rows = []
    for offset, shape, values in ranks.run(3, boxes_of_five_rows):
        expected = torch.arange(10).view(5, 2)[offset[0] : offset[0] + shape[0]]
        assert values == expected.flatten().tolist()
        rows += values
    assert rows == list(range(10))


def test_the_local_slice_of_a_plain_tensor_is_all_of_it() -> None:
    from phalanx.parallel.torch_compat import local_slice_of

    assert local_slice_of(torch.zeros(3, 4)) == ((0, 0), (3, 4))


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


def waits_for_fsdp() -> list[tuple[bool, bool]]:
    from collections.abc import Iterator
    from contextlib import contextmanager

    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.distributed.tensor import DTensor

    from phalanx.parallel.torch_compat import measure_waits

    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (2,))
    for part in (*module, module):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    first = module[0]
    assert isinstance(first, FSDPModule)
    seen = []

    @contextmanager
    def measure() -> Iterator[None]:
        before = isinstance(first.weight, DTensor)
        yield
        seen.append((before, isinstance(first.weight, DTensor)))

    measure_waits(first, measure)
    module(torch.ones(1, 4)).sum().backward()
    assert isinstance(module, FSDPModule)
    measure_waits(module, measure)  # which has no parameters of its own
    return seen


def test_waits_for_a_units_weights_and_for_its_sums_are_measured(ranks: Ranks) -> None:
    # Shares become whole weights before forward and before backward; at the end its sums are waited for.
    assert ranks.run(2, waits_for_fsdp) == [[(True, False), (True, False), (True, True)]] * 2


def along(batch: int) -> tuple[list[list[float]], list[list[float]], list[float]]:
    import torch.distributed as dist

    from phalanx.parallel.torch_compat import gather_along, sum_over, sum_scatter_along

    group = dist.group.WORLD
    assert group is not None
    rank = dist.get_rank()
    mine = torch.full((batch, 1), float(rank))
    full_tensor = gather_along(mine, 1, group)
    piece = sum_scatter_along(full_tensor * 10, 1, group)
    return full_tensor.tolist(), piece.tolist(), sum_over(mine[0], group).tolist()


def test_collectives_along_a_dimension_gather_and_sum(ranks: Ranks) -> None:
    for batch in (1, 2):  # with one, PyTorch takes a shorter way
        for rank, (full_rows, piece, total) in enumerate(ranks.run(3, along, batch)):
            assert full_rows == [[0.0, 1.0, 2.0]] * batch
            assert piece == [[30.0 * rank]] * batch
            assert total == [3.0]


def overlap_settings() -> tuple[bool, bool]:
    import torch.distributed as dist
    from torch._inductor import config
    from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group

    from phalanx.parallel.torch_compat import overlap_with_products

    group = dist.group.WORLD
    assert group is not None
    try:
        overlap_with_products(group)
        return config._micro_pipeline_tp, is_symm_mem_enabled_for_group(group.group_name)
    finally:
        config._micro_pipeline_tp = False


def test_overlap_is_enabled_for_the_group_that_is_named(ranks: Ranks) -> None:
    assert ranks.run(2, overlap_settings) == [(True, True)] * 2


def reduced_outside_of_a_backward_pass() -> list[float]:
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from phalanx.parallel.torch_compat import finish_backward

    module = nn.Linear(2, 2, bias=False)
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    module.set_requires_gradient_sync(False)
    module(torch.ones(1, 2)).sum().backward()
    module.set_requires_gradient_sync(True)
    finish_backward(module)
    assert module.weight.grad is not None
    return module.weight.grad.to_local().flatten().tolist()


def test_finish_backward_shares_out_what_earlier_backward_passes_have_left(ranks: Ranks) -> None:
    assert ranks.run(2, reduced_outside_of_a_backward_pass) == [[1.0, 1.0]] * 2


def test_a_compiled_block_with_a_budget_keeps_less_and_computes_the_same() -> None:
    from torch._functorch import config

    from phalanx.parallel.torch_compat import keep_activations_within

    def deep(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = (x @ x).sin()
        return x

    kept, gradients, before = [], [], config.activation_memory_budget
    try:
        for fraction in (1.0, 0.1):
            keep_activations_within(fraction)
            torch.compiler.reset()
            x = torch.full((16, 16), 0.01, requires_grad=True)
            sizes: list[int] = []

            def pack(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
                sizes.append(tensor.numel())
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                result = torch.compile(deep, backend="aot_eager_decomp_partition")(x)
            result.sum().backward()
            assert x.grad is not None
            kept.append(sum(sizes))
            gradients.append(x.grad)
    finally:
        config.activation_memory_budget = before
    assert kept[1] < kept[0]
    torch.testing.assert_close(*gradients)


def test_a_rank_of_a_fleet_that_does_not_exist_gathers_and_its_group_can_be_named() -> None:
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    from phalanx.parallel.torch_compat import group_of, join_fake, sum_over

    class Seen(TorchDispatchMode):
        groups: ClassVar[list[str]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ in ("allreduce_", "all_reduce"):
                self.groups.append(group_of(args))
            return func(*args, **(kwargs or {}))

    join_fake(40_000, 98_304)
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (40_000, 98_304)
        group = dist.new_group([3, 40_000], use_local_synchronization=True)
        with Seen():
            dist.all_reduce(torch.ones(1), group=group)
            sum_over(torch.ones(1), group)
        assert Seen.groups == [group.group_name] * 2
    finally:
        dist.destroy_process_group()


def record_of_a_pair() -> tuple[dict[str, Any], str]:
    import json
    import time

    import torch.distributed as dist

    from phalanx.parallel.torch_compat import flight_record

    pair = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(2), group=pair)
    begin_ns = time.time_ns()
    dist.all_reduce(torch.ones(3), group=pair)
    return json.loads(flight_record(begin_ns)), pair.group_name


def test_a_flight_record_names_groups_with_their_ranks_and_the_collectives_in_them(ranks: Ranks) -> None:
    for rank, (record, name) in enumerate(ranks.run(2, record_of_a_pair)):
        assert record["rank"] == rank
        assert record["groups"][name] == [0, 1]
        (entry,) = record["recorder"]["entries"]
        assert entry["process_group"][0] == name
        # Another thread sets "retired" a moment after the end.
        assert (entry["collective_seq_id"], entry["is_p2p"]) == (2, False)
        assert (entry["profiling_name"], entry["input_sizes"]) == ("gloo:all_reduce", [[3]])


def timeouts_of_new_and_changed_groups(gave_up: Path) -> tuple[float, float, str]:
    """Timeouts of the default group and of a mesh's, and rank 0's error after a change: rank 1 leaves it alone in a collective."""
    import time
    from datetime import timedelta

    import torch.distributed as dist

    from layouts import DENSE, tiny
    from phalanx.parallel.mesh import build_mesh
    from phalanx.parallel.torch_compat import group_timeout, set_group_timeouts
    from phalanx.run.spec import ParallelSpec

    mesh = build_mesh(tiny(DENSE, ParallelSpec(tensor=2)), 2, torch.device("cpu"))
    own = mesh.tensor_group._get_backend(torch.device("cpu")).options._timeout
    usual = group_timeout() or timedelta()
    set_group_timeouts(0.5)
    reason = ""
    if dist.get_rank() == 0:
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            reason = str(error)
        gave_up.touch()
    while not gave_up.exists():  # a rank that leaves earlier closes the connection, which is another error
        time.sleep(0.01)
    return usual.total_seconds(), own.total_seconds(), reason


def test_groups_of_a_mesh_have_the_default_groups_timeout_which_can_be_changed(
    ranks: Ranks, tmp_path: Path
) -> None:
    (usual, own, reason), _ = ranks.run(2, timeouts_of_new_and_changed_groups, tmp_path / "gave up")
    assert usual == own == 60.0
    assert "500ms" in reason


def threads_before_sharding_once_more() -> int:
    """The threads of a rank that has just joined; then it leaves behind it what a step with shards makes."""
    import os

    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    threads = len(os.listdir("/proc/self/task"))
    module = nn.Linear(8, 8)
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    module(torch.ones(2, 8)).sum().backward()
    return threads


def test_a_rank_that_has_left_its_groups_keeps_none_of_their_threads(ranks: Ranks) -> None:
    """PyTorch 2.11 never frees a mesh that DTensor has seen: after some hundred epochs a rank had 1,300 threads, and stood still."""
    ranks.run(2, threads_before_sharding_once_more)
    first, *later = (ranks.run(2, threads_before_sharding_once_more)[0] for _ in range(4))
    # A thread may be listed for a moment after its end; one that is kept is there in all later jobs.
    assert min(later) <= first


def test_the_flop_of_attention_with_fewer_key_heads_are_those_of_all_query_heads() -> None:
    """PyTorch before 2.13 refuses to count them; the compiler's budget for activations relies on the count."""
    count_grouped_attention()
    query, key = (2, 8, 16, 32), (2, 2, 16, 32)
    count: Any = flop_counter.sdpa_flop_count
    assert count(query, key, key) == count(query, query, query) > 0
    count_backward: Any = flop_counter.sdpa_backward_flop_count
    assert count_backward(query, query, key, key) == count_backward(query, query, query, query) > 0
