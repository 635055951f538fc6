"""The first page of the report: what somebody who pays for the run has to know.

The answer in a sentence, its range in days and money, what it rests on, three different plans beside each other, what would change
it, and whether to go on. Everything is said in words and figures of the plan; the pages after it show where they come from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from phalanx.plan.report.html_table import html_table
from phalanx.plan.report.units import DAYS, DOLLARS, ENERGY, counted, mfu_text, unit_for
from phalanx.plan.search.plan import Plan
from phalanx.plan.search.sensitivity import CHANGE, days_changes, step_changes
from phalanx.plan.whole_run.estimate import Percentiles

_MOST_CHANGES = 3


def first_page(plan: Plan) -> str:
    """The page's HTML, without its heading."""
    return "".join(
        (
            f'<p class="answer">{escape(answer(plan))}</p>',
            _verdict(plan),
            _ranges(plan),
            f"<p><b>What this rests on.</b> {escape(str(plan.evidence))}.</p>",
            _three(plan),
            _changes(plan),
        )
    )


def answer(plan: Plan) -> str:
    """The answer in one sentence, its range included: a figure alone would be taken for more than it is."""
    run, chosen = plan.run, plan.chosen
    name = plan.job.cluster.accelerator.name
    sort = f"{counted(plan.job.workload.counts.parameters)} parameters on {counted(plan.tokens)} tokens"
    if not math.isfinite(run.days):
        return f"Training {sort} on {chosen.ranks:,} x {name} would not finish: failures come faster than it recovers."
    time, money = unit_for([run.days], DAYS), unit_for([run.cost.total_usd], DOLLARS)
    least, most = run.finish_days.p5, run.finish_days.p95
    if math.isfinite(most):
        band = f"nine of ten such runs take {time(least)} to {time(most)} {time.name} and {money(run.usd.p5)} to {money(run.usd.p95)} {money.name}"
    else:
        band = "one such run in twenty or more would never finish"
    return (
        f"Training {sort} takes {time(run.days)} {time.name} on {chosen.ranks:,} x {name} and costs "
        f"{money(run.cost.total_usd)} {money.name}; {band}."
    )


def verdict(plan: Plan) -> tuple[str, tuple[str, ...]]:
    """ "no-go", "measure first" or "go", and the reasons."""
    against = tuple(_against(plan))
    if against:
        return "no-go", against
    doubts = tuple(_doubts(plan))
    if doubts:
        return "measure first", doubts
    return "go", ("the plan fits with room, and the software was measured on this accelerator",)


def _against(plan: Plan) -> Iterator[str]:
    if not plan.chosen.fits:
        over = plan.chosen.memory_bytes - plan.chosen.capacity_bytes
        yield f"the layout does not fit: {over / 1e9:,.1f} GB too much on the fullest accelerator"
    if not math.isfinite(plan.run.finish_days.p95):
        yield "one run in twenty or more would never finish"
    yield from (caveat.text for caveat in plan.caveats if caveat.decides)


def _doubts(plan: Plan) -> Iterator[str]:
    if plan.evidence.kind == "never":
        yield (
            f"{plan.evidence.subject} was never measured: run a few hundred steps of this layout on one node, and phalanx calibrate, before "
            "the rest is paid for"
        )
    elif plan.evidence.kind == "elsewhere":
        yield f"no run of {plan.evidence.subject} is published: run a few hundred steps on one node before the rest is paid for"
    if plan.job.cluster.accelerator.announced_only:
        yield f"{plan.job.cluster.accelerator.name} is announced, not for sale: its figures are the vendor's"
    yield from (caveat.text for caveat in plan.caveats if not caveat.decides)
    yield from plan.run.warnings


def _verdict(plan: Plan) -> str:
    word, reasons = verdict(plan)
    points = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
    return f'<p class="verdict">{escape(word.capitalize())}</p><ul>{points}</ul>'


def _ranges(plan: Plan) -> str:
    run, band = plan.run, plan.band
    time, money = unit_for([run.days], DAYS), unit_for([run.cost.total_usd], DOLLARS)
    energy = unit_for([run.energy.total_kwh], ENERGY)
    step = plan.chosen.step_s
    rows = [
        (time.name, *map(time, _three_of(run.finish_days))),
        (money.name, *map(money, _three_of(run.usd))),
        (energy.name, *map(energy, _three_of(run.energy_kwh))),
        ("seconds a step", *(f"{step * factor:.4g}" for factor in (band.p5, band.p50, band.p95))),
    ]
    return html_table(
        ("of a hundred such runs", "5 are below (P5)", "half are below (P50)", "5 are above (P95)"), rows
    )


def _three_of(found: Percentiles) -> tuple[float, float, float]:
    return found.p5, found.p50, found.p95


def _three(plan: Plan) -> str:
    """The different plans side by side, one a column; nothing where one layout was asked for."""
    if not plan.ideas:
        return f'<p class="note">One layout was asked for: {escape(str(plan.chosen.layout))}</p>'
    found = [idea.found for idea in plan.ideas]
    days = [plan.tokens / one.tokens_per_s / 86_400 for one in found]
    usd = [one.price_per_hour * one.ranks * day * 24 for one, day in zip(found, days, strict=True)]
    time, money = unit_for(days, DAYS), unit_for(usd, DOLLARS)
    rows = [
        ("the idea", *(idea.title for idea in plan.ideas)),
        (f"{time.name}, no failures", *map(time, days)),
        (f"{money.name}, no failures", *map(money, usd)),
        ("MFU", *map(mfu_text, found)),
        (
            "GB of memory",
            *(f"{one.memory_bytes / 1e9:.1f} of {one.capacity_bytes / 1e9:.0f}" for one in found),
        ),
        ("accelerators", *(f"{one.ranks:,}" for one in found)),
        ("gives up", *("; ".join(idea.gives_up) or "nothing against the others" for idea in plan.ideas)),
        ("--layout", *(str(one.layout) for one in found)),
    ]
    heads = ("", *(f"plan {number}" for number in range(1, len(found) + 1)))
    return "<h3>Three ways to do it</h3>" + html_table(heads, rows, "left plans")


def _changes(plan: Plan) -> str:
    """What moves the days most: figures of the machine, and of the run."""
    time = unit_for([plan.run.days], DAYS)
    moved = sorted(days_changes(plan).items(), key=lambda item: -abs(item[1] - plan.run.days))
    rows = [
        (name, f"{time(days)} {time.name} instead of {time(plan.run.days)}")
        for name, days in moved[:_MOST_CHANGES]
        if days != plan.run.days
    ]
    rows += [
        (f"{name} {CHANGE:.0%} lower, or higher", f"{low:+.1f} %, or {high:+.1f} %, of the step")
        for name, (low, high) in list(step_changes(plan).items())[:_MOST_CHANGES]
    ]
    return "<h3>What would change the answer</h3>" + html_table(("", ""), rows, "left")
