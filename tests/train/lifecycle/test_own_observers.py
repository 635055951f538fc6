"""Observers of other packages: the example of the manual on every layout, and what they may not do."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from manual.blocks import blocks
from phalanx.observe.event_log import read_events
from phalanx.observe.events import Message, TaskEvaluated
from phalanx.run.spec import RunSpec
from ranks import Ranks
from run.specs import replace_at
from tiny_runs import on_layout, tiny_run, train_on_this_rank

BASE = """
import torch
from phalanx.train.evaluation.scoring import EvaluationStoppedError
from phalanx.train.lifecycle.observers import Observer


class Own(Observer):
    def __init__(self, training):
        self.weight = next(training.built.model.parts[0].parameters())

"""


def installed(folder: Path, code: str, made: str) -> Path:
    """A package of a user's in ``folder``, whose entry point ``own`` is ``made``. Ranks have modules of other tests already."""
    module = f"own_{folder.parent.name}_{folder.name}".replace("-", "_")
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[phalanx.observers]\nown = {module}:{made}\n")
    (folder / f"{module}.py").write_text(code)
    return folder


def train_beside(package: Path, spec: RunSpec) -> dict[str, Any] | None:
    """Train on this rank, where ``package`` is installed."""
    sys.path.insert(0, str(package))
    try:
        return train_on_this_rank(spec)
    finally:
        sys.path.remove(str(package))


@pytest.fixture
def run(dataset: Path, tmp_path: Path) -> RunSpec:
    """A run with an observer of a user's own."""
    return replace_at(tiny_run(dataset, tmp_path / "run"), "observe.observers", ("own",))


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """A package with the example of the manual."""
    (program,) = (block for block in blocks("docs/watch/observers.md") if block.language == "python")
    return installed(tmp_path / "package", program.text, "Margin")


def recorded(spec: RunSpec) -> list[object]:
    bodies = [event.body for event in read_events(Path(spec.run_dir) / "events.jsonl")]
    is_own = [
        (isinstance(body, TaskEvaluated) and body.scored_as == "observer")
        or (isinstance(body, Message) and "the false sentence" in body.text)
        for body in bodies
    ]
    return [body for body, own in zip(bodies, is_own, strict=True) if own]


def test_the_example_of_the_manual_records_a_score_a_statistic_and_an_alert(
    ranks: Ranks, run: RunSpec, example: Path
) -> None:
    ranks.run(1, train_beside, example, run)
    figures = {body.step: body.figures for body in recorded(run) if isinstance(body, TaskEvaluated)}
    assert list(figures) == [2, 4, 6]
    assert all(
        math.isfinite(values["margin"]) and values["largest_grad_norm"] > 0 for values in figures.values()
    )
    alerts = [body.text for body in recorded(run) if isinstance(body, Message)]
    false = [step for step, values in figures.items() if values["margin"] < 0]
    assert [text.split(":")[0] for text in alerts] == [f"step {step}" for step in false]


@pytest.mark.parametrize("sharding", ["zero2", "zero3"])
def test_the_example_has_the_same_figures_on_other_layouts_and_changes_no_bit(
    ranks: Ranks, run: RunSpec, example: Path, sharding: str, tmp_path: Path
) -> None:
    (alone,) = ranks.run(1, train_beside, example, run)
    other = on_layout(dataclasses.replace(run, run_dir=str(tmp_path / "other")), sharding, 2)
    results = ranks.run(4, train_beside, example, other)
    plain = dataclasses.replace(run, run_dir=str(tmp_path / "plain"))
    (without,) = ranks.run(1, train_on_this_rank, replace_at(plain, "observe.observers", ()))
    assert recorded(other) == recorded(run)
    assert {result["weights_sha256"] for result in (alone, without, *results)} == {alone["weights_sha256"]}


def test_an_observer_that_draws_random_numbers_changes_no_bit(
    ranks: Ranks, run: RunSpec, tmp_path: Path
) -> None:
    code = (
        f"{BASE}    def after_step(self, end):\n        torch.manual_seed(end.step)\n        torch.rand(9)\n"
    )
    (drawn,) = ranks.run(1, train_beside, installed(tmp_path / "package", code, "Own"), run)
    plain = dataclasses.replace(run, run_dir=str(tmp_path / "plain"))
    (without,) = ranks.run(1, train_on_this_rank, replace_at(plain, "observe.observers", ()))
    assert drawn["weights_sha256"] == without["weights_sha256"]


@pytest.mark.parametrize("sharding", ["none", "zero2", "zero3"])
@pytest.mark.parametrize("write", ["self.weight.mul_(2)", "local(self.weight).zero_()"])
def test_an_observer_that_changes_a_weight_in_place_ends_the_run_before_it_is_saved(
    ranks: Ranks, run: RunSpec, tmp_path: Path, sharding: str, write: str
) -> None:
    code = (
        f"from phalanx.parallel.reduction.data_parallel import local\n{BASE}    @torch.no_grad()\n"
        f"    def after_step(self, end):\n        {write}\n"
    )
    package = installed(tmp_path / "package", code, "Own")
    spec = run if sharding == "none" else on_layout(run, sharding, 2)
    with pytest.raises(AssertionError) as failure:
        ranks.run(1 if sharding == "none" else 2, train_beside, package, spec)
    assert "the observer 'own' changed a weight in after_step of step 1" in str(failure.value)
    assert "leave it out of observe.observers" in str(failure.value)
    assert not any((Path(run.run_dir) / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("hook", "place"),
    [
        ("__init__(self, training)", "its construction"),
        ("before_step(self, step)", "before_step of step 1"),
        ("after_step(self, end)", "after_step of step 1"),
        ("after_save(self, end)", "after_save of step 1"),
        ("at_end(self)", "at_end"),
    ],
)
def test_an_observer_that_fails_is_named_with_its_hook_and_the_line(
    ranks: Ranks, run: RunSpec, tmp_path: Path, hook: str, place: str
) -> None:
    package = installed(tmp_path / "package", f"{BASE}    def {hook}:\n        1 / 0\n", "Own")
    with pytest.raises(AssertionError) as failure:
        ranks.run(1, train_beside, package, run)
    assert f"the observer 'own' failed in {place}: ZeroDivisionError: division by zero (" in str(
        failure.value
    )
    assert "line 12)" in str(failure.value)


def test_an_error_of_the_framework_is_named_with_the_observers_line_that_led_to_it(
    ranks: Ranks, run: RunSpec, tmp_path: Path
) -> None:
    code = f"{BASE}    def after_step(self, end):\n        TaskEvaluated(end.step, 'own', 'observer', 1, {{'margin': None}})\n"
    package = installed(
        tmp_path / "package", f"from phalanx.observe.events import TaskEvaluated\n{code}", "Own"
    )
    with pytest.raises(AssertionError) as failure:
        ranks.run(1, train_beside, package, run)
    assert "'margin' of 'own' is None, and must be an int or a float (" in str(failure.value)
    assert f"{tmp_path / 'package'}" in str(failure.value)
    assert "line 13)" in str(failure.value)


def test_an_observer_that_exits_is_named_as_one_that_fails(
    ranks: Ranks, run: RunSpec, tmp_path: Path
) -> None:
    code = f"{BASE}    def after_step(self, end):\n        raise SystemExit(0)\n"
    with pytest.raises(
        AssertionError, match="the observer 'own' failed in after_step of step 1: SystemExit: 0"
    ):
        ranks.run(1, train_beside, installed(tmp_path / "package", code, "Own"), run)


def test_an_evaluation_of_an_observers_own_may_be_stopped_after_a_save(
    ranks: Ranks, run: RunSpec, tmp_path: Path
) -> None:
    code = f"{BASE}    def after_save(self, end):\n        raise EvaluationStoppedError\n"
    (result,) = ranks.run(1, train_beside, installed(tmp_path / "package", code, "Own"), run)
    assert result is None


def test_what_is_no_observer_is_refused(ranks: Ranks, run: RunSpec, tmp_path: Path) -> None:
    package = installed(tmp_path / "package", "def make(training):\n    return training\n", "make")
    with pytest.raises(AssertionError, match="the observer 'own' is of type Training, and must be"):
        ranks.run(1, train_beside, package, run)


@pytest.mark.parametrize("made", ["missing", "broken"])
def test_one_that_a_machine_lacks_or_cannot_load_is_named_with_the_remedy(
    ranks: Ranks, run: RunSpec, tmp_path: Path, made: str
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    if made == "broken":
        installed(package, "1 / 0\n", "Own")
    with pytest.raises(AssertionError) as failure:
        ranks.run(1, train_beside, package, run)
    assert "the observer 'own' " in str(failure.value)
    assert "leave it out of observe.observers" in str(failure.value)
