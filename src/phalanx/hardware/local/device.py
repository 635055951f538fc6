"""The device that a rank computes on: the same calls for a CPU and a GPU, its queue times, its measured peaks, time in collectives, and memory kept between steps.

On a CPU everything has happened when a call returns, so most of this does nothing there. A GPU has a queue (a stream) that the
host runs ahead of, a current device for each thread of the host, and an allocator that keeps what is freed.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

_GPU = "cuda"
"""PyTorch's name for GPUs, AMD's too."""


def on_gpu(device: torch.device) -> bool:
    """Return True if work on ``device`` is queued there and runs on while the host continues.

    Raises ``ValueError`` for an accelerator of another kind. All that a CPU needs not do, such as waiting, would be left out there.
    """
    if device.type not in (_GPU, "cpu", "meta"):
        raise ValueError(
            f'Phalanx computes on CPUs and on GPUs that PyTorch calls "{_GPU}", not on {device.type}: use one of these devices'
        )
    return device.type == _GPU


def gpus() -> int:
    """Number of GPUs that PyTorch sees on this machine."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device_of_rank(local_rank: int) -> torch.device:
    """The device of the process of this number on this machine: a GPU of its own, where there are GPUs."""
    return torch.device(_GPU, local_rank) if gpus() else torch.device("cpu")


def current_gpu() -> torch.device:
    """The GPU that is the current one of this thread."""
    return torch.device(_GPU, torch.cuda.current_device())


def make_current(device: torch.device) -> None:
    """Make a GPU the current one of this thread.

    Whatever is made without a device is then made there: FSDP's buffers and streams, NCCL's communicators, and the
    first context of the process, which would else take memory of the machine's first GPU as well.
    """
    if on_gpu(device):
        torch.cuda.set_device(device)


def wait_for_device(device: torch.device) -> None:
    """Wait until everything queued on ``device``, on any stream, is done. Raises what went wrong there."""
    if on_gpu(device):
        torch.cuda.synchronize(device)


def wait_for_stream(device: torch.device) -> None:
    """Wait until everything queued on the current stream of ``device`` is done."""
    if on_gpu(device):
        torch.cuda.current_stream(device).synchronize()


def answers(device: torch.device) -> bool:
    """Return True if ``device`` can still compute. Waits for the work queued there.

    After an illegal access, an uncorrectable memory error and the like, a process gets the same error from every
    later call to its GPU; only a new process helps.
    """
    try:
        wait_for_device(device)
    except RuntimeError:
        return False
    return True


def peak_memory_bytes(device: torch.device) -> int | None:
    """The most memory that this process's tensors have taken on a GPU; ``None`` on a CPU."""
    return torch.cuda.max_memory_allocated(device) if on_gpu(device) else None


def forget_peak_memory(device: torch.device) -> None:
    """Reset ``peak_memory_bytes`` to what a GPU's tensors take now."""
    if on_gpu(device):
        torch.cuda.reset_peak_memory_stats(device)


def held_memory_bytes(device: torch.device) -> int:
    """Return the bytes of memory of this process: on a GPU the most that its tensors have taken so far, on a CPU what
    is resident now (the peak where that is unknown).
    """
    on_device = peak_memory_bytes(device)
    if on_device is not None:
        return on_device
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return most_memory_bytes(device)


def most_memory_bytes(device: torch.device) -> int:
    """Return the most bytes that this process has had so far: on a GPU those of its tensors, on a CPU resident ones."""
    on_device = peak_memory_bytes(device)
    if on_device is not None:
        return on_device
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def temperature_c(device: torch.device) -> float | None:
    """Return the temperature of a GPU in degrees Celsius; ``None`` for a CPU, or without NVML (package
    ``nvidia-ml-py``, optional) or its answer.
    """
    if not on_gpu(device):
        return None
    try:
        return float(torch.cuda.temperature(device))
    except Exception:  # pynvml's error classes need pynvml, and no failure of it may end a step
        return None


def gpu_use(device: torch.device) -> dict[str, float]:
    """Return the use of a GPU: ``gpu``, the share of the last moments in which it computed (0 to 1), and
    ``gpu_watts``, its power.

    Empty for a CPU, and without NVML or its answer.
    """
    if not on_gpu(device):
        return {}
    try:
        return {
            "gpu": torch.cuda.utilization(device) / 100,
            "gpu_watts": torch.cuda.power_draw(device) / 1000,
        }
    except Exception:  # as for the temperature
        return {}


def device_name(device: torch.device) -> str | None:
    """The name of a GPU as its driver gives it; ``None`` for a CPU."""
    return torch.cuda.get_device_name(device) if on_gpu(device) else None


def give_back_memory(device: torch.device) -> None:
    """Return memory that PyTorch keeps for later tensors to the driver, for NCCL and other processes to take."""
    if on_gpu(device):
        torch.cuda.empty_cache()


def brought(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a small tensor of the host on ``device``, without waiting for a GPU; on a CPU, ``tensor`` itself.

    It is copied by way of page-locked memory: a copy to a GPU from any other memory keeps the host until all that was
    queued before it is done. PyTorch keeps such memory for the next time, and does not give it out again before the
    copy is done. A tensor with gaps between its elements is made contiguous first, else it would be copied by way of
    ordinary memory after all (ATen's ``copy_requires_temporaries``).
    """
    if not on_gpu(device):
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def fetched(tensor: Tensor) -> NDArray[Any]:
    """The numbers of a small tensor of a device in the host's memory, which waits for all that was queued before."""
    return tensor.cpu().numpy()


# Freed memory that a CPU rank keeps for later steps.
#
# A step allocates and frees the same gigabytes of activations, logits and gradients repeatedly. The C library (glibc) returns
# large blocks to the system at once. The system fills each page with zeros before it maps it again: for a block of 64 MB that
# took eight times as long as writing it once. On a GPU, PyTorch's allocator keeps freed memory anyway.


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
"""Parameters of mallopt(3)."""
_NEVER, _NONE, _PAD_BYTES = -1, 0, 64 << 20


def keep_freed_memory(device: torch.device) -> bool:
    """Make this process keep freed memory for its own later tensors, if it computes on a CPU; return ``True`` if it
    will.

    Its memory then never falls below its peak. Only with glibc as the C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if on_gpu(device) or mallopt is None:
        return False
    # No separate mapping for large tensors, no trimming of the heap's end, and growth by 64 MiB at once.
    settings = ((_MMAP_MAX, _NONE), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _PAD_BYTES))
    done = [mallopt(parameter, value) == 1 for parameter, value in settings]
    return all(done)


# Time that a device's queue spends in parts of a step, read after the step without blocking the host.
#
# The host queues work, such as a wait for a collective, in microseconds, and the GPU executes it later. So the time is measured
# by two events in the GPU's queue, around the work (https://docs.pytorch.org/docs/2.11/generated/torch.cuda.Event.html,
# ``enable_timing``). They are read when all work is done.


_NS_PER_MS = 1e6


class QueueEvent(Protocol):
    """A place in a queue of which the device notes the time when it comes there."""

    @abstractmethod
    def record(self) -> None:
        """Put it behind all that is in the current queue."""

    @abstractmethod
    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from here to ``end``, an event of the same kind; both must have been reached."""


class QueueTimes:
    """Adds up the time of parts of one queue since it was last read.

    Args:
        queue: Returns the queue that work is put in now. Work in another queue than at construction runs beside it, and is not counted.
        event: Makes events, which are used again.
    """

    def __init__(self, queue: Callable[[], object], event: Callable[[], QueueEvent]) -> None:
        self._queue, self._make = queue, event
        self._own = queue()
        self._free: list[QueueEvent] = []
        self._spans: list[tuple[QueueEvent, QueueEvent]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count the time that the queue takes for the work that is put there inside the ``with``, waiting included.

        Work on another queue is not counted.
        """
        if self._queue() != self._own:
            yield
            return
        start = self._recorded()
        try:
            yield
        finally:
            self._spans.append((start, self._recorded()))

    def take_ns(self) -> int:
        """The time counted since the last call, all of which must be over on the device: wait for it before."""
        total = sum(start.elapsed_time(end) for start, end in self._spans)
        self.forget()
        return round(total * _NS_PER_MS)

    def forget(self) -> None:
        """Drop what was measured since the last call."""
        self._free += [event for span in self._spans for event in span]
        self._spans = []

    def _recorded(self) -> QueueEvent:
        """Return an event, recorded now, of those that are free or a new one."""
        event = self._free.pop() if self._free else self._make()
        event.record()
        return event


def queue_times(device: torch.device) -> QueueTimes | None:
    """Return the times of the queue that this thread's work goes to; ``None`` for a CPU, where the host's clock measures the same."""
    if not on_gpu(device):
        return None

    def event() -> QueueEvent:
        made: QueueEvent = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        return made

    return QueueTimes(lambda: torch.cuda.current_stream(device), event)


# The measured peak of matrix products, with the library, format and thread count of the training step.
#
# A data sheet's peak is the limit of the silicon; the measured one is the practical limit of a step. MFU on a CPU refers to the
# measured one.


_BUDGET_S = 0.4
_FIRST_CPU_SIZE, _CPU_SIZE = 256, 2048


def measure_matmul_flops(device: torch.device, dtype: torch.dtype, budget_s: float = _BUDGET_S) -> float:
    """Return the best rate, in FLOP/s, at which this process multiplies two square matrices of ``dtype`` on
    ``device``.

    8,192 rows and columns on a GPU, on a CPU up to 2,048. On a CPU sizes double while a product takes less than an
    eighth of ``budget_s``: few threads, which reach their plateau with small matrices, measure small ones. A CPU
    without kernels for ``dtype`` (bf16 on processors with AVX2 alone: 1 GFLOP/s) does not take minutes.

    It is the best of as many rounds as fit into the budget (two at least, after one to warm up), because noise only
    ever slows down.
    """
    size = _FIRST_CPU_SIZE if device.type == "cpu" else 8192
    best = _best_s(device, dtype, size, 0.0)
    while device.type == "cpu" and size < _CPU_SIZE and 8 * best < budget_s:
        size *= 2
        best = _best_s(device, dtype, size, 0.0)
    if 2 * best < budget_s:  # else the two rounds have taken all of it
        best = min(best, _best_s(device, dtype, size, budget_s))
    return 2 * size**3 / best


def _best_s(device: torch.device, dtype: torch.dtype, size: int, budget_s: float) -> float:
    """Return the shortest time, in seconds, of a product of two random matrices ``(size, size)``, over as many rounds
    as fill ``budget_s`` seconds, at least two, after one to warm up.
    """
    # Random numbers, as a training step has: a GPU at its power limit multiplies constants more than a tenth faster.
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
    out = torch.mm(left, right)
    best, spent, rounds = float("inf"), 0.0, 0
    while spent < budget_s or rounds < 2:
        wait_for_device(device)
        begin = time.perf_counter()
        torch.mm(left, right, out=out)
        wait_for_device(device)
        elapsed = time.perf_counter() - begin
        best, spent, rounds = min(best, elapsed), spent + elapsed, rounds + 1
    return best


# The measured rate of memory copies: the limit of operations that compute little.
#
# A copy reads and writes every byte once, as STREAM's does (McCalpin, 1995). The arrays are somewhat larger than the last-level
# caches. On a GPU that a run has filled, more would not fit, or the allocator would release blocks that the next step needs.


_ROUNDS = 4


def measure_copy_bytes_per_s(device: torch.device) -> float:
    """Return the best rate, in bytes read and written per second, at which this process copies memory of ``device``;
    takes a few milliseconds.
    """
    size = (256 << 20) if on_gpu(device) else (32 << 20)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best_s = float("inf")
    for _ in range(_ROUNDS):
        wait_for_device(device)
        begin_s = time.perf_counter()
        target.copy_(source)
        wait_for_device(device)
        best_s = min(best_s, time.perf_counter() - begin_s)
    return 2 * size / best_s


# Exposed communication time: the time that a rank waits in collectives.
#
# A gloo collective blocks the calling thread, so all of its time is exposed. On a GPU, collectives run on their own streams, and the
# host time of launching them is not communication. There the clock measures how long the compute stream waits for them.


@dataclass
class CommClock:
    """Total time spent waiting for collectives since the last read."""

    blocking: bool
    """True if collectives block the host (gloo on CPU tensors)."""
    total_ns: int = 0
    on_enter: Callable[[], None] | None = None
    """Called before each collective."""
    queue: QueueTimes | None = None
    """Measures waits on a device whose collectives do not block the host; ``None`` measures nothing there."""

    @classmethod
    def of(cls, device: torch.device) -> CommClock:
        """Return the clock of a rank that computes on ``device``."""
        return cls(blocking=not on_gpu(device), queue=queue_times(device))

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Add the time inside the ``with`` to ``total_ns`` if calls block the host, else to the device queue's times.

        Calls ``on_enter`` first.
        """
        if self.on_enter is not None:
            self.on_enter()
        begin = time.monotonic_ns()
        try:
            with nullcontext() if self.queue is None else self.queue.measure():
                yield
        finally:
            if self.blocking:
                self.total_ns += time.monotonic_ns() - begin

    def take_ns(self) -> int:
        """Return the nanoseconds measured since the last call. If collectives do not block, the device must have finished them."""
        total = self.total_ns + (0 if self.queue is None else self.queue.take_ns())
        self.total_ns = 0
        return total

    def forget(self) -> None:
        """Discard what was measured since the last call."""
        self.total_ns = 0
        if self.queue is not None:
            self.queue.forget()
