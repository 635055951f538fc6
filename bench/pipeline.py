"""How much of a slot each pipeline schedule leaves a rank idle, beside what its paper says.

Stages do not compute but sleep, as long for the gradients of inputs and of weights as for forward, so that four ranks have
two cores' worth of time each whatever the machine; everything else (messages, autograd, the interpreter) is the real thing.
``measured`` is the share of the slot, from the common start to the last rank's end, that the ranks did not sleep away;
``closed form`` is ``phalanx.parallel.pipeline.schedules.bubble``; ``waited`` is what the ranks' clocks give the ledger as bubble
(without the wait for the last rank after the slot). Of several slots the one that idled least: other programs only add. And: what one rank pays to know its schedule, against PyTorch's class of the same schedule.

    python bench/pipeline.py [--json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining.schedules as torch_schedules
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn

from phalanx.model.layers.linear import Linear
from phalanx.parallel.pipeline.runner import Pipeline
from phalanx.parallel.pipeline.schedules import Schedule, ScheduleName, bubble
from phalanx.parallel.process_group.rendezvous import RankEnvironment, join, leave

SCHEDULES: list[tuple[ScheduleName, int]] = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("zbv", 2),
    ("dualpipev", 2),
]
PIPELINES = (2, 4)
MICRO_BATCHES = 8
RANK_S = 0.06
"""Forward of one micro-batch through all stages of a rank."""
SLOTS = 4
LARGE = 64, 512
"""Ranks and micro-batches of the schedule whose making is timed."""


class Bed:
    """Where a rank sleeps, and how long it really did."""

    def __init__(self) -> None:
        self.slept_s = 0.0

    def sleep(self, seconds: float) -> None:
        """Sleeps at least ``seconds``."""
        begin = time.perf_counter()
        time.sleep(seconds)
        self.slept_s += time.perf_counter() - begin


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bed: Bed, seconds: float) -> Tensor:
        ctx.bed, ctx.seconds = bed, seconds
        bed.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        ctx.bed.sleep(ctx.seconds)
        return upstream[0], None, None


class Sleeper(nn.Module):
    """A stage that takes ``seconds`` for forward, for its input's gradient and for its weights'."""

    def __init__(self, bed: Bed, seconds: float) -> None:
        super().__init__()
        self.bed, self.seconds = bed, seconds
        self.linear = Linear(4, 4, bias=False)
        self.linear.weight.register_hook(lambda _: bed.sleep(seconds))  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        """``(b, s, 4)`` to ``(b, s, 4)``."""
        return self.linear(_Sleep.apply(x, self.bed, self.seconds))  # type: ignore[no-any-return,no-untyped-call]


class Nothing:
    """Parameters add up their gradients themselves."""

    def computing(self, part: int, slot: int, *, last: bool, postponed: bool) -> AbstractContextManager[None]:
        """Encloses nothing."""
        del part, slot, last, postponed
        return nullcontext()


def slots(schedule: Schedule) -> list[tuple[float, float]]:
    """Shares of the time of several slots: in which this rank did not sleep, and in which it waited by its clock."""
    group = dist.group.WORLD
    assert group is not None
    seconds, device = RANK_S / schedule.per_rank, torch.device("cpu")
    bed = Bed()
    parts = [Sleeper(bed, seconds) for _ in range(schedule.per_rank)]
    pipeline = Pipeline(parts, schedule, (group, group), (1, 4), torch.float32, device)
    micro_batches = [torch.zeros(1, 1, 4, requires_grad=True) for _ in range(MICRO_BATCHES)]

    def forward(part: nn.Module, x: Tensor, number: int) -> Tensor:
        del number
        y: Tensor = part(x)
        return y.sum() if pipeline.part_of.get(schedule.stages - 1) == parts.index(part) else y

    found = []
    for _ in range(SLOTS):
        dist.barrier()
        pipeline.clock.take_ns()
        bed.slept_s = 0.0
        begin = time.perf_counter()
        pipeline.run(micro_batches, forward, [1.0], Nothing())
        waited_s = pipeline.clock.take_ns() / 1e9
        dist.barrier()
        whole_s = time.perf_counter() - begin
        found.append((1 - bed.slept_s / whole_s, waited_s / whole_s))
    return found


def _rank(rank: int, ranks: int, meeting_point: str, out: str) -> None:
    torch.set_num_threads(1)
    join(RankEnvironment(rank, ranks, rank, meeting_point, "phalanx"), torch.device("cpu"), 60.0)
    rows = []
    for name, per_rank in SCHEDULES:
        found: list[list[tuple[float, float]]] = [[] for _ in range(ranks)]
        dist.all_gather_object(found, slots(Schedule(name, ranks, per_rank)))
        # Over the ranks, slot by slot: (idle, waited).
        by_slot = [tuple(map(mean, zip(*of_slot, strict=True))) for of_slot in zip(*found, strict=True)]
        measured, waited = min(by_slot)
        closed = bubble(name, ranks, MICRO_BATCHES, per_rank)
        rows.append(
            {
                "schedule": name,
                "pipeline": ranks,
                "micro-batches": MICRO_BATCHES,
                "measured": measured,
                "closed form": closed,
                "ratio": measured / closed,
                "waited": waited,
            }
        )
    leave()
    if rank == 0:
        Path(out).write_text(json.dumps(rows))


def bubbles(ranks: int) -> list[dict[str, Any]]:
    """Rows for a pipeline of ``ranks``."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        multiprocessing.spawn(_rank, (ranks, (Path(folder) / "store").as_uri(), str(out)), nprocs=ranks)  # type: ignore[no-untyped-call]
        rows: list[dict[str, Any]] = json.loads(out.read_text())
        return rows


def seconds_of(work: Callable[[], object]) -> float:
    """How long ``work`` takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def making() -> list[dict[str, Any]]:
    """The time in which a rank in the middle makes its list and its neighbors', and PyTorch's lists for all ranks."""
    ranks, micro_batches = LARGE
    rows = []
    for name, of_torch in (
        ("interleaved", torch_schedules.ScheduleInterleaved1F1B),
        ("zbv", torch_schedules.ScheduleZBVZeroBubble),
        ("dualpipev", torch_schedules.ScheduleDualPipeV),
    ):
        schedule = Schedule(name, ranks, 2)

        def ours(schedule: Schedule = schedule) -> None:
            rank = ranks // 2
            schedule.actions(rank, micro_batches)
            for neighbor in (rank - 1, rank + 1):
                list(schedule.sent(schedule.actions(neighbor, micro_batches), rank))

        ours_s = median(seconds_of(ours) for _ in range(5))
        torch_s = seconds_of(lambda made=of_torch: _of_torch(made))
        rows.append({"schedule": name, "ours_s": ours_s, "torch_s": torch_s, "ratio": torch_s / ours_s})
    return rows


def _of_torch(schedule: Callable[..., object]) -> object:
    """PyTorch's schedule of rank 0, in a process group that only pretends to have the others."""
    import torch.testing._internal.distributed.fake_pg
    from torch.distributed.pipelining import PipelineStage

    ranks, micro_batches = LARGE
    store = dist.HashStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=ranks)
    last = 2 * ranks - 1 if schedule is not torch_schedules.ScheduleInterleaved1F1B else ranks
    device = torch.device("cpu")
    stages = [PipelineStage(nn.Linear(4, 4), stage, 2 * ranks, device) for stage in (0, last)]
    made = schedule(stages, micro_batches, loss_fn=lambda y, _: y.sum())
    dist.destroy_process_group()
    return made


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    idle, made = [row for ranks in PIPELINES for row in bubbles(ranks)], making()
    if as_json:
        print(json.dumps({"bubble": idle, "making": made}, indent=1))
        return
    for rows in (idle, made):
        print("  ".join(f"{name:>13}" for name in rows[0]))
        for row in rows:
            cells = (f"{value:.4f}" if isinstance(value, float) else str(value) for value in row.values())
            print("  ".join(f"{cell:>13}" for cell in cells))
        print()


if __name__ == "__main__":
    main()
