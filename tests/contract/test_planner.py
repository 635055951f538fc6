"""Predictions of the planner for the published runs, to six significant digits.

``validation/data/residuals.csv`` has ratios of measured to predicted time; this record has the predictions themselves, of memory
too, and of rows without a measured time.
"""

from __future__ import annotations

import pytest

from contract.recorded import COMMAND, read_record, write_record
from validation.compare import outcome_of
from validation.runs import PublishedRun, read_published

TOLERANCE = 1e-5
"""Relative; six digits hold 5e-6, and another processor's last bits are far below."""
RUNS = read_published()


def prediction(run: PublishedRun) -> str:
    """Return step time (s) and memory (bytes) of the planner's estimate, or ``excluded``."""
    estimate = outcome_of(run).estimate
    return "excluded" if estimate is None else f"{estimate.step_s:.6g} s, {estimate.memory_bytes:.6g} bytes"


def one_of_each_kind() -> list[PublishedRun]:
    """Return a run of each software, accelerator and kind of model, and every fifteenth run."""
    kinds = {(run.software, run.gpu, run.mixture): run for run in RUNS}
    return list({run.id: run for run in (*kinds.values(), *RUNS[::15])}.values())


def agree(recorded: str, present: str) -> bool:
    """Return True if two predictions are equal up to the rounding of the record."""
    pairs = list(zip(recorded.split(), present.split(), strict=False))
    return len(recorded.split()) == len(present.split()) and all(
        before == now
        or (
            before[0].isdigit()
            and now[0].isdigit()
            and float(before) == pytest.approx(float(now), rel=TOLERANCE)
        )
        for before, now in pairs
    )


def check(runs: list[PublishedRun]) -> None:
    """Compare the predictions of some runs with their record."""
    recorded = read_record("planner")
    lines = [
        f"{run.id}: {recorded.get(run.id, 'not recorded')} -> {present}"
        for run in runs
        if not agree(recorded.get(run.id, ""), present := prediction(run))
    ]
    if lines:
        text = "\n  ".join(("predictions differ from tests/contract/records/planner.json:", *lines))
        remedy = f"If the change is deliberate, run `{COMMAND}` and `python -m validation --report docs/evidence/planner-accuracy.md`."
        pytest.fail(f"{text}\n{remedy}", pytrace=False)


def test_runs_of_each_software_and_accelerator_are_predicted_as_recorded(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--record", default=False):
        write_record("planner", {run.id: prediction(run) for run in RUNS})
    check(one_of_each_kind())


@pytest.mark.slow
def test_every_published_run_is_predicted_as_recorded() -> None:
    check(list(RUNS))


def test_the_record_has_every_published_run_and_no_other() -> None:
    assert read_record("planner").keys() == {run.id for run in RUNS}
