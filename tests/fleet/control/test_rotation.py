"""Changing the tokens of a fleet that runs: who finds its way to the new ones, and what is refused with nothing changed."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fleet.fleet_processes import FLEET, make_run
from phalanx.fleet.control import turn
from phalanx.fleet.control.coordinator import Coordinator
from phalanx.fleet.control.credentials import credentials_of
from phalanx.fleet.control.security import (
    TOKEN_VARIABLES,
    Keyring,
    SecurityError,
    TokenRole,
    keyring,
    make_token,
    rotate_token,
    run_token,
)
from phalanx.fleet.control.succession.reign import CoordinatorArgs
from phalanx.fleet.control.transport import AgentLink, FleetServer
from phalanx.fleet.core import messages as m
from phalanx.fleet.node.agent import Agent
from phalanx.fleet.node.launcher import AgentArgs
from phalanx.wire.messages import token_name

PATIENCE_S = 200.0


@pytest.fixture(autouse=True)
def _no_tokens_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in TOKEN_VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)


class Deaf:
    """A listener of a server that decides nothing."""

    def on_report(self, report: m.AgentMessage) -> None:
        """Drops it."""

    def on_disconnect(self, link: AgentLink) -> None:
        """Drops it."""

    async def on_operation(self, operation: m.OperatorRequest) -> str:
        return f"no {operation}"

    def log(self, line: str) -> None:
        """Drops it."""


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


# --- agents -------------------------------------------------------------------------------------------


def test_an_agent_that_missed_rotations_for_longer_than_their_grace_attaches_with_the_newest_token(
    tmp_path: Path,
) -> None:
    spec = make_run(tmp_path, dataclasses.replace(FLEET, nodes=1, spares=0))
    first_credentials = credentials_of(tmp_path, spec, 0, None, ("join",))

    async def scene() -> None:
        server = FleetServer(first_credentials, Deaf())
        address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
        for _ in range(2):  # it missed more than one
            server.credentials = server.credentials.with_keys(
                rotate_token(tmp_path, "join", server.credentials.earlier, 0.0)
            )
        agent = Agent(AgentArgs(tmp_path, "node-0", coordinator=address), spec, first_credentials)
        dialing = asyncio.create_task(agent._link.run())
        await until(lambda: server.links)
        assert server.links["node-0"].token_name == token_name(keyring(tmp_path).token)
        assert agent._tokens.token_of(token_name(first_credentials.token)) == first_credentials.token, (
            "an epoch may have begun with it"
        )
        dialing.cancel()
        agent._data.close()
        await server.stop(0.0)

    asyncio.run(scene())


def test_an_agent_whose_token_is_refused_takes_none_that_was_not_made_in_the_place_of_its_own(
    tmp_path: Path,
) -> None:
    spec = make_run(tmp_path, dataclasses.replace(FLEET, nodes=1, spares=0))
    own_credentials = credentials_of(tmp_path, spec, 0, None, ("join",))
    (tmp_path / "fleet.token").write_text("a token of somebody else\n")

    async def scene() -> None:
        server = FleetServer(dataclasses.replace(own_credentials, token="what an impostor has"), Deaf())
        address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
        agent = Agent(AgentArgs(tmp_path, "node-0", coordinator=address), spec, own_credentials)
        dialing = asyncio.create_task(agent._link.run())
        await until(lambda: server.refused["wrong token"] >= 2)
        assert agent._tokens.credentials == own_credentials
        dialing.cancel()
        agent._data.close()
        await server.stop(0.0)

    asyncio.run(scene())


def test_no_stream_is_ended_for_its_token_before_agents_got_the_name_of_the_new_one(tmp_path: Path) -> None:
    spec = make_run(tmp_path, dataclasses.replace(FLEET, nodes=2, spares=0))
    credentials = credentials_of(tmp_path, spec, 0, None)
    server, old = FleetServer(credentials, Deaf()), token_name(credentials.token)
    server.links = {name: AgentLink(name, 1, old) for name in ("node-0", "node-1")}
    server.credentials = credentials.with_keys(rotate_token(tmp_path, "join", credentials.earlier, 0.0))
    new = token_name(server.credentials.token)
    server.links["node-1"].token_name = new
    for announced, ended in (("", []), (old, []), (new, ["node-0"])):
        server.drop_outdated(announced)
        assert [name for name, link in server.links.items() if link.closed.is_set()] == ended


# --- the coordinator ----------------------------------------------------------------------------------


def make_coordinator(run_dir: Path) -> Coordinator:
    """A coordinator of one node, not yet listening."""
    spec = make_run(run_dir, dataclasses.replace(FLEET, nodes=1, spares=0))
    credentials = credentials_of(run_dir, spec, 0, None)
    return Coordinator(CoordinatorArgs(run_dir, 0, "127.0.0.1", 0), spec, credentials)


@pytest.mark.parametrize("another", [True, False])
def test_neither_token_is_changed_where_one_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, another: bool
) -> None:
    monkeypatch.setenv("PHALANX_RUN_TOKEN", "given by the scheduler")
    coordinator = make_coordinator(tmp_path)
    if another:
        (tmp_path / "fleet.token").write_text("a token of somebody else\n")
    before = {path.name: path.read_text() for path in tmp_path.glob("fleet.*token")}
    answer = asyncio.run(coordinator.on_operation(m.RotateTokens()))
    assert answer.startswith("refused: ")
    assert "given in PHALANX_RUN_TOKEN" in answer
    assert "ut it back" not in answer, "it is not the file that is wrong"
    assert {path.name: path.read_text() for path in tmp_path.glob("fleet.*token")} == before


def test_an_operator_gets_the_role_of_the_changed_token_if_the_second_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, join = make_coordinator(tmp_path), keyring(tmp_path)

    def full(path: Path, role: TokenRole, keys: Keyring, grace_s: float) -> Keyring:
        if role == "join":
            raise SecurityError("no room")
        return rotate_token(path, role, keys, grace_s)

    with monkeypatch.context() as patch:
        patch.setattr(turn, "rotate_token", full)
        answer = asyncio.run(coordinator.on_operation(m.RotateTokens()))
    assert answer.startswith("half done: the token of operators was changed, that of agents was not")
    assert answer.endswith("no room")
    assert (coordinator._server.credentials.earlier, keyring(tmp_path)) == (join, join)
    assert coordinator._server.credentials.earlier_operators == keyring(tmp_path, "operate")
    assert asyncio.run(coordinator.on_operation(m.RotateTokens())) == "accepted"


def test_an_operator_who_hangs_up_leaves_no_token_on_disk_that_the_coordinator_does_not_know(
    tmp_path: Path,
) -> None:
    coordinator, before = make_coordinator(tmp_path), keyring(tmp_path)

    async def scene() -> None:
        rotating = asyncio.create_task(coordinator.on_operation(m.RotateTokens()))
        await asyncio.sleep(0)
        rotating.cancel()
        await until(lambda: coordinator._inbox.events)

    asyncio.run(scene())
    assert coordinator._server.credentials.earlier == keyring(tmp_path) != before
    assert coordinator._inbox.events == [
        m.Rekeyed(token_name(coordinator._server.credentials.token), token_name(before.token))
    ]


# --- files and the environment ------------------------------------------------------------------------


def test_a_token_with_spaces_in_it_can_be_changed(tmp_path: Path) -> None:
    phrase = "correct horse battery staple"
    (tmp_path / "fleet.token").write_text(phrase + "\n")
    new = rotate_token(tmp_path, "join", keyring(tmp_path), 1e6)
    assert keyring(tmp_path) == new
    assert new.accepted() == (phrase,)


def test_a_process_that_is_started_again_with_a_token_of_before_a_rotation_gets_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_RUN_TOKEN", make_token(tmp_path))
    keys = keyring(tmp_path)
    for _ in range(2):
        keys = rotate_token(tmp_path, "join", keys, 0.0)
    assert keyring(tmp_path) == keys, "it admits those that took it over, and passes it to the others"
    assert run_token(tmp_path) == make_token(tmp_path) == keys.token
    monkeypatch.setenv("PHALANX_RUN_TOKEN", "given by the scheduler")
    assert keyring(tmp_path) == Keyring("given by the scheduler")


# --- a disk that fails --------------------------------------------------------------------------------


def fail_at(patched: pytest.MonkeyPatch, call: int) -> list[str]:
    """Makes one call fail: number ``call`` of those with which a file gets onto the disk; returns the names of the calls, in order."""
    calls: list[str] = []

    def failing(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def perhaps(*arguments: Any, **options: object) -> object:
            if name == "open" and arguments[1] & os.O_NONBLOCK:  # to read
                return real(*arguments, **options)
            calls.append(name)
            if len(calls) == call:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*arguments, **options)

        return perhaps

    for name in ("open", "fsync", "replace", "link"):
        patched.setattr(os, name, failing(name, getattr(os, name)))
    return calls


def test_whichever_call_of_a_rotation_fails_the_file_has_the_tokens_that_the_caller_got(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, refused = [], []
    for call in range(1, 6):
        folder = tmp_path / str(call)
        folder.mkdir()
        make_token(folder)
        returned = before = keyring(folder)
        with monkeypatch.context() as patched:
            calls = fail_at(patched, call)
            with suppress(SecurityError):
                returned = rotate_token(folder, "join", before, 1e6)
        failed.append(calls[call - 1])
        refused.append(returned == before)
        assert keyring(folder) == returned
        assert [path.name for path in folder.iterdir()] == ["fleet.token"]
    assert failed == ["open", "fsync", "replace", "open", "fsync"]
    assert refused == [True, True, True, False, False]


def test_a_first_token_that_cannot_be_written_leaves_nothing_or_one_that_the_next_start_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in range(1, 6):
        folder = tmp_path / str(call)
        folder.mkdir()
        with monkeypatch.context() as patched:
            calls = fail_at(patched, call)
            with pytest.raises(SecurityError, match="cannot write the run's token"):
                make_token(folder)
        assert len(calls) == call
        assert {path.name for path in folder.iterdir()} <= {"fleet.token"}
        assert len(make_token(folder)) == 64
