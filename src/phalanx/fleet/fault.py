"""Fault injection: the grammar of ``--fault``, parsed into values, and the faults of a run, given or drawn from a seed.

A sentence such as ``kill node 2 at step 30 in backward`` is parsed into a ``Fault``; printed, it is the same sentence again.
Nothing is done here: the saboteur in each worker carries faults out (``phalanx.fleet.saboteur``).

The grammar, one fault a line::

    kill worker N | node N | rank N | coordinator
    stop rank N                     (SIGSTOP; "for T s" later SIGCONT)
    slow rank N by Fx
    cut link node N node N
    delay link node N node N by T s
    corrupt gradient rank N | corrupt parameter rank N | corrupt snapshot rank N
    nan rank N                      (one slot's loss is not a number)
    fill disk
    ... at step N | from step N | at T s        (needed; "from" for what lasts)
    ... in forward | backward | reduction | optimizer | snapshot | commit | recovery
    ... for T s

``worker N`` is the N-th worker process of the fleet, spares included; ``rank N`` is the worker that holds rank N at that moment.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, cast, get_args

FaultPhase = Literal["forward", "backward", "reduction", "optimizer", "snapshot", "commit", "recovery"]
PHASES: tuple[FaultPhase, ...] = get_args(FaultPhase)

T = TypeVar("T")


class FaultError(ValueError):
    """A fault that cannot be parsed: the column, and the expected word."""

    def __init__(self, text: str, column: int, expected: str, word: str) -> None:
        self.text, self.column, self.expected = text, column, expected
        actual = f'found "{word}"' if word else "but the fault ends here"
        super().__init__(f"column {column}: expected {expected}, {actual}\n  {text}\n  {' ' * (column - 1)}^")


@dataclass(frozen=True)
class When:
    """The moment of a fault: a step or a time, and perhaps a phase of the step."""

    step: int | None = None
    """The step in which it happens, from 1; ``None`` if a time is given."""
    time_s: float | None = None
    """Seconds since the run started to train; ``None`` if a step is given."""
    phase: FaultPhase | None = None
    """The phase in which it happens; ``recovery`` is the first recovery from that moment on.

    ``None``: at once.
    """

    def __str__(self) -> str:
        moment = f"at step {self.step}" if self.step is not None else f"at {_number(self.time_s or 0)} s"
        return f"{moment} in {self.phase}" if self.phase else moment


KillTarget = Literal["worker", "node", "rank", "coordinator"]


@dataclass(frozen=True)
class Kill:
    """SIGKILL; of a node, to its agent and workers, so that its memory is lost too."""

    target: KillTarget
    number: int = 0

    def __str__(self) -> str:
        return "kill coordinator" if self.target == "coordinator" else f"kill {self.target} {self.number}"


@dataclass(frozen=True)
class Freeze:
    """SIGSTOP to a rank's worker: it hangs, and its sockets stay open."""

    rank: int

    def __str__(self) -> str:
        return f"stop rank {self.rank}"


@dataclass(frozen=True)
class Slow:
    """A rank computes slower by a factor."""

    rank: int
    factor: float

    def __str__(self) -> str:
        return f"slow rank {self.rank} by {_number(self.factor)}x"


@dataclass(frozen=True)
class CutLink:
    """No data passes between two nodes."""

    nodes: tuple[int, int]

    def __str__(self) -> str:
        return f"cut link node {self.nodes[0]} node {self.nodes[1]}"


@dataclass(frozen=True)
class DelayLink:
    """Messages between two nodes take longer."""

    nodes: tuple[int, int]
    delay_s: float

    def __str__(self) -> str:
        return f"delay link node {self.nodes[0]} node {self.nodes[1]} by {_number(self.delay_s)} s"


Corruptible = Literal["gradient", "parameter", "snapshot"]


@dataclass(frozen=True)
class Corrupt:
    """One bit of a rank's gradient, of its parameters, or of its snapshot, is flipped."""

    target: Corruptible
    rank: int

    def __str__(self) -> str:
        return f"corrupt {self.target} rank {self.rank}"


@dataclass(frozen=True)
class NanLoss:
    """The loss of one slot that a rank computes is not a number."""

    rank: int

    def __str__(self) -> str:
        return f"nan rank {self.rank}"


@dataclass(frozen=True)
class FillDisk:
    """Writing to the run directory fails for lack of space."""

    def __str__(self) -> str:
        return "fill disk"


FaultAction = Kill | Freeze | Slow | CutLink | DelayLink | Corrupt | NanLoss | FillDisk


@dataclass(frozen=True)
class Fault:
    """An action, its moment, and its duration."""

    action: FaultAction
    when: When
    for_s: float | None = None
    """Seconds after which it is over; ``None``: it stays."""

    def __str__(self) -> str:
        """Return the fault in the grammar of ``--fault``; a slow rank is slow "from step N", not at it."""
        lasting = f" for {_number(self.for_s)} s" if self.for_s is not None else ""
        when = str(self.when)
        if isinstance(self.action, Slow) and self.when.step is not None:
            when = when.replace("at step", "from step", 1)
        return f"{self.action} {when}{lasting}"


def _number(value: float) -> str:
    """Return the shortest text that parses back to ``value``."""
    return str(int(value)) if value == int(value) else repr(value)


class _Words:
    """The words of a fault, consumed in order."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._words = [(match.start() + 1, match.group()) for match in re.finditer(r"\S+", text)]
        self._next = 0

    @property
    def done(self) -> bool:
        return self._next == len(self._words)

    def wrong(self, expected: str) -> FaultError:
        """Return the error for an unexpected next word."""
        column, word = (len(self.text.rstrip()) + 2, "") if self.done else self._words[self._next]
        return FaultError(self.text, column, expected, word)

    def take(self, expected: str, read: Callable[[str], T | None]) -> T:
        """Consume the next word, parsed by ``read``. Raises ``FaultError`` if that returns ``None``."""
        value = None if self.done else read(self._words[self._next][1])
        if value is None:
            raise self.wrong(expected)
        self._next += 1
        return value

    def one_of(self, *words: str) -> str:
        return self.take(_either(words), lambda word: word if word in words else None)

    def count(self, expected: str, least: int = 0) -> int:
        """Take a whole number of at least ``least``. Raises as ``take`` does."""

        def read(word: str) -> int | None:
            return int(word) if re.fullmatch(r"[0-9]{1,9}", word) and int(word) >= least else None

        return self.take(expected, read)

    def factor(self) -> float:
        """Take a factor above 1, as "2x"."""

        def read(word: str) -> float | None:
            return _decimal(word[:-1]) if word.endswith("x") and (_decimal(word[:-1]) or 0) > 1 else None

        return self.take('a factor above 1, such as "2x"', read)

    def seconds(self) -> float:
        """Take a number of seconds above 0, and the "s" behind it."""
        value = self.take("a number of seconds above 0", lambda word: _decimal(word) or None)
        self.one_of("s")
        return value


def _either(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _decimal(word: str) -> float | None:
    return float(word) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?(e-[0-9]{1,2})?", word) else None


def parse_fault(text: str) -> Fault:
    """Parse a fault: an action, then its moment ("at", "from"), phase ("in") and duration ("for") in any order.

    Only the moment is required. Raises ``FaultError`` with the column and the expected word.
    """
    words = _Words(text)
    action = _action(words)
    moment: When | None = None
    phase: FaultPhase | None = None
    for_s: float | None = None
    while not words.done:
        open_parts = [*(["at", "from"] * (moment is None)), *(["in"] * (not phase)), *(["for"] * (not for_s))]
        if not open_parts:
            raise words.wrong("the end of the fault")
        match words.one_of(*open_parts):
            case "at":
                moment = _moment(words)
            case "from":
                words.one_of("step")
                moment = When(step=words.count("a step, from 1", least=1))
            case "in":
                name = words.one_of(*PHASES)
                phase = next(candidate for candidate in PHASES if candidate == name)
            case "for":
                for_s = words.seconds()
    if moment is None:
        raise words.wrong('when: "at step N", "from step N" or "at T s"')
    return Fault(action, When(moment.step, moment.time_s, phase), for_s)


def _action(words: _Words) -> FaultAction:
    """Parse the first words of a fault: what happens, and to which target. Raises ``FaultError``."""
    match words.one_of("kill", "stop", "slow", "cut", "delay", "corrupt", "nan", "fill"):
        case "kill":
            return _kill(words)
        case "stop":
            return Freeze(_numbered(words, "rank"))
        case "slow":
            rank = _numbered(words, "rank")
            words.one_of("by")
            return Slow(rank, words.factor())
        case "cut":
            return CutLink(_link(words))
        case "delay":
            nodes = _link(words)
            words.one_of("by")
            return DelayLink(nodes, words.seconds())
        case "corrupt":
            target = words.one_of(*get_args(Corruptible))
            return Corrupt(cast(Corruptible, target), _numbered(words, "rank"))
        case "nan":
            return NanLoss(_numbered(words, "rank"))
        case _:
            words.one_of("disk")
            return FillDisk()


def _kill(words: _Words) -> Kill:
    """Parse the target of "kill" and its number. Raises ``FaultError``."""
    target = cast(KillTarget, words.one_of(*get_args(KillTarget)))
    return Kill(target, 0 if target == "coordinator" else words.count(f"the number of a {target}"))


def _numbered(words: _Words, kind: str) -> int:
    """Take ``kind`` and a number behind it."""
    words.one_of(kind)
    return words.count(f"the number of a {kind}")


def _link(words: _Words) -> tuple[int, int]:
    """Parse "link node A node B" to two different numbers. Raises ``FaultError``."""
    words.one_of("link")
    first = _numbered(words, "node")
    words.one_of("node")

    def other(word: str) -> int | None:
        return int(word) if re.fullmatch(r"[0-9]{1,9}", word) and int(word) != first else None

    return first, words.take(f"the number of a node other than {first}", other)


def _moment(words: _Words) -> When:
    """Parse, after "at", "step N" (from 1) or "T s"."""

    def step_or_time(word: str) -> float | None:
        return -1.0 if word == "step" else _decimal(word)

    moment = words.take('"step N" or a number of seconds', step_or_time)
    if moment < 0:
        return When(step=words.count("a step, from 1", least=1))
    words.one_of("s")
    return When(time_s=moment)


# The faults of a run: from the command line, from files, or drawn from a seed over a given fleet. Drawn
# faults are a function of the seed, so that a failed run can be reproduced.


@dataclass(frozen=True)
class FleetShape:
    """The parts of a fleet that faults can name."""

    nodes: int
    """Nodes in all, spares included."""
    workers_per_node: int
    ranks: int
    steps: int
    """Number of steps.

    Faults happen in steps 2 to the last but one, so that there is state to lose and work to do.
    """
    losable_nodes: int = 0
    """The number of nodes that may be killed for good: with more, the run would wait for ever."""


def random_faults(seed: int, count: int, fleet: FleetShape) -> tuple[Fault, ...]:
    """Draw ``count`` faults that a run on ``fleet`` must survive with its bits unchanged, in order of steps.

    Kills of workers, of nodes (at most ``losable_nodes``) and of the coordinator, hangs for good, and links cut
    for 1 to 3 s, at random steps and phases. About a quarter happens in the step of an earlier draw. The same
    seed gives the same faults. Raises ``ValueError`` for a run of fewer than 3 steps.
    """
    if fleet.steps < 3:
        raise ValueError(f"random faults need a run of at least 3 steps, this one has {fleet.steps}")
    draw = _Draw(seed)
    steps = [2 + draw.below(fleet.steps - 2) for _ in range(count)]
    steps = [steps[draw.below(i)] if i and draw.below(4) == 0 else step for i, step in enumerate(steps)]
    faults, losable = [], fleet.losable_nodes
    for step in sorted(steps):
        fault = _random_fault(draw, fleet, step, may_lose_node=losable > 0)
        if isinstance(fault.action, Kill) and fault.action.target == "node":
            losable -= 1
        faults.append(fault)
    return tuple(faults)


def _random_fault(draw: _Draw, fleet: FleetShape, step: int, *, may_lose_node: bool) -> Fault:
    """Draw one fault at ``step``, in a random phase or none: a kill, a freeze, or a link cut for 1 to 3 s.

    Nodes are killed only if ``may_lose_node``, and links cut only with several nodes.
    """
    phase = draw.one_of((None, *PHASES))
    kinds = ["worker", "rank", "stop", "coordinator"]
    if may_lose_node:
        kinds.append("node")
    if fleet.nodes > 1:
        kinds.append("cut")
    when = When(step, None, phase)
    match draw.one_of(kinds):
        case "worker":
            return Fault(Kill("worker", draw.below(fleet.nodes * fleet.workers_per_node)), when)
        case "stop":
            return Fault(Freeze(draw.below(fleet.ranks)), when)
        case "coordinator":
            return Fault(Kill("coordinator"), when)
        case "node":
            return Fault(Kill("node", draw.below(fleet.nodes)), when)
        case "cut":
            first = draw.below(fleet.nodes)
            second = (first + 1 + draw.below(fleet.nodes - 1)) % fleet.nodes
            return Fault(CutLink((first, second)), when, for_s=float(1 + draw.below(3)))
        case _:
            return Fault(Kill("rank", draw.below(fleet.ranks)), when)


class _Draw:
    """Random choices that are the same in every version of Python, which guarantees that for ``random()``
    alone.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def below(self, limit: int) -> int:
        return int(self._random.random() * limit)

    def one_of(self, values: Sequence[T]) -> T:
        return values[self.below(len(values))]


def fault_marker(run_dir: Path, number: int) -> Path:
    """Return the path of the file that marks fault ``number`` of a run as injected."""
    return run_dir / "faults" / str(number)


def read_faults(arguments: Iterable[str], fleet: FleetShape) -> tuple[Fault, ...]:
    """Parse all ``--fault`` arguments: a fault, ``random:SEED:COUNT``, or a file with one fault a line.

    In files, empty lines and comments after ``#`` are ignored, and errors name file and line. Raises
    ``FaultError`` for a syntax error, ``ValueError`` if ``fleet`` lacks the target of a fault, and ``OSError``
    for a file that cannot be read.
    """
    return tuple(fault for argument in arguments for fault in _read_argument(argument, fleet))


def _read_argument(argument: str, fleet: FleetShape) -> tuple[Fault, ...]:
    """Return the faults of an argument: "random:SEED:COUNT", a file with a fault a line, or one fault.

    A word with a space is never a file. Raises ``FaultError`` or ``ValueError``.
    """
    if argument.startswith("random:"):
        match = re.fullmatch(r"random:([0-9]{1,20}):([0-9]{1,6})", argument)
        if not match:
            raise FaultError(argument, len("random:") + 1, 'SEED:COUNT, as in "random:7:20"', argument[7:])
        return random_faults(int(match[1]), int(match[2]), fleet)
    if " " not in argument and Path(argument).is_file():
        return tuple(_read_line(argument, *line, fleet) for line in _fault_lines(Path(argument)))
    return (_checked(parse_fault(argument), fleet),)


def _fault_lines(path: Path) -> list[tuple[int, str]]:
    """Return (number, text) of each line with text, without comments."""
    lines = [line.split("#")[0].rstrip() for line in path.read_text().splitlines()]
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _read_line(path: str, number: int, line: str, fleet: FleetShape) -> Fault:
    """Parse a line of a file of faults; errors name the file and the line."""
    try:
        return _checked(parse_fault(line), fleet)
    except ValueError as error:
        error.args = (f"{path}, line {number}, {error}",)
        raise


def _checked(fault: Fault, fleet: FleetShape) -> Fault:
    """Return ``fault``. Raises ``ValueError`` if ``fleet`` lacks its target."""
    for kind, number in _targets(fault.action):
        size = {"node": fleet.nodes, "rank": fleet.ranks, "worker": fleet.nodes * fleet.workers_per_node}[
            kind
        ]
        if number >= size:
            raise ValueError(f'"{fault}": there is no {kind} {number}; the fleet has {kind}s 0 to {size - 1}')
    return fault


def _targets(action: FaultAction) -> list[tuple[str, int]]:
    """Return (kind, number) of each node, rank or worker that an action names.

    Empty for the coordinator, and for faults without such a target.
    """
    match action:
        case Kill(target, number):
            return [] if target == "coordinator" else [(target, number)]
        case Freeze(rank) | Slow(rank, _) | Corrupt(_, rank) | NanLoss(rank):
            return [("rank", rank)]
        case CutLink(nodes) | DelayLink(nodes, _):
            return [("node", number) for number in nodes]
        case _:
            return []
