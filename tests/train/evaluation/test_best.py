"""The checkpoint of the best evaluation stays when others are deleted."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from phalanx.observe.event_log import EventLog, read_events
from phalanx.observe.events import Evaluated, Message, TaskEvaluated
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.sections.monitoring import evaluation_problems
from phalanx.run.spec import EvalSpec, RunSpec
from phalanx.train.evaluation.observers import BestRule, BestStep
from ranks import Ranks
from run.specs import replace_at
from tiny_runs import tiny_run, train_on_this_rank
from train.evaluation.made_tasks import with_tasks


def best_of(figure: str, *values: float | None) -> BestStep | None:
    best = None
    for step, value in enumerate(values, 1):
        best = BestRule(figure).better(step, value, best)
    return best


def test_a_loss_is_better_when_it_is_lower_and_an_accuracy_when_it_is_higher() -> None:
    assert best_of("loss", 3.0, 2.0, 2.5) == BestStep(2, 2.0)
    assert best_of("arc.bits_per_byte", 3.0, 2.0, 2.5) == BestStep(2, 2.0)
    assert best_of("arc.accuracy", 0.3, 0.5, 0.4) == BestStep(2, 0.5)
    assert best_of("sums.exact_match", 0.3, 0.5, 0.4) == BestStep(2, 0.5)


def test_of_equal_values_the_earlier_step_stays_and_nan_is_never_best() -> None:
    assert best_of("loss", 2.0, 2.0) == BestStep(1, 2.0)
    assert best_of("loss", math.nan, None, 4.0, math.nan, -math.inf) == BestStep(3, 4.0)


def test_the_best_step_of_earlier_starts_is_read_from_the_events(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl", 0) as log:
        for step, loss in ((10, 3.0), (20, 2.0), (30, 1.0)):
            log.append(Evaluated(step, loss))
            log.append(
                TaskEvaluated(
                    step=step, task="arc", scored_as="choice", items=1, figures={"accuracy": 1 / loss}
                )
            )
    rule = BestRule("loss")
    assert rule.recorded(tmp_path / "events.jsonl") == {10: 3.0, 20: 2.0, 30: 1.0}
    assert rule.best({10: 3.0, 20: 2.0}) == BestStep(20, 2.0)
    assert BestRule("arc.accuracy").recorded(tmp_path / "events.jsonl")[10] == 1 / 3
    assert rule.recorded(tmp_path / "gone.jsonl") == {}


@pytest.fixture
def run(dataset: Path, tmp_path: Path) -> RunSpec:
    """A run that keeps one checkpoint, and a task whose text it forgets while it learns."""
    spec = with_tasks(tiny_run(dataset, tmp_path / "run", 8), tmp_path / "tasks")
    spec = replace_at(spec, "checkpoint.keep_last", 1)
    return replace_at(spec, "evaluation.keep_best", "of-text.bits_per_byte")


def bits(run_dir: Path) -> dict[int, float]:
    bodies = [event.body for event in read_events(run_dir / "events.jsonl")]
    return {
        body.step: body.figures["bits_per_byte"]
        for body in bodies
        if isinstance(body, TaskEvaluated) and body.task == "of-text"
    }


def test_the_checkpoint_of_the_best_evaluation_is_kept(ranks: Ranks, run: RunSpec) -> None:
    ranks.run(2, train_on_this_rank, run)
    values = bits(Path(run.run_dir))
    best = min(values, key=values.__getitem__)
    assert best < 8
    assert RunDirectory(Path(run.run_dir)).committed_steps() == [best, 8]


def test_a_step_that_would_not_be_saved_is_saved_if_it_is_the_best(ranks: Ranks, run: RunSpec) -> None:
    seldom = replace_at(run, "checkpoint.every_steps", 7)
    ranks.run(1, train_on_this_rank, seldom)
    values = bits(Path(run.run_dir))
    best = min(values, key=values.__getitem__)
    assert best % 7
    assert best in RunDirectory(Path(run.run_dir)).committed_steps()


def test_a_run_that_is_started_again_keeps_the_best_of_its_earlier_starts(ranks: Ranks, run: RunSpec) -> None:
    ranks.run(1, train_on_this_rank, run, 7)
    ranks.run(2, train_on_this_rank, run)
    values = bits(Path(run.run_dir))
    assert RunDirectory(Path(run.run_dir)).committed_steps() == [min(values, key=values.__getitem__), 8]


def test_an_evaluation_on_another_file_of_the_task_is_not_the_best(tmp_path: Path) -> None:
    figures = {"bits_per_byte": 1.0}
    with EventLog(tmp_path / "events.jsonl", 0) as log:
        log.append(
            TaskEvaluated(step=2, task="arc", scored_as="text", items=1, figures=figures, sha256="old")
        )
    rule = BestRule("arc.bits_per_byte")
    assert rule.recorded(tmp_path / "events.jsonl", "new") == {}
    assert rule.recorded(tmp_path / "events.jsonl", "old") == {2: 1.0}


def test_a_file_that_changes_between_two_starts_is_named(ranks: Ranks, run: RunSpec, tmp_path: Path) -> None:
    ranks.run(1, train_on_this_rank, run, 5)
    (tmp_path / "tasks" / "text.jsonl").write_text('{"text": "another text"}')
    ranks.run(1, train_on_this_rank, run)
    bodies = [event.body for event in read_events(Path(run.run_dir) / "events.jsonl")]
    (warning,) = [body.text for body in bodies if isinstance(body, Message) and "another one" in body.text]
    assert warning.startswith("task of-text: its file is another one than in the evaluation of step 4")


def test_a_figure_that_no_evaluation_has_is_refused_with_the_nearest(run: RunSpec) -> None:
    wrong = dataclasses.replace(run.evaluation, keep_best="of-choice.acuracy")
    (problem,) = evaluation_problems(wrong, 16)
    assert problem.path == "evaluation.keep_best"
    assert "'of-choice.accuracy'" in str(problem)
    exact = dataclasses.replace(run.evaluation, keep_best="of-generation.exact_match")
    assert list(evaluation_problems(exact, 16)) == []
    assert list(evaluation_problems(EvalSpec(keep_best="loss"), 16)) == []
