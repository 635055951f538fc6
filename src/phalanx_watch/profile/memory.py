"""A rank's memory through the steps: by kind, and what was alive at the peak.

The profiler reports each allocation and release. What a tensor was for shows in when it was made and when it went: made in a forward pass and
alive until the backward pass, it is an activation; made in a backward pass and kept after it, a gradient; made around a collective, a buffer of it;
gone before its phase was over, a temporary. What was there before the first step (weights, the optimizer's state) was measured by asking for it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.observe.recorded_step import RankTrace
from phalanx_watch.profile.partition import BACKWARD, COMM, DATA, FORWARD, OPTIMIZER, StepPieces

KINDS = (
    "activations",
    "gradients",
    "communication buffers",
    "optimizer work",
    "samples",
    "temporaries",
    "other",
)
_POINTS = 400
_MOST_LIVE = 12


@dataclass(frozen=True)
class Live:
    """Allocations of one kind and layer that were alive at the peak."""

    kind: str
    layer: str
    made_by: str
    bytes: int
    count: int


@dataclass(frozen=True)
class MemoryLine:
    """The memory of one rank."""

    rank: int
    held_bytes: dict[str, int]
    """There before the first step, by kind."""
    times_s: list[float]
    """Since the first step began."""
    bytes: dict[str, list[int]]
    """By kind, on top of what was held."""
    peak_bytes: int
    """The peak of what was made in the steps and what was held, together."""
    peak_s: float
    at_peak: list[Live]


def memory_line(trace: RankTrace, cut: StepPieces) -> MemoryLine | None:
    """The memory of a rank; ``None`` without a step or an allocation."""
    rows = trace.allocations
    if trace.meta.get("device") == "cuda":
        rows = rows[rows["device"] > 0]
    if not len(cut.pieces) or not len(rows):
        return None
    begin = int(cut.pieces["begin_ns"][0])
    spans = _lifetimes(rows, int(cut.pieces["end_ns"][-1]))
    if not len(spans):
        return None
    made = np.clip(np.searchsorted(cut.pieces["begin_ns"], spans["from"], side="right") - 1, 0, None)
    gone = np.clip(np.searchsorted(cut.pieces["begin_ns"], spans["to"], side="right") - 1, 0, None)
    kinds = _kinds(cut, made, gone)
    order = np.argsort(np.concatenate([spans["from"], spans["to"]]), kind="stable")
    times = np.concatenate([spans["from"], spans["to"]])[order]
    change = np.concatenate([spans["bytes"], -spans["bytes"]])[order]
    both = np.concatenate([kinds, kinds])[order]
    total = np.cumsum(change)
    peak = int(np.argmax(total))
    held = {str(kind): int(size) for kind, size in dict(trace.meta.get("held_bytes", {})).items()}
    shown = np.unique(np.append(np.linspace(0, len(times) - 1, _POINTS).astype(int), peak))
    curves = {
        word: np.cumsum(np.where(both == number, change, 0))[shown].tolist()
        for number, word in enumerate(KINDS)
        if (kinds == number).any()
    }
    alive = (spans["from"] <= times[peak]) & (spans["to"] > times[peak])
    return MemoryLine(
        trace.rank,
        held,
        ((times[shown] - begin) / 1e9).tolist(),
        curves,
        int(total[peak]) + sum(held.values()),
        float((times[peak] - begin) / 1e9),
        _live(trace, cut, spans[alive], made[alive], kinds[alive]),
    )


def _lifetimes(rows: NDArray[np.void], end_ns: int) -> NDArray[np.void]:
    """From when to when each allocation of the recording was alive."""
    open_at: dict[int, tuple[int, int]] = {}
    found = []
    for t_ns, address, size, _ in rows.tolist():
        if size > 0:
            open_at[address] = t_ns, size
        elif address in open_at:
            since_ns, had = open_at.pop(address)
            found.append((since_ns, t_ns, had))
    found += [(since_ns, end_ns + 1, had) for since_ns, had in open_at.values()]
    return np.array(sorted(found), dtype=[("from", "<i8"), ("to", "<i8"), ("bytes", "<i8")])


def _kinds(cut: StepPieces, made: NDArray[np.intp], gone: NDArray[np.intp]) -> NDArray[np.int_]:
    """The kind of each allocation, an index of ``KINDS``."""
    phase, category = cut.pieces["phase"], cut.pieces["category"]

    def is_one(word: str) -> NDArray[np.bool_]:
        wanted = np.array([name.startswith(word) for name in cut.categories], bool)
        chosen: NDArray[np.bool_] = wanted[category[made]]
        return chosen

    later = (phase[gone] != phase[made]) | (cut.pieces["step"][gone] != cut.pieces["step"][made])
    forward, backward = phase[made] == FORWARD, phase[made] == BACKWARD
    choices = [is_one(COMM), is_one(OPTIMIZER), is_one(DATA), forward & later, backward & later]
    numbers = [
        KINDS.index(word)
        for word in ("communication buffers", "optimizer work", "samples", "activations", "gradients")
    ]
    inside = np.where(forward | backward, KINDS.index("temporaries"), KINDS.index("other"))
    chosen: NDArray[np.int_] = np.select(choices, numbers, inside)
    return chosen


def _live(
    trace: RankTrace,
    cut: StepPieces,
    spans: NDArray[np.void],
    made: NDArray[np.intp],
    kinds: NDArray[np.int_],
) -> list[Live]:
    sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for size, piece, kind in zip(spans["bytes"].tolist(), made.tolist(), kinds.tolist(), strict=True):
        event = int(cut.pieces["event"][piece])
        name = "" if event < 0 else trace.names[int(trace.events["name"][event])]
        mark = None if event < 0 else trace.mark(event)
        made_by = str(mark["name"]) if mark is not None else name.removeprefix("aten::")
        row = sums[KINDS[kind], cut.layers[int(cut.pieces["layer"][piece])], made_by]
        row[0] += size
        row[1] += 1
    live = [Live(*key, size, count) for key, (size, count) in sums.items()]
    return sorted(live, key=lambda one: -one.bytes)[:_MOST_LIVE]
