"""Several runs side by side: settings and environment that differ, results, and whether they must have the same bits, and do.

Run files say what was asked for, the newest start of each what it ran on, rows what came out. Runs of one identity and the same data promise
the same bits; whether they keep it is seen in what they logged, number by number. Checkpoints, which hold every bit, are compared by
``phalanx diff``, since reading them takes as long as they are large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.observe.event_log import EventLogError
from phalanx.observe.logs.masking import run_file_mask
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx.run.identity import all_fields, identity
from phalanx.run.spec import RunSpec
from phalanx.train.compare.runs import Logged, bits, first_difference, flat, read_logged
from phalanx_watch.runs.index import RunIndex
from phalanx_watch.runs.row import RunRow

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
"""The columns of a row that are set side by side, and which value is the better one."""


@dataclass(frozen=True)
class Setting:
    """A field of the run file that differs."""

    path: str
    owner: str
    """The owner of the field: "run", "layout" or "fleet"."""
    values: tuple[object, ...]
    """The value in each run; ``None`` also where it has no such field."""


@dataclass(frozen=True)
class Fact:
    """Something that the runs recorded of their newest start, and that differs."""

    path: str
    values: tuple[object, ...]


@dataclass(frozen=True)
class Outcome:
    """A result in each run."""

    name: str
    values: tuple[object, ...]
    best: int | None
    """The place of the run with the best value; ``None`` if none is better, or nobody can say."""


@dataclass(frozen=True)
class SameBits:
    """Whether the runs must have the same bits, and whether what they logged has."""

    expected: bool
    """True if identity and data are the same."""
    parts_at: int | None
    """The first logged step at which a run differs from the first one; ``None`` if none does."""
    numbers: Mapping[str, tuple[float | None, ...]]
    """The numbers of that step that differ, in each run."""
    steps_compared: int
    """Steps that were logged by the first run and another one; the fewest, if there are several others."""
    why_not: tuple[str, ...]
    """Why the same bits are not expected."""


@dataclass(frozen=True)
class Comparison:
    """Runs side by side, in the order in which they were given."""

    runs: tuple[RunRow, ...]
    settings: tuple[Setting, ...]
    environment: tuple[Fact, ...]
    summary: tuple[Outcome, ...]
    same_bits: SameBits
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """The fields as a JSON object."""
        return asdict(self)


def compare(run_dirs: Sequence[Path]) -> Comparison:
    """Compares two or more runs. Nothing is written. Raises ``RunDirectoryError`` if one cannot be compared."""
    if not 2 <= len(run_dirs) <= MOST_RUNS:
        raise RunDirectoryError(
            f"{len(run_dirs)} runs cannot be compared: give 2 to {MOST_RUNS} run directories"
        )
    directories = [RunDirectory(path) for path in run_dirs]
    specs = [read_resolved(directory) for directory in directories]
    fingerprints = [str(directory.read_record().get("data_fingerprint", "")) for directory in directories]
    logs, notes = _logs(directories)
    rows = tuple(RunIndex([path]).rows()[0] for path in run_dirs)
    return Comparison(
        runs=rows,
        settings=tuple(_settings(specs)),
        environment=tuple(_environment(logs, fingerprints)),
        summary=tuple(_outcomes(rows)),
        same_bits=_same_bits(specs, fingerprints, logs),
        notes=tuple(notes),
    )


def _logs(directories: Sequence[RunDirectory]) -> tuple[list[Logged], list[str]]:
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
    tables = [
        {
            path: (mask.value(value), owner)
            for mask in (run_file_mask({"launch": {"environment": spec.launch.environment}}),)
            for path, (value, owner) in all_fields(spec)
        }
        for spec in specs
    ]
    owners = {path: owner for table in tables for path, (_, owner) in table.items()}
    found = []
    for path, owner in owners.items():
        values = tuple(table[path][0] if path in table else None for table in tables)
        if any(value != values[0] for value in values):
            found.append(Setting(path, owner, values))
    order = ("run", "layout", "fleet")
    return sorted(found, key=lambda setting: (order.index(setting.owner), setting.path))


def _environment(logs: Sequence[Logged], fingerprints: Sequence[str]) -> list[Fact]:
    tables = [{"data_fingerprint": key, **_facts(log)} for log, key in zip(logs, fingerprints, strict=True)]
    found = []
    for path in dict.fromkeys(path for table in tables for path in table):
        values = tuple(table.get(path) for table in tables)
        if any(value != values[0] for value in values):
            found.append(Fact(path, values))
    return found


def _facts(log: Logged) -> dict[str, object]:
    if log.started is None:
        return {}
    kept = {key: value for key, value in log.started.environment.items() if key != "data_fingerprint"}
    return dict(flat({"ranks": log.started.ranks, "device": log.started.device, **kept}))


def _outcomes(rows: Sequence[RunRow]) -> list[Outcome]:
    found = []
    for name, better in _RESULTS.items():
        values = tuple(getattr(row, name) for row in rows)
        numbers = [value for value in values if isinstance(value, float) and value == value]
        best = None
        if better and len(set(numbers)) > 1:
            best = values.index(min(numbers) if better == "least" else max(numbers))
        if any(value not in (None, "", 0) for value in values):
            found.append(Outcome(name, values, best))
    return found


def _same_bits(specs: Sequence[RunSpec], fingerprints: Sequence[str], logs: Sequence[Logged]) -> SameBits:
    identities = [identity(spec) for spec in specs]
    why_not = []
    if len(set(identities)) > 1:
        why_not.append("fields that belong to the run differ")
    if len(set(fingerprints)) > 1:
        why_not.append("they were trained on other data")
    parting: int | None = None
    least: int | None = None
    for other, spec in zip(logs[1:], specs[1:], strict=True):
        found, _, compared = first_difference(logs[0], other, held_out=spec.evaluation == specs[0].evaluation)
        least = compared if least is None else min(least, compared)
        if found is not None and (parting is None or found.step < parting):
            parting = found.step
    numbers: dict[str, tuple[float | None, ...]] = {}
    if parting is not None:
        steps = [log.steps.get(parting, {}) for log in logs]
        for name in dict.fromkeys(name for step in steps for name in step):
            values = tuple(step.get(name) for step in steps)
            if any(bits(value) != bits(values[0]) for value in values):
                numbers[name] = values
    return SameBits(not why_not, parting, numbers, least or 0, tuple(why_not))
