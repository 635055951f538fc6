"""A live coordinator whose state contradicts itself reports that, sends nothing of it, and goes on."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fleet.fleet_processes import FLEET, PATIENCE_S, make_run
from fleet.small_fleets import running
from phalanx.fleet.control.coordinator import Coordinator
from phalanx.fleet.control.coordinator_link import CoordinatorLink
from phalanx.fleet.control.credentials import Credentials, credentials_of
from phalanx.fleet.control.fleet_file import read_fleet_file
from phalanx.fleet.control.succession.journal import Journal
from phalanx.fleet.control.succession.reign import CoordinatorArgs
from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.invariants import batch_line, check, first_line, replay
from phalanx.fleet.core.state import FleetPhase, FleetState
from phalanx.observe.event_log import read_events
from phalanx.run.directory.paths import RunDirectory


class StandInAgent:
    """An agent without workers: it reports them as warm at once, and as bound and parked when ordered."""

    def __init__(self, name: str, run_dir: Path, credentials: Credentials) -> None:
        self.name, self.epoch = name, m.NO_EPOCH
        self.commands: list[c.Command] = []
        self.link = CoordinatorLink(
            lambda: [read_fleet_file(run_dir).coordinator],
            credentials,
            lambda: [self.joined()],
            self.on_command,
            print,
        )

    def joined(self) -> m.Joined:
        bound = self.epoch != m.NO_EPOCH
        points = (f"{self.name}:1",)
        return m.Joined(
            self.name, 1, 1, "127.0.0.1", 4000, epoch=self.epoch, bound=bound, meeting_points=points
        )

    def on_command(self, command: c.Command) -> None:
        self.commands.append(command)
        match command:
            case c.Bind(epoch=epoch):
                self.epoch = epoch
                self.link.send(m.Bound(self.name, 1, epoch))
            case c.Park(epoch=epoch):
                self.epoch = m.NO_EPOCH
                self.link.send(m.Parked(self.name, 1, epoch, (f"{self.name}:1",), ()))
            case c.TellAll():
                self.link.send(self.joined())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def fleet_of_two(run_dir: Path, damage: Callable[[FleetState], None]) -> list[StandInAgent]:
    """A coordinator whose state is damaged in its first epoch, until its second one trains and the run is stopped."""
    spec = make_run(run_dir, replace(FLEET, nodes=2))
    (run_dir / "fleet.token").write_text(secrets.token_hex(16))
    (run_dir / "fleet.token").chmod(0o600)
    credentials = credentials_of(run_dir, spec, 0, None)
    coordinator = Coordinator(CoordinatorArgs(run_dir, 0, "127.0.0.1", 0), spec, credentials)
    coordinating = asyncio.create_task(coordinator.run())
    await until(lambda: (run_dir / "fleet.json").exists())
    agents = [StandInAgent(name, run_dir, credentials) for name in ("node-0", "node-1")]
    attached = [asyncio.create_task(agent.link.run()) for agent in agents]
    await until(lambda: coordinator._state.phase is FleetPhase.RUNNING)
    damage(coordinator._state)
    for agent in agents:
        agent.commands.clear()
    await until(lambda: coordinator._state.phase is FleetPhase.RUNNING and coordinator._state.epoch == 1)
    await coordinator.on_operation(m.StopRun())
    await coordinator.on_operation(m.StopRun())
    async with asyncio.timeout(PATIENCE_S):
        assert await coordinating == 0
    for task in attached:
        task.cancel()
    await asyncio.gather(*attached, return_exceptions=True)
    return agents


def seats_exchanged(state: FleetState) -> None:
    state.seats.reverse()


def a_seat_of_a_node_that_is_not_there(state: FleetState) -> None:
    """Makes the core itself stumble (KeyError), in whatever it does next."""
    state.seats[0] = "nobody"
    state.vacant.add(0)


def check_what_is_left(run_dir: Path, agents: list[StandInAgent]) -> None:
    for agent in agents:
        kinds = [type(command) for command in agent.commands]
        assert kinds[:3] == [c.TellAll, c.Park, c.Bind], "nothing is sent that follows from the damaged state"
    texts = [str(event.body) for event in read_events(run_dir / "events.jsonl")]
    assert any("contradicted itself" in text for text in texts)
    (evidence,) = (run_dir / "fleet").glob("contradiction-*")
    assert evidence.stat().st_size > 0
    (path,) = (run_dir / "fleet").glob("journal-*")
    journal = Journal(path)
    journal.close()
    state = replay(journal.lines).state
    check(state)
    assert (state.phase, state.epoch) == (FleetPhase.FINISHED, 1)


def test_a_contradictory_state_is_reported_and_the_fleet_forms_anew(tmp_path: Path) -> None:
    check_what_is_left(tmp_path, asyncio.run(fleet_of_two(tmp_path, seats_exchanged)))


def test_a_core_that_stumbles_over_its_state_is_treated_alike(tmp_path: Path) -> None:
    check_what_is_left(tmp_path, asyncio.run(fleet_of_two(tmp_path, a_seat_of_a_node_that_is_not_there)))


def test_a_coordinator_killed_before_it_wrote_the_rebuilt_state_resynchronizes_at_its_next_start(
    tmp_path: Path,
) -> None:
    spec = make_run(tmp_path, replace(FLEET, nodes=2))
    fleet = running(2, 0)
    a_seat_of_a_node_that_is_not_there(fleet.state)
    folder = RunDirectory(tmp_path).fleet
    folder.mkdir()
    killed = Journal(folder / "journal-000.jsonl")
    killed.append(first_line(fleet.state))
    killed.append(batch_line(fleet.now_s, (m.Tick(),)))  # the core raises on it
    killed.close()
    args = CoordinatorArgs(tmp_path, 0, "127.0.0.1", 0)
    for start in (1, 2):
        coordinator = Coordinator(args, spec, Credentials("run", "token", fleet.state.fencing))
        check(coordinator._state)
        assert (coordinator._state.phase, coordinator._restarts) == (FleetPhase.FORMING, start)
        coordinator._journal.close()
    (evidence,) = folder.glob("contradiction-*")
    assert len(evidence.read_bytes().splitlines()) == 2
