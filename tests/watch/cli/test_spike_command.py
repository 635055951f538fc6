"""``phalanx spike`` on runs with a planted cause: noise in a batch, and a rate that is too high."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w

from phalanx.cli.data.order import data_origin, read_data_run
from phalanx.data.origin import readings_of_step
from phalanx.run.read import to_table
from phalanx.run.sections.monitoring import SpikeSpec
from phalanx.train.compare.runs import Unconfirmed
from phalanx_process import last_json, run
from phalanx_watch.cli.spike_command import spike_lines
from phalanx_watch.cli.spike_report import SpikeReport, replay_start
from ranks import Ranks
from run.specs import replace_at
from spiking_runs import SPIKE, fast_run, make_noise, spiking_run
from tiny_runs import make_dataset, tiny_run, train_on_this_rank

NOISY = 0.25
"""Share of noise in the batch of the spike."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spikes")


@pytest.fixture(scope="module")
def dataset(folder: Path) -> Path:
    return make_dataset(folder / "words")


@pytest.fixture(scope="module")
def noisy(ranks: Ranks, dataset: Path, folder: Path) -> Path:
    """A run on two ranks, a few of whose sequences in one step are noise."""
    spec = spiking_run(dataset, make_noise(folder / "noise"), folder / "noisy", NOISY)
    ranks.run(2, train_on_this_rank, spec)
    return folder / "noisy"


def examined(folder: Path, *words: object) -> dict[str, Any]:
    return last_json(run(["spike", *map(str, words), "--json"], folder))


@pytest.fixture(scope="module")
def of_noise(noisy: Path, folder: Path) -> dict[str, Any]:
    """The report on the newest spike of the run, replayed on as many ranks as it had."""
    return examined(folder, noisy)


def test_a_bad_batch_is_named_with_its_slots_and_documents_by_a_replay_of_the_recorded_bits(
    noisy: Path, of_noise: dict[str, Any]
) -> None:
    report = of_noise
    findings = report["findings"]
    assert (report["step"], findings["cause"]) == (SPIKE, "bad batch")
    assert report["compared"] > 0
    assert report["unconfirmed"] == []
    spec, index = read_data_run(noisy, ())
    readings = readings_of_step(spec, index, SPIKE, data_origin(spec, noisy))
    noise = [reading for reading in readings if reading.source == "noise"]
    assert len(noise) == NOISY * len(readings)
    assert {slot["slot"] for slot in findings["slots"] if slot["stands_out"]} == {
        reading.slot for reading in noise
    }
    worst = report["documents"][: len(noise)]
    assert {(document["slot"], document["record"]) for document in worst} == {
        (reading.slot, reading.record) for reading in noise
    }
    assert all("~^&*" in document["text"] for document in worst)
    assert report["sources"] == {"words": 12, "noise": 4}
    assert f"--from {SPIKE - 1} --set train.on_spike=skip" in report["remedy"]


def test_the_figures_have_the_same_bits_on_other_ranks(
    noisy: Path, folder: Path, of_noise: dict[str, Any]
) -> None:
    alone = examined(folder, noisy, SPIKE, "--ranks", 1)
    assert (alone["ranks"], of_noise["ranks"]) == (1, 2)
    assert alone == {**of_noise, "ranks": 1}


def test_the_text_begins_with_the_verdict_and_states_that_the_replay_is_exact(
    of_noise: dict[str, Any],
) -> None:
    lines = list(spike_lines(msgspec.convert(of_noise, SpikeReport)))
    assert lines[0].endswith(": bad batch\x1b[0m")
    assert any("recorded numbers have the same bits" in line for line in lines)
    other = Unconfirmed("run", SPIKE, "loss", 1.0, 2.0)
    changed = replace(msgspec.convert(of_noise, SpikeReport), unconfirmed=(other,))
    assert any("NOT with the recorded bits: loss of step 13" in line for line in spike_lines(changed))


def test_a_rate_that_is_too_high_is_named_and_not_its_batch(dataset: Path, folder: Path) -> None:
    # Such a run amplifies each rounding: in portable numerics it is the same run on every processor.
    spec = replace_at(fast_run(dataset, folder / "fast"), "runtime.numerics", "portable")
    (folder / "fast.toml").write_text(tomli_w.dumps(to_table(spec)))
    run(["train", "fast.toml"], folder)
    report = examined(folder, "fast")
    assert (report["findings"]["cause"], report["unconfirmed"]) == ("rate", [])
    assert report["findings"]["batch_before"] > report["findings"]["usual_loss"]
    assert not any(slot["stands_out"] for slot in report["findings"]["slots"])
    assert "--set optimizer.lr=0.25" in report["remedy"]


def test_without_a_spike_or_a_checkpoint_before_it_the_remedy_is_named(
    ranks: Ranks, dataset: Path, folder: Path
) -> None:
    spec = tiny_run(dataset, folder / "calm", 24)
    ranks.run(1, train_on_this_rank, spec)
    calm = run(["spike", "calm"], folder)
    assert (calm.returncode, "phalanx spike calm STEP" in calm.stderr) == (1, True)
    for step in (2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22):
        for file in (folder / "calm" / "checkpoints" / f"step-{step:08d}").glob("checkpoint.json"):
            file.unlink()
    early = run(["spike", "calm", "23"], folder)
    assert early.returncode == 1
    assert "no checkpoint before step 23; steps after 24 can be replayed" in early.stderr
    assert "--from-start" in early.stderr
    late = run(["spike", "calm", "25"], folder)
    assert "ends after step 24" in late.stderr


def test_a_step_that_a_run_has_not_reached_is_not_replayed(ranks: Ranks, dataset: Path, folder: Path) -> None:
    ranks.run(1, train_on_this_rank, tiny_run(dataset, folder / "stopped", 24), 4)
    beyond = run(["spike", "stopped", "20"], folder)
    assert beyond.returncode == 1
    assert "has not computed step 20: the newest that it has recorded is" in beyond.stderr


@pytest.mark.parametrize(
    ("states", "start"),
    [
        ([60, 80, 90, 98], 90),
        ([60, 91, 98, 99], 91),
        ([40, 60, 95, 99], 60),
        ([95, 97, 99], 95),
        ([40, 99], 99),
        ([40], 40),
        ([99], 99),
    ],
)
def test_a_replay_of_step_100_begins_eight_steps_before_it_if_a_state_is_far_enough_back(
    states: list[int], start: int
) -> None:
    assert replay_start(states, 100) == start


def test_the_text_states_how_many_steps_the_spread_of_slots_is_from(of_noise: dict[str, Any]) -> None:
    report = msgspec.convert(of_noise, SpikeReport)
    assert report.findings.slot_steps == SPIKE - 1 - report.from_step
    assert any(f"over {report.findings.slot_steps} steps)" in line for line in spike_lines(report))
    few = replace(report, findings=replace(report.findings, slot_steps=0))
    assert any("by the losses of batches)" in line for line in spike_lines(few))


@pytest.mark.slow
def test_after_a_fork_steps_are_replayed_with_the_rate_of_the_child_that_was_taken(
    ranks: Ranks, dataset: Path, folder: Path
) -> None:
    spec = replace(fast_run(dataset, folder / "forked"), spike=SpikeSpec(fork_steps=8, base_every_steps=2))
    ranks.run(1, train_on_this_rank, replace_at(spec, "train.on_spike", "fork"))
    report = examined(folder, "forked", 15)
    assert (report["unconfirmed"], report["from_step"]) == ([], 12)
    inside = run(["spike", "forked", "9"], folder)
    assert inside.returncode == 1
    assert "steps up to 5 and after 12 can be replayed" in inside.stderr


@pytest.mark.slow
def test_after_a_fork_steps_are_replayed_in_the_wide_format_of_the_child_that_was_taken(
    ranks: Ranks, dataset: Path, noisy: Path, folder: Path
) -> None:
    spec = spiking_run(dataset, noisy.parent / "noise", folder / "wide")
    spec = replace_at(replace_at(spec, "precision.matmul", "mxfp8"), "train.on_spike", "fork")
    fork = SpikeSpec(candidates=("wide",), fork_steps=2, base_every_steps=4)
    ranks.run(1, train_on_this_rank, replace(spec, spike=fork))
    report = examined(folder, "wide", SPIKE + 4)
    assert report["compared"] > 0
    assert report["unconfirmed"] == []


@pytest.mark.slow
def test_a_run_in_a_narrow_format_is_repeated_in_fp32_from_the_newest_state(
    ranks: Ranks, dataset: Path, noisy: Path, folder: Path
) -> None:
    spec = spiking_run(dataset, noisy.parent / "noise", folder / "narrow")
    ranks.run(1, train_on_this_rank, replace_at(spec, "precision.compute", "bf16"))
    done = run(["spike", "narrow", "--json"], folder)
    report = last_json(done)
    assert f"repeating steps {SPIKE} to {SPIKE} in fp32" in done.stderr
    assert (report["findings"]["cause"], report["unconfirmed"]) == ("bad batch", [])
    in_fp32, loss = report["findings"]["in_fp32"], report["findings"]["loss"]
    assert in_fp32["is_spike"]
    assert in_fp32["loss"] != loss
    assert in_fp32["loss"] == pytest.approx(loss, rel=1e-2)
