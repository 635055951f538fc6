"""Machines without a scheduler: a list of hosts, and the shell scripts that check, start and end a run's agents on them.

What is started does not depend on the launcher: each agent is a session of its own with its output in a file, so the launcher, its terminal and
its connections may go. All or none: an agent begins only once a file is in the run directory that is written when all hosts have been started;
without it, the agent ends by itself. Pure functions; ``bare`` runs the scripts here and, through ssh, there.
"""

from __future__ import annotations

import re
import shlex
import signal
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.hardware.local.network import join_address
from phalanx.launch.engines.order import FOLDER, LEAD_EXIT, EngineError, LaunchOrder, exports_of, port_of
from phalanx.launch.placing import Topology, TopologyError, from_domains
from phalanx.run.peers import is_loopback

ASKED = "asked-to-end"
"""Prefix of the folders that mark the sessions which have received SIGTERM."""
HERE = ""
"""The ``destination`` of this machine, which needs no ssh."""
_HOST = re.compile(r"(?:(?P<user>[\w][^@\s]*)@)?(?P<host>\w[\w.-]*)(?::(?P<port>\d+))?")
"""Nothing begins with a dash: ssh would take it for an option."""
_NAME = re.compile(r"\w[\w.-]*")
"""Names of files: logs and claims of a node are called after it."""
_LONGEST_NAME = 128
"""As ``fleet.core.messages.NodeName``."""
SSH_PORT = 22
"""The port of an sshd that nobody has moved."""
_MOST_PORT = 65_535
_GO_HALF_SECONDS = 240
_CHECK = (
    "import json, time; from phalanx.fleet.control.credentials import software; "
    "print('phalanx-host', json.dumps([software(), time.time()]))"
)
_OF_SCHEDULERS = (
    *("partition", "account", "qos", "time_limit", "constraint", "reservation", "exclude", "gpus_per_node"),
    *("container_image", "container_mounts", "options"),
)
"""The fields of ``[launch]`` that only a scheduler can fulfill."""
_NOT_SHARED = "does not see {} as it was written: the run directory must be on storage that all hosts share"
_NOT_WRITTEN = (
    "cannot write into {}: its disk is full, or it is mounted read-only, or belongs to another user"
)


@dataclass(frozen=True)
class Host:
    """One machine that an agent is to run on."""

    name: str
    """The node's name in the fleet."""
    destination: str
    """For ssh, as user@host; empty for this machine."""
    port: int
    """The port of its sshd; 0 for ssh's own choice."""
    address: str
    """The address at which the other nodes reach it."""
    domain: tuple[str, ...] = ()

    @property
    def machine(self) -> tuple[str, int]:
        """Host name and port for ssh, without the user; another port may lead to another machine."""
        return self.destination.rpartition("@")[2], self.port or SSH_PORT


def read_hosts(text: str) -> list[Host]:
    """Return the hosts in a text: one a line, ``[user@]host[:port] [name=N] [address=A] [domain=pod-1/rack-2]``; #
    begins a comment.

    Raises ``EngineError`` naming the line, also for a name or a machine that is there twice.
    """
    hosts: list[Host] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        match = _HOST.fullmatch(words[0])
        values = dict(word.partition("=")[::2] for word in words[1:])
        if match is None or (problem := _wrong_with(words, match, values)):
            message = (
                problem
                if match
                else f"{words[0]!r} is no host (an IPv6 address needs a name, in ~/.ssh/config)"
            )
            raise EngineError(
                f"line {number} of the hosts: {message}; write [user@]host[:port] [name=NODE] [address=HOST] [domain=POD/RACK]"
            )
        user, host, port = match["user"], match["host"], match["port"]
        name = values.get("name") or host
        if any(name == other.name for other in hosts):
            raise EngineError(
                f"line {number} of the hosts: there is a node {name} already; give this one another name=NODE"
            )
        domain = tuple(filter(None, values.get("domain", "").split("/")))
        destination = f"{user}@{host}" if user else host
        read = Host(name, destination, int(port or 0), values.get("address") or host, domain)
        if same := next((earlier for earlier in hosts if earlier.machine == read.machine), None):
            raise EngineError(
                f"line {number} of the hosts: {words[0]} is the host of node {same.name}, and two agents would share its accelerators: one line for each"
            )
        hosts.append(read)
    return hosts


def _wrong_with(words: list[str], match: re.Match[str], values: dict[str, str]) -> str:
    """Return the mistake in a line that begins with a host; empty if there is none."""
    port, keys = match["port"], [word.partition("=")[0] for word in words[1:]]
    if unknown := sorted(set(keys) - {"name", "address", "domain"}):
        return f"{unknown[0]!r} is not known"
    if twice := [key for key in values if keys.count(key) > 1]:
        return f"{twice[0]}= is there twice"
    if empty := [key for key, value in values.items() if not value]:
        return f"{empty[0]}= has no value"
    if port and not 1 <= int(port) <= _MOST_PORT:
        return f"port {port} is not between 1 and {_MOST_PORT}"
    if len(values.get("name") or match["host"]) > _LONGEST_NAME:
        return f"a node's name has at most {_LONGEST_NAME} characters: give it a shorter one by name="
    if (name := values.get("name")) and not _NAME.fullmatch(name):
        return f"name={name}: a node's name has letters, digits, '.', '-' and '_', a letter or digit first"
    return ""


def unreachable(hosts: list[Host]) -> str:
    """Return why the other hosts cannot reach the first one, which leads: its address is a loopback one. Empty if they can."""
    head, others = hosts[0], [host for host in hosts[1:] if not is_loopback(host.address)]
    if not others or not is_loopback(head.address):
        return ""
    return (
        f"{head.name}: {others[0].name} cannot reach it at {head.address}, which is {others[0].name} itself there: give it an address=HOST "
        "that the others know"
    )


def coordinator_port(order: LaunchOrder) -> int:
    """Return the coordinator's TCP port: ``fleet.port``, else one that follows from the run directory and the kernel's port range.

    All hosts are assumed to have the same range.
    """
    return order.port or port_of(zlib.crc32(str(order.run_dir).encode()), order.connections)


def check_script(order: LaunchOrder, word: str) -> str:
    """Return the script that checks that a host reads ``word`` in the run directory and can write there, else exits
    with 65 or 67.

    It then prints the host's software and time.
    """
    nonce, not_shared = shlex.quote(str(order.nonce)), shlex.quote(_NOT_SHARED.format(order.nonce))
    unwritten = shlex.quote(_NOT_WRITTEN.format(order.folder))
    return "\n".join(
        [
            *_preamble_lines(order),
            f'[ "$(cat {nonce} 2>/dev/null)" = {word} ] || {{ echo {not_shared} >&2; exit 65; }}',
            # The prologue may contain `set -e`.
            f'probe={nonce}-"$HOSTNAME-$$"; printf %s {word} 2>/dev/null > "$probe" || true',
            f'[ "$(cat "$probe" 2>/dev/null; rm -f "$probe")" = {word} ] || {{ echo {unwritten} >&2; exit 67; }}',
            f"{shlex.quote(order.python)} -c {shlex.quote(_CHECK)}",
            "",
        ]
    )


def _restart_loop(pauses_s: Sequence[int]) -> str:
    """Return a shell loop that runs the words after it, and again after each of ``pauses_s`` seconds if they were
    killed.

    It ends with the exit code of the last run; after SIGTERM or SIGINT nothing is started again.
    """
    return (
        # The shell outlives a signal to its session: it waits for the agent, which saves.
        "asked=; trap 'asked=1' TERM INT; "
        f'for pause_s in {" ".join(map(str, pauses_s))} ""; do '
        '"$@"; code=$?; '
        '[ "$code" -gt 128 ] && [ -z "$asked" ] && [ -n "$pause_s" ] || exit "$code"; '
        'echo "the agent was killed (exit code $code) and is started again in $pause_s s" >&2; sleep "$pause_s"; [ -z "$asked" ] || exit "$code"; done'
    )


def start_script(order: LaunchOrder, host: Host, head: Host | None, word: str) -> str:
    """Return the script that starts the agent of a host, or the fleet of this machine, as a session, and prints
    its process number.

    The session waits two minutes for ``word`` in the file "go", else ends with 1. Without ``head`` the host
    joins the fleet of the run directory. An agent that was killed (out of memory) is started again after each
    of the order's ``restart_pauses_s``; one that got SIGTERM or ended by itself is not.
    """
    folder = order.folder
    # The session prints its own number: signals are sent to a session, which exists only after setsid.
    notes = "" if head != host else f"""trap 'echo "$code" > "${{0%/*}}/{LEAD_EXIT}"' EXIT; """
    waits = (
        'echo "phalanx-pid $$" >&3; exec 3>&-; '
        f'for _ in $(seq {_GO_HALF_SECONDS}); do [ "$(cat "$0" 2>/dev/null)" = {word} ] && break; sleep 0.5; done; '
        f'[ "$(cat "$0" 2>/dev/null)" = {word} ] || {{ echo "error: not all hosts could be started" >&2; exit 1; }}; '
        f"{notes}{_restart_loop(order.restart_pauses_s)}"
    )
    log = shlex.quote(str(folder / f"{host.name}.log"))
    command = shlex.join(
        ["setsid", "bash", "-c", waits, str(folder / "go"), *_start_command(order, host, head)]
    )
    return "\n".join([*_preamble_lines(order), f"{command} 3>&1 >> {log} 2>&1 < /dev/null &", ""])


def _start_command(order: LaunchOrder, host: Host, head: Host | None) -> list[str]:
    """Return the command of a host: train on this machine, or an agent that leads, follows, or without ``head`` joins a fleet."""
    if host.destination == HERE:
        return [*order.program, "train", str(order.run_file)]
    if head is None:
        words = [*order.program, "agent", "--run", str(order.run_dir)]
    else:
        words = [*order.program, "agent", "--run", str(order.run_file)]
        words += ["--coordinator", join_address(head.address, coordinator_port(order))]
        words += ["--lead" if host == head else "--no-lead"]
    words += ["--node", host.name, "--host", host.address]
    for level in host.domain:
        words += ["--domain", level]
    return words


def signal_script(run_dir: str, pids: list[int], number: int) -> str:
    """Return the script that prints the sessions of a run that are on a host, of ``pids``, and sends them a signal
    (0: none).

    A session is recognized by the run directory in its command line. It gets SIGTERM once, marked by a folder that
    only one caller can create: a second one would end a run that saves.
    """
    there = (
        f'[ -r /proc/$pid/cmdline ] && tr "\\0" " " < /proc/$pid/cmdline | grep -qF -- {shlex.quote(run_dir)}'
    )
    does = [f"kill -{number} -- -$pid"] if number else [":"]
    if number == signal.SIGTERM:
        mark = f'{shlex.quote(f"{run_dir}/{FOLDER}/{ASKED}")}-"$HOSTNAME-$pid-$begun"'
        does = [
            "begun=$(sed 's/.*) //' /proc/$pid/stat | cut -d ' ' -f 20)",
            f"asked={mark}",
            # If the folder cannot be made, as on a full disk, it is unknown whether the signal was sent, so it is sent again.
            f'if mkdir "$asked" 2>/dev/null || [ ! -d "$asked" ]; then {does[0]}; fi',
        ]
    return "\n".join(
        [
            f"for pid in {' '.join(map(str, pids))}; do",
            f"  if {there}; then",
            '    echo "phalanx-alive $pid"',
            *(f"    {line}" for line in does),
            "  fi",
            "done",
            "",
        ]
    )


def _preamble_lines(order: LaunchOrder) -> Iterator[str]:
    """Yield the shell lines before a host's command: working directory, variables, prologue.

    Raises ``EngineError`` for a bad name of a variable.
    """
    yield f"cd {shlex.quote(str(order.working_dir))} || exit 66"
    yield "export PYTHONUNBUFFERED=1"
    yield from exports_of(order.launch)
    yield from order.launch.prologue


def not_for_hosts(order: LaunchOrder) -> Iterator[str]:
    """Yield a problem for each field of the run file that only a scheduler can fulfill.

    On this machine alone (``launch.engine = "local"``) also for ``launch.most_lost_ms``.
    """
    launch = order.launch
    if launch.engine == "local" and launch.most_lost_ms:
        yield f"launch.most_lost_ms = {launch.most_lost_ms:g}: one machine has no network between its nodes; take it out"
    for name in _OF_SCHEDULERS:
        if value := getattr(launch, name):
            yield f"launch.{name} = {value!r}: there is no scheduler to ask; take it out"


def network_of(hosts: Sequence[Host]) -> Topology:
    """Return the network of hosts that name their domains; its levels are "level 1" and on, the widest first.

    Raises ``TopologyError`` if none does, or some do not: without their places there is no price.
    """
    if not any(host.domain for host in hosts):
        raise TopologyError("no host has its place in the network: domain=POD/RACK on every line")
    without = [host.name for host in hosts if not host.domain]
    if without:
        raise TopologyError(
            f"{', '.join(without[:4])}: no domain=, and other hosts have one: write it on every line"
        )
    return from_domains({host.name: host.domain for host in hosts}, "the hosts")
