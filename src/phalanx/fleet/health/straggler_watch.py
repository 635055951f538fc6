"""Finds stragglers while a run goes on, by the statistics of ``phalanx.fleet.health.stragglers``.

In a synchronous run all ranks take equally long for a step, so only computing time shows a straggler. All ranks get the same numbers of all
(``phalanx.train.step.meters``) and come to the same judgment; the straggler reports itself to its agent.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from phalanx.fleet.health.stragglers import (
    History,
    Straggler,
    StragglerRule,
    judge_window,
    roles,
)
from phalanx.observe.rank_stream import RankFrame
from phalanx.run.layout import Layout


class StragglerWatch:
    """Watches the ranks of one epoch, from one of them.

    Args:
        layout: Of the epoch.
        window_steps: Steps after which the ranks are judged; 0 means never.
    """

    def __init__(self, layout: Layout, window_steps: int) -> None:
        self._roles, self._window_steps, self._rule = roles(layout), window_steps, StragglerRule()
        self._history = History()
        self._times_s: list[NDArray[np.float32]] = []

    def look(self, frame: RankFrame) -> tuple[Straggler, ...]:
        """Takes in what the ranks measured; at the end of a window returns the stragglers, on all ranks the same."""
        if not self._window_steps:
            return ()
        self._times_s.append(frame.columns["compute_s"])
        if frame.step % self._window_steps:
            return ()
        # A rank without slots has no times.
        window_s, self._times_s = np.median(self._times_s, axis=0), []
        times_s = {rank: time_s for rank, time_s in enumerate(window_s.tolist()) if time_s > 0}
        self._history, found = judge_window(self._history, times_s, self._roles, self._rule)
        return found
