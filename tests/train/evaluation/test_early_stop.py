"""A run ends by itself once its evaluations get no better, at the same step on any layout and through a stop."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from phalanx.observe.event_log import read_events
from phalanx.observe.events import EndedEarly, Evaluated, Finished
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.sections.monitoring import EvalSpec, evaluation_problems
from phalanx.run.spec import RunSpec
from phalanx.train.evaluation.observers import BestRule, without_better
from ranks import Ranks
from run.specs import replace_at
from tiny_runs import on_layout, tiny_run, train_on_this_rank
from train.evaluation.made_tasks import with_tasks


@pytest.fixture
def run(dataset: Path, tmp_path: Path) -> RunSpec:
    """A run whose accuracy on a task stays as it is, and which ends after two evaluations without a better one."""
    spec = with_tasks(tiny_run(dataset, tmp_path / "run", 14), tmp_path / "tasks")
    spec = replace_at(spec, "evaluation.keep_best", "of-completion.accuracy")
    return replace_at(spec, "evaluation.stop_after", 2)


def ended(run_dir: str | Path) -> list[EndedEarly]:
    bodies = [event.body for event in read_events(Path(run_dir) / "events.jsonl")]
    return [body for body in bodies if isinstance(body, EndedEarly)]


def test_evaluations_after_the_best_are_counted_and_nan_is_never_best() -> None:
    rule = BestRule("loss")
    values = {2: 3.0, 4: 2.0, 6: math.nan, 8: 2.0}
    assert without_better(values, rule.best(values)) == 2
    assert without_better({2: math.nan, 4: math.inf}, None) == 2
    assert without_better({}, None) == 0


def test_a_run_ends_early_saved_and_with_a_result_that_records_it(ranks: Ranks, run: RunSpec) -> None:
    (result,) = ranks.run(1, train_on_this_rank, run)
    (body,) = ended(run.run_dir)
    assert (body.step, body.best_step, body.evaluations) == (6, 2, 2)
    assert result["step"] == 6
    assert result["early_stop"] == {
        "figure": "of-completion.accuracy", "stop_after": 2, "best_step": 2, "best_value": body.best_value,
    }  # fmt: skip
    directory = RunDirectory(Path(run.run_dir))
    assert 6 in directory.committed_steps()
    assert isinstance(list(read_events(directory.events))[-1].body, Finished)


def test_every_layout_ends_at_the_same_step_with_the_same_weights(
    ranks: Ranks, run: RunSpec, tmp_path: Path
) -> None:
    (alone,) = ranks.run(1, train_on_this_rank, run)
    other = on_layout(dataclasses.replace(run, run_dir=str(tmp_path / "four")), "zero2", 2)
    results = ranks.run(4, train_on_this_rank, other)
    assert {result["weights_sha256"] for result in results} == {alone["weights_sha256"]}
    assert ended(other.run_dir) == ended(run.run_dir)


@pytest.mark.parametrize("step", [3, 4, 5, 6])
def test_a_stop_changes_no_step_at_which_a_run_ends(ranks: Ranks, run: RunSpec, step: int) -> None:
    ranks.run(2, train_on_this_rank, run, step)  # the evaluation of an even step is cut short
    (result,) = ranks.run(1, train_on_this_rank, run)
    assert result["step"] == 6
    steps = [
        event.body.step
        for event in read_events(RunDirectory(Path(run.run_dir)).events)
        if isinstance(event.body, Evaluated)
    ]
    assert sorted(set(steps)) == [2, 4, 6]


def test_a_run_that_ended_early_goes_on_if_the_rule_is_another_one(ranks: Ranks, run: RunSpec) -> None:
    ranks.run(1, train_on_this_rank, run)
    directory = RunDirectory(Path(run.run_dir))
    assert directory.complete_result(run) is not None
    later = replace_at(run, "evaluation.stop_after", 4)
    assert directory.complete_result(later) is None
    (result,) = ranks.run(1, train_on_this_rank, later)
    assert (result["step"], result["early_stop"]["stop_after"]) == (10, 4)
    (result,) = ranks.run(1, train_on_this_rank, replace_at(run, "evaluation.stop_after", 0))
    assert (result["step"], result["early_stop"]) == (14, None)


def test_a_rule_without_a_figure_or_evaluations_is_refused() -> None:
    (problem,) = evaluation_problems(EvalSpec(stop_after=2), 16)
    assert problem.path == "evaluation.keep_best"
    (problem,) = evaluation_problems(EvalSpec(every_steps=0, keep_best="loss", stop_after=2), 16)
    assert problem.path == "evaluation.every_steps"
