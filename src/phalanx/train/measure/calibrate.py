"""Measure this machine for the planner: operations, copies, collectives, and steps of the trainer itself.

A plan is as good as the figures of its machine, and a data sheet has few of them. Here every kind of work that the planner's
formulas have a constant for is timed over a range of sizes. The result is plain points, (sizes, seconds) by the name of the
work; ``phalanx_plan.fit_profile`` fits constants to them and judges the fit.

Noise only slows down, so the least of several rounds is taken. On a machine with other users, wall-clock time includes their
work; the processor time of a rank does not, and it misses only the waiting for peers, which is short on one machine.

Collectives and steps need ranks, and each rank is a process of its own, as in a run. A step is that of ``phalanx.train.step.step`` on
made-up tokens: model, axes, sharding, optimizer and reduction are the trainer's; only files, checkpoints and the display are left out.
Memory is measured by the trainer's own meter (``phalanx.train.step.meters``).
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from phalanx.hardware.local.device import device_of_rank, on_gpu, wait_for_device
from phalanx.observe.ledger import Ledger
from phalanx.parallel.mesh import build_mesh
from phalanx.parallel.process_group.rendezvous import RankEnvironment, join, leave
from phalanx.parallel.torch_compat import all_gather_single, sum_scatter_along
from phalanx.process.child import Child, describe_exit, die_with_parent, end_all
from phalanx.run.directory.files import write_atomically
from phalanx.run.fields import RunFileError
from phalanx.run.read import spec_from_table, to_table
from phalanx.run.spec import RunSpec
from phalanx.train.assemble import make_deterministic
from phalanx.train.compose import build_model
from phalanx.train.measure.dry_run import random_batches
from phalanx.train.step.meters import MemoryMeter, extremes
from phalanx.train.step.state import Built, fill_initial
from phalanx.train.step.step import Stepper

Clock = Literal["wall", "cpu"]
MeasuredPoints = dict[str, list[tuple[tuple[float, ...], float]]]
"""Measurements (sizes, seconds) by the name of the work."""

_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SMALL = (256, 704, 1024)
_LARGE = (256, 512, 1024, 2048, 4096)
_MOST_FLOP = {"cpu": 2e10, "cuda": 2e13}
_COLD_BYTES = {"cpu": 2**27, "cuda": 2**30}
_GPU_SCALE = 4
"""The factor by which matrices are larger on an accelerator."""


@dataclass(frozen=True)
class Settings:
    """The device to measure, the clock, and the effort."""

    device: torch.device
    clock: Clock
    quick: bool = False
    """A quarter of the points, and fewer rounds."""

    @property
    def budget_s(self) -> float:
        """Seconds for one point, by ``clock``."""
        return 0.05 if self.quick else 0.2


def usual_clock(device: torch.device) -> Clock:
    """Processor time on a CPU whose cores are busy; else wall-clock time."""
    busy = os.getloadavg()[0] > 0.75 * (os.cpu_count() or 1)
    return "cpu" if device.type == "cpu" and busy else "wall"


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def best_seconds(work: Callable[[], object], settings: Settings) -> float:
    """Return the least seconds of ``work`` over as many rounds as fit the budget, two at least, after one to warm up.

    With ``clock = "cpu"`` they are the processor's time of this process, else the wall's. Never 0.
    """
    read = time.process_time if settings.clock == "cpu" else time.perf_counter
    work()
    best, spent, rounds = float("inf"), 0.0, 0
    while spent < settings.budget_s or rounds < 2:
        wait_for_device(settings.device)
        begin = read()
        work()
        wait_for_device(settings.device)
        took = max(read() - begin, 1e-9)
        best, spent, rounds = min(best, took), spent + took, rounds + 1
    return best


def operations(settings: Settings) -> MeasuredPoints:
    """Measure matrix products (fp32, on a GPU also bf16), attention, memory-bound operations, copies from the host,
    and the disk. Limits this process to one thread.
    """
    torch.set_num_threads(1)
    points: MeasuredPoints = {}
    for name in ("fp32",) if settings.device.type == "cpu" else ("bf16", "fp32"):
        points[f"matmul.{name}"] = list(_products(settings, _FORMATS[name]))
    points |= _attention(settings)
    points["memory"] = list(_pointwise(settings))
    points["host_copy"] = [_host_copy(settings)]
    points["disk"] = [_disk(settings)]
    return points


def product_sizes(settings: Settings) -> Iterator[tuple[int, int, int]]:
    """Yield (m, n, k) of the products that are timed: rows as of micro-batches, weights of several widths, larger on
    a GPU. Products of too many FLOP are left out; ``quick`` takes every fifth.
    """
    scale = 1 if settings.device.type == "cpu" else _GPU_SCALE
    sizes = [
        (m * scale, n * scale, k * scale)
        for m in _LARGE
        for n in (*_SMALL, 4096)
        for k in (*_SMALL, 4096)
        if 2 * m * n * k * scale**3 <= _MOST_FLOP[settings.device.type]
    ]
    yield from sizes[:: 5 if settings.quick else 1]


def _products(settings: Settings, dtype: torch.dtype) -> Iterator[tuple[tuple[float, ...], float]]:
    for number, (m, n, k) in enumerate(product_sizes(settings)):
        seconds = best_seconds(_product(number % 3, m, n, k, settings.device, dtype), settings)
        yield (m, n, k), seconds


def _product(
    way: int, m: int, n: int, k: int, device: torch.device, dtype: torch.dtype
) -> Callable[[], Tensor]:
    """Return a function that multiplies random ``(m, k)`` by ``(k, n)``, stored as in forward (``way`` 0), for the
    input's gradient (1) or the weight's gradient (2).
    """
    left = torch.randn((k, m) if way == 2 else (m, k), device=device).to(dtype)
    right = torch.randn((n, k) if way == 0 else (k, n), device=device).to(dtype)
    left, right = (left.t() if way == 2 else left), (right.t() if way == 0 else right)
    return lambda: left @ right


def _attention(settings: Settings) -> MeasuredPoints:
    """Measure causal attention, forward and backward, as points ((FLOP,), seconds). Backward is both together minus
    forward, at least a tenth of forward.
    """
    dtype = torch.float32 if settings.device.type == "cpu" else torch.bfloat16
    scale = 1 if settings.device.type == "cpu" else _GPU_SCALE
    points: MeasuredPoints = {"attention.forward": [], "attention.backward": []}
    for batch, heads, length, width in [(1, 4, 256, 64), (2, 8, 512, 64), (1, 8, 1024, 64)][
        : 2 if settings.quick else 3
    ]:
        size = (batch, heads, length * scale, width)
        leaves = [
            torch.randn(size, device=settings.device, dtype=dtype, requires_grad=True) for _ in range(3)
        ]
        forward_s = best_seconds(_attend(leaves), settings)
        both_s = best_seconds(_attend_and_back(leaves), settings)
        # Half of the square: what a causal mask needs.
        flops = 2.0 * batch * heads * (length * scale) ** 2 * width
        points["attention.forward"].append(((flops,), forward_s))
        points["attention.backward"].append(((2.5 * flops,), max(both_s - forward_s, 0.1 * forward_s)))
    return points


def _attend(leaves: Sequence[Tensor]) -> Callable[[], Tensor]:
    query, key, value = leaves
    return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _attend_and_back(leaves: Sequence[Tensor]) -> Callable[[], None]:
    """Return a function that computes attention of ``leaves`` and their gradients."""
    forward = _attend(leaves)
    upstream = torch.ones_like(leaves[0])

    def work() -> None:
        torch.autograd.grad(forward(), list(leaves), upstream)

    return work


def _pointwise(settings: Settings) -> Iterator[tuple[tuple[float, ...], float]]:
    largest = 24 if settings.device.type == "cpu" else 28
    for power in range(12, largest, 4 if settings.quick else 2):
        yield (12.0 * 2**power,), best_seconds(_add(2**power, settings.device), settings)


def _add(elements: int, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that adds two arrays of ``elements`` into new memory. Each call takes another pair, so that
    the operands are cold in all caches.
    """
    pairs = max(1, _COLD_BYTES[device.type] // (8 * elements))
    left = torch.ones(pairs, elements, device=device)
    right, turn = torch.ones_like(left), itertools.cycle(range(pairs))

    def work() -> Tensor:
        place = next(turn)
        return left[place] + right[place]

    return work


def _host_copy(settings: Settings) -> tuple[tuple[float, ...], float]:
    source = torch.ones(2**24, pin_memory=on_gpu(settings.device))
    target = torch.empty(2**24, device=settings.device)
    return (4.0 * 2**24,), best_seconds(lambda: target.copy_(source), settings)


def _disk(settings: Settings) -> tuple[tuple[float, ...], float]:
    """Return the point ((bytes,), seconds) of a temporary file in the working directory, written and synced, by the wall's clock."""
    block = b"\0" * 2**24
    blocks = 1 if settings.quick else 8
    with tempfile.TemporaryFile(dir=Path.cwd()) as file:
        begin = time.perf_counter()
        for _ in range(blocks):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        took = time.perf_counter() - begin
    return (float(len(block) * blocks),), took


_JOIN_TIMEOUT_S = 300.0
_POLL_S = 0.02
_AFTER_FAILURE_S = 3.0
"""Time for the other ranks to report errors of their own once one has failed."""
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
    """Run ``job`` on each of ``ranks`` new processes that form one group, and return the results by rank. All are
    ended at the end, and ``_AFTER_FAILURE_S`` after one has failed. Raises ``RuntimeError`` with the errors of all
    ranks that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        workers: list[Child] = []
        try:
            for rank in range(ranks):
                task = msgspec.json.encode(_RankJob(rank, ranks, folder, job))
                workers.append(Child.start([sys.executable, "-m", __name__], task=task))
            while None in (codes := [worker.exit_code() for worker in workers]) and not any(codes):
                time.sleep(_POLL_S)
            deadline_s = time.monotonic() + _AFTER_FAILURE_S
            codes = [worker.wait(deadline_s - time.monotonic()) for worker in workers]
        finally:
            end_all(workers)
        results = [_result_of(Path(folder) / f"rank-{rank}.json", code) for rank, code in enumerate(codes)]
    failed = [f"rank {rank}: {result.error}" for rank, result in enumerate(results) if result.error]
    if failed:
        raise RuntimeError("; ".join(failed))
    return results


def _result_of(file: Path, code: int | None) -> _RankResult:
    """Return the result in ``file``, or without one the error by the process's exit code, None if it had not ended."""
    if not file.exists():
        return _RankResult(
            "it was ended, as another rank failed" if code is None else f"its process {describe_exit(code)}"
        )
    return msgspec.json.decode(file.read_bytes(), type=_RankResult)


def main() -> None:
    """Run the job on stdin as one rank, in one thread, and write its result, or its error as text, as ``rank-N.json``
    into the job's folder. Exits at once with code 1 after an error.
    """
    die_with_parent()
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=_RankJob)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # warnings of libraries, on which a user of calibrate cannot act
    folder = Path(job.folder)
    device = device_of_rank(job.rank)
    place = RankEnvironment(job.rank, job.ranks, job.rank, (folder / "store").as_uri(), "phalanx")
    try:
        join(place, device, _JOIN_TIMEOUT_S)
        result = _done(job.job)
    except Exception as error:
        result = _RankResult(f"{type(error).__name__}: {error}")
    write_atomically(folder / f"rank-{job.rank}.json", msgspec.json.encode(result), durable=False)
    if result.error:
        os._exit(1)  # A clean exit would wait for ranks that wait for this one.
    leave()


def _done(job: TimeCollectives | MeasureSteps) -> _RankResult:
    """Run a job and return its result. Raises ``RunFileError`` if the run of a measurement is not valid."""
    match job:
        case TimeCollectives(name, clock, quick):
            return _RankResult(points=_time_collectives(Settings(torch.device(name), clock, quick)))
        case MeasureSteps(run, steps):
            spec, problems = spec_from_table({**run, "model": {**run["model"], "preset": ""}}, {})
            if spec is None:
                raise RunFileError(Path("run of the calibration"), problems)
            return _RankResult(step=_steps(spec, steps))


def measure_collectives(settings: Settings, members: int) -> MeasuredPoints:
    """Time each of ``COLLECTIVES`` between ``members`` new processes. Return for each collective points ((members,
    bytes), seconds); the seconds are the slowest rank's. Raises ``RuntimeError`` if a rank failed.
    """
    job = TimeCollectives(str(settings.device), settings.clock, settings.quick)
    by_rank = [result.points for result in _on_ranks(members, job)]
    points: MeasuredPoints = {}
    for name in COLLECTIVES:
        columns = zip(*(result[name] for result in by_rank), strict=True)
        points[name] = [(column[0][0], max(seconds for _, seconds in column)) for column in columns]
    return points


def _time_collectives(settings: Settings) -> MeasuredPoints:
    """Time each collective at several sizes from 4 KiB to 16 MiB (three if ``settings.quick``), as points ((members,
    bytes), seconds). A collective of all members. A message point to point counts as half of there and back.
    """
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
    """Return the least seconds of a call of ``work`` over ``rounds`` + 1 rounds of four calls. All ranks must do equally
    many, so there is no budget of time.
    """
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
    """Return a function that runs the collective ``name`` on fp32 buffers of about ``elements``, made beforehand; any other name is
    point to point."""
    ranks, everyone = dist.get_world_size(), dist.group.WORLD
    assert everyone is not None, "the ranks have joined"
    buffer = torch.ones(elements // ranks * ranks, device=device)
    piece = torch.ones(elements // ranks, device=device)
    if name == "all_gather":
        return lambda: all_gather_single(buffer, piece, everyone)
    if name == "reduce_scatter":
        return lambda: sum_scatter_along(buffer, 0, everyone)
    if name == "all_reduce":
        return lambda: dist.all_reduce(buffer)
    if name == "all_to_all":
        received = torch.empty_like(buffer)
        return lambda: dist.all_to_all_single(received, buffer)
    return lambda: _there_and_back(buffer)


def _there_and_back(buffer: torch.Tensor) -> None:
    """Send ``buffer`` from the first rank to the second, and back: one way alone would be over for the sender before it arrived."""
    first, rank = (dist.send, dist.recv), dist.get_rank()
    if rank < 2:
        for pass_on in first if rank == 0 else reversed(first):
            pass_on(buffer, 1 - rank)


def measure_step(spec: RunSpec, ranks: int, steps: int = 4) -> MeasuredStep:
    """Return the median of ``steps`` steps of ``spec`` on ``ranks`` new processes of this machine, after two that warm
    up. Times are the slowest rank's, memory is the most of any rank. Raises ``RuntimeError`` if a rank failed.
    """
    results = _on_ranks(ranks, MeasureSteps(to_table(spec), steps))
    measured = [result.step for result in results if result.step is not None]
    return MeasuredStep(
        wall_s=max(step.wall_s for step in measured),
        cpu_s=max(step.cpu_s for step in measured),
        memory_bytes=measured[0].memory_bytes,
    )


def _steps(spec: RunSpec, steps: int) -> MeasuredStep:
    """Return the median wall and processor seconds of ``steps`` steps on random tokens, after two to warm up, and the
    memory of the second. A collective of the ranks.
    """
    device = device_of_rank(dist.get_rank())
    make_deterministic(spec, device)
    built = build_model(spec, build_mesh(spec, dist.get_world_size(), device))
    fill_initial(built.model.parts, built.placement, spec)
    stepper = Stepper(built, random_batches(spec), Ledger())
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
    """Run the second step and return its bytes by kind, the most of any rank. A collective."""
    meter = MemoryMeter(built.model.parts, built.optimizer_tensors, device, compiled=False)
    with meter:
        stepper.run(2, before_update=meter.gradients_complete)
    return extremes(meter.result(), device)[0]


if __name__ == "__main__":
    main()
