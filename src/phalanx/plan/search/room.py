"""Memory that a plan leaves free, beside how far the prediction of memory may be off.

A layout that fits by less than the error of the prediction may run out of memory on the first step, after the machines were paid for.
Where another layout with more room costs next to nothing it is taken instead, and where none does the plan says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

LEAST_ROOM = 0.04
"""Share of an accelerator's memory that a plan should leave free: more than the median error of predicted memory over the published runs
whose source says what it measured, which is 2.8 % (``docs/planner-accuracy.md``)."""
NO_ROOM = 0.006
"""Share below which nobody should go on as planned: the median error of the software whose memory is predicted best (torchtitan)."""
_FOR_ROOM = 0.03
"""The most that room may cost, as a share of the step and of what the search minimizes: the planner's choices are 2.1 % slower than
the best measured ones on average, and 4.2 % where it knows nothing of the software (``docs/planner-accuracy.md``), so what is as close cannot be
told apart."""


class Predicted(Protocol):
    """A layout's prediction, as far as a choice needs it: an ``Estimate`` is one."""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        ...

    @property
    def memory_bytes(self) -> float:
        """Bytes of the fullest rank."""
        ...

    @property
    def capacity_bytes(self) -> float:
        """Memory of one accelerator."""
        ...


def free_share(found: Predicted) -> float:
    """Share of the accelerator's memory that the fullest rank leaves free; below zero where the layout does not fit."""
    return 1 - found.memory_bytes / found.capacity_bytes


Layout = TypeVar("Layout", bound=Predicted)


def with_room_first(ranked: Sequence[Layout], key: Callable[[Layout], float]) -> tuple[Layout, ...]:
    """The plans of ``ranked``, ascending by ``key``; but one with room goes first if step and key are at most 3 % above the best's."""
    best, most = ranked[0], 1 + _FOR_ROOM
    for place, found in enumerate(ranked):
        near = key(found) <= most * key(best) and found.step_s <= most * best.step_s
        if near and free_share(found) >= LEAST_ROOM:
            return (found, *ranked[:place], *ranked[place + 1 :])
    return tuple(ranked)
