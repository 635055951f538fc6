"""Admission to the wire: by tokens, certificates, clocks, software and the start of the run."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import resource
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from fleet.control.wire import CREDENTIALS, PATIENCE_S, Caller, Wire, until
from phalanx.fleet.control.coordinator_link import CoordinatorLink, operate
from phalanx.fleet.control.credentials import Credentials, HandshakeStream, Method, credentials_of, software
from phalanx.fleet.control.security import (
    TOKEN_VARIABLES,
    Certificates,
    SecurityError,
    keyring,
    make_token,
    read_certificates,
    rotate_token,
    run_token,
)
from phalanx.fleet.control.transport import TransportError
from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.run.identity import FencingToken
from phalanx.run.spec import RunSpec
from phalanx.wire.messages import Role, Seals


@pytest.mark.parametrize(
    ("credentials", "kind"),
    [
        (
            dataclasses.replace(CREDENTIALS, token="somebody guessed it", operator_token="and this"),
            "wrong token",
        ),
        (dataclasses.replace(CREDENTIALS, token="(1)", operator_token="(1)"), "wrong token"),
        (dataclasses.replace(CREDENTIALS, run="run-2"), "another run"),
    ],
)
def test_a_stranger_is_refused_counted_and_logged_and_gets_the_reason(
    credentials: Credentials, kind: str
) -> None:
    async def scene() -> None:
        async with Wire() as wire:
            caller = wire.dial(credentials=credentials)
            await until(lambda: wire.server.refused[kind])
            await until(lambda: any(kind in line for line in caller.lines))
            with pytest.raises(TransportError, match=kind):
                await operate(wire.address, credentials, m.StopRun())
            assert any(kind in line for line in wire.ear.lines)
            assert not any(credentials.token and credentials.token in line for line in wire.ear.lines)
            assert wire.ear.reports == []
            friend = wire.dial()
            await until(lambda: friend.link.attached and wire.ear.reports)

    asyncio.run(scene())


def test_an_agent_with_another_torch_is_refused_by_the_name_of_its_host_and_an_operator_is_not() -> None:
    async def scene() -> None:
        async with Wire() as wire:
            other = "gpu17 has Phalanx 0.1.0 with torch 1.0.0"
            shown = tuple((k, other if k == "phalanx-software" else v) for k, v in CREDENTIALS.facts())
            assert await wire.refusal(shown) == "unauthenticated"
            assert wire.server.refused["other software"] == 1
            assert any(other in line and "install the same on every node" in line for line in wire.ear.lines)
        assert CREDENTIALS.refusal(shown, "Operate") is None

    asyncio.run(scene())


@pytest.fixture
def _still_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock stands still: however slow the test is, a clock is as far from the coordinator's as it was set."""
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s)


@pytest.mark.usefixtures("_still_clock")
@pytest.mark.parametrize(("ahead_s", "refused"), [(3600, True), (-3600, True), (20, False), (-100, False)])
def test_an_agent_whose_clock_is_far_from_the_coordinators_is_refused_by_the_name_of_its_host(
    ahead_s: float, refused: bool
) -> None:
    clock = f"{time.time() + ahead_s:.3f}"
    changed = {"phalanx-clock": clock, "phalanx-software": f"gpu17 has {software()}"}
    shown = tuple((name, changed.get(name, value)) for name, value in CREDENTIALS.facts())
    refusal = CREDENTIALS.refusal(shown, "Attach")
    assert (refusal is not None) == refused
    if refusal is not None:
        where = "ahead of" if ahead_s > 0 else "behind"
        assert (
            refusal.reason == f"the clock of gpu17 is 3600 s {where} the coordinator's: set it (chrony, ntpd)"
        )
    assert CREDENTIALS.refusal(shown, "Operate") is None


def said_by(host: str, ahead_s: float) -> tuple[tuple[str, str], ...]:
    """The metadata of an agent of the same run on another host, whose clock is ahead."""
    changed = {
        "phalanx-clock": f"{time.time() + ahead_s:.3f}",
        "phalanx-software": f"{host} has {software()}",
    }
    return tuple((name, changed.get(name, value)) for name, value in CREDENTIALS.facts())


@pytest.mark.parametrize("clock", ["", "noon", "nan", "inf", "-inf"])
def test_what_is_no_time_is_no_clock_that_is_wrong(clock: str) -> None:
    # A stranger's nan among the offsets would make every other host's clock look alike.
    shown = tuple((name, clock if name == "phalanx-clock" else value) for name, value in CREDENTIALS.facts())
    assert CREDENTIALS.refusal(shown, "Attach") is None


@pytest.mark.usefixtures("_still_clock")
def test_names_that_no_host_has_are_not_kept() -> None:
    async def scene() -> None:
        async with Wire() as wire:
            for number in range(3):
                shown = said_by(f"{number}" + 3000 * "x", 3600)
                assert await wire.refusal(shown) == "unauthenticated"
            assert "is 3600 s ahead of the coordinator's" in wire.ear.lines[-1]
            await wire.refusal(said_by("gpu1", 3600))
            assert "the clock of gpu1 is 3600 s ahead of the coordinator's" in wire.ear.lines[-1]

    asyncio.run(scene())


@pytest.mark.usefixtures("_still_clock")
def test_where_all_other_clocks_are_apart_alike_it_is_the_coordinators_that_is_called_wrong() -> None:
    async def scene() -> None:
        async with Wire() as wire:
            for host, ahead_s in (("gpu1", 3600), ("gpu2", 3602)):
                assert await wire.refusal(said_by(host, ahead_s)) == "unauthenticated"
            first, second = (line for line in wire.ear.lines if "clock apart" in line)
            assert "the clock of gpu1 is 3600 s ahead of the coordinator's" in first
            here = socket.gethostname()
            assert f"the clock of {here} (the coordinator) is the wrong one" in second
            for host in ("gpu3", "gpu4"):
                await wire.raw(facts=said_by(host, 0))
            for host in ("gpu5", "gpu6"):
                await wire.refusal(said_by(host, -3600))
            assert "the clock of gpu6 is 3600 s behind" in wire.ear.lines[-1]

    asyncio.run(scene())


class OnAnotherHost(Credentials):
    """Credentials of the same run on a machine of another name."""

    def facts(self) -> tuple[tuple[str, str], ...]:
        return tuple(
            (k, f"gpu17 has {software()}" if k == "phalanx-software" else v) for k, v in super().facts()
        )


def test_an_agent_on_a_machine_of_another_name_is_attached() -> None:
    async def scene() -> None:
        async with Wire() as wire:
            fields = {
                field.name: getattr(CREDENTIALS, field.name) for field in dataclasses.fields(Credentials)
            }
            friend = wire.dial(credentials=OnAnotherHost(**fields))
            await until(lambda: friend.link.attached)
            assert not wire.server.refused

    asyncio.run(scene())


def test_an_agents_token_stops_and_drains_nothing_and_an_operators_attaches_no_agent() -> None:
    async def scene() -> None:
        agent = dataclasses.replace(CREDENTIALS, operator_token=CREDENTIALS.token)
        operator = dataclasses.replace(CREDENTIALS, token=CREDENTIALS.operator_token)
        async with Wire() as wire:
            for request in (m.StopRun(), m.Drain("node-3")):
                with pytest.raises(TransportError, match=r"wrong token.*fleet\.operator-token of"):
                    await operate(wire.address, agent, request)
            caller = wire.dial(credentials=operator)
            await until(lambda: any("wrong token" in line for line in caller.lines))
            assert (wire.ear.reports, caller.greetings) == ([], 0)
            assert await operate(wire.address, operator, m.StopRun())
            friend = wire.dial(credentials=agent)
            await until(lambda: friend.link.attached)
            with pytest.raises(TransportError, match="without a token"):
                await operate(wire.address, dataclasses.replace(agent, operator_token=""), m.StopRun())

    asyncio.run(scene())


@pytest.mark.parametrize("fencing", [FencingToken(0, "ab"), FencingToken(2, "ab"), FencingToken(1, "cd")])
def test_an_agent_of_another_start_of_the_run_gets_that_reason_and_neither_side_obeys_the_other(
    fencing: FencingToken,
) -> None:
    async def scene() -> None:
        async with Wire() as wire:
            other = dataclasses.replace(CREDENTIALS, fencing=fencing)
            caller, refused = Caller(wire.address, credentials=other), asyncio.Event()
            caller.link = CoordinatorLink(
                lambda: [wire.address],
                other,
                caller.greet,
                caller.commands.append,
                caller.lines.append,
                refused.set,
            )
            dialing = asyncio.create_task(caller.link.run())
            async with asyncio.timeout(PATIENCE_S):
                await refused.wait()
            await until(lambda: any("another start: attempt 1" in line for line in caller.lines))
            dialing.cancel()
            with pytest.raises(TransportError, match="another start"):
                await operate(wire.address, other, m.StopRun())
            assert wire.server.refused["another start"] >= 2
            assert (caller.greetings, caller.commands, wire.ear.reports) == (0, [], [])

    asyncio.run(scene())


def test_who_lies_about_the_start_that_it_belongs_to_proves_nothing() -> None:
    class Liar(Credentials):
        async def prove(self, stream: HandshakeStream, method: Method, role: Role) -> Seals:
            return await dataclasses.replace(CREDENTIALS, fencing=FencingToken(0, "ab")).prove(
                stream, method, role
            )

    async def scene() -> None:
        async with Wire() as wire:
            caller = wire.dial(credentials=Liar("run-1", CREDENTIALS.token, CREDENTIALS.fencing))
            await until(lambda: wire.server.refused["wrong token"])
            assert (caller.greetings, wire.ear.reports) == (0, [])

    asyncio.run(scene())


def certificates(folder: Path, authority: Path | None = None) -> Certificates:
    """A node's certificate, of an authority of its own or of another folder's."""
    folder.mkdir()

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    if authority is None:
        openssl(
            "req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=run", "-days", "2"
        )
    else:
        for name in ("ca.key", "ca.pem"):
            (folder / name).write_bytes((authority / name).read_bytes())
    openssl("req", *new_key, "-keyout", "node.key", "-out", "node.csr", "-subj", "/CN=node")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-days", "2", "-extfile", "names")
    openssl("x509", "-req", "-in", "node.csr", *signing, "-out", "node.pem")
    return read_certificates(folder)


def test_with_certificates_only_those_whom_the_runs_authority_vouches_for_get_in(tmp_path: Path) -> None:
    ours = certificates(tmp_path / "a")
    friend = certificates(tmp_path / "b", authority=tmp_path / "a")
    stranger = certificates(tmp_path / "c")

    async def scene() -> None:
        async with Wire(dataclasses.replace(CREDENTIALS, certificates=ours)) as wire:
            caller = wire.dial(credentials=dataclasses.replace(CREDENTIALS, certificates=friend))
            await until(lambda: wire.ear.reports)
            wire.server.send("node-0", c.Release(1))
            await until(lambda: caller.commands)
            for credentials in (CREDENTIALS, dataclasses.replace(CREDENTIALS, certificates=stranger)):
                with pytest.raises(TransportError):
                    await operate(wire.address, credentials, m.StopRun(), timeout_s=2.0)

    asyncio.run(scene())


def test_a_client_that_does_not_answer_the_end_of_its_tls_stream_does_not_hold_up_the_end_of_the_server(
    tmp_path: Path,
) -> None:
    own = certificates(tmp_path / "a")

    async def scene() -> None:
        async with Wire(dataclasses.replace(CREDENTIALS, certificates=own)) as wire:
            silent = await asyncio.to_thread(
                lambda: own.client_context(names_host=True).wrap_socket(
                    socket.create_connection(("127.0.0.1", wire.port)), server_hostname="127.0.0.1"
                )
            )
            with silent:
                loop = asyncio.get_running_loop()
                stopping = asyncio.create_task(wire.server.stop(grace_s=0.0))
                turns = 0
                while not stopping.done():
                    turns += 1
                    later = loop.create_future()
                    loop.call_soon(later.set_result, None)
                    await later
            assert turns < 100, "it has waited for nothing"

    asyncio.run(scene())


def test_strangers_who_begin_no_tls_handshake_make_room_as_others_do(tmp_path: Path) -> None:
    credentials = dataclasses.replace(CREDENTIALS, certificates=certificates(tmp_path / "a"))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def scene() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        async with Wire(credentials) as wire:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            with ExitStack() as opened:
                strangers = [
                    opened.enter_context(socket.create_connection(("127.0.0.1", wire.port)))
                    for _ in range(300)
                ]
                friend = wire.dial(credentials=credentials)
                await until(lambda: friend.link.attached)
                strangers[0].setblocking(False)
                assert strangers[0].recv(1) == b""

    try:
        asyncio.run(scene())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_missing_certificate_is_named(tmp_path: Path) -> None:
    with pytest.raises(SecurityError, match=r"ca\.pem"):
        read_certificates(tmp_path)


@pytest.mark.parametrize("content", [b"", b"no certificate\n", b"\xff"])
@pytest.mark.parametrize("name", ["ca.pem", "node.pem", "node.key"])
def test_a_certificate_that_cannot_be_used_is_named_with_the_remedy(
    tmp_path: Path, name: str, content: bytes
) -> None:
    certificates(tmp_path / "a")
    (tmp_path / "a" / name).write_bytes(content)
    with pytest.raises(SecurityError, match=rf"(?s){re.escape(name)}.*as PEM"):
        read_certificates(tmp_path / "a")


def test_certificates_that_became_unusable_are_read_again_at_the_next_dial(tmp_path: Path) -> None:
    ours = certificates(tmp_path / "a")

    async def scene() -> None:
        async with Wire(dataclasses.replace(CREDENTIALS, certificates=ours)) as wire:
            friend = certificates(tmp_path / "b", authority=tmp_path / "a")
            (tmp_path / "b" / "node.key").rename(tmp_path / "b" / "kept.key")
            caller = wire.dial(credentials=dataclasses.replace(CREDENTIALS, certificates=friend))
            await until(lambda: any("node.key" in line for line in caller.lines))
            (tmp_path / "b" / "kept.key").rename(tmp_path / "b" / "node.key")
            await until(lambda: wire.ear.reports)

    asyncio.run(scene())


def test_the_token_is_made_once_and_is_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PHALANX_RUN_TOKEN", raising=False)
    with pytest.raises(SecurityError, match="the command that starts a run makes it"):
        run_token(tmp_path)
    assert list(tmp_path.iterdir()) == [], "only the launcher makes one"
    token = make_token(tmp_path)
    assert len(token) >= 32
    assert make_token(tmp_path) == run_token(tmp_path) == token
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o077 == 0
    file.write_text("")
    with pytest.raises(SecurityError, match=r"empty .*remove it, and start the run again"):
        make_token(tmp_path)


def test_tokens_that_were_changed_are_accepted_for_their_grace_whatever_the_number_of_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PHALANX_RUN_TOKEN", raising=False)
    make_token(tmp_path)
    first = keyring(tmp_path)
    second = rotate_token(tmp_path, "join", first, 1e6)
    third = rotate_token(tmp_path, "join", second, 1e5)
    assert keyring(tmp_path) == third, "a coordinator that begins anew reads what the last one wrote"
    assert set(third.accepted()) == {first.token, second.token}
    assert max(until_s for _, until_s in third.earlier) < time.time() + 1e5 + 1, (
        "none outlives a shorter grace"
    )
    last = rotate_token(tmp_path, "join", third, 0.0)
    assert last.accepted() == ()
    assert [file.name for file in tmp_path.iterdir()] == ["fleet.token"]
    assert (tmp_path / "fleet.token").stat().st_mode & 0o077 == 0
    monkeypatch.setenv("PHALANX_RUN_TOKEN", "given by the scheduler")
    with pytest.raises(SecurityError, match="given in PHALANX_RUN_TOKEN"):
        rotate_token(tmp_path, "join", keyring(tmp_path), 0.0)
    assert run_token(tmp_path) == "given by the scheduler"


def test_agents_and_operators_may_not_have_one_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in TOKEN_VARIABLES.values():
        monkeypatch.setenv(variable, "the same for both of them")
    with pytest.raises(SecurityError, match="PHALANX_OPERATOR_TOKEN another value"):
        credentials_of(tmp_path, RunSpec(), 0, None)


def test_a_token_in_the_environment_comes_first_and_must_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_RUN_TOKEN", "given by the scheduler")
    assert run_token(tmp_path) == "given by the scheduler"
    monkeypatch.setenv("PHALANX_RUN_TOKEN", "short")
    with pytest.raises(SecurityError, match="PHALANX_RUN_TOKEN"):
        run_token(tmp_path)


def test_the_token_is_not_printed() -> None:
    assert CREDENTIALS.token not in repr(CREDENTIALS)
    assert CREDENTIALS.operator_token not in repr(CREDENTIALS)
