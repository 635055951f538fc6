"""The machines of a run: hardware, driver and libraries of every node, and in what they differ.

Machines of one run that differ in a library or a driver may round differently, and then the bits depend on who computed what; probes refuse
the kernels that do (``train.measure.numerics``), and this module compares what lies behind it, and names the machines whose difference no probe has seen.

Each node leaves a small file in the run directory, ``machines/NODE.json``, when its processes start; nobody gathers anything while a run forms.
The list of all installed packages is long and nearly always the same: it is kept once for each content, ``code/packages-HASH.txt``.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

import msgspec

from phalanx.observe.record.records import code_version, host_facts, package_versions
from phalanx.run.directory.files import create_once, read_small, write_atomically
from phalanx.run.directory.paths import RunDirectory

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
            "accelerators": _counted(self.accelerators),
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
    """Return the machine of this process, and the list of its installed packages."""
    host = host_facts()
    listed = installed_packages()
    code = {name: str(value) for name, value in code_version(dirty=False).items() if value is not None}
    made = Machine(
        node=node or platform.node(),
        host=platform.node(),
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
    """From the head of its metadata alone: ``importlib.metadata`` parses the whole text, readme and all, for each of the two."""
    head = (distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or "").partition("\n\n")[
        0
    ]
    name, version = (re.search(rf"^{key}: *(\S+)", head, re.MULTILINE) for key in ("Name", "Version"))
    return (name[1].lower().replace("_", "-"), version[1]) if name and version else None


def nvidia_accelerators(driver: Path = Path("/proc/driver/nvidia")) -> tuple[str, ...]:
    """Return the names of the GPUs that the kernel's driver lists, without starting CUDA."""
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
    """Write this process's machine, and its list of packages, into the run directory. Raises ``OSError``."""
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
    """Return the machines of a run by node, or those of one start of it; files that cannot be read are left out."""
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
    """Return the facts in which machines differ, each with the nodes that are not like most."""
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
    """Without the hash of all packages where a package that differs is named with the same nodes."""
    named = [difference.odd.values() for difference in differences if difference.fact != "installed packages"]
    nodes = {frozenset(node for group in groups for node in group) for groups in named}
    return [
        difference
        for difference in differences
        if difference.fact != "installed packages"
        or frozenset(node for group in difference.odd.values() for node in group) not in nodes
    ]


def _counted(names: Iterable[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in sorted(Counter(names).items()))
