"""The learning rate of each step, as a multiple of its peak.

It is computed on the host, with correctly rounded functions: the same bits with any C library.
"""

from __future__ import annotations

import math

from phalanx.hardware.portable.correctly_rounded import cos
from phalanx.run.spec import ScheduleSpec


def multiplier(schedule: ScheduleSpec, step: int, steps: int) -> float:
    """Return the factor of the peak learning rate at ``step``, from 1 to ``steps``.

    All kinds warm up linearly, reaching the peak at step ``warmup_steps``. Then "cosine" falls to the floor along half
    a cosine, reached at the last step; "wsd" stays at the peak until the last ``decay_fraction`` of the run, where it
    falls linearly to the floor; "constant" stays. After the last step it stays where it ended.
    """
    step = min(step, steps)
    if step <= schedule.warmup_steps:
        return step / schedule.warmup_steps
    if schedule.kind == "constant":
        return 1.0
    begin = schedule.warmup_steps
    if schedule.kind == "wsd":
        begin = max(begin, steps - round(schedule.decay_fraction * steps))
    if step <= begin:
        return 1.0
    progress = (step - begin) / max(1, steps - begin)
    shape = (1 + cos(math.pi * progress)) / 2 if schedule.kind == "cosine" else 1 - progress
    return schedule.floor + (1 - schedule.floor) * shape
