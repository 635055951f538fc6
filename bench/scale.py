"""Counts what one rank does and sends as the fleet grows from 8 ranks to 98,304, through the real code.

The other ranks do not exist: PyTorch's fake process group answers every collective at once, so what is measured is this rank's own
work, and what it would send is counted call by call. 8 ranks stand on each machine.

- *network*: bytes over a machine's network for the gradient of one slot on every rank, over those of a ring's reduce-scatter, and the ranks
  of other machines that a rank sends to: the gradients of a model that is sharded over all ranks, in one level and in two. Beside the
  counted figures, their closed forms.
- *exchange*: kernel launches and host time for one parameter group between replicas that are a machine each, where slots divide evenly and
  where they do not.
- *sockets*: those of a process on CPUs, where gloo connects each rank of a group with every other when the group is made (as many as its groups have
  ranks), and with GPUs, whose groups have NCCL alone: beside those of NCCL itself.
- *host*: time per step that depends on the fleet alone: which gradients this rank counts, which leaves a round has, for a model of
  291 parameters in 34 groups.
- *matrices*: what an optimizer of whole matrices (Muon) works out once at the start: owner and exchange of DeepSeek-V3's 45,000 matrices, divided
  by rows over all ranks.

    python bench/scale.py
    python bench/scale.py --ranks 8 1024 --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.model.facts.optimizer_state import matrix_work, takes_matrix
from phalanx.model.facts.presets import PRESETS
from phalanx.model.facts.shape import parameters
from phalanx.parallel.mesh.comm_clock import CommClock
from phalanx.parallel.mesh.mesh import Mesh, build_mesh
from phalanx.parallel.mesh.slots import Deal, Round, rounds_of
from phalanx.parallel.mesh.torch_compat import group_sizes, join_fake
from phalanx.parallel.process_group.rendezvous import backends_for
from phalanx.parallel.reduction import tree
from phalanx.parallel.reduction.reduce_scatter import TreeReduceScatter
from phalanx.parallel.reduction.slot_tree import Leaves
from phalanx.parallel.reduction.tree import Intake, TreeReducer, exchange
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import OptimizerSpec, ParallelSpec, RunSpec, TrainSpec
from phalanx.train.optimizers.holders import Holders, matrices_of
from phalanx.train.optimizers.matrices import MatrixExchange
from phalanx.train.step.placement import Placement

CPU = torch.device("cpu")
MACHINE_RANKS = 8
GROUPS = 34
"""Parameter groups of an 8 B model: its blocks, and the rest."""


class Sent:
    """The elements that this rank sends to other machines, and the ranks there that it sends to."""

    def __init__(self) -> None:
        self.elements, self.peers = 0, set[int]()

    def all_to_all(
        self,
        received: Tensor,  # noqa: ARG002  nobody sends anything
        sent: Tensor,
        get: list[int] | None = None,  # noqa: ARG002
        give: list[int] | None = None,
        *,
        group: dist.ProcessGroup,
    ) -> None:
        """Counts what ``torch.distributed.all_to_all_single`` would send."""
        ranks = dist.get_process_group_ranks(group)
        mine = dist.get_rank() // MACHINE_RANKS
        for rank, elements in zip(ranks, give or [sent.numel() // len(ranks)] * len(ranks), strict=True):
            if rank // MACHINE_RANKS != mine and elements:
                self.elements += elements
                self.peers.add(rank)


class Launches(TorchDispatchMode):
    """Counts operations that run a kernel."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operation."""
        self.count += not any(name in str(func) for name in ("view", "slice", "select", "alias", "split"))
        return func(*args, **(kwargs or {}))


@contextmanager
def world(ranks: int, *, machine_ranks: int = 0, shard_ranks: int = 0) -> Iterator[tuple[Mesh, RunSpec]]:
    """This process as rank 0 of ``ranks``, with a slot for each rank."""
    spec = RunSpec(
        model=resolve(PRESETS["llama3-8b"], 128_256),
        train=TrainSpec(batch_size=ranks, slots=ranks, seq_len=64),
        parallel=ParallelSpec(sharding="zero3", shard_ranks=shard_ranks),
    )
    join_fake(0, ranks)
    try:
        yield build_mesh(spec, ranks, CPU, machine_ranks=machine_ranks), spec
    finally:
        dist.destroy_process_group()


def network(ranks: int) -> dict[str, object]:
    """Counts the elements that a rank sends to other machines for a share of one element, in one level and in two."""
    found: dict[str, object] = {}
    for name, machine_ranks in (("one level", 0), ("two levels", MACHINE_RANKS)):
        with world(ranks, machine_ranks=machine_ranks) as (mesh, spec):
            intake = Intake(rounds_of(mesh.deal(spec.train.slots), 0, 0)[0])
            reducer = TreeReducer("group", mesh, Leaves(mesh.deal(spec.train.slots), 1), intake)
            sent, all_to_all = Sent(), dist.all_to_all_single
            dist.all_to_all_single = sent.all_to_all
            try:
                reduce_scatter = TreeReduceScatter(reducer, CommClock(blocking=False), mesh.fsdp_levels)
                reduce_scatter(torch.empty(1), torch.zeros(ranks), mesh.dense.get_group("fsdp"), None)
            finally:
                dist.all_to_all_single = all_to_all
        machines = ranks // MACHINE_RANKS
        ring = max(1, (machines - 1) * MACHINE_RANKS)  # elements that each machine passes on
        form = ranks - MACHINE_RANKS if name == "one level" else machines - 1
        found[name] = {
            "over a ring": sent.elements * MACHINE_RANKS / ring,
            "elements a rank sends": sent.elements,
            "closed form": form,
            "peers": len(sent.peers),
        }
    return found


def exchanged(replicas: int, slots: int) -> dict[str, float]:
    """Launches and host time of one exchange between replicas."""
    leaves = Leaves(Deal(slots, replicas, 1), 1)
    collectives = dist.all_to_all_single, tree.all_gather_single
    join_fake(0, replicas)
    try:
        mesh: Any = SimpleNamespace(replica=0, replicas=replicas, replicate_group=dist.group.WORLD)
        out = torch.empty(replicas)
        # A fake group's collectives make lists as long as the group; a real one's cost is not the question here.
        dist.all_to_all_single = tree.all_gather_single = lambda *_args, **_keywords: None
        nodes = [torch.zeros(replicas) for _ in leaves.forest(0)]
        first_s = _time_s(lambda: exchange(nodes, leaves, mesh, out), 1)
        host_s = _time_s(lambda: exchange(nodes, leaves, mesh, out), 9)
        with Launches() as launches:
            exchange(nodes, leaves, mesh, out)
    finally:
        dist.all_to_all_single, tree.all_gather_single = collectives
        dist.destroy_process_group()
    return {"launches": launches.count, "host_ms": host_s * 1e3, "first_ms": first_s * 1e3}


def sockets(ranks: int) -> dict[str, int]:
    """Sockets of gloo in one process, of all groups of a model that is sharded over all ranks, and over a machine."""
    found = {}
    for name, shard_ranks in (("all", 0), ("a machine", MACHINE_RANKS)):
        with world(ranks, machine_ranks=MACHINE_RANKS, shard_ranks=shard_ranks):
            found[f"CPU, sharded over {name}"] = sum(group_sizes())
            found[f"GPU, sharded over {name}"] = (
                sum(group_sizes()) if "gloo" in backends_for(torch.device("cuda")) else 0
            )
    return found


def host(ranks: int) -> dict[str, float]:
    """Milliseconds a step, and once at the start."""
    began_s = time.perf_counter()
    with world(ranks) as (mesh, spec):
        mesh_ms = (time.perf_counter() - began_s) * 1e3
        kinds = {parameter.name: parameter for parameter in parameters(spec.model)}
        placement = Placement(mesh, kinds, {})
        owned_s = _time_s(lambda: [placement.owns(name) for name in kinds], 5)
        deal = mesh.deal(spec.train.slots)
        round_ = rounds_of(deal, 0, 0)[0]
        leaves_s = _time_s(lambda: _leaves(Leaves(deal, 1), round_), 5)
    return {"mesh_ms": mesh_ms, "owned_ms": owned_s * 1e3, "leaves_ms": leaves_s * 1e3}


def matrices(ranks: int) -> dict[str, float]:
    """CPU seconds, once at the start, without the gathering of tables; and the batches of a step."""
    spec = OptimizerSpec(name="muon")
    model = parameters(resolve(PRESETS["deepseek-v3"], 129_280))
    shapes = {parameter.name: parameter.shape for parameter in model if takes_matrix(spec, parameter)}
    tables = {name: _by_rows(shape, ranks) for name, shape in shapes.items()}
    join_fake(0, ranks)
    try:
        began_s = time.process_time()
        holders = {name: Holders(shape, tables[name]) for name, shape in shapes.items()}
        cost = partial(_flops, spec)
        exchange = MatrixExchange(shapes, {}, holders, cost, dist.group.WORLD)
        spent_s = time.process_time() - began_s
    finally:
        dist.destroy_process_group()
    count = sum(len(matrices_of(name, shape)) for name, shape in shapes.items())
    return {"matrices": count, "start_s": spent_s, "batches": len(exchange.batches)}


def _flops(spec: OptimizerSpec, rows: int, columns: int) -> float:
    return matrix_work(spec, rows, columns).flops


def _by_rows(shape: tuple[int, ...], ranks: int) -> NDArray[np.int64]:
    """The table of a parameter that FSDP divides along its first dimension: ``(ranks, 2, dims)``."""
    size = -(-shape[0] // ranks)
    begin = np.minimum(np.arange(ranks) * size, shape[0])
    table = np.zeros((ranks, 2, len(shape)), np.int64)
    table[:, 1] = shape
    table[:, 0, 0], table[:, 1, 0] = begin, np.minimum(begin + size, shape[0]) - begin
    return table


def _leaves(leaves: Leaves, current: Round) -> None:
    for _ in range(GROUPS):
        leaves.of_round(current)


def _time_s(function: Callable[[], object], rounds: int) -> float:
    """Median process CPU time, in seconds."""
    times = []
    for _ in range(rounds):
        began_s = time.process_time()
        function()
        times.append(time.process_time() - began_s)
    return statistics.median(times)


def main() -> None:
    """Prints a line for each size of the fleet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 1_024, 16_384, 98_304])
    parser.add_argument("--json", action="store_true", help="one JSON object a size")
    given = parser.parse_args()
    for ranks in given.ranks:
        replicas = max(2, ranks // MACHINE_RANKS)
        report: dict[str, Any] = {
            "ranks": ranks,
            "network": network(ranks),
            "exchange": exchanged(replicas, replicas),
            "exchange, uneven": exchanged(replicas - 1, 8 * replicas),
            "sockets": sockets(ranks),
            "host": host(ranks),
            "matrices": matrices(ranks),
        }
        if given.json:
            print(json.dumps(report), flush=True)
            continue
        print(f"{ranks:,} ranks")
        for part in ("network", "exchange", "exchange, uneven", "sockets", "host", "matrices"):
            print(f"  {part}: {report[part]}", flush=True)


if __name__ == "__main__":
    main()
