"""Number of planted divergences that ``phalanx why`` names, and of healthy runs without a reason.

Each run is real and small. The rules of ``phalanx why`` judge its events as they were every few steps while it ran. Only reasons about numbers of training
count: reasons about speed depend on this machine's other programs. A divergence is named if one of its reasons has the planted layer or step.

    python -m bench.watch.divergences [--only NAME ...] [--write docs/evidence/watching.md]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from bench.running import record, run_bench
from bench.watch.divergent_runs import CONTROLS, DIVERGENCES, Case, make_datasets, run_of, train_with
from phalanx.observe.events import Finished, Step
from phalanx.run.directory.paths import RunDirectory
from phalanx_watch.why.observed import Reason
from phalanx_watch.why.reasons import judge, observe
from ranks import Ranks

BEGIN, END = "<!-- divergences: begin -->", "<!-- divergences: end -->"
EVERY_STEPS = 5
"""Steps between two judgments."""
OF_TRAINING = {
    *(
        "not-finite",
        "loss-spike",
        "diverged",
        "raised-loss",
        "not-learning",
        "loss-too-low",
        "growing-norm",
        "expert-imbalance",
    ),
    *("growing-layer", "saturated-layer", "collapsed-router", "dead-units"),
}


def reasons_while_running(run: RunDirectory) -> list[tuple[int, Reason]]:
    """Return the reasons about numbers of training as they were every few steps, each with the step of its judgment."""
    seen = observe(run, time.time())
    ends = [index for index, event in enumerate(seen.events) if isinstance(event.body, Step)]
    ends = [*ends[::EVERY_STEPS], len(seen.events) - 1]
    reasons = []
    for end in ends:
        events = tuple(event for event in seen.events[: end + 1] if not isinstance(event.body, Finished))
        step = max((event.body.step for event in events if isinstance(event.body, Step)), default=0)
        then = replace(seen, events=events, now=events[-1].t, finished=False, is_held=True)
        reasons += [(step, reason) for reason in judge(then) if reason.code in OF_TRAINING]
    return reasons


def is_named(case: Case, reason: Reason) -> bool:
    """Return True if ``reason`` names the planted cause, with its layer or step."""
    return reason.code in case.codes and case.where in reason.where


def measure(case: Case, ranks: Ranks, datasets: dict[str, Path], folder: Path) -> tuple[bool, str]:
    """Train the run of ``case``; return True if it is judged as it should be, and the words for the table."""
    run = RunDirectory(folder / case.name.replace(" ", "-"))
    ranks.run(1, train_with, run_of(case, datasets, run.path), case)
    reasons = reasons_while_running(run)
    if case.codes:
        named = next(((step, reason) for step, reason in reasons if is_named(case, reason)), None)
        words = f"`{named[1].code}`, {named[1].where}, at step {named[0]}" if named else "not named"
        return named is not None, words
    first_steps = {reason.code: step for step, reason in reversed(reasons)}
    return not reasons, ", ".join(
        f"`{code}` at step {step}" for code, step in first_steps.items()
    ) or "nothing"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="these runs alone")
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the table in FILE")
    options = parser.parse_args()
    ranks = Ranks()
    rows, right = [], {True: 0, False: 0}
    chosen = [case for case in (*DIVERGENCES, *CONTROLS) if not options.only or case.name in options.only]
    try:
        with tempfile.TemporaryDirectory() as place:
            datasets = make_datasets(Path(place) / "data")
            for case in chosen:
                is_right, words = measure(case, ranks, datasets, Path(place))
                right[bool(case.codes)] += is_right
                kind = "planted" if case.codes else "healthy"
                record({"kind": kind, "run": case.name, "named": words, "right": is_right})
                rows.append(f"| {kind} | {case.name} | {words} |")
    finally:
        ranks.close()
    planted = sum(bool(case.codes) for case in chosen)
    total = f"{right[True]} of {planted} planted divergences named, {right[False]} of {len(chosen) - planted} healthy runs clean"
    record({"planted": planted, "named": right[True], "clean": right[False]}, is_printed=False)
    print(total)
    if options.write:
        text = options.write.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        after = rest.partition(END)[2]
        table = "\n".join(["| kind | run | named |", "|---|---|---|", *rows])
        options.write.write_text(f"{before}{BEGIN}\n{table}\n\n{total}.\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    run_bench(main)
