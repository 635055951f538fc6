"""Turns all that watches a run off and on within its own processes, for blocks of steps, and notes the time of each block.

``bench.watch.everything_on`` has every rank of a run load this module (by a ``sitecustomize``; the product has none of it). Which steps are watched follows
from their number alone, so that all ranks agree. In a block that is not watched a rank keeps no ledger, measures no waiting in collectives, exchanges no
times with the other ranks, looks for no spike, throttling or request for a profile, and writes no event, so that nothing is appended, indexed or given
to a tracker; and rank 0 stops the watching processes outside (SIGSTOP). In a watched block all this runs as usual, and each rank logs a line a step.

Blocks come in units of four, off and on in an order that is turned around from unit to unit (on off off on, off on on off), so that slow drifts
weigh on both equally.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ORDER = (True, False, False, True)
BESIDE = "beside.json"
"""File with the watching processes, for which rank 0 waits before the first block."""
_WORKER = "phalanx.train.lifecycle.worker"


@dataclass(frozen=True)
class Order:
    """First step and length of blocks."""

    folder: str
    first_step: int
    """Steps before it are watched, and no part of a block."""
    steps: int
    """Steps of a block; the first of them is not measured."""
    idle: bool = False
    """True if no block is watched: the difference of both kinds is then the error of the measurement."""

    def block(self, step: int) -> int:
        """Return the block of a step; below 0 before the first."""
        return (step - self.first_step) // self.steps


def counts_as_on(block: int) -> bool:
    """Return True if a block is a watched one."""
    unit, place = divmod(block, len(ORDER))
    return ORDER[place] ^ bool(unit % 2)


@dataclass
class Block:
    """Time of one rank for the measured steps of a block, which are all but the first."""

    number: int
    steps: int
    wall_s: float
    processor_s: float
    """Processor time of all threads of its process."""


@dataclass
class Turns:
    """The turns of one rank."""

    order: Order
    rank: int
    on: bool = True
    block: int = -1
    beside: list[int] = field(default_factory=list)
    ends: list[tuple[float, float]] = field(default_factory=list)
    """The clock and the processor time at the end of each step of the block."""

    def begins(self, step: int) -> None:
        """Turn the watching on or off if a block begins."""
        block = self.order.block(step)
        if block == self.block or block < 0:
            return
        if self.block < 0 and self.rank == 0:
            self.beside = self._wait_for_beside()
        self.block, self.ends = block, []
        on = counts_as_on(block) and not self.order.idle
        if on != self.on and self.rank == 0:
            for pid in self.beside:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT if on else signal.SIGSTOP)
        self.on = on

    def ended(self) -> None:
        """Note the end of a step, and write the block's time at its last step."""
        self.ends.append((time.perf_counter(), time.process_time()))
        if self.block >= 0 and len(self.ends) == self.order.steps:
            wall_s, processor_s = (
                last - first for last, first in zip(self.ends[-1], self.ends[0], strict=True)
            )
            block = Block(self.block, len(self.ends) - 1, wall_s, processor_s)
            with (Path(self.order.folder) / f"rank-{self.rank}.jsonl").open("a") as file:
                file.write(json.dumps(asdict(block)) + "\n")

    def _wait_for_beside(self) -> list[int]:
        path = Path(self.order.folder) / BESIDE
        while not path.exists():
            time.sleep(0.05)
        return [int(pid) for pid in json.loads(path.read_text())]


def blocks_of(folder: Path, rank: int) -> list[Block]:
    """Return the blocks that a rank has written so far."""
    path = folder / f"rank-{rank}.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [Block(**json.loads(line)) for line in lines]


def install(order: Order) -> None:
    """Let this process turn its watching off and on, if it is a rank."""
    if _WORKER not in sys.orig_argv:
        return
    from phalanx.hardware.local.device import CommClock
    from phalanx.observe.ledger import Ledger
    from phalanx.observe.profile_request import ProfileDesk
    from phalanx.observe.record.notes import ThrottlingWatch
    from phalanx.train.lifecycle.loop import Trainer
    from phalanx.train.lifecycle.observers import StepLog
    from phalanx.train.lifecycle.progress import TrainProgress
    from phalanx.train.profile.recording import Recording
    from phalanx.train.step.meters import RankTimes

    turns = Turns(order, int(os.environ["PHALANX_RANK"]))
    log = logging.getLogger("phalanx.bench")
    compute, conclude = Trainer._compute, Trainer._conclude

    def only_when_on(owner: Any, name: str, instead: Callable[[], Any] = lambda: None) -> None:
        original = getattr(owner, name)

        def either(*words: Any, **named: Any) -> Any:
            return original(*words, **named) if turns.on else instead()

        setattr(owner, name, either)

    def turned_step(trainer: Trainer, number: int) -> Any:
        turns.begins(number)
        return compute(trainer, number)

    def noted_conclusion(trainer: Trainer, report: Any) -> bool:
        stops = conclude(trainer, report)
        if turns.on:
            log.info("step %d is done: loss %.4f", trainer._progress.step, report.loss)
        turns.ended()
        return stops

    only_when_on(Ledger, "switch")
    only_when_on(Ledger, "bucket", nullcontext)
    only_when_on(CommClock, "measure", nullcontext)
    only_when_on(RankTimes, "step_ended")
    only_when_on(TrainProgress, "spike")
    only_when_on(ThrottlingWatch, "once")
    only_when_on(ProfileDesk, "pending", lambda: False)
    only_when_on(Recording, "before_step")
    only_when_on(StepLog, "after_step")
    Trainer._compute, Trainer._conclude = turned_step, noted_conclusion  # type: ignore[method-assign]


SITE = """
import os, sys, traceback
sys.path[:0] = {paths!r}
try:
    from bench.watch.watched_in_turns import Order, install
    install(Order(**{order!r}))
except BaseException:  # otherwise Python would continue without
    traceback.print_exc()
    os._exit(1)
del sys.path[:{count}]
"""


def environment_of(order: Order) -> dict[str, str]:
    """Return variables with which every rank below loads this module."""
    site = Path(order.folder) / "site"
    site.mkdir(parents=True, exist_ok=True)
    root = Path(__file__).parents[2]
    paths = [str(root), str(root / "src")]
    (site / "sitecustomize.py").write_text(SITE.format(paths=paths, order=asdict(order), count=len(paths)))
    return {"PYTHONPATH": os.pathsep.join((str(site), os.environ.get("PYTHONPATH", "")))}
