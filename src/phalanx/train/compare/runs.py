"""Comparison of two run directories by their files, and the verdict once both runs were replayed.

The files are run files, records, logged numbers and checkpoints. Numbers are compared by their bits: JSON carries a float64 exactly, and a
tolerance would hide the difference.

Nothing is computed again and nothing is written. ``phalanx.launch.local`` continues from here: it computes the step at which the runs part
once more.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from phalanx.checkpoint.committed.digest import TensorDifference, compare_step
from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.observe.event_log import EventLogError
from phalanx.observe.events import Evaluated, RunStarted, Step, decode
from phalanx.observe.lines import FileTail
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx.run.identity import FieldDifference, field_differences, identity
from phalanx.train.compare.observation import Compared, Replay, compare_replays

# The logged numbers of a run by step, and the first step at which two runs differ.
#
# A run of 100,000 steps has as many lines, and only a few numbers of each are needed. Decoding only these takes a tenth of the
# time of decoding complete events.

_OF_STEP = ("lr", "tokens", "loss", "grad_norm", "balance")
"""Fields of ``Step`` that belong to the run, in the order in which a step comes by them."""
HELD_OUT = "held-out loss"


@dataclass
class Logged:
    """The numbers that a run has logged."""

    steps: dict[int, dict[str, float | None]] = field(default_factory=dict)
    """By step and name of the number; of a step that several attempts computed, the newest one's."""
    ranks: dict[int, int] = field(default_factory=dict)
    """The number of ranks that computed each logged step."""
    started: RunStarted | None = None
    """The newest start."""
    twice: list[int] = field(default_factory=list)
    """Steps that were computed again after a restart, with other numbers than the first time: a promise broken within one run."""
    torn_lines: int = 0


@dataclass(frozen=True)
class StepDifference:
    """The first logged step at which numbers differ."""

    step: int
    numbers: Mapping[str, tuple[float | None, float | None]]
    """The numbers of both runs, by name, of those that differ."""


class _StepLine(msgspec.Struct, tag_field="kind", tag="Step"):
    """The fields that are read of a step whose numbers are all finite."""

    step: int
    lr: float
    tokens: int
    loss: float
    grad_norm: float
    balance: float | None = None


class _EvaluatedLine(msgspec.Struct, tag_field="kind", tag="Evaluated"):
    """The fields that are read of an evaluation whose loss is finite."""

    step: int
    loss: float


_DECODER = msgspec.json.Decoder(_StepLine | _EvaluatedLine)


def read_logged(directory: RunDirectory) -> Logged:
    """Read the losses, gradient norms and evaluations of a run's events by step. Lines that cannot be decoded are counted as torn,
    the last one aside.

    Raises ``EventLogError`` if there is no event file, or it cannot be read.
    """
    if not directory.events.exists():
        raise EventLogError(
            f"there is no event file {directory.events}; is it the directory of a run that has started?"
        )
    logged, ranks = Logged(), 0
    tail, has_more = FileTail(directory.events, instead_of_long=b"?"), True
    try:
        while has_more:
            batch = tail.next_batch()
            if batch.restarted:
                logged, ranks = Logged(), 0
            for _, line in batch.lines:
                ranks = _read_line(line, logged, ranks)
            has_more = batch.more
    except OSError as error:
        raise EventLogError(f"cannot read {directory.events}: {error.strerror}") from error
    # The last line may be being written.
    torn_lines = logged.torn_lines
    _read_line(tail.rest, logged, ranks)
    logged.torn_lines = torn_lines
    return logged


def _read_line(line: bytes, logged: Logged, ranks: int) -> int:
    """Add the numbers of an event line to ``logged``, and return the number of ranks from there on. A line that
    cannot be decoded is counted as torn; other events are ignored.
    """
    try:
        body: object = _DECODER.decode(line)
    except (
        ValueError,
        RecursionError,
    ):  # another kind of event, a number that is not finite, or a torn line
        try:
            body = decode(line).body
        except (ValueError, RecursionError):
            logged.torn_lines += 1
            return ranks
    match body:
        case RunStarted():
            logged.started, ranks = body, body.ranks
        case Step() | _StepLine():
            _note(logged, body.step, {name: getattr(body, name) for name in _OF_STEP})
            logged.ranks[body.step] = ranks
        case Evaluated() | _EvaluatedLine():
            _note(logged, body.step, {HELD_OUT: body.loss})
    return ranks


def _note(logged: Logged, step: int, numbers: Mapping[str, float | None]) -> None:
    """Merge the numbers of a step into ``logged``; new values replace old ones. List the step in ``logged.twice`` if
    a number's bits have changed.
    """
    values = logged.steps.setdefault(step, {})
    changed = any(name in values and bits(values[name]) != bits(value) for name, value in numbers.items())
    if changed and step not in logged.twice:
        logged.twice.append(step)
    values.update(numbers)


def bits(number: float | None) -> bytes:
    """The 64 bits of a number; empty for none."""
    return b"" if number is None else struct.pack("<d", number)


def first_difference(
    first: Logged, other: Logged, *, held_out: bool = True
) -> tuple[StepDifference | None, int, int]:
    """Return the first step whose numbers differ in their bits (``None`` if none does), the last equal step before it
    (0: none), and the number of steps compared.

    Only numbers that both runs logged are compared. Without ``held_out``, evaluations are left out.
    """
    names = (*_OF_STEP, HELD_OUT) if held_out else _OF_STEP
    last, compared = 0, 0
    for step in sorted(first.steps.keys() & other.steps.keys()):
        left, right = first.steps[step], other.steps[step]
        common = [name for name in names if name in left and name in right]
        differing = {
            name: (left[name], right[name]) for name in common if bits(left[name]) != bits(right[name])
        }
        if not common:
            continue
        compared += 1
        if differing:
            return StepDifference(step, differing), last, compared
        last = step
    return None, last, compared


OnCompared = Callable[[str, int, int], None]
"""Called with what is compared, how much of it is done, and of how much."""


class NothingToCompareError(RuntimeError):
    """Two runs have no logged step and no checkpoint in common."""


@dataclass(frozen=True)
class CheckpointDifference:
    """The oldest checkpoint that both runs hold and that differs."""

    step: int
    tensors: tuple[TensorDifference, ...]


@dataclass(frozen=True)
class RunComparison:
    """The point at which two runs part, by their run directories."""

    same_run: bool
    """True if identity and data are the same, so that every bit should be."""
    fields: tuple[FieldDifference, ...]
    record: Mapping[str, tuple[object, object]]
    """Facts of the runs' newest starts that differ, by dotted name."""
    numbers: StepDifference | None
    """The first logged step with other numbers."""
    steps_compared: int
    last_equal_step: int
    """The last step before ``numbers`` whose numbers are equal; 0 if there is none."""
    checkpoint: CheckpointDifference | None
    checkpoints_compared: tuple[int, ...]
    """The steps of checkpoints that both hold and that were read."""
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """True if everything that could be compared of what the runs computed is equal, in every bit."""
        return self.numbers is None and self.checkpoint is None

    @property
    def parts_at(self) -> int | None:
        """The first step known to differ; a checkpoint's step if only that is known."""
        steps = [difference.step for difference in (self.numbers, self.checkpoint) if difference is not None]
        return min(steps, default=None)

    @property
    def equal_checkpoints(self) -> tuple[int, ...]:
        """The steps before ``parts_at`` whose checkpoints both runs hold with the same bits."""
        end = self.parts_at
        return tuple(step for step in self.checkpoints_compared if end is None or step < end)


def compare_runs(
    first: Path, other: Path, on_progress: OnCompared = lambda _label, _done, _total: None
) -> RunComparison:
    """Compare the runs in two directories: fields, versions, logged numbers, and common checkpoints up to the first
    that differs.

    Held-out losses are compared only if both runs have equal evaluation fields. The result's notes list torn lines,
    event files and checkpoints that cannot be read, and steps that were computed again with other numbers.

    Raises ``RunDirectoryError`` if one is no run directory or its run file or record is damaged, and
    ``NothingToCompareError`` if the two have no logged step and no readable checkpoint in common.
    """
    directories = [RunDirectory(path) for path in (first, other)]
    specs = [read_resolved(directory) for directory in directories]
    records = [directory.read_record() for directory in directories]
    logs, notes = [], []
    for directory in directories:
        try:
            logs.append(read_logged(directory))
        except EventLogError as error:
            logs.append(Logged())
            notes.append(str(error))
    for directory, log in zip(directories, logs, strict=True):
        if log.torn_lines:
            notes.append(f"{directory.events}: {log.torn_lines} torn lines were passed over")
        if log.twice:
            steps = ", ".join(map(str, log.twice[:5])) + (", ..." if len(log.twice) > 5 else "")
            notes.append(
                f"{directory.path} computed steps again after a restart, with other numbers: {steps}"
            )
    held_out = specs[0].evaluation == specs[1].evaluation  # else other text was scored
    numbers, last, compared = first_difference(*logs, held_out=held_out)
    checkpoint, read = _checkpoints(directories, notes, on_progress)
    if not compared and not read:
        raise NothingToCompareError(
            f"{first} and {other} have no logged step and no checkpoint in common that can be read: there is nothing to compare"
            + "".join(f"\n  {note}" for note in notes)
        )
    data = [record.get("data_fingerprint") for record in records]
    facts = [{"data_fingerprint": key, **facts_of_start(log)} for key, log in zip(data, logs, strict=True)]
    return RunComparison(
        same_run=identity(specs[0]) == identity(specs[1]) and data[0] == data[1],
        fields=tuple(field_differences(*specs)),
        record=_differing(*facts),
        numbers=numbers,
        steps_compared=compared,
        last_equal_step=last,
        checkpoint=checkpoint,
        checkpoints_compared=read,
        notes=tuple(notes),
    )


def facts_of_start(log: Logged) -> dict[str, object]:
    """Return versions, machine, ranks and device of a run's newest start by dotted name, without the data's
    fingerprint; empty if it logged no start.
    """
    if log.started is None:
        return {}
    environment = {key: value for key, value in log.started.environment.items() if key != "data_fingerprint"}
    return dict(flat({"ranks": log.started.ranks, "device": log.started.device, **environment}))


def flat(table: Mapping[str, object], prefix: str = "") -> list[tuple[str, object]]:
    """Return the values of nested tables by dotted name, in their order; an empty table has none."""
    items: list[tuple[str, object]] = []
    for key, value in table.items():
        items += flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return items


def _differing(first: Mapping[str, object], other: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    keys = dict.fromkeys([*first, *other])
    return {key: (first.get(key), other.get(key)) for key in keys if first.get(key) != other.get(key)}


def _checkpoints(
    directories: list[RunDirectory], notes: list[str], on_progress: OnCompared
) -> tuple[CheckpointDifference | None, tuple[int, ...]]:
    """Return the oldest common checkpoint that differs, and the steps of those that were read up to there. Add a note for each that
    cannot be.

    Raises ``RunDirectoryError`` if checkpoints cannot be listed.
    """
    try:
        common = set.intersection(*(set(directory.committed_steps()) for directory in directories))
    except OSError as error:
        raise RunDirectoryError(f"cannot list checkpoints: {error}") from error
    read = []
    for step in sorted(common):
        first, other = (DiskTier(directory.checkpoints) for directory in directories)
        try:
            difference = compare_step(first, other, step, partial(on_progress, f"checkpoint of step {step}"))
        except CheckpointError as error:
            notes.append(f"the checkpoint of step {step} cannot be compared: {error}")
            continue
        read.append(step)
        if difference:
            return CheckpointDifference(step, tuple(difference)), tuple(read)
    return None, tuple(read)


# The verdict after replaying both runs: the module at which they diverge, or the run whose replay does not reproduce its log.
#
# If the replays differ, the cause still exists: another layout, kernel, version or collective. If they agree, but one run
# logged other numbers, its cause is gone: memory, a device, or code that has changed since.


class NothingToReplayError(RuntimeError):
    """Two runs cannot be replayed from a state that they have in common."""


@dataclass(frozen=True)
class Unconfirmed:
    """A number that a run logged and that its own replay does not give."""

    run: str
    """"A" or "B"."""
    step: int
    name: str
    logged: float
    replayed: float


@dataclass(frozen=True)
class ReplayResult:
    """The result of replaying two runs."""

    from_step: int
    to_step: int
    compared: Compared
    unconfirmed: tuple[Unconfirmed, ...]
    """The first of either run."""

    @property
    def sentence(self) -> str:
        """Return the conclusion for people: where the replays part, that they agree with the logs, or which run's log
        its own replay does not confirm.
        """
        if self.compared.parting is not None:
            return f"the replays part at {self.compared.parting}"
        if not self.unconfirmed:
            return "the replays agree in every bit, with each other and with what was logged"
        runs = " and ".join(dict.fromkeys(check.run for check in self.unconfirmed))
        return (
            f"the replays agree in every bit, but not with what {runs} logged: nothing in the layout or in today's code and "
            f"kernels parts the runs; look at the machine, memory and versions that {runs} had then"
        )


MOST_STEPS_FROM_THE_BEGINNING = 20
"""Most steps that are replayed from the initial weights unless ``from_start`` is set."""


def steps_to_replay(comparison: RunComparison, *, from_start: bool) -> tuple[int, int]:
    """Return the step whose state is restored (0: the beginning) and the last step to compute again, the first in
    which the runs differ.

    Raises ``NothingToReplayError`` if the runs do not part. It also does without an equal checkpoint, if more than
    ``MOST_STEPS_FROM_THE_BEGINNING`` steps were to be computed and ``from_start`` is false.
    """
    end = comparison.parts_at
    if end is None:
        raise NothingToReplayError("the runs do not part: there is no step to replay")
    newest = max(comparison.equal_checkpoints, default=0)
    if not newest and end > MOST_STEPS_FROM_THE_BEGINNING and not from_start:
        raise NothingToReplayError(
            f"the runs part at step {end}, and before it they have no checkpoint in common with equal bits: replay all of it with "
            "--from-start, or keep more checkpoints (checkpoint.keep_every)"
        )
    return newest, end


def judge_replays(
    replays: tuple[Replay, Replay], logs: tuple[Logged, Logged], steps: tuple[int, int]
) -> ReplayResult:
    """Compare two replays with each other and with the logs of runs A and B; of each log at most the first
    unconfirmed number is kept. ``steps`` is the result of ``steps_to_replay``.
    """
    unconfirmed = []
    for run, replay, log in zip("AB", replays, logs, strict=True):
        unconfirmed += unconfirmed_numbers(run, replay.numbers, log)[:1]
    return ReplayResult(*steps, compare_replays(*replays), tuple(unconfirmed))


def unconfirmed_numbers(
    run: str, numbers: Mapping[int, Mapping[str, float]], log: Logged
) -> list[Unconfirmed]:
    """Return the replayed numbers whose bits differ from those that ``run`` logged, by step. Numbers that were not logged are left out."""
    return [
        Unconfirmed(run, step, name, logged, value)
        for step, table in sorted(numbers.items())
        for name, value in table.items()
        if (logged := log.steps.get(step, {}).get(name)) is not None and bits(logged) != bits(value)
    ]
