"""The order that an engine gets: a run, its files, the number of nodes, and the values of ``[launch]``; how schedulers' tools are run, and what other launchers set.

The files of a start are in ``RUN_DIR/launch``: ``run.toml`` (the run file with all overrides, frozen, so that what is queued is not what
somebody edits meanwhile), what was given to the engine, ``submitted.json``, the job's log, and a nonce by which every node shows that it
sees this folder and not one of its own of the same name.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from phalanx.launch.placing import expanded
from phalanx.run.directory.files import open_regular
from phalanx.run.read import launch_variables
from phalanx.run.spec import LaunchSpec

# The TCP port of a run's coordinator, outside the range that the kernel uses for outgoing connections.
#
# A coordinator needs a port that all agents know, also after a restart. Any program's outgoing connection may occupy a port of
# the kernel's range for as long as it is open (``ip_local_port_range``, by default 32768 to 60999: Linux,
# Documentation/networking/ip-sysctl.rst). So the port is one of 20,000 to 39,999 outside that range, computed from a number of
# the run. If fewer than a thousand of these remain, as on machines that give nearly all ports to connections, runs would often
# share a port. Then any port of 20,000 to 39,999 may be chosen; ``fleet.port`` sets another one. The address of a running fleet
# is in its ``fleet.json``.

_FIRST, _END = 20_000, 40_000
_LEAST = 1_000
USUAL_RANGE = 32_768, 60_999
"""The first and last port of outgoing connections where nobody has set others."""
RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def range_of_connections(path: Path = RANGE_FILE) -> tuple[int, int]:
    """Return the first and last port that this machine's kernel gives to outgoing connections; ``USUAL_RANGE`` if
    unknown.
    """
    try:
        first, last = map(int, path.read_text().split())
    except (OSError, ValueError):
        return USUAL_RANGE
    return first, last


def port_of(number: int, connections: tuple[int, int]) -> int:
    """Return the coordinator's port for ``number``: always the same, from 20,000 to 39,999, outside
    ``connections`` (first, last).

    If fewer than 1,000 of these ports are outside of it, any of them may be returned.
    """
    first, last = connections
    below = min(max(first, _FIRST), _END) - _FIRST
    resumes = min(max(last + 1, _FIRST), _END)
    count = below + _END - resumes
    if count < _LEAST:
        below = count = _END - _FIRST
    place = number % count
    return _FIRST + place if place < below else resumes + place - below


def port_in_shell(number: str, path: Path = RANGE_FILE) -> Iterator[str]:
    """Yield shell lines that set ``port`` as ``port_of`` does, on the machine that runs them; ``number`` is an expression of its
    arithmetic."""
    first, last = USUAL_RANGE
    yield f"first={first} last={last}; {{ read -r first last < {path}; }} 2>/dev/null || :"
    yield f"below=$(( (first < {_FIRST} ? {_FIRST} : first > {_END} ? {_END} : first) - {_FIRST} ))"
    yield f"resumes=$(( last < {_FIRST} ? {_FIRST} : last >= {_END} ? {_END} : last + 1 ))"
    yield f"count=$(( below + {_END} - resumes ))"
    yield f'[ "$count" -ge {_LEAST} ] || {{ below={_END - _FIRST}; count=$below; }}'
    yield f"place=$(( {number} % count ))"
    yield f"port=$(( place < below ? {_FIRST} + place : resumes + place - below ))"


# A launch order, from which an engine starts a run.

FOLDER = "launch"
"""The folder's name in a run directory."""
LEAD_EXIT = "lead-exit"
"""The file there with the exit code of the node that leads, once it has ended."""
_SPAN = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([dhms])")
_SECONDS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_SLURM_TIME = re.compile(r"(?:([0-9]{1,9})-)?([0-9]{1,9})(?::([0-9]{1,9}))?(?::([0-9]{1,9}))?")


@dataclass(frozen=True)
class LaunchOrder:
    """A run to start on a cluster."""

    name: str
    run_dir: Path
    """Absolute, and the same on every node."""
    working_dir: Path
    """Where relative paths of the run file begin."""
    nodes: int
    """Nodes that hold ranks."""
    spares: int
    gpus_per_node: int
    """GPUs of each node; 0 for none."""
    port: int
    """TCP port of the coordinator; 0 for one that follows from the job."""
    python: str
    """The interpreter that runs Phalanx on the nodes."""
    launch: LaunchSpec
    taken_from: Path | None = None
    """The run that has given nodes for this one, and gets as many again at its end."""
    taken: int = 0
    """Number of those nodes."""
    connections: tuple[int, int] = USUAL_RANGE
    """The first and last port that the kernel gives to outgoing connections, which no coordinator should need."""
    restart_pauses_s: tuple[int, ...] = (1, 5, 15, 60, 120)
    """Pauses before the restarts of a killed agent on a host without a scheduler; one that is killed once more stays dead."""

    @property
    def folder(self) -> Path:
        """The folder of this start's files."""
        return self.run_dir / FOLDER

    @property
    def run_file(self) -> Path:
        """The frozen run file."""
        return self.folder / "run.toml"

    @property
    def nonce(self) -> Path:
        """The file that every node must see."""
        return self.folder / "nonce"

    @property
    def price_file(self) -> Path:
        """The verdict on the nodes that the engine gave."""
        return self.folder / "given"

    @property
    def all_nodes(self) -> int:
        """Number of nodes, spares included."""
        return self.nodes + self.spares

    @property
    def program(self) -> list[str]:
        """The words that run ``phalanx`` on a node."""
        return [self.python, "-m", "phalanx"]


def time_problems(launch: LaunchSpec) -> Iterator[str]:
    """Yield the problem of a time limit that is nearly all ``launch.grace_s``, so that each job would end before a step is saved."""
    if launch.time_limit and seconds_of(launch.time_limit) < 2 * launch.grace_s:
        yield f"launch.time_limit: {launch.time_limit} leaves no time beside launch.grace_s = {launch.grace_s:g} s to save: a longer --time"


def seconds_of(text: str) -> float:
    """Return the seconds of a time limit: spans like 2d, 12h or 1h30m, or a time of Slurm's.

    Those are MINUTES, MINUTES:SECONDS, HH:MM:SS and D-HH[:MM[:SS]]. Raises ``EngineError`` for another form.
    """
    spans = _SPAN.findall(text)
    if spans and not _SPAN.sub("", text).strip():
        return sum(float(number) * _SECONDS[unit] for number, unit in spans)
    match = _SLURM_TIME.fullmatch(text.strip())
    if match is None:
        raise EngineError(f"launch.time_limit: {text!r} is no time: write 2d, 12h, 90m or D-HH:MM:SS")
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is not None:  # D-HH, D-HH:MM, D-HH:MM:SS
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:  # MINUTES, MINUTES:SECONDS
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return int(days or 0) * 86_400 + hours * 3_600 + minutes * 60 + seconds


def excluded_nodes(launch: LaunchSpec) -> list[str]:
    """Return the nodes that ``launch.exclude`` names; empty if it is. Raises ``EngineError`` for another form."""
    try:
        return expanded(launch.exclude)
    except ValueError as error:
        raise EngineError(f"launch.exclude: {error}; write the names as n[1-4,7],m2") from error


def slurm_time(seconds: float) -> str:
    """A time as Slurm writes it: D-HH:MM:SS."""
    total = int(seconds)
    return f"{total // 86_400}-{total % 86_400 // 3_600:02d}:{total % 3_600 // 60:02d}:{total % 60:02d}"


# Private variables: values that must be in no file of a run. They are those that the run file only names, and those of
# ``launch.secrets``.
#
# They are read on the submitting machine. Slurm gets them in sbatch's environment, and hosts on the standard input of their
# shell. So they are in no script, command line or file of the run directory.

_MOST_BYTES = 1 << 20


def private_variables(
    launch: LaunchSpec, working_dir: Path, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variables whose values are not in the run file: all those of the file ``launch.secrets``, and
    from ``environ`` those that ``launch.environment`` only names and the file lacks.

    Raises ``EngineError`` for a variable without a value, and for an unusable file.
    """
    values = _of_file(working_dir / Path(launch.secrets).expanduser()) if launch.secrets else {}
    for name, value in launch_variables(launch):
        if value is None and name not in values:
            if name not in environ:
                raise EngineError(
                    f"launch.environment: {name} has no value here: export {name}=..., or write it into the file that launch.secrets names"
                )
            values[name] = environ[name]
    return values


def exports_of(launch: LaunchSpec) -> Iterator[str]:
    """Yield the shell lines that export the variables whose values the run file holds. Raises ``EngineError`` for a bad name."""
    for name, value in launch_variables(launch):
        if not name.isidentifier():
            raise EngineError(f"launch.environment: {name!r} is no name of a variable")
        if value is not None:
            yield f"export {name}={shlex.quote(value)}"


def private_exports(launch: LaunchSpec, working_dir: Path) -> str:
    """Return the shell lines that export ``private_variables``, to be sent to a shell and never written.

    Raises ``EngineError`` as ``private_variables`` does.
    """
    return "".join(
        f"export {name}={shlex.quote(value)}\n"
        for name, value in private_variables(launch, working_dir).items()
    )


def _of_file(path: Path) -> dict[str, str]:
    """Return the variables in the first MiB of a file of NAME=VALUE lines; lines that begin with # are comments.

    Raises ``EngineError`` if it is unreadable, malformed, or accessible to other users.
    """
    try:
        with open_regular(path, follow=True) as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise EngineError(f"launch.secrets: cannot read {path}: {error}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise EngineError(f"launch.secrets: others can read {path}: chmod 600 {shlex.quote(str(path))}")
    values: dict[str, str] = {}
    for number, line in enumerate(content.splitlines(), 1):
        name, sign, value = line.strip().partition("=")
        if name and not name.startswith("#"):
            if not sign or not name.isidentifier():
                raise EngineError(f"launch.secrets: line {number} of {path} is not NAME=VALUE")
            values[name] = value
    return values


# Command-line tools of schedulers (sbatch, squeue, kubectl, ssh), with errors that name the remedy.

_MEANS = {
    "Could not establish a configuration source": "this machine belongs to no Slurm cluster (SLURM_CONF, /etc/slurm/slurm.conf): give the command on a login node",
    "Unable to contact slurm controller": "slurmctld does not answer: try again in a moment, or ask who runs the cluster",
}
"""Text in a tool's error -> the cause, and what to do."""


class EngineError(RuntimeError):
    """A request that an engine cannot fulfill; the message has the reason and the remedy."""


def refuse_for(problems: Sequence[str], refusal: str) -> None:
    """Raise ``EngineError`` with the refusal and its problems, one a line, if there are any."""
    if problems:
        raise EngineError(f"{refusal}:\n  " + "\n  ".join(problems))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context in which ``path``, of a run directory, is written. Raises ``EngineError`` for its ``OSError``."""
    try:
        yield
    except OSError as error:
        raise EngineError(f"cannot write {path}: {error.strerror}; give another run_dir") from error


def run_tool(
    words: Sequence[str],
    *,
    timeout_s: float = 60.0,
    stdin: str | None = None,
    environment: Mapping[str, str] | None = None,
    folder: str | None = None,
    errors_too: bool = False,
) -> str:
    """Run a tool in ``folder`` (by default here) and return its standard output, with ``errors_too`` also its
    standard error.

    ``stdin`` is text for it, and ``environment`` replaces the present one. Raises ``EngineError`` if it is not
    installed, cannot be run, fails (with its message, or a remedy for a known one), or takes longer than ``timeout_s``.
    """
    try:
        done = subprocess.run(
            list(words),
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",  # a host's greeting may have any encoding
            timeout=timeout_s,
            cwd=folder,
            env=None if environment is None else dict(environment),
            check=False,
        )
    except OSError as error:
        if isinstance(error, FileNotFoundError) and error.filename != folder:
            raise EngineError(
                f"there is no {words[0]} on this machine: give the command where the cluster is used from (a login node), or install its client"
            ) from error
        raise EngineError(
            f"cannot run {words[0]}: {error}; mend that, or give the command on another machine"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise EngineError(
            f"{words[0]} has not answered for {timeout_s:.0f} s: is what it talks to up? Try again"
        ) from error
    if done.returncode:
        output = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        meaning = next((meaning for word, meaning in _MEANS.items() if word in output), output)
        raise EngineError(f"{words[0]}: {meaning}")
    return done.stdout + (done.stderr if errors_too else "")


# Other launchers (torchrun, srun), detected by the environment: whether this process is a rank, and the domains of its node.


def in_slurm_step(environ: Mapping[str, str]) -> bool:
    """True in a process that srun started."""
    return "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" in environ


def slurm_domains(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the switches or blocks above this node, widest first, by the environment of a Slurm step; empty
    without topology/tree or block.

    SLURM_TOPOLOGY_ADDR is "core.spine1.leaf1.n1" with the pattern "switch.switch.switch.node"
    (slurm.schedmd.com/srun.html). Names with dots make more parts than the pattern has; then it is empty too.
    """
    parts = environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    pattern = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    return tuple(parts[:-1]) if len(parts) == len(pattern) and pattern[-1] == "node" else ()


def started_as_rank(environ: Mapping[str, str]) -> bool:
    """Return True under ``torchrun`` (or anything that sets RANK and WORLD_SIZE), or inside a Slurm step of
    several tasks.

    A shell from ``srun --pty`` is a step of one task and does not count as a rank.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return True
    return (
        "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ and environ.get("SLURM_NTASKS", "1") != "1"
    )
