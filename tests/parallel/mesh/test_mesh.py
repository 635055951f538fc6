"""A mesh makes no more process groups than it has companies of ranks, and what it made is gone once its process has left."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
import torch.distributed as dist

from layouts import DENSE, MIXTURE, steps_on_this_rank, tiny
from phalanx.parallel.mesh.mesh import build_mesh
from phalanx.run.spec import ParallelSpec, RunSpec
from ranks import Ranks


def loops() -> int:
    """Threads of this process that serve a gloo group's connections; there is one for each group."""
    gc.collect()
    names = (task.read_text() for task in Path("/proc/self/task").glob("*/comm"))
    return sum(name.startswith("gloo_tcp_loop") for name in names)


def groups_of_a_mesh(spec: RunSpec) -> tuple[int, dict[str, int]]:
    before = loops()
    mesh = build_mesh(spec, dist.get_world_size(), torch.device("cpu"))
    sizes = {
        name: dist.get_world_size(view.get_group(name))
        for view in (mesh.dense, mesh.stage_mesh, mesh.expert_mesh)
        for name in view.mesh_dim_names or ()
    }
    return loops() - before, sizes


def test_axes_along_which_a_rank_is_alone_share_one_group(ranks: Ranks) -> None:
    spec = tiny(DENSE, ParallelSpec(tensor=2))
    made, sizes = ranks.run(2, groups_of_a_mesh, spec)[0]
    # tensor, stage, sequence and expert_shard are of both ranks.
    assert sum(size == 2 for size in sizes.values()) == 3
    assert made == 4 + 1


def test_a_process_that_has_left_keeps_no_group_however_many_steps_it_computed(ranks: Ranks) -> None:
    for model in (DENSE, MIXTURE):
        ranks.run(2, steps_on_this_rank, tiny(model, ParallelSpec(tensor=2)), 1)
        assert ranks.run(2, loops) == [1, 1], "the default group's own"
