"""The supervision of a local fleet, whose processes here end at once."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forked_python import children
from phalanx.fleet.control.fleet_file import FleetFile, Member, fleet_file, write_fleet_file
from phalanx.fleet.core.decide import initial_state
from phalanx.fleet.core.settings import CoreSettings, Formation
from phalanx.fleet.core.state import FleetPhase
from phalanx.fleet.core.succession import first_claim
from phalanx.fleet.node import processes as supervised
from phalanx.fleet.node.launcher import Launcher, LocalFleet, SupervisionTimes
from phalanx.fleet.node.processes import FleetProcesses, run_fleet
from phalanx.process.child import Child
from phalanx.process.exit_codes import EXIT_SUPERSEDED
from phalanx.process.restarts import MOST_DEATHS
from phalanx.process.this_process import StopOrders
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.spec import ModelSpec, RunSpec
from phalanx.train.lifecycle.ending import STOP_WORDS, report_failure
from phalanx.train.start.open_run import OpenRun

AT_ONCE = SupervisionTimes(first_pause_s=0.0)
"""Processes that have died are started again without a pause."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[OpenRun]:
    """The run of a user's own model, which lies in ``tmp_path / "source"``."""
    directory = RunDirectory(tmp_path / "run")
    directory.logs.mkdir(parents=True)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "model_of_a_user.py").touch()
    lock_fd = os.open(directory.lock, os.O_CREAT | os.O_RDWR)
    yield OpenRun(directory, RunSpec(model=ModelSpec(factory="model_of_a_user:build")), 0, lock_fd)
    os.close(lock_fd)


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The search paths of all processes that were started; each of them fails at once."""
    paths: list[str] = []
    start = subprocess.Popen

    def failing(_command: list[str], *, env: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
        paths.append(env["PYTHONPATH"])
        return start(["false"], env=env, **options)

    monkeypatch.setattr(subprocess, "Popen", failing)
    monkeypatch.syspath_prepend(tmp_path / "source")
    return paths


def show_nothing(_ended: Callable[[], bool]) -> None:
    """Leaves it to the launcher to wait."""


@pytest.fixture
def sleeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all processes that were started; coordinators sleep, agents end at once."""
    names: list[str] = []
    start = Child.start

    def standing_in(command: list[str], *arguments: Any, **options: Any) -> Child:
        names.append(name_of(command))
        return start(["sleep", "600"] if names[-1] == "coordinator" else ["false"], *arguments, **options)

    monkeypatch.setattr(Child, "start", standing_in)
    monkeypatch.syspath_prepend(tmp_path / "source")
    return names


def name_of(command: list[str]) -> str:
    """The node whose agent a command starts, or the coordinator."""
    return command[command.index("--node") + 1] if "--node" in command else "coordinator"


def seen(phase: FleetPhase, step: int = 0) -> FleetFile:
    state = initial_state(CoreSettings(Formation(1, (1, 2)), wanted_nodes=2), 0.0)
    state.phase, state.step = phase, step
    return fleet_file(state, "run", "127.0.0.1:1", first_claim(state, "", "x"), frozenset(), Counter(), 0)


def test_a_fleet_all_of_whose_agents_die_again_and_again_ends_with_the_reason(
    run: OpenRun, sleeping: list[str]
) -> None:
    notices: list[str] = []

    def show_that_it_runs(_ended: Callable[[], bool]) -> None:
        write_fleet_file(run.directory.path, seen(FleetPhase.RUNNING))

    ending = run_fleet(run, LocalFleet(2, times=AT_ONCE), show_that_it_runs, notices.append)
    assert notices[0] in [
        f"node-{number}: its agent ended with code 1; it is started again" for number in (0, 1)
    ]
    assert (ending.status, ending.exit_code) == ("failed", 1)
    assert ending.message.startswith("the agent of node-")
    assert "It was started 10 times without progress of the run" in ending.message
    assert MOST_DEATHS <= sleeping.count("node-0") <= MOST_DEATHS + 1
    assert sleeping.count("coordinator") == 1


def test_a_local_fleet_whose_coordinator_was_superseded_ends_with_the_reason(
    run: OpenRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else can lead it: the run was started again, or somebody has changed its claims."""
    start = Child.start

    def standing_in(command: list[str], *arguments: Any, **options: Any) -> Child:
        superseded = f"echo ends: superseded by another start; exit {EXIT_SUPERSEDED}"
        words = superseded if name_of(command) == "coordinator" else "sleep 600"
        return start(["sh", "-c", words], *arguments, **options)

    monkeypatch.setattr(Child, "start", standing_in)
    monkeypatch.syspath_prepend(tmp_path / "source")
    ending = run_fleet(run, LocalFleet(1, times=AT_ONCE), show_nothing)
    assert (ending.status, ending.exit_code) == ("failed", 1)
    assert "superseded by another start" in ending.message


def test_a_fleet_whose_run_directory_is_removed_ends_with_a_message(
    run: OpenRun, sleeping: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, coordinator = [], Launcher.coordinator

    def counted(launcher: Launcher) -> Child:
        tries.append(launcher)
        return coordinator(launcher)

    def remove_it(_ended: Callable[[], bool]) -> None:
        shutil.rmtree(run.directory.path)
        (coordinator,) = (
            pid for pid in children(os.getpid()) if b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        os.kill(coordinator, signal.SIGKILL)

    monkeypatch.setattr(Launcher, "coordinator", counted)
    ending = run_fleet(run, LocalFleet(1, times=AT_ONCE), remove_it)
    assert (len(tries), sleeping.count("coordinator")) == (MOST_DEATHS, 1)
    assert (ending.status, ending.exit_code) == ("failed", 1)
    assert "is gone" in ending.message
    assert "start the run from scratch" in ending.message


def asleep(run: OpenRun, fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch) -> FleetProcesses:
    """The processes of a fleet, all of which sleep once they are started."""
    start = Child.start

    def sleep(_command: list[str], *arguments: Any, **options: Any) -> Child:
        return start(["sleep", "600"], *arguments, **options)

    monkeypatch.setattr(Child, "start", sleep)
    orders = StopOrders(lambda _words: None, STOP_WORDS)
    tokens = {"PHALANX_RUN_TOKEN": "a" * 64}, {"PHALANX_OPERATOR_TOKEN": "b" * 64}
    return FleetProcesses(Launcher(run, fleet, *tokens, orders), orders)


def test_a_coordinator_that_was_stopped_and_never_continued_is_replaced(
    run: OpenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = asleep(run, LocalFleet(1, times=SupervisionTimes(stopped_s=0.0)), monkeypatch)
    processes.start()
    first, agent = processes.coordinator, processes.agents["node-0"]
    assert first is not None
    first.signal(signal.SIGSTOP)
    while processes.coordinator in (first, None):
        assert not processes.ended()
    assert processes.agents["node-0"] is agent, "it was not stopped"
    processes.end()


def test_agents_that_the_coordinator_had_not_met_before_it_ended_are_ordered_to_end(
    run: OpenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = asleep(run, LocalFleet(2, times=SupervisionTimes(farewell_s=600.0)), monkeypatch)
    processes.start()
    write_fleet_file(run.directory.path, seen(FleetPhase.FINISHED))
    processes.over = True
    agents = list(processes.agents.values())
    processes.end()
    assert [agent.exit_code() for agent in agents] == [-signal.SIGTERM] * 2


def waiting(*roles: str) -> FleetFile:
    state = initial_state(CoreSettings(Formation(1, (1, 2)), wanted_nodes=2), 0.0)
    file = fleet_file(state, "run", "127.0.0.1:1", first_claim(state, "", "x"), frozenset(), Counter(), 0)
    members = tuple(
        Member(f"node-{n}", role, "h", reason="3 failures" if role == "quarantined" else "")
        for n, role in enumerate(roles)
    )
    return msgspec.structs.replace(file, members=members, phase=FleetPhase.WAITING)


@pytest.mark.parametrize(
    ("roles", "stuck"),
    [
        (("quarantined", "quarantined", "spare"), True),
        (("quarantined", "drained", "quarantined"), True),
        (("quarantined", "warming", "spare"), False),
        (("quarantined", "quarantined", "lost"), False),
        (("spare", "spare", "spare"), False),
    ],
)
def test_a_fleet_is_stuck_if_every_node_that_could_help_it_is_barred(
    roles: tuple[str, ...], stuck: bool
) -> None:
    reason = supervised.no_way_on(waiting(*roles), 3)
    assert bool(reason) == stuck
    assert not stuck or "node-0 is quarantined (3 failures)" in reason
    assert not supervised.no_way_on(msgspec.structs.replace(waiting(*roles), phase=FleetPhase.RUNNING), 3)


def test_a_coordinator_is_restarted_although_the_users_model_is_gone(
    run: OpenRun, tmp_path: Path, starts: list[str]
) -> None:
    def lose_the_model(_ended: Callable[[], bool]) -> None:
        (tmp_path / "source" / "model_of_a_user.py").unlink()

    assert run_fleet(run, LocalFleet(1, times=AT_ONCE), lose_the_model).status == "failed"
    assert (
        MOST_DEATHS <= len(starts) <= 2 * MOST_DEATHS
    )  # an agent and the coordinator, until one of them is given up
    assert len(set(starts)) == 1
    assert starts[0].split(os.pathsep)[-1] == str((tmp_path / "source").resolve())


@pytest.mark.parametrize("damage", [lambda text: text[:32], lambda text: "f0" + text[2:], lambda _: "\n"])
def test_a_token_file_that_is_damaged_meanwhile_gives_no_process_another_token(
    run: OpenRun, monkeypatch: pytest.MonkeyPatch, starts: list[str], damage: Callable[[str], str]
) -> None:
    tokens: list[str] = []
    failing, path = subprocess.Popen, run.directory.path / "fleet.token"

    def damaging(command: list[str], *, env: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
        tokens.append(env["PHALANX_RUN_TOKEN"])
        if len(tokens) == 1:
            path.write_text(damage(path.read_text()))
        return failing(command, env=env, **options)

    monkeypatch.setattr(subprocess, "Popen", damaging)
    run_fleet(run, LocalFleet(1, times=AT_ONCE), show_nothing)
    assert len(starts) > MOST_DEATHS
    assert len(set(tokens)) == 1


@pytest.mark.usefixtures("starts")
def test_the_error_of_an_earlier_life_is_not_taken_for_the_coordinators(run: OpenRun) -> None:
    report_failure(ValueError("of an earlier life"), run.directory.named_log(0, "coordinator"), 0)
    message = run_fleet(run, LocalFleet(1, times=AT_ONCE), show_nothing).message
    assert message.startswith("the coordinator could not run; ")


@pytest.mark.usefixtures("starts")
def test_an_exception_while_the_fleet_runs_requests_a_stop_and_is_raised_once_it_has_ended(
    run: OpenRun,
) -> None:
    ends: list[Callable[[], bool]] = []

    def raise_at_an_event(ended: Callable[[], bool]) -> None:
        ends.append(ended)
        raise ZeroDivisionError

    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(ZeroDivisionError),
    ):  # where no signal can be handled, too
        pool.submit(run_fleet, run, LocalFleet(1, times=AT_ONCE), raise_at_an_event).result()
    assert ends[0]()
