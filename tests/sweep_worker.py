"""Real workers that break right before a collective of a test's choice.

They are ``phalanx.fleet.node.rank.worker`` itself, in which a dispatch mode counts the operations that talk to other ranks. Which of
them is to break is written in the run directory; each break happens once in a run, so a step that is computed again after it
does not break again. A sweep over all collectives of a step needs hundreds of workers: they are forked (``forked_python``).
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal

from torch.autograd import graph
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.fleet.node.rank import worker, worker_main
from phalanx.fleet.node.worker_link import JoinEpoch
from phalanx.parallel.pipeline import StageLinks
from phalanx.parallel.reduction import reproducible_sums, tree
from phalanx.parallel.reduction.reduce_scatter import TreeReduceScatter
from phalanx.run.directory.paths import RunResult
from phalanx.train.evaluation.scoring import evaluate
from phalanx.train.lifecycle.loop import Trainer
from phalanx.train.lifecycle.saving import Saving
from phalanx.train.step.slot import LoopRunner, PipelineRunner
from phalanx.train.step.state import weights_sha256
from phalanx.train.step.step import Stepper

START, END = "start", "end"
"""Collectives before the first step of an epoch, and after the last step of the run."""

_SILENT = ("wait_tensor", "_wrap_tensor_autograd")
"""Operations that say nothing to other ranks."""
_PHASES = {
    inspect.unwrap(function).__code__: phase
    for function, phase in {
        evaluate: "evaluation",
        weights_sha256: "hash of the weights",
        Saving.settle: "checkpoint",
        reproducible_sums.norm: "clipping",
        Stepper._reduce_losses: "loss",
        Stepper._balance_experts: "balance",
        TreeReduceScatter.__call__: "reduction",
        tree.exchange: "reduction",
        graph._engine_run_backward: "backward",
        StageLinks.__init__: "connecting",
        PipelineRunner.gradients: "forward",
        LoopRunner.gradients: "forward",
    }.items()
}
"""The phase that a rank is in, by the innermost of these functions on its stack; named as objects, so that a rename shows."""


@dataclass(frozen=True)
class Break:
    """A moment at which a rank breaks: right before its ``call``-th collective (from 0) of ``place``."""

    place: str
    """"step N", or one of ``START`` and ``END``."""
    rank: int
    call: int
    how: Literal["die", "cut"]
    """Get SIGKILL, or lose the connections to the other ranks."""


def step_place(step: int) -> str:
    """The place of a step, with the evaluation after it."""
    return f"step {step}"


def write_breaks(run_dir: Path, breaks: list[Break]) -> None:
    """Says what is to break; before workers are started."""
    _committed_dir(run_dir).mkdir(parents=True)
    _breaks_file(run_dir).write_text(json.dumps([asdict(one) for one in breaks]))


def committed(run_dir: Path) -> int:
    """How many breaks have happened."""
    return len(list(_committed_dir(run_dir).iterdir()))


def seen_collectives(run_dir: Path, rank: int) -> dict[str, list[str]]:
    """The phase and name of each collective of an undisturbed run, in order, by place."""
    found: dict[str, list[str]] = json.loads(_seen_file(run_dir, rank).read_text())
    return found


def _breaks_file(run_dir: Path) -> Path:
    return run_dir / ".sweep/breaks.json"


def _committed_dir(run_dir: Path) -> Path:
    return run_dir / ".sweep/committed"


def _seen_file(run_dir: Path, rank: int) -> Path:
    return run_dir / f".sweep/collectives-{rank}.json"


class Breaker(TorchDispatchMode):
    """Counts the collectives of this process by place, and breaks it before those that it was told."""

    def __init__(self, run_dir: Path, cut: Callable[[], None]) -> None:
        super().__init__()
        self._run_dir, self._cut, self._rank = run_dir, cut, -1
        breaks = json.loads(_breaks_file(run_dir).read_text())
        self._numbers = {Break(**one): number for number, one in enumerate(breaks)}
        self._recording = not breaks
        self._seen: dict[str, list[str]] = {}

    def enters(self, rank: int) -> None:
        """This process becomes a rank."""
        self._rank, self._seen = rank, {}
        self.at(START)

    def at(self, place: str) -> None:
        """The next collective is the first of ``place``."""
        self._place, self._calls = place, self._seen.setdefault(place, [])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and name not in _SILENT:
            self._before(name)
        return func(*args, **(kwargs or {}))

    def _before(self, name: str) -> None:
        call = len(self._calls)
        self._calls.append(f"{_phase(sys._getframe())}: {name}" if self._recording else "")
        for how in ("die", "cut"):
            number = self._numbers.get(Break(self._place, self._rank, call, how))
            if number is not None and self._first(number):
                self._break(how)

    def _first(self, number: int) -> bool:
        with suppress(FileExistsError):
            (_committed_dir(self._run_dir) / str(number)).touch(exist_ok=False)
            return True
        return False

    def _break(self, how: str) -> None:
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        self._cut()

    def save(self) -> None:
        """Writes down what was seen, if this is an undisturbed run."""
        if self._recording:
            _seen_file(self._run_dir, self._rank).write_text(json.dumps(self._seen))


def _phase(frame: FrameType | None) -> str:
    return next((_PHASES[code] for code in _stack(frame) if code in _PHASES), "setting up")


def _stack(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


class SweptWorker(worker.RankWorker):
    """A worker whose epochs run under a ``Breaker``."""

    def _train(self, bind: JoinEpoch) -> RunResult | None:
        breaker = Breaker(self._args.run_dir, self._cut)
        breaker.enters(bind.rank)
        run, finish = Stepper.run, Trainer._finish

        def run_here(stepper: Stepper, number: int, *args: Any, **kwargs: Any) -> Any:
            breaker.at(step_place(number))
            return run(stepper, number, *args, **kwargs)

        def finish_here(trainer: Trainer) -> RunResult | None:
            breaker.at(END)
            return finish(trainer)

        Stepper.run, Trainer._finish = run_here, finish_here  # type: ignore[method-assign]
        try:
            with breaker:
                result = super()._train(bind)
            breaker.save()
            return result
        finally:
            Stepper.run, Trainer._finish = run, finish  # type: ignore[method-assign]


def main() -> None:
    """As the worker's own ``main``, with epochs that break."""
    worker.RankWorker = SweptWorker  # type: ignore[misc]
    worker_main.main()


if __name__ == "__main__":
    main()
