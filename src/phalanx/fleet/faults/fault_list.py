"""The faults of a run: from the command line, from files, or drawn from a seed over a given fleet.

Drawn faults are a function of the seed, so that a run that broke can be broken again.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from phalanx.fleet.faults.fault import (
    PHASES,
    Corrupt,
    CutLink,
    DelayLink,
    Fault,
    FaultAction,
    FaultError,
    Freeze,
    Kill,
    NanLoss,
    Slow,
    When,
    parse_fault,
)

T = TypeVar("T")


@dataclass(frozen=True)
class FleetShape:
    """The parts of a fleet that faults can name."""

    nodes: int
    """Nodes in all, spares included."""
    workers_per_node: int
    ranks: int
    steps: int
    """Faults happen in steps 2 to the last but one: there is something to lose, and something left to do."""
    losable_nodes: int = 0
    """The number of nodes that may be killed for good: with more gone the run would wait for ever."""


def random_faults(seed: int, count: int, fleet: FleetShape) -> tuple[Fault, ...]:
    """``count`` faults that a run on ``fleet`` must survive with its bits unchanged, in order of steps.

    Kills of workers, of nodes (as many as may be lost) and of the coordinator, hangs for good, and links cut for a while,
    at random steps and phases; a quarter of them happens in the step of another. The same seed gives the same faults.
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
    phase = draw.one_of((None, *PHASES))
    kinds = ["worker", "rank", "stop", "coordinator"]
    if may_lose_node:
        kinds.append("node")
    if fleet.nodes > 1:
        kinds.append("cut")
    match draw.one_of(kinds):
        case "worker":
            return Fault(
                Kill("worker", draw.below(fleet.nodes * fleet.workers_per_node)), When(step, None, phase)
            )
        case "stop":
            return Fault(Freeze(draw.below(fleet.ranks)), When(step, None, phase))
        case "coordinator":
            return Fault(Kill("coordinator"), When(step, None, phase))
        case "node":
            return Fault(Kill("node", draw.below(fleet.nodes)), When(step, None, phase))
        case "cut":
            first = draw.below(fleet.nodes)
            second = (first + 1 + draw.below(fleet.nodes - 1)) % fleet.nodes
            return Fault(CutLink((first, second)), When(step, None, phase), for_s=float(1 + draw.below(3)))
        case _:
            return Fault(Kill("rank", draw.below(fleet.ranks)), When(step, None, phase))


class _Draw:
    """Random choices that stay the same in every version of Python: ``random()`` alone is promised to."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def below(self, limit: int) -> int:
        return int(self._random.random() * limit)

    def one_of(self, values: Sequence[T]) -> T:
        return values[self.below(len(values))]


def fault_marker(run_dir: Path, number: int) -> Path:
    """The file that is made when fault ``number`` of a run happens."""
    return run_dir / "faults" / str(number)


def read_faults(arguments: Iterable[str], fleet: FleetShape) -> tuple[Fault, ...]:
    """The faults of all ``--fault`` arguments: a fault, ``random:SEED:COUNT``, or a file with one fault a line.

    In files, empty lines and what follows a ``#`` are ignored. Raises ``FaultError`` for what cannot be read (naming file and
    line), and ``ValueError`` for a fault of something that ``fleet`` does not have.
    """
    return tuple(fault for argument in arguments for fault in _read_argument(argument, fleet))


def _read_argument(argument: str, fleet: FleetShape) -> tuple[Fault, ...]:
    if argument.startswith("random:"):
        found = re.fullmatch(r"random:([0-9]{1,20}):([0-9]{1,6})", argument)
        if not found:
            raise FaultError(argument, len("random:") + 1, 'SEED:COUNT, as in "random:7:20"', argument[7:])
        return random_faults(int(found[1]), int(found[2]), fleet)
    if " " not in argument and Path(argument).is_file():
        return tuple(_read_line(argument, *line, fleet) for line in _fault_lines(Path(argument)))
    return (_checked(parse_fault(argument), fleet),)


def _fault_lines(path: Path) -> list[tuple[int, str]]:
    lines = [line.split("#")[0].rstrip() for line in path.read_text().splitlines()]
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _read_line(path: str, number: int, line: str, fleet: FleetShape) -> Fault:
    try:
        return _checked(parse_fault(line), fleet)
    except ValueError as error:
        error.args = (f"{path}, line {number}, {error}",)
        raise


def _checked(fault: Fault, fleet: FleetShape) -> Fault:
    """``fault``, if ``fleet`` has what it is about."""
    for kind, number in _targets(fault.action):
        there = {"node": fleet.nodes, "rank": fleet.ranks, "worker": fleet.nodes * fleet.workers_per_node}[
            kind
        ]
        if number >= there:
            raise ValueError(
                f'"{fault}": there is no {kind} {number}; the fleet has {kind}s 0 to {there - 1}'
            )
    return fault


def _targets(action: FaultAction) -> list[tuple[str, int]]:
    match action:
        case Kill(target, number):
            return [] if target == "coordinator" else [(target, number)]
        case Freeze(rank) | Slow(rank, _) | Corrupt(_, rank) | NanLoss(rank):
            return [("rank", rank)]
        case CutLink(nodes) | DelayLink(nodes, _):
            return [("node", number) for number in nodes]
        case _:
            return []
