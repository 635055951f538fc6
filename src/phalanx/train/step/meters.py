"""Measurements of a rank in a step: its memory by kind, and its times beside those of all other ranks.

Parameters, buffers, gradients and the optimizer's state are tensors of known size. Activations have no name: they are what a
forward pass allocates and does not free. On a GPU the allocator counts what is
allocated; on a CPU a dispatch mode watches every operation's results, during one step. Under such a mode compiled code would
not run as compiled, so there only tensors with a name are measured.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from phalanx.hardware.local.device import (
    forget_peak_memory,
    held_memory_bytes,
    on_gpu,
    peak_memory_bytes,
    temperature_c,
)
from phalanx.model.autograd import DispatchMode
from phalanx.observe.ledger import NS_PER_S, Bucket
from phalanx.observe.rank_stream import RANK_COLUMNS, RankFrame
from phalanx.parallel.reduction.data_parallel import local
from phalanx.train.step.machines import MachineTable
from phalanx.train.step.step import Stepper

if TYPE_CHECKING:
    from torch._ops import OpOverload


class MemoryMeter:
    """Meter of the step that runs inside ``with meter:``. Call ``gradients_complete`` before its update.

    Args:
        parts: The model as it is on this rank: whole, or some stages of it.
        state: Gives the tensors of the optimizer's state.
        compiled: True if parts of the model are compiled.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        state: Callable[[], Iterable[Tensor]],
        device: torch.device,
        *,
        compiled: bool,
    ) -> None:
        """Prepare to meter a step of ``parts`` on ``device``; ``state`` returns the optimizer's tensors. On a CPU,
        activations of ``compiled`` models cannot be measured.
        """
        self._parts, self._state, self._device = parts, state, device
        self._watch = _Watch() if device.type == "cpu" and not compiled else None
        self._sees = on_gpu(device) or self._watch is not None
        self._hooks: list[RemovableHandle] = []
        self._before: list[int] = []
        self._in_flight = self._activations = self._gradients = self._parameters = 0
        self._storages: set[int] = set()
        """The addresses of this rank's shards of the weights."""

    def __enter__(self) -> MemoryMeter:
        """Start to measure: take the bytes of the weights, hook the forward passes, and reset the peak."""
        shares = self._shares()
        self._parameters = storage_bytes(shares, self._device)
        self._storages = {share.untyped_storage().data_ptr() for share in shares}
        if self._sees:
            for part in self._parts:
                self._hooks.append(part.register_forward_pre_hook(self._forward_begins, prepend=True))
                self._hooks.append(part.register_forward_hook(self._forward_ends))
        if self._watch is not None:
            buffers = (buffer for part in self._parts for buffer in part.buffers())
            self._watch.leave_out([*shares, *buffers, *self._state()])
            self._watch.__enter__()
        elif on_gpu(self._device):
            forget_peak_memory(self._device)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop measuring and remove the hooks."""
        if self._watch is not None:
            self._watch.__exit__(kind, error, traceback)
        for hook in self._hooks:
            hook.remove()

    def gradients_complete(self) -> None:
        """Measure the gradients; all of them are complete now."""
        grads = [local(p.grad) for p in self._parameters_of_parts() if p.grad is not None]
        self._gradients = max(self._gradients, storage_bytes(grads, self._device))

    def result(self) -> MemoryByKind:
        """Return the bytes by kind, after the step; activations are None if they could not be measured. The rest of
        the peak is the last kind, at least 0.
        """
        optimizer = storage_bytes(self._state(), self._device)
        buffers = storage_bytes((buffer for part in self._parts for buffer in part.buffers()), self._device)
        named = self._parameters + self._gradients + optimizer + buffers + self._activations
        peak = self._peak()
        activations = self._activations if self._sees else None
        return MemoryByKind(
            self._parameters, self._gradients, optimizer, activations, buffers, max(0, peak - named)
        )

    def _shares(self) -> list[Tensor]:
        return [local(parameter.detach()) for parameter in self._parameters_of_parts()]

    def _parameters_of_parts(self) -> Iterator[nn.Parameter]:
        return (parameter for part in self._parts for parameter in part.parameters())

    def _allocated(self) -> int:
        """Return the bytes in use, minus gathered weights: of PyTorch's CUDA allocator, or on a CPU of the tensors
        that the watch has seen.
        """
        # While a weight is gathered, its module has the full weight in place of this rank's share.
        allocated = [
            share for share in self._shares() if share.untyped_storage().data_ptr() not in self._storages
        ]
        gathered = storage_bytes(allocated, self._device)
        if self._watch is not None:
            return self._watch.live() - gathered
        return torch.cuda.memory_allocated(self._device) - gathered

    def _peak(self) -> int:
        if self._watch is not None:
            return self._watch.peak + self._watch.left_out_bytes
        return peak_memory_bytes(self._device) or 0

    def _forward_begins(self, *_: object) -> None:
        self._before.append(self._allocated())

    def _forward_ends(self, _module: nn.Module, _args: object, output: object) -> None:
        """Add the bytes that a forward pass has allocated and keeps until its backward begins; keep the most at once.
        Passes without gradients do not count.
        """
        left = self._allocated() - self._before.pop()
        if not (isinstance(output, Tensor) and output.requires_grad):
            return
        self._in_flight += left
        self._activations = max(self._activations, self._in_flight)

        def backward_begins(_gradient: Tensor) -> None:
            self._in_flight -= left

        output.register_hook(backward_begins)  # type: ignore[no-untyped-call]


def extremes(mine: MemoryByKind, device: torch.device) -> tuple[dict[str, int], dict[str, int]]:
    """Return by kind, and for "total", the most and the least bytes of any rank. Kinds that were not measured are
    left out. A collective.
    """
    kinds = {
        kind: value for kind, value in {**asdict(mine), "total": mine.total}.items() if value is not None
    }
    values = torch.tensor([*kinds.values()], dtype=torch.int64, device=device)
    both = torch.stack((values, -values))  # (2, kinds)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    most, least = both.tolist()
    return dict(zip(kinds, most, strict=True)), dict(zip(kinds, (-value for value in least), strict=True))


class _Watch(DispatchMode):
    """A dispatch mode that tracks the storage of every tensor that an operation makes."""

    def __init__(self) -> None:
        """Track nothing yet."""
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._left_out: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0
        self.left_out_bytes = 0

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Exclude the host memory of ``tensors``, which existed before, also if an operation makes a view of it. Sets
        ``left_out_bytes``.
        """
        storages = {
            id(storage): storage
            for tensor in tensors
            if (storage := local(tensor).untyped_storage()).device.type == "cpu"
        }
        self._left_out = {key: weakref.ref(storage) for key, storage in storages.items()}
        self.left_out_bytes = sum(storage.nbytes() for storage in storages.values())

    def live(self) -> int:
        """Return the bytes of all tracked storages that still exist."""
        # Computed each time: FSDP frees gathered weights by shrinking their storage.
        return sum(
            storage.nbytes() for ref in list(self._storages.values()) if (storage := ref()) is not None
        )

    def __torch_dispatch__(
        self,
        func: OpOverload[..., object],
        types: Collection[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run ``func`` and track the storages of its results. Raise the peak to the bytes in use if any is new."""
        result = func(*args, **(kwargs or {}))
        if sum(self._is_new(tensor.untyped_storage()) for tensor in _tensors(result)):
            self.peak = max(self.peak, self.live())
        return result

    def _is_new(self, storage: torch.UntypedStorage) -> bool:
        """Track ``storage`` until it is freed and return True; False if it is tracked already or left out."""
        key = id(storage)
        if key in self._storages or (key in self._left_out and self._left_out[key]() is storage):
            return False
        self._storages[key] = weakref.ref(storage, lambda _: self._storages.pop(key, None))
        return True


def _tensors(result: object) -> Iterator[Tensor]:
    """Yield this rank's tensors in a result, at any depth of lists and tuples."""
    if isinstance(result, Tensor):
        yield local(result)  # a DTensor's own storage has the full tensor's size but no memory
    elif isinstance(result, (tuple, list)):
        for item in result:
            yield from _tensors(item)


def storage_bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Return the bytes of the storages of ``tensors`` on ``device``; tensors elsewhere are skipped, and shared storage is counted once."""
    storages = {
        storage.data_ptr(): storage.nbytes()
        for tensor in tensors
        if tensor.device.type == device.type and (storage := local(tensor).untyped_storage()).nbytes()
    }
    return sum(storages.values())


# Times of ranks: each rank measures its part of a step, and all exchange their numbers once per window.
#
# All comparisons of ranks use this one exchange: the stream ``ranks.bin``, the use of machines and, in a fleet, the search for
# stragglers. It is an all-reduce of a table in which each rank fills its own row. That is more bytes than gathering rows, but a
# tree passes it through 100,000 ranks in tens of hops where a ring needs 100,000. These numbers do not affect the weights.


_UNKNOWN = -1.0
"""In the table, where a rank does not know; no number is below zero, and NaN would trip a check for it."""


class RankTimes:
    """The measurements of one rank in one attempt.

    Args:
        stepper: What runs the steps.
        attempt: Its number.
        windows: The numbers of steps after which somebody wants to see all ranks; those that are 0 never.
        machines: Filled with the figures of all machines at the end of each window.
    """

    def __init__(
        self,
        stepper: Stepper,
        attempt: int,
        windows: Collection[int],
        machines: MachineTable | None = None,
    ) -> None:
        """Measure from now on. ``windows`` are lengths in steps, 0 for none; ``machines``, if given, is exchanged
        along with the ranks' rows.
        """
        self._ledger, self._mesh = stepper.ledger, stepper.built.model.mesh
        self._attempt, self._machines = attempt, machines
        self._windows = [steps for steps in windows if steps]
        self._slots = sum(current.counts for current in stepper.built.rounds)
        self._has_temperature = True
        self.slowest: int | None = None
        """The rank that computed longest in the newest window, if any rank knows its time."""
        self._compute_s: list[float] = []
        self._waited_s: list[float] = []
        self._computed_ns, self._waited_ns = self._totals_ns()

    def step_ended(self, step: int, *, last: bool = False) -> RankFrame | None:
        """Record a step. At the end of a window, or with ``last``, return the table of all ranks since the last one;
        otherwise None. Also sets ``slowest``. Without windows, do nothing and return None.

        A collective when it returns a table. The result is the same on all ranks, except for the time.
        """
        if not self._windows:
            return None
        computed_ns, waited_ns = self._totals_ns()
        self._compute_s.append((computed_ns - self._computed_ns) / NS_PER_S)
        self._waited_s.append((waited_ns - self._waited_ns) / NS_PER_S)
        self._computed_ns, self._waited_ns = computed_ns, waited_ns
        if not last and all(step % window for window in self._windows):
            return None
        table = self._exchange(self._mine())
        steps, self._compute_s, self._waited_s = len(self._compute_s), [], []
        columns = dict(zip(RANK_COLUMNS, table.T, strict=True))
        measured = np.nan_to_num(columns["compute_s"], nan=-1.0)
        self.slowest = int(measured.argmax()) if measured.max() > 0 else None
        return RankFrame(step, time.time(), self._attempt, len(table), columns, steps)

    def _mine(self) -> list[float]:
        """Return this rank's row in the order of ``RANK_COLUMNS``: mean compute seconds a slot, mean wait seconds a
        step, bytes in use, degrees Celsius. -1 if unknown.
        """
        # A rank without slots of its own computes another rank's slot again, or nothing, so its time is no measure of its
        # speed. The mean, since its peers wait for every step: a median hides a rank that stops in one step of ten.
        compute_s = statistics.fmean(self._compute_s) / self._slots if self._slots else _UNKNOWN
        heat_c = temperature_c(self._mesh.device) if self._has_temperature else None
        self._has_temperature = heat_c is not None  # a sensor without a value is not read again
        return [
            compute_s,
            statistics.fmean(self._waited_s),
            float(held_memory_bytes(self._mesh.device)),
            _UNKNOWN if heat_c is None else heat_c,
        ]

    def _exchange(self, mine: list[float]) -> NDArray[np.float32]:
        """Return the rows of all ranks, ``(ranks, columns)``, NaN if unknown; also update ``machines.rows`` with the
        rows of all machines. One all-reduce.
        """
        shape, machines = (self._mesh.ranks, len(mine)), self._machines
        ends = shape[0] * shape[1]
        with self._ledger.bucket(Bucket.COMM_EXPOSED_DP):
            numbers = torch.zeros(
                ends + (0 if machines is None else machines.rows.size), device=self._mesh.device
            )
            numbers[:ends].view(shape)[self._mesh.rank] = torch.tensor(mine)  # (ranks, columns)
            if machines is not None and machines.place is not None:
                machines.refresh()
                own = np.nan_to_num(machines.rows[machines.place], nan=_UNKNOWN).astype(np.float32)
                # (machines, figures)
                numbers[ends:].view(machines.rows.shape)[machines.place] = torch.from_numpy(own)
            dist.all_reduce(numbers)  # every element comes from one rank, so this sum rounds nothing
            table: NDArray[np.float32] = numbers.cpu().numpy()
        table = np.where(table < 0, np.float32(np.nan), table)
        if machines is not None:
            # (machines, figures)
            machines.rows = table[ends:].reshape(machines.rows.shape).astype(np.float64)
        return table[:ends].reshape(shape)  # (ranks, columns)

    def _totals_ns(self) -> tuple[int, int]:
        """Return this rank's total time so far of computing and of waiting for samples, in nanoseconds."""
        totals = self._ledger.totals_ns()
        return totals.get(Bucket.STEP_COMPUTE, 0), totals.get(Bucket.STEP_DATA_WAIT, 0)


# Peak memory of an accelerator in a step, by kind: the measured side of the planner's memory model.


@dataclass(frozen=True)
class MemoryByKind:
    """Bytes on one rank's device; each kind at its own peak within a step."""

    parameters: int
    """Master weights, or this rank's share of them."""
    gradients: int
    """As the optimizer finds them."""
    optimizer: int
    """The optimizer's state, unless it is offloaded."""
    activations: int | None
    """Activations saved for backward, of all micro-batches in flight together; ``None`` if they cannot be measured."""
    buffers: int
    """State that is not trained."""
    other: int
    """The rest of the total peak: gathered weights, gradient accumulators and temporaries."""

    @property
    def total(self) -> int:
        """The peak of everything together, or a little more where the kinds' peaks do not coincide."""
        return sum(value or 0 for value in asdict(self).values())
