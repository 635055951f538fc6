"""What the bits rest on beside the run file: the data, the libraries, the machines, and clocks that agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from phalanx.observe.events import CheckpointCopied, Message, RunStarted
from phalanx.watch.why.observed import Observed
from phalanx.watch.why.reason import Reason
from phalanx.watch.why.thresholds import SKEW_S

_NAMED = 8


def other_data(seen: Observed) -> Iterator[Reason]:
    """The data are not those that the run was started with."""
    if seen.finished or not seen.data_fingerprint:
        return
    if seen.data_error:
        yield Reason(
            code="data-gone",
            severity="warning",
            title="The run's data cannot be opened",
            where=_data_path(seen),
            since=None,
            evidence=(seen.data_error,),
            doing="ranks that have them open may go on; a start would be refused",
            next="put the dataset back, or a copy of it (phalanx data copy), and name it: data.path",
        )
        return
    if not seen.data_now or seen.data_now == seen.data_fingerprint:
        return
    yield Reason(
        code="other-data",
        severity="critical",
        title="The data are another version than those that the run was started with",
        where=_data_path(seen),
        since=None,
        evidence=(
            f"fingerprint at the start {seen.data_fingerprint[:16]}, now {seen.data_now[:16]}",
            "the order of samples and the tokens differ: the weights would be those of neither",
        ),
        doing="a start of the run is refused; ranks that run read the files that they have opened",
        next=f"put the version of {seen.data_fingerprint[:12]} back (phalanx data show {_data_path(seen)} says which is there), "
        "or train on the new one as a run of its own",
    )


def _data_path(seen: Observed) -> str:
    if seen.spec is None:
        return "its dataset"
    return seen.spec.data.path or ", ".join(source.path for source in seen.spec.data.sources[:3])


def other_libraries(seen: Observed) -> Iterator[Reason]:
    """The nodes differ in libraries, drivers or hardware, or the run was begun with others."""
    if seen.finished:
        return
    if seen.machines:
        yield Reason(
            code="mixed-machines",
            severity="warning",
            title="The nodes of the run are not alike",
            where=seen.machines[0].split(":")[0],
            since=seen.began_at,
            evidence=seen.machines[:_NAMED],
            doing="probes of the arithmetic refuse ranks whose kernels round differently (runtime.mixed_machines)",
            next="install the same on all nodes (uv sync --frozen, or one image), then start the odd node's agent again: phalanx agent",
        )
    first, now = seen.first_started, seen.started
    if first is None or now is None or first is now:
        return
    before, after = _packages(first), _packages(now)
    changed = [
        f"{name}: {before[name]} before, {after[name]} now"
        for name in before
        if after.get(name, before[name]) != before[name]
    ]
    if changed:
        yield Reason(
            code="changed-libraries",
            severity="warning",
            title="The run goes on with other libraries than it was begun with",
            where=", ".join(line.split(":")[0] for line in changed[:_NAMED]),
            since=seen.began_at,
            evidence=tuple(changed[:_NAMED]),
            doing="nothing: from here on the bits are those of this history of libraries",
            next=f"if the bits shall be those of the first: install these versions and go back: phalanx train {seen.run} --from STEP",
        )


def _packages(started: RunStarted) -> Mapping[str, str]:
    packages = started.environment.get("packages")
    return (
        {str(name): str(version) for name, version in packages.items()} if isinstance(packages, dict) else {}
    )


def throttled(seen: Observed) -> Iterator[Reason]:
    """Processors of a node are slowed down by heat or power while the run trains."""
    if seen.finished:
        return
    in_fleet = seen.fleet is not None
    for one in seen.throttled:
        slow = [rank for rank in seen.slow_ranks if rank.node == one.node]
        yield Reason(
            code="throttled",
            severity="warning",
            title=f"Node {one.node} is slowed down: {one.what[0]}",
            where=f"node {one.node}",
            since=one.since_s,
            evidence=(
                *one.what[:_NAMED],
                f"seen in {one.looks} look{'s' * (one.looks != 1)} since then",
                *(
                    f"its rank {rank.rank} computes {rank.slowdown:.0%} longer than its peers"
                    for rank in slow
                ),
            ),
            doing="training goes on; all ranks wait for the slowest"
            + ("; if it becomes a straggler, a spare takes its place" if in_fleet else ""),
            next=f"look at its cooling and power; to do without it: phalanx fleet drain {seen.run} {one.node}"
            if in_fleet
            else "look at the cooling and power of that machine",
        )


def clock_skew(seen: Observed) -> Iterator[Reason]:
    """Clocks that wrote the stream, or this one, differ by seconds."""
    if seen.finished:
        return
    ahead = max((event.t for event in seen.events), default=0.0) - seen.now
    back = 0.0
    since = None
    for earlier, later in pairwise(seen.events):
        # A copy to a store is told when its process gets to it; everything else is written as it happens.
        if earlier.t - later.t > back and not isinstance(later.body, CheckpointCopied):
            back, since = earlier.t - later.t, later.t
    worst = max(ahead, back)
    if worst <= SKEW_S:
        return
    by_fleet = any(isinstance(event.body, Message) for event in seen.events) and seen.fleet is not None
    yield Reason(
        code="clock-skew",
        severity="warning",
        title=f"Clocks differ by {worst:.3g} s",
        where="the machines that write the events"
        if back >= ahead
        else "this machine's clock against that of the run",
        since=since,
        evidence=(
            f"the newest event is {ahead:.3g} s in the future of this machine"
            if ahead >= back
            else f"of two events in the order of the file the later is stamped {back:.3g} s earlier",
        ),
        doing="nothing depends on it but times that are shown"
        + ("; leases are counted by each machine's own clock" if by_fleet else ""),
        next="let all machines keep time: chronyc tracking (or timedatectl) on each",
    )
