"""Recordings of one run, read from its directory: settings, environment, origin and results; and several runs side by
side.

Run files have the settings, the newest start of each run its environment, and rows the results. Runs with the same
identity and data promise the same bits. The comparison checks that on all logged numbers. Checkpoints, which have
every bit, are compared by ``phalanx diff``, since reading them takes time in proportion to their size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from phalanx.observe.event_log import EventLogError, read_events
from phalanx.observe.events import RunStarted
from phalanx.observe.goodput import Goodput, goodput, rank_goodput
from phalanx.observe.logs.masking import run_file_mask
from phalanx.observe.record import notes as record_notes
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx.run.identity import all_fields, identity
from phalanx.run.spec import RunSpec
from phalanx.train.compare.runs import Logged, bits, facts_of_start, first_difference, read_logged
from phalanx_watch.runs.index import RunIndex, is_run
from phalanx_watch.runs.probe import read_tail
from phalanx_watch.runs.row import RunRow

_Value = TypeVar("_Value")
_HOUR_NS = 3600 * 10**9


@dataclass(frozen=True)
class SpentCost:
    """Cost of a run so far."""

    accelerator_hours: float
    price_per_hour: float

    @property
    def amount(self) -> float:
        """Amount in the currency of the price."""
        return self.accelerator_hours * self.price_per_hour


@dataclass(frozen=True)
class RunRecording:
    """Everything that was recorded of one run."""

    row: RunRow
    started: RunStarted | None
    """Newest start."""
    machines: tuple[record_notes.Machine, ...]
    """Machines of the newest start that recorded any."""
    differences: tuple[record_notes.MachineDifference, ...]
    checkpoints: tuple[int, ...]
    """Steps with a checkpoint on disk."""
    patch: str
    """File of the code's changes against the commit; empty if there is none."""
    packages: str
    """File of all installed packages; empty if there is none."""
    goodput: Goodput | None
    """Time account; None without a price."""
    cost: SpentCost | None

    @property
    def environment(self) -> Mapping[str, object]:
        """Newest start's record of code, packages, machine, command and data."""
        return self.started.environment if self.started else {}

    def to_json(self) -> dict[str, object]:
        """Return the recording as plain values: differences as sentences, and the cost with its amount."""
        table = asdict(self)
        table["differences"] = [difference.sentence for difference in self.differences]
        if self.cost is not None:
            table["cost"]["amount"] = self.cost.amount
        return table


def read_recorded(run_dir: Path, price: float = 0.0) -> RunRecording:
    """Read the recording of a run. ``price`` is that of an accelerator hour; 0 uses that of the run file.

    Without a price, goodput and cost are None. Raises ``RunDirectoryError`` if it is no run directory, or its events
    cannot be read.
    """
    directory = RunDirectory(run_dir)
    if not is_run(run_dir):
        raise RunDirectoryError(f"{run_dir} is no run directory: it has neither record.json nor run.toml")
    (row,) = RunIndex([run_dir]).rows()
    try:
        started = read_tail(directory.events).started
    except OSError as error:
        raise RunDirectoryError(f"cannot read {directory.events}: {error.strerror}") from error
    machines = record_notes.newest_machines(directory)
    code = started.environment.get("code") if started else None
    patch = str(code.get("patch_sha256", ""))[:12] if isinstance(code, dict) else ""
    packages = next((machine.packages_sha256[:12] for machine in machines), "")
    checkpoints: list[int] = []
    with suppress(OSError):
        checkpoints = directory.committed_steps()
    spent = _spent(directory, price or _price(directory))
    return RunRecording(
        row=row,
        started=started,
        machines=tuple(machines),
        differences=tuple(record_notes.machine_differences(machines)),
        checkpoints=tuple(checkpoints),
        patch=_there(directory.code / f"{patch}.patch") if patch else "",
        packages=_there(directory.code / f"packages-{packages}.txt") if packages else "",
        goodput=spent[0] if spent else None,
        cost=spent[1] if spent else None,
    )


def _there(path: Path) -> str:
    """Return a path as text; empty if nothing is there."""
    return str(path) if path.exists() else ""


def _price(directory: RunDirectory) -> float:
    """Return the run file's price of an accelerator-hour; 0 if it cannot be read."""
    with suppress(RunDirectoryError):
        spec: RunSpec = read_resolved(directory)
        return spec.observe.accelerator_hour_price
    return 0.0


def _spent(directory: RunDirectory, price: float) -> tuple[Goodput, SpentCost] | None:
    """Return the goodput account and the accelerator-hours of all ranks with their price, without spares.

    None without a price, or if the events cannot be read.
    """
    if price <= 0:
        return None
    try:
        events = list(read_events(directory.events))
    except EventLogError:
        return None
    return goodput(events), SpentCost(rank_goodput(events).total_ns / _HOUR_NS, price)


# Several runs side by side.


MOST_RUNS = 64
_RESULTS: Mapping[str, str] = {
    "state": "",
    "step": "",
    "loss": "least",
    "held_out_loss": "least",
    "bits_per_byte": "least",
    "tokens": "",
    "tokens_per_s": "most",
    "mfu": "most",
    "goodput": "most",
    "ranks": "",
    "weights_sha256": "",
}
"""Compared columns of a row, and which value is better."""


@dataclass(frozen=True)
class Setting:
    """A run-file field that differs."""

    path: str
    owner: str
    """Owner of the field: "run", "layout" or "fleet"."""
    values: tuple[object, ...]
    """Value in each run; None also if a run lacks the field."""


@dataclass(frozen=True)
class EnvironmentDifference:
    """A fact of the newest starts that differs between runs."""

    path: str
    values: tuple[object, ...]


@dataclass(frozen=True)
class Outcome:
    """A result in each run."""

    name: str
    values: tuple[object, ...]
    best: int | None
    """Index of the run with the best value; None if none is better."""


@dataclass(frozen=True)
class SameBits:
    """Comparison of bits: whether the runs must have the same, and whether their logs do."""

    expected: bool
    """True if identity and data are the same."""
    parts_at: int | None
    """First logged step at which a run differs from the first one; None if none does."""
    numbers: Mapping[str, tuple[float | None, ...]]
    """Numbers of that step that differ, in each run."""
    steps_compared: int
    """Number of steps that the first run and another one logged; the fewest, if there are several others."""
    why_not: tuple[str, ...]
    """Reasons why the same bits are not expected."""


@dataclass(frozen=True)
class ComparedRuns:
    """Comparison of runs, in the given order."""

    runs: tuple[RunRow, ...]
    settings: tuple[Setting, ...]
    environment: tuple[EnvironmentDifference, ...]
    summary: tuple[Outcome, ...]
    same_bits: SameBits
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """The fields as a JSON object."""
        return asdict(self)


def compare(run_dirs: Sequence[Path]) -> ComparedRuns:
    """Compare 2 to ``MOST_RUNS`` runs, read-only: settings, environment, results and logged bits.

    Raises ``RunDirectoryError`` for another number, or if one cannot be read.
    """
    if not 2 <= len(run_dirs) <= MOST_RUNS:
        raise RunDirectoryError(
            f"{len(run_dirs)} runs cannot be compared: give 2 to {MOST_RUNS} run directories"
        )
    directories = [RunDirectory(path) for path in run_dirs]
    specs = [read_resolved(directory) for directory in directories]
    fingerprints = [str(directory.read_record().get("data_fingerprint", "")) for directory in directories]
    logs, notes = _logs(directories)
    rows = tuple(RunIndex([path]).rows()[0] for path in run_dirs)
    return ComparedRuns(
        runs=rows,
        settings=tuple(_settings(specs)),
        environment=tuple(_environment(logs, fingerprints)),
        summary=tuple(_outcomes(rows)),
        same_bits=_same_bits(specs, fingerprints, logs),
        notes=tuple(notes),
    )


def _logs(directories: Sequence[RunDirectory]) -> tuple[list[Logged], list[str]]:
    """Return the logged numbers of each run, and notes on torn lines, repeated steps, and event files that cannot be
    read.

    An unreadable file counts as no numbers.
    """
    logs, notes = [], []
    for directory in directories:
        try:
            log = read_logged(directory)
        except EventLogError as error:
            log = Logged()
            notes.append(str(error))
        if log.torn_lines:
            notes.append(f"{directory.events}: {log.torn_lines} torn lines were passed over")
        if log.twice:
            notes.append(
                f"{directory.path} computed {len(log.twice)} steps again after a restart, with other numbers, the first at {log.twice[0]}"
            )
        logs.append(log)
    return logs, notes


def _settings(specs: Sequence[RunSpec]) -> list[Setting]:
    """Return the masked settings that differ between runs: the run's first, then the layout's and the fleet's."""
    tables = [
        {
            path: mask.value(value)
            for mask in (run_file_mask({"launch": {"environment": spec.launch.environment}}),)
            for path, (value, _) in all_fields(spec)
        }
        for spec in specs
    ]
    owners = {path: owner for spec in specs for path, (_, owner) in all_fields(spec)}
    settings = [Setting(path, owners[path], values) for path, values in _differences(tables)]
    order = ("run", "layout", "fleet")
    return sorted(settings, key=lambda setting: (order.index(setting.owner), setting.path))


def _environment(logs: Sequence[Logged], fingerprints: Sequence[str]) -> list[EnvironmentDifference]:
    """Return the facts of the starts that differ between runs, the data's fingerprint among them."""
    tables = [
        {"data_fingerprint": key, **facts_of_start(log)} for log, key in zip(logs, fingerprints, strict=True)
    ]
    return [EnvironmentDifference(path, values) for path, values in _differences(tables)]


def _outcomes(rows: Sequence[RunRow]) -> list[Outcome]:
    """Return the results that any run has, with the index of the best one where a best is defined and the numbers differ."""
    outcomes = []
    for name, better in _RESULTS.items():
        values = tuple(getattr(row, name) for row in rows)
        numbers = [value for value in values if isinstance(value, float) and value == value]
        best = None
        if better and len(set(numbers)) > 1:
            best = values.index(min(numbers) if better == "least" else max(numbers))
        if any(value not in (None, "", 0) for value in values):
            outcomes.append(Outcome(name, values, best))
    return outcomes


def _same_bits(specs: Sequence[RunSpec], fingerprints: Sequence[str], logs: Sequence[Logged]) -> SameBits:
    """Return whether equal bits are expected, and the first step at which a run's numbers differ from the first one's.

    Equal bits need equal identities and data. Steps compared are the fewest that the first run shares with another one.
    """
    identities = [identity(spec) for spec in specs]
    why_not = []
    if len(set(identities)) > 1:
        why_not.append("fields that belong to the run differ")
    if len(set(fingerprints)) > 1:
        why_not.append("they were trained on other data")
    differences = [
        first_difference(logs[0], other, held_out=spec.evaluation == specs[0].evaluation)
        for other, spec in zip(logs[1:], specs[1:], strict=True)
    ]
    parting = min((first.step for first, *_ in differences if first is not None), default=None)
    least = min((compared for *_, compared in differences), default=0)
    steps = [] if parting is None else [log.steps.get(parting, {}) for log in logs]
    return SameBits(not why_not, parting, dict(_differences(steps, bits)), least, tuple(why_not))


def _differences(
    tables: Sequence[Mapping[str, _Value]], key: Callable[[_Value | None], object] = lambda value: value
) -> Iterator[tuple[str, tuple[_Value | None, ...]]]:
    """Yield the names under which the tables differ by ``key``, with the value in each table, None where it is missing."""
    for name in dict.fromkeys(name for table in tables for name in table):
        values = tuple(table.get(name) for table in tables)
        if any(key(value) != key(values[0]) for value in values):
            yield name, values
