"""Marks of what a rank does while it is recorded, and the tables of a rank's file, made from a recording of PyTorch's profiler.

The profiler is that of ``torch.autograd.profiler``: ``torch.profiler`` is built on it, and its start imports the compiler, which takes seconds of
every rank's time. Allocations come from its event tree, the only place that has their addresses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd.profiler import profile, record_function

from phalanx.hardware.local.device import on_gpu
from phalanx.observe.recorded_step import (
    ALLOCATION,
    COPY,
    EVENT,
    HOST,
    KERNEL,
    LAUNCH,
    MOST_ALLOCATIONS,
    MOST_EVENTS,
    RankTrace,
)
from phalanx.run.fields import JsonObject

if TYPE_CHECKING:
    from torch._C._autograd import _KinetoEvent


# Marks: each range of the profiler has the number of a mark.
#
# PyTorch's ``record_function`` takes a name. The name is an index into a list of the ranges' descriptions (the axis, the ranks,
# the bytes, the sequence number of a collective in its group). So a range costs a few microseconds, and all times come from one
# clock.

PREFIX = "phalanx|"


class Marks:
    """The marks of one recording."""

    def __init__(self) -> None:
        self.rows: list[JsonObject] = []
        self._numbers: dict[tuple[str, str], int] = {}

    @contextmanager
    def around(self, kind: str, name: str, **more: object) -> Iterator[None]:
        """Mark the time inside; with ``more`` as a mark of its own."""
        with record_function(f"{PREFIX}{self.number(kind, name, **more)}"):
            yield

    def number(self, kind: str, name: str, **more: object) -> int:
        """Return the number of a mark, and add its row if it is new. Marks of one kind and name without ``more`` share
        a row; a mark with ``more`` gets its own.
        """
        key = kind, name
        if not more and key in self._numbers:
            return self._numbers[key]
        self.rows.append({"kind": kind, "name": name, **more})
        if not more:
            self._numbers[key] = len(self.rows) - 1
        return len(self.rows) - 1


_ITEM_BYTES = {
    **dict.fromkeys(("double", "long int", "long", "c10::complex<float>"), 8),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("c10::BFloat16", "c10::Half", "short"), 2),
    **dict.fromkeys(("unsigned char", "signed char", "bool", "c10::Float8_e4m3fn", "c10::Float8_e5m2"), 1),
}
_VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        *("view", "as_strided", "t", "transpose", "reshape", "expand", "slice", "select", "detach"),
        *("permute", "unsqueeze", "squeeze", "empty", "empty_like", "empty_strided", "resolve_conj"),
        *("resolve_neg", "split", "narrow", "alias", "chunk", "unbind", "split_with_sizes"),
        *("_unsafe_view", "lift_fresh", "item", "_local_scalar_dense", "is_nonzero", "resize_"),
        *("view_as", "movedim", "flatten", "unflatten", "new_empty"),
    )
)
"""Operations that move nothing."""
_PICKS = frozenset(f"aten::{name}" for name in ("gather", "index", "index_select", "take", "embedding"))
"""Operations that read parts of their largest argument."""
_RUNTIME_CALL = re.compile(r"(?:cuda|cu|hip)[A-Z]\w*$")


def make_profiler(device: torch.device) -> profile:
    """Return a profiler of host and GPU work, with shapes, FLOP and memory. ``__enter__`` starts it, and ``__exit__`` ends it."""
    return profile(
        use_cpu=True,
        use_device=device.type if on_gpu(device) else None,
        record_shapes=True,
        with_flops=True,
        profile_memory=True,
    )


def rank_trace(ended: profile, rank: int, marks: Sequence[JsonObject], meta: Mapping[str, Any]) -> RankTrace:
    """Return the tables of the events and allocations in ``ended``. Of too many events the longest are kept, and all of our own
    ranges.

    Of too many allocations the first are kept; the numbers left out are in the trace's ``meta``.
    """
    results = ended.kineto_results
    assert results is not None, "it has ended"
    recorded = list(results.events())
    base_ns = min((event.start_ns() for event in recorded), default=0)
    names: dict[str, int] = {}
    rows = [
        row
        for event in recorded
        if not event.is_hidden_event() and (row := _row(event, base_ns, names)) is not None
    ]
    events = np.array(rows, dtype=EVENT) if rows else np.zeros(0, EVENT)
    kept = _longest(events)
    allocations = np.array(
        [(t_ns - base_ns, *rest) for t_ns, *rest in _allocations(results.experimental_event_tree())] or [],
        dtype=ALLOCATION,
    )
    allocations = allocations[np.argsort(allocations["t_ns"], kind="stable")]
    left_out = {"events": len(events) - len(kept), "allocations": max(0, len(allocations) - MOST_ALLOCATIONS)}
    return RankTrace(
        rank,
        {**meta, "base_unix_ns": base_ns, "left_out": left_out},
        list(names),
        list(marks),
        kept,
        allocations[:MOST_ALLOCATIONS],
    )


def _longest(events: NDArray[np.void]) -> NDArray[np.void]:
    """Return the events by begin, longer ones first. Of too many, keep the longest and all of our own ranges."""
    if len(events) > MOST_EVENTS:
        weight = np.where(events["mark"] >= 0, np.iinfo(np.int64).max, events["ns"])
        events = events[np.sort(np.argpartition(weight, -MOST_EVENTS)[-MOST_EVENTS:])]
    # Outer ranges before inner ones that begin with them.
    ordered: NDArray[np.void] = events[np.lexsort((-events["ns"], events["begin_ns"]))]
    return ordered


def activity_of_name(name: str, on_device: bool) -> str:
    """Return the kind of an event in Kineto's words, guessed from its name, for PyTorch before 2.13, whose events do
    not contain it.

    Kineto calls copies and fills on a device "Memcpy ..." and "Memset ...", and calls of a runtime by their functions
    (libkineto's CuptiActivity.cpp and cupti_strings.cpp). PyTorch puts the names of its instants in brackets
    (torch/csrc/profiler/util.h).
    """
    if on_device:
        return "gpu_memcpy" if name.startswith(("Memcpy", "Memset")) else "kernel"
    if _RUNTIME_CALL.match(name):
        return "cuda_runtime"
    return "cpu_instant_event" if name.startswith("[") else "cpu_op"


def _row(event: _KinetoEvent, base_ns: int, names: dict[str, int]) -> tuple[object, ...] | None:
    """Return an event as a row of ``EVENT``, with times relative to ``base_ns``; ``None`` for instants, memory
    events, and our ranges on a device. Adds its name to ``names``.
    """
    name = event.name()
    on_device = event.device_type().name != "CPU"
    activity = event.activity_type() if hasattr(event, "activity_type") else activity_of_name(name, on_device)
    mark = -1
    if name.startswith(PREFIX):
        if on_device:
            return None  # the same range again, on the device's time line
        mark, name = int(name.removeprefix(PREFIX)), ""
    elif name == "[memory]" or activity == "cpu_instant_event":
        return None
    kind = HOST
    if on_device:
        kind = COPY if "memcpy" in activity or "memset" in activity else KERNEL
    elif activity in ("cuda_runtime", "cuda_driver", "runtime"):
        kind = LAUNCH
    number = names.setdefault(name, len(names))
    thread = event.device_resource_id() if on_device else event.start_thread_id()
    link = event.linked_correlation_id() if on_device else event.correlation_id()
    flops, moved = (0.0, 0.0) if on_device or mark >= 0 else _work(event, name)
    begin_ns = event.start_ns() - base_ns
    return number, mark, thread, kind, begin_ns, event.duration_ns(), event.sequence_nr(), flops, moved, link


def _work(event: _KinetoEvent, name: str) -> tuple[float, float]:
    """Return FLOP and bytes of an operation, from the shapes of its arguments. A product's bytes are exact; other
    operations count each argument once and a result as large as the largest. Zeros for views and what is no aten
    operation.

    Attention counts all pairs, and backward 2.5 times as much. Embeddings and picks count the rows that are read, not
    the table.
    """
    if not name.startswith("aten::") or name in _VIEWS:
        return 0.0, 0.0
    shapes = [shape for shape in event.shapes() if isinstance(shape, list)]
    dtypes = event.dtypes()
    if name == "aten::embedding" and len(shapes) >= 2 and len(shapes[0]) == 2:
        # The rows that are looked up, not the complete table.
        return 0.0, 2.0 * math.prod(shapes[1]) * shapes[0][1] * _ITEM_BYTES.get(dtypes[0], 4)
    sizes = [
        math.prod(shape) * _ITEM_BYTES.get(dtype, 0)
        for shape, dtype in zip(shapes, dtypes, strict=False)
        if all(isinstance(length, int) for length in shape)
    ]
    moved = float(sum(sizes) + max(sizes, default=0))
    if name in _PICKS and sizes:  # as much is read from the largest argument as the others have
        moved = 3.0 * (sum(sizes) - max(sizes))
    flops = float(event.flops())
    tensors = [shape for shape in shapes if len(shape) >= 2]
    if "attention" in name and len(tensors) >= 3 and len(tensors[0]) == 4:
        # Scores of all pairs counted, as if nothing were masked; backward does two and a half times the work.
        backward = "backward" in name
        query, key, value = tensors[1:4] if backward and len(tensors) > 3 else tensors[:3]
        if len(query) == len(key) == len(value) == 4:
            pairs = math.prod(query[:3]) * key[2]
            flops = 2.0 * pairs * (query[3] + value[3]) * (2.5 if backward else 1.0)
    elif name in ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm") and len(tensors) >= 2:
        left, right = tensors[-2:]
        item = next((_ITEM_BYTES.get(dtype, 0) for dtype in dtypes if dtype), 4)
        result = math.prod(left[:-1]) * right[-1]
        moved = float(item * (math.prod(left) + math.prod(right) + result))
    return flops, moved


def _allocations(tree: Sequence[Any]) -> Iterator[tuple[int, int, int, int]]:
    """Yield time in ns, address, bytes and kind of device (0: host, 1: other) of each allocation in no order;
    releases have negative bytes.
    """
    left = list(tree)
    while left:
        node = left.pop()
        if node.name == "[memory]":
            fields = node.extra_fields
            yield node.start_time_ns, fields.ptr or 0, fields.alloc_size, int(fields.device.type != "cpu")
        left.extend(node.children)
