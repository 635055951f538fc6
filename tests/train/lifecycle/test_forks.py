"""Forks at loss spikes in runs of real ranks: the right cure is taken, with the same bits on every fleet, killed or not."""

from __future__ import annotations

import dataclasses
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.observe.event_log import read_events
from phalanx.observe.events import ChildTaken, ChildTrained, Evaluated, Forked, Step
from phalanx.observe.recorded_step import read_rank_trace
from phalanx.run.sections.monitoring import Candidate, SpikeSpec
from phalanx.run.spec import MoeSpec, RunSpec
from phalanx.train.lifecycle.ending import RunFailedError
from phalanx.train.lifecycle.fork import ForkFailedError
from phalanx.train.lifecycle.progress import (
    ChildOutcome,
    ChildStep,
    ForkPlan,
    TrainProgress,
    best_child,
    spikes_again,
)
from phalanx.train.lifecycle.worker import known_errors
from profiled_runs import NAME, ask
from ranks import Ranks
from run.specs import replace_at
from spiking_runs import SPIKE, STEPS, fast_run, make_noise, spiking_run
from tiny_runs import train_on_this_rank

FORK = SpikeSpec(fork_steps=4, base_every_steps=4)
BASE, END = 8, SPIKE + 3
"""The state that a fork at ``SPIKE`` goes back to, at least two steps before it; and the last step of its children."""


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_noise(tmp_path_factory.mktemp("noise") / "noise")


@pytest.fixture
def spiking(dataset: Path, noise: Path, tmp_path: Path) -> RunSpec:
    """A run whose data in one step are noise, and which forks there."""
    return forking(spiking_run(dataset, noise, tmp_path / "run"), FORK)


def forking(spec: RunSpec, spike: SpikeSpec) -> RunSpec:
    return dataclasses.replace(replace_at(spec, "train.on_spike", "fork"), spike=spike)


def in_folder(spec: RunSpec, run_dir: Path) -> RunSpec:
    return dataclasses.replace(spec, run_dir=str(run_dir))


def events(spec: RunSpec, *kinds: type) -> list[Any]:
    bodies = (event.body for event in read_events(Path(spec.run_dir) / "events.jsonl"))
    return [body for body in bodies if isinstance(body, kinds)]


def trained(ranks: Ranks, count: int, spec: RunSpec) -> str:
    return str(ranks.run(count, train_on_this_rank, spec)[0]["weights_sha256"])


def test_after_a_bad_batch_the_run_goes_on_as_one_that_left_it_out(
    ranks: Ranks, spiking: RunSpec, tmp_path: Path
) -> None:
    forked = trained(ranks, 2, spiking)
    skipping = replace_at(in_folder(spiking, tmp_path / "skip"), "train.on_spike", "skip")
    assert forked == trained(ranks, 1, skipping)
    (forked_event,), (taken,) = events(spiking, Forked), events(spiking, ChildTaken)
    assert (forked_event.step, forked_event.base, forked_event.end, forked_event.candidates) == (
        SPIKE,
        BASE,
        END,
        ["skip", "rate"],
    )
    assert (taken.step, taken.candidate, taken.end, taken.rate_scale) == (SPIKE, "skip", END, 1.0)
    children = {child.candidate: child.loss for child in events(spiking, ChildTrained)}
    assert children["skip"] == min(children.values())
    extra = DiskTier(tmp_path / "run" / "checkpoints").extra(STEPS)
    assert extra["forks"] == [[SPIKE, BASE, END]]
    assert extra["left_out"] == [[(SPIKE - 1) * 16, 16]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer.name": "muon"},
        {"optimizer.name": "soap", "optimizer.precondition_every": 3},
        {"optimizer.name": "shampoo", "optimizer.precondition_every": 3},
        {"optimizer.name": "adafactor", "train.spike_deviations": 1.0},
        {"optimizer.state": "int8"},
        {"optimizer.state": "bf16", "precision.compute": "bf16"},
        {"memory.offload_optimizer": "host"},
        {"memory.offload_optimizer": "file"},
        {"model.moe": MoeSpec(experts=4, per_token=2, ffn_dim=32, balance_bias=True)},
        {"parallel.pipeline": 2, "parallel.ranks": 2, "model.tie_embeddings": False},
    ],
    ids=str,
)
def test_going_back_restores_all_of_the_state(
    ranks: Ranks, spiking: RunSpec, tmp_path: Path, fields: dict[str, Any]
) -> None:
    spec = replace_at(spiking, "train.spike_deviations", 4.0)
    for path, value in fields.items():
        spec = replace_at(spec, path, value)
    if "memory.offload_optimizer" in fields:
        spec = replace_at(spec, "memory.offload_path", str(tmp_path / "offload"))
    # The child that is not taken was trained on the same ranks before or after the other one.
    forked = in_folder(spec, tmp_path / "forked")
    forked = dataclasses.replace(forked, spike=dataclasses.replace(FORK, candidates=("continue", "skip")))
    weights = trained(ranks, 2, forked)
    (taken,) = events(forked, ChildTaken)
    alone = replace_at(in_folder(spec, tmp_path / "alone"), "train.on_spike", taken.candidate)
    assert weights == trained(ranks, 2, alone)


def test_each_step_is_logged_once_and_the_children_leave_no_checkpoint(
    ranks: Ranks, spiking: RunSpec, tmp_path: Path
) -> None:
    trained(ranks, 1, spiking)
    assert [step.step for step in events(spiking, Step)] == list(range(1, STEPS + 1))
    assert not (tmp_path / "run" / "forks").exists()
    steps = DiskTier(tmp_path / "run" / "checkpoints").steps()
    assert {SPIKE - 1, END, STEPS} <= set(steps)


def test_of_a_rate_that_is_too_high_the_lower_one_is_taken_and_kept(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    fast = forking(fast_run(dataset, tmp_path / "fast"), SpikeSpec(fork_steps=8, base_every_steps=2))
    fast = dataclasses.replace(fast, train=dataclasses.replace(fast.train, slots=4, micro_batch_size=4))
    forked = trained(ranks, 2, fast)
    (taken,) = events(fast, ChildTaken)
    assert (taken.candidate, taken.rate_scale) == ("rate", 0.5)
    (forked_event,) = events(fast, Forked)
    start = DiskTier(tmp_path / "fast" / "checkpoints").folder(forked_event.base)
    branch = replace_at(in_folder(fast, tmp_path / "branch"), "train.on_spike", "continue")
    branch = dataclasses.replace(
        branch,
        optimizer=dataclasses.replace(branch.optimizer, lr=fast.optimizer.lr / 2),
        checkpoint=dataclasses.replace(branch.checkpoint, init_from=str(start), init_with="training"),
    )
    assert forked == trained(ranks, 1, branch)


def test_by_the_order_of_cures_the_first_child_without_another_spike_is_taken_and_none_trained_after_it(
    ranks: Ranks, spiking: RunSpec, tmp_path: Path
) -> None:
    first = dataclasses.replace(FORK, candidates=("continue", "skip"), prefer="first")
    weights = trained(ranks, 2, forking(spiking, first))
    assert [child.candidate for child in events(spiking, ChildTrained)] == ["continue"]
    assert weights == trained(
        ranks, 1, replace_at(in_folder(spiking, tmp_path / "alone"), "train.on_spike", "continue")
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"model.moe": MoeSpec(experts=4, per_token=2, ffn_dim=32)},
        pytest.param({"parallel.tensor": 2}, marks=pytest.mark.slow),
        pytest.param(
            {
                "parallel.pipeline": 2,
                "parallel.pipeline_schedule": "zbv",
                "model.tie_embeddings": False,
                "model.layers": 4,
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_a_child_in_the_wide_format_goes_on_in_it_also_on_other_ranks_after_a_kill(
    ranks: Ranks, spiking: RunSpec, tmp_path: Path, fields: dict[str, Any]
) -> None:
    narrow = replace_at(spiking, "precision.matmul", "mxfp8")
    for path, value in fields.items():
        narrow = replace_at(narrow, path, value)
    least = 2 if fields.keys() & {"parallel.tensor", "parallel.pipeline"} else 1
    wide = dataclasses.replace(narrow, spike=dataclasses.replace(FORK, candidates=("wide",)))
    ranks.run(2, train_on_this_rank, wide, SPIKE + (END - BASE) + 1)
    weights = trained(ranks, least, wide)
    assert events(wide, ChildTaken)[-1].wide
    start = DiskTier(tmp_path / "run" / "checkpoints").folder(BASE)
    branch = replace_at(in_folder(wide, tmp_path / "branch"), "train.on_spike", "continue")
    checkpoint = dataclasses.replace(branch.checkpoint, init_from=str(start), init_with="training")
    branch = dataclasses.replace(branch, checkpoint=checkpoint)
    assert weights != trained(ranks, least, branch)
    branch = replace_at(in_folder(branch, tmp_path / "wide"), "precision.matmul", "compute")
    assert weights == trained(ranks, least, branch)


CURED, SPIKES_AGAIN, NOT_FINITE = (
    ChildOutcome(3.0, spikes_again=False),
    ChildOutcome(2.0, spikes_again=True),
    ChildOutcome(math.inf, spikes_again=False),
)


@pytest.mark.parametrize(
    ("outcomes", "by_loss", "by_order"),
    [
        ({"skip": CURED, "rate": SPIKES_AGAIN}, "rate", "skip"),
        ({"rate": SPIKES_AGAIN, "skip": CURED}, "rate", "skip"),
        ({"skip": replace(SPIKES_AGAIN, loss=4.0), "rate": SPIKES_AGAIN}, "rate", "rate"),
        ({"skip": NOT_FINITE, "rate": SPIKES_AGAIN}, "rate", "rate"),
        ({"skip": NOT_FINITE}, None, None),
    ],
)
def test_spike_prefer_decides_between_the_lowest_loss_and_the_first_cure(
    outcomes: dict[Candidate, ChildOutcome], by_loss: Candidate | None, by_order: Candidate | None
) -> None:
    assert best_child("loss", outcomes) == by_loss
    assert best_child("first", outcomes) == by_order


def test_a_child_spikes_again_by_a_spike_or_a_step_that_is_not_finite_after_that_of_the_fork() -> None:
    plan = ForkPlan(spike=13, base=8, end=15)
    steps = [
        ChildStep(step, 3.0, 1.0, 0.1, 16 * step, is_applied=step != 13) for step in range(9, plan.end + 1)
    ]
    assert not spikes_again(plan, TrainProgress(step=15, spikes=[[13, 13]]), steps)
    assert spikes_again(plan, TrainProgress(step=15, spikes=[[13, 14]]), steps)
    steps[-1] = replace(steps[-1], loss=None, is_applied=False)
    assert spikes_again(plan, TrainProgress(step=15, spikes=[]), steps)


def test_a_run_that_falls_back_to_the_state_before_the_spike_forks_again(
    ranks: Ranks, spiking: RunSpec, tmp_path: Path
) -> None:
    undisturbed = trained(ranks, 1, spiking)
    checkpoints = DiskTier(tmp_path / "run" / "checkpoints")
    for step in checkpoints.steps():
        if step >= SPIKE:
            shutil.rmtree(checkpoints.folder(step))
    (tmp_path / "run" / "result.json").unlink()
    assert trained(ranks, 2, spiking) == undisturbed
    assert len(events(spiking, ChildTaken)) == 2


def test_a_profile_under_way_ends_before_the_fork_with_the_steps_that_there_were(
    ranks: Ranks, spiking: RunSpec, tmp_path: Path
) -> None:
    ask(tmp_path / "run", steps=STEPS)
    # Large slots: the profile has an event for each operation.
    large = dataclasses.replace(spiking.train, slots=2, micro_batch_size=8)
    trained(ranks, 2, dataclasses.replace(spiking, train=large))
    files = sorted((tmp_path / "run" / "profiles" / NAME).glob("rank-*.npz"))
    assert len(files) == 2
    for file in files:
        steps = [mark["step"] for mark in read_rank_trace(file).marks if mark["kind"] == "step"]
        assert steps == list(range(2, SPIKE + 1))


def test_evaluations_of_states_that_a_fork_left_behind_are_not_the_best(
    ranks: Ranks, spiking: RunSpec, tmp_path: Path
) -> None:
    forked = forking(spiking, dataclasses.replace(FORK, candidates=("rate",)))
    evaluation = dataclasses.replace(forked.evaluation, every_steps=1, keep_best="loss", stop_after=100)
    trained(ranks, 2, dataclasses.replace(forked, evaluation=evaluation))
    (forked_event,) = events(forked, Forked)
    values = {evaluated.step: evaluated.loss for evaluated in events(forked, Evaluated)}
    left = range(forked_event.base + 1, forked_event.step)
    assert min(values, key=lambda step: values[step]) in left, "the best of all is of a state left behind"
    kept = set(DiskTier(tmp_path / "run" / "checkpoints").steps())
    assert not kept & set(left) - {forked_event.step - 1}
    own = {step: value for step, value in values.items() if step not in left}
    assert min(own, key=lambda step: own[step]) in kept


def test_every_error_that_ends_a_run_is_reported_without_a_traceback() -> None:
    def kinds(of: type[Exception]) -> list[type[Exception]]:
        return [kind for subclass in of.__subclasses__() for kind in (subclass, *kinds(subclass))]

    assert ForkFailedError in kinds(RunFailedError)
    assert all(issubclass(kind, known_errors()) for kind in kinds(RunFailedError))


@pytest.mark.servers
@pytest.mark.parametrize(
    "computed",
    [
        pytest.param(SPIKE + 3, id="in the first child"),
        pytest.param(SPIKE + (END - BASE) + 2, id="in the second child"),
        pytest.param(SPIKE + 2 * (END - BASE) + 1, id="after the child was taken"),
    ],
)
def test_a_run_that_is_killed_in_a_fork_takes_the_same_child_on_other_ranks(
    ranks: Ranks, spiking: RunSpec, tmp_path: Path, computed: int
) -> None:
    undisturbed = trained(ranks, 1, in_folder(spiking, tmp_path / "whole"))
    ranks.run(2, train_on_this_rank, spiking, computed)
    assert trained(ranks, 3, spiking) == undisturbed
    assert [taken.candidate for taken in events(spiking, ChildTaken)][-1] == "skip"
    again = {child.candidate for child in events(spiking, ChildTrained) if child.again}
    assert again == ({"skip"} if computed == SPIKE + (END - BASE) + 2 else set())


@pytest.mark.servers
def test_a_child_whose_checkpoint_is_damaged_is_trained_again(
    ranks: Ranks, spiking: RunSpec, tmp_path: Path
) -> None:
    undisturbed = trained(ranks, 1, in_folder(spiking, tmp_path / "whole"))
    ranks.run(1, train_on_this_rank, spiking, SPIKE + (END - BASE) + 2)
    (index,) = (tmp_path / "run" / "forks").glob("*/skip/*/checkpoint.json")
    index.write_text(index.read_text()[:-20])
    assert trained(ranks, 2, spiking) == undisturbed
    assert not any(child.again for child in events(spiking, ChildTrained))


def test_a_run_stops_at_a_spike_once_it_has_forked_often_enough(ranks: Ranks, spiking: RunSpec) -> None:
    once = dataclasses.replace(
        spiking, spike=dataclasses.replace(FORK, candidates=("continue",), most_forks=1, fork_steps=2)
    )
    stages = (0, SPIKE - 1, SPIKE, SPIKE + 2, SPIKE + 3)
    sources = tuple(
        dataclasses.replace(source, weights=(*source.weights, *source.weights[1:]))
        for source in once.data.sources
    )
    twice = dataclasses.replace(once, data=dataclasses.replace(once.data, stages=stages, sources=sources))
    with pytest.raises(AssertionError, match=r"has forked 1 times \(spike.most_forks\)"):
        ranks.run(1, train_on_this_rank, twice)
