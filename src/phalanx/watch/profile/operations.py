"""What operations achieve, by kind and by layer, against the machine's measured peaks.

The roofline of an operation is the longer of two times: its FLOP at the peak of matrix products, its bytes at the peak of copies (Williams,
Waterman and Patterson, 2009). The achieved fraction is that time over the one it took. Bytes are those of the arguments and one result, each once; FLOP
are those of products, exact, and of attention, with masked pairs counted as if they were computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.observe.profile.recorded_step import RankTrace
from phalanx.watch.profile.partition import BACKWARD, FORWARD, StepPieces
from phalanx.watch.profile.words import COMPUTE, COPY, OPTIMIZER, kind_of

_MOST_LAYERS = 400


@dataclass(frozen=True)
class KindRow:
    """Operations of one kind in a step, on all recorded ranks together."""

    kind: str
    seconds: float
    """A step, added up over ranks."""
    calls: float
    flops: float
    bytes: float
    roofline: float | None
    """The fraction of the roofline; ``None`` where neither FLOP nor bytes are known."""

    @property
    def flops_per_s(self) -> float:
        """On one rank."""
        return self.flops / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_s(self) -> float:
        """On one rank."""
        return self.bytes / self.seconds if self.seconds else 0.0


def kinds(
    traces: Sequence[RankTrace], cuts: Sequence[StepPieces], peak_flops: float, copy_bytes_per_s: float
) -> list[KindRow]:
    """The table of kinds, the longest first."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0] * 5)
    for trace, cut in zip(traces, cuts, strict=True):
        steps = max(len(cut.steps), 1)
        kind_names = [kind_of(name) for name in trace.names]
        wanted = [cut.categories.index(word) for word in (COMPUTE, COPY) if word in cut.categories]
        mine = np.isin(cut.pieces["category"], wanted) & (cut.pieces["event"] >= 0)
        spent = np.zeros(len(trace.events))
        lengths = cut.pieces["end_ns"][mine] - cut.pieces["begin_ns"][mine]
        np.add.at(spent, cut.pieces["event"][mine], lengths / 1e9)
        for place in np.flatnonzero(spent).tolist():
            event = trace.events[place]
            kind = kind_names[int(event["name"])] if event["mark"] < 0 else "outside of PyTorch"
            row = totals[kind]
            row[0] += spent[place] / steps
            if cut.leaves[place]:
                flops, moved = float(event["flops"]), float(event["bytes"])
                row[1] += 1 / steps
                row[2] += flops / steps
                row[3] += moved / steps
                row[4] += max(flops / peak_flops, moved / copy_bytes_per_s) / steps
    rows = [
        KindRow(kind, seconds, calls, flops, moved, ideal / seconds if ideal and seconds else None)
        for kind, (seconds, calls, flops, moved, ideal) in totals.items()
    ]
    return sorted(rows, key=lambda row: -row.seconds)


@dataclass(frozen=True)
class LayerRow:
    """One layer, or part of one, in a step: seconds of the rank that spends most on it."""

    layer: str
    rank: int
    forward_s: float
    backward_s: float
    communication_s: float


def by_layer(cuts: Sequence[StepPieces]) -> list[LayerRow]:
    """The layers in the order in which they first ran, each with the rank that takes longest over it."""
    found: dict[str, LayerRow] = {}
    for cut in cuts:
        pieces, steps = cut.pieces, max(len(cut.steps), 1)
        lengths = (pieces["end_ns"] - pieces["begin_ns"]) / (1e9 * steps)
        communicates = np.array([word.startswith("communication") for word in cut.categories], bool)
        own = np.array([word in (COMPUTE, COPY, OPTIMIZER) for word in cut.categories], bool)
        if not len(pieces):
            continue
        moving, busy = communicates[pieces["category"]], own[pieces["category"]]
        table = {
            "forward": np.bincount(
                pieces["layer"], lengths * (busy & (pieces["phase"] == FORWARD)), len(cut.layers)
            ),
            "backward": np.bincount(
                pieces["layer"], lengths * (busy & (pieces["phase"] == BACKWARD)), len(cut.layers)
            ),
            "moving": np.bincount(pieces["layer"], lengths * moving, len(cut.layers)),
        }
        for number, layer in enumerate(cut.layers):
            row = LayerRow(
                layer or "outside of the model", cut.rank, *(float(table[name][number]) for name in table)
            )
            before = found.get(row.layer)
            if before is None or row.forward_s + row.backward_s > before.forward_s + before.backward_s:
                found[row.layer] = row
    return list(found.values())[:_MOST_LAYERS]
