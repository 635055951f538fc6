"""The report of a plan: one self-contained HTML page with charts, tables, and every assumption with its source.

The first page is for those who pay for the run. It has the answer in a sentence, its range in days and money, the evidence, three
different plans side by side, the most sensitive figures, and a verdict. It uses words and figures of the plan; the pages after it show
their origin.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from phalanx.parallel.pipeline_schedules import Schedule
from phalanx.run.kinds.feed_forward import is_mixture
from phalanx_plan.evidence import Band
from phalanx_plan.report.analyses import CHANGE, TraceEvent, days_changes, step_changes, step_timeline
from phalanx_plan.report.elements import (
    BETWEEN,
    CO2,
    DAYS,
    DOLLARS,
    ENERGY,
    Bar,
    DisplayUnit,
    Dot,
    GanttSpan,
    counted,
    curves,
    gantt,
    html_table,
    mfu_text,
    scatter,
    stacked_bars,
    tornado,
    unit_for,
    written,
)
from phalanx_plan.search.plan import Plan
from phalanx_plan.step_cost.estimate import Estimate, Evaluation, prepare
from phalanx_plan.step_cost.memory import memory_at
from phalanx_plan.step_cost.pipeline import PlaceCounts
from phalanx_plan.whole_run.estimate import LEVELS, Percentiles, goodput_plan
from phalanx_plan.whole_run.failures import RateLevel
from phalanx_plan.workload.candidates import candidates_of
from phalanx_plan.workload.holdings import split

# The first page.


_MOST_CHANGES = 3


def first_page(plan: Plan) -> str:
    """Return the first section's HTML, without its heading: answer, verdict, ranges, evidence, the ideas, and what would change them."""
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
    """Return the answer in one sentence: days and cost with their P5-P95, so that a single figure does not look
    exact.

    A run that never finishes gets another sentence.
    """
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
    """Return "no-go" with the reasons against, else "measure first" with the doubts, else "go" with its reason."""
    against = tuple(_against(plan))
    if against:
        return "no-go", against
    doubts = tuple(_doubts(plan))
    if doubts:
        return "measure first", doubts
    return "go", ("the plan fits with room, and the software was measured on this accelerator",)


def _against(plan: Plan) -> Iterator[str]:
    """Yield the reasons against the plan: it does not fit, may never finish, or has a caveat that decides."""
    if not plan.chosen.fits:
        over = plan.chosen.memory_bytes - plan.chosen.capacity_bytes
        yield f"the layout does not fit: {over / 1e9:,.1f} GB too much on the fullest accelerator"
    if not math.isfinite(plan.run.finish_days.p95):
        yield "one run in twenty or more would never finish"
    yield from (caveat.text for caveat in plan.caveats if caveat.decides)


def _doubts(plan: Plan) -> Iterator[str]:
    """Yield the reasons to measure first: no published run, announced hardware, caveats that do not decide, and the run's warnings."""
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
    """Return the verdict and its reasons as HTML."""
    word, reasons = verdict(plan)
    points = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
    return f'<p class="verdict">{escape(word.capitalize())}</p><ul>{points}</ul>'


def _ranges(plan: Plan) -> str:
    """Return a table of time, cost, energy and step at P5, P50 and P95, as HTML."""
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


def _three_of(percentiles: Percentiles) -> tuple[float, float, float]:
    return percentiles.p5, percentiles.p50, percentiles.p95


def _three(plan: Plan) -> str:
    """Compare the plan's ideas side by side, as HTML, one in a column; only a note on the requested layout if no search was made."""
    if not plan.ideas:
        return f'<p class="note">One layout was requested: {escape(str(plan.chosen.layout))}</p>'
    estimates = [idea.estimate for idea in plan.ideas]
    days, usd = zip(*map(plan.failure_free, estimates), strict=True)
    time, money = unit_for(days, DAYS), unit_for(usd, DOLLARS)
    rows = [
        ("the idea", *(idea.title for idea in plan.ideas)),
        (f"{time.name}, no failures", *map(time, days)),
        (f"{money.name}, no failures", *map(money, usd)),
        ("MFU", *map(mfu_text, estimates)),
        (
            "GB of memory",
            *(
                f"{estimate.memory_bytes / 1e9:.1f} of {estimate.capacity_bytes / 1e9:.0f}"
                for estimate in estimates
            ),
        ),
        ("accelerators", *(f"{estimate.ranks:,}" for estimate in estimates)),
        ("gives up", *("; ".join(idea.gives_up) or "nothing against the others" for idea in plan.ideas)),
        ("--layout", *(str(estimate.layout) for estimate in estimates)),
    ]
    heads = ("", *(f"plan {number}" for number in range(1, len(estimates) + 1)))
    return "<h3>Three ways to do it</h3>" + html_table(heads, rows, "left plans")


def _changes(plan: Plan) -> str:
    """Return HTML that lists the ``_MOST_CHANGES`` assumptions that change the days most, and as many figures of the step."""
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


# The report.


_MOST_BARS = 32
_MOST_SPANS = 12_000
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1040px; margin: 2em auto; padding: 0 1em; color: #222 }
svg { max-width: 100%; height: auto } svg text { font: 11px system-ui, sans-serif; fill: #444 }
table { border-collapse: collapse; margin: 1em 0; max-width: 100% }
td, th { padding: 2px 10px 2px 0; text-align: right; vertical-align: top }
td:first-child, .left td { overflow-wrap: anywhere } .figures td + td, .figures th { white-space: nowrap }
td:first-child, th:first-child, .left td, .left th { text-align: left } th { border-bottom: 1px solid #999 }
.plans { table-layout: fixed; width: 100% } .plans th:first-child { width: 16% }
.answer { font-size: 20px; margin: 0.5em 0 } .verdict { font-size: 18px; font-weight: bold; margin: 0.5em 0 0 }
.legend span { margin-right: 1em; display: inline-block; font-size: 13px }
.legend i { display: inline-block; width: 11px; height: 11px; margin-right: 4px }
.note { color: #666; font-size: 13px } h2 { margin-top: 2em; border-bottom: 1px solid #ddd } h3 { margin: 1em 0 0 }
@media screen and (prefers-color-scheme: dark) {
  :root { color-scheme: dark } body { background: #17191d; color: #ddd } svg text { fill: #bbb } .note { color: #999 }
  h2 { border-color: #444 } th { border-color: #777 } svg [stroke="#eee"] { stroke: #333 } svg [fill="#e8e8e8"] { fill: #333 }
}
@page { size: A4; margin: 14mm }
@media print {
  body { font-size: 9pt; line-height: 1.35; max-width: none; margin: 0; padding: 0 } h1 { font-size: 14pt; margin: 0 } h2 { margin-top: 0.6em }
  .answer { font-size: 13pt } .verdict { font-size: 12pt } table { margin: 0.4em 0 } .plans { font-size: 8pt }
  section:first-of-type { break-after: page } svg, tr { break-inside: avoid } h2, h3 { break-after: avoid }
}
"""


def report_page(plan: Plan, before: Sequence[tuple[str, str]] = ()) -> str:
    """Return the complete HTML page; ``before`` are titles and HTML of sections that come first.

    Sections that compare layouts are left out if no search was made.
    """
    sections = [
        *before,
        ("Answer", first_page(plan)),
        *([("The best by the exact schedule", _best(plan))] if plan.search_result else []),
        ("Memory of each pipeline rank", _memory(plan)),
        ("Where the step goes", stacked_bars(_time_bars(plan), "s")),
        ("A step, as the schedule has it", _timeline(plan)),
        *(
            [("Pareto front", _front(plan)), ("What the others lose", _losers(plan))]
            if plan.search_result
            else []
        ),
        ("What moves the answer", _sensitivity(plan)),
        ("Goodput against the checkpoint interval", _goodput(plan)),
        ("The whole run", _run(plan)),
        ("Assumptions and sources", _assumptions(plan)),
    ]
    body = "".join(f"<section><h2>{escape(title)}</h2>{content}</section>" for title, content in sections)
    name = escape(f"Plan of {plan.name} on {plan.job.cluster.key}")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><title>{name}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{name}</h1>{body}</body></html>\n"
    )


def _best(plan: Plan) -> str:
    """Return an HTML table of the best layouts: step, MFU, memory and accelerators."""
    rows = [
        (
            str(estimate.layout),
            f"{estimate.step_s:.4g}",
            mfu_text(estimate),
            f"{estimate.memory_bytes / 1e9:.1f} of {estimate.capacity_bytes / 1e9:.0f}",
            f"{estimate.ranks:,}",
        )
        for estimate in plan.best
    ]
    return html_table(("layout", "step s", "MFU", "GB", "accelerators"), rows, "figures")


def _between(value: float, percentiles: Percentiles, units: Sequence[DisplayUnit]) -> str:
    return f"{written(value, units)} (P5 {written(percentiles.p5, units)}, P95 {written(percentiles.p95, units)})"


def _memory(plan: Plan) -> str:
    """Return the bars of each pipeline rank's memory in GB with the capacity; of ``_MOST_BARS`` evenly spread ranks if there are more."""
    bars = rank_memory(plan)
    if len(bars) > _MOST_BARS:
        chosen = np.unique(np.linspace(0, len(bars) - 1, _MOST_BARS).astype(int))
        bars = [bars[place] for place in chosen]
    return stacked_bars(bars, "GB", plan.chosen.capacity_bytes / 1e9)


def rank_memory(plan: Plan) -> list[Bar]:
    """Return a bar for every rank of a pipeline: its GB by kind of memory."""
    evaluation = prepare(plan.job, candidates_of([plan.chosen.layout], plan.job.modes))
    place = _every_rank(evaluation, plan.chosen)
    kinds = memory_at(evaluation, place)
    ranks = len(place.rank)
    wide = {kind: np.broadcast_to(size, ranks) / 1e9 for kind, size in kinds.items()}
    return [
        Bar(f"pipeline rank {rank}", {kind: float(size[rank]) for kind, size in wide.items()})
        for rank in range(ranks)
    ]


def _every_rank(evaluation: Evaluation, chosen: Estimate) -> PlaceCounts:
    """Count, on each pipeline rank, its dense layers, mixture layers, and whether it has the first and the last
    stage.

    Four arrays of shape (ranks,), in this order; ranks are the only axis of the result.
    """
    workload, layout = evaluation.job.workload, chosen.layout
    ranks, per_rank = layout.pipeline, layout.stages_per_rank
    placed = Schedule(layout.schedule, ranks, per_rank)
    counts, layer = np.zeros((4, ranks), dtype=np.int64), 0
    for stage, size in enumerate(split(workload, evaluation.job.stack, ranks * per_rank)):
        mixtures = sum(is_mixture(workload.model, number) for number in range(layer, layer + size))
        rank = placed.rank_of(stage)
        counts[0, rank] += size - mixtures
        counts[1, rank] += mixtures
        layer += size
    counts[2, placed.rank_of(0)] = counts[3, placed.rank_of(placed.stages - 1)] = 1
    return PlaceCounts((counts[0], counts[1], counts[2], counts[3]), np.arange(ranks))


def _time_bars(plan: Plan) -> list[Bar]:
    """Return bars of the seconds of a step by term: the chosen layout, and up to five others of the best."""
    others = [estimate for estimate in plan.best if estimate is not plan.chosen][:5]
    named = [
        ("chosen", plan.chosen),
        *((f"next {number}", estimate) for number, estimate in enumerate(others, 1)),
    ]
    return [
        Bar(name, {term.replace("_", " "): seconds for term, seconds in estimate.time.items() if seconds > 0})
        for name, estimate in named
    ]


def _timeline(plan: Plan) -> str:
    """Return the time line of a step as HTML, with a note on flushes; of evenly spread ranks if it has more than
    ``_MOST_SPANS`` spans.
    """
    line = step_timeline(plan.job, plan.chosen)
    events = line.events
    rows = sorted({event.rank for event in events})
    if len(events) > _MOST_SPANS:
        kept = max(1, _MOST_SPANS * len(rows) // len(events))
        rows = [rows[place] for place in np.unique(np.linspace(0, len(rows) - 1, kept).astype(int))]
    place = {rank: row for row, rank in enumerate(rows)}
    spans = [_span(event, place[event.rank]) for event in events if event.rank in place]
    note = (
        f"{line.flushes} flushes of the pipeline; the first is drawn action by action"
        if line.flushes > 1
        else ""
    )
    names = [f"rank {rank}" for rank in rows]
    return gantt(spans, names, line.step_s, "s") + f'<p class="note">{note}</p>'


def _span(event: TraceEvent, row: int) -> GanttSpan:
    """Convert a trace event to a span of row ``row``; what stands for several actions becomes "not drawn in detail"."""
    kind = "not drawn in detail" if event.name[0].isdigit() or event.name.startswith("flush") else event.name
    where = f", stage {event.stage}, micro-batch {event.micro_batch}" if event.stage >= 0 else ""
    title = f"{event.name}{where}: {event.end_s - event.begin_s:.4g} s"
    return GanttSpan(row, kind.replace("_", " "), event.begin_s, event.end_s, title)


def _front(plan: Plan) -> str:
    """Return the scatter of the layouts that no other beats in time, memory and accelerators, with the chosen one marked."""
    assert plan.search_result is not None, "only called after a search"
    dots = [
        Dot(
            point.step_s,
            point.memory_bytes / 1e9,
            f"{point.layout}: {point.step_s:.4g} s, {point.memory_bytes / 1e9:.1f} GB, {point.ranks:,}",
        )
        for point in plan.search_result.front
    ]
    chosen = Dot(plan.chosen.step_s, plan.chosen.memory_bytes / 1e9, "chosen (exact schedule)", marked=True)
    return scatter([*dots, chosen], "seconds a step", "GB") + (
        '<p class="note">Layouts that no other beats in time, memory and accelerators at once, by the closed form.</p>'
    )


def _losers(plan: Plan) -> str:
    """Return tables of the other families' best layouts, and of the reasons for which layouts were excluded."""
    assert plan.search_result is not None, "only called after a search"
    rows = [
        (
            loser.family,
            "does not fit" if loser.slower == float("inf") else f"{loser.slower:+.1%}",
            loser.reason,
        )
        for loser in sorted(plan.search_result.runners_up, key=lambda loser: loser.slower)
    ]
    excluded = [(reason, f"{count:,}") for reason, count in plan.search_result.excluded.items() if count]
    return (
        html_table(("best layout with", "step", "most of it"), rows, "left")
        + f"<p>{plan.search_result.looked_at:,} layouts looked at; {plan.search_result.valid:,} are legal and fit.</p>"
        + html_table(("excluded because", "layouts"), excluded)
    )


def _sensitivity(plan: Plan) -> str:
    """Return the HTML of how step and run change with single figures."""
    changes = {"as planned": plan.run.days, **days_changes(plan)}
    time = unit_for([plan.run.days], DAYS)
    return (
        f"<p>Change of the step when a figure is {CHANGE:.0%} lower or higher, the layout kept:</p>"
        + tornado(step_changes(plan), "% of the step")
        + html_table(
            (f"{time.name} of the run, with", time.name),
            [(name, time(days)) for name, days in changes.items()],
        )
    )


def _goodput(plan: Plan) -> str:
    """Return curves of goodput over checkpoint intervals from a tenth to 100 times the planned one, for each level of failure rates."""
    best = plan.run.interval_s
    intervals = [best * 10**power for power in np.linspace(-1, 2, 31)]
    lines = {f"failure rates {level}": list(_curve(plan, level, intervals)) for level in LEVELS}
    return curves(lines, "seconds between checkpoints", "goodput", (best, f"planned: {best:.4g} s"))


def _curve(plan: Plan, level: RateLevel, intervals: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Yield (interval in seconds, goodput) at a level of failure rates."""
    for interval_s in intervals:
        assumptions = dataclasses.replace(plan.assumptions, checkpoint_interval_s=interval_s)
        yield interval_s, goodput_plan(plan.inputs, assumptions, level).goodput


def _run(plan: Plan) -> str:
    """Return HTML of the run as a whole: its figures, a bar of its shares of wall time, warnings and notes."""
    run = plan.run
    time = unit_for([run.days], DAYS)
    shares = {name: share for name, share in run.breakdown.items() if share > 0}
    rows = [
        ("steps", f"{run.steps:,}"),
        ("tokens per day", f"{run.tokens_per_day:,.4g}"),
        (f"{time.name} without failures", time(run.failure_free_days)),
        (time.name, time(run.days)),
        (
            "finish P5, P50, P95",
            f"{time(run.finish_days.p5)}, {time(run.finish_days.p50)}, {time(run.finish_days.p95)}",
        ),
        ("goodput", f"{run.goodput:.2%}"),
        ("time to interruption", written(run.mtti_s, BETWEEN)),
        ("failures", f"{run.failures:,.0f}"),
        ("checkpoints", f"every {run.interval_s:,.4g} s, {run.tier.name}"),
        ("spare nodes", f"{run.spare_nodes:,}"),
        ("energy", _between(run.energy.total_kwh, run.energy_kwh, ENERGY)),
        ("CO2", written(run.co2_kg, CO2)),
        ("cost", _between(run.cost.total_usd, run.usd, DOLLARS)),
    ]
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in (*run.warnings, *plan.notes))
    return html_table(("", ""), rows) + stacked_bars([Bar("wall time", shares)], "share") + notes


def _assumptions(plan: Plan) -> str:
    """Return tables of figures of the accelerator and its links, of failure classes, of the stack and of assumptions, with their sources."""
    job, chip = plan.job, plan.job.cluster.accelerator
    facts = [
        (f"peak {name}", f"{fact.value / 1e12:,.5g} TFLOP/s", fact.source, fact.date)
        for name, fact in chip.flops.items()
    ]
    for name in ("memory_bytes", "memory_bytes_per_s", "host_bytes_per_s", "power_w", "price_per_hour"):
        fact = getattr(chip, name)
        facts.append((name.replace("_", " "), f"{fact.value:,.5g}", fact.source, fact.date))
    for name, fact in (
        ("domain", job.cluster.domain.bytes_per_s),
        ("network", job.cluster.fabric.bytes_per_s),
    ):
        facts.append((f"{name} bytes per s", f"{fact.value:,.5g}", fact.source, fact.date))
    for format_, fit in job.profile.constants.matmul.items():
        origin = fit.provenance
        error = f"{fit.efficiency:.3g} of peak" + (
            f"; median error {origin.median_error:.1%}" if origin.points else ""
        )
        facts.append((f"products in {format_}", error, origin.source, origin.date))
    stack = [(name, _plain(value)) for name, value in job.stack.facts()]
    assumed = [
        (field.name, _plain(getattr(plan.assumptions, field.name)))
        for field in dataclasses.fields(plan.assumptions)
        if field.name != "failure_classes"
    ]
    classes = [
        (
            failure_class.name,
            f"{failure_class.low:.3g} - {failure_class.typical:.3g} - {failure_class.high:.3g}",
            failure_class.source,
        )
        for failure_class in plan.assumptions.failure_classes
    ]
    return (
        html_table(("machine", "value", "source", "date"), facts, "left")
        + html_table(("run", "source"), plan.run.sources.items(), "left")
        + html_table(("failures per 1,000 device-days", "low - typical - high", "source"), classes, "left")
        + html_table(("stack", job.stack.name), stack, "left")
        + html_table(("assumption", "value"), assumed, "left")
    )


def _plain(value: object) -> str:
    """Return a value as text: a band by its quantiles, a tuple with commas, a float with five digits."""
    if isinstance(value, Band):
        return f"P5 {value.p5:.4g}, P50 {value.p50:.4g}, P95 {value.p95:.4g}"
    if isinstance(value, tuple):
        return ", ".join(map(_plain, value))
    return f"{value:,.5g}" if isinstance(value, float) else str(value)
