"""Analysis of a profile: one JSON object for the page, the terminal and programs, with sentences on the largest
costs; and the merged trace.

Four causes make a step longer than its compute, and each is measured separately. A rank is late to a collective: the
waits of the others are charged to it, and its excess over its peers is the cause. Bytes move slowly although all
ranks are present. No rank computes (host gaps, data waits, saves). A pipeline stage is idle. Costs are in seconds per
step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from phalanx.observe.recorded_step import RankTrace
from phalanx.observe.throughput import format_bytes
from phalanx_watch.profile import operations as op_times
from phalanx_watch.profile import partition
from phalanx_watch.profile import waits as wait_times
from phalanx_watch.profile.chrome import memory_line, merged

# Findings, in sentences.


_WORTH_A_WORD = 0.03
"""Least share of a step that is reported."""
_CULPRIT = 0.08
"""Least share of a step that the verdict names."""
_UNLIKE = 3.0
"""Slowdown against the other groups of its axis from which a link is reported by itself."""
_BOUND = {
    partition.COMPUTE: "computing",
    partition.COPY: "copies",
    partition.OPTIMIZER: "the update",
}


@dataclass(frozen=True)
class Finding:
    """One cause of a step's time."""

    code: str
    """``late rank``, ``slow link``, ``host gap``, ``data wait``, ``save``, ``bubble`` or ``computing``."""
    cost_s: float
    """Seconds per step."""
    text: str
    ranks: tuple[int, ...] = ()
    axis: str = ""


def findings(cuts: Sequence[partition.StepPieces], waits: wait_times.Waits) -> list[Finding]:
    """Return the findings that cost a noticeable share of the step, the most costly first; empty without ranks.

    A healthy one is first if none costs ``_CULPRIT`` of the step.
    """
    if not cuts:
        return []
    step_s = sum(cut.step_s for cut in cuts) / len(cuts)
    seconds = {cut.rank: cut.seconds() for cut in cuts}
    steps = max(len(cut.steps) for cut in cuts)
    worth = [
        *_late(seconds, waits, steps, step_s),
        *_links(waits, steps, step_s),
        *_common(seconds, step_s),
    ]
    worth = [finding for finding in worth if finding.cost_s > _WORTH_A_WORD * step_s]
    worth.sort(key=lambda finding: -finding.cost_s)
    if not worth or worth[0].cost_s < _CULPRIT * step_s:
        worth.insert(0, _healthy(seconds, step_s))
    return worth


def _late(
    seconds: Mapping[int, Mapping[str, float]], waits: wait_times.Waits, steps: int, step_s: float
) -> list[Finding]:
    """Return a finding for each rank that others wait for, with its cause; none if moving bytes is the cause.

    The cost is the mean wait of the others, less their waits in return, but at least the rank's own excess as far as
    they waited. A rank without a cost has no finding.
    """
    late_ranks = []
    for late, waiting in waits.charged.items():
        # Ranks of other groups waited less or not at all; the cost is the wait of the most delayed ones.
        cost_s = sum(waiting.values()) / max(len(waiting), 1) / steps
        others = [_without_waits(rank, seconds, waits, steps) for rank in seconds if rank != late]
        cause_and_seconds = _why(late, _without_waits(late, seconds, waits, steps), others)
        if cause_and_seconds is None:  # its collectives are slow: _links reports that
            continue
        cause, more_s = cause_and_seconds
        # The net wait: ranks that are late in turn have no culprit. But a rank with more work than its peers counts at least
        # for that excess, as far as they waited.
        returned_s = sum(waits.charged[other].get(late, 0.0) for other in waiting if other in waits.charged)
        net_s = max(cost_s - returned_s / max(len(waiting), 1) / steps, min(cost_s, more_s))
        if net_s <= 0:
            continue
        others_are = "the others wait" if len(seconds) > 2 else f"rank {next(iter(waiting))} waits"
        text = f"{cause}: {others_are} {partition.duration(cost_s)} of each {partition.duration(step_s)} step for it"
        late_ranks.append(Finding("late rank", net_s, text, (late,)))
    return late_ranks


def _without_waits(
    rank: int, seconds: Mapping[int, Mapping[str, float]], waits: wait_times.Waits, steps: int
) -> dict[str, float]:
    """Return a rank's seconds of a step by category, without waits for later ranks and without pipeline bubbles."""
    return {
        word: value
        - (waits.waited.get((rank, axis), 0.0) / steps if (axis := partition.axis_of(word)) else 0.0)
        for word, value in seconds[rank].items()
        if word != partition.BUBBLE
    }


def _why(
    late: int, mine: Mapping[str, float], others: Sequence[Mapping[str, float]]
) -> tuple[str, float] | None:
    """Return the cause of a late rank, by comparison with the median of its peers, and its excess in seconds per step.

    It is computing or the largest idle category; if neither takes longer, only that the rank comes last, with 0. Return
    None if the cause is communication.
    """
    words = {word for rank_seconds in (mine, *others) for word in rank_seconds}
    usual = {word: median(rank_seconds.get(word, 0.0) for rank_seconds in others) for word in words}
    more = {word: mine.get(word, 0.0) - usual[word] for word in words}
    computing = [word for word in (partition.COMPUTE, partition.COPY, partition.OPTIMIZER) if word in words]
    extra_s = sum(more[word] for word in computing)
    idle = {word: more[word] for word in words if word not in computing}
    most = max(idle, key=lambda word: idle[word], default=None)
    if most is None or extra_s >= idle[most]:
        base_s = sum(usual[word] for word in computing)
        if extra_s <= 0:
            return f"rank {late} comes last", 0.0
        times = (base_s + extra_s) / base_s if base_s else float("inf")
        figures = f"{partition.duration(base_s + extra_s)} against {partition.duration(base_s)}"
        return f"rank {late} computes {times:.2g}x as long as its peers ({figures})", extra_s
    if partition.axis_of(most) is not None:
        return None
    doing = {
        partition.BETWEEN: "is idle between steps",
        partition.INSIDE: "is idle between operations (its host is behind, or sleeps)",
        partition.LOG: "writes its log",
        partition.DATA: "waits for data",
        partition.SAVE: "saves",
    }.get(most, f"spends on {most}")
    return f"rank {late} {doing} {partition.duration(idle[most])} longer than its peers", idle[most]


def _links(waits: wait_times.Waits, steps: int, step_s: float) -> list[Finding]:
    """Return a finding for the collectives of each axis: their time with all ranks present in the slowest group.

    If its calls take over ``_UNLIKE`` times as long as in other groups, the link among its ranks is named.
    """
    by_axis: dict[str, dict[str, wait_times.Transfer]] = {}
    for (axis, group), transfer in waits.moved.items():
        by_axis.setdefault(axis, {})[group] = transfer
    slow_links = []
    for axis, groups in by_axis.items():
        worst = max(groups, key=lambda group: groups[group].typical_s * groups[group].calls)
        transfer = groups[worst]
        cost_s = transfer.seconds / steps
        others = [
            call_s
            for name, other_transfer in groups.items()
            if name != worst
            for call_s in other_transfer.each_s
        ]
        times = transfer.typical_s / median(others) if others and median(others) else 0.0
        ranks = next(
            tuple(passage.rank for passage in meeting.passages)
            for meeting in waits.meetings
            if meeting.passages[0].key[0] == worst and meeting.passages[0].axis == axis
        )
        each = f"{transfer.calls // steps} calls, {format_bytes(transfer.bytes / steps)} at {format_bytes(transfer.bytes_per_s)}/s"
        unlike = times > _UNLIKE
        who = (
            f"the link among ranks {_list(ranks)} (axis {axis})"
            if unlike
            else f"the collectives of axis {axis}"
        )
        but = f", {times:.1f}x as long a call as in the other groups" if unlike else ""
        text = f"{who} take{'s' if unlike else ''} {partition.duration(cost_s)} of each {partition.duration(step_s)} step with everybody there ({each}){but}"
        slow_links.append(Finding("slow link", cost_s, text, ranks, axis))
    return slow_links


def _common(seconds: Mapping[int, Mapping[str, float]], step_s: float) -> list[Finding]:
    """Return the non-compute time that all ranks have: the minimum over ranks, since the excess is one rank's
    lateness.

    Pipeline bubbles are the mean instead.
    """
    texts = {
        partition.BETWEEN: ("host gap", "between steps no rank computes"),
        partition.INSIDE: ("host gap", "between operations no rank computes, the host is behind"),
        partition.LOG: ("host gap", "writing the log"),
        partition.DATA: ("data wait", "all ranks wait for data"),
        partition.SAVE: ("save", "all ranks wait for a save or snapshot"),
    }
    common = []
    for word, (code, text) in texts.items():
        cost_s = min(rank_seconds.get(word, 0.0) for rank_seconds in seconds.values())
        if cost_s:
            common.append(
                Finding(
                    code,
                    cost_s,
                    f"{text}: {partition.duration(cost_s)} of each {partition.duration(step_s)} step",
                )
            )
    bubble_s = sum(rank_seconds.get(partition.BUBBLE, 0.0) for rank_seconds in seconds.values()) / len(
        seconds
    )
    if bubble_s:
        text = f"stages have nothing to compute for {partition.duration(bubble_s)} of each {partition.duration(step_s)} step, on average over ranks"
        common.append(Finding("bubble", bubble_s, text))
    return common


def _healthy(seconds: Mapping[int, Mapping[str, float]], step_s: float) -> Finding:
    """Return the finding that nothing delays the step.

    Its text has the share of computing, and which part of that is largest: kernels, copies or the update.
    """
    shares = {
        word: sum(rank_seconds.get(word, 0.0) for rank_seconds in seconds.values()) / len(seconds)
        for word in _BOUND
    }
    total = sum(shares.values())
    most = max(shares, key=lambda word: shares[word])
    text = (
        f"nothing holds the step up: {total / step_s:.0%} of {partition.duration(step_s)} is computing, most of it {_BOUND[most]}"
        if step_s
        else "nothing was recorded"
    )
    return Finding("computing", 0.0, text)


def _list(ranks: Sequence[int]) -> str:
    """Return up to six ranks with commas, and "..." for more."""
    shown = ", ".join(map(str, ranks[:6]))
    return f"{shown}, ..." if len(ranks) > 6 else shown


# The analysis.


VERSION = 1
"""Version of the summary's fields."""
_MOST_PAIRS = 200


@dataclass(frozen=True)
class Analysis:
    """Result of the analysis of a profile."""

    summary: dict[str, Any]
    trace: dict[str, Any]
    """The merged trace, in Chrome's format."""


def analyze(
    name: str,
    traces: Sequence[RankTrace],
    order: Mapping[str, Any],
    prediction: op_times.Prediction | None,
    notes: Sequence[str] = (),
) -> Analysis:
    """Analyze the recordings of at least one rank: the summary and the merged trace.

    Ranks without a full step are left out, and noted.

    Args:
        name: Of the profile.
        traces: By rank.
        order: Rank 0's order: the layout, the peak, the ranks with their reasons.
        prediction: The planner's step, if there is one.
        notes: Notes for the reader: missing ranks, the reason for a missing plan.

    Raises ``ValueError`` if no step was recorded.
    """
    cuts = [partition.partition(trace) for trace in traces]
    if not any(len(cut.pieces) for cut in cuts):
        raise ValueError("no rank recorded a whole step")
    kept = [(trace, cut) for trace, cut in zip(traces, cuts, strict=True) if len(cut.pieces)]
    left_out = [trace.rank for trace, cut in zip(traces, cuts, strict=True) if not len(cut.pieces)]
    if left_out:
        notes = [*notes, f"left out are ranks without a full step: {_list(left_out)}"]
    traces, cuts = [trace for trace, _ in kept], [cut for _, cut in kept]
    clocks = wait_times.fit_clocks(traces)
    ways = {trace.rank: wait_times.passages(trace, clocks[trace.rank], cut.steps) for trace, cut in kept}
    waits = wait_times.meet(ways)
    memory = [line for trace, cut in kept if (line := memory_line(trace, cut))]
    peak, copy_rate = _peaks(traces, order)
    operations = op_times.kinds(traces, cuts, peak, copy_rate)
    results = findings(cuts, waits)
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
        "verdict": results[0].text,
        "findings": [asdict(finding) for finding in results],
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
        "layers": [asdict(row) for row in op_times.by_layer(cuts)],
        "plan": _plan(
            prediction,
            op_times.term_rows(prediction, op_times.measured(cuts, operations, waits, ways)),
            step_s,
        ),
        "memory": [asdict(line) for line in memory],
        "recording": [_recording(trace) for trace in traces],
        "notes": list(notes),
    }
    about = {"profile": name, "clock_error_us": error_ns / 1e3 if math.isfinite(error_ns) else None}
    return Analysis(summary, merged(traces, clocks, waits, memory, about=about))


def _transfers(waits: wait_times.Waits, steps: int) -> list[dict[str, Any]]:
    """Return calls, bytes and seconds in a step of the ``_MOST_PAIRS`` longest groups of ranks."""
    longest = sorted(waits.moved.items(), key=lambda pair: -pair[1].seconds)[:_MOST_PAIRS]
    return [
        {
            "axis": axis,
            "group": group,
            "calls": transfer.calls / steps,
            "bytes": transfer.bytes / steps,
            "seconds": transfer.seconds / steps,
            "bytes_per_s": transfer.bytes_per_s,
        }
        for (axis, group), transfer in longest
    ]


def _critical_path(
    kept: Sequence[tuple[RankTrace, partition.StepPieces]],
    clocks: Mapping[int, wait_times.ClockFit],
    ways: Mapping[int, Sequence[wait_times.Passage]],
    waits: wait_times.Waits,
    steps: int,
) -> dict[str, dict[str, float]]:
    """Return the mean seconds a step on the critical path through all ranks, by rank and category."""
    bases = {trace.rank: int(trace.meta.get("base_unix_ns", 0)) for trace, _ in kept}
    by_rank = {cut.rank: cut for _, cut in kept}

    def common_ns(cut: partition.StepPieces, field: str, place: int) -> int:
        return int(clocks[cut.rank].to_common(cut.pieces[field][[place]] + bases[cut.rank]).item())

    windows = {
        rank: (common_ns(cut, "begin_ns", 0), common_ns(cut, "end_ns", -1)) for rank, cut in by_rank.items()
    }
    path = wait_times.critical_path(waits, ways, windows)
    return {
        str(rank): {word: seconds / steps for word, seconds in words.items()}
        for rank, words in sorted(wait_times.path_seconds(path, by_rank, clocks, bases).items())
    }


def _plan(
    prediction: op_times.Prediction | None, rows: Sequence[op_times.TermRow], step_s: float
) -> dict[str, Any]:
    """Return the planner's step beside the measured one, term by term, and what would pay; None where there is no prediction."""
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
        "would_pay": [] if prediction is None else op_times.largest_overruns(rows, step_s),
    }


def _table(
    cuts: Sequence[partition.StepPieces], waited: Mapping[tuple[int, str], float], steps: int
) -> dict[str, Any]:
    """Return the seconds of a step by rank and category; each row sums to that rank's step.

    ``waited_s`` is the part of these seconds in which the rank waited for later ranks.
    """
    seconds = {cut.rank: cut.seconds() for cut in cuts}
    words = partition.in_order({word for rank_seconds in seconds.values() for word in rank_seconds})
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
    """Return the ``_MOST_PAIRS`` longest (late, waiting) pairs of ranks with the seconds of a step, the longest first."""
    pairs = [
        {"late": late, "waiting": waiting, "seconds": seconds / steps}
        for late, others in charged.items()
        for waiting, seconds in others.items()
    ]
    return sorted(pairs, key=lambda pair: -float(pair["seconds"]))[:_MOST_PAIRS]


def _peaks(traces: Sequence[RankTrace], order: Mapping[str, Any]) -> tuple[float, float]:
    """Return peak FLOP/s of a rank and the best copy rate, bytes/s; infinite if unknown."""
    flops = order.get("peak_flops_per_s")
    peak = float(flops) if isinstance(flops, int | float) and flops > 0 else math.inf
    rates = [float(trace.meta.get("copy_bytes_per_s", 0)) for trace in traces]
    best = max(rates, default=0.0)
    return peak, best if best > 0 else math.inf


def _recording(trace: RankTrace) -> dict[str, Any]:
    """Return the cost of recording on this rank, and what was left out."""
    costs = {key: trace.meta.get(key) for key in ("start_s", "stop_s", "left_out", "copy_bytes_per_s")}
    return {"rank": trace.rank, "events": len(trace.events), "allocations": len(trace.allocations), **costs}
