"""The analysis of a profile as a whole: one JSON object that the page, the terminal and programs read, and the merged trace."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.observe.profile.recorded_step import RankTrace
from phalanx.watch.profile.chrome import merged
from phalanx.watch.profile.clocks import ClockFit, fit_clocks
from phalanx.watch.profile.memory import memory_line
from phalanx.watch.profile.operations import by_layer, kinds
from phalanx.watch.profile.partition import StepPieces, partition
from phalanx.watch.profile.predicted import Prediction, TermRow, measured, term_rows, what_would_pay
from phalanx.watch.profile.verdict import findings
from phalanx.watch.profile.waits import Passage, Waits, critical_path, meet, passages, path_seconds
from phalanx.watch.profile.words import in_order

VERSION = 1
"""The version of the summary's fields."""
_MOST_PAIRS = 200


@dataclass(frozen=True)
class Analysis:
    """What came out of a profile."""

    summary: dict[str, Any]
    trace: dict[str, Any]
    """The merged trace, in Chrome's format."""


def analyze(
    name: str,
    traces: Sequence[RankTrace],
    order: Mapping[str, Any],
    prediction: Prediction | None,
    notes: Sequence[str] = (),
) -> Analysis:
    """Analyzes the recordings of at least one rank.

    Args:
        name: Of the profile.
        traces: By rank.
        order: What rank 0 had ordered: the layout, the peak, the ranks with their reasons.
        prediction: The planner's step, if there is one.
        notes: What a reader must know besides: ranks that are missing, why there is no plan.

    Raises ``ValueError`` if no step was recorded.
    """
    cuts = [partition(trace) for trace in traces]
    if not any(len(cut.pieces) for cut in cuts):
        raise ValueError("no rank recorded a whole step")
    kept = [(trace, cut) for trace, cut in zip(traces, cuts, strict=True) if len(cut.pieces)]
    traces, cuts = [trace for trace, _ in kept], [cut for _, cut in kept]
    clocks = fit_clocks(traces)
    ways = {trace.rank: passages(trace, clocks[trace.rank], cut.steps) for trace, cut in kept}
    waits = meet(ways)
    memory = [line for trace, cut in kept if (line := memory_line(trace, cut))]
    peak, copy_rate = _peaks(traces, order)
    operations = kinds(traces, cuts, peak, copy_rate)
    found = findings(cuts, waits)
    steps = max(len(cut.steps) for cut in cuts)
    step_s = sum(cut.step_s for cut in cuts) / len(cuts)
    error_ns = max(clock.error_ns for clock in clocks.values())
    summary = {
        "version": VERSION,
        "name": name,
        "asked_unix_s": order.get("asked_unix_s"),
        "step": cuts[0].steps[0][0],
        "steps": [number for number, _, _ in cuts[0].steps],
        "step_s": step_s,
        "ranks": [cut.rank for cut in cuts],
        "why_ranks": order.get("ranks", {}),
        "of_ranks": order.get("of_ranks"),
        "layout": order.get("layout", {}),
        "device": order.get("device"),
        "verdict": found[0].text,
        "findings": [asdict(one) for one in found],
        "clock_error_s": error_ns / 1e9 if math.isfinite(error_ns) else None,
        "table": _table(cuts, waits.waited, steps),
        "waits": _pairs(waits.charged, steps),
        "transfers": _transfers(waits, steps),
        "critical_path": _critical_path(kept, clocks, ways, waits, steps),
        "peaks": {
            "flops_per_s": peak,
            "flops_source": order.get("peak_source"),
            "copy_bytes_per_s": copy_rate,
        },
        "operations": [
            {**asdict(row), "flops_per_s": row.flops_per_s, "bytes_per_s": row.bytes_per_s}
            for row in operations
        ],
        "layers": [asdict(row) for row in by_layer(cuts)],
        "plan": _plan(prediction, term_rows(prediction, measured(cuts, operations, waits, ways)), step_s),
        "memory": [asdict(line) for line in memory],
        "recording": [_recording(trace) for trace in traces],
        "notes": list(notes),
    }
    about = {"profile": name, "clock_error_us": error_ns / 1e3 if math.isfinite(error_ns) else None}
    return Analysis(summary, merged(traces, clocks, waits, memory, about=about))


def _transfers(waits: Waits, steps: int) -> list[dict[str, Any]]:
    """What each group of ranks moved in a step, the longest transfers first."""
    longest = sorted(waits.moved.items(), key=lambda pair: -pair[1].seconds)[:_MOST_PAIRS]
    return [
        {
            "axis": axis,
            "group": group,
            "calls": one.calls / steps,
            "bytes": one.bytes / steps,
            "seconds": one.seconds / steps,
            "bytes_per_s": one.bytes_per_s,
        }
        for (axis, group), one in longest
    ]


def _critical_path(
    kept: Sequence[tuple[RankTrace, StepPieces]],
    clocks: Mapping[int, ClockFit],
    ways: Mapping[int, Sequence[Passage]],
    waits: Waits,
    steps: int,
) -> dict[str, dict[str, float]]:
    """Seconds of a step that hold up all others, by rank and what they were spent on."""
    bases = {trace.rank: int(trace.meta.get("base_unix_ns", 0)) for trace, _ in kept}
    by_rank = {cut.rank: cut for _, cut in kept}

    def common_ns(cut: StepPieces, field: str, place: int) -> int:
        return int(clocks[cut.rank].to_common(cut.pieces[field][[place]] + bases[cut.rank]).item())

    windows = {
        rank: (common_ns(cut, "begin_ns", 0), common_ns(cut, "end_ns", -1)) for rank, cut in by_rank.items()
    }
    path = critical_path(waits, ways, windows)
    return {
        str(rank): {word: seconds / steps for word, seconds in words.items()}
        for rank, words in sorted(path_seconds(path, by_rank, clocks, bases).items())
    }


def _plan(prediction: Prediction | None, rows: Sequence[TermRow], step_s: float) -> dict[str, Any]:
    """The planner's step beside the measured one, term by term."""
    return {
        "cluster": None if prediction is None else prediction.cluster,
        "step_s": None if prediction is None else prediction.step_s,
        "terms": [
            {
                "term": row.term,
                "predicted_s": None if math.isnan(row.predicted_s) else row.predicted_s,
                "measured_s": row.measured_s,
            }
            for row in rows
        ],
        "would_pay": [] if prediction is None else what_would_pay(rows, step_s),
    }


def _table(cuts: Sequence[StepPieces], waited: Mapping[tuple[int, str], float], steps: int) -> dict[str, Any]:
    """Where a step of each rank went; each row sums to that rank's step."""
    seconds = {cut.rank: cut.seconds() for cut in cuts}
    words = in_order({word for one in seconds.values() for word in one})
    return {
        "columns": words,
        "rows": [
            {
                "rank": cut.rank,
                "step_s": cut.step_s,
                "seconds": [seconds[cut.rank].get(word, 0.0) for word in words],
                "waited_s": sum(value for (rank, _), value in waited.items() if rank == cut.rank) / steps,
            }
            for cut in cuts
        ],
    }


def _pairs(charged: Mapping[int, Mapping[int, float]], steps: int) -> list[dict[str, Any]]:
    pairs = [
        {"late": late, "waiting": waiting, "seconds": seconds / steps}
        for late, others in charged.items()
        for waiting, seconds in others.items()
    ]
    return sorted(pairs, key=lambda pair: -float(pair["seconds"]))[:_MOST_PAIRS]


def _peaks(traces: Sequence[RankTrace], order: Mapping[str, Any]) -> tuple[float, float]:
    flops = order.get("peak_flops_per_s")
    peak = float(flops) if isinstance(flops, int | float) and flops > 0 else math.inf
    rates = [float(trace.meta.get("copy_bytes_per_s", 0)) for trace in traces]
    best = max(rates, default=0.0)
    return peak, best if best > 0 else math.inf


def _recording(trace: RankTrace) -> dict[str, Any]:
    """What recording cost this rank, and what was left out."""
    known = {key: trace.meta.get(key) for key in ("start_s", "stop_s", "left_out", "copy_bytes_per_s")}
    return {"rank": trace.rank, "events": len(trace.events), "allocations": len(trace.allocations), **known}
