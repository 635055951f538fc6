"""Finds stragglers while a run goes on, by the statistics of ``phalanx.fleet.health.stragglers``.

In a synchronous run all ranks take equally long for a step, so only compute time shows a straggler. At the end of each window of
steps the ranks all-reduce theirs (one number each) and all come to the same judgment; the straggler reports itself to its agent.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from phalanx.fleet.health.stragglers import (
    History,
    Straggler,
    StragglerRule,
    judge_window,
    roles,
    window_time_s,
)
from phalanx.observe.ledger import NS_PER_S, Bucket
from phalanx.train.step.step import Stepper


class StragglerWatch:
    """Watches the ranks of one epoch, from one of them."""

    def __init__(self, stepper: Stepper, window_steps: int) -> None:
        self._stepper, self._window_steps, self._rule = stepper, window_steps, StragglerRule()
        self._mesh = stepper.built.model.mesh
        self._slots = sum(current.counts for current in stepper.built.rounds)
        self._history = History()
        self._times_s: list[float] = []
        self._computed_ns = self._compute_ns()

    def step_ended(self, step: int) -> tuple[Straggler, ...]:
        """Records a step; at the end of a window returns the stragglers. A collective call, with the same result everywhere."""
        computed_ns = self._compute_ns()
        self._times_s.append((computed_ns - self._computed_ns) / NS_PER_S / max(1, self._slots))
        self._computed_ns = computed_ns
        if step % self._window_steps:
            return ()
        times_s, self._times_s = self._exchange(window_time_s(self._times_s)), []
        self._history, found = judge_window(self._history, times_s, roles(self._mesh.layout), self._rule)
        return found

    def _compute_ns(self) -> int:
        return self._stepper.ledger.totals_ns().get(Bucket.STEP_COMPUTE.value, 0)

    def _exchange(self, mine_s: float) -> dict[int, float]:
        """All-reduces the ranks' times of a slot (s); ranks without slots have none."""
        times = torch.zeros(self._mesh.ranks, dtype=torch.float64, device=self._mesh.device)
        if self._slots:
            times[self._mesh.rank] = mine_s
        dist.all_reduce(times)
        return {rank: time_s for rank, time_s in enumerate(times.tolist()) if time_s > 0}
