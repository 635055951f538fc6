"""``/api/run/ID/fleet``: members and spares now, epochs on a time line, and each fault with its phases."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from phalanx.fleet.control.fleet_file import FleetFile, FleetFileError, Happening, read_fleet_file
from phalanx.observe.events import EpochLeft, Event
from phalanx.observe.ledger.goodput import AttemptAccount, attempt_accounts
from phalanx.observe.ledger.recoveries import Recovery, recoveries
from phalanx.watch.page.answer import Parameters
from phalanx.watch.page.places import Place
from phalanx.watch.page.views.runs import Runs

_MOST_HAPPENINGS = 2000
_MOST_MEMBERS = 20_000
_NODE = "node "


def fleet_view(runs: Runs, place: Place, _parameters: Parameters) -> dict[str, object]:
    """The fleet of a run; of a run without one, its epochs alone, which are its attempts."""
    problem, seen = "", None
    try:
        seen = read_fleet_file(place.path)
    except FleetFileError as error:
        problem = str(error)
    events = runs.thinned(place)
    return story(events, seen) | {"missing": seen is None, "problem": problem}


def story(events: Sequence[Event], seen: FleetFile | None) -> dict[str, object]:
    """The fleet by its file, and what happened to it by the run's events."""
    attempts = attempt_accounts(events)
    found = {one.attempt: one for one in recoveries(events, attempts[0].attempt if attempts else 0)}
    happenings = list(seen.happenings[-_MOST_HAPPENINGS:]) if seen else []
    members = list(seen.members[:_MOST_MEMBERS]) if seen else []
    return {
        "now": None if seen is None else _now(seen),
        "members": [msgspec.to_builtins(member) for member in members],
        "members_left_out": max(0, len(seen.members) - len(members)) if seen else 0,
        "epochs": [_epoch(one) for one in attempts],
        "faults": _faults(events, attempts, found, happenings),
        "happenings": [msgspec.to_builtins(one) for one in happenings],
    }


def _now(seen: FleetFile) -> dict[str, object]:
    kept = (
        "phase",
        "reason",
        "epoch",
        "ranks",
        "expected_nodes",
        "step",
        "step_s",
        "recoveries",
        "regroups",
        "restarts",
    )
    more = ("reign", "leader", "stopping", "durable_steps", "unsaved_steps", "written_unix_s", "over")
    return {name: getattr(seen, name) for name in (*kept, *more)}


def _epoch(one: AttemptAccount) -> dict[str, object]:
    return {
        "epoch": one.attempt,
        "started": one.started_s,
        "ended": one.ended_s,
        "reason": one.reason,
        "ranks": one.ranks,
        "first_step": one.first_step,
        "last_step": one.last_step,
    }


def _faults(
    events: Sequence[Event],
    attempts: Sequence[AttemptAccount],
    found: dict[int, Recovery],
    happenings: Sequence[Happening],
) -> list[dict[str, object]]:
    """Each end of an epoch that another one followed, with what the recovery took and cost."""
    left = _left(events)
    faults: list[dict[str, object]] = []
    for before, after in pairwise(attempts):
        at, reason = left.get(before.attempt, (before.ended_s, before.reason))
        node, what = _named(reason)
        recovery = found.get(after.attempt)
        faults.append(
            {
                "t": at,
                "epoch": before.attempt,
                "node": node,
                "what": what or "ended without a word",
                "detected_by": _detected_by(what),
                "phases": recovery.seconds if recovery else {},
                "lost_steps": recovery.lost_steps if recovery else 0,
                "resumed_step": recovery.resumed_step if recovery else None,
                "moved_bytes": recovery.moved_bytes if recovery else 0,
                "about": [
                    one.what for one in happenings if one.node == node and node and abs(one.unix_s - at) < 60
                ][:10],
            }
        )
    return faults


def _left(events: Sequence[Event]) -> dict[int, tuple[float, str]]:
    """When and why each attempt of the ranks was left, by the coordinator's words."""
    found: dict[int, tuple[float, str]] = {}
    lived = 0
    for event in events:
        if isinstance(event.body, EpochLeft):
            found.setdefault(lived, (event.t, event.body.reason))
        else:
            lived = event.attempt
    return found


def _named(reason: str) -> tuple[str, str]:
    """The node that a reason names, and the rest."""
    head, colon, rest = reason.partition(": ")
    return (head.removeprefix(_NODE), rest) if colon and head.startswith(_NODE) else ("", reason)


_WORDS = (
    ("exited with code", "its agent: the worker process ended"),
    ("silent", "the coordinator: no heartbeat"),
    ("heartbeat", "the coordinator: no heartbeat"),
    ("connection", "the coordinator: the connection broke"),
    ("attach", "the coordinator: the connection broke"),
    ("straggl", "the ranks: compute times compared"),
    ("corrupt", "the ranks: a step computed twice"),
    ("audit", "the ranks: a step computed twice"),
    ("hang", "the coordinator: no progress"),
    ("hung", "the coordinator: no progress"),
    ("progress", "the coordinator: no progress"),
    ("asked", "a person or the scheduler"),
    ("drain", "a person or the scheduler"),
    ("resize", "a person or the scheduler"),
)


def _detected_by(what: str) -> str:
    """Who noticed, by the words of the reason; empty if they do not tell."""
    low = what.lower()
    return next((who for word, who in _WORDS if word in low), "")
