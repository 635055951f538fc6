"""Rules on progress: the run has ended before its last step, or makes no step.

A run without steps raises an alarm after a while. A standstill with an explanation, such as a save, raises none
before its timeout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from phalanx.fleet.core.state import FleetPhase
from phalanx.observe import events as run_events
from phalanx.observe.throughput import format_duration
from phalanx.train.step.learning_rate import multiplier
from phalanx_watch.why import observed as o

# Ended runs, with or without a recorded reason.


_BURST_S = 60.0
"""Seconds from the first failure of a start to its last event: ranks that wait for a lost one log nothing more."""


def failed(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a critical reason if the newest start has failed, by a recorded failure or its logs, or the fleet has
    given up.

    None if training went on after it, a process holds the run, its job waits, or it has finished.
    """
    if observed.finished or observed.is_held or (observed.job is not None and observed.job.is_waiting):
        return
    after = observed.last_t - 1.0
    recent_failures = [failure for failure in observed.failures if failure.at >= after]
    given_up = observed.fleet is not None and observed.fleet.phase is FleetPhase.FAILED
    logged = _logged(observed)
    if not recent_failures and not given_up and (logged is None or observed.over):
        return
    first = recent_failures[0] if recent_failures else None
    evidence = [f"{failure.who}: {failure.kind}: {failure.message}" for failure in recent_failures[:3]]
    if observed.data_error:
        evidence.insert(0, f"its data cannot be read: {observed.data_error}")
    if given_up and observed.fleet is not None:
        evidence.append(f"the fleet has given up: {observed.fleet.reason}")
    if logged is not None:
        evidence.append(f"failed first: {logged.who}: {logged.text}")
    if first:
        failure = first.kind
    elif given_up or logged is None:
        failure = "the fleet has given up"
    else:
        failure = f"{logged.who}: {logged.text}"
    ends, batch = _equal_ends(observed)
    remedy = (
        f"{first.remedy}; then"
        if first and first.remedy
        else f"{observed.starts_refused}; then"
        if observed.starts_refused
        else "copy the checkpoints' files back; then"
        if observed.damaged_checkpoints and not observed.saved_step
        else f"see phalanx logs {observed.run}, and the kernel's log (dmesg) if a process was killed; then"
    )
    yield o.Reason(
        code="failed",
        severity="critical",
        title=f"The run has failed{', and its data cannot be read' * bool(observed.data_error)}: {failure}",
        where=first.who if first else logged.who if logged else "the fleet",
        since=first.at if first else logged.at if logged else observed.last_t or None,
        evidence=(*evidence, *ends, *_unsaved(observed)),
        doing=observed.after_end,
        next=f"{batch}{remedy} phalanx train {observed.run}{_save_sooner(observed)}",
    )


def _unsaved(observed: o.Observed) -> tuple[str, ...]:
    """Return a sentence on the steps that an ended run has lost, if it ended before its first checkpoint was due; else an empty tuple."""
    every = _unreached_interval(observed)
    if not every or observed.last_step is None:
        return ()
    starts = f" in {observed.starts:,} starts" if observed.starts > 1 else ""
    return (
        f"no checkpoint was ever saved{starts}, so all steps are lost: the newest start ended after step {observed.last_step[1].step:,}, and "
        f"the first checkpoint is due at step {every:,} (checkpoint.every_steps)",
    )


def _equal_ends(observed: o.Observed) -> tuple[tuple[str, ...], str]:
    """Return (a sentence, a command that shows the batch of the next step) if the newest ``EQUAL_ENDS`` starts or more ended after the
    same logged step, without a word; else empty ones.

    The command is empty if that step is followed by an evaluation or a save, which a batch is not the cause of.
    """
    ends: dict[int, int] = {}  # by attempt, the oldest first
    for event in observed.events:
        if isinstance(event.body, run_events.RunStarted | run_events.Stopped):
            ends[event.attempt] = 0
        elif isinstance(event.body, run_events.Step):
            ends[event.attempt] = event.body.step
    last = observed.steps[-1][1].step if observed.steps else 0
    count = sum(1 for _ in takewhile(lambda step: step == last, reversed(ends.values())))
    if not last or count < o.EQUAL_ENDS:
        return (), ""
    doing = _after_step(observed)
    return (
        (
            f"the newest {count:,} starts all ended after step {last:,}, while {doing.activity}: another start may well too",
        ),
        f"phalanx data show {observed.run} --step {last + 1} (the batch that ended them all); "
        if doing.is_step
        else "",
    )


def _save_sooner(observed: o.Observed) -> str:
    """Return the setting that saves twice in as many steps as the newest start made, if it made too few for a checkpoint."""
    if not _unreached_interval(observed) or observed.last_step is None:
        return ""
    return f" --set checkpoint.every_steps={max(1, observed.last_step[1].step // 2)}"


def _unreached_interval(observed: o.Observed) -> int:
    """Return ``checkpoint.every_steps`` if nothing is saved and the newest start has ended before it; else 0."""
    if (
        observed.spec is None
        or observed.last_step is None
        or observed.saved_step
        or observed.damaged_checkpoints
    ):
        return 0
    every = observed.spec.checkpoint.every_steps
    return every if observed.last_step[1].step < every else 0


def _logged(observed: o.Observed) -> o.FirstFailureSeen | None:
    """Return the first failure from the logs, if the newest start ended by it: later steps would mean that it was recovered."""
    failure = observed.first_failure
    return failure if failure is not None and failure.at >= observed.last_t - _BURST_S else None


def gone(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a critical reason if the processes of the run are gone without a recorded end.

    For a run on another machine, a warning if it is silent for long. None if it has failed or its job waits.
    """
    if observed.over or (observed.job is not None and observed.job.is_waiting) or any(failed(observed)):
        return
    silent_s = max(0.0, observed.now - observed.last_t)
    ends, batch = _equal_ends(observed)
    refused = f"{observed.starts_refused}; then " if observed.starts_refused else ""
    if not observed.events:
        yield from _gone_at_start(observed)
    elif observed.is_held is False:
        yield o.Reason(
            code="gone",
            severity="critical",
            title="The run's processes are gone, without a word",
            where="the whole run",
            since=observed.last_t,
            evidence=(
                "no process holds the run directory (its file lock)",
                f"the newest event is {format_duration(silent_s)} old and is no end of the run: killed, out of memory, or the machine was switched off",
                *ends,
                *_unsaved(observed),
            ),
            doing=observed.after_end,
            next=f"{batch}{refused}phalanx train {observed.run}{_save_sooner(observed)} (see {observed.run}/logs and the kernel's log, dmesg, for what killed it)",
        )
    elif observed.is_held is None and silent_s > max(o.SILENT_ELSEWHERE_S, o.STALL_STEPS * observed.step_s):
        yield o.Reason(
            code="silent",
            title=f"The run is silent for {format_duration(silent_s)}",
            where="the machine that it runs on",
            since=observed.last_t,
            evidence=(
                f"the newest event is {format_duration(silent_s)} old and is no end of the run",
                "it runs, or ran, on another machine: its processes cannot be checked from this one",
            ),
            doing="not known",
            next=f"look on that machine (its name is in {observed.run}/lock); if it is gone: phalanx train {observed.run}",
        )


def stopped(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield an information if the newest start was stopped on request, before the last step."""
    last = observed.mine[-1] if observed.mine else None
    if last is None or not isinstance(last.body, run_events.Stopped) or observed.finished:
        return
    if any(failed(observed)) or (observed.job is not None and observed.job.is_waiting):
        return
    stop = last.body
    steps = observed.started.steps if observed.started else 0
    yield o.Reason(
        code="stopped",
        severity="info",
        title=f"The run was stopped on request at step {stop.step:,}" + (f" of {steps:,}" if steps else ""),
        where="the whole run",
        since=last.t,
        evidence=(stop.reason,),
        doing=observed.after_end,
        next=f"phalanx train {observed.run}",
    )


def ended_early(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if ``evaluation.stop_after`` ended the run before its learning rate decayed, or by a figure whose changes are within its
    error, and no later step followed. Also of a finished run."""
    ended = observed.newest(run_events.EndedEarly)
    spec, last = observed.spec, observed.last_step
    if ended is None or spec is None or last is None or last[1].step > ended[1].step:
        return
    t, end = ended
    evidence = []
    steps = spec.train.steps
    if multiplier(spec.schedule, steps, steps) < o.DECAYED <= last[1].lr / spec.optimizer.lr:
        evidence.append(
            f"the learning rate was still {last[1].lr:.3g} of {spec.optimizer.lr:.3g} (schedule.kind = {spec.schedule.kind!r}): the fall of the loss "
            "that comes with its decay was never taken"
        )
    task, _, figure = end.figure.rpartition(".")
    scores = [
        (body.figures[figure], body.figures.get(f"{figure}_error", 0.0))
        for _, body in o.of_kind(run_events.TaskEvaluated, observed.all_events)
        if body.task == task and body.step >= end.best_step and figure in body.figures
    ]
    if scores and (change := max(value for value, _ in scores) - min(value for value, _ in scores)) < max(
        error for _, error in scores
    ):
        evidence.append(
            f"{end.figure} changed by {change:.3g} since step {end.best_step:,}, and its standard error is {max(error for _, error in scores):.3g}: chance"
        )
    if not evidence:
        return
    yield o.Reason(
        code="ended-early",
        title=f"The run ended early at step {end.step:,} of {steps:,}, without a good reason",
        where="evaluation.stop_after",
        since=t,
        evidence=(end.text, *evidence),
        doing=observed.after_end,
        next=f"continue: phalanx train {observed.run} --from {end.step} --set evaluation.stop_after=0; or judge by more items (evaluation.keep_best)",
    )


def _gone_at_start(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if the processes of a start are gone, and it has written no event; none for jobs of an engine."""
    if observed.is_held is not False or not observed.starts or observed.job is not None:
        return
    yield o.Reason(
        code="gone",
        severity="critical",
        title="The run's processes are gone, and it has not begun",
        where="the whole run",
        evidence=(
            "no process holds the run directory (its file lock), and there is no event",
            f"the last line of its logs: {observed.last_line or 'there is none'}",
        ),
        doing=observed.after_end,
        next=f"phalanx train {observed.run} (see the kernel's log, dmesg, if a process was killed)",
    )


def never_began(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if the run's job ended before its first event, and no process logged a cause."""
    job = observed.job
    if job is None or not job.has_ended or observed.events or observed.finished or any(failed(observed)):
        return
    yield o.Reason(
        code="failed",
        severity="critical",
        title=f"{job.title} has ended before the run's first event",
        where=job.title,
        evidence=(job.doing,),
        doing="nothing: it has ended, and nothing was trained",
        next=f"read that log, then give the same phalanx submit again (phalanx status {observed.run})",
    )


def queued(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a warning if the run's job is held, or an "info" reason if it waits in a queue."""
    job = observed.job
    if job is None or not job.is_waiting or observed.finished:
        return
    yield o.Reason(
        code="job-held" if job.is_held else "job-waiting",
        severity="warning" if job.is_held else "info",
        title=f"{job.title} is held: nothing starts it" if job.is_held else f"{job.title} waits to start",
        where=job.title,
        evidence=(job.doing,),
        doing="nothing, until it is released" if job.is_held else "the scheduler starts it",
        next="scontrol release JOB, or ask who holds it" if job.is_held else f"phalanx status {observed.run}",
    )


# Standstill.


_HALTED = {
    "T": "is stopped (state T)",
    "t": "is stopped by a debugger (state t)",
    "D": "waits for a disk (state D)",
}
_STOPPED = ("T",)
_ENDED = ("Z", "X")
_COMPUTES, _WAITS = 0.1, 0.05
"""Share of a core from which a rank computes, also on a crowded machine, and below which it waits."""


@dataclass(frozen=True)
class _Doing:
    """Activity of the run between steps, and its timeout."""

    activity: str
    patience_s: float
    code: o.Code = "stalled"
    next: str = ""
    is_step: bool = False


def standstill(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if a live run has not finished a step within the timeout of its current activity.

    If the fleet trains on and only events are missing, the reason is that.
    """
    if not observed.running or not observed.last_t:
        return
    since = observed.steps[-1][0] if observed.steps else observed.began_at or observed.last_t
    silent_s = max(0.0, observed.now - max(since, observed.last_t))
    doing = _doing(observed)
    if silent_s <= doing.patience_s:
        return
    last = observed.last_step
    if (ahead := _ahead(observed)) is not None:
        yield ahead
        return
    evidence = [
        f"the newest step is {last[1].step:,} of {last[1].steps:,}, {format_duration(observed.now - last[0])} ago"
        if last
        else "no step is done yet",
        f"the newest event is {format_duration(observed.now - observed.last_t)} old; a logged step usually takes {format_duration(observed.step_s)}"
        if observed.step_s
        else f"the newest event is {format_duration(observed.now - observed.last_t)} old",
        f"it should be {doing.activity}, for which {format_duration(doing.patience_s)} are enough",
    ]
    halted = [process for process in observed.processes if process.state in _HALTED]
    evidence += [f"{_called(process)} {_HALTED[process.state]}" for process in halted[:4]]
    stopped = [str(process.pid) for process in halted if process.state in _STOPPED]
    crowded = [process for process in observed.processes if process.address_space >= o.ADDRESS_SPACE]
    evidence[:0] = [
        f"{_called(process)} is out of memory: it has used {process.address_space:.1%} of its limit of address space (ulimit -v)"
        for process in crowded[:4]
    ]
    computing = _computing(observed.processes)
    evidence[:0] = [
        f"{_called(process)} computes, while the other ranks wait for it: an endless loop, or slow work of one rank"
        for process in computing[:4]
    ]
    cut = [process for process in observed.processes if process.dead_links]
    evidence[:0] = [
        f"{_called(process)} has sent to {link.peer} in vain: {link.waiting_bytes:,} bytes wait, the first after {link.retransmissions} "
        "retransmissions without an answer"
        for process in cut[:4]
        for link in process.dead_links[:2]
    ]
    fleet = observed.fleet is not None
    stall_s = observed.spec.fleet.stall_s if observed.spec else 120.0
    yield o.Reason(
        code=doing.code,
        severity="critical",
        title=f"No step for {format_duration(silent_s)}, while {doing.activity}",
        where=", ".join(map(_called, (halted or crowded or cut or computing)[:4])) or "the whole run",
        since=since,
        evidence=tuple(evidence),
        doing=f"the fleet diagnoses a hang after {stall_s:g} s and replaces who hangs"
        if fleet
        else "nothing: plain ranks wait for each other",
        next=f"let it continue: kill -CONT {' '.join(stopped)}"
        if stopped
        else f"end its process (kill), raise its limit (ulimit -v), and start again: phalanx train {observed.run}"
        if crowded
        else f"look at the network to {', '.join(link.peer for link in cut[0].dead_links[:2])} (ping, firewall, cable, MTU); then end the run's "
        f"processes (kill), and start again: phalanx train {observed.run}"
        if cut and not fleet
        else f"see in which line it is (py-spy dump --pid {computing[0].pid}), and mend that; then end the run's processes (kill), and start "
        f"again: phalanx train {observed.run}"
        if computing and not fleet
        else doing.next
        or (
            f"phalanx status {observed.run} (the fleet's view); phalanx logs {observed.run}"
            if fleet
            else f"look at {observed.run}/logs; then end its process (kill) and start again: phalanx train {observed.run}"
        ),
    )


def _computing(processes: Sequence[o.ProcessSeen]) -> list[o.ProcessSeen]:
    """Return the ranks that compute while another rank waits, each by its busiest process; none if all do the same, or if one is halted or
    has ended: then the others wait for that one, and on GPUs they compute meanwhile."""
    ranks: dict[int, o.ProcessSeen] = {}  # a rank's children have its environment, and count as the rank
    for process in processes:
        if process.rank is None or process.core_share is None:
            continue
        if process.state in _HALTED or process.state in _ENDED:
            return []
        busiest = ranks.get(process.rank)
        if busiest is None or process.core_share > (busiest.core_share or 0.0):
            ranks[process.rank] = process
    shares = {rank: process.core_share or 0.0 for rank, process in ranks.items()}
    waits = any(share < _WAITS for share in shares.values())
    return [ranks[rank] for rank, share in shares.items() if waits and share >= _COMPUTES]


def _called(process: o.ProcessSeen) -> str:
    """Describe a process by its rank, if it has one, and its id."""
    return (
        f"process {process.pid}" if process.rank is None else f"rank {process.rank} (process {process.pid})"
    )


def _ahead(observed: o.Observed) -> o.Reason | None:
    """Return a critical reason if a running fleet's heartbeats are at a later step than the newest step event; else None.

    The time is not looked at: only for an event stream that has been silent too long.
    """
    fleet, last = observed.fleet, observed.last_step
    if fleet is None or last is None or fleet.phase is not FleetPhase.RUNNING or fleet.step <= last[1].step:
        return None
    silent_s = observed.now - observed.last_t
    return o.Reason(
        code="events-unwritten",
        severity="critical",
        title=f"Steps are trained and not written down, since step {last[1].step:,}",
        where=f"{observed.run}/events.jsonl",
        since=observed.last_t,
        evidence=(
            f"the fleet has reached step {fleet.step:,}; the newest event is step {last[1].step:,}, and {format_duration(silent_s)} old",
            f"{fleet.unsaved_steps:,} completed steps are on no disk",
        ),
        doing="training continues in memory; each write is tried again",
        next=f"the disk is full, or the first rank may not write there (df -h {observed.run}; phalanx logs {observed.run} --level warning): make room. "
        "Steps that are on no disk are lost when the run ends",
    )


def _doing(observed: o.Observed) -> _Doing:
    """Return the run's current activity by its newest events, and the seconds that it may take.

    In this order: the fleet's phase, starting, waiting for data, ending, evaluating, saving, computing a step.
    Evaluations and saves may take a multiple of the last one.
    """
    stepping_s = max(o.STALL_LEAST_S, o.STALL_STEPS * observed.step_s)
    if observed.fleet is not None and observed.fleet.phase is not FleetPhase.RUNNING:
        return _of_fleet(observed, stepping_s)
    if not observed.steps:
        return _Doing("starting (restoring, compiling, reading data)", o.START_PATIENCE_S)
    if (waiting := _data(observed)) is not None:
        return waiting
    return _after_step(observed)


def _after_step(observed: o.Observed) -> _Doing:
    """Return the activity after the newest step of the newest attempt, and its timeout: ending, evaluating, saving or computing a step."""
    stepping_s = max(o.STALL_LEAST_S, o.STALL_STEPS * observed.step_s)
    _, step = observed.steps[-1]
    early = observed.newest(run_events.EndedEarly)
    if step.step >= step.steps or (early is not None and early[1].step == step.step):
        return _Doing("ending (saving, evaluating and hashing the weights)", o.WORK_PATIENCE_S)
    spec = observed.spec
    if spec is not None and spec.evaluation.every_steps and step.step % spec.evaluation.every_steps == 0:
        usual = observed.newest(run_events.Evaluated)
        is_earlier = usual is not None and usual[1].step != step.step
        if usual is None or is_earlier:
            patience = o.WORK_TIMES * usual[1].seconds + stepping_s if usual else o.WORK_PATIENCE_S
            return _Doing("evaluating", patience)
    if isinstance(observed.mine[-1].body, run_events.Evaluating):
        return _Doing("evaluating", o.WORK_PATIENCE_S)
    if spec is not None and spec.checkpoint.every_steps and step.step % spec.checkpoint.every_steps == 0:
        saved = observed.newest(run_events.CheckpointSaved)
        patience = o.WORK_TIMES * saved[1].seconds + stepping_s if saved else spec.checkpoint.timeout_s
        return _Doing("saving a checkpoint", patience)
    return _Doing("computing a step", stepping_s, is_step=True)


def _of_fleet(observed: o.Observed, stepping_s: float) -> _Doing:
    """Return the activity of a fleet that does not train, and its timeout: waiting for nodes, saving, or coming together."""
    assert observed.fleet is not None
    fleet = observed.fleet
    if fleet.phase is FleetPhase.WAITING:
        return _Doing(
            f"waiting for nodes ({fleet.reason})" if fleet.reason else "waiting for nodes",
            o.FLEET_PATIENCE_S,
            "waiting-for-nodes",
            f"start nodes that join (phalanx agent), or allow a smaller fleet (fleet.min_nodes): phalanx status {observed.run}",
        )
    if fleet.phase is FleetPhase.SAVING:
        return _Doing("saving what only its nodes' memory holds", o.WORK_PATIENCE_S)
    patience = o.START_PATIENCE_S if not observed.steps else o.FLEET_PATIENCE_S + stepping_s
    return _Doing(f"coming together (the fleet is {fleet.phase})", patience)


def _data(observed: o.Observed) -> _Doing | None:
    """Return the wait for an object store, if such a message came after the newest step; else None.

    Its timeout is ``STALL_LEAST_S``, at most that of a step.
    """
    texts = [
        message.text
        for t, message in o.of_kind(run_events.Message, observed.events)
        if message.incident is run_events.IncidentKind.DATA_WAIT and t >= observed.steps[-1][0]
    ]
    if not texts:
        return None
    timeout = observed.spec.data.timeout_s if observed.spec else o.WORK_PATIENCE_S
    wait = f"see whether the object store answers (phalanx data show URL); training continues by itself when it does, within data.timeout_s = {timeout:g} s"
    return _Doing(f"waiting for samples ({texts[-1][:160]})", o.STALL_LEAST_S, "waiting-for-data", wait)
