"""Restores of checkpoints from an object store: their rate against plain reads, and the bytes that a fleet requests over those that it needs.

*Rate*: one rank restores from a real S3 server (ministack, on this machine), each block compared with its checksum and copied into the model's
memory, and late reads requested twice. Beside it the library's plain parallel reads of the same object, whose bytes are not checked; in turns, medians of ratios.

*Amplification*: some ranks save, others restore: the bytes that the restoring ranks request from the store, over the distinct bytes that their machine needs. Once
with all ranks on one machine, which share what they fetch, and once each on a machine of its own. Beside it PyTorch's distributed
checkpoint (DCP) with equal shards: the bytes that its reader takes from its files, which it reads in whole saved chunks.

    python -m bench.checkpoint.restores [--json] [--rounds 7] [--mib 512] [--without-dcp]
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor import Shard as OnDim

from bench.checkpoint.store import Bench, Cost, cost_of, server
from bench.running import record, run_bench
from phalanx.checkpoint.committed.copying import copy_step
from phalanx.checkpoint.committed.restore import Shard, dtype_name, restore
from phalanx.checkpoint.format.boxes import Box, full_box
from phalanx.checkpoint.save.saver import AsyncSaver
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.object_tier import ObjectTier
from phalanx.store.open_store import open_store
from phalanx.store.store import Info, Store

State = dict[str, torch.Tensor]
LAYERS, WIDTH = 4, 1536


@dataclass(frozen=True)
class Cut:
    """A layout: every matrix is cut along ``dim`` over so many ranks."""

    ranks: int
    dim: int = 0


CHANGES = (
    ("the same layout", Cut(4), Cut(4)),
    ("fewer ranks", Cut(4), Cut(3)),
    ("more ranks", Cut(4), Cut(6)),
    ("columns for rows", Cut(4), Cut(4, 1)),
)


class Counting:
    """A store that counts the bytes that are read of images, and passes all calls to the store below it."""

    def __init__(self, below: Store) -> None:
        self._below = below
        self._lock = threading.Lock()
        self.requested_bytes = 0

    @property
    def url(self) -> str:
        return self._below.url

    def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
        with self._lock:
            self.requested_bytes += sum(stop - start for start, stop in spans)
        return self._below.ranges(key, spans)

    def get(self, key: str) -> bytes:
        return self._below.get(key)

    def list(self, prefix: str = "") -> Iterator[Info]:
        return self._below.list(prefix)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)


def make_state() -> State:
    """Return matrices of a transformer's weights and their moments (fp32), 9 MiB each, with small vectors between them."""
    state: State = {}
    for layer in range(LAYERS):
        for kind in ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
            for matrix in ("attention", "ffn"):
                state[f"{kind}/layers.{layer}.{matrix}"] = torch.randn(WIDTH, WIDTH)
            state[f"{kind}/layers.{layer}.norm"] = torch.randn(WIDTH)
    return state


def box_of(name: str, tensor: torch.Tensor, cut: Cut, rank: int) -> Box:
    """Return the part of a tensor that a rank has: of a matrix along ``cut.dim``, of a vector along its one dimension."""
    all_of_it = full_box(name, dtype_name(tensor.dtype), tuple(tensor.shape))
    dim = min(cut.dim, tensor.ndim - 1)
    offset, shape = [0] * tensor.ndim, list(tensor.shape)
    first, stop = (size * tensor.shape[dim] // cut.ranks for size in (rank, rank + 1))
    offset[dim], shape[dim] = first, stop - first
    return all_of_it.part(tuple(offset), tuple(shape))


def shards_of(state: State, cut: Cut, rank: int) -> list[Shard]:
    shards = []
    for name, tensor in state.items():
        box = box_of(name, tensor, cut, rank)
        shards.append(Shard(box, tensor[box.slices_in(box_of(name, tensor, Cut(1), 0))].clone()))
    return shards


def amplification(state: State, url: str, folder: Path) -> dict[str, dict[str, float]]:
    """Return bytes requested over bytes needed for each change of layout: all ranks on one machine, and each on its own."""
    ratios = {}
    for number, (name, before, after) in enumerate(CHANGES):
        disk, store = DiskTier(folder / str(number)), Counting(open_store(f"{url}/change-{number}"))
        savers = [AsyncSaver(disk, rank, before.ranks) for rank in range(before.ranks)]
        for rank, saver in enumerate(savers):
            saver.save(1, shards_of(state, before, rank), {})
        for saver in savers:
            saver.close()
        copy_step(disk, 1, ObjectTier(store))
        needed = sum(tensor.nbytes for tensor in state.values())
        request_ratios = []
        for shared in (True, False):
            store.requested_bytes = 0
            tiers = [ObjectTier(store) for _ in range(after.ranks)]
            restored_by_all(tiers, state, after, shared=shared)
            request_ratios.append(store.requested_bytes / needed)
        ratios[name] = {"one_machine": request_ratios[0], "a_machine_each": request_ratios[1]}
    return ratios


def restored_by_all(tiers: Sequence[ObjectTier], state: State, cut: Cut, *, shared: bool) -> None:
    """Restore on all ranks at the same time, each in a thread; none closes the shared memory before all have restored."""
    together = threading.Barrier(len(tiers))
    failed: list[str] = []

    def restore_rank(rank: int) -> None:
        shards = shards_of({name: torch.zeros_like(tensor) for name, tensor in state.items()}, cut, rank)
        with tiers[rank].shared_on_this_machine() if shared else nullcontext():
            restore(tiers[rank], 1, shards, rank=rank)
            together.wait()
        for shard, right in zip(shards, shards_of(state, cut, rank), strict=True):
            if not torch.equal(shard.tensor, right.tensor):
                failed.append(shard.box.name)

    threads = [threading.Thread(target=restore_rank, args=(rank,)) for rank in range(len(tiers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


class CountingReader(FileSystemReader):
    """DCP's reader of files, which loads a saved chunk in full even if it needs a part of it. Counts those bytes."""

    requested_bytes = 0

    def read_data(self, plan: Any, planner: Any) -> Any:
        self.requested_bytes += sum(self.storage_data[item.storage_index].length for item in plan.items)
        return super().read_data(plan, planner)


def dcp_rank(rank: int, cut: Cut, meeting_point: str, folder: str, loads: bool, report: str) -> None:
    """Save or load the state by DCP on one rank; if it loads, write the bytes read and needed to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=cut.ranks)
    mesh = dist.device_mesh.init_device_mesh("cpu", (cut.ranks,))
    state = {
        name: distribute_tensor(
            tensor, mesh, [OnDim(min(cut.dim, tensor.ndim - 1)) if cut.ranks > 1 else Replicate()]
        )
        for name, tensor in make_state().items()
    }
    if loads:
        reader = CountingReader(folder)
        load(state, storage_reader=reader)
        needed = sum(tensor.to_local().nbytes for tensor in state.values())
        Path(report, f"{rank}.json").write_text(json.dumps([reader.requested_bytes, needed]))
    else:
        save(state, storage_writer=FileSystemWriter(folder))
    dist.destroy_process_group()


def dcp_amplification(folder: Path) -> dict[str, float]:
    """Return the bytes that DCP's ranks read over bytes that they need, for each change of layout."""
    ratios = {}
    for number, (name, before, after) in enumerate(CHANGES):
        saved, report = folder / f"dcp-{number}", folder / f"report-{number}"
        report.mkdir()
        for loads, cut in ((False, before), (True, after)):
            point = (folder / f"meeting-point-{number}-{loads}").as_uri()
            mp.spawn(dcp_rank, (cut, point, str(saved), loads, str(report)), nprocs=cut.ranks)
        counts = [json.loads(path.read_text()) for path in report.iterdir()]
        ratios[name] = sum(requested for requested, _ in counts) / sum(needed for _, needed in counts)
    return ratios


def rates(url: str, nbytes: int, rounds: int, folder: Path) -> dict[str, float]:
    """Return the rate of restores against plain reads, in turns, and the part of the blocks that was requested twice."""
    bench = Bench(url, nbytes, folder)
    copy_step(bench.disk, 1, bench.tier)
    bench.raw_upload()
    blank = [
        Shard(full_box(name, "float32", tuple(tensor.shape)), tensor) for name, tensor in bench.blank.items()
    ]
    turns: list[tuple[Cost, Cost]] = []
    for number in range(rounds + 1):  # the first warms connections and memory
        calls = [lambda: restore(bench.tier, 1, blank), bench.raw_download]
        costs = [cost_of(call) for call in calls[:: (-1) ** number]][:: (-1) ** number]
        turns.append((costs[0], costs[1]))
        record({"turn": len(turns), "costs": costs}, is_printed=False)
    assert all(torch.equal(bench.blank[name], bench.state[name]) for name in bench.state)
    reads = bench.tier.block_reads
    return {
        "restore_over_plain_reads": statistics.median(
            plain.wall_s / ours.wall_s for ours, plain in turns[1:]
        ),
        "restore_mb_per_s": statistics.median(nbytes / 1e6 / ours.wall_s for ours, _ in turns[1:]),
        "processor_s_beyond_plain_reads": statistics.median(
            ours.cpu_s - plain.cpu_s for ours, plain in turns[1:]
        ),
        "asked_twice": reads.hedged / reads.reads,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=512, help="size of the checkpoint whose rate is measured")
    parser.add_argument("--without-dcp", action="store_true")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as place, server() as url:
        folder = Path(place)
        report: dict[str, Any] = {"rate": rates(url, args.mib << 20, args.rounds, folder / "rate")}
        report["amplification"] = amplification(make_state(), url, folder)
        report["load"] = os.getloadavg()[0]
        if not args.without_dcp:
            for name, ratio in dcp_amplification(folder).items():
                report["amplification"][name]["dcp"] = ratio
    if args.json:
        print(json.dumps(report, indent=1))
        return
    for name, value in report["rate"].items():
        print(f"  {name:34} {value:10.3f}")
    for name, values in report["amplification"].items():
        print(f"  {name:20}", "  ".join(f"{of} {ratio:.2f}" for of, ratio in values.items()))


if __name__ == "__main__":
    run_bench(main)
