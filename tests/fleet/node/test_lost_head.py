"""Real processes: the machine of the coordinator is lost, with its agent and workers, and another node leads the run to the same end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from fleet.fleet_processes import FLEET, PATIENCE_S, Fleet, make_run
from fleet.stand_in_worker import state_after
from phalanx.fleet.control.fleet_file import FleetFile
from phalanx.process.exit_codes import EXIT_SUPERSEDED

STEPS, HELD = 60, 20
SPEC = replace(FLEET, nodes=3, spares=1, min_nodes=2, succession_s=3.0, lease_s=5.0)
NODES = tuple(f"node-{number}" for number in range(4))


DIES_AT = """
import os, re, signal

def falls():
    with open(os.environ["DIES_WITH"]) as file:
        os.killpg(int(file.read()), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)

pwrite, link, fatal = os.pwrite, os.link, re.compile(os.environ["DIES_AT"].encode())

def written(descriptor, data, at):
    done = pwrite(descriptor, data, at)
    if fatal.search(bytes(data)):
        falls()
    return done

def made(temporary, path, **how):
    link(temporary, path, **how)
    if "claims" in str(path) and fatal.search(b"claim " + open(path, "rb").read()):
        falls()

os.pwrite, os.link = written, made
"""
"""The machine of the coordinator is lost, with its agent and workers, when a line of the journal or a claim is written that matches ``DIES_AT``."""


@contextmanager
def led_fleet(
    run_dir: Path, nodes: tuple[str, ...] = NODES, changed: str = "", **environment: str
) -> Iterator[Fleet]:
    """A fleet whose coordinator runs on node-0, and whose agents may all lead; its workers are held at a step."""
    fleet = Fleet(run_dir)
    fleet.hold_at(HELD)
    fleet.environment.update(BROKEN_DISK=str(run_dir / "broken"), **environment)
    if changed:  # Python runs it at the begin of the coordinator's process
        (fleet.modules_of("coordinator") / "sitecustomize.py").write_text(changed)
    try:
        fleet.start_coordinator("--node", "node-0")
        for node in nodes:
            fleet.start_agent(node, "--may-lead", *(["--started-as-spare"] if node == "node-3" else []))
        yield fleet
    finally:
        fleet.end()


def lose_head(fleet: Fleet) -> None:
    """The machine of node-0 is gone, and nobody starts anything there again."""
    fleet.kill_coordinator()
    fleet.kill_node("node-0")


def trains_under(fleet: Fleet, reign: int, epoch: int) -> FleetFile:
    """Waits until the fleet trains in this epoch, led by the head of this reign; or in later ones, if the machine was too busy for them."""
    return fleet.until(lambda file: file.reign >= reign and file.epoch >= epoch and file.phase == "running")


def ends_well(fleet: Fleet) -> FleetFile:
    """The state at the end is that of an undisturbed run, and every process ends."""
    assert fleet.result() == {"step": STEPS, "state": state_after(STEPS).hex()}
    for agent in fleet.agents.values():
        assert agent.wait(PATIENCE_S) == 0, fleet.logs()
    seen = fleet.seen()
    assert seen is not None
    return seen


def test_a_lost_head_is_succeeded_while_the_fleet_trains_and_the_run_ends_as_if_undisturbed(
    tmp_path: Path,
) -> None:
    make_run(tmp_path, SPEC, STEPS)
    with led_fleet(tmp_path) as fleet:
        fleet.gathered(HELD)
        before = {node: fleet.workers(node) for node in NODES[1:]}
        lose_head(fleet)
        seen = trains_under(fleet, reign=2, epoch=1)
        assert seen.leader != "node-0"
        # Beside its workers, the agent of the node that leads has started the coordinator.
        assert all(set(before[node]) <= set(fleet.workers(node)) for node in NODES[1:])
        fleet.hold_at(None)
        seen = ends_well(fleet)
        assert any("leads the fleet from now on" in happening.text for happening in seen.happenings)


@pytest.mark.parametrize(
    ("fatal_line", "change"),
    [
        pytest.param(
            r'"Parked".*"epoch":0', "lose a node", id="while the others leave the epoch of a lost node"
        ),
        pytest.param(
            r'claim .*"epoch":1',
            "lose a node",
            marks=pytest.mark.slow,
            id="when it has claimed the next epoch",
        ),
        pytest.param(
            r'"Bound".*"epoch":1',
            "lose a node",
            marks=pytest.mark.slow,
            id="while the others restore their state",
        ),
        pytest.param(
            r'"GiveBack"', "shrink", marks=pytest.mark.slow, id="when it has decided to give a node back"
        ),
        pytest.param(
            r'"Parked".*"epoch":0',
            "shrink",
            marks=pytest.mark.slow,
            id="while a node that is given back leaves",
        ),
        pytest.param(
            r'claim .*"epoch":1',
            "shrink",
            marks=pytest.mark.slow,
            id="when it has claimed the epoch without it",
        ),
        pytest.param(
            r'claim .*"ended":"',
            "nothing",
            marks=pytest.mark.slow,
            id="when it has claimed the end, and sent it to no node",
        ),
    ],
)
def test_the_machine_of_the_head_is_lost_in_any_phase_and_the_run_ends_as_if_undisturbed(
    fatal_line: str, change: str, tmp_path: Path
) -> None:
    make_run(tmp_path, replace(SPEC, min_nodes=1), STEPS)
    with led_fleet(
        tmp_path, changed=DIES_AT, DIES_AT=fatal_line, DIES_WITH=str(tmp_path / "doomed")
    ) as fleet:
        (tmp_path / "doomed").write_text(str(fleet.agents["node-0"].pid))
        fleet.gathered(HELD)
        if change == "lose a node":
            fleet.kill_node("node-1")
            fleet.hold_at(HELD + 5)
        elif change == "shrink":
            threading.Thread(target=request_shrink, args=(tmp_path, "node-1"), daemon=True).start()
            fleet.hold_at(HELD + 5)
        else:
            fleet.hold_at(None)
        assert fleet.coordinator is not None
        fleet.coordinator.wait(PATIENCE_S)
        assert fleet.agents.pop("node-0").wait(PATIENCE_S) == -signal.SIGKILL
        if change != "nothing":
            trains_under(fleet, reign=2, epoch=1)
            fleet.hold_at(None)
            assert fleet.result() == {"step": STEPS, "state": state_after(STEPS).hex()}
        for agent in fleet.agents.values():
            assert agent.wait(PATIENCE_S) == 0, fleet.logs()
        seen = fleet.until(lambda file: file.over)
        assert (seen.phase, seen.reign) == ("finished", 2 if change != "nothing" else seen.reign)


def request_shrink(run_dir: Path, node: str) -> None:
    """Request that a node is given back; the head may fall before it answers."""
    subprocess.run(
        [sys.executable, "-m", "phalanx", "fleet", "shrink", str(run_dir), "--node", node],
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.slow
def test_a_head_that_is_lost_before_the_fleet_has_formed_is_succeeded(tmp_path: Path) -> None:
    make_run(tmp_path, SPEC, STEPS)
    with led_fleet(tmp_path, NODES[:3]) as fleet:
        fleet.until(lambda file: len(file.members) >= 3)
        lose_head(fleet)
        fleet.until(lambda file: file.reign >= 2)
        fleet.start_agent("node-3", "--may-lead")
        fleet.hold_at(None)
        ends_well(fleet)


@pytest.mark.slow
def test_the_successor_of_a_head_is_succeeded_too(tmp_path: Path) -> None:
    make_run(tmp_path, replace(SPEC, min_nodes=1), STEPS)
    with led_fleet(tmp_path) as fleet:
        fleet.gathered(HELD)
        lose_head(fleet)
        second = trains_under(fleet, reign=2, epoch=1).leader
        fleet.kill_node(second)
        third = trains_under(fleet, reign=3, epoch=2).leader
        assert third not in ("node-0", second)
        fleet.hold_at(None)
        ends_well(fleet)


def test_without_a_journal_the_successor_queries_every_node_and_no_epoch_number_is_used_twice(
    tmp_path: Path,
) -> None:
    make_run(tmp_path, SPEC, STEPS)
    with led_fleet(tmp_path) as fleet:
        fleet.gathered(HELD)
        lose_head(fleet)
        (tmp_path / "fleet" / "journal-000.jsonl").unlink()
        trains_under(fleet, reign=2, epoch=1)
        fleet.hold_at(None)
        ends_well(fleet)


@pytest.mark.slow
def test_a_head_that_stood_still_finds_itself_superseded_and_disturbs_nobody(tmp_path: Path) -> None:
    make_run(tmp_path, SPEC, STEPS)
    with led_fleet(tmp_path) as fleet:
        fleet.gathered(HELD)
        assert fleet.coordinator is not None
        os.kill(fleet.coordinator.pid, signal.SIGSTOP)
        # Its node is lost meanwhile, so that the others wait for an order that does not come.
        fleet.kill_node("node-0")
        fleet.hold_at(HELD + 5)
        seen = trains_under(fleet, reign=2, epoch=1)
        os.kill(fleet.coordinator.pid, signal.SIGCONT)
        assert fleet.coordinator.wait(PATIENCE_S) == EXIT_SUPERSEDED, fleet.logs()
        fleet.hold_at(None)
        assert ends_well(fleet).epoch == seen.epoch


BROKEN_DISK = """
import errno, os
pwrite, fdatasync = os.pwrite, os.fdatasync

def broken(function):
    def call(*given):
        if os.path.exists(os.environ["BROKEN_DISK"]):
            raise OSError(errno.EIO, "Input/output error")
        return function(*given)
    return call

os.pwrite, os.fdatasync = broken(pwrite), broken(fdatasync)
"""


@pytest.mark.slow
def test_a_head_that_can_decide_nothing_is_succeeded_though_its_connections_stay(tmp_path: Path) -> None:
    make_run(tmp_path, SPEC, STEPS)
    with led_fleet(tmp_path, changed=BROKEN_DISK) as fleet:
        fleet.gathered(HELD)
        (tmp_path / "broken").touch()
        fleet.kill_node("node-1")
        fleet.hold_at(HELD + 5)
        trains_under(fleet, reign=2, epoch=1)
        fleet.hold_at(None)
        ends_well(fleet)


DIES_WITH_ITS_LAST_CLAIM = """
import os, signal
link = os.link

def made(temporary, path, **how):
    link(temporary, path, **how)
    if "claims" in str(path) and b'"ended":"' in open(path, "rb").read():
        os.kill(os.getpid(), signal.SIGKILL)

os.link = made
"""


@pytest.mark.slow
def test_a_run_whose_end_was_claimed_is_over_though_the_head_is_lost_before_it_reports_that(
    tmp_path: Path,
) -> None:
    make_run(tmp_path, SPEC, STEPS)
    with led_fleet(tmp_path, changed=DIES_WITH_ITS_LAST_CLAIM) as fleet:
        fleet.gathered(HELD)
        fleet.hold_at(None)
        for agent in fleet.agents.values():
            assert agent.wait(PATIENCE_S) == 0, fleet.logs()
        assert fleet.until(lambda file: file.over).phase == "finished"


@pytest.mark.slow
def test_a_candidate_without_a_majority_yields_to_a_coordinator_that_is_started_again(tmp_path: Path) -> None:
    make_run(tmp_path, replace(SPEC, spares=0, lease_s=15.0), STEPS)
    with led_fleet(tmp_path, NODES[:3]) as fleet:
        fleet.gathered(HELD)
        fleet.kill_coordinator()
        fleet.kill_node("node-2")  # one of the two that may elect is left
        folder, deadline_s = tmp_path / "fleet" / "candidates", time.monotonic() + PATIENCE_S
        while not list(folder.glob("*.json")):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        fleet.start_coordinator("--node", "node-0")
        seen = fleet.until(
            lambda file: (
                file.restarts == 1
                and any(member.attached for member in file.members if member.name == "node-1")
            )
        )
        assert not any(
            "node-1" in incident.node and "silent" in incident.text for incident in seen.happenings
        )
        fleet.hold_at(None)
        ends_well(fleet)


def test_dead_candidates_of_before_keep_nobody_from_a_coordinator_that_is_started_again(
    tmp_path: Path,
) -> None:
    make_run(tmp_path, replace(SPEC, succession_s=20.0, lease_s=15.0), STEPS)
    with led_fleet(tmp_path) as fleet, socket.create_server(("127.0.0.1", 0)) as silent:
        fleet.gathered(HELD)
        folder = tmp_path / "fleet" / "candidates"
        folder.mkdir(exist_ok=True)
        address = f"127.0.0.1:{silent.getsockname()[1]}"  # takes connections, and sends nothing
        content = {"node": "node-9", "address": address, "attempt": 0, "term": 1}
        (folder / "node-9.json").write_text(json.dumps(content))
        os.utime(folder / "node-9.json", (0, 0))
        fleet.kill_coordinator()
        fleet.start_coordinator("--node", "node-0")
        fleet.until(lambda file: file.restarts == 1 and all(member.attached for member in file.members))
        assert not list(folder.iterdir())
        fleet.hold_at(None)
        assert ends_well(fleet).epoch == 0


@pytest.mark.slow
def test_a_coordinator_that_is_only_started_again_is_not_succeeded(tmp_path: Path) -> None:
    make_run(tmp_path, replace(SPEC, succession_s=20.0, lease_s=15.0), STEPS)
    with led_fleet(tmp_path) as fleet:
        fleet.gathered(HELD)
        fleet.kill_coordinator()
        time.sleep(1.0)
        fleet.start_coordinator("--node", "node-0")
        fleet.until(lambda file: file.restarts == 1)
        fleet.hold_at(None)
        seen = ends_well(fleet)
        assert (seen.reign, seen.epoch) == (1, 0)


@pytest.mark.slow
def test_a_successor_that_dies_on_a_living_node_leads_on_in_its_own_reign(tmp_path: Path) -> None:
    make_run(tmp_path, replace(SPEC, succession_s=5.0), STEPS)
    with led_fleet(tmp_path) as fleet:
        fleet.gathered(HELD)
        lose_head(fleet)
        seen = trains_under(fleet, reign=2, epoch=1)
        os.kill(seen.coordinator_pid, signal.SIGKILL)
        fleet.until(lambda file: file.coordinator_pid != seen.coordinator_pid)
        fleet.hold_at(None)
        again = ends_well(fleet)
        assert (again.reign, again.leader) == (2, seen.leader)


@pytest.mark.slow
def test_agents_that_missed_the_end_learn_it_from_the_claims(tmp_path: Path) -> None:
    make_run(tmp_path, SPEC, STEPS)
    with led_fleet(tmp_path) as fleet:
        fleet.gathered(HELD)
        os.kill(fleet.agents["node-3"].pid, signal.SIGSTOP)
        fleet.hold_at(None)
        assert fleet.result()["step"] == STEPS
        assert fleet.coordinator is not None
        fleet.coordinator.wait(PATIENCE_S)
        os.kill(fleet.agents["node-3"].pid, signal.SIGCONT)
        assert fleet.agents["node-3"].wait(PATIENCE_S) == 0, fleet.logs()
