"""Limits and objective of a search, and the conditions that a user sets on single fields of a layout."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from phalanx.plan.workload.candidates import SCHEDULES, Bools, Candidates, Ints
from phalanx.plan.workload.planned_layout import LAYOUT_FIELDS, layout_field
from phalanx.plan.workload.stacks import Job

_OPERATORS: dict[str, Callable[[Ints, int], Bools]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}


@dataclass(frozen=True)
class Requirement:
    """A condition of the user's on one field: "tp<=8"."""

    text: str
    name: str
    compare: Callable[[Ints, int], Bools]
    value: int

    def holds(self, candidates: Candidates) -> Bools:
        """Returns the mask of the candidates that meet it, in the axes that its field has."""
        return self.compare(getattr(candidates, self.name), self.value)


def requirement(text: str, job: Job) -> Requirement:
    """Reads a condition. Raises ``ValueError`` that names what can be required."""
    match = re.fullmatch(r"\s*(\w+)\s*(<=|>=|!=|==|=|<|>)\s*([\w+-]+)\s*", text)
    if match is None:
        several = (
            "; of several conditions, each has a --require of its own"
            if len(re.findall("[<>=]=?", text)) > 1
            else ""
        )
        raise ValueError(
            f"{text!r} is no condition: write a field, a comparison and a value, as in tp<=8{several}"
        )
    word, sign, value = match.groups()
    known = layout_field(word)
    if known is not None and known.not_in_require:
        raise ValueError(f"{text!r}: {known.shown} cannot be required: {known.not_in_require}")
    words = {"schedule": SCHEDULES, "recompute": tuple(mode.name for mode in job.modes)}
    if known is not None and known.name in words:
        if value not in words[known.name] or sign not in ("=", "==", "!="):
            raise ValueError(f"{text!r}: {word} is one of {', '.join(words[known.name])}, with = or !=")
        return Requirement(text, known.name, _OPERATORS[sign], words[known.name].index(value))
    if known is None or not (value.isascii() and value.isdigit()):
        names = ", ".join(field.shown for field in LAYOUT_FIELDS if not field.not_in_require)
        raise ValueError(f"{text!r}: a whole number can be required of {names}")
    return Requirement(text, known.name, _OPERATORS[sign], int(value))


@dataclass(frozen=True)
class Options:
    """Limits and objective of a search. Empty tuples mean all that is legal."""

    gpus: tuple[int, ...] = ()
    """Numbers of accelerators to plan for; empty means all of the cluster's."""
    least_use: float = 0.9
    """Fraction of the accelerators that a layout must use; the rest are spares."""
    micro_batches: tuple[int, ...] = ()
    stages_per_rank: tuple[int, ...] = ()
    """Stages on each rank that interleaved schedules are tried with."""
    precision: str = "bf16"
    offload: bool = True
    require: tuple[str, ...] = ()
    objective: str = "time"
    """Rank by seconds of a step ("time"), accelerator-hours of a step ("cost"), or accelerators ("gpus")."""
    top: int = 10
    finalists: int = 16
    """Number of layouts that are timed by the exact schedule, of which the best ``top`` are returned."""


def is_required(options: Options, name: str) -> bool:
    """True if a condition is on the field ``name``."""
    words = {re.split(r"[<>=!]", text)[0].strip() for text in options.require}
    return any(known is not None and known.name == name for known in map(layout_field, words))


_MOST_SHOWN = 24


def nothing_left(need: Requirement, before: list[Requirement], candidates: Candidates, job: Job) -> str:
    """The message that no layout meets a condition, with the values that its field has in those that met the conditions before."""
    values = np.unique(getattr(candidates, need.name)).tolist()
    words = {"schedule": SCHEDULES, "recompute": tuple(mode.name for mode in job.modes)}.get(need.name)
    shown = [str(words[value]) if words else f"{value:,}" for value in values]
    if len(shown) > _MOST_SHOWN:
        shown = [*shown[: _MOST_SHOWN // 2], "...", *shown[-_MOST_SHOWN // 2 :]]
    given = f", together with {', '.join(one.text for one in before)}," if before else ""
    return f"the condition {need.text}{given} leaves no layout: relax it; what is left has {', '.join(shown)}"
