"""Says in sentences what a profile shows, what costs most first.

Four things make a step longer than its computing, and each is measured apart from the others: a rank that comes late to what all do together (the
others' waiting is charged to it, and what it spends more time on than its peers is why), bytes that move slowly although everybody is there, time in
which no rank computes (the host's gaps, waiting for data, saving), and a pipeline with nothing to do. Their costs are in seconds of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from phalanx.observe.throughput import format_bytes
from phalanx.watch.profile.partition import StepPieces
from phalanx.watch.profile.waits import Transfer, Waits
from phalanx.watch.profile.words import (
    BETWEEN,
    BUBBLE,
    COMPUTE,
    COPY,
    DATA,
    INSIDE,
    LOG,
    OPTIMIZER,
    SAVE,
    axis_of,
    duration,
)

_WORTH_A_WORD = 0.03
"""Part of a step from which something is told."""
_CULPRIT = 0.08
"""Part of a step from which it is what the verdict is about."""
_UNLIKE = 3.0
"""Times as slow as the groups of its axis: a link is told apart."""
_BOUND = {
    COMPUTE: "computing",
    COPY: "copies",
    OPTIMIZER: "the update",
}


@dataclass(frozen=True)
class Finding:
    """One thing that a step's time goes to."""

    code: str
    """``late rank``, ``slow link``, ``host gap``, ``data wait``, ``save``, ``bubble`` or ``computing``."""
    cost_s: float
    """Seconds of a step."""
    text: str
    ranks: tuple[int, ...] = ()
    axis: str = ""


def findings(cuts: Sequence[StepPieces], waits: Waits) -> list[Finding]:
    """What was found, what costs most first; at least one."""
    if not cuts:
        return []
    step_s = sum(cut.step_s for cut in cuts) / len(cuts)
    seconds = {cut.rank: cut.seconds() for cut in cuts}
    steps = max(len(cut.steps) for cut in cuts)
    found = [
        *_late(seconds, waits, steps, step_s),
        *_links(waits, steps, step_s),
        *_common(seconds, step_s),
    ]
    found = [one for one in found if one.cost_s > _WORTH_A_WORD * step_s]
    found.sort(key=lambda one: -one.cost_s)
    if not found or found[0].cost_s < _CULPRIT * step_s:
        found.insert(0, _healthy(seconds, step_s))
    return found


def _late(
    seconds: Mapping[int, Mapping[str, float]], waits: Waits, steps: int, step_s: float
) -> list[Finding]:
    found = []
    for late, waiting in waits.charged.items():
        # Ranks of other groups waited less or not at all; what counts is what those wait that are held up most.
        cost_s = sum(waiting.values()) / max(len(waiting), 1) / steps
        others = [_without_waits(rank, seconds, waits, steps) for rank in seconds if rank != late]
        found_why = _why(late, _without_waits(late, seconds, waits, steps), others)
        if found_why is None:  # its collectives are slow: that is told of their link
            continue
        why, more_s = found_why
        # What others waited for it, less what it waited for them: of ranks that are late in turn, nobody is to blame. But one
        # that has more to do than its peers is, as far as they waited, whatever held these up at other times.
        returned_s = sum(waits.charged[other].get(late, 0.0) for other in waiting if other in waits.charged)
        net_s = max(cost_s - returned_s / max(len(waiting), 1) / steps, min(cost_s, more_s))
        if net_s <= 0:
            continue
        others_are = "the others wait" if len(seconds) > 2 else f"rank {next(iter(waiting))} waits"
        text = f"{why}: {others_are} {duration(cost_s)} of each {duration(step_s)} step for it"
        found.append(Finding("late rank", net_s, text, (late,)))
    return found


def _without_waits(
    rank: int, seconds: Mapping[int, Mapping[str, float]], waits: Waits, steps: int
) -> dict[str, float]:
    """A rank's seconds of a step by category, without waiting for later ranks."""
    return {
        word: value - (waits.waited.get((rank, axis), 0.0) / steps if (axis := axis_of(word)) else 0.0)
        for word, value in seconds[rank].items()
        if word != BUBBLE
    }


def _why(
    late: int, mine: Mapping[str, float], others: Sequence[Mapping[str, float]]
) -> tuple[str, float] | None:
    """What a late rank spends more time on than its peers, and how many seconds of a step; ``None`` if that is moving bytes."""
    words = {word for one in (mine, *others) for word in one}
    usual = {word: median(one.get(word, 0.0) for one in others) for word in words}
    more = {word: mine.get(word, 0.0) - usual[word] for word in words}
    computing = [word for word in (COMPUTE, COPY, OPTIMIZER) if word in words]
    extra_s = sum(more[word] for word in computing)
    idle = {word: more[word] for word in words if word not in computing}
    most = max(idle, key=lambda word: idle[word], default=None)
    if most is None or extra_s >= idle[most]:
        base_s = sum(usual[word] for word in computing)
        if extra_s <= 0:
            return f"rank {late} comes last", 0.0
        times = (base_s + extra_s) / base_s if base_s else float("inf")
        figures = f"{duration(base_s + extra_s)} against {duration(base_s)}"
        return f"rank {late} computes {times:.2g}x as long as its peers ({figures})", extra_s
    if axis_of(most) is not None:
        return None
    doing = {
        BETWEEN: "stands still between steps",
        INSIDE: "stands still between operations (its host is behind, or sleeps)",
        LOG: "writes its log",
        DATA: "waits for data",
        SAVE: "saves",
    }.get(most, f"spends on {most}")
    return f"rank {late} {doing} {duration(idle[most])} longer than its peers", idle[most]


def _links(waits: Waits, steps: int, step_s: float) -> list[Finding]:
    """Collectives that take long although everybody is there."""
    by_axis: dict[str, dict[str, Transfer]] = {}
    for (axis, group), transfer in waits.moved.items():
        by_axis.setdefault(axis, {})[group] = transfer
    found = []
    for axis, groups in by_axis.items():
        worst = max(groups, key=lambda group: groups[group].typical_s * groups[group].calls)
        transfer = groups[worst]
        cost_s = transfer.seconds / steps
        others = [call_s for name, one in groups.items() if name != worst for call_s in one.each_s]
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
        text = f"{who} take{'s' if unlike else ''} {duration(cost_s)} of each {duration(step_s)} step with everybody there ({each}){but}"
        found.append(Finding("slow link", cost_s, text, ranks, axis))
    return found


def _common(seconds: Mapping[int, Mapping[str, float]], step_s: float) -> list[Finding]:
    """What every rank spends time on that is no computing: the least of all ranks, since more than that is one rank's lateness."""
    said = {
        BETWEEN: ("host gap", "between steps no rank computes"),
        INSIDE: ("host gap", "between operations no rank computes, the host is behind"),
        LOG: ("host gap", "writing the log"),
        DATA: ("data wait", "all ranks wait for data"),
        SAVE: ("save", "all ranks wait for a save or snapshot"),
    }
    found = []
    for word, (code, text) in said.items():
        cost_s = min(one.get(word, 0.0) for one in seconds.values())
        if cost_s:
            found.append(Finding(code, cost_s, f"{text}: {duration(cost_s)} of each {duration(step_s)} step"))
    bubble_s = sum(one.get(BUBBLE, 0.0) for one in seconds.values()) / len(seconds)
    if bubble_s:
        text = f"stages have nothing to compute for {duration(bubble_s)} of each {duration(step_s)} step, on average over ranks"
        found.append(Finding("bubble", bubble_s, text))
    return found


def _healthy(seconds: Mapping[int, Mapping[str, float]], step_s: float) -> Finding:
    shares = {word: sum(one.get(word, 0.0) for one in seconds.values()) / len(seconds) for word in _BOUND}
    total = sum(shares.values())
    most = max(shares, key=lambda word: shares[word])
    text = (
        f"nothing holds the step up: {total / step_s:.0%} of {duration(step_s)} is computing, most of it {_BOUND[most]}"
        if step_s
        else "nothing was recorded"
    )
    return Finding("computing", 0.0, text)


def _list(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:6]))
    return f"{shown}, ..." if len(ranks) > 6 else shown
