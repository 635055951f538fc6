"""Wall time of one slot's sums between real processes: the tree in one level and in two, beside the library's reduce-scatter.

Every rank is a process of this machine, connected by gloo over the loopback, and the upper half of them stands for a second machine. So
this is the cost of the exchange and its additions to processors, without a network: ``bench.train.scale`` counts the bytes. The ways take
turns in the same processes; each is timed between two barriers, on rank 0.

    python -m bench.train.sums_of_ranks
    python -m bench.train.sums_of_ranks --ranks 2 4 --elements 1000000
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from bench.common.started_ranks import on_ranks
from bench.running import record, run_bench
from phalanx.hardware.local.device import CommClock
from phalanx.parallel.divisions import rounds_of
from phalanx.parallel.mesh import build_mesh
from phalanx.parallel.process_group.rendezvous import RankEnvironment, join, leave
from phalanx.parallel.reduction.reduce_scatter import TreeReduceScatter
from phalanx.parallel.reduction.tree import Intake, Leaves, TreeReducer
from phalanx.parallel.torch_compat import reduce_scatter_single
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec, ParallelSpec, RunSpec, TrainSpec

CPU = torch.device("cpu")


def ways(ranks: int, elements: int) -> dict[str, Callable[[], None]]:
    """Return each way to give a rank its share of the sum of all ranks' gradients of ``elements`` elements."""
    spec = RunSpec(
        model=resolve(ModelSpec(vocab_size=64)),
        train=TrainSpec(batch_size=ranks, slots=ranks),
        parallel=ParallelSpec(sharding="zero3"),
    )
    gradient, share = torch.randn(elements), torch.empty(elements // ranks)
    calls: dict[str, Callable[[], None]] = {}
    for name, machine_ranks in (("one level", 0), ("two levels", ranks // 2)):
        if machine_ranks == 1:
            continue
        mesh = build_mesh(spec, ranks, CPU, machine_ranks=machine_ranks)
        deal, group = mesh.deal(ranks), mesh.dense.get_group("fsdp")
        intake = Intake(rounds_of(deal, mesh.replica, mesh.shard_rank)[0])
        reducer = TreeReducer("group", mesh, Leaves(deal, 1), intake)
        for wire in (torch.float32, torch.bfloat16):
            scatter = TreeReduceScatter(reducer, CommClock(blocking=False), mesh.fsdp_levels, wire)

            def run(scatter: TreeReduceScatter = scatter, group: dist.ProcessGroup = group) -> None:
                scatter(share, gradient, group, None)

            calls[f"{name}, {str(wire).removeprefix('torch.')}"] = run
    calls["the library's"] = lambda: reduce_scatter_single(share, gradient.clone(), None)
    return calls


def _rank(rank: int, ranks: int, point: str, arguments: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    join(RankEnvironment(rank, ranks, rank, point, "phalanx"), CPU, 600.0)
    calls = ways(ranks, arguments.elements // ranks * ranks)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(arguments.rounds + 1):
        for name, call in calls.items():
            dist.barrier()
            begin = time.perf_counter()
            call()
            dist.barrier()
            if number:
                times[name].append(time.perf_counter() - begin)
                record({"way": name, "seconds": times[name][-1]}, is_printed=False)
    if rank == 0:
        results.put({name: statistics.median(taken) * 1e3 for name, taken in times.items()})
    leave()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--elements", type=int, default=4_000_000, help="of the gradient")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = {ranks: on_ranks(_rank, ranks, arguments) for ranks in arguments.ranks}
    if arguments.json:
        print(json.dumps(rows))
        return
    for ranks, row in rows.items():
        print(f"{ranks} ranks: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in row.items()))


if __name__ == "__main__":
    run_bench(main)
