"""The checkpoint of the best evaluation: which figure decides, and the best step so far.

The best step of earlier starts is read from the event file, since a step's checkpoint is saved before the step is evaluated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from phalanx.observe.event_log import EventLogError, read_events
from phalanx.observe.events import Evaluated, TaskEvaluated

HELD_OUT_LOSS = "loss"
"""The figure of held-out text, as ``evaluation.keep_best`` names it; those of tasks are ``TASK.FIGURE``."""

HIGHER_IS_BETTER = ("accuracy", "exact_match")
"""Beginnings of the names of figures that are better when they are higher; all others are better when they are lower."""


class BestStep(msgspec.Struct, frozen=True):
    """The step with the best value so far."""

    step: int
    value: float


@dataclass(frozen=True)
class BestRule:
    """Comparison of evaluations by one figure."""

    figure: str
    """``HELD_OUT_LOSS`` or ``TASK.FIGURE``."""

    def value(self, loss: float | None, tasks: Mapping[str, Mapping[str, float]]) -> float | None:
        """Return the rule's figure of an evaluation: held-out ``loss``, or "task.figure" of ``tasks``. ``None`` if the evaluation
        has none."""
        if self.figure == HELD_OUT_LOSS:
            return loss
        task, _, name = self.figure.rpartition(".")
        return tasks.get(task, {}).get(name)

    def better(self, step: int, value: float | None, best: BestStep | None) -> BestStep | None:
        """Return the best step, now that ``step`` has ``value``. Of equal values, and of those that are not finite, the earlier step stays."""
        if value is None or not math.isfinite(value):
            return best
        rises = self.figure.rpartition(".")[2].startswith(HIGHER_IS_BETTER)
        if best is None or (value > best.value if rises else value < best.value):
            return BestStep(step, value)
        return best

    def best(self, values: Mapping[int, float]) -> BestStep | None:
        """Return the best of the steps with these values; ``None`` if there are none, or none is finite."""
        best = None
        for step in sorted(values):
            best = self.better(step, values[step], best)
        return best

    def recorded(self, events: Path, sha256: str = "") -> dict[int, float]:
        """Return the value of each evaluated step in an event file; none if it cannot be read.

        Evaluations of a task count if its file had the hash ``sha256``.
        """
        values: dict[int, float] = {}  # of a step that was evaluated again, the newest
        with suppress(EventLogError):
            for event in read_events(events):
                match event.body:
                    case Evaluated(step=step, loss=loss) if self.figure == HELD_OUT_LOSS:
                        values[step] = loss
                    case TaskEvaluated(step=step, task=task, figures=figures) if event.body.sha256 == sha256:
                        if (value := self.value(None, {task: figures})) is not None:
                            values[step] = value
                    case _:
                        pass
        return values


def without_better(values: Mapping[int, float], best: BestStep | None) -> int:
    """Return the number of evaluations after the best one; of all, if none is the best."""
    return sum(best is None or step > best.step for step in values)
