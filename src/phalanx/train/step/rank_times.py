"""Measures what a step shows of this rank alone, and brings the numbers of all ranks together once a window.

All that looks at the ranks side by side shares this one exchange: the stream ``ranks.bin`` and, in a fleet, the search for stragglers. It is
an all-reduce of a table in which each rank fills its own row: more bytes than gathering rows, but a tree passes it through 100,000
ranks in tens of hops where a ring of them needs 100,000. Nothing here reaches the weights.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from phalanx.hardware.local.device import held_memory_bytes, temperature_c
from phalanx.observe.ledger.ledger import NS_PER_S, Bucket
from phalanx.observe.rank_stream import RANK_COLUMNS, RankFrame
from phalanx.train.step.step import Stepper

_UNKNOWN = -1.0
"""In the table, where a rank does not know; no number is below zero, and NaN would trip a check for it."""


class RankTimes:
    """The measurements of one rank in one attempt.

    Args:
        stepper: What runs the steps.
        attempt: Its number.
        windows: The numbers of steps after which somebody wants to see all ranks; those that are 0 never.
    """

    def __init__(self, stepper: Stepper, attempt: int, windows: Collection[int]) -> None:
        self._ledger, self._mesh = stepper.ledger, stepper.built.model.mesh
        self._attempt = attempt
        self._windows = [steps for steps in windows if steps]
        self._slots = sum(current.counts for current in stepper.built.rounds)
        self._has_temperature = True
        self.slowest: int | None = None
        """The rank that computed longest in the newest window, if any rank knows its time."""
        self._compute_s: list[float] = []
        self._waited_s: list[float] = []
        self._computed_ns, self._waited_ns = self._totals_ns()

    def step_ended(self, step: int, *, last: bool = False) -> RankFrame | None:
        """Records a step; at the end of a window, and with ``last``, returns the window of all ranks.

        A collective call, with the same result on all ranks but for the time.
        """
        if not self._windows:
            return None
        computed_ns, waited_ns = self._totals_ns()
        self._compute_s.append((computed_ns - self._computed_ns) / NS_PER_S)
        self._waited_s.append((waited_ns - self._waited_ns) / NS_PER_S)
        self._computed_ns, self._waited_ns = computed_ns, waited_ns
        if not last and all(step % window for window in self._windows):
            return None
        table = self._exchange(self._mine())
        steps, self._compute_s, self._waited_s = len(self._compute_s), [], []
        columns = dict(zip(RANK_COLUMNS, table.T, strict=True))
        known = np.nan_to_num(columns["compute_s"], nan=-1.0)
        self.slowest = int(known.argmax()) if known.max() > 0 else None
        return RankFrame(step, time.time(), self._attempt, len(table), columns, steps)

    def _mine(self) -> list[float]:
        """This rank's row: its numbers in the order of ``RANK_COLUMNS``."""
        # A rank without a slot of its own computes another's again, or nothing: that says nothing about its speed.
        compute_s = statistics.median(self._compute_s) / self._slots if self._slots else _UNKNOWN
        heat_c = temperature_c(self._mesh.device) if self._has_temperature else None
        self._has_temperature = heat_c is not None  # what did not answer once is not asked again
        return [
            compute_s,
            statistics.fmean(self._waited_s),
            float(held_memory_bytes(self._mesh.device)),
            _UNKNOWN if heat_c is None else heat_c,
        ]

    def _exchange(self, mine: list[float]) -> NDArray[np.float32]:
        """The rows of all ranks, ``(ranks, columns)``."""
        with self._ledger.bucket(Bucket.COMM_EXPOSED_DP):
            table = torch.zeros((self._mesh.ranks, len(mine)), device=self._mesh.device)
            table[self._mesh.rank] = torch.tensor(mine)
            dist.all_reduce(table)  # every element comes from one rank, so this sum rounds nothing
            rows: NDArray[np.float32] = table.cpu().numpy()
        return np.where(rows < 0, np.float32(np.nan), rows)

    def _totals_ns(self) -> tuple[int, int]:
        """Time until now of this rank's own computing, and of waiting for samples."""
        totals = self._ledger.totals_ns()
        return totals.get(Bucket.STEP_COMPUTE, 0), totals.get(Bucket.STEP_DATA_WAIT, 0)
