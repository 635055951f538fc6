"""Faults planted in one layer of real runs are named with the layer, and healthy layers have no reason."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from damaged_runs import train_damaged
from phalanx.observe.events import LayerStatistics
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.sections.monitoring import StatisticsSpec
from phalanx.run.spec import MoeSpec, RunSpec
from phalanx_watch.why.observed import Reason
from phalanx_watch.why.reasons import judge, observe
from ranks import Ranks
from tiny_runs import tiny_run, train_on_this_rank
from watch.why.watched import Watched, steps

OF_LAYERS = {"growing-layer", "saturated-layer", "collapsed-router", "dead-units"}


def measured_run(dataset: Path, run_dir: Path, steps: int = 16, every_steps: int = 2) -> RunSpec:
    spec = tiny_run(dataset, run_dir, steps)
    return dataclasses.replace(spec, statistics=StatisticsSpec(every_steps))


def mixture_run(dataset: Path, run_dir: Path, aux_loss: float = 0.3) -> RunSpec:
    """A run of 300 steps, after which a router should have learned."""
    moe = MoeSpec(experts=8, per_token=2, ffn_dim=16, router_bias=True, aux_loss=aux_loss)
    spec = measured_run(dataset, run_dir, 300, 100)
    train = dataclasses.replace(spec.train, batch_size=4, slots=2)
    return dataclasses.replace(
        spec,
        model=dataclasses.replace(spec.model, moe=moe),
        train=train,
        optimizer=dataclasses.replace(spec.optimizer, lr=1e-3),
        evaluation=dataclasses.replace(spec.evaluation, every_steps=0),
        checkpoint=dataclasses.replace(spec.checkpoint, every_steps=0),
    )


def reasons_of(run_dir: Path) -> dict[str, Reason]:
    """The reasons that the run had while it still ran."""
    seen = dataclasses.replace(observe(RunDirectory(run_dir), time.time()), finished=False, is_held=True)
    end = next(index for index, event in enumerate(seen.events) if type(event.body).__name__ == "Finished")
    events = seen.events[:end]
    return {
        reason.code: reason for reason in judge(dataclasses.replace(seen, events=events, now=events[-1].t))
    }


@pytest.mark.parametrize(
    ("fault", "code", "where"),
    [
        ("growing", "growing-layer", "layer 1, attention"),
        ("saturated", "saturated-layer", "layer 1"),
        ("dead", "dead-units", "layer 1"),
    ],
)
def test_a_fault_in_one_layer_is_named_with_the_layer(
    ranks: Ranks, dataset: Path, tmp_path: Path, fault: str, code: str, where: str
) -> None:
    ranks.run(1, train_damaged, measured_run(dataset, tmp_path / "run"), fault)
    reasons = reasons_of(tmp_path / "run")
    assert set(reasons) & OF_LAYERS == {code}
    assert reasons[code].where == where


def test_a_router_that_sends_all_tokens_to_the_same_experts_is_named_with_its_layer(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    spec = mixture_run(dataset, tmp_path / "run", aux_loss=0.0)
    ranks.run(1, train_damaged, spec, "collapsed")
    reasons = reasons_of(tmp_path / "run")
    assert "layer 1" in reasons["collapsed-router"].where
    assert "expert-imbalance" not in reasons


def test_the_first_layer_that_was_not_finite_is_named(ranks: Ranks, dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="not finite"):
        ranks.run(1, train_damaged, measured_run(dataset, tmp_path / "run", 16, 100), "infinite", 5)
    seen = observe(RunDirectory(tmp_path / "run"), time.time())
    reason = next(reason for reason in judge(seen) if reason.code == "not-finite")
    assert reason.evidence[-1] == "layer 1 is the first that is not finite (feed_forward.weight_norm)"


@pytest.mark.parametrize("make", [measured_run, mixture_run])
def test_healthy_layers_have_no_reason(ranks: Ranks, dataset: Path, tmp_path: Path, make: Any) -> None:
    ranks.run(1, train_on_this_rank, make(dataset, tmp_path / "run"))
    assert set(reasons_of(tmp_path / "run")) & OF_LAYERS == set()


def layer_statistics(gradients: dict[str, list[float | None]], step: int) -> LayerStatistics:
    figures = {f"{group}.gradient_norm": values for group, values in gradients.items()}
    return LayerStatistics(step, ["embedding", "0", "1", "2"], figures)


@pytest.mark.parametrize("finished", [True, False])
def test_layers_whose_gradient_is_always_zero_are_named_also_once_the_run_has_finished(
    tmp_path: Path, finished: bool
) -> None:
    run = Watched(tmp_path / "run")
    run.write(steps(1, 30))
    zero = {"embedding": [0.1, None, None, None], "attention": [None, 0.5, 0.0, 0.0]}
    run.write(layer_statistics(zero, 100 * n) for n in range(1, 5))
    assert run.codes(finished=finished) == []
    run.write([layer_statistics(zero, 500)])
    (reason,) = run.reasons(finished=finished)
    assert (reason.code, reason.where) == ("dead-units", "layer 1, layer 2")
    assert "attention is exactly zero in 2 layers" in reason.evidence[0]


def test_a_layer_that_is_left_out_of_some_steps_or_a_kind_of_parameter_that_nobody_uses_has_no_reason(
    tmp_path: Path,
) -> None:
    run = Watched(tmp_path / "run")
    run.write(steps(1, 30))
    unused: list[float | None] = [None, 0.0, 0.0, 0.0]
    for n in range(1, 9):
        at_times: list[float | None] = [None, 0.5, 0.5, 0.2 if n == 6 else 0.0]
        run.write([layer_statistics({"attention": at_times, "other": unused}, 100 * n)])
    assert run.codes() == []
