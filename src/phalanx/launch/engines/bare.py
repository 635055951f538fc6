"""Sessions of runs on this machine or on hosts through ssh: checked, started, looked for, signaled; OpenSSH's client does the transport.

All hosts are checked at once before anything is started: reachable without a password, the run directory shared, the same software, clocks that
agree. Then all are started. Only when all have been is the file written that lets them begin (``hosts``).
"""

from __future__ import annotations

import json
import secrets
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from phalanx.launch.engines.hosts import (
    ASKED,
    HERE,
    SSH_PORT,
    Host,
    check_script,
    not_for_hosts,
    signal_script,
    start_script,
    unreachable,
)
from phalanx.launch.engines.order import FOLDER, EngineError, LaunchOrder, private_exports, run_tool, writing
from phalanx.launch.engines.submission import refuse_stopped
from phalanx.run.directory.files import write_atomically
from phalanx.run.peers import own_clock_is_wrong

T = TypeVar("T")
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15", "-T")
_AT_ONCE = 32
_CLOCKS_S = 30.0
_HOSTS = "hosts.json"
_WHY = {
    "REMOTE HOST IDENTIFICATION HAS CHANGED": "its host key is not the one that is known: is it the machine that it was? Then ssh-keygen -R {known}",
    "Host key verification failed": "its host key is not known: connect once by hand, or ssh-keyscan{port} {host} >> ~/.ssh/known_hosts",
    "Permission denied": "it lets nobody in without a password: ssh-copy-id{port} {login}",
}
"""Text in ssh's error -> the cause, and the command that mends it."""


@dataclass(frozen=True)
class Started:
    """The session of a run on a host."""

    host: Host
    pid: int


def on_host(host: Host, script: str, timeout_s: float = 120.0) -> str:
    """Run a shell script on a host, through ssh unless it is this machine, and return its output.

    Raises ``EngineError`` if it fails or takes longer than ``timeout_s``, for another host with its name and a
    remedy.
    """
    if host.destination == HERE:
        return run_tool(["bash", "-s"], stdin=script, timeout_s=timeout_s)
    port = ["-p", str(host.port)] if host.port else []
    try:
        return run_tool([*_SSH, *port, "--", host.destination, "bash -s"], stdin=script, timeout_s=timeout_s)
    except EngineError as error:
        text = str(error)
        meant = next((_for_host(remedy, host) for word, remedy in _WHY.items() if word in text), text)
        raise EngineError(f"{host.name}: {meant}") from error


def _for_host(remedy: str, host: Host) -> str:
    """Fill a remedy with the host's names: login, host, port option, and the name in known_hosts, which includes
    another port than SSH's.
    """
    name = host.destination.rpartition("@")[2]
    other = host.port and host.port != SSH_PORT
    port, known_as = (f" -p {host.port}", f"'[{name}]:{host.port}'") if other else ("", name)
    return remedy.format(known=known_as, port=port, host=name, login=host.destination)


def on_all(hosts: list[Host], act: Callable[[Host], T]) -> tuple[dict[str, T], list[str]]:
    """Call ``act`` on many hosts in threads. Return the results by host name, and the messages of ``EngineError``
    of the others.
    """
    done: dict[str, T] = {}
    wrong: list[str] = []

    def call(host: Host) -> T | EngineError:
        try:
            return act(host)
        except EngineError as error:
            return error

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for host, result in zip(hosts, pool.map(call, hosts), strict=True):
            if isinstance(result, EngineError):
                wrong.append(str(result))
            else:
                done[host.name] = result
    return done, wrong


# --- the start ------------------------------------------------------------------------------------


def problems(order: LaunchOrder, hosts: list[Host]) -> list[str]:
    """Return the problems that the run file and the list of hosts show, without contacting one; empty if there are
    none.

    They are fields for schedulers, too few hosts, and a leader at a loopback address.
    """
    wrong = list(not_for_hosts(order))
    if len(hosts) < order.all_nodes and hosts[0].destination != HERE:
        wrong.append(
            f"fleet.nodes + fleet.spares = {order.all_nodes}, and there are {len(hosts)} hosts: --nodes, --spares, or more lines in the file"
        )
    if lost := unreachable(hosts):
        wrong.append(lost)
    return wrong


def preflight(order: LaunchOrder, hosts: list[Host]) -> list[str]:
    """Return everything that keeps the hosts from training the run together; empty if nothing does.

    If ``problems`` finds some, only these. Else writes a random word into the run directory, which it creates.
    Each host must read it, write there, have the software of the first host that answers, and a clock within 30
    s of this machine's. If the clocks show that this machine's own is wrong, only that is returned of clocks.
    """
    if wrong := problems(order, hosts):
        return wrong
    word = secrets.token_hex(8)
    try:
        with writing(order.folder):
            order.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(order.nonce, word.encode())
    except EngineError as error:
        return [str(error)]
    script = check_script(order, word)
    sent_s = time.time()

    def ask(host: Host) -> tuple[str, float]:
        """Return software and clock (Unix seconds) of a host. Raises ``EngineError``."""
        answer = _answer(host, on_host(host, script), "phalanx-host ", "not run Phalanx")
        software, unix_s = json.loads(answer)
        return str(software), float(unix_s)

    facts, wrong = on_all(hosts, ask)
    took_s = time.time() - sent_s
    reference = next(iter(facts.values()), None)
    ahead_s: dict[str, float] = {}
    for name, (software, unix_s) in facts.items():
        if reference is not None and software != reference[0]:
            wrong.append(
                f"{name}: has {software}, {next(iter(facts))} has {reference[0]}: install the same on both"
            )
        if max(sent_s - unix_s, unix_s - sent_s - took_s) > _CLOCKS_S:
            ahead_s[name] = min(unix_s - sent_s, max(0.0, unix_s - sent_s - took_s))
    if ours := own_clock_is_wrong(ahead_s, len(facts) - len(ahead_s), "this machine"):
        return [*wrong, ours]
    return wrong + [
        f"{name}: its clock is {abs(offset_s):.0f} s {'ahead of' if offset_s > 0 else 'behind'} this machine's: set it (chrony, ntpd)"
        for name, offset_s in ahead_s.items()
    ]


def start(order: LaunchOrder, hosts: list[Host], *, joins: bool = False) -> list[Started]:
    """Start the run on all hosts or on none; the first leads. With ``joins`` they join the fleet that trains it.

    Sessions wait until a last file is written, and the record of sessions is written first; a run that is
    cancelled before does not begin. After a failure all are killed, and the record stays, with ``joins`` that
    of the earlier sessions. Raises ``EngineError`` with every reason.
    """
    word, head = secrets.token_hex(8), None if joins else hosts[0]
    names = {host.name for host in hosts}
    # A host that was given back and joins again is there once.
    earlier = [old for old in started_on(order.run_dir) if old.host.name not in names] if joins else []
    go = order.folder / "go"
    with writing(order.folder):
        go.unlink(missing_ok=True)
        if not joins:
            for mark in order.folder.glob(f"{ASKED}-*"):
                with suppress(FileNotFoundError):
                    mark.rmdir()
    private = private_exports(order.launch, order.working_dir)

    def begin(host: Host) -> int:
        output = on_host(host, private + start_script(order, host, head, word))
        return int(_answer(host, output, "phalanx-pid ", "started nothing").split()[0])

    pids, wrong = on_all(hosts, begin)
    started = [Started(host, pids[host.name]) for host in hosts if host.name in pids]
    try:
        with writing(order.folder):
            _note(order, [*earlier, *started])
            if not joins:
                refuse_stopped(order)
            if not wrong:
                write_atomically(go, word.encode())
    except EngineError as error:
        wrong.append(str(error))
    if wrong:
        end(order.run_dir, started, signal.SIGKILL)
        if joins:
            with suppress(OSError):  # a full disk has kept them
                _note(order, earlier)
        raise EngineError("nothing was started:\n  " + "\n  ".join(wrong))
    return started


def _note(order: LaunchOrder, started: list[Started]) -> None:
    content = json.dumps([asdict(session) for session in started], indent=1) + "\n"
    write_atomically(order.folder / _HOSTS, content.encode())


# --- afterwards -----------------------------------------------------------------------------------


def started_on(run_dir: Path) -> list[Started]:
    """Return the sessions of the last start of a run; empty if there is no record that can be read."""
    try:
        read = json.loads((run_dir / FOLDER / _HOSTS).read_bytes())
        return [
            Started(Host(**{**entry["host"], "domain": tuple(entry["host"]["domain"])}), int(entry["pid"]))
            for entry in read
        ]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def alive(run_dir: Path) -> tuple[list[Started], list[str]]:
    """Return the sessions of a run that are still there, and the hosts that do not answer, with the reason."""
    return end(run_dir, started_on(run_dir), None)


def end(
    run_dir: Path, started: list[Started], number: signal.Signals | None
) -> tuple[list[Started], list[str]]:
    """Send ``number`` (None: nothing) to the sessions of a run. Return those that were there, and the messages of
    hosts that do not answer.

    SIGTERM is sent to a session once only, over all calls, unless the mark of that cannot be written (a full
    disk).
    """
    pids = {session.host.name: session.pid for session in started}
    folder = str(run_dir.resolve())

    def act(host: Host) -> bool:
        script = signal_script(folder, [pids[host.name]], number or 0)
        return "phalanx-alive" in on_host(host, script, timeout_s=30.0)

    there, wrong = on_all([session.host for session in started], act)
    return [session for session in started if there.get(session.host.name)], wrong


def sentence(run_dir: Path) -> str | None:
    """Return in words whether a run's sessions are running: on this machine or on how many of its hosts, and which hosts
    do not answer.

    ``None`` if none is there and all hosts answer. If none is there and some do not answer, "perhaps running".
    """
    started = started_on(run_dir)
    there, wrong = alive(run_dir)
    if not there and not wrong:
        return None
    if not there:
        return f"perhaps running: {len(wrong)} of {len(started)} hosts do not answer ({'; '.join(wrong)})"
    where = (
        "this machine"
        if started and started[0].host.destination == HERE
        else f"{len(there)} of {len(started)} hosts"
    )
    return f"running on {where}" + (f" ({'; '.join(wrong)})" if wrong else "")


def _answer(host: Host, output: str, mark: str, failure: str) -> str:
    """Return the rest of the first line that begins with ``mark``. Without one raise ``EngineError`` with
    ``failure`` and the end of the output.
    """
    for line in output.splitlines():
        if line.startswith(mark):
            return line.removeprefix(mark)
    raise EngineError(
        f"{host.name}: its shell has {failure}, its output: {output.strip()[-300:] or 'nothing'}"
    )
