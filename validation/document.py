"""The accuracy document, ``docs/evidence/planner-accuracy.md``, from the results of a comparison.

The document is written from the comparison alone, with the missed goals: no figure in it is typed by hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from validation.bands import KINDS, LeftOut, coverage, left_out, left_out_sources, program_coverage
from validation.compare import Errors, Outcome, Prediction, Sweep, Validation, errors, sweeps
from validation.judged import Judged

FAMILY_LIMIT = 0.20
"""No family's median may be further off."""


@dataclass(frozen=True)
class Goal:
    """A figure that the planner is to reach."""

    name: str
    limit: float
    reached: float | None
    """``None`` if no row judges it."""

    @property
    def met(self) -> bool:
        """True if the goal is reached."""
        return self.reached is not None and self.reached <= self.limit


def goals(validation: Validation, judged: Sequence[Judged] = ()) -> tuple[Goal, ...]:
    """Return the goals of accuracy with the reached figures; goals for unseen software only with ``judged`` rows."""
    raw, _ = _times(validation.timed())
    dense, mixtures = (_times(validation.timed(mixture=mixture))[1] for mixture in (False, True))
    stated = [outcome.memory for outcome in validation.outcomes if outcome.memory is not None]
    memory = errors(memory.error for memory in stated if memory.basis != "peak, not said of what")
    worst = [_times(members)[1] for members in validation.families().values()]
    regrets = [sweep.regret for sweep in validation.sweeps]
    return (
        Goal("memory, median, where the source says what it measured", 0.03, _median(memory)),
        Goal("time, median, no end-to-end data at all", 0.12, _median(raw)),
        Goal("time, median, with the stack's factor, dense models", 0.05, _median(dense)),
        Goal("time, median, with the stack's factor, mixtures", 0.08, _median(mixtures)),
        Goal(
            "time with the factor, median of the worst family",
            FAMILY_LIMIT,
            max((e.median for e in worst if e), default=None),
        ),
        Goal("regret of decisions, mean", 0.03, fmean(regrets) if regrets else None),
        *(_goals_of_unseen_software(validation, judged) if judged else ()),
    )


def _goals_of_unseen_software(validation: Validation, judged: Sequence[Judged]) -> Iterable[Goal]:
    predictions = left_out(judged)
    never = errors(run.error for run in predictions if run.kind == "never")
    regrets = [sweep.regret for sweep in _unseen_sweeps(validation, judged)]
    yield Goal("time, median, software left out, with its kind's bias", 0.12, _median(never))
    for kind in KINDS:
        share = coverage([run for run in predictions if run.kind == kind], 0.1)
        yield Goal(f"80 % bands, software left out, {kind}: off by", 0.05, abs(share - 0.8))
    yield Goal("regret of decisions of software left out, mean", 0.04, fmean(regrets) if regrets else None)


def _unseen_sweeps(validation: Validation, judged: Sequence[Judged]) -> list[Sweep]:
    """Return the decisions as they are made for software that the planner has not seen."""
    rows = {row.run: row for row in judged}
    predicted = {
        outcome.run.id: Prediction(
            outcome.time.measured_s / row.unseen_ratio,
            (1 - row.unseen_free) * outcome.estimate.capacity_bytes,
            outcome.estimate.capacity_bytes,
        )
        for outcome in validation.outcomes
        if outcome.time is not None
        and outcome.estimate is not None
        and (row := rows.get(outcome.run.id)) is not None
    }
    return sweeps(validation.outcomes, predicted)


def _median(summary: Errors | None) -> float | None:
    return summary.median if summary else None


def _times(outcomes: Iterable[Outcome]) -> tuple[Errors | None, Errors | None]:
    """Return errors of time, raw and with the factor."""
    times = [outcome.time for outcome in outcomes if outcome.time is not None]
    return errors(time.error for time in times), errors(time.scaled_error for time in times)


def document(validation: Validation, judged: Sequence[Judged] = (), day: str = "an unknown day") -> str:
    """Return ``docs/evidence/planner-accuracy.md``, made on ``day``; with ``judged`` rows also the coverage of bands."""
    parts = (
        _INTRODUCTION.replace("DAY", day),
        _goals_part(validation, judged),
        _split_part(validation),
        *((_bands_part(judged), _sources_part(judged)) if judged else ()),
        _families_part(validation),
        _fits_part(validation),
        _sweeps_part(validation, judged),
        _scalars_part(validation),
        _excluded_part(validation),
        _rows_part(validation),
    )
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = """# How accurate the planner is

Made on DAY by `python -m validation --report docs/evidence/planner-accuracy.md`; do not edit. It is computed, the same on any machine. The rows are those of
`validation/data/published_runs.csv`, or of the file that was named. An error is predicted over measured, less one: below zero the planner is too optimistic.

- *Raw*: data sheets and micro-benchmarks, and four constants that whole training steps were needed for: the scale tax, the
  host's time to launch a kernel, what an overlapped exchange of tokens hides, and how much more energy a FLOP takes on H100 than
  on GB200, where it was measured (fitted on one half of the models). Not blind all the same: what `phalanx_plan.workload.software` and `recipes` say of each
  software (which fused attention, which loss, eager or fused, format of gradients, dispatcher, CUDA graphs) was written down
  after a first comparison, from the sources' own repositories where they say it.
- *With the factor*: multiplied by the median of measured over predicted time of other runs of the same software on the same
  generation of accelerators, dense models and mixtures apart, drawn towards one where few models are known. A run never has a
  part in its own factor, nor does any other run of the same model on the same accelerator. Where no such run is left, the same
  software's runs elsewhere serve, and where it is known from one model alone, that model's other configurations; else the
  factor is one.
- A family is one origin, one accelerator, and dense models or mixtures of experts.
- What a row leaves open of its layout (micro-batch, interleaving, recomputation) is set to what the planner finds fastest among
  what fits; such rows are marked `*`, and their memory is not compared."""


def _bands_part(judged: Sequence[Judged]) -> str:
    predictions = left_out(judged)
    rows = []
    for kind in KINDS:
        for mixture in (False, True):
            these = [run for run in predictions if (run.kind, run.judged.mixture) == (kind, mixture)]
            rows.append((kind, "mixtures" if mixture else "dense", *_left_cells(these), *_by_program(these)))
        every = [run for run in predictions if run.kind == kind]
        rows.append((kind, "all", *_left_cells(every), *_by_program(every)))
    text = """## Bands

What `phalanx plan` prints as P5-P95, learned from these rows by `validation.bands` (`python -m validation --learn`), with the
correction for samples of few independent runs, which belongs to all kinds (that module says why), and judged on software that was left out: *here*, there are runs of the software on the accelerator (of other models; the band is from these and
from all other software); *elsewhere*, there are runs of it on other accelerators only (likewise); *never*, it was not seen at all, and its
stack is planned for without habits, recipe or factor. Where fewer than four programs are left, coverage says little. Some programs have
two hundred runs and some three: the last two columns give each program one vote, which is what new software may expect. The share of runs that an
80 % band holds moves by chance too: by 5 to 6 points (a standard deviation) between tables of as many dense programs, of as many runs each and as
alike, and by 4 to 8 with five programs; with one vote a program by 2 and 5 (`tests/validation/test_bands.py` draws such tables).

"""
    return text + _table(
        ("evidence", "models", *_LEFT_OUT, "programs", "80 %, by program", "90 %, by program"), rows
    )


def _by_program(predictions: Sequence[LeftOut]) -> tuple[str, ...]:
    if not predictions:
        return "", ""
    return tuple(f"{program_coverage(predictions, level):.0%}" for level in (0.1, 0.05))


def _sources_part(judged: Sequence[Judged]) -> str:
    sources = left_out_sources(judged)
    rows = [
        (name, ", ".join(sorted({run.kind for run in runs})), *_left_cells(runs)[:-1])
        for name, runs in sources.items()
    ]
    every = [run for runs in sources.values() for run in runs]
    rows.append(("all", "", *_left_cells(every)[:-1]))
    text = """## By left-out source

Each source's rows as a plan would have predicted them had the planner learned nothing from that source: factor, bias and band are
those of the evidence that is left. What is known of a software's habits counts only where another source has runs of it.

"""
    return text + _table(("source", "evidence left", *_LEFT_OUT), rows)


_LEFT_OUT = ("n", "median error", "bias", "80 % band holds", "90 % band holds")


def _left_cells(predictions: Sequence[LeftOut]) -> tuple[str, ...]:
    summary = errors(run.error for run in predictions)
    if summary is None:
        return ("0", "", "", "", "", "0")
    return (
        str(summary.count),
        f"{summary.median:.1%}",
        f"{summary.bias:+.1%}",
        f"{coverage(predictions, 0.1):.0%}",
        f"{coverage(predictions, 0.05):.0%}",
        str(len({run.judged.software for run in predictions})),
    )


def _goals_part(validation: Validation, judged: Sequence[Judged]) -> str:
    rows = [
        (
            goal.name,
            f"{goal.limit * 100:g}%",
            "-" if goal.reached is None else f"{goal.reached:.1%}",
            "yes" if goal.met else "**no**",
        )
        for goal in goals(validation, judged)
    ]
    table = _table(("goal", "at most", "reached", "met"), rows)
    return f"## Goals\n\n{table}\n\n{_BESIDE_GOALS}"


_BESIDE_GOALS = """Goals that are missed are bold. How the planner does on rows that nothing was fitted to, and on flagship runs in their own layouts, is in
[planner-campaigns.md](planner-campaigns.md#rows-that-nothing-was-fitted-to)."""


def _split_part(validation: Validation) -> str:
    complete = [outcome for outcome in validation.outcomes if outcome.complete]
    first, second = validation.halves()
    groups = [
        ("all", *_times(validation.timed())),
        ("dense", *_times(validation.timed(mixture=False))),
        ("mixtures", *_times(validation.timed(mixture=True))),
        ("rows that leave nothing open", *_times(complete)),
    ]
    rows: list[tuple[str, ...]] = [(name, *_cells(raw), *_cells(scaled)[1:]) for name, raw, scaled in groups]
    for name, half in (("first", first), ("second", second)):
        number, *cells = _cells(half)
        rows.append(
            (f"{name} half of the models, factors from the other half only", number, "", "", "", *cells)
        )
    return "## Time\n\n" + _table(("rows", "n", *_RAW, *_SCALED), rows)


_RAW = ("raw: median", "worst", "bias")
_SCALED = ("factor: median", "worst", "bias")


def _cells(summary: Errors | None) -> tuple[str, str, str, str]:
    if summary is None:
        return ("", "", "", "")
    return (str(summary.count), f"{summary.median:.1%}", f"{summary.worst:+.0%}", f"{summary.bias:+.1%}")


def _families_part(validation: Validation) -> str:
    rows = []
    for name, members in validation.families().items():
        raw, scaled = _times(members)
        memory = errors(outcome.memory.error for outcome in members if outcome.memory)
        if raw is not None or memory is not None:
            rows.append((name, *_cells(raw), *_cells(scaled)[1:], *_cells(memory)))
    header = ("family", "n", *_RAW, *_SCALED, "memory: n", "median", "worst", "bias")
    return "## By family\n\n" + _table(header, rows)


def _fits_part(validation: Validation) -> str:
    fits = validation.fits
    text = (
        f"## What fits\n\n{fits.ran_out_predicted} of {fits.ran_out} runs that ran out of memory are predicted to; "
        f"{fits.ran_predicted} of {fits.ran} runs that ran are predicted to fit."
    )
    return text + ("\n\nWrong: " + ", ".join(f"`{name}`" for name in fits.wrong) + "." if fits.wrong else "")


def _sweeps_part(validation: Validation, judged: Sequence[Judged]) -> str:
    if not validation.sweeps:
        return "## Decisions\n\nNo model was measured in several layouts."
    pairs = list(zip(validation.sweeps, _unseen_sweeps(validation, judged), strict=True))
    means, tau = _mean_regrets(pairs), fmean(sweep.tau for sweep in validation.sweeps)
    text = (
        "## Decisions\n\nWhere one source ran one model on the same machines in several layouts: measured time of the planner's "
        "choice over the best measured, less one. It chooses as `phalanx plan` does: of the layouts that it predicts to fit (of all, where none is) "
        "the fastest, but one that leaves room in memory before one that does not and is less than 3 % faster. "
        f"Mean regret {means[0]:.1%} (of a choice at random {means[4]:.1%}), mean of Kendall's tau {tau:+.2f}, over {len(pairs)} choices. "
        "Factors, whichever runs they are learned from, change no choice: "
        "one factor holds for all layouts of a choice. What is known of the software (habits, recipe, facts) does: with that left out too, "
        f"chosen by the stack of its kind alone, the mean regret is {means[1]:.1%}. Chosen by time alone, whether it is predicted to fit or not, "
        f"the two would be {means[2]:.1%} and {means[3]:.1%}.\n\n"
    )
    sources = sorted({sweep.origin for sweep, _ in pairs})
    by_source = [
        (origin, str(len(mine)), *(f"{mean:.1%}" for mean in _mean_regrets(mine)))
        for origin in sources
        if (mine := [pair for pair in pairs if pair[0].origin == origin])
    ]
    kinds = (
        "regret",
        "software left out",
        "regret, by time alone",
        "software left out, by time alone",
        "at random",
    )
    rows = [
        (
            sweep.name,
            str(sweep.layouts),
            *(f"{mean:.1%}" for mean in _mean_regrets([(sweep, other)])),
            f"{sweep.tau:+.2f}",
        )
        for sweep, other in pairs
    ]
    return "\n\n".join(
        (
            text + _table(("source", "choices", *kinds), by_source),
            _table(("model, machines, sequences", "layouts", *kinds, "tau"), rows),
        )
    )


def _mean_regrets(pairs: Sequence[tuple[Sweep, Sweep]]) -> tuple[float, ...]:
    """Return the mean regret of choices, of choices with the software left out, of both by time alone, and at random."""
    return (
        fmean(seen.regret for seen, _ in pairs),
        fmean(unseen.regret for _, unseen in pairs),
        fmean(seen.regret_by_time for seen, _ in pairs),
        fmean(unseen.regret_by_time for _, unseen in pairs),
        fmean(seen.mean_regret for seen, _ in pairs),
    )


def _scalars_part(validation: Validation) -> str:
    rows = [
        (key, f"{scalar.value:.3f}", str(scalar.runs), str(scalar.models))
        for key, scalar in validation.scalars.items()
    ]
    return "## Factors\n\nFrom all runs, as the planner would use them.\n\n" + _table(
        ("stack", "factor", "runs", "models"), rows
    )


def _excluded_part(validation: Validation) -> str:
    reasons = Counter(outcome.excluded for outcome in validation.outcomes if outcome.excluded)
    by_reason: dict[str, list[str]] = {reason: [] for reason, _ in reasons.most_common()}
    for outcome in validation.outcomes:
        if outcome.excluded:
            by_reason[outcome.excluded].append(f"`{outcome.run.id}`")
    rows = [(reason, str(len(names)), " ".join(names)) for reason, names in by_reason.items()]
    text = (
        f"## Excluded\n\n{sum(reasons.values())} of {len(validation.outcomes)} rows cannot be compared.\n\n"
    )
    return text + _table(("reason", "n", "rows"), rows)


def _rows_part(validation: Validation) -> str:
    rows = []
    for outcome in validation.outcomes:
        time, memory = outcome.time, outcome.memory
        if time is None and memory is None:
            continue
        name = f"`{outcome.run.id}`" + ("" if outcome.complete else " *")
        timed = (
            (
                f"{time.measured_s:.4g}",
                f"{time.predicted_s:.4g}",
                f"{time.error:+.1%}",
                f"{time.scaled_error:+.1%}",
            )
            if time
            else ("",) * 4
        )
        memory_cells = (
            (
                f"{memory.measured_bytes / 1e9:.1f}",
                f"{memory.predicted_bytes / 1e9:.1f}",
                f"{memory.error:+.1%}",
                memory.basis,
            )
            if memory
            else ("",) * 4
        )
        rows.append((name, *timed, *memory_cells))
    header = (
        "row",
        "step, s",
        "predicted",
        "raw",
        "with factor",
        "memory, GB",
        "predicted",
        "error",
        "of what",
    )
    return "## Every row\n\n" + _table(header, rows)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
