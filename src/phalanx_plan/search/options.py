"""Options of a search among layouts: limits, objective, and conditions of the user."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from phalanx_plan.workload.candidates import (
    LAYOUT_FIELDS,
    SCHEDULES,
    Bools,
    Candidates,
    Ints,
    layout_field,
)
from phalanx_plan.workload.stacks import TrainingJob

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
        """Return the mask of the candidates that meet it, along the axes of its field."""
        return self.compare(getattr(candidates, self.name), self.value)


def requirement(text: str, job: TrainingJob) -> Requirement:
    """Parse a condition such as ``tp<=8``. Fields of words take only ``=`` and ``!=``.

    Raises ``ValueError`` that lists the valid fields and values. Only whole numbers and the words of schedule and
    recompute can be compared.
    """
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
    target = layout_field(word)
    if target is not None and target.not_in_require:
        raise ValueError(f"{text!r}: {target.shown} cannot be required: {target.not_in_require}")
    words = {"schedule": SCHEDULES, "recompute": tuple(mode.name for mode in job.modes)}
    if target is not None and target.name in words:
        if value not in words[target.name] or sign not in ("=", "==", "!="):
            raise ValueError(f"{text!r}: {word} is one of {', '.join(words[target.name])}, with = or !=")
        return Requirement(text, target.name, _OPERATORS[sign], words[target.name].index(value))
    if target is None or not (value.isascii() and value.isdigit()):
        names = ", ".join(field.shown for field in LAYOUT_FIELDS if not field.not_in_require)
        raise ValueError(f"{text!r}: a whole number can be required of {names}")
    return Requirement(text, target.name, _OPERATORS[sign], int(value))


@dataclass(frozen=True)
class Options:
    """Limits and objective of a search. Empty tuples mean all legal values."""

    gpus: tuple[int, ...] = ()
    """Numbers of accelerators to plan for; empty means all of the cluster's."""
    least_use: float = 0.9
    """Fraction of the accelerators that a layout must use; the rest are spares."""
    micro_batches: tuple[int, ...] = ()
    stages_per_rank: tuple[int, ...] = ()
    """Stages on each rank to try with interleaved schedules."""
    precision: str = "bf16"
    offload: bool = True
    require: tuple[str, ...] = ()
    objective: str = "time"
    """Rank by seconds of a step ("time"), accelerator-hours of a step ("cost"), or accelerators ("gpus")."""
    top: int = 10
    finalists: int = 16
    """Number of layouts timed by the exact schedule; the best ``top`` are returned."""


def is_required(options: Options, name: str) -> bool:
    """True if there is a condition on the field ``name``."""
    words = {re.split(r"[<>=!]", text)[0].strip() for text in options.require}
    return any(field is not None and field.name == name for field in map(layout_field, words))


_MOST_SHOWN = 24


def nothing_left(
    need: Requirement, before: list[Requirement], candidates: Candidates, job: TrainingJob
) -> str:
    """Return the message that no layout meets ``need``.

    ``candidates`` are the layouts that meet the conditions ``before`` it; the message lists their values of its
    field, at most ``_MOST_SHOWN``.
    """
    values = np.unique(getattr(candidates, need.name)).tolist()
    words = {"schedule": SCHEDULES, "recompute": tuple(mode.name for mode in job.modes)}.get(need.name)
    shown = [str(words[value]) if words else f"{value:,}" for value in values]
    if len(shown) > _MOST_SHOWN:
        shown = [*shown[: _MOST_SHOWN // 2], "...", *shown[-_MOST_SHOWN // 2 :]]
    together = f", together with {', '.join(condition.text for condition in before)}," if before else ""
    return f"the condition {need.text}{together} leaves no layout: relax it; the remaining layouts have {', '.join(shown)}"
