"""Views of a run's fleet and time: ``/api/run/ID/fleet`` and ``/api/run/ID/goodput``.

The fleet view has the present members and spares, epochs on a time line, and each fault with its phases. The goodput
view has seconds, and dollars if there is a price, by bucket, outcome, attempt and cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from phalanx.fleet.control.fleet_file import FleetFile, FleetFileError, FleetIncident, read_fleet_file
from phalanx.observe import goodput
from phalanx.observe.events import EpochLeft, Event
from phalanx.observe.ledger import NS_PER_S, Recovery, in_seconds, recoveries
from phalanx_watch.page.http import PageRequestError, Parameters
from phalanx_watch.page.runs import PageRuns, RunPlace

_MOST_HAPPENINGS = 2000
_MOST_MEMBERS = 20_000
_NODE = "node "
_NOW = (
    *("phase", "reason", "epoch", "ranks", "expected_nodes", "step", "step_s", "recoveries", "regroups"),
    *("restarts", "reign", "leader", "stopping", "durable_steps", "unsaved_steps", "written_unix_s", "over"),
)
"""Fields of a fleet's file that describe its present state."""


def fleet_view(runs: PageRuns, place: RunPlace, _parameters: Parameters) -> dict[str, object]:
    """Return the fleet of a run; without a fleet file, only its epochs, which are its attempts, and ``missing``.

    An unreadable fleet file is the ``problem``.
    """
    problem, fleet = "", None
    try:
        fleet = read_fleet_file(place.path)
    except FleetFileError as error:
        problem = str(error)
    events = runs.thinned(place)
    return story(events, fleet) | {"missing": fleet is None, "problem": problem}


def story(events: Sequence[Event], fleet: FleetFile | None) -> dict[str, object]:
    """Return the fleet's state from its file (None: no state), and its history from the run's events: epochs and
    faults.

    Members and incidents are limited.
    """
    attempts = goodput.attempt_accounts(events)
    recoveries_by_attempt = {
        account.attempt: account for account in recoveries(events, attempts[0].attempt if attempts else 0)
    }
    happenings = list(fleet.happenings[-_MOST_HAPPENINGS:]) if fleet else []
    members = list(fleet.members[:_MOST_MEMBERS]) if fleet else []
    return {
        "now": None if fleet is None else _now(fleet),
        "members": [msgspec.to_builtins(member) for member in members],
        "members_left_out": max(0, len(fleet.members) - len(members)) if fleet else 0,
        "epochs": [{"epoch": account.attempt, **_span(account)} for account in attempts],
        "faults": _faults(events, attempts, recoveries_by_attempt, happenings),
        "happenings": [msgspec.to_builtins(account) for account in happenings],
    }


def _span(account: goodput.AttemptAccount) -> dict[str, object]:
    """Return when an attempt began and ended, and why, with its ranks and steps."""
    return {
        "started": account.started_s,
        "ended": account.ended_s,
        "reason": account.reason,
        "ranks": account.ranks,
        "first_step": account.first_step,
        "last_step": account.last_step,
    }


def _now(fleet: FleetFile) -> dict[str, object]:
    """Return the present figures of a fleet: phase, epoch, ranks, step, recoveries, leader and saved steps."""
    return {name: getattr(fleet, name) for name in _NOW}


def _faults(
    events: Sequence[Event],
    attempts: Sequence[goodput.AttemptAccount],
    recoveries_by_attempt: dict[int, Recovery],
    happenings: Sequence[FleetIncident],
) -> list[dict[str, object]]:
    """Return each end of an epoch that another one followed: when, node, cause and detector, as its reason states them,
    and the recovery's phases and lost steps (empty and 0 without one).

    Without a logged end, the attempt's own end and reason count. Incidents of that node within a minute are added.
    """
    ends = _left(events)
    faults: list[dict[str, object]] = []
    for before, after in pairwise(attempts):
        at, reason = ends.get(before.attempt, (before.ended_s, before.reason))
        node, incident = _named(reason)
        recovery = recoveries_by_attempt.get(after.attempt)
        low = incident.lower()
        faults.append(
            {
                "t": at,
                "epoch": before.attempt,
                "node": node,
                "what": incident or "ended without a word",
                "detected_by": next((who for word, who in _WORDS if word in low), ""),
                "phases": recovery.seconds if recovery else {},
                "lost_steps": recovery.lost_steps if recovery else 0,
                "resumed_step": recovery.resumed_step if recovery else None,
                "moved_bytes": recovery.moved_bytes if recovery else 0,
                "about": [
                    happening.text
                    for happening in happenings
                    if happening.node == node and node and abs(happening.unix_s - at) < 60
                ][:10],
            }
        )
    return faults


def _left(events: Sequence[Event]) -> dict[int, tuple[float, str]]:
    """Return, by attempt, the (Unix seconds, reason) with which the coordinator logged that the ranks left it; the first counts."""
    ends: dict[int, tuple[float, str]] = {}
    lived = 0
    for event in events:
        if isinstance(event.body, EpochLeft):
            ends.setdefault(lived, (event.t, event.body.reason))
        else:
            lived = event.attempt
    return ends


def _named(reason: str) -> tuple[str, str]:
    """Return the node that a reason names, and the rest of the text."""
    head, colon, text = reason.partition(": ")
    return (head.removeprefix(_NODE), text) if colon and head.startswith(_NODE) else ("", reason)


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


# Goodput.


_S_PER_H = 3600
_MOST_PRICE = 1e6


def goodput_view(runs: PageRuns, place: RunPlace, parameters: Parameters) -> dict[str, object]:
    """Return the run's time account; ``price_per_accelerator_hour``, or the run file's price, adds its cost. Raises
    ``PageRequestError``."""
    price = parameters.number("price_per_accelerator_hour")
    if price is None and (spec := runs.spec(place)) is not None:
        price = spec.observe.accelerator_hour_price or None
    if price is not None and not 0 <= price <= _MOST_PRICE:
        raise PageRequestError(
            f"price_per_accelerator_hour={price}: give dollars, from 0 to {_MOST_PRICE:,.0f}"
        )
    events = runs.thinned(place)
    return account(events, price)


def account(events: Sequence[Event], price: float | None) -> dict[str, object]:
    """Return the run's time account from its events, in seconds: buckets, outcomes, attempts and causes of loss.

    ``cost`` has its dollars at ``price`` an accelerator-hour; it is None without a price.
    """
    total, attempts = goodput.goodput(events), goodput.attempt_accounts(events)
    first = attempts[0].attempt if attempts else 0
    recoveries_by_attempt = {attempt.attempt: attempt for attempt in recoveries(events, first)}
    return {
        "held_s": total.total_ns / NS_PER_S,
        "gap_s": total.gap_ns / NS_PER_S,
        "goodput": total.goodput,
        "goodput_if_kept": total.goodput_if_kept,
        "buckets": in_seconds(total.buckets_ns),
        "outcomes": in_seconds(total.outcomes_ns),
        "attempts": [
            {"attempt": attempt.attempt, **_span(attempt), "buckets": in_seconds(attempt.buckets_ns)}
            for attempt in attempts
        ],
        "causes": _causes(attempts, recoveries_by_attempt),
        "cost": None if price is None else _cost(goodput.rank_goodput(events), price),
        **_others(total),
    }


def _causes(
    attempts: Sequence[goodput.AttemptAccount], recoveries_by_attempt: Mapping[int, Recovery]
) -> list[dict[str, object]]:
    """Return the seconds lost at each end of an attempt until the next one trained: the gap and the new start.

    Steps computed again are counted, not timed.
    """
    causes: list[dict[str, object]] = []
    for before, after in pairwise(attempts):
        recovery = recoveries_by_attempt.get(after.attempt)
        parts = {
            name: value / NS_PER_S
            for name, value in after.buckets_ns.items()
            if name.startswith(goodput.OVERHEAD) and value
        }
        between = max(0.0, after.started_s - before.ended_s)
        lost = recovery.lost_steps if recovery else 0
        causes.append(
            {
                "attempt": before.attempt,
                "t": before.ended_s,
                "cause": before.reason or f"attempt {before.attempt + 1} ended without a word",
                "seconds": between + sum(parts.values()),
                "between_s": between,
                "phases": parts,
                "lost_steps": lost,
                "moved_bytes": recovery.moved_bytes if recovery else 0,
            }
        )
    return causes


def _cost(total: goodput.Goodput, price: float) -> dict[str, object]:
    """Return dollars by bucket and outcome at ``price`` an accelerator-hour, from the goodput in time of ranks.

    Nodes without a rank are not counted.
    """

    def dollars(rank_ns: int) -> float:
        return rank_ns / NS_PER_S / _S_PER_H * price

    return {
        "price_per_accelerator_hour": price,
        "accelerator_hours": total.total_ns / NS_PER_S / _S_PER_H,
        "dollars": dollars(total.total_ns),
        "buckets": {name: dollars(value) for name, value in total.buckets_ns.items()},
        "outcomes": {name: dollars(value) for name, value in total.outcomes_ns.items()},
        "not_in_the_weights": dollars(total.total_ns - total.committed_ns - total.pending_ns),
    }


def _others(total: goodput.Goodput) -> dict[str, object]:
    """Return the run's goodput by the definitions of Google (ml-goodput-measurement) and Meta (ETTR), in seconds."""
    google, meta = goodput.google_goodput(total), goodput.meta_ettr(total)
    return {
        "google": {
            "goodput": google.goodput,
            "elapsed_s": google.elapsed_ns / NS_PER_S,
            "productive_s": google.productive_ns / NS_PER_S,
            "badput": in_seconds(google.badput_ns),
            "definition": "ml-goodput-measurement: productive step time over elapsed time",
        },
        "meta": {
            "ettr": meta.ettr,
            "wall_s": meta.wall_ns / NS_PER_S,
            "productive_s": meta.productive_ns / NS_PER_S,
            "unproductive": in_seconds(
                {
                    "catch_up": meta.catch_up_ns,
                    "restart_overhead": meta.restart_overhead_ns,
                    "between_attempts": meta.between_ns,
                }
            ),
            "definition": "ETTR (arXiv:2410.21680): productive runtime over wall time",
        },
    }
