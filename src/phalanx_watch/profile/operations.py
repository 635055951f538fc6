"""Achieved against attainable performance: by kind and layer against measured peaks, and by term against the plan.

The roofline of an operation is the longer of two times: its FLOP at the peak of matrix products, and its bytes at the
peak of copies (Williams, Waterman and Patterson, 2009). The achieved fraction is that time over the measured one.
Bytes are those of the arguments and one result, each once. FLOP are those of products, exact, and of attention, with
masked pairs counted as computed.

The planner's terms are its own (``phalanx_plan.step_cost``). They are measured by kinds of operations and axes of
collectives. No plan has waits for late ranks; they have a row of their own, so that a collective's row is its
transfer time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.hardware.cluster import HardwareError
from phalanx.launch.planner import PlannerError, installed_planner
from phalanx.observe.recorded_step import RankTrace
from phalanx.run.spec import RunSpec
from phalanx_watch.profile import partition
from phalanx_watch.profile.waits import Passage, Waits

_MOST_LAYERS = 400


@dataclass(frozen=True)
class KindRow:
    """Operations of one kind in a step, on all recorded ranks together."""

    kind: str
    seconds: float
    """Seconds of a step, summed over ranks."""
    calls: float
    flops: float
    bytes: float
    roofline: float | None
    """Fraction of the roofline; None if neither FLOP nor bytes are known."""

    @property
    def flops_per_s(self) -> float:
        """FLOP/s of one rank."""
        return self.flops / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_s(self) -> float:
        """Bytes/s of one rank."""
        return self.bytes / self.seconds if self.seconds else 0.0


def kinds(
    traces: Sequence[RankTrace],
    cuts: Sequence[partition.StepPieces],
    peak_flops: float,
    copy_bytes_per_s: float,
) -> list[KindRow]:
    """Return the table of kinds of operations in a step, added up over ranks, the longest first.

    FLOP, bytes and calls are those of the innermost operations. The roofline is the least possible time over the
    measured; None without FLOP or bytes.
    """
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0] * 5)
    for trace, cut in zip(traces, cuts, strict=True):
        steps = max(len(cut.steps), 1)
        kind_names = [partition.kind_of(name) for name in trace.names]
        counted = np.isin(cut.categories, (partition.COMPUTE, partition.COPY))  # (categories,)
        mine = counted[cut.pieces["category"]] & (cut.pieces["event"] >= 0)
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


def by_layer(cuts: Sequence[partition.StepPieces]) -> list[LayerRow]:
    """Return the layers in order of first use, each with the seconds of a step on the rank on which it takes longest.

    At most ``_MOST_LAYERS``; time outside of the model is one row.
    """
    rows: dict[str, LayerRow] = {}
    for cut in cuts:
        pieces, steps = cut.pieces, max(len(cut.steps), 1)
        lengths = (pieces["end_ns"] - pieces["begin_ns"]) / (1e9 * steps)
        if not len(pieces):
            continue
        communicates = np.array([word.startswith("communication") for word in cut.categories], bool)
        own = np.isin(cut.categories, (partition.COMPUTE, partition.COPY, partition.OPTIMIZER))
        moving, busy = communicates[pieces["category"]], own[pieces["category"]]  # (pieces,)
        parts = (
            busy & (pieces["phase"] == partition.FORWARD),
            busy & (pieces["phase"] == partition.BACKWARD),
            moving,
        )
        seconds = [np.bincount(pieces["layer"], lengths * part, len(cut.layers)).tolist() for part in parts]
        for layer, *of_layer in zip(cut.layers, *seconds, strict=True):
            row = LayerRow(layer or "outside of the model", cut.rank, *of_layer)
            before = rows.get(row.layer)
            if before is None or row.forward_s + row.backward_s > before.forward_s + before.backward_s:
                rows[row.layer] = row
    return list(rows.values())[:_MOST_LAYERS]


# The plan's terms.


_GROUPS: Mapping[str, tuple[str, ...]] = {
    "matrix products": ("matmul",),
    "attention": ("attention",),
    "elementwise, sums, copies": ("pointwise", "activation_offload", "optimizer_offload"),
    "recomputation (in the rows above)": ("recompute",),
    "gathering weights": ("weight_gather",),
    "reducing gradients": ("gradient_reduce",),
    "tensor collectives": ("tensor_comm",),
    "context exchange": ("context_comm",),
    "expert exchange": ("expert_comm", "unpaired_exchange"),
    "pipeline": ("bubble", "pipeline_comm"),
    "update": ("optimizer",),
    "waiting for slower ranks": ("scale_tax",),
}
"""The planner's terms by row."""
_GRADIENT_AXES = ("shard", "replicate", "expert_shard", "all", "stage", "sequence")


@dataclass(frozen=True)
class TermRow:
    """One row: seconds of a step."""

    term: str
    predicted_s: float
    """NaN without a plan."""
    measured_s: float
    """Mean of the recorded ranks."""


@dataclass(frozen=True)
class Prediction:
    """The planner's step, by row."""

    cluster: str
    step_s: float
    terms: Mapping[str, float]


def predict(spec: RunSpec, ranks: int, cluster_name: str) -> Prediction:
    """Return the planner's estimate of the run's own layout on ``ranks`` ranks of a cluster, its terms grouped into
    the rows of a profile.

    Raises ``ValueError`` with the reason if there is none.
    """
    try:
        step_s, terms_s = installed_planner().step_terms(spec, ranks, cluster_name)
    except (HardwareError, PlannerError) as error:
        raise ValueError(str(error)) from error
    rows: dict[str, float] = defaultdict(float)
    for term, seconds in terms_s.items():
        rows[next((row for row, terms in _GROUPS.items() if term in terms), f"other: {term}")] += seconds
    return Prediction(cluster_name, step_s, {row: seconds for row, seconds in rows.items() if seconds})


def measured(
    cuts: Sequence[partition.StepPieces],
    kinds: Sequence[KindRow],
    waits: Waits,
    passages: Mapping[int, Sequence[Passage]],
) -> dict[str, float]:
    """Return the seconds of a step by row, as means over ranks. They sum to the step's wall time; 0 is left out.

    Waits for later ranks are a row of their own, and what no row names is "other".
    """
    count = max(len(cuts), 1)
    steps = max(max((len(cut.steps) for cut in cuts), default=1), 1)
    rows: dict[str, float] = defaultdict(float)
    computed = {row.kind: row.seconds / count for row in kinds}
    rows["matrix products"] += computed.pop("matrix products", 0.0)
    rows["attention"] += computed.pop("attention", 0.0)
    rows["elementwise, sums, copies"] += sum(computed.values())
    categories: dict[str, float] = defaultdict(float)
    for cut in cuts:
        for word, seconds in cut.seconds().items():
            categories[word] += seconds / count
    waited: dict[str, float] = defaultdict(float)
    for (_, axis), seconds in waits.waited.items():
        waited[axis] += seconds / (count * steps)
    for word, seconds in categories.items():
        if word.startswith(partition.COMM):
            axis = word.removeprefix(partition.COMM)
            late = min(waited[axis], seconds)
            rows["waiting for slower ranks"] += late
            gathers = _gathers(passages, axis)
            rows["gathering weights"] += (seconds - late) * gathers
            rows[_row_of_axis(axis)] += (seconds - late) * (1 - gathers)
        elif word == partition.BUBBLE:
            rows["pipeline"] += seconds
        elif word == partition.OPTIMIZER:
            rows["update"] += seconds
        elif word in partition.GAPS:
            rows["host gaps"] += seconds
        elif word in (partition.DATA, partition.SAVE):
            rows[word] += seconds
    step_s = sum(cut.step_s for cut in cuts) / count
    other_s = step_s - sum(rows.values())
    if other_s > 1e-9:
        rows["other"] += other_s
    return {row: seconds for row, seconds in rows.items() if seconds}


def _row_of_axis(axis: str) -> str:
    """Return the planner's term for the collectives of an axis."""
    if axis.partition(" ")[0] in _GRADIENT_AXES:
        return "reducing gradients"
    return {"tensor": "tensor collectives", "context": "context exchange"}.get(axis, "expert exchange")


def _gathers(passages: Mapping[int, Sequence[Passage]], axis: str) -> float:
    """Return the fraction of an axis's collectives that gathers weights, by time; 0 unless the axis shards weights."""
    if axis.partition(" ")[0] not in ("shard", "expert_shard"):
        return 0.0
    all_ns = gather_ns = 0
    for rank_passages in passages.values():
        for passage in rank_passages:
            if passage.axis == axis and not passage.message:
                all_ns += passage.left_ns - passage.came_ns
                gather_ns += (passage.left_ns - passage.came_ns) * passage.key[2].startswith("all_gather")
    return gather_ns / all_ns if all_ns else 0.0


def term_rows(prediction: Prediction | None, measured_s: Mapping[str, float]) -> list[TermRow]:
    """Return predicted and measured seconds side by side, the planner's rows first. Without a prediction, predicted is NaN."""
    planned = {} if prediction is None else prediction.terms
    order = [row for row in _GROUPS if row in planned or row in measured_s]
    order += sorted((planned.keys() | measured_s.keys()) - set(order))
    nothing = float("nan") if prediction is None else 0.0
    return [TermRow(row, planned.get(row, nothing), measured_s.get(row, 0.0)) for row in order]


def largest_overruns(rows: Sequence[TermRow], step_s: float) -> list[str]:
    """Return sentences on the three terms that most exceed the planner's estimate, by over 2 % of the step."""
    over = sorted(
        (row for row in rows if row.measured_s - row.predicted_s > 0.02 * step_s),
        key=lambda row: row.predicted_s - row.measured_s,
    )
    sentences = []
    for row in over[:3]:
        plan = (
            f"the plan has {partition.duration(row.predicted_s)}"
            if row.predicted_s
            else "the plan has nothing for it"
        )
        gain_s = row.measured_s - row.predicted_s
        sentences.append(
            f"{row.term}: {plan}, measured {partition.duration(row.measured_s)}; as planned, a step would take {partition.duration(step_s - gain_s)} "
            f"instead of {partition.duration(step_s)}"
        )
    return sentences
