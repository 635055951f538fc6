"""A mesh makes one process group for each set of ranks, with a socket for each member, and none is left once its process has left."""

from __future__ import annotations

import gc
import os
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from layouts import DENSE, MIXTURE, steps_on_this_rank, tiny
from phalanx.parallel.mesh import build_mesh
from phalanx.parallel.torch_compat import device_of_messages, group_sizes
from phalanx.run.spec import ParallelSpec, RunSpec
from ranks import Ranks


def groups_of_a_mesh(spec: RunSpec) -> tuple[int, dict[str, int]]:
    before = len(group_sizes())
    mesh = build_mesh(spec, dist.get_world_size(), torch.device("cpu"))
    sizes = {
        name: dist.get_world_size(view.get_group(name))
        for view in (mesh.dense, mesh.stage_mesh, mesh.expert_mesh)
        for name in view.mesh_dim_names or ()
    }
    return len(group_sizes()) - before, sizes


def test_axes_along_which_a_rank_is_alone_share_one_group(ranks: Ranks) -> None:
    spec = tiny(DENSE, ParallelSpec(tensor=2))
    made, sizes = ranks.run(2, groups_of_a_mesh, spec)[0]
    # tensor, stage, sequence and expert_shard are of both ranks.
    assert sum(size == 2 for size in sizes.values()) == 3
    assert made == 4 + 1


def sockets() -> set[str]:
    """Sockets of this process, by inode: each gloo group listens at one, and has one for each other member."""
    links = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            links.add(os.readlink(f"/proc/self/fd/{name}"))
    return {link for link in links if link.startswith("socket:")}


def sockets_left() -> int:
    """Count the sockets after a collection of garbage; a group closes its sockets a moment after it is freed."""
    gc.collect()
    fewest = len(sockets())
    for _ in range(20):
        time.sleep(0.01)
        fewest = min(fewest, len(sockets()))
    return fewest


@pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="PyTorch 2.11 itself never gives up what its dispatcher of DTensors has seen",
)
def test_a_process_that_has_left_keeps_no_group_however_many_steps_it_computed(ranks: Ranks) -> None:
    before = sum(ranks.run(2, sockets_left))
    for model in (DENSE, MIXTURE):
        ranks.run(2, steps_on_this_rank, tiny(model, ParallelSpec(tensor=2)), 1)
        # Either rank may have dialed the other, with a socket more; a group has two on each of both at least.
        # Their sockets may be closed at any later time; the suite's timeout is the limit.
        while sum(ranks.run(2, sockets_left)) >= before + 4:
            pass


def sockets_of_a_mesh(spec: RunSpec) -> tuple[int, list[int], list[int]]:
    dist.barrier()
    # Groups of the job before, in this process, may close their sockets at any later time: only new ones count.
    before, world = sockets(), group_sizes()
    dist.barrier()
    build_mesh(spec, dist.get_world_size(), torch.device("cpu"))
    dist.barrier()
    made = len(sockets() - before)
    dist.barrier()  # a rank that leaves earlier ends its connections to the others
    return made, world, group_sizes()


@pytest.mark.parametrize("parallel", [ParallelSpec(sharding="zero3"), ParallelSpec(tensor=2)], ids=str)
def test_a_rank_on_cpus_has_a_socket_for_each_member_of_each_of_its_groups(
    ranks: Ranks, parallel: ParallelSpec
) -> None:
    for made, world, groups in ranks.run(4, sockets_of_a_mesh, tiny(DENSE, parallel)):
        assert world == [4]
        assert made == sum(groups) - sum(world)


@pytest.mark.parametrize(
    ("kinds", "device"), [(["cuda"], "cuda:1"), (["cpu"], "cpu"), (["cpu", "cuda"], "cpu")], ids=str
)
def test_messages_go_between_cpus_where_a_group_can_and_else_between_gpus(
    kinds: list[str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    group = SimpleNamespace(_device_types=[torch.device(kind) for kind in kinds])
    assert device_of_messages(group) == torch.device(device)  # type: ignore[arg-type]
