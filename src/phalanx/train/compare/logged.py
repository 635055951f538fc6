"""What a run has logged, step by step, and the first step at which two runs logged other numbers.

Numbers are compared by their bits: JSON carries a float64 exactly, and a tolerance would hide what is looked for.

A run of 100,000 steps has as many lines, of which a few numbers each are wanted: these are read past everything else in a line, which takes a
tenth of the time of decoding whole events.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from phalanx.observe.event_log import EventLogError
from phalanx.observe.events import Evaluated, RunStarted, Step, decode
from phalanx.observe.lines import FileTail
from phalanx.run.directory.paths import RunDirectory

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
    """What is wanted of a step whose numbers are all finite."""

    step: int
    lr: float
    tokens: int
    loss: float
    grad_norm: float
    balance: float | None = None


class _EvaluatedLine(msgspec.Struct, tag_field="kind", tag="Evaluated"):
    """What is wanted of an evaluation whose loss is finite."""

    step: int
    loss: float


_DECODER = msgspec.json.Decoder(_StepLine | _EvaluatedLine)


def read_logged(directory: RunDirectory) -> Logged:
    """Reads the events of a run. Raises ``EventLogError`` if it has none, or they cannot be read."""
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
    """Note the numbers of a line; return the number of ranks from there on."""
    try:
        body: object = _DECODER.decode(line)
    except (
        ValueError,
        RecursionError,
    ):  # of another kind; not finite, which has a spelling of its own; or torn
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
    known = logged.steps.setdefault(step, {})
    changed = any(name in known and bits(known[name]) != bits(value) for name, value in numbers.items())
    if changed and step not in logged.twice:
        logged.twice.append(step)
    known.update(numbers)


def bits(number: float | None) -> bytes:
    """The 64 bits of a number; empty for none."""
    return b"" if number is None else struct.pack("<d", number)


def first_difference(
    one: Logged, other: Logged, *, held_out: bool = True
) -> tuple[StepDifference | None, int, int]:
    """The first step that both logged with other numbers, if any; the last one before with equal numbers (0: none); steps compared.

    Without ``held_out``, evaluations are left out.
    """
    names = (*_OF_STEP, HELD_OUT) if held_out else _OF_STEP
    last, compared = 0, 0
    for step in sorted(one.steps.keys() & other.steps.keys()):
        left, right = one.steps[step], other.steps[step]
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
