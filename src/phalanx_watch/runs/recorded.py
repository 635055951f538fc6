"""Records of one run, read from its directory: what it was, on what it ran, from what, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.observe.event_log import EventLogError, read_events
from phalanx.observe.events import RunStarted
from phalanx.observe.goodput import Goodput, goodput
from phalanx.observe.record.machines import (
    Machine,
    MachineDifference,
    machine_differences,
    newest_machines,
)
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx.run.spec import RunSpec
from phalanx_watch.runs.index import RunIndex, is_run
from phalanx_watch.runs.probe import read_tail
from phalanx_watch.runs.row import RunRow

_HOUR_NS = 3600 * 10**9


@dataclass(frozen=True)
class Cost:
    """What a run has cost so far."""

    accelerator_hours: float
    price_per_hour: float

    @property
    def amount(self) -> float:
        """In the currency of the price."""
        return self.accelerator_hours * self.price_per_hour


@dataclass(frozen=True)
class Recorded:
    """The record of one run."""

    row: RunRow
    started: RunStarted | None
    """Its newest start."""
    machines: tuple[Machine, ...]
    """The machines of the newest start that left any."""
    differences: tuple[MachineDifference, ...]
    checkpoints: tuple[int, ...]
    """The steps with a checkpoint on disk."""
    patch: str
    """The file of the changes of its code against the commit; empty if there is none."""
    packages: str
    """The file of all packages that were installed; empty if there is none."""
    goodput: Goodput | None
    """Where its time went; ``None`` unless a price was given or the run file has one."""
    cost: Cost | None

    @property
    def environment(self) -> Mapping[str, object]:
        """What its newest start recorded of code, packages, machine, command and data."""
        return self.started.environment if self.started else {}

    def to_json(self) -> dict[str, object]:
        """The record as a JSON object."""
        table = asdict(self)
        table["differences"] = [one.sentence for one in self.differences]
        if self.cost is not None:
            table["cost"]["amount"] = self.cost.amount
        return table


def read_recorded(run_dir: Path, price: float = 0.0) -> Recorded:
    """Reads the record of a run. ``price`` is that of an accelerator for an hour; 0 takes that of the run file.

    Raises ``RunDirectoryError`` if it is no run directory.
    """
    directory = RunDirectory(run_dir)
    if not is_run(run_dir):
        raise RunDirectoryError(f"{run_dir} is no run directory: it has neither record.json nor run.toml")
    (row,) = RunIndex([run_dir]).rows()
    try:
        started = read_tail(directory.events).started
    except OSError as error:
        raise RunDirectoryError(f"cannot read {directory.events}: {error.strerror}") from error
    machines = newest_machines(directory)
    code = started.environment.get("code") if started else None
    patch = str(code.get("patch_sha256", ""))[:12] if isinstance(code, dict) else ""
    packages = next((one.packages_sha256[:12] for one in machines), "")
    checkpoints: list[int] = []
    with suppress(OSError):
        checkpoints = directory.committed_steps()
    spent = _spent(directory, price or _price(directory), row)
    return Recorded(
        row=row,
        started=started,
        machines=tuple(machines),
        differences=tuple(machine_differences(machines)),
        checkpoints=tuple(checkpoints),
        patch=_there(directory.code / f"{patch}.patch") if patch else "",
        packages=_there(directory.code / f"packages-{packages}.txt") if packages else "",
        goodput=spent[0] if spent else None,
        cost=spent[1] if spent else None,
    )


def _there(path: Path) -> str:
    return str(path) if path.exists() else ""


def _price(directory: RunDirectory) -> float:
    with suppress(RunDirectoryError):
        spec: RunSpec = read_resolved(directory)
        return spec.observe.accelerator_hour_price
    return 0.0


def _spent(directory: RunDirectory, price: float, row: RunRow) -> tuple[Goodput, Cost] | None:
    """Held time of all ranks, as the run's own ledger has it, and its price; spares are not in it."""
    if price <= 0:
        return None
    try:
        found = goodput(read_events(directory.events))
    except EventLogError:
        return None
    return found, Cost(found.held_ns / _HOUR_NS * max(1, row.ranks), price)
