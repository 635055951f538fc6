"""Claims are made once, and a coordinator that another has superseded sends nothing more."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as replace_in

from fleet.fleet_processes import FLEET, make_run
from fleet.small_fleets import running, settings
from phalanx.fleet.control import fleet_file as claims
from phalanx.fleet.control.coordinator import Coordinator
from phalanx.fleet.control.credentials import credentials_of
from phalanx.fleet.control.fleet_file import KEPT, ClaimError, ClaimRegister
from phalanx.fleet.control.succession.journal import Journal
from phalanx.fleet.control.succession.reign import (
    CoordinatorArgs,
    SupersededError,
    journal_path,
    reign_again,
    succeed,
)
from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.decide import initial_state
from phalanx.fleet.core.invariants import batch_line, first_line, replay
from phalanx.fleet.core.state import FleetPhase
from phalanx.fleet.core.succession import Claim, first_claim, renewed, succeeding
from phalanx.run.directory.paths import RunDirectory


def register_in(run_dir: Path, attempt: int = 0) -> ClaimRegister:
    return ClaimRegister(RunDirectory(run_dir), attempt)


def make_coordinator(run_dir: Path) -> Coordinator:
    spec = make_run(run_dir, replace(FLEET, nodes=2))
    return Coordinator(
        CoordinatorArgs(run_dir, 0, "127.0.0.1", 0, "node-0"), spec, credentials_of(run_dir, spec, 0, None)
    )


def joined(name: str) -> m.Joined:
    return m.Joined(name, 1, 1, "127.0.0.1", 1, meeting_points=(f"{name}:1",))


def sent_by(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, type[c.Command]]]:
    sent: list[tuple[str, type[c.Command]]] = []
    monkeypatch.setattr(coordinator._server, "send", lambda node, command: sent.append((node, type(command))))
    return sent


def test_of_many_that_make_the_claim_of_one_term_one_gets_it(tmp_path: Path) -> None:
    claims = [Claim(1, 1, str(index), f"nonce {index}", settings(2)) for index in range(16)]
    with ThreadPoolExecutor(16) as threads:
        made = list(threads.map(register_in(tmp_path).make, claims))
    assert made.count(True) == 1
    assert register_in(tmp_path).newest() == claims[made.index(True)]


def test_it_is_so_on_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    test_of_many_that_make_the_claim_of_one_term_one_gets_it(tmp_path)


def test_a_claim_whose_making_was_answered_with_an_error_is_ones_own_at_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, link = Claim(1, 1, "a", "x", settings(2)), os.link

    def made_and_failed(*names: Path) -> None:
        link(*names)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "link", made_and_failed)
    assert register_in(tmp_path).make(claim)
    monkeypatch.undo()
    assert register_in(tmp_path).make(claim)
    assert not register_in(tmp_path).make(replace_in(claim, nonce="another's"))


def test_a_disk_that_is_full_leaves_no_empty_claim_where_there_are_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    register, claim = register_in(tmp_path), Claim(1, 1, "a", "x", settings(2))
    with monkeypatch.context() as patched:
        patched.setattr(os, "link", no_links)
        patched.setattr(claims, "sync", lambda _path: None)
        patched.setattr(os, "fsync", full)
        with pytest.raises(ClaimError, match="No space left"):
            register.make(claim)
    assert register.newest() is None
    assert register.make(claim)


def test_a_term_stays_claimed_after_its_claim_is_forgotten(tmp_path: Path) -> None:
    register = register_in(tmp_path)
    for term in range(1, KEPT + 3):
        assert register.make(Claim(term, 1, "a", str(term), settings(2)))
    assert not register.make(Claim(1, 2, "b", "late", settings(2)))
    newest = register.newest()
    assert newest is not None
    assert newest.term == KEPT + 2


def test_each_start_of_a_run_has_claims_of_its_own(tmp_path: Path) -> None:
    assert register_in(tmp_path, 0).make(Claim(1, 1, "a", "x", settings(2)))
    assert register_in(tmp_path, 1).newest() is None
    assert register_in(tmp_path, 1).make(Claim(1, 1, "b", "y", settings(2)))


@pytest.mark.parametrize("content", [b"", b'"\xff"'])
def test_nobody_leads_on_by_an_earlier_claim_if_the_newest_is_damaged(tmp_path: Path, content: bytes) -> None:
    register = register_in(tmp_path)
    register.make(Claim(1, 1, "a", "x", settings(2)))
    (tmp_path / "fleet" / "claims" / "000-00000002.json").write_bytes(content)
    assert register.newest_term() == 2
    with pytest.raises(ClaimError, match="cannot read the newest claim"):
        register.newest()


def test_a_coordinator_claims_an_epoch_before_it_sends_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = make_coordinator(tmp_path)
    sent = sent_by(coordinator, monkeypatch)
    coordinator.on_report(joined("node-0"))
    coordinator.on_report(joined("node-1"))
    asyncio.run(coordinator._turn())
    newest = register_in(tmp_path).newest()
    assert newest is not None
    assert (newest.epoch, newest.reign, newest.node, set(newest.voters)) == (
        0,
        1,
        "node-0",
        {"node-0", "node-1"},
    )
    assert sorted(sent) == [("node-0", c.Bind), ("node-1", c.Bind)]


def test_a_superseded_coordinator_begins_no_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = make_coordinator(tmp_path)
    sent = sent_by(coordinator, monkeypatch)
    coordinator._lead.look_for_successor = lambda: None  # it has not looked yet
    register = register_in(tmp_path)
    first = register.newest()
    assert first is not None
    assert register.make(succeeding(first, "node-1", "another"))
    coordinator.on_report(joined("node-0"))
    coordinator.on_report(joined("node-1"))
    with pytest.raises(SupersededError, match="superseded by node-1, reign 2"):
        asyncio.run(coordinator._turn())
    assert sent == []


def test_a_coordinator_notices_its_successor_though_nothing_happens(tmp_path: Path) -> None:
    coordinator = make_coordinator(tmp_path)
    register = register_in(tmp_path)
    first = register.newest()
    assert first is not None
    register.make(succeeding(first, "node-1", "another"))
    with pytest.raises(SupersededError, match="node-1"):
        asyncio.run(coordinator.run())


def test_a_coordinator_that_was_superseded_while_it_was_down_does_not_start(tmp_path: Path) -> None:
    coordinator = make_coordinator(tmp_path)
    coordinator._journal.close()
    register = register_in(tmp_path)
    first = register.newest()
    assert first is not None
    register.make(succeeding(first, "node-1", "another"))
    with pytest.raises(SupersededError, match="superseded by node-1, reign 2"):
        make_coordinator(tmp_path)


def test_a_coordinator_whose_journal_is_gone_uses_no_epoch_number_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = make_coordinator(tmp_path)
    sent_by(coordinator, monkeypatch)
    coordinator.on_report(joined("node-0"))
    coordinator.on_report(joined("node-1"))
    asyncio.run(coordinator._turn())
    coordinator._journal.close()
    journal_path(RunDirectory(tmp_path), 0, 1).unlink()
    again = make_coordinator(tmp_path)
    assert (again._state.phase, again._state.epoch) == (FleetPhase.FORMING, 0)
    assert all(node.engaged for node in again._state.nodes.values())


@pytest.mark.parametrize("successor", ["another machine", "the same"])
def test_an_epoch_that_was_decided_and_never_claimed_is_left_by_whoever_leads_next(
    tmp_path: Path, successor: str
) -> None:
    directory, fleet = RunDirectory(tmp_path), running(spares=2)
    directory.fleet.mkdir()
    empty, register = initial_state(fleet.state.settings, 0.0), register_in(tmp_path)
    first = first_claim(empty, "0", "a")
    before = renewed(first, fleet.state, "b")
    fleet.handle(m.WorkerExited("1", 1, 0, 0, -9))
    fleet.park()
    assert (fleet.state.phase, fleet.state.epoch) == (FleetPhase.BINDING, 1)
    old = Journal(journal_path(directory, 0, 1))
    old.append(first_line(empty))
    for at_s, event in fleet.journal:
        old.append(batch_line(at_s, (event,)))
    old.close()
    assert all(register.make(claim) for claim in (first, before))
    if successor == "the same":
        reign = reign_again(CoordinatorArgs(tmp_path, node="0"), empty, print)
    else:
        claim = succeeding(before, "2", "c")
        assert register.make(claim)
        reign = succeed(register, before, claim, empty)
    assert (reign.restored.state.phase, reign.restored.state.epoch) == (FleetPhase.PARKING, 1)
    reign.journal.close()
    # Its journal leads there too.
    assert replay(Journal(reign.journal.path).lines).state == reign.restored.state


@pytest.mark.parametrize("left", ["whole", "nothing", "without its end"])
def test_a_successor_goes_on_from_what_is_left_of_the_journal(tmp_path: Path, left: str) -> None:
    directory, fleet = RunDirectory(tmp_path), running()
    directory.fleet.mkdir()
    empty = initial_state(fleet.state.settings, 0.0)
    register = register_in(tmp_path)
    first = first_claim(empty, "0", "a")
    before = renewed(first, fleet.state, "b")
    claim = succeeding(before, "2", "c")
    assert all(register.make(made) for made in (first, before, claim))
    if left != "nothing":
        old = Journal(journal_path(directory, 0, 1))
        old.append(first_line(empty))
        for at_s, event in fleet.journal if left == "whole" else fleet.journal[:2]:
            old.append(batch_line(at_s, (event,)))
        old.close()
    reign = succeed(register, before, claim, empty)
    state = reign.restored.state
    assert state.phase is (FleetPhase.RUNNING if left == "whole" else FleetPhase.FORMING)
    assert state.epoch == 0
    assert "the coordinator on 0 is lost" in state.incidents[-1].text
    assert reign.journal.path != journal_path(directory, 0, 1)
