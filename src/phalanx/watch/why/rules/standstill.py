"""No step for too long, and what the run does meanwhile: a standstill that has an explanation is no alarm before its time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.fleet.core.state import FleetPhase
from phalanx.observe.events import CheckpointSaved, Evaluated, Evaluating, IncidentKind, Message
from phalanx.observe.throughput import format_duration
from phalanx.watch.why.observed import Observed, ProcessSeen
from phalanx.watch.why.reason import Code, Reason
from phalanx.watch.why.thresholds import (
    FLEET_PATIENCE_S,
    STALL_LEAST_S,
    STALL_STEPS,
    START_PATIENCE_S,
    WORK_PATIENCE_S,
    WORK_TIMES,
)

_HALTED = {
    "T": "is stopped (state T)",
    "t": "is held by a debugger (state t)",
    "D": "waits for a disk (state D)",
}
_STOPPED = ("T",)


@dataclass(frozen=True)
class _Doing:
    """What the run does instead of stepping, and how long that may take."""

    what: str
    patience_s: float
    code: Code = "stalled"
    next: str = ""


def standstill(seen: Observed) -> Iterator[Reason]:
    """The run has not finished a step for longer than what it does can take."""
    if not seen.running or not seen.last_t:
        return
    since = seen.steps[-1][0] if seen.steps else seen.began_at or seen.last_t
    silent_s = max(0.0, seen.now - max(since, seen.last_t))
    doing = _doing(seen)
    if silent_s <= doing.patience_s:
        return
    last = seen.last_step
    if (ahead := _ahead(seen)) is not None:
        yield ahead
        return
    evidence = [
        f"the newest step is {last[1].step:,} of {last[1].steps:,}, {format_duration(seen.now - last[0])} ago"
        if last
        else "no step is done yet",
        f"the newest event is {format_duration(seen.now - seen.last_t)} old; a logged step usually takes {format_duration(seen.step_s)}"
        if seen.step_s
        else f"the newest event is {format_duration(seen.now - seen.last_t)} old",
        f"it should be {doing.what}, for which {format_duration(doing.patience_s)} are enough",
    ]
    halted = [process for process in seen.processes if process.state in _HALTED]
    evidence += [f"{_called(process)} {_HALTED[process.state]}" for process in halted[:4]]
    stopped = [str(process.pid) for process in halted if process.state in _STOPPED]
    fleet = seen.fleet is not None
    stall_s = seen.spec.fleet.stall_s if seen.spec else 120.0
    yield Reason(
        code=doing.code,
        severity="critical",
        title=f"No step for {format_duration(silent_s)}, while {doing.what}",
        where=", ".join(map(_called, halted[:4])) or "the whole run",
        since=since,
        evidence=tuple(evidence),
        doing=f"the fleet diagnoses a hang after {stall_s:g} s and replaces who hangs"
        if fleet
        else "nothing: plain ranks wait for each other",
        next=f"let it go on: kill -CONT {' '.join(stopped)}"
        if stopped
        else doing.next
        or (
            f"phalanx status {seen.run} (the fleet's view); phalanx logs {seen.run}"
            if fleet
            else f"look at {seen.run}/logs; then end its process (kill) and start again: phalanx train {seen.run}"
        ),
    )


def _called(process: ProcessSeen) -> str:
    return (
        f"process {process.pid}" if process.rank is None else f"rank {process.rank} (process {process.pid})"
    )


def _ahead(seen: Observed) -> Reason | None:
    """Training goes on, by the heartbeats of the fleet's nodes, and the event stream does not tell of it."""
    fleet, last = seen.fleet, seen.last_step
    if fleet is None or last is None or fleet.phase is not FleetPhase.RUNNING or fleet.step <= last[1].step:
        return None
    silent_s = seen.now - seen.last_t
    return Reason(
        code="events-unwritten",
        severity="critical",
        title=f"Steps are trained and not written down, since step {last[1].step:,}",
        where=f"{seen.run}/events.jsonl",
        since=seen.last_t,
        evidence=(
            f"the fleet has reached step {fleet.step:,}; the newest event is step {last[1].step:,}, and {format_duration(silent_s)} old",
            f"{fleet.unsaved_steps:,} completed steps are on no disk",
        ),
        doing="training goes on in memory; each write is tried again",
        next=f"the disk is full, or the first rank may not write there (df -h {seen.run}; phalanx logs {seen.run} --level warning): make room. "
        "Steps that are on no disk are lost when the run ends",
    )


def _doing(seen: Observed) -> _Doing:
    stepping_s = max(STALL_LEAST_S, STALL_STEPS * seen.step_s)
    if seen.fleet is not None and seen.fleet.phase is not FleetPhase.RUNNING:
        return _of_fleet(seen, stepping_s)
    if not seen.steps:
        return _Doing("starting (restoring, compiling, reading data)", START_PATIENCE_S)
    if (waiting := _data(seen)) is not None:
        return waiting
    _, step = seen.steps[-1]
    if step.step >= step.steps:
        return _Doing("ending (saving, evaluating and hashing the weights)", WORK_PATIENCE_S)
    spec = seen.spec
    if spec is not None and spec.evaluation.every_steps and step.step % spec.evaluation.every_steps == 0:
        usual = seen.newest(Evaluated)
        known = usual is not None and usual[1].step != step.step
        if usual is None or known:
            patience = WORK_TIMES * usual[1].seconds + stepping_s if usual else WORK_PATIENCE_S
            return _Doing("evaluating", patience)
    if isinstance(seen.mine[-1].body, Evaluating):
        return _Doing("evaluating", WORK_PATIENCE_S)
    if spec is not None and spec.checkpoint.every_steps and step.step % spec.checkpoint.every_steps == 0:
        saved = seen.newest(CheckpointSaved)
        patience = WORK_TIMES * saved[1].seconds + stepping_s if saved else spec.checkpoint.timeout_s
        return _Doing("saving a checkpoint", patience)
    return _Doing("computing a step", stepping_s)


def _of_fleet(seen: Observed, stepping_s: float) -> _Doing:
    assert seen.fleet is not None
    fleet = seen.fleet
    if fleet.phase is FleetPhase.WAITING:
        return _Doing(
            f"waiting for nodes ({fleet.reason})" if fleet.reason else "waiting for nodes",
            FLEET_PATIENCE_S,
            "waiting-for-nodes",
            f"start nodes that join (phalanx agent), or allow a smaller fleet (fleet.min_nodes): phalanx status {seen.run}",
        )
    if fleet.phase is FleetPhase.SAVING:
        return _Doing("saving what only its nodes' memory holds", WORK_PATIENCE_S)
    patience = START_PATIENCE_S if not seen.steps else FLEET_PATIENCE_S + stepping_s
    return _Doing(f"coming together (the fleet is {fleet.phase})", patience)


def _data(seen: Observed) -> _Doing | None:
    """Waiting for an object store, if that is what somebody said last."""
    texts = [
        event.body.text
        for event in seen.events
        if isinstance(event.body, Message)
        and event.body.incident is IncidentKind.DATA_WAIT
        and event.t >= seen.steps[-1][0]
    ]
    if not texts:
        return None
    timeout = seen.spec.data.timeout_s if seen.spec else WORK_PATIENCE_S
    wait = f"see whether the object store answers (phalanx data show URL); training goes on by itself when it does, within data.timeout_s = {timeout:g} s"
    return _Doing(f"waiting for samples ({texts[-1][:160]})", STALL_LEAST_S, "waiting-for-data", wait)
