"""Rules on the fleet: slow ranks, lost nodes, missing spares, a lost coordinator, hardware errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from phalanx.fleet.control.fleet_file import FleetIncident
from phalanx.fleet.core.requests import GIVEN_BACK
from phalanx.fleet.core.state import FleetPhase
from phalanx.observe.events import EpochLeft, IncidentKind, MachineUsed
from phalanx.observe.throughput import format_bytes, format_duration
from phalanx_watch.why import observed as o

_AWAY = ("lost", "quarantined")
_GOING = ("leaving", "drained", GIVEN_BACK)


def straggler(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason for each rank, up to five, that computes longer than its peers in the newest windows, steadily or
    in bursts.

    Also for each node that the fleet recently recorded as slow: "info" if a spare took its place.
    """
    throttled = {note.node for note in observed.throttled}  # the throttling rule names their cause and rank
    for slow in [
        rank
        for rank in observed.slow_ranks
        if max(rank.slowdown, rank.late_share) >= o.SLOW_RANK and rank.node not in throttled
    ][:5]:
        node = f" on {slow.node}" if slow.node else ""
        is_steady = slow.slowdown >= o.SLOW_RANK
        yield o.Reason(
            code="straggler",
            title=f"Rank {slow.rank} is {slow.slowdown:.0%} slower than its peers, and all wait for it"
            if is_steady
            else f"Rank {slow.rank} is late in bursts: its peers have waited {slow.late_share:.0%} of their time for it",
            where=f"rank {slow.rank}{node}",
            since=slow.since,
            evidence=(
                f"its own computing takes {slow.compute_s:.3g} s a step, that of its peers {slow.compute_s / (1 + slow.slowdown):.3g} s",
                f"slower in {slow.slower} of the newest {slow.windows} windows",
            ),
            doing=observed.doing(
                "a fleet with a spare replaces it"
                if observed.fleet
                else "nothing: a run without a fleet has no spares"
            ),
            next=f"phalanx ranks {observed.run}; "
            + (
                f"phalanx fleet drain {observed.run} NODE, if no spare is free"
                if observed.fleet
                else "look at that machine: other processes, clocks, heat"
            ),
        )
    fleet = observed.live_fleet
    for node, happenings in _by_node(
        fleet.happenings if fleet else (), IncidentKind.STRAGGLER, IncidentKind.SLOW_WITHOUT_SPARE
    ).items():
        if observed.now - happenings[-1].unix_s > o.RECOVERING_S:
            continue
        replaced = happenings[-1].kind is IncidentKind.STRAGGLER
        yield o.Reason(
            code="straggler",
            severity="info" if replaced else "warning",
            title=f"Node {node} was slower than its peers"
            if replaced
            else f"Node {node} is slower than its peers, and no spare is free",
            where=f"node {node}",
            since=happenings[0].unix_s,
            evidence=tuple(happening.text for happening in happenings[-2:]),
            doing="it was quarantined, and a spare took its place"
            if replaced
            else "training continues at its pace",
            next=f"look at that machine; when it is well: phalanx fleet add {observed.run} {node}; where machines have neighbors: "
            "fleet.straggler_window_steps = 0"
            if replaced
            else f"add a node (phalanx agent), then: phalanx fleet drain {observed.run} {node}",
        )


_LINK = "link_bytes_per_s"
_WAITS = "step.comm_exposed."


def slow_link(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason for the machine that sends to the others at less than ``SLOW_LINK`` of their median rate, if steps wait for
    communication.

    The newest ``LINK_READINGS`` must agree, of at least ``LINK_MACHINES`` machines.
    """
    readings = [used for _, used in o.of_kind(MachineUsed, observed.mine) if _LINK in used.least]
    slow = [
        used
        for used in readings[-o.LINK_READINGS :]
        if used.nodes >= o.LINK_MACHINES and used.least[_LINK] < o.SLOW_LINK * used.figures[_LINK]
    ]
    nodes = {used.least_node[_LINK] for used in slow}
    waiting = _waiting_share(observed)
    if len(slow) < o.LINK_READINGS or len(nodes) > 1 or waiting < o.LINK_WAIT:
        return
    (node,), newest = nodes, slow[-1]
    yield o.Reason(
        code="slow-link",
        title=f"The link of {node} is slow: it sends {format_bytes(newest.least[_LINK])}/s where the median of {newest.nodes:,} machines is "
        f"{format_bytes(newest.figures[_LINK])}/s",
        where=f"machine {node}",
        evidence=(
            f"step {newest.step:,}: the rate at which its first rank's connections to other machines are served while they have bytes to send",
            f"{waiting:.0%} of the time of the newest steps is waiting for communication",
        ),
        doing=observed.doing("nothing by itself: all ranks wait for the slowest link"),
        next="look at that machine's network (ethtool, cable, switch port, other traffic)"
        + (f"; replace it: phalanx fleet drain {observed.run} NODE" if observed.live_fleet else ""),
    )


def _waiting_share(observed: o.Observed) -> float:
    """Return the share of the newest steps' time that was waiting for communication, by the ledgers of the first rank."""
    if not observed.recent:
        return 0.0
    first, last = observed.recent[0][1].ledger, observed.recent[-1][1].ledger
    spent = {
        name: seconds - first.get(name, 0.0) for name, seconds in last.items() if name.startswith("step.")
    }
    waited = sum(seconds for name, seconds in spent.items() if name.startswith(_WAITS))
    return waited / max(sum(spent.values()), 1e-9)


def growing_memory(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if a rank's memory has grown by ``MEMORY_GROWN`` since the first part of its attempt, in every part about as much."""
    memory = observed.memory
    if memory is None or not memory.sizes[-1] >= o.MEMORY_GROWN * memory.sizes[0]:  # NaN where it is unknown
        return
    growth = memory.sizes[-1] - memory.sizes[0]
    added = [later - earlier for earlier, later in pairwise(memory.sizes)]
    if not all(part >= o.STEADY * growth / len(added) for part in added):
        return
    per_step = growth / max(1, memory.steps[-1] - memory.steps[0])
    hours = max(1.0, memory.times[-1] - memory.times[0]) / 3600
    node = f" on {memory.node}" if memory.node else ""
    yield o.Reason(
        code="growing-memory",
        title=f"The memory of rank {memory.rank} grows with every step: {format_bytes(per_step)} a step",
        where=f"rank {memory.rank}{node}"
        if memory.alike == 1
        else f"{memory.alike:,} of {memory.ranks:,} ranks",
        since=memory.times[0],
        evidence=(
            f"rank {memory.rank} has {format_bytes(memory.sizes[0])} after step {memory.steps[0]:,} and {format_bytes(memory.sizes[-1])} "
            f"after step {memory.steps[-1]:,}, at {format_bytes(growth / hours)} an hour",
            f"it grows steadily, by {format_bytes(min(added))} to {format_bytes(max(added))} in each of {len(added)} even parts of these steps",
            *_used_up(observed, per_step, memory),
        ),
        doing=observed.doing(
            "training continues until the memory is used up; then a rank is killed or fails"
        ),
        next=f"phalanx ranks {observed.run} --column memory_bytes; see what the model, a hook or an observer keeps from one step to the next "
        "(a list of tensors, a loss that was not detached)",
    )


def _used_up(observed: o.Observed, per_step: float, memory: o.MemorySeen) -> tuple[str, ...]:
    """Return a sentence on the step at which the machines' memory is used up; empty on GPUs, for an ended run, or if sizes are unknown."""
    used, started = observed.newest(MachineUsed), observed.started
    host = started.environment.get("host") if started else None
    total = host.get("memory_bytes") if isinstance(host, dict) else None
    if (
        used is None
        or started is None
        or started.device != "cpu"
        or not observed.running
        or not isinstance(total, int)
    ):
        return ()
    in_use = used[1].most.get("memory_bytes") or used[1].figures.get("memory_bytes", 0.0)
    machine_ranks = min(memory.alike, -(-memory.ranks // used[1].nodes))
    step = memory.steps[-1] + int((total - in_use) / (per_step * machine_ranks))
    return (
        f"{format_bytes(total - in_use)} of {format_bytes(total)} are free on its machine: they are used up at about step {step:,}; the run has {started.steps:,} steps",
    )


def hardware(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason for each node that is out of the running fleet since its hardware was found unfit."""
    fleet = observed.live_fleet
    if fleet is None:
        return
    away = {
        member.name: member
        for member in fleet.members
        if member.role in _AWAY and member.fault is IncidentKind.HARDWARE
    }
    incidents = _by_node(fleet.happenings, IncidentKind.HARDWARE)
    for name, member in away.items():
        first = incidents.get(name, [])
        yield o.Reason(
            code="hardware",
            title=f"Node {name} is unfit: {member.reason[:120]}",
            where=f"node {name} ({member.host})",
            since=first[0].unix_s if first else None,
            evidence=(member.reason,),
            doing="it is quarantined and holds no ranks",
            next=f"repair it, check it there with phalanx health, then: phalanx fleet add {observed.run} {name}",
        )


def not_finite_nodes(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason for each node that is out of the running fleet because a step was not finite on it."""
    fleet = observed.live_fleet
    if fleet is None:
        return
    incidents = _by_node(fleet.happenings, IncidentKind.NOT_FINITE)
    for member in fleet.members:
        if member.role not in _AWAY or member.fault is not IncidentKind.NOT_FINITE:
            continue
        first = incidents.get(member.name, [])
        step = f"Step {first[0].step:,}" if first else "A step"
        yield o.Reason(
            code="not-finite",
            title=f"{step} was NaN or infinite on node {member.name}",
            where=f"node {member.name} ({member.host})",
            since=first[0].unix_s if first else None,
            evidence=tuple(dict.fromkeys((*(happening.text for happening in first[:1]), member.reason))),
            doing="it is quarantined, and the other nodes compute the step again: the bits stay the same",
            next=f"check that machine (there: phalanx health); when it is well: phalanx fleet add {observed.run} {member.name}",
        )


def lost_nodes(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield one reason for all nodes of a running fleet that are lost or quarantined for other causes than hardware or numbers."""
    fleet = observed.live_fleet
    if fleet is None:
        return
    explained = (IncidentKind.HARDWARE, IncidentKind.NOT_FINITE)
    away = [member for member in fleet.members if member.role in _AWAY and member.fault not in explained]
    if not away:
        return
    names = {member.name for member in away}
    when = [happening.unix_s for happening in fleet.happenings if happening.node in names]
    seated = sum(member.role == "member" for member in fleet.members)
    spares = sum(member.role in ("spare", "warming") for member in fleet.members)
    target_nodes = observed.spec.fleet.nodes if observed.spec else 0
    short = bool(target_nodes) and seated < target_nodes
    faults = {member.name: member.fault for member in away}
    held_ranks = {
        happening.node: happening.held_ranks
        for happening in fleet.happenings
        if faults.get(happening.node) is happening.kind
    }
    yield o.Reason(
        code="lost-node",
        title=f"{len(away)} node{'s are' if len(away) > 1 else ' is'} lost or put aside: {', '.join(sorted(names)[:5])}",
        where=", ".join(f"node {member.name} ({member.host})" for member in away[:5]),
        since=min(when, default=None),
        evidence=(
            *(
                f"{member.name}: {member.role}{f', {member.reason}' if member.reason else ''}"
                for member in away[:5]
            ),
            f"{seated} nodes train" + (f" of {target_nodes}" if target_nodes else "") + f", {spares} spare",
            f"{fleet.recoveries} {'recovery' if fleet.recoveries == 1 else 'recoveries'} so far"
            + (
                f"; {fleet.ranks} ranks in epoch {fleet.epoch}"
                if fleet.phase is FleetPhase.RUNNING
                else f"; the fleet is {fleet.phase}"
            ),
        ),
        doing="the fleet comes together again"
        if fleet.phase is not FleetPhase.RUNNING
        else "training continues with fewer ranks: the bits stay the same"
        if short
        else "a spare has taken its place"
        if any(held_ranks.values())
        else "training continues: it had no ranks"
        if held_ranks.keys() == names
        else "training continues",
        next=f"see what became of them (phalanx status {observed.run}); a node that is well again: phalanx fleet add {observed.run} NODE, "
        "a new one: phalanx agent there",
    )


def nodes_back(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield an "info" reason for each node of a running fleet that was lost within ``RECOVERING_S`` and is back.

    It explains the interruption.
    """
    fleet = observed.live_fleet
    if fleet is None:
        return
    present = {member.name: member for member in fleet.members if member.role not in (*_AWAY, *_GOING)}
    for name, happenings in _by_node(fleet.happenings, IncidentKind.LOST).items():
        if name not in present or observed.now - happenings[-1].unix_s > o.RECOVERING_S:
            continue
        yield o.Reason(
            code="lost-node",
            severity="info",
            title=f"Node {name} was lost and is back",
            where=f"node {name} ({present[name].host})",
            since=happenings[-1].unix_s,
            evidence=(happenings[-1].text, f"it is {present[name].role} now"),
            doing="it was started again, or has come back by itself",
            next=f"if it happens again, look at that machine: phalanx logs {observed.run} --node {name}",
        )


def no_spares(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if all configured spares are used up while the fleet runs: the next lost node makes the fleet
    smaller.

    Not shortly after an incident unless nodes are away.
    """
    fleet = observed.live_fleet
    if (
        fleet is None
        or observed.spec is None
        or not observed.spec.fleet.spares
        or fleet.phase is not FleetPhase.RUNNING
    ):
        return
    roles = [member.role for member in fleet.members]
    if any(role in ("spare", "warming") for role in roles) or "member" not in roles:
        return
    away = [happening.unix_s for happening in fleet.happenings if happening.node]
    if (
        not any(role in _AWAY for role in roles)
        and observed.now - max(away, default=0.0) < o.FLEET_PATIENCE_S
    ):
        return  # one that was killed is being started again
    target_spares = observed.spec.fleet.spares
    yield o.Reason(
        code="no-spares",
        title="No spare node is left",
        where="the fleet",
        since=max(away, default=None),
        evidence=(
            f"{target_spares} spare{'s' if target_spares > 1 else ''} configured, none there; {roles.count('member')} nodes train",
            *(
                f"{member.name}: {member.role}, {member.reason}"
                for member in fleet.members
                if member.role in _AWAY
            ),
        ),
        doing="training continues; the next lost node makes the fleet smaller",
        next=f"start an agent on another node (phalanx agent), or put one back: phalanx fleet add {observed.run} NODE",
    )


def fewer_ranks(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if a running fleet has enough nodes, but trains fewer ranks than configured, and has left an
    epoch.

    The evidence is the most frequent reason for which epochs were left, or the newest one.
    """
    fleet, spec = observed.live_fleet, observed.spec
    if fleet is None or spec is None or fleet.phase is not FleetPhase.RUNNING or not fleet.ranks:
        return
    present = [member for member in fleet.members if member.role in ("member", "spare", "warming")]
    target_ranks = spec.fleet.nodes * spec.fleet.workers_per_node
    ends = o.of_kind(EpochLeft, observed.events)
    if len(present) < spec.fleet.nodes or fleet.ranks >= target_ranks or not ends:
        return
    counts = Counter(end.reason for _, end in ends)
    reason, often = counts.most_common(1)[0]
    yield o.Reason(
        code="fewer-ranks",
        title=f"{fleet.ranks} of {target_ranks} ranks train, and {len(present)} nodes are there",
        where="the fleet",
        since=ends[-1][0],
        evidence=(
            f"{len(ends)} epochs were left, {often} of them for one reason: {reason[:300]}"
            if often > 1
            else f"the newest epoch was left because: {ends[-1][1].reason[:300]}",
        ),
        doing="training continues with fewer ranks: the bits stay the same; the others are tried again",
        next=f"see whether the nodes reach each other at the addresses that they announce: phalanx status {observed.run}, phalanx logs {observed.run}",
    )


def metrics_elsewhere(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if the coordinator serves its metrics at another port than the run file's, which was in use."""
    port = observed.spec.observe.metrics_port if observed.spec else 0
    address = observed.metrics_address
    if observed.live_fleet is None or not port or not address or address.endswith(f":{port}"):
        return
    yield o.Reason(
        code="metrics-elsewhere",
        title=f"Metrics are not at port {port}, which another process has",
        where=f"observe.metrics_port = {port}",
        evidence=(f"the coordinator could not listen there, and serves its metrics at {address}",),
        doing=f"a Prometheus that finds its targets in {observed.run}/targets or by phalanx ui scrapes it there; one with a fixed port does not",
        next=f"see who has the port: ss -ltnp sport = :{port}; end that process, or start the run again with another observe.metrics_port",
    )


def no_coordinator(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a critical reason if the coordinator of a running fleet has not written its file for ``COORDINATOR_SILENT_S``."""
    fleet = observed.live_fleet
    if fleet is None:
        return
    silent_s = observed.now - fleet.written_unix_s
    if silent_s <= o.COORDINATOR_SILENT_S:
        return
    lease = observed.spec.fleet.coordinator_lease_s if observed.spec else 1800.0
    succession = observed.spec.fleet.succession_s if observed.spec else 0.0
    yield o.Reason(
        code="no-coordinator",
        severity="critical",
        title=f"The fleet's coordinator has been silent for {format_duration(silent_s)}",
        where=f"{fleet.leader or 'process'} {fleet.coordinator_pid} at {fleet.coordinator}",
        since=fleet.written_unix_s,
        evidence=(
            f"fleet.json was written {format_duration(silent_s)} ago; it is written every second or two",
        ),
        doing=f"the workers train on; a launcher starts it again, or another node leads after {succession:g} s; agents give up after {lease:g} s",
        next=f"phalanx status {observed.run}; if it stays so: end the fleet's processes and phalanx train {observed.run}",
    )


def _by_node(happenings: tuple[FleetIncident, ...], *kinds: IncidentKind) -> dict[str, list[FleetIncident]]:
    """Return the incidents of these kinds by node, in their order."""
    by_node: dict[str, list[FleetIncident]] = {}
    for happening in happenings:
        if happening.node and happening.kind in kinds:
            by_node.setdefault(happening.node, []).append(happening)
    return by_node
