"""The part of a calibration that needs ranks: collectives between processes of this machine, and real steps of the trainer.

Each rank is a process of its own, as in a run. A step is that of ``phalanx.train.step.step`` on made-up tokens: model, axes,
sharding, optimizer and reduction are the trainer's; only files, checkpoints and the display are left out. Memory is measured by
the trainer's own meter (``phalanx.train.step.meters``).
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from phalanx.hardware.local.device import device_of_rank, wait_for_device
from phalanx.observe.ledger import Ledger
from phalanx.parallel.mesh.mesh import build_mesh
from phalanx.parallel.mesh.torch_compat import all_gather_single, sum_scatter_along
from phalanx.parallel.process_group.rendezvous import RankEnvironment, join, leave
from phalanx.process.child import Child, die_with_parent, end_all
from phalanx.run.directory.files import write_atomically
from phalanx.run.fields import RunFileError
from phalanx.run.read import spec_from_table, to_table
from phalanx.run.spec import RunSpec
from phalanx.train.assembly.assemble import make_deterministic
from phalanx.train.assembly.compose import build_model
from phalanx.train.measure.calibrate import Clock, MeasuredPoints, Settings
from phalanx.train.step.meters import MemoryMeter, extremes
from phalanx.train.step.placement import Built
from phalanx.train.step.state import fill_initial
from phalanx.train.step.step import Stepper

_JOIN_TIMEOUT_S = 300.0
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "point_to_point")


@dataclass(frozen=True)
class MeasuredStep:
    """A step of the trainer: the times of the slowest rank, the memory of the rank that holds most."""

    wall_s: float
    cpu_s: float
    """Processor time of all threads of a rank."""
    memory_bytes: dict[str, int]
    """Bytes by kind and "total", as ``phalanx.train.step.meters`` names them."""


class TimeCollectives(msgspec.Struct, frozen=True, tag=True):
    """The job of timing every collective between the ranks."""

    device: str
    clock: Clock
    quick: bool


class MeasureSteps(msgspec.Struct, frozen=True, tag=True):
    """The job of running steps of the trainer."""

    run: dict[str, Any]
    """The resolved run as a table."""
    steps: int


class _RankJob(msgspec.Struct, frozen=True):
    """The job of a rank, as its new process reads it on its standard input."""

    rank: int
    ranks: int
    folder: str
    """Where the ranks meet, and where each leaves its result."""
    job: TimeCollectives | MeasureSteps


class _RankResult(msgspec.Struct, frozen=True):
    """The result of a rank, as it leaves it in ``rank-N.json``: an error, or the result of its kind of job."""

    error: str = ""
    points: MeasuredPoints = {}
    step: MeasuredStep | None = None


def _on_ranks(ranks: int, job: TimeCollectives | MeasureSteps) -> list[_RankResult]:
    """Does ``job`` on each of ``ranks`` new processes that form one group; the results by rank."""
    with tempfile.TemporaryDirectory() as folder:
        workers: list[Child] = []
        try:
            for rank in range(ranks):
                task = msgspec.json.encode(_RankJob(rank, ranks, folder, job))
                workers.append(Child.start([sys.executable, "-m", __name__], task=task))
            for worker in workers:
                worker.wait(math.inf)
        finally:
            end_all(workers)
        found = [_result_of(Path(folder) / f"rank-{rank}.json") for rank in range(ranks)]
    failed = [f"rank {rank}: {one.error}" for rank, one in enumerate(found) if one.error]
    if failed:
        raise RuntimeError("; ".join(failed))
    return found


def _result_of(file: Path) -> _RankResult:
    if not file.exists():
        return _RankResult("its process died")
    return msgspec.json.decode(file.read_bytes(), type=_RankResult)


def main() -> None:
    """The process of one rank."""
    die_with_parent()
    given = msgspec.json.decode(sys.stdin.buffer.read(), type=_RankJob)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of libraries: nobody who calibrates can act on them
    folder = Path(given.folder)
    device = device_of_rank(given.rank)
    place = RankEnvironment(given.rank, given.ranks, given.rank, (folder / "store").as_uri(), "phalanx")
    try:
        join(place, device, _JOIN_TIMEOUT_S)
        result = _done(given.job)
    except Exception as error:
        result = _RankResult(f"{type(error).__name__}: {error}")
    finally:
        leave()
    write_atomically(folder / f"rank-{given.rank}.json", msgspec.json.encode(result), durable=False)


def _done(job: TimeCollectives | MeasureSteps) -> _RankResult:
    match job:
        case TimeCollectives(name, clock, quick):
            return _RankResult(points=_time_collectives(Settings(torch.device(name), clock, quick)))
        case MeasureSteps(run, steps):
            spec, problems = spec_from_table({**run, "model": {**run["model"], "preset": ""}}, {})
            if spec is None:
                raise RunFileError(Path("run of the calibration"), problems)
            return _RankResult(step=_steps(spec, steps))


def collectives(settings: Settings, members: int) -> MeasuredPoints:
    """Each collective between ``members`` ranks, sizes (members, bytes); the slowest rank's time."""
    job = TimeCollectives(str(settings.device), settings.clock, settings.quick)
    by_rank = [found.points for found in _on_ranks(members, job)]
    points: MeasuredPoints = {}
    for name in COLLECTIVES:
        columns = zip(*(found[name] for found in by_rank), strict=True)
        points[name] = [(one[0][0], max(seconds for _, seconds in one)) for one in columns]
    return points


def _time_collectives(settings: Settings) -> MeasuredPoints:
    powers = (12, 20, 24) if settings.quick else (12, 14, 16, 18, 20, 22, 24)
    points: MeasuredPoints = {}
    for name in COLLECTIVES:
        points[name] = []
        for power in powers:
            work, rounds = _collective(name, 2**power // 4, settings.device), 3 if settings.quick else 7
            seconds = _rounds(work, rounds, settings) / (2 if name == "point_to_point" else 1)
            points[name].append(((float(dist.get_world_size()), float(2**power)), seconds))
    return points


def _rounds(work: Callable[[], object], rounds: int, settings: Settings) -> float:
    """The least of so many rounds: all ranks must do equally many, so that a budget of time will not do."""
    read = time.process_time if settings.clock == "cpu" else time.perf_counter
    best = float("inf")
    for _ in range(rounds + 1):
        dist.barrier()
        begin = read()
        # Four in a row, so that how ranks leave the barrier counts little.
        for _ in range(4):
            work()
        wait_for_device(settings.device)
        best = min(best, (read() - begin) / 4)
    return max(best, 1e-9)


def _collective(name: str, elements: int, device: torch.device) -> Callable[[], object]:
    ranks, everyone = dist.get_world_size(), dist.group.WORLD
    assert everyone is not None, "the ranks have joined"
    whole = torch.ones(elements // ranks * ranks, device=device)
    piece = torch.ones(elements // ranks, device=device)
    if name == "all_gather":
        return lambda: all_gather_single(whole, piece, everyone)
    if name == "reduce_scatter":
        return lambda: sum_scatter_along(whole, 0, everyone)
    if name == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if name == "all_to_all":
        received = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(received, whole)
    return lambda: _there_and_back(whole)


def _there_and_back(whole: torch.Tensor) -> None:
    """From the first rank to the second, and back: one way alone would be over for the sender before it arrived."""
    first, rank = (dist.send, dist.recv), dist.get_rank()
    if rank < 2:
        for pass_on in first if rank == 0 else reversed(first):
            pass_on(whole, 1 - rank)


def measure_step(spec: RunSpec, ranks: int, steps: int = 4) -> MeasuredStep:
    """The median of ``steps`` steps of ``spec`` on ``ranks`` ranks of this machine, after two that warm up."""
    results = _on_ranks(ranks, MeasureSteps(to_table(spec), steps))
    found = [one.step for one in results if one.step is not None]
    return MeasuredStep(
        wall_s=max(one.wall_s for one in found),
        cpu_s=max(one.cpu_s for one in found),
        memory_bytes=found[0].memory_bytes,
    )


def _steps(spec: RunSpec, steps: int) -> MeasuredStep:
    device = device_of_rank(dist.get_rank())
    make_deterministic(spec, device)
    built = build_model(spec, build_mesh(spec, dist.get_world_size(), device))
    fill_initial(built.model.parts, built.placement, spec)
    stepper = Stepper(built, _batches(spec, built), Ledger())
    stepper.run(1)
    memory = _memory(built, stepper, device)
    wall, cpu = [], []
    for number in range(3, 3 + steps):
        dist.barrier()
        begin, begin_cpu = time.perf_counter(), time.process_time()
        stepper.run(number)
        wall.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - begin_cpu)
    return MeasuredStep(float(np.median(wall)), float(np.median(cpu)), memory)


def _memory(built: Built, stepper: Stepper, device: torch.device) -> dict[str, int]:
    """Runs the second step and returns the memory that it holds, by kind, the most of any rank."""
    meter = MemoryMeter(
        built.model.parts,
        lambda: [part.tensor for held in built.optimizer.state().values() for part in held],
        device,
        compiled=False,
    )
    with meter:
        stepper.run(2, before_update=meter.gradients_complete)
    return extremes(meter.result(), device)[0]


def _batches(spec: RunSpec, built: Built) -> Iterator[NDArray[np.int64]]:
    """Made-up tokens: speed does not depend on what they say."""
    random = np.random.default_rng(0)
    per_slot = spec.train.batch_size // spec.train.slots
    while True:
        for _ in built.rounds:
            yield random.integers(
                0, spec.model.vocab_size, (per_slot, spec.train.seq_len + 1), dtype=np.int64
            )


if __name__ == "__main__":
    main()
