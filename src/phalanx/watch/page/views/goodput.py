"""``/api/run/ID/goodput``: where the time went, by bucket, outcome, attempt and cause, in seconds and, at a price, in dollars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from phalanx.observe.events import Event
from phalanx.observe.ledger.goodput import AttemptAccount, Goodput, attempt_accounts, goodput
from phalanx.observe.ledger.ledger import NS_PER_S
from phalanx.observe.ledger.other_goodputs import google_goodput, meta_ettr
from phalanx.observe.ledger.recoveries import Recovery, recoveries
from phalanx.watch.page.answer import Parameters, RequestError
from phalanx.watch.page.places import Place
from phalanx.watch.page.views.runs import Runs

_S_PER_H = 3600
_MOST_PRICE = 1e6
_START = ("start.", "fault.", "reconfigure")


def goodput_view(runs: Runs, place: Place, parameters: Parameters) -> dict[str, object]:
    """The account of the run; ``price_per_accelerator_hour``, or the run file's price, adds what it cost."""
    price = parameters.number("price_per_accelerator_hour")
    if price is None and (spec := runs.spec(place)) is not None:
        price = spec.observe.accelerator_hour_price or None
    if price is not None and not 0 <= price <= _MOST_PRICE:
        raise RequestError(f"price_per_accelerator_hour={price}: give dollars, 0 or more")
    events = runs.thinned(place)
    return account(events, price)


def account(events: Sequence[Event], price: float | None) -> dict[str, object]:
    """The account of a run by its events, in seconds."""
    whole, attempts = goodput(events), attempt_accounts(events)
    first = attempts[0].attempt if attempts else 0
    found = {one.attempt: one for one in recoveries(events, first)}
    return {
        "held_s": whole.held_ns / NS_PER_S,
        "gap_s": whole.gap_ns / NS_PER_S,
        "goodput": whole.goodput,
        "goodput_if_kept": whole.goodput_if_kept,
        "buckets": _seconds(whole.buckets_ns),
        "outcomes": _seconds(_outcomes(whole)),
        "attempts": [_attempt(one) for one in attempts],
        "causes": _causes(attempts, found),
        "cost": None if price is None else _cost(whole, attempts, price),
        **_others(whole),
    }


def _outcomes(whole: Goodput) -> dict[str, int]:
    return {
        "committed": whole.committed_ns,
        "pending": whole.pending_ns,
        "discarded.rollback": whole.rollback_ns,
        "discarded.nonfinite": whole.nonfinite_ns,
        "waiting": whole.waiting_ns,
    }


def _seconds(parts: Mapping[str, int]) -> dict[str, float]:
    return {name: value / NS_PER_S for name, value in parts.items()}


def _attempt(one: AttemptAccount) -> dict[str, object]:
    return {
        "attempt": one.attempt,
        "started": one.started_s,
        "ended": one.ended_s,
        "ranks": one.ranks,
        "reason": one.reason,
        "first_step": one.first_step,
        "last_step": one.last_step,
        "buckets": _seconds(one.buckets_ns),
    }


def _causes(attempts: Sequence[AttemptAccount], found: Mapping[int, Recovery]) -> list[dict[str, object]]:
    """What each end of an attempt cost until the next one trained: the time between, the new start, and steps computed again."""
    causes: list[dict[str, object]] = []
    for before, after in pairwise(attempts):
        recovery = found.get(after.attempt)
        parts = {
            name: value / NS_PER_S
            for name, value in after.buckets_ns.items()
            if name.startswith(_START) and value
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


def _cost(whole: Goodput, attempts: Sequence[AttemptAccount], price: float) -> dict[str, object]:
    """Dollars by bucket and outcome. The first rank's time stands for that of all; nodes that were held and had no rank are not counted."""
    buckets: dict[str, float] = {}
    rank_s = 0.0
    for one in attempts:
        ranks = max(1, one.ranks)
        for name, value in one.buckets_ns.items():
            buckets[name] = buckets.get(name, 0.0) + value / NS_PER_S * ranks / _S_PER_H * price
            rank_s += value / NS_PER_S * ranks
    dollars = rank_s / _S_PER_H * price
    held = whole.held_ns or 1
    outcomes = {name: dollars * value / held for name, value in _outcomes(whole).items()}
    return {
        "price_per_accelerator_hour": price,
        "accelerator_hours": rank_s / _S_PER_H,
        "dollars": dollars,
        "buckets": buckets,
        "outcomes": outcomes,
        "not_in_the_weights": dollars - outcomes["committed"] - outcomes["pending"],
    }


def _others(whole: Goodput) -> dict[str, object]:
    google, meta = google_goodput(whole), meta_ettr(whole)
    return {
        "google": {
            "goodput": google.goodput,
            "elapsed_s": google.elapsed_ns / NS_PER_S,
            "productive_s": google.productive_ns / NS_PER_S,
            "badput": _seconds(google.badput_ns),
            "definition": "ml-goodput-measurement: productive step time over elapsed time",
        },
        "meta": {
            "ettr": meta.ettr,
            "wall_s": meta.wall_ns / NS_PER_S,
            "productive_s": meta.productive_ns / NS_PER_S,
            "unproductive": _seconds(
                {
                    "catch_up": meta.catch_up_ns,
                    "restart_overhead": meta.restart_overhead_ns,
                    "between_attempts": meta.between_ns,
                }
            ),
            "definition": "ETTR (arXiv:2410.21680): productive runtime over wall time",
        },
    }
