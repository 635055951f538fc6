"""Work and traffic of one rank as the fleet grows from 8 ranks to 98,304, counted in the real code.

The other ranks do not exist: PyTorch's fake process group answers every collective at once, so the bench measures this rank's own
work, and counts the bytes that it would send call by call. Each machine has 8 ranks.

- *network*: bytes over a machine's network for the gradient of one slot on every rank, over those of a ring's reduce-scatter, and the ranks
  of other machines that a rank sends to: the gradients of a model that is sharded over all ranks, in one level and in two. Beside the
  counted figures, their closed forms.
- *exchange*: kernel launches and host time for one parameter group between replicas that are a machine each, for slots that divide evenly and
  for others.
- *sockets*: those of a process on CPUs, where gloo connects each rank of a group with every other when the group is made (as many as its groups have
  ranks), and with GPUs, whose groups have NCCL alone: beside those of NCCL itself.
- *host*: time per step that depends only on the size of the fleet: to list the gradients that this rank counts, and the leaves of a round, for a
  model of 291 parameters in 34 groups.
- *bind*: bytes of the message with which the coordinator makes a node a member of an epoch that restores from memory, encoded by the real code after a
  lost node, and the coordinator's time for it: with a spare in its place and without, for states that every rank has alone and that every machine has.
  Beside it the claim that is made before them: its bytes, the time to describe and encode it, and to find, each turn, that none is due.
- *matrices*: work of an optimizer of full matrices (Muon) once at the start: owner and exchange of DeepSeek-V3's 45,000 matrices, divided
  by rows over all ranks.

    python -m bench.train.scale
    python -m bench.train.scale --ranks 8 1024 --json
    python -m bench.train.scale --only bind host
    python -m bench.train.scale --curve       # one table, with bench.checkpoint.scale's figures
    python -m bench.train.scale --readers 1 8 64 256
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.checkpoint import scale as scale_checkpoint
from bench.running import run_bench
from phalanx.checkpoint.committed.restore import Shard
from phalanx.checkpoint.format.boxes import full_box
from phalanx.checkpoint.format.image import ImageEntry
from phalanx.checkpoint.format.manifest import Manifest, encode_manifest
from phalanx.checkpoint.snapshot.data_port import SnapshotServer
from phalanx.checkpoint.snapshot.segments import Snapshot, SnapshotKey, SnapshotMemory, encode_record
from phalanx.checkpoint.snapshot.tier import SnapshotHolder, SnapshotTier, restore_from_holders
from phalanx.fleet.core import decide, succession
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.commands import Bind
from phalanx.fleet.core.epochs.epoch_plan import Order, deliveries
from phalanx.fleet.core.settings import CoreSettings, Formation
from phalanx.hardware.local.device import CommClock
from phalanx.model.facts.optimizer_state import matrix_work, takes_matrix
from phalanx.model.facts.presets import PRESETS
from phalanx.model.facts.shape import parameters
from phalanx.parallel.divisions import Deal, Round, rounds_of
from phalanx.parallel.mesh import Mesh, build_mesh
from phalanx.parallel.process_group.rendezvous import backends_for
from phalanx.parallel.reduction import tree
from phalanx.parallel.reduction.reduce_scatter import TreeReduceScatter
from phalanx.parallel.reduction.tree import Intake, Leaves, TreeReducer, exchange
from phalanx.parallel.torch_compat import group_sizes, join_fake
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import OptimizerSpec, ParallelSpec, RunSpec, TrainSpec
from phalanx.train.optimizers.matrix_optimizer import Holders, MatrixExchange, matrices_of
from phalanx.train.step.state import Placement

CPU = torch.device("cpu")
MACHINE_RANKS = 8
TOKEN = "bench"
GROUPS = 34
"""Parameter groups of an 8 B model: its blocks, and the rest."""


class Sent:
    """The elements that this rank sends to other machines, and the ranks there that it sends to."""

    def __init__(self) -> None:
        self.elements, self.peers = 0, set[int]()

    def all_to_all(
        self,
        received: Tensor,  # noqa: ARG002  no rank sends anything
        sent: Tensor,
        get: list[int] | None = None,  # noqa: ARG002
        give: list[int] | None = None,
        *,
        group: dist.ProcessGroup,
    ) -> None:
        """Count the elements that ``torch.distributed.all_to_all_single`` would send."""
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
        """Count and run the operation."""
        self.count += not any(name in str(func) for name in ("view", "slice", "select", "alias", "split"))
        return func(*args, **(kwargs or {}))


@contextmanager
def world(ranks: int, *, machine_ranks: int = 0, shard_ranks: int = 0) -> Iterator[tuple[Mesh, RunSpec]]:
    """Yield the mesh and the run of this process as rank 0 of ``ranks``, with a slot for each rank."""
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
    """Count the elements that a rank sends to other machines for a share of one element, in one level and in two."""
    report: dict[str, object] = {}
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
        report[name] = {
            "over a ring": sent.elements * MACHINE_RANKS / ring,
            "elements a rank sends": sent.elements,
            "closed form": form,
            "peers": len(sent.peers),
        }
    return report


def exchanged(replicas: int, slots: int) -> dict[str, float]:
    """Return launches and host time of one exchange between replicas."""
    leaves = Leaves(Deal(slots, replicas, 1), 1)
    collectives = dist.all_to_all_single, tree.all_gather_single  # type: ignore[attr-defined]
    join_fake(0, replicas)
    try:
        mesh: Any = SimpleNamespace(replica=0, replicas=replicas, replicate_group=dist.group.WORLD)
        out = torch.empty(replicas)
        # A fake group's collectives make lists as long as the group; the cost of a real one is not measured here.
        dist.all_to_all_single = tree.all_gather_single = lambda *_args, **_keywords: None  # type: ignore[attr-defined]
        nodes = [torch.zeros(replicas) for _ in leaves.forest(0)]
        first_s = _time_s(lambda: exchange(nodes, leaves, mesh, out), 1)
        host_s = _time_s(lambda: exchange(nodes, leaves, mesh, out), 9)
        with Launches() as launches:
            exchange(nodes, leaves, mesh, out)
    finally:
        dist.all_to_all_single, tree.all_gather_single = collectives  # type: ignore[attr-defined]
        dist.destroy_process_group()
    return {"launches": launches.count, "host_ms": host_s * 1e3, "first_ms": first_s * 1e3}


def sockets(ranks: int) -> dict[str, int]:
    """Count the sockets of gloo in one process, of all groups of a model that is sharded over all ranks, and over a machine."""
    counts = {}
    for name, shard_ranks in (("all", 0), ("a machine", MACHINE_RANKS)):
        with world(ranks, machine_ranks=MACHINE_RANKS, shard_ranks=shard_ranks):
            counts[f"CPU, sharded over {name}"] = sum(group_sizes())
            counts[f"GPU, sharded over {name}"] = (
                sum(group_sizes()) if "gloo" in backends_for(torch.device("cuda")) else 0
            )
    return counts


def host(ranks: int) -> dict[str, float]:
    """Return milliseconds a step, and once at the start."""
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
    """Return CPU seconds, once at the start, without the gathering of tables; and the batches of a step."""
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


def bind(ranks: int) -> dict[str, dict[str, float]]:
    """Return bytes of a Bind and the coordinator's CPU milliseconds for one, by kind of fleet."""
    nodes = max(2, ranks // MACHINE_RANKS)
    return {
        f"{'all ranks' if not shard_ranks else 'a machine'}, {'with' if spares else 'without'} spare": _binds(
            nodes, spares, shard_ranks
        )
        for shard_ranks in (0, MACHINE_RANKS)
        for spares in (1, 0)
    }


def _binds(nodes: int, spares: int, shard_ranks: int) -> dict[str, float]:
    formation = Formation(
        MACHINE_RANKS,
        tuple(range(MACHINE_RANKS, MACHINE_RANKS * nodes + 1, MACHINE_RANKS)),
        shard_ranks=shard_ranks,
    )
    state = decide.initial_state(CoreSettings(formation, wanted_nodes=nodes), 0.0)
    orders: list[Order] = []

    def handle(event: m.CoreEvent) -> None:
        nonlocal state, orders
        state, orders = decide.step(state, event, 0.0)

    def points(number: int) -> tuple[str, ...]:
        host = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        return tuple(f"{host}:{29500 + worker}" for worker in range(MACHINE_RANKS))

    for number in range(nodes + spares):
        host = points(number)[0].partition(":")[0]
        domain = (f"hall{number // 3200}", f"switch{number // 32}", f"rack{number // 4}")
        name = f"node-{number:05d}"
        handle(m.Joined(name, 1, MACHINE_RANKS, host, 29400, domain, meeting_points=points(number)))
    for name in list(state.awaiting):
        handle(m.Bound(name, 1, state.epoch))
    seats, kept_for = list(state.seats), {buddy: seat for seat, buddy in enumerate(state.ring)}
    handle(m.Disconnected(seats[0], 1))
    handle(m.Broken(seats[1], 1, state.epoch, 0))
    for seat, name in enumerate(seats[1:], 1):
        snapshots = [
            m.RankSnapshot(MACHINE_RANKS * nodes, rank, 5, kind, epoch=state.epoch)
            for kind, of in (("own", seat), *([] if shard_ranks else [("buddy", kept_for[seat])]))
            for rank in formation.ranks_of(of, MACHINE_RANKS * nodes)
        ]
        handle(m.Parked(name, 1, state.epoch, points(int(name[5:])), tuple(snapshots)))
    began_s = time.process_time()
    binds = [command for _, command in deliveries(state, orders) if isinstance(command, Bind)]
    spent_s = time.process_time() - began_s
    claim = succession.first_claim(state, seats[1], "nonce")
    return {
        "bytes": max(len(m.encode(command)) for command in binds),
        "ms": spent_s * 1e3 / len(binds),
        "claim_ms": 1e3
        * _time_s(lambda: succession.encode_claim(succession.renewed(claim, state, "next")), 3),
        "claim_is_due_ms": 1e3 * _time_s(lambda: succession.is_due(claim, state), 3),
        "claim_bytes": len(succession.encode_claim(claim)),
    }


def readers(count: int, state_bytes: int = 2 << 20) -> dict[str, float]:
    """Return the seconds until ``count`` readers at once have all of one holder's state, each over a connection of its own; and the holder's rate."""
    memory, key = SnapshotMemory("bench", 1), SnapshotKey(1, 0, 1)
    segment = memory.worker_segments(0)[0]
    image = np.arange(state_bytes, dtype=np.uint64).view(np.uint8)[:state_bytes].copy()
    segment.begin(state_bytes)[:] = image
    box = full_box("w", "uint8", (state_bytes,))
    manifest = Manifest(0, "", state_bytes, 1 << 20, (), (ImageEntry(box, 0),))
    blocks = image.reshape(-1, 1 << 20)
    digests = np.array([xxhash.xxh3_64_intdigest(block) for block in blocks], "<u8").tobytes()
    snapshot = Snapshot("bench", 0, key, -1, {}, manifest)
    segment.complete(state_bytes, encode_record(snapshot, encode_manifest(manifest), digests))
    server = SnapshotServer(memory, TOKEN)

    def read(reader: int) -> None:
        target = torch.empty(state_bytes, dtype=torch.uint8)
        holder = SnapshotHolder(0, f"127.0.0.1:{server.port}")
        tier = SnapshotTier(1, 1, holders=[holder], token=TOKEN, reader=reader)
        restore_from_holders(tier, 1, [Shard(box, target)])
        tier.close()

    began_s = time.monotonic()
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(read, range(count)))
    seconds = time.monotonic() - began_s
    server.close()
    return {"readers": count, "seconds": seconds, "GB_per_s": count * state_bytes / seconds / 1e9}


CURVE = 8, 128, 2_048, 16_384, 98_304


def curve() -> None:
    """Print one table: work of one rank, or one node, as the fleet grows."""
    print("| ranks | commit | restore's plan | bytes of a Bind | sockets, CPU, GPU | host work a step |")
    print("|---|---|---|---|---|---|")
    for ranks in CURVE:
        saved: Any = scale_checkpoint.measure(ranks)
        replicas = _replicas(ranks)
        opened, used, sent = sockets(ranks), host(ranks), bind(ranks)
        step_ms = used["owned_ms"] + used["leaves_ms"] + GROUPS * exchanged(replicas, replicas)["host_ms"]
        print(
            f"| {ranks:,} | {saved['commit_later']['cpu_s']:.2f} s | {saved['restore_other']['cpu_s']:.2f} s | "
            f"{max(size['bytes'] for size in sent.values()):,.0f} | "
            f"{opened['CPU, sharded over a machine']:,}, {opened['GPU, sharded over a machine']:,} | {step_ms:.1f} ms |",
            flush=True,
        )


def _flops(spec: OptimizerSpec, rows: int, columns: int) -> float:
    return matrix_work(spec, rows, columns).flops


def _by_rows(shape: tuple[int, ...], ranks: int) -> NDArray[np.int64]:
    """Return the table of a parameter that FSDP divides along its first dimension: ``(ranks, 2, dims)``."""
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
    """Return the median process CPU time, in seconds."""
    times = []
    for _ in range(rounds):
        began_s = time.process_time()
        function()
        times.append(time.process_time() - began_s)
    return statistics.median(times)


def main() -> None:
    """Print a line for each size of the fleet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 1_024, 16_384, 98_304])
    parser.add_argument("--json", action="store_true", help="one JSON object a size")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--curve", action="store_true", help="one table instead")
    parser.add_argument("--readers", type=int, nargs="+", help="so many readers of one holder instead")
    options = parser.parse_args()
    if options.curve:
        curve()
        return
    for count in options.readers or ():
        print(json.dumps(readers(count)), flush=True)
    for ranks in () if options.readers else options.ranks:
        report: dict[str, Any] = {part: PARTS[part](ranks) for part in options.only}
        if options.json:
            print(json.dumps({"ranks": ranks, **report}), flush=True)
            continue
        print(f"{ranks:,} ranks")
        for part, figures in report.items():
            print(f"  {part}: {figures}", flush=True)


PARTS: dict[str, Callable[[int], object]] = {
    "network": network,
    "exchange": lambda ranks: exchanged(_replicas(ranks), _replicas(ranks)),
    "exchange, uneven": lambda ranks: exchanged(_replicas(ranks) - 1, 8 * _replicas(ranks)),
    "sockets": sockets,
    "host": host,
    "bind": bind,
    "matrices": matrices,
}


def _replicas(ranks: int) -> int:
    return max(2, ranks // MACHINE_RANKS)


if __name__ == "__main__":
    run_bench(main)
