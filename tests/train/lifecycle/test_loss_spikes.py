"""A loss spike in a run of real ranks: recorded, stopped at or left out, with the same bits on every fleet."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.observe.event_log import read_events
from phalanx.observe.events import LossSpike
from phalanx.run.spec import RunSpec
from ranks import Ranks
from run.specs import replace_at
from spiking_runs import SPIKE, STEPS, make_noise, spiking_run
from tiny_runs import tiny_run, train_on_this_rank


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_noise(tmp_path_factory.mktemp("noise") / "noise")


@pytest.fixture
def spiking(dataset: Path, noise: Path, tmp_path: Path) -> RunSpec:
    """A run whose data in one step, ``SPIKE``, are another dataset's."""
    return spiking_run(dataset, noise, tmp_path / "run")


def with_action(spec: RunSpec, action: str, run_dir: Path) -> RunSpec:
    train = dataclasses.replace(spec.train, on_spike=action)  # type: ignore[arg-type]
    return dataclasses.replace(spec, train=train, run_dir=str(run_dir))


def spikes_of(run_dir: Path) -> list[LossSpike]:
    return [
        event.body for event in read_events(run_dir / "events.jsonl") if isinstance(event.body, LossSpike)
    ]


def state(run_dir: Path, step: int) -> dict[str, Any]:
    return DiskTier(run_dir / "checkpoints").extra(step)


def test_a_spike_is_recorded_with_its_batch_and_the_checkpoint_before_it_is_kept(
    ranks: Ranks, spiking: RunSpec, tmp_path: Path
) -> None:
    ranks.run(2, train_on_this_rank, spiking)
    spike, *others = spikes_of(tmp_path / "run")
    assert not others
    assert (spike.step, spike.action, spike.first_sample, spike.samples) == (
        SPIKE,
        "continue",
        (SPIKE - 1) * spiking.train.batch_size,
        spiking.train.batch_size,
    )
    assert spike.loss > spike.typical_loss + 1
    assert DiskTier(tmp_path / "run" / "checkpoints").steps() == [SPIKE - 1, STEPS]


def test_watching_for_spikes_changes_no_bit(ranks: Ranks, dataset: Path, tmp_path: Path) -> None:
    hashes = set()
    for action in ("continue", "stop", "skip", "fork"):
        spec = tiny_run(dataset, tmp_path / action, 10, on_spike=action, spike_window=8)
        spec = replace_at(spec, "train.micro_batch_size", 2)
        hashes.add(ranks.run(1, train_on_this_rank, spec)[0]["weights_sha256"])
    assert len(hashes) == 1


@pytest.mark.servers
@pytest.mark.parametrize(
    "fleets", [[(1, None), (2, SPIKE + 3)], pytest.param([(2, None), (3, SPIKE)], marks=pytest.mark.slow)]
)
def test_a_skipped_spike_leaves_the_same_bits_on_any_ranks_interrupted_or_not(
    ranks: Ranks, spiking: RunSpec, tmp_path: Path, fleets: list[tuple[int, int | None]]
) -> None:
    hashes = set()
    for count, broken_off in fleets:
        run_dir = tmp_path / f"skip-{count}-{broken_off}"
        spec = with_action(spiking, "skip", run_dir)
        if broken_off:
            ranks.run(count, train_on_this_rank, spec, broken_off)
        hashes.add(ranks.run(3 - count or 1, train_on_this_rank, spec)[0]["weights_sha256"])
        assert {(spike.step, spike.action) for spike in spikes_of(run_dir)} == {(SPIKE, "skip")}
        assert state(run_dir, STEPS)["left_out"] == [[(SPIKE - 1) * 16, 16]]
        assert state(run_dir, STEPS)["updates"] == STEPS - 1
    assert len(hashes) == 1
    other = ranks.run(1, train_on_this_rank, with_action(spiking, "continue", tmp_path / "go-on"))[0]
    assert other["weights_sha256"] not in hashes


@pytest.mark.servers
def test_the_run_stops_before_a_spike_and_a_child_that_skips_it_resumes(
    ranks: Ranks, spiking: RunSpec, tmp_path: Path
) -> None:
    skipped = ranks.run(1, train_on_this_rank, with_action(spiking, "skip", tmp_path / "skip"))[0]
    stop = with_action(spiking, "stop", tmp_path / "run")
    with pytest.raises(
        AssertionError, match=rf"step {SPIKE}: .*--from {SPIKE - 1} --set train.on_spike=skip"
    ):
        ranks.run(2, train_on_this_rank, stop)
    assert DiskTier(tmp_path / "run" / "checkpoints").steps()[-1] == SPIKE - 1
    child = with_action(spiking, "skip", tmp_path / "child")
    start = str(DiskTier(tmp_path / "run" / "checkpoints").folder(SPIKE - 1))
    child = dataclasses.replace(
        child, checkpoint=dataclasses.replace(child.checkpoint, init_from=start, init_with="training")
    )
    assert ranks.run(1, train_on_this_rank, child)[0]["weights_sha256"] == skipped["weights_sha256"]
