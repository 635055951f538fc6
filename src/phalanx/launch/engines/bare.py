"""Starts runs on this machine or on hosts through ssh, and asks them what became of it; OpenSSH's client does the transport.

All hosts are checked at once before anything is started: reachable without a password, the run directory shared, the same software, clocks that
agree. Then all are started, and only when all have been is the word given that lets them begin (``hosts``).
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
from phalanx.launch.engines.order import FOLDER, EngineError, LaunchOrder, private_exports, run_tool
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
"""Words of ssh -> what they mean, and the command that mends it."""


@dataclass(frozen=True)
class Started:
    """The session of a run on a host."""

    host: Host
    pid: int


def on_host(host: Host, script: str, timeout_s: float = 120.0) -> str:
    """What a shell script printed on a host. Raises ``EngineError``, naming the host."""
    if host.destination == HERE:
        return run_tool(["bash", "-s"], stdin=script, timeout_s=timeout_s)
    port = ["-p", str(host.port)] if host.port else []
    try:
        return run_tool([*_SSH, *port, "--", host.destination, "bash -s"], stdin=script, timeout_s=timeout_s)
    except EngineError as error:
        said = str(error)
        meant = next((_for_host(why, host) for word, why in _WHY.items() if word in said), said)
        raise EngineError(f"{host.name}: {meant}") from error


def _for_host(remedy: str, host: Host) -> str:
    """A remedy with the words by which OpenSSH's tools know a host: behind another port it has a name of its own."""
    name = host.destination.rpartition("@")[2]
    other = host.port and host.port != SSH_PORT
    port, known = (f" -p {host.port}", f"'[{name}]:{host.port}'") if other else ("", name)
    return remedy.format(known=known, port=port, host=name, login=host.destination)


def on_all(hosts: list[Host], act: Callable[[Host], T]) -> tuple[dict[str, T], list[str]]:
    """The results of ``act`` by the host's name, and what went wrong elsewhere; many hosts at once."""
    done: dict[str, T] = {}
    wrong: list[str] = []

    def one(host: Host) -> tuple[Host, T | EngineError]:
        try:
            return host, act(host)
        except EngineError as error:
            return host, error

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for host, result in pool.map(one, hosts):
            if isinstance(result, EngineError):
                wrong.append(str(result))
            else:
                done[host.name] = result
    return done, wrong


# --- the start ------------------------------------------------------------------------------------


def problems(order: LaunchOrder, hosts: list[Host]) -> list[str]:
    """Names the problems of a list of hosts with a run, as far as the list and the run file tell; empty if there are none."""
    wrong = list(not_for_hosts(order))
    if len(hosts) < order.all_nodes and hosts[0].destination != HERE:
        wrong.append(
            f"fleet.nodes + fleet.spares = {order.all_nodes}, and there are {len(hosts)} hosts: --nodes, --spares, or more lines in the file"
        )
    if lost := unreachable(hosts):
        wrong.append(lost)
    return wrong


def preflight(order: LaunchOrder, hosts: list[Host]) -> list[str]:
    """Everything that keeps the hosts from training the run together, each with its host; empty if nothing does.

    Writes a word into the run directory, which every host must see.
    """
    if wrong := problems(order, hosts):
        return wrong
    word = secrets.token_hex(8)
    try:
        order.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(order.nonce, word.encode())
    except OSError as error:
        return [f"cannot write {order.folder}: {error.strerror}; give another run_dir"]
    script = check_script(order, word)
    asked_s = time.time()
    said, wrong = on_all(hosts, lambda host: _facts(host, on_host(host, script)))
    took_s = time.time() - asked_s
    reference = next(iter(said.values()), None)
    ahead_s: dict[str, float] = {}
    for name, (software, unix_s) in said.items():
        if reference is not None and software != reference[0]:
            wrong.append(
                f"{name}: has {software}, {next(iter(said))} has {reference[0]}: install the same on both"
            )
        if max(asked_s - unix_s, unix_s - asked_s - took_s) > _CLOCKS_S:
            ahead_s[name] = min(unix_s - asked_s, max(0.0, unix_s - asked_s - took_s))
    return [*wrong, *_clocks_apart(ahead_s, len(said) - len(ahead_s))]


def _clocks_apart(ahead_s: dict[str, float], agreeing: int) -> list[str]:
    """What is wrong with the clocks of hosts that are too far from this machine's, or with this machine's."""
    if ours := own_clock_is_wrong(ahead_s, agreeing, "this machine"):
        return [ours]
    return [
        f"{name}: its clock is {abs(one_s):.0f} s {'ahead of' if one_s > 0 else 'behind'} this machine's: set it (chrony, ntpd)"
        for name, one_s in ahead_s.items()
    ]


def _facts(host: Host, said: str) -> tuple[str, float]:
    for line in said.splitlines():
        if line.startswith("phalanx-host "):
            software, unix_s = json.loads(line.partition(" ")[2])
            return str(software), float(unix_s)
    raise EngineError(
        f"{host.name}: its shell has not run Phalanx, it said: {said.strip()[-300:] or 'nothing'}"
    )


def start(order: LaunchOrder, hosts: list[Host], *, joins: bool = False) -> list[Started]:
    """Starts the run on the hosts, the first of which leads; or has them join the fleet that trains it. On all of them or on none.

    A run that is cancelled before the word that lets it begin does not begin. Raises ``EngineError`` with every reason.
    """
    word, head = secrets.token_hex(8), None if joins else hosts[0]
    names = {host.name for host in hosts}
    # A host that was given back and joins again is there once.
    earlier = [one for one in started_on(order.run_dir) if one.host.name not in names] if joins else []
    go = order.folder / "go"
    try:
        go.unlink(missing_ok=True)
        if not joins:
            _forget_who_was_asked(order)
    except OSError as error:
        raise EngineError(f"cannot write {order.folder}: {error.strerror}; give another run_dir") from error
    private = private_exports(order.launch, order.working_dir)

    def begin(host: Host) -> int:
        return _pid(host, on_host(host, private + start_script(order, host, head, word)))

    pids, wrong = on_all(hosts, begin)
    started = [Started(host, pids[host.name]) for host in hosts if host.name in pids]
    try:
        _note(order, [*earlier, *started])
        if not joins:
            refuse_stopped(order)
        if not wrong:
            write_atomically(go, word.encode())
    except EngineError as error:
        wrong.append(str(error))
    except OSError as error:
        wrong.append(f"cannot write {order.folder}: {error.strerror}; give another run_dir")
    if wrong:
        end(order.run_dir, started, signal.SIGKILL)
        if joins:
            with suppress(OSError):  # a full disk has kept them
                _note(order, earlier)
        raise EngineError("nothing was started:\n  " + "\n  ".join(wrong))
    return started


def _forget_who_was_asked(order: LaunchOrder) -> None:
    for asked in order.folder.glob(f"{ASKED}-*"):
        with suppress(FileNotFoundError):
            asked.rmdir()


def _note(order: LaunchOrder, started: list[Started]) -> None:
    content = json.dumps([asdict(one) for one in started], indent=1) + "\n"
    write_atomically(order.folder / _HOSTS, content.encode())


def _pid(host: Host, said: str) -> int:
    for line in said.splitlines():
        if line.startswith("phalanx-pid "):
            return int(line.split()[1])
    raise EngineError(
        f"{host.name}: its shell has started nothing, it said: {said.strip()[-300:] or 'nothing'}"
    )


# --- afterwards -----------------------------------------------------------------------------------


def started_on(run_dir: Path) -> list[Started]:
    """The sessions of the last start of a run; empty if there are none that can be read."""
    try:
        read = json.loads((run_dir / FOLDER / _HOSTS).read_bytes())
        return [
            Started(Host(**{**one["host"], "domain": tuple(one["host"]["domain"])}), int(one["pid"]))
            for one in read
        ]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def alive(run_dir: Path) -> tuple[list[Started], list[str]]:
    """The sessions of a run that are there still, and the hosts that do not answer, with the reason."""
    return end(run_dir, started_on(run_dir), None)


def end(
    run_dir: Path, started: list[Started], number: signal.Signals | None
) -> tuple[list[Started], list[str]]:
    """Sends a signal to sessions that are there still; returns those, and why some hosts did not answer."""
    pids = {one.host.name: one.pid for one in started}
    folder = str(run_dir.resolve())

    def act(host: Host) -> bool:
        script = signal_script(folder, [pids[host.name]], number or 0)
        return "phalanx-alive" in on_host(host, script, timeout_s=30.0)

    there, wrong = on_all([one.host for one in started], act)
    return [one for one in started if there.get(one.host.name)], wrong


def sentence(run_dir: Path) -> str | None:
    """What the sessions of a run do; ``None`` if none is there any more and every host says so."""
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
