"""Small files that nodes and servers leave in a run directory: their hardware and software, and for as long as it lasts, their state.

Servers of the run's weights leave a note, and nodes whose processors are slowed down. A server refreshes its note for as long as it serves, so whoever watches the run sees it.
"""

from __future__ import annotations

import hashlib
import heapq
import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Self

import msgspec

from phalanx.observe.record.records import code_version, host_facts, package_versions
from phalanx.process.this_process import host_name
from phalanx.run.directory.files import create_once, read_small, write_atomically
from phalanx.run.directory.paths import RunDirectory

# The machines of a run: hardware, driver and libraries of each node, and their differences.
#
# Machines with different libraries or drivers may round differently, so that the bits depend on the machine that computed them.
# Probes refuse kernels that do (``train.measure.numerics``). The comparison here names the machines with other software or
# hardware, also where no probe found a difference.
#
# Each node writes a small file into the run directory, ``machines/NODE.json``, when its processes start, so a run's start needs
# no exchange for it. The list of all installed packages is long and nearly always the same, so it is stored once per content,
# as ``code/packages-HASH.txt``.

_NAMED = 6
_DRIVER = re.compile(r"Kernel Module\S*(?: for \S+)?\s+(\d[\w.]*)|\s(\d+\.\d+(?:\.\d+)?)\s")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True)
class Machine:
    """One node of a run, as it was when its processes started."""

    node: str
    host: str
    attempt: int
    """The start of the run that they belong to."""
    seen_s: float
    """Unix seconds."""
    platform: str = ""
    cpu_model: str = ""
    cores: int = 0
    memory_bytes: int = 0
    accelerators: tuple[str, ...] = ()
    """The name of each."""
    driver: str = ""
    """The version of the accelerators' driver."""
    code: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    packages_sha256: str = ""
    """The hash of the list of all installed packages with their versions."""

    def facts(self) -> dict[str, str]:
        """The facts that should be equal on all machines of a run, by name."""
        return {
            **{f"code.{name}": value for name, value in self.code.items()},
            **self.packages,
            "installed packages": self.packages_sha256[:12],
            "driver": self.driver,
            "accelerators": ", ".join(
                f"{count} x {name}" for name, count in sorted(Counter(self.accelerators).items())
            ),
            "processor": self.cpu_model,
            "cores": str(self.cores),
            "platform": self.platform,
        }


@dataclass(frozen=True)
class MachineDifference:
    """A fact in which the machines of a run differ."""

    fact: str
    common: str
    """The value that most have."""
    odd: Mapping[str, tuple[str, ...]]
    """The other values, with the names of the nodes that have them."""

    @property
    def sentence(self) -> str:
        """The difference as a sentence: nodes by their odd value, and the common one."""
        parts = []
        for value, nodes in self.odd.items():
            more = f" and {len(nodes) - _NAMED} more" if len(nodes) > _NAMED else ""
            parts.append(f"{', '.join(nodes[:_NAMED])}{more} with {value or 'none'}")
        return f"{self.fact}: {'; '.join(parts)}; the others with {self.common or 'none'}"


def this_machine(node: str, attempt: int) -> tuple[Machine, str]:
    """Return the machine of this process, named ``node`` or else its host's name, and the list of its installed
    packages.
    """
    host = host_facts()
    listed = installed_packages()
    code = {name: str(value) for name, value in code_version(dirty=False).items() if value is not None}
    made = Machine(
        node=node or host_name(),
        host=host_name(),
        attempt=attempt,
        seen_s=time.time(),
        platform=str(host["platform"]),
        cpu_model=str(host["cpu_model"]),
        cores=int(str(host["cores"])),
        memory_bytes=int(str(host["memory_bytes"])),
        accelerators=nvidia_accelerators(),
        driver=nvidia_driver(),
        code=code,
        packages=package_versions(),
        packages_sha256=hashlib.sha256(listed.encode()).hexdigest(),
    )
    return made, listed


def installed_packages() -> str:
    """All installed distributions, as ``pip install -r`` takes them, a line each, sorted."""
    versions = dict(filter(None, map(_name_and_version, metadata.distributions())))
    return "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))


def _name_and_version(distribution: metadata.Distribution) -> tuple[str, str] | None:
    """Return a distribution's name (lower case, hyphens) and version from the head of its metadata; None without
    both.

    ``importlib.metadata`` would parse the whole text, readme included, for each of the two.
    """
    head = (distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or "").partition("\n\n")[
        0
    ]
    name, version = (re.search(rf"^{key}: *(\S+)", head, re.MULTILINE) for key in ("Name", "Version"))
    return (name[1].lower().replace("_", "-"), version[1]) if name and version else None


def nvidia_accelerators(driver: Path = Path("/proc/driver/nvidia")) -> tuple[str, ...]:
    """Return the names of the GPUs that the kernel's driver lists, without starting CUDA; empty if there are none.

    A GPU without a model is "unknown".
    """
    names = []
    for place in sorted(driver.glob("gpus/*/information")):
        with suppress(OSError):
            model = re.search(r"^Model:\s*(.+)$", place.read_text(errors="replace"), re.MULTILINE)
            names.append(model[1].strip() if model else "unknown")
    return tuple(names)


def nvidia_driver(version: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Return the version of the kernel's driver for GPUs; empty if there is none, "unknown" if it cannot be parsed."""
    try:
        match = _DRIVER.search(version.read_text(errors="replace"))
    except OSError:
        return ""
    return (match[1] or match[2]) if match else "unknown"


def leave_machine(directory: RunDirectory, node: str, attempt: int) -> None:
    """Write this process's machine, in place of the node's earlier file, and its list of packages into the run
    directory.

    Raises ``OSError``.
    """
    machine, listed = this_machine(node, attempt)
    directory.machines.mkdir(exist_ok=True)
    directory.code.mkdir(exist_ok=True)
    create_once(directory.code / f"packages-{machine.packages_sha256[:12]}.txt", listed.encode())
    write_atomically(
        place_of(directory, machine.node),
        msgspec.json.format(msgspec.json.encode(asdict(machine)), indent=1),
        durable=False,
    )


def place_of(directory: RunDirectory, node: str) -> Path:
    """The file of a node's machine."""
    return directory.machines / f"{_UNSAFE.sub('_', node)[:120]}.json"


def read_machines(directory: RunDirectory, attempt: int | None = None) -> list[Machine]:
    """Return the machines of a run, in order of their files, or only those of start ``attempt``; unreadable files
    are left out.
    """
    machines = []
    with suppress(OSError):
        for name in sorted(os.listdir(directory.machines)):
            if name.endswith(".json") and not name.startswith("."):
                with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    machines.append(msgspec.json.decode(read_small(directory.machines / name), type=Machine))
    return [machine for machine in machines if attempt is None or machine.attempt == attempt]


def newest_machines(directory: RunDirectory) -> list[Machine]:
    """The machines of the newest start that left any."""
    machines = read_machines(directory)
    newest = max((machine.attempt for machine in machines), default=0)
    return [machine for machine in machines if machine.attempt == newest]


def machine_differences(machines: Sequence[Machine]) -> list[MachineDifference]:
    """Return the facts in which machines differ, each with the most common value, and the nodes by other values.

    The hash of all packages is left out if another fact differs on the same nodes.
    """
    tables = {machine.node: machine.facts() for machine in machines}
    differences = []
    for fact in dict.fromkeys(fact for table in tables.values() for fact in table):
        values = {node: table.get(fact, "") for node, table in tables.items()}
        counted = Counter(values.values())
        if len(counted) < 2:
            continue
        common = counted.most_common(1)[0][0]
        odd = {
            value: tuple(node for node, own in values.items() if own == value)
            for value in counted
            if value != common
        }
        differences.append(MachineDifference(fact, common, odd))
    return _without_echo(differences)


def _without_echo(differences: list[MachineDifference]) -> list[MachineDifference]:
    """Return the differences, without that in the hash of all packages if another fact differs on just the same
    nodes.
    """
    named = [difference.odd.values() for difference in differences if difference.fact != "installed packages"]
    nodes = {frozenset(node for group in groups for node in group) for groups in named}
    return [
        difference
        for difference in differences
        if difference.fact != "installed packages"
        or frozenset(node for group in difference.odd.values() for node in group) not in nodes
    ]


TOLD_EVERY_S = 5.0
SILENT_S = 30.0
"""A server whose note is older is silent: it was killed, or stands still."""
MOST_NOTES = 64
_MOST_BYTES = 1 << 16
_LATEST_S = 1e10
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Serving:
    """The state of a server. Counts are since its start."""

    model: str
    """Its name for clients."""
    url: str
    node: str
    since_s: float
    """Unix seconds, as ``seen_s``."""
    seen_s: float
    """When this was written."""
    state: str
    """ "serving", "draining" (it takes nothing new), or what is wrong."""
    numerics_id: str
    step: int | None
    """The step whose weights compute, where newer ones take over."""
    running: int
    """Texts that are computed; ``waiting`` are those that are not yet."""
    waiting: int
    pages_share: float
    """The share of the memory for keys and values that is in use."""
    finished: int
    """Texts that have ended; ``refused`` are requests that were answered with an error."""
    refused: int
    prompt_tokens: int
    generated_tokens: int
    first_token_s: float | None = None
    """Mean time from a request to its first token, and between two tokens of a text; ``None`` if there was none."""
    next_token_s: float | None = None

    def silent(self, now: float) -> bool:
        """True if the server has written nothing for more than ``SILENT_S`` seconds."""
        return now - self.seen_s > SILENT_S


class ServingNote:
    """Writer of a server's note, at intervals until it is closed."""

    def __init__(self, directory: RunDirectory, name: str, look: Callable[[], Serving]) -> None:
        """Set up the note of a server of the run in ``directory``; nothing is written yet.

        ``name`` distinguishes this server from others of the run, by machine and port for example. ``look`` returns
        its state.
        """
        plain = re.sub(r"[^\w.-]", "_", name)
        self._path = directory.serving / f"{plain}.json"
        self._look = look
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._write_until_closed, name="serving-note", daemon=True)

    def start(self) -> Self:
        """Start to write the note every 5 s, on a thread."""
        self._thread.start()
        return self

    def once(self) -> None:
        """Write the note now. Raises ``OSError``."""
        self._path.parent.mkdir(exist_ok=True)
        write_atomically(self._path, msgspec.json.encode(asdict(self._look())), durable=False)

    def close(self) -> None:
        """Stop writing, waiting at most 10 s for the thread, and delete the note."""
        self._over.set()
        self._thread.join(2 * TOLD_EVERY_S)
        with suppress(OSError):
            self._path.unlink()

    def _write_until_closed(self) -> None:
        """Write the note every 5 s until closed; the thread's loop.

        Failures are logged: of ``OSError`` the first in a row as a warning, others for debugging only.
        """
        failed = False
        while not self._over.is_set():
            try:
                self.once()
                failed = False
            except OSError as error:  # serving continues, and the next write may succeed
                if not failed:
                    _LOG.warning(
                        "what this server does cannot be noted in %s, and is tried again: %s",
                        self._path,
                        error.strerror or error,
                    )
                failed = True
            except Exception:
                _LOG.debug("what this server does is not known at present", exc_info=True)
            self._over.wait(TOLD_EVERY_S)


def _written_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # taken away meanwhile
        return 0


def read_serving(directory: RunDirectory) -> list[Serving]:
    """Return the notes of a run's servers, newest first: at most ``MOST_NOTES``. Unreadable notes are left out."""
    servers = []
    with suppress(OSError):
        # Killed servers leave their notes, so old notes must not displace those of running servers.
        for path in heapq.nlargest(MOST_NOTES, directory.serving.glob("*.json"), key=_written_ns):
            with suppress(OSError, msgspec.MsgspecError, RecursionError, UnicodeError):
                note = msgspec.json.decode(read_small(path, _MOST_BYTES), type=Serving)
                if all(0 <= t < _LATEST_S for t in (note.since_s, note.seen_s)):
                    servers.append(note)
    return sorted(servers, key=lambda note: note.seen_s, reverse=True)


# Notes of nodes whose processors are throttled during a run.
#
# A thread in one process of each node checks every ten seconds, and writes ``machines/NODE.throttled`` while there is a reason.
# It removes the note after a minute without one. Nodes exchange nothing, and no step waits. ``phalanx why`` reads the notes.


LOOK_S = 10.0
OVER_S = 60.0
"""A note is removed after so long without anything new; one that is older than twice this was left by a process that is gone."""
_SUFFIX = ".throttled"


class Throttling(msgspec.Struct, frozen=True):
    """The reasons why a node is slow."""

    node: str
    since_s: float
    """Unix seconds, as ``seen_s``."""
    seen_s: float
    """When it was seen last."""
    looks: int
    """Looks in which it was seen, since then."""
    reasons: tuple[str, ...] = msgspec.field(name="what")


class ThrottlingWatch:
    """Watch of this machine, at intervals until it is closed or the process ends."""

    def __init__(
        self,
        directory: RunDirectory,
        node: str,
        look: Callable[[], list[str]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Set up the watch of ``node``; nothing is looked at yet.

        ``look`` returns sentences on what slows this machine down
        (``phalanx.hardware.local.detect.Throttles.now``).
        """
        self._look = look
        self._place, self._node, self._clock = place_of(directory, node).with_suffix(_SUFFIX), node, clock
        self._note: Throttling | None = None
        self._over = threading.Event()

    def start(self) -> Self:
        """Start to look every 10 s, on a thread."""
        threading.Thread(target=self._watch, name="throttling", daemon=True).start()
        return self

    def close(self) -> None:
        """Stop looking; the note stays until it is old."""
        self._over.set()

    def _watch(self) -> None:
        """Look every 10 s until closed; the thread's loop. Errors are logged for debugging only."""
        while not self._over.is_set():
            try:
                self.once()
            except Exception:  # the run does not depend on it, and the next look may succeed
                _LOG.debug("whether this machine is throttled is not known", exc_info=True)
            self._over.wait(LOOK_S)

    def once(self) -> None:
        """Look once: write the note if the machine is slowed down, and delete it ``OVER_S`` after it last was.

        The first note of a period is also logged as a warning. Raises ``OSError``.
        """
        reasons, now = self._look(), self._clock()
        note = self._note
        if reasons:
            since_s, looks = (note.since_s, note.looks) if note else (now, 0)
            if note is None:
                _LOG.warning("this machine is slowed down: %s", "; ".join(reasons))
            self._note = Throttling(self._node, since_s, now, looks + 1, tuple(reasons))
            self._place.parent.mkdir(exist_ok=True)
            write_atomically(self._place, msgspec.json.encode(self._note), durable=False)
        elif note is not None and now - note.seen_s > OVER_S:
            self._note = None
            self._place.unlink(missing_ok=True)


def read_throttling(directory: RunDirectory, now: float) -> list[Throttling]:
    """Return the nodes that are slowed down at ``now`` (Unix seconds); notes that cannot be read, or are old, are left out."""
    nodes = []
    with suppress(OSError):
        for path in sorted(Path(directory.machines).glob(f"*{_SUFFIX}")):
            with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                note = msgspec.json.decode(read_small(path, 1 << 16), type=Throttling)
                times = note.since_s, note.seen_s
                possible = all(0 <= t < _LATEST_S for t in times) and now - note.seen_s <= 2 * OVER_S
                if possible and note.reasons:
                    nodes.append(note)
    return nodes
