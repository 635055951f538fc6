"""Runs to be judged: streams written by the real ``EventLog``, and fleets in the file that a coordinator writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from phalanx.fleet.control.fleet_file import FleetFile, FleetIncident, Member, write_fleet_file
from phalanx.fleet.core.state import FleetPhase
from phalanx.observe.event_log import EventLog
from phalanx.observe.events import Body, IncidentKind, RunStarted, Step
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.spec import RunSpec
from phalanx_watch.why.observed import Observed, Reason
from phalanx_watch.why.reasons import judge, observe

T0 = 1_700_000_000.0
STEP_S = 2.0


def step(number: int, **changes: Any) -> Step:
    """A healthy step of ``STEP_S`` seconds."""
    healthy = Step(
        step=number,
        steps=100_000,
        loss=2.0,
        grad_norm=0.5,
        lr=1e-3,
        tokens=1000 * number,
        tokens_per_s=1000 / STEP_S,
        step_s=STEP_S,
        goodput=0.97,
        ledger={"step.compute": STEP_S * number, "start.warmup": 5.0},
        logged_s=STEP_S,
    )
    return dataclasses.replace(healthy, **changes)


def steps(first: int, last: int, change: Callable[[int], dict[str, Any]] = lambda _: {}) -> list[Step]:
    return [step(number, **change(number)) for number in range(first, last + 1)]


class Watched:
    """A run directory that is written to, and judged, at times of the test's own."""

    def __init__(self, path: Path, spec: RunSpec | None = None) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.directory, self.t, self.spec = RunDirectory(path), T0, spec or RunSpec()
        self.write([RunStarted(str(path), 100_000, ranks=4)])

    def write(self, bodies: Iterable[Body], attempt: int = 0, every_s: float = STEP_S) -> None:
        """Append events that are ``every_s`` seconds apart."""
        with EventLog(self.directory.events, attempt, clock=lambda: self.t) as log:
            for body in bodies:
                self.t += every_s
                log.append(body)

    def seen(self, after_s: float = 1.0, **changes: Any) -> Observed:
        """Observations ``after_s`` seconds after the newest event. Unless ``changes`` differ, processes hold the run and its disk has room."""
        observed = observe(self.directory, self.t + after_s)
        return dataclasses.replace(observed, **{"is_held": True, "spec": self.spec, "disk": None, **changes})

    def reasons(self, after_s: float = 1.0, **changes: Any) -> list[Reason]:
        return judge(self.seen(after_s, **changes))

    def codes(self, after_s: float = 1.0, **changes: Any) -> list[str]:
        return [reason.code for reason in self.reasons(after_s, **changes)]

    def fleet(self, after_s: float = 1.0, **changes: Any) -> None:
        """Write fleet.json as a coordinator of two nodes and a spare does, at a time after the newest event."""
        write_fleet_file(self.directory.path, fleet_file(self.t + after_s, **changes))


def fleet_file(written: float, **changes: Any) -> FleetFile:
    healthy: dict[str, Any] = {
        "run": "r",
        "coordinator": "127.0.0.1:7000",
        "coordinator_pid": 1,
        "leader": "",
        "reign": 1,
        "written_unix_s": written,
        "phase": FleetPhase.RUNNING,
        "reason": "",
        "epoch": 0,
        "ranks": 2,
        "expected_nodes": 3,
        "step": 9,
        "step_s": STEP_S,
        "recoveries": 0,
        "regroups": 0,
        "restarts": 0,
        "stopping": False,
        "durable_steps": (),
        "unsaved_steps": 0,
        "result_json": "",
        "stale": 0,
        "members": (
            member("node-0", 0),
            member("node-1", 1),
            Member("node-2", "spare", "host-2", attached=True),
        ),
        "happenings": (),
        "refused": {},
    }
    return FleetFile(**{**healthy, **changes})


def member(name: str, rank: int) -> Member:
    return Member(name, "member", f"host-{rank}", (rank,), attached=True)


def happening(
    t: float,
    node: str,
    text: str,
    kind: IncidentKind = IncidentKind.LOST,
    step: int = -1,
    *,
    held_ranks: bool = False,
) -> FleetIncident:
    return FleetIncident(t, 0, node, text, kind, step, held_ranks)
