"""Partition of a rank's steps into pieces of one category each. Every moment is in exactly one piece, so the pieces
sum to the step.

On a CPU everything runs in one thread, in nested ranges. A moment belongs to the innermost one: an operation of
PyTorch computes, and a collective communicates. The rest of our own ranges has the range's category (data wait,
update), or is time of Python between operations.

On a GPU the host runs ahead, and a moment belongs to the device's activity: a compute kernel, else a communication
kernel, else a copy, else the host's activity.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from phalanx.observe.recorded_step import COPY as DEVICE_COPY
from phalanx.observe.recorded_step import HOST, KERNEL, LAUNCH, RankTrace

# Names of the activities of a moment, and of the kinds of operations.


COMPUTE, COPY, OPTIMIZER, DATA, BUBBLE = "compute", "copies", "optimizer", "data wait", "bubble"
BETWEEN, INSIDE = "host gap between steps", "host gap inside steps"
SAVE, EVALUATION, AUDIT, LOG = "save and snapshot", "evaluation", "audit", "log"
COMM = "communication: "
"""Prefix of an axis name: exposed time in its collectives."""
GAPS = (BETWEEN, INSIDE, LOG)
"""Categories in which a rank neither computes nor waits for another rank."""
ORDER = (COMPUTE, COPY, OPTIMIZER, BUBBLE, DATA, INSIDE, BETWEEN, LOG, SAVE, EVALUATION, AUDIT)

_OF_BUCKET = {
    "step.data_wait": DATA,
    "step.optimizer": OPTIMIZER,
    "ckpt.blocking": SAVE,
    "eval": EVALUATION,
    "health.sdc_check": AUDIT,
}
_OF_WORK = {"save": SAVE, "snapshot": SAVE, "log": LOG, "norm": COMPUTE}
_COPIES = re.compile(
    r"aten::(copy_|_to_copy|to|clone|contiguous|cat|stack|_pin_memory|pad|constant_pad_nd|split_with_sizes_copy)$"
)
_PRODUCTS = re.compile(r"aten::(mm|addmm|bmm|baddbmm|_scaled_mm|_grouped_mm|linear|matmul|addmv|mv|dot)$")
_LOOKUPS = re.compile(r"aten::(embedding|index|gather|scatter|take|where|masked)")
_COLLECTIVE_KERNEL = re.compile(r"nccl|gloo|rccl", re.IGNORECASE)


def category_of_mark(kind: str, name: str, axis: str) -> str | None:
    """Return the category of a range's time, or None if the enclosing range decides it."""
    if kind == "bucket":
        return _OF_BUCKET.get(name)
    if kind == "work":
        return _OF_WORK.get(name)
    if kind in ("collective", "wait", "send"):
        return BUBBLE if axis == "pipeline" and kind == "wait" else COMM + axis
    return BUBBLE if kind == "receive" else None


def kind_of(name: str) -> str:
    """Return the kind of a PyTorch operation or kernel by name: attention, matrix products, copies, lookups, else
    elementwise and sums.
    """
    if "attention" in name or "flash" in name or "fmha" in name:
        return "attention"
    if _PRODUCTS.match(name) or "gemm" in name or "cutlass" in name or "nvjet" in name:
        return "matrix products"
    if _COPIES.match(name) or "memcpy" in name.lower() or "memset" in name.lower():
        return "copies"
    return "lookups" if _LOOKUPS.match(name) else "elementwise and sums"


def is_collective_kernel(name: str) -> bool:
    """Return True for a kernel of a communication library."""
    return _COLLECTIVE_KERNEL.search(name) is not None


def axis_of(category: str) -> str | None:
    """Return the axis of a communication category; None for others."""
    return category.removeprefix(COMM) if category.startswith(COMM) else None


def duration(seconds: float) -> str:
    """Format seconds for people, in milliseconds below one second."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def in_order(categories: set[str]) -> list[str]:
    """Return categories in table order: compute, then communication by axis, then idle."""
    place = {name: number for number, name in enumerate(ORDER)}
    return sorted(categories, key=lambda name: (place.get(name, 2.5), name))


# The partition.


PIECE = np.dtype(
    [
        ("begin_ns", "<i8"),
        ("end_ns", "<i8"),
        ("category", "<i4"),
        ("layer", "<i4"),
        ("phase", "u1"),
        ("event", "<i4"),  # the innermost event of the moment; -1 without
        ("step", "<i4"),
    ]
)
OUTSIDE, FORWARD, BACKWARD = range(3)
"""Phases of a step."""
_LOOK_INSIDE = 8
"""Number of events after the start of a wait that may be its collective."""


@dataclass
class Names:
    """Numbering of words by first use."""

    of: dict[str, int] = field(default_factory=dict)

    def number(self, word: str) -> int:
        """Return the number of ``word``."""
        return self.of.setdefault(word, len(self.of))

    @property
    def words(self) -> list[str]:
        """Words by number."""
        return list(self.of)


@dataclass(frozen=True)
class StepPieces:
    """Steps of one rank in consecutive pieces; times in ns since the recording's base, by its own clock."""

    rank: int
    steps: tuple[tuple[int, int, int], ...]
    """Number, begin and end of each step."""
    pieces: NDArray[np.void]
    categories: list[str]
    layers: list[str]
    leaves: NDArray[np.bool_]
    """By event: True for an operation without inner operations that do work."""

    def seconds(self) -> dict[str, float]:
        """Return seconds per step by category; they sum to a step's wall time."""
        return self.sums(self.pieces["category"], self.categories)

    def sums(self, key: NDArray[np.int_], words: list[str]) -> dict[str, float]:
        """Return seconds per step of the pieces, summed by ``key``, an index of ``words`` for each."""
        lengths = (self.pieces["end_ns"] - self.pieces["begin_ns"]) / (1e9 * max(len(self.steps), 1))
        totals = np.bincount(key, lengths, minlength=len(words))
        return {word: float(total) for word, total in zip(words, totals, strict=True) if total > 0}

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return sum(end - begin for _, begin, end in self.steps) / (1e9 * max(len(self.steps), 1))


@dataclass(frozen=True)
class _Frame:
    """Category of a moment inside an event, unless an inner event overrides it."""

    end_ns: int
    event: int
    category: int
    layer: int
    phase: int
    settled: bool
    """True if inner events do not change the category: an operation within a collective communicates."""


def partition(trace: RankTrace) -> StepPieces:
    """Partition a rank's recorded steps into pieces of one category, layer and phase each; a device's time if it has kernels, else
    the host's."""
    cut = _Cut(trace)
    host = list(cut.host_pieces())
    pieces = np.array(host, dtype=PIECE) if host else np.zeros(0, PIECE)
    if (trace.events["kind"] == KERNEL).any():
        pieces = cut.device_pieces(pieces)
    return StepPieces(trace.rank, cut.steps, pieces, cut.categories.words, cut.layers.words, cut.leaves)


class _Cut:
    """State of one partition."""

    def __init__(self, trace: RankTrace) -> None:
        """Find the recorded steps and the thread that trains; categories, layers and phases of events are not yet known."""
        self.trace, self.events = trace, trace.events
        self.categories, self.layers = Names(), Names()
        self.layers.number("")
        self.leaves = np.zeros(len(trace.events), bool)
        steps = [
            (int(mark.get("step", 0)), place)
            for place, number in enumerate(self.events["mark"])
            if number >= 0 and (mark := trace.marks[number])["kind"] == "step"
        ]
        begin, ns = self.events["begin_ns"], self.events["ns"]
        self.steps = tuple((number, int(begin[at]), int(begin[at] + ns[at])) for number, at in steps)
        self.thread = int(self.events["thread"][steps[0][1]]) if steps else -1
        self._of_seq: dict[int, int] = {}
        """Layer of the forward operation with a sequence number."""
        self.category_at = np.full(len(self.events), -1, np.int64)
        """By event: category of the device work that it launches."""
        self.layer_at = np.zeros(len(self.events), np.int64)
        self.phase_at = np.zeros(len(self.events), np.int64)

    def host_pieces(self) -> Iterator[tuple[int, ...]]:
        """Yield the pieces of the training thread, step by step, from host events that lie completely in a step."""
        chosen = np.flatnonzero((self.events["thread"] == self.thread) & (self.events["kind"] == HOST))
        for number, begin, end in self.steps:
            inside = chosen[
                (self.events["begin_ns"][chosen] >= begin)
                & (self.events["begin_ns"][chosen] + self.events["ns"][chosen] <= end)
            ]
            yield from self._step(number, begin, end, inside)

    def _step(self, number: int, begin: int, end: int, inside: NDArray[np.intp]) -> Iterator[tuple[int, ...]]:
        """Yield the pieces of a step as rows of ``PIECE``, without gaps or overlaps; each belongs to the innermost event.

        Also note category, layer and phase of each inner event, which the device work that it launches gets.
        """
        bottom = _Frame(end, -1, self.categories.number(BETWEEN), 0, OUTSIDE, settled=False)
        stack, now = [bottom], begin
        starts, lengths = self.events["begin_ns"].tolist(), self.events["ns"].tolist()
        for place in [*inside.tolist(), -1]:
            start = starts[place] if place >= 0 else end
            while len(stack) > 1 and stack[-1].end_ns <= start:
                top = stack.pop()
                if top.end_ns > now:
                    yield self._piece(now, top.end_ns, top, number)
                    now = top.end_ns
            if start > now:
                yield self._piece(now, start, stack[-1], number)
                now = start
            if place >= 0:
                stack.append(self._inside(stack[-1], place, min(start + lengths[place], stack[-1].end_ns)))

    def _piece(self, begin: int, end: int, frame: _Frame, step: int) -> tuple[int, ...]:
        return begin, end, frame.category, frame.layer, frame.phase, frame.event, step

    def _inside(self, around: _Frame, place: int, end: int) -> _Frame:
        """Return the frame of an event within another, and record its category, layer and phase for the device work that it launches."""
        mark = self.trace.mark(place)
        if mark is not None:
            frame = self._of_mark(around, mark, place, end)
        else:
            frame = self._of_operation(around, place, end)
        self.category_at[place], self.layer_at[place] = frame.category, frame.layer
        self.phase_at[place] = frame.phase
        return frame

    def _of_mark(self, around: _Frame, mark: Mapping[str, object], place: int, end: int) -> _Frame:
        """Return the frame of a mark, which sets layer and phase. It sets the category too, unless the frame around it has a settled one.

        A collective replaces a settled category too. A mark without a category of its own is a host gap: between steps
        for a step or clock, else inside.
        """
        kind, name = str(mark["kind"]), str(mark.get("name", ""))
        axis = str(mark.get("axis", name if kind == "wait" else ""))
        if kind == "wait":
            axis = self._axis_within(place, end) or axis
        layer, phase, category = around.layer, around.phase, around.category
        if kind == "module":
            layer = self.layers.number(name)
            phase = FORWARD if phase == OUTSIDE else phase
        elif kind == "work" and name == "backward":
            phase = BACKWARD
        own = category_of_mark(kind, name, axis)
        if around.settled and not (own or "").startswith(COMM):
            return _Frame(end, place, category, layer, phase, settled=True)
        if own is not None:
            return _Frame(end, place, self.categories.number(own), layer, phase, settled=own != COMPUTE)
        between = kind in ("step", "clock")
        word = BETWEEN if between else INSIDE
        return _Frame(end, place, self.categories.number(word), layer, phase, settled=False)

    def _axis_within(self, place: int, end: int) -> str | None:
        """Return the axis of the first collective in a stopwatch's range, whose name may serve several axes; None if
        there is none near.
        """
        for inner in range(place + 1, min(place + _LOOK_INSIDE, len(self.events))):
            mark = self.trace.mark(inner)
            if mark is not None and mark["kind"] == "collective" and self.events["begin_ns"][inner] < end:
                return str(mark.get("axis"))
        return None

    def _of_operation(self, around: _Frame, place: int, end: int) -> _Frame:
        """Return the frame of an operation. A backward one has the layer of its forward operation, by sequence number.

        ATen operations compute or copy; others, and all in a settled frame, keep the category around them. An ATen
        operation becomes a leaf, and the event around it is none any more if the inner one moves bytes.
        """
        name = self.trace.names[int(self.events["name"][place])]
        seq, layer = int(self.events["seq"][place]), around.layer
        if name.startswith("autograd::engine::evaluate_function"):
            layer = self._of_seq.get(seq, layer)
        elif seq >= 0 and around.layer:
            self._of_seq[seq] = layer
        if around.settled:
            return _Frame(end, place, around.category, layer, around.phase, settled=True)
        if not name.startswith("aten::"):
            # A node of autograd or a Python function: the operations inside it compute.
            return _Frame(end, place, around.category, layer, around.phase, settled=False)
        if around.event >= 0:
            self.leaves[around.event] &= self.events["bytes"][place] == 0
        self.leaves[place] = True
        word = COPY if kind_of(name) == "copies" else COMPUTE
        return _Frame(end, place, self.categories.number(word), layer, around.phase, settled=False)

    # --- a device ---

    def device_pieces(self, host: NDArray[np.void]) -> NDArray[np.void]:
        """Return the pieces of a device's time; idle time gets the host's. Computing wins over collectives, and these over copies."""
        events = self.events
        launched = {
            int(link): place
            for place, link in enumerate(events["link"])
            if link and events["kind"][place] in (HOST, LAUNCH)
        }
        around = self._enclosing()
        layers: list[list[tuple[int, int, int]]] = [[], [], []]  # computing, communicating, copying
        for place in np.flatnonzero((events["kind"] == KERNEL) | (events["kind"] == DEVICE_COPY)).tolist():
            begin, length = int(events["begin_ns"][place]), int(events["ns"][place])
            parent = around.get(launched.get(int(events["link"][place]), -1), -1)
            self._settle_kernel(place, parent)
            name = self.trace.names[int(events["name"][place])]
            rank = 2 if events["kind"][place] == DEVICE_COPY else 1 if is_collective_kernel(name) else 0
            layers[rank].append((begin, begin + length, place))
        return self._painted(host, layers)

    def _enclosing(self) -> dict[int, int]:
        """Return, for each launch and host event, the innermost event around it, or itself, with a known category; -1
        for none.

        First gives events of autograd's threads the category and layer of the event around them.
        """
        enclosing: dict[int, int] = {}
        events = self.events
        for thread in np.unique(events["thread"][events["kind"] != KERNEL]).tolist():
            stack: list[int] = []
            for place in np.flatnonzero((events["thread"] == thread) & (events["kind"] != KERNEL)).tolist():
                begin = events["begin_ns"][place]
                while stack and events["begin_ns"][stack[-1]] + events["ns"][stack[-1]] <= begin:
                    stack.pop()
                if self.category_at[place] < 0 and stack:  # another thread's: autograd's, for a device
                    self._inherit(place, stack[-1])
                enclosing[place] = next(
                    (at for at in (place, *reversed(stack)) if self.category_at[at] >= 0), -1
                )
                stack.append(place)
        return enclosing

    def _inherit(self, place: int, around: int) -> None:
        """Give a backward event on another thread the category and layer of the event around it."""
        end = int(self.events["begin_ns"][place] + self.events["ns"][place])
        category = int(self.category_at[around])
        word = self.categories.words[category] if category >= 0 else INSIDE
        number, layer = self.categories.number(word), int(self.layer_at[around])
        self._inside(_Frame(end, around, number, layer, BACKWARD, word.startswith(COMM)), place, end)

    def _settle_kernel(self, place: int, parent: int) -> None:
        """Record the category of a kernel or device copy, and take layer and phase from the host event that launched it.

        Collective kernels have the axis or the bubble of that event, or "shard" if it has neither. Other kernels are of
        the optimizer if that event is, and compute otherwise.
        """
        name = self.trace.names[int(self.events["name"][place])]
        around = self.categories.words[int(self.category_at[parent])] if parent >= 0 else ""
        if is_collective_kernel(name):
            # FSDP's own collectives have no mark of ours.
            word = around if around.startswith(COMM) or around == BUBBLE else f"{COMM}shard"
        elif self.events["kind"][place] == DEVICE_COPY:
            word = COPY
        else:
            word = OPTIMIZER if around == OPTIMIZER else COMPUTE
        self.category_at[place] = self.categories.number(word)
        if parent >= 0:
            self.layer_at[place], self.phase_at[place] = self.layer_at[parent], self.phase_at[parent]

    def _painted(self, host: NDArray[np.void], layers: list[list[tuple[int, int, int]]]) -> NDArray[np.void]:
        """Cut the host's pieces at the device's events, and assign each moment to the first of ``layers`` that is
        active.

        Idle moments keep the host's category, except that a host that computes or communicates then counts as a gap.
        """
        times = [np.array([event[:2] for event in layer], np.int64).ravel() for layer in layers]
        edges = np.unique(np.concatenate([host["begin_ns"], host["end_ns"], *times]))
        event = np.full(max(len(edges) - 1, 0), -1)
        for layer in reversed(layers):  # later layers overwrite earlier ones
            for begin, end, place in layer:
                event[np.searchsorted(edges, begin) : np.searchsorted(edges, end)] = place
        owner = np.searchsorted(host["begin_ns"], edges[:-1], side="right") - 1
        valid = (owner >= 0) & (edges[:-1] < host["end_ns"][np.maximum(owner, 0)])
        pieces = host[owner[valid]].copy()
        pieces["begin_ns"], pieces["end_ns"] = edges[:-1][valid], edges[1:][valid]
        busy, places = event[valid] >= 0, event[valid]
        for field_, value_at in (
            ("category", self.category_at),
            ("layer", self.layer_at),
            ("phase", self.phase_at),
        ):
            pieces[field_][busy] = value_at[places[busy]]
        pieces["event"][busy] = places[busy]
        # If the device is idle, the host's computing and communicating is a delay: it launches too late.
        late = np.array([word in (COMPUTE, COPY) or word.startswith(COMM) for word in self.categories.words])
        number = self.categories.number(INSIDE)
        pieces["category"][~busy & late[pieces["category"]]] = number
        return pieces
