"""The launcher of a local fleet, the coordinator's memory, and the operator's commands, with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from click.testing import CliRunner

from fleet.fleet_processes import FLEET, PATIENCE_S, STAND_IN, Fleet, make_run, running_fleet
from fleet.stand_in_worker import state_after
from phalanx.cli.fleet.fleet_command import command
from phalanx.fleet.control.fleet_file import FleetFile, read_fleet_file
from phalanx.fleet.control.succession.journal import Journal
from phalanx.fleet.control.succession.reign import only_coordinator
from phalanx.fleet.core.invariants import JournalError, replay
from phalanx.fleet.node.launcher import LocalFleet
from phalanx.fleet.node.processes import run_fleet
from phalanx.observe.event_log import read_events
from phalanx.observe.events import EpochLeft, Message
from phalanx.process.exit_codes import EXIT_CANNOT_START
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.read import to_table
from phalanx.train.lifecycle.ending import Ending
from phalanx.train.start.open_run import OpenRun, take_lock
from phalanx_process import alive

STEPS = 60
LAUNCHER = """
import os, sys, json
from pathlib import Path
from phalanx.fleet.core.invariants import JournalError, replay
from phalanx.fleet.node.processes import run_fleet
from phalanx.fleet.node.launcher import LocalFleet
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.train.start.open_run import OpenRun
directory = RunDirectory(Path(sys.argv[1]))
lock = os.open(directory.path / "lock", os.O_RDWR | os.O_CREAT)
fleet = LocalFleet(2, 1, worker_program=(sys.executable, sys.argv[2]))
notices = []
ending = run_fleet(OpenRun(directory, read_resolved(directory), 0, lock), fleet, lambda ended: None, notices.append)
print(json.dumps([ending.status, ending.exit_code, ending.message, [words for words in notices if "agent" in words]]))
"""


def processes_of(run_dir: Path) -> set[int]:
    """All living processes that have the run directory on their command line, but the launcher."""
    matches = subprocess.run(
        ["pgrep", "-f", f"run-dir {run_dir}"], capture_output=True, text=True, check=False
    )
    return {int(line) for line in matches.stdout.split() if alive(int(line))}


def wait_for(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def launched(run_dir: Path, hold_at: int) -> tuple[subprocess.Popen[str], Fleet]:
    """A launcher in a process of its own, and its fleet as a test sees it."""
    make_run(run_dir, replace(FLEET, nodes=2, spares=1), STEPS)
    fleet = Fleet(run_dir)
    fleet.hold_at(hold_at)
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(run_dir), STAND_IN],
        env=fleet.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    return process, fleet


def test_the_launcher_returns_how_the_run_ended_and_leaves_nothing_behind(tmp_path: Path) -> None:
    process, fleet = launched(tmp_path, hold_at=20)
    fleet.held(20)
    fleet.hold_at(None)
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert json.loads(out) == ["finished", 0, "", []]
    assert fleet.result() == {"step": STEPS, "state": state_after(STEPS).hex()}
    wait_for(lambda: not processes_of(tmp_path))


def test_ctrl_c_is_one_request_to_stop_and_the_launcher_returns_how_to_go_on(tmp_path: Path) -> None:
    process, fleet = launched(tmp_path, hold_at=20)
    fleet.held(20)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=PATIENCE_S)
    status, code, words, left = json.loads(out)
    assert (status, code, left) == ("stopped", 75, [])
    assert words.startswith("stopped; steps 1 to 2"), "these workers save nothing, and that is reported"
    wait_for(lambda: not processes_of(tmp_path))


def test_a_killed_launcher_takes_everything_with_it(tmp_path: Path) -> None:
    process, fleet = launched(tmp_path, hold_at=20)
    fleet.held(20)
    everything = 1 + 3 + 3  # coordinator, agents, workers; the spare's may begin after the others train
    wait_for(lambda: len(processes_of(tmp_path)) == everything)
    started = processes_of(tmp_path)
    process.kill()
    process.communicate()
    wait_for(lambda: not any(alive(pid) for pid in started))


@pytest.mark.servers
def test_the_launcher_starts_a_killed_coordinator_again_without_its_fleet_file_and_all_agents_once_none_is_left(
    tmp_path: Path,
) -> None:
    spec = make_run(tmp_path, replace(FLEET, nodes=2, spares=0), STEPS)
    fleet = Fleet(tmp_path)
    fleet.hold_at(20)
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    run = OpenRun(RunDirectory(tmp_path), spec, 0, lock)
    local_fleet = LocalFleet(2, worker_program=(sys.executable, STAND_IN))

    def disturb(_ended: Callable[[], bool]) -> None:
        """Kill one after the other, from a thread, while the main thread looks after the processes."""
        threading.Thread(target=scene, daemon=True).start()

    def scene() -> None:
        coordinator = fleet.held(20).coordinator_pid
        os.kill(coordinator, signal.SIGSTOP)
        (tmp_path / "fleet.json").write_text("")
        (tmp_path / "fleet.token").unlink()  # the launcher has it in memory
        os.kill(coordinator, signal.SIGKILL)
        fleet.until(lambda seen: seen.restarts == 1 and all(member.attached for member in seen.members))
        for node in ("node-0", "node-1"):
            (agent,) = (pid for pid in processes_of(tmp_path) if is_agent(pid, node))
            os.killpg(agent, signal.SIGKILL)
        fleet.held(20, epoch=1)
        fleet.hold_at(None)

    ending = run_fleet(run, local_fleet, disturb)
    os.close(lock)
    assert ending == Ending("finished")
    assert fleet.result()["state"] == state_after(STEPS).hex()


def is_agent(pid: int, node: str) -> bool:
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return b"phalanx.fleet.node.agent" in arguments and node.encode() in arguments


def test_a_fleet_that_no_layout_fits_fails_with_the_reason(tmp_path: Path) -> None:
    spec = make_run(tmp_path, replace(FLEET, nodes=1), STEPS)
    spec = replace(spec, parallel=replace(spec.parallel, tensor=2))
    (tmp_path / "run.toml").write_text(tomli_w.dumps(to_table(spec)))
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    ending = run_fleet(OpenRun(RunDirectory(tmp_path), spec, 0, lock), LocalFleet(1), lambda _: None)
    os.close(lock)
    assert ending.status == "failed"
    assert "fleet.nodes" in ending.message
    assert "was started" not in ending.message, "another start would find the same"


def test_a_coordinator_without_a_token_makes_none_and_ends_with_an_exit_code_of_its_own(
    tmp_path: Path,
) -> None:
    make_run(tmp_path, replace(FLEET, nodes=1), STEPS)
    (tmp_path / "fleet.token").unlink()
    done = subprocess.run(
        [sys.executable, "-m", "phalanx.fleet.control.coordinator", "--run-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == EXIT_CANNOT_START
    assert "fleet.token" in done.stderr
    assert not (tmp_path / "fleet.token").exists()


def test_a_run_has_one_coordinator_at_a_time(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with (
        only_coordinator(directory),
        pytest.raises(JournalError, match=f"coordinated by process {os.getpid()} on"),
        only_coordinator(directory),
    ):
        pass
    with only_coordinator(directory):
        pass


def test_a_fleet_is_not_served_beside_the_command_that_trains_it(tmp_path: Path) -> None:
    make_run(tmp_path, replace(FLEET, nodes=1), STEPS)
    lock_fd = take_lock(RunDirectory(tmp_path).lock)
    done = CliRunner().invoke(command, ["serve", str(tmp_path)])
    os.close(lock_fd)
    assert done.exit_code == 1
    assert "is being trained by process" in done.output
    assert not (tmp_path / "fleet").exists()


# --- the coordinator's memory -----------------------------------------------------------------------


def test_the_journal_alone_leads_to_the_state_that_the_coordinator_had(tmp_path: Path) -> None:
    with running_fleet(tmp_path, nodes=2, spares=1, steps=STEPS, hold_at=20) as fleet:
        seen = fleet.gathered(20)  # with a spare that is ready, the kill ends one epoch and no more
        victim = next(member.name for member in seen.members if member.role == "member")
        fleet.kill_node(victim)
        fleet.held(20, epoch=1)
        fleet.hold_at(None)
        fleet.result()
        assert fleet.coordinator is not None
        fleet.coordinator.wait(timeout=PATIENCE_S)
    (path,) = (tmp_path / "fleet").glob("journal-*")
    journal = Journal(path)
    journal.close()
    state, restarts, contradiction = replay(journal.lines)
    last = read_fleet_file(tmp_path)
    assert (state.phase, state.epoch, state.recoveries, state.stale) == (
        last.phase,
        last.epoch,
        last.recoveries,
        last.stale,
    )
    assert state.result_json == last.result_json
    assert (restarts, contradiction) == (0, None)
    bodies = [event.body for event in read_events(tmp_path / "events.jsonl")]
    texts = [body.text for body in bodies if isinstance(body, Message)]
    assert any(victim in text for text in texts)  # the run's history knows what happened
    (left,) = (body for body in bodies if isinstance(body, EpochLeft))
    assert (left.epoch, victim in left.reason) == (0, True)
    assert left.text in [happening.text for happening in last.happenings]


def test_a_journal_that_is_none_is_refused_with_the_remedy() -> None:
    with pytest.raises(JournalError, match="start again"):
        replay([b'{"type":"Happened","now_s":1.0,"events":[]}'])
    with pytest.raises(JournalError, match="start again"):
        replay([b"{}"])


@pytest.mark.parametrize("version", [b"", b'"version":1,', b'"version":99,'], ids=["none", "older", "newer"])
def test_a_journal_of_another_version_is_refused_with_the_remedy(version: bytes) -> None:
    with pytest.raises(JournalError, match=r"version.*start again"):
        replay([b'{"type":"Began",' + version + b'"state":{}}'])


# --- operators --------------------------------------------------------------------------------------


def phalanx(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "phalanx", *arguments], capture_output=True, text=True, check=False
    )


def answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    response = json.loads(done.stdout)
    assert isinstance(response, dict)
    return response


def test_an_operator_drains_a_node_lets_it_back_and_stops_the_run(tmp_path: Path) -> None:
    run = str(tmp_path)
    with running_fleet(tmp_path, nodes=2, spares=1, steps=STEPS, hold_at=20) as fleet:
        seen = fleet.gathered(20)
        victim = next(member.name for member in seen.members if member.role == "member")
        assert answer(phalanx("fleet", "drain", run, victim, "--json"))["accepted"]
        after = fleet.held(20, epoch=1)
        assert [member.role for member in after.members if member.name == victim] == ["drained"]
        assert after.ranks == 2
        assert answer(phalanx("fleet", "add", run, victim, "--json"))["accepted"]
        fleet.until(
            lambda seen: any(member.name == victim and member.role == "spare" for member in seen.members)
        )
        wrong = phalanx("fleet", "drain", run, "node-17", "--json")
        assert wrong.returncode == 1
        assert "node-17" in answer(wrong)["answer"]
        status = answer(phalanx("status", run, "--json"))
        assert (status["phase"], status["ranks"]) == ("running", 2)
        shown = phalanx("status", run)
        assert shown.returncode == 0
        assert victim in shown.stdout
        assert phalanx("fleet", "stop", run).returncode == 0
        over = fleet.until(lambda seen: seen.over)
        assert (over.phase, over.result_json) == ("finished", "")
        late = phalanx("fleet", "stop", run)
        assert late.returncode == 1
        assert "over" in late.stderr


@pytest.mark.servers
def test_an_operator_gives_nodes_back_and_the_launcher_starts_them_again_when_more_are_wanted(
    tmp_path: Path,
) -> None:
    process, fleet = launched(tmp_path, hold_at=20)
    run = str(tmp_path)
    try:
        fleet.until(lambda seen: seen.step >= 20 and len(seen.members) == 3)  # with its spare
        too_many = phalanx("fleet", "shrink", run, "--by", "3")
        assert too_many.returncode == 1
        assert "0 nodes would be left, and the run needs 1" in too_many.stderr
        assert "no node node-9" in phalanx("fleet", "shrink", run, "--node", "node-9").stderr
        assert "--by N, or --node NAME" in phalanx("fleet", "shrink", run).stderr
        wished = phalanx("fleet", "grow", run, "--by", "1")
        assert wished.returncode == 0
        # The spare has a rank as soon as more may have one; meanwhile the launcher has started another node.
        fleet.until(lambda seen: len(seen.members) == 4 and seen.expected_nodes == 4)
        (names,) = [answer(phalanx("fleet", "shrink", run, "--by", "2", "--no-wait", "--json"))["leaving"]]
        assert len(names) == 2
        fleet.hold_at(None)
        fleet.until(lambda seen: all(role(seen, name) == "given back" for name in names))
        fleet.until(lambda seen: seen.over)
        status, _, _, notices = json.loads(process.communicate(timeout=PATIENCE_S)[0])
    finally:
        process.kill()
    seen = read_fleet_file(tmp_path)
    assert (status, seen.recoveries) == ("finished", 0)
    assert notices == ["node-3: its agent is started, for 4 nodes are requested"]


def role(seen: FleetFile, name: str) -> str:
    return next(member.role for member in seen.members if member.name == name)


LEAVING_AGENT = """
import sys
from pathlib import Path
from phalanx.fleet.node.agent import run_agent
from phalanx.fleet.node.launcher import AgentArgs
run_agent(AgentArgs(Path(sys.argv[1]), "guest", at_signal="leave", worker_program=(sys.executable, sys.argv[2])))
"""


def test_a_node_that_gets_sigterm_leaves_without_a_step_computed_twice(tmp_path: Path) -> None:
    with running_fleet(tmp_path, nodes=2, steps=STEPS, hold_at=20) as fleet:
        fleet.held(20)
        words = [sys.executable, "-c", LEAVING_AGENT, str(tmp_path), STAND_IN]
        guest = subprocess.Popen(words, env=fleet.environment, stdout=subprocess.PIPE, text=True)
        try:
            fleet.until(
                lambda seen: any(member.name == "guest" and member.role == "spare" for member in seen.members)
            )
            fleet.kill_node("node-1")
            fleet.until(lambda seen: seen.epoch == 1 and role(seen, "guest") == "member")
            fleet.start_agent("node-1")
            fleet.until(lambda seen: role(seen, "node-1") == "spare")
            before = fleet.held(20, epoch=1)
            guest.send_signal(signal.SIGTERM)
            fleet.held(20, epoch=2)
            fleet.hold_at(None)
            assert guest.wait(PATIENCE_S) == 0
            over = fleet.until(lambda seen: seen.over)
        finally:
            guest.kill()
    assert "leaves the fleet at the next step boundary" in guest.communicate()[0]
    assert (over.phase, over.recoveries, over.regroups) == (
        "finished",
        before.recoveries,
        before.regroups + 1,
    )
    assert role(over, "guest") == "given back"


def test_a_folder_without_a_run_has_no_status(tmp_path: Path) -> None:
    done = phalanx("status", str(tmp_path))
    assert done.returncode == 1
    assert "no run directory" in done.stderr
