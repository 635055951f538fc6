"""A coordinator whose disk spoils its journal, or has no room for it, or whose process stumbles, goes on."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoint.worlds import save_state
from fleet.fleet_processes import FLEET, make_run
from fleet.small_fleets import Fleet, settings
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.fleet.control.coordinator import Coordinator
from phalanx.fleet.control.credentials import credentials_of
from phalanx.fleet.control.fleet_file import distrusted_after, forget_distrust
from phalanx.fleet.control.succession.journal import RENEW_BYTES, Journal
from phalanx.fleet.control.succession.reign import CoordinatorArgs
from phalanx.fleet.control.turn import Inbox, RunDisk
from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.decide import initial_state
from phalanx.fleet.core.invariants import JournalError, batch_line, check, first_line, mark
from phalanx.fleet.core.settings import settings_of
from phalanx.fleet.core.state import Distrust, Eligibility, FleetPhase
from phalanx.observe.event_log import read_events
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.identity import fencing_token


def make_coordinator(run_dir: Path, renew_journal_bytes: int = RENEW_BYTES) -> Coordinator:
    """A coordinator of two nodes, not yet listening."""
    spec = make_run(run_dir, replace(FLEET, nodes=2, spares=1))
    credentials = credentials_of(run_dir, spec, 0, None)
    args = CoordinatorArgs(run_dir, 0, "127.0.0.1", 0)
    return Coordinator(args, spec, credentials, renew_journal_bytes=renew_journal_bytes)


def write_history(run_dir: Path) -> Path:
    """The journal of a fleet of two nodes and a spare, one of whose workers died, and whose spare was drained."""
    spec = make_run(run_dir, replace(FLEET, nodes=2, spares=1))
    fleet = Fleet(settings_of(spec))
    fleet.join("0", "1", "2", racks=3)
    fleet.bind()
    fleet.handle(m.Heartbeat("0", 1, 0, 3, m.WorkerPhase.BOUND), after_s=1.0)
    fleet.handle(m.WorkerExited("0", 1, 0, 0, -9))
    fleet.park()
    fleet.bind()
    fleet.handle(m.Drain("2"), after_s=1.0)
    assert (fleet.state.phase, fleet.state.epoch) == (FleetPhase.RUNNING, 1)
    path = run_dir / "fleet" / "journal-000.jsonl"
    path.parent.mkdir()
    journal = Journal(path)
    journal.append(first_line(initial_state(fleet.state.settings, 0.0, fencing_token(spec, 0))))
    for at_s, event in fleet.journal:
        journal.append(batch_line(at_s, (event,)))
    journal.close()
    return path


def test_whichever_line_is_damaged_the_next_coordinator_queries_the_nodes_and_forms_a_higher_epoch(
    tmp_path: Path,
) -> None:
    content = write_history(tmp_path).read_bytes()
    lines = content.split(b"\n")[:-1]
    for number in range(len(lines)):
        path = tmp_path / "fleet" / "journal-000.jsonl"
        path.write_bytes(
            b"".join(
                line + b"\n" for line in [*lines[:number], b"#" + lines[number][1:], *lines[number + 1 :]]
            )
        )
        state = make_coordinator(tmp_path)._state
        check(state, mark(state))
        assert any(f"line {number + 1} of" in incident.text for incident in state.incidents)
        fleet = Fleet(state.settings)
        fleet.state, fleet.now_s = state, state.now_s
        fleet.handle(m.Joined("2", 1, 1, "2", 7, meeting_points=("2:1",)))
        for name in ("0", "1"):
            description = m.Joined(name, 1, 1, name, 7, epoch=1, bound=True, meeting_points=(f"{name}:1",))
            fleet.handle(description)
            assert [type(command) for command in fleet.commands_to(name)] == [c.Park]
            fleet.handle(m.Parked(name, 1, 1, (f"{name}:1",), ()))
        assert (fleet.state.phase, fleet.state.epoch > 1) == (FleetPhase.BINDING, True)
        assert fleet.state.seats
        # The next one finds an intact journal, and the damaged one is kept.
        make_coordinator(tmp_path)
        assert len(list(path.parent.glob("damaged-*"))) == number + 1


def test_a_node_that_was_drained_behind_a_damaged_line_stays_so(tmp_path: Path) -> None:
    path = write_history(tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"type":"Bound","node":"0"', b'"type":"Bound","node":"9"', 1))
    assert make_coordinator(tmp_path)._state.nodes["2"].eligibility is Eligibility.DRAINED


# --- a disk without room --------------------------------------------------------------------------


def test_orders_are_sent_though_the_journal_cannot_be_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = make_coordinator(tmp_path, renew_journal_bytes=0)
    sent: list[tuple[str, type[c.Command]]] = []
    monkeypatch.setattr(coordinator._server, "send", lambda node, command: sent.append((node, type(command))))

    def full(_content: bytes, _keep_as: Path | None = None) -> None:
        raise JournalError("cannot renew the journal: No space left on device")

    monkeypatch.setattr(coordinator._journal, "replace_content", full)
    for name in ("node-0", "node-1"):
        coordinator.on_report(m.Joined(name, 1, 1, "127.0.0.1", 1, meeting_points=(f"{name}:1",)))
    asyncio.run(coordinator._turn())
    assert sorted(sent) == [("node-0", c.Bind), ("node-1", c.Bind)]


def test_a_checkpoint_that_could_not_be_written_down_is_passed_to_the_core_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = make_coordinator(tmp_path)
    folder = tmp_path / "checkpoints" / "step-00000010"
    folder.mkdir(parents=True)
    (folder / "checkpoint.json").write_text("{}")

    def full(_content: bytes) -> None:
        raise JournalError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(coordinator._journal, "append", full)
        with pytest.raises(JournalError):
            asyncio.run(coordinator._turn())
    coordinator._disk.due_s = 0.0
    asyncio.run(coordinator._turn())
    assert coordinator._state.durable == [10]


# --- a process that stumbles ----------------------------------------------------------------------


def test_a_wait_for_the_disk_is_not_the_coordinators_standstill_and_a_stopped_process_is() -> None:
    inbox = Inbox()
    events: list[m.CoreEvent] = []

    async def stumble() -> None:
        watching = asyncio.create_task(inbox.measure_deafness(0.25))
        await asyncio.get_running_loop().run_in_executor(None, time.sleep, 1.0)  # as an fsync does
        waited_s = inbox.deaf_s
        time.sleep(2.0)  # as SIGSTOP does: no message is read
        await asyncio.sleep(0.5)
        events.extend([m.StoodStill(waited_s), *inbox.batch(None)])
        watching.cancel()

    asyncio.run(stumble())
    waited, stood = (event for event in events if isinstance(event, m.StoodStill))
    assert stood.for_s > 1.5
    assert stood.for_s - waited.for_s > 1.5, "on a busy machine some of the first second may count too"
    assert not any(isinstance(event, m.Restarted) for event in events)


@pytest.mark.parametrize("name", ["record.json", "run.toml"])
def test_a_small_file_that_is_damaged_while_the_fleet_runs_is_reported_and_written_again(
    tmp_path: Path, name: str
) -> None:
    coordinator = make_coordinator(tmp_path)
    record = tmp_path / name

    def turn() -> list[str]:
        coordinator._disk.due_s = 0.0
        asyncio.run(coordinator._turn())
        events = tmp_path / "events.jsonl"
        return [event.body.text for event in read_events(events)] if events.exists() else []

    turn()
    if name == "record.json":
        record.write_text(json.dumps({"attempts": 1, "data_fingerprint": "ab"}))  # as a rank does
    else:
        record.write_text(record.read_text() + "# looked at by a user\n")
    assert turn() == []
    good = record.read_bytes()
    for number, damage in enumerate(
        (
            record.unlink,
            lambda: record.write_bytes(b""),
            lambda: record.write_bytes(good[: len(good) // 2 - 1]),
        )
    ):
        damage()
        texts = turn()
        assert record.read_bytes() == good
        assert len(texts) == number + 1
        assert str(record) in texts[-1]
        assert "written again with its earlier content" in texts[-1]


def test_a_record_that_was_damaged_before_the_coordinator_began_is_left_to_the_user(tmp_path: Path) -> None:
    coordinator = make_coordinator(tmp_path)
    record = RunDirectory(tmp_path).record
    record.write_text("{")
    asyncio.run(coordinator._turn())
    assert record.read_text() == "{"


def test_distrust_that_the_uploader_forgets_before_the_checkpoints_are_set_aside_is_recorded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(tmp_path)
    directory.fleet.mkdir()
    save_state(DiskTier(directory.checkpoints), 6, {"model/w": torch.zeros(3)})
    state = initial_state(settings(), 0.0)
    state.condemned, state.distrust = [6], (Distrust(1, 4),)
    set_aside = DiskTier.set_aside

    def forget_and_set_aside(disk: DiskTier, step: int) -> None:
        assert distrusted_after(directory) == 4
        forget_distrust(directory, 4)  # as an uploader does whose copies are those still on disk
        set_aside(disk, step)

    monkeypatch.setattr(DiskTier, "set_aside", forget_and_set_aside)
    RunDisk(directory, 1.0, print).set_aside(state, stored=True)
    assert directory.committed_steps() == []
    assert distrusted_after(directory) == 4
