"""Recording changes no bit, and what goes wrong with it costs the profile alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.observe.event_log import read_events
from phalanx.observe.events import Message
from phalanx.observe.recorded_step import read_rank_trace
from phalanx.run.directory.paths import RunDirectory
from profiled_runs import NAME, STEPS, ask, profiled_run, record
from ranks import Ranks


@pytest.fixture(scope="module")
def reference(ranks: Ranks, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the weights of a run that nobody recorded."""
    run_dir = tmp_path_factory.mktemp("plain") / "run"
    return str(record(ranks, 2, profiled_run(dataset, run_dir))[0]["weights_sha256"])


def recorded_ranks(run_dir: Path) -> list[int]:
    files = sorted((RunDirectory(run_dir).profiles / NAME).glob("rank-*.npz"))
    return [read_rank_trace(file).rank for file in files]


@pytest.mark.parametrize(
    "layout", [pytest.param({}, marks=pytest.mark.slow), {"pipeline": 2}], ids=["sharded", "pipeline"]
)
def test_a_recorded_run_has_the_same_bits(
    ranks: Ranks, dataset: Path, tmp_path: Path, reference: str, layout: dict[str, Any]
) -> None:
    ask(tmp_path / "run")
    results = record(ranks, 2, profiled_run(dataset, tmp_path / "run", **layout))
    assert [result["weights_sha256"] for result in results] == [reference] * 2
    assert recorded_ranks(tmp_path / "run") == [0, 1]


def test_only_the_ranks_of_the_request_record_and_only_its_steps(
    ranks: Ranks, dataset: Path, tmp_path: Path, reference: str
) -> None:
    ask(tmp_path / "run", ranks=(1,))
    result = record(ranks, 2, profiled_run(dataset, tmp_path / "run"))[0]
    assert result["weights_sha256"] == reference
    assert recorded_ranks(tmp_path / "run") == [1]
    (file,) = (RunDirectory(tmp_path / "run").profiles / NAME).glob("rank-*.npz")
    steps = [mark["step"] for mark in read_rank_trace(file).marks if mark["kind"] == "step"]
    assert steps == [2, 3][:STEPS]


def test_a_profile_that_the_run_ends_in_holds_the_steps_that_there_were(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    ask(tmp_path / "run", steps=20)
    record(ranks, 1, profiled_run(dataset, tmp_path / "run"))
    assert recorded_ranks(tmp_path / "run") == [0]


@pytest.mark.servers
@pytest.mark.parametrize(("plant", "left"), [("broken_recorder", [0]), ("full_disk", [])])
def test_a_rank_that_cannot_record_and_a_full_disk_cost_the_profile_alone(
    ranks: Ranks, dataset: Path, tmp_path: Path, reference: str, plant: str, left: list[int]
) -> None:
    ask(tmp_path / "run")
    results = record(ranks, 2, profiled_run(dataset, tmp_path / "run"), plant)
    assert results[0]["weights_sha256"] == reference
    assert recorded_ranks(tmp_path / "run") == left


def test_a_request_for_a_rank_that_there_is_not_is_refused_aloud(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    ask(tmp_path / "run", ranks=(7,))
    record(ranks, 1, profiled_run(dataset, tmp_path / "run"))
    messages = [
        event.body.text
        for event in read_events(RunDirectory(tmp_path / "run").events)
        if isinstance(event.body, Message)
    ]
    assert any("there is no rank 7" in text for text in messages)


def test_a_request_that_comes_in_the_last_step_is_refused_aloud_and_leaves_no_empty_profile(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    ask(tmp_path / "run")
    spec = profiled_run(dataset, tmp_path / "run")
    record(ranks, 1, replace(spec, train=replace(spec.train, steps=1)))
    directory = RunDirectory(tmp_path / "run")
    messages = [event.body.text for event in read_events(directory.events) if isinstance(event.body, Message)]
    assert any(
        f"the request for profile {NAME} is not followed: it came in the last step" in text
        for text in messages
    )
    assert not (directory.profiles / NAME).exists()
