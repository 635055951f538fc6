"""Ranks have the places of the layout that their attempt recorded, on the nodes that the fleet names."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.fleet.control.fleet_file import FleetFile, Member, write_fleet_file
from phalanx.fleet.core.state import FleetPhase
from phalanx.observe.event_log import EventLog
from phalanx.observe.events import RunStarted
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.layout import Layout
from phalanx_watch.ranks import layout_of_attempt, nodes_of_ranks


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """A run of two attempts, the second under a smaller degree than the run file names."""
    run_directory = RunDirectory(tmp_path)
    run_directory.run_file.write_text(
        'name = "x"\n[data]\npath = "d"\n[parallel]\ntensor = 4\npipeline = 2\n'
    )
    for attempt, layout in enumerate(
        [{"pipeline": 2, "tensor": 4}, {"pipeline": 2, "tensor": 2, "shard": 3}]
    ):
        with EventLog(run_directory.events, attempt) as log:
            log.append(RunStarted("run", 10, 1, layout))
    return run_directory


def test_a_layout_is_that_which_the_attempt_recorded(directory: RunDirectory) -> None:
    assert layout_of_attempt(directory, 0, 8) == Layout(pipeline=2, tensor=4)
    assert layout_of_attempt(directory, 1, 12) == Layout(pipeline=2, tensor=2, shard=3)


def test_without_a_record_the_layout_is_that_of_the_run_file_and_else_of_the_number_of_ranks(
    directory: RunDirectory,
) -> None:
    assert layout_of_attempt(directory, 7, 16) == Layout(pipeline=2, tensor=4, shard=2)
    assert layout_of_attempt(directory, 7, 5) == Layout(replicate=5)
    assert layout_of_attempt(directory, 0, 5) == Layout(replicate=5)


def test_nodes_are_those_of_the_fleet_if_it_has_as_many_ranks(directory: RunDirectory) -> None:
    assert nodes_of_ranks(directory, 3) == {}
    members = (
        Member("node-7", "member", "host", (0, 1)),
        Member("node-2", "member", "host", (2,)),
        Member("node-9", "spare", "host"),
    )
    write_fleet_file(directory.path, _fleet(members))
    assert nodes_of_ranks(directory, 3) == {0: "node-7", 1: "node-7", 2: "node-2"}
    assert nodes_of_ranks(directory, 4) == {}


def _fleet(members: tuple[Member, ...]) -> FleetFile:
    return FleetFile(
        run="run",
        coordinator="here:1",
        coordinator_pid=1,
        leader="",
        reign=1,
        written_unix_s=0.0,
        phase=FleetPhase.FINISHED,
        reason="",
        epoch=0,
        ranks=sum(len(member.ranks) for member in members),
        expected_nodes=3,
        step=1,
        step_s=1.0,
        recoveries=0,
        regroups=0,
        restarts=0,
        stopping=False,
        durable_steps=(),
        unsaved_steps=0,
        result_json="",
        members=members,
        happenings=(),
        stale=0,
        refused={},
    )
