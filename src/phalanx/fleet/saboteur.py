"""Injects faults inside a worker, at the step and phase that they name.

A fault is injected once in a run, by the first worker that reaches its moment: the one that creates its
marker file in the run directory. So a step that is recomputed after a recovery does not break again. A worker
without faults never imports this module.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from phalanx.checkpoint.save.saver import AsyncSaver
from phalanx.checkpoint.snapshot.segments import Segment
from phalanx.fleet import fault as faults
from phalanx.fleet.control.fleet_file import FleetFileError, read_fleet_file
from phalanx.fleet.node.rank.rank_guardian import Hooks
from phalanx.observe.ledger import Bucket
from phalanx.parallel.reduction.checksum import Witness, attach
from phalanx.parallel.reduction.data_parallel import local
from phalanx.train.step.slot import SlotWork
from phalanx.train.step.state import Built, state_tensors

_FULL_BYTES = 4096
_CUT_AGAIN_S = 0.02


@dataclass(frozen=True)
class Whereabouts:
    """This worker's identity; nodes and workers are numbered in the order in which they were started."""

    run_dir: Path
    node: int
    worker: int
    """Its number among all workers of the fleet."""


@dataclass
class Saboteur(Hooks):
    """Injects faults into this worker and its surroundings: the ``Hooks`` of a worker with faults."""

    here: Whereabouts
    segments: tuple[Segment, ...]
    cut: Callable[[], None]
    """Ends this worker's connections to other ranks."""
    rank: int = -1
    step: int = 0
    """The step that is being computed."""
    witness: Witness = field(default_factory=Witness)
    """Hook through which gradients pass; with audits, theirs."""
    began_s: float = field(default_factory=time.monotonic)
    _faults: list[tuple[int, faults.Fault]] = field(default_factory=list)
    _slow: float = 1.0
    _nan: bool = False
    """True if the loss of the next slot that counts is to be NaN."""
    _parts: Sequence[nn.Module] = ()

    def learn(self, sentences: Iterable[str]) -> None:
        """Parse and add faults. They are numbered in the order of the arguments, the same on every worker. Raises
        ``FaultError``.
        """
        first_number = len(self._faults)
        self._faults += [
            (first_number + n, faults.parse_fault(sentence)) for n, sentence in enumerate(sentences)
        ]

    def enters(self, rank: int) -> None:
        """Note that this worker has become a rank, which is not slowed down at first."""
        self.rank, self._slow = rank, 1.0

    def leaves(self) -> None:
        """End the epoch, and drop the model through which gradients passed."""
        self.witness, self._parts = Witness(), ()

    def assembled(self, built: Built, saver: AsyncSaver) -> None:
        """Wrap the calls of a step at which faults may be due, the computation that is to be slow, and losses to be
        spoiled.

        Attaches a witness if gradients are to be corrupted and no audit has one.
        """
        model = built.model
        self._parts = model.parts
        _before(model, "begin", lambda: self.at("forward"))
        _before(model, "before_backward", lambda: self.at("backward"))
        # While the write continues in its thread.
        _before(saver, "save", lambda: threading.Timer(0.002, lambda: self.at("commit")).start())
        built.waits[Bucket.COMM_EXPOSED_DP].on_enter = lambda: self.at("reduction")
        _between(model, "begin", "end", self._dawdle)
        self._spoil_losses(built)
        if built.spec.fleet.audit_every_steps == 0 and any(
            isinstance(fault.action, faults.Corrupt) for _, fault in self._faults
        ):
            self.witness = attach(model)

    def audited(self, witness: Witness) -> None:
        """Corrupt gradients through ``witness``, which they pass."""
        self.witness = witness

    def step_begins(self, step: int) -> None:
        """Begin ``step``."""
        self.step = step
        self.at(None)

    def at(self, phase: faults.FaultPhase | None) -> None:
        """Inject the faults that are due in this phase of the present step."""
        for number, fault in self._faults:
            if self._due(fault, phase) and self._concerns_me(fault) and self._first(number):
                self._commit(fault)

    def _due(self, fault: faults.Fault, phase: faults.FaultPhase | None) -> bool:
        """Return True if the fault is due now, in ``phase`` (None: when a step begins).

        A fault with a time is due from then on, one with a step only in that step; in "recovery" also later.
        """
        when = fault.when
        if when.phase != phase:
            return False
        if when.step is None:
            return time.monotonic() - self.began_s >= (when.time_s or 0.0)
        return self.step >= when.step if phase == "recovery" else self.step == when.step

    def _concerns_me(self, fault: faults.Fault) -> bool:
        """Return True if the fault's target is this worker, its rank or its node (either end of a link).

        Others, to the coordinator and the disk, concern rank 0.
        """
        match fault.action:
            case faults.Kill(target="worker", number=number):
                return number == self.here.worker
            case faults.Kill(target="node", number=number):
                return number == self.here.node
            case (
                faults.Kill(target="rank", number=rank)
                | faults.Freeze(rank)
                | faults.Slow(rank)
                | faults.Corrupt(_, rank)
                | faults.NanLoss(rank)
            ):
                return rank == self.rank
            case faults.CutLink(nodes) | faults.DelayLink(nodes):
                return self.here.node in nodes
            case _:
                return self.rank == 0

    def _first(self, number: int) -> bool:
        """Return True if no worker of the run has injected this fault yet, and mark it as injected by a file in the
        run directory.
        """
        with suppress(FileExistsError):
            marker = faults.fault_marker(self.here.run_dir, number)
            marker.parent.mkdir(exist_ok=True)
            marker.touch(exist_ok=False)
            return True
        return False

    def _commit(self, fault: faults.Fault) -> None:
        """Print the fault and inject it here: kill, suspend or slow this process, cut its connections, sleep once
        (a delayed link), flip a bit, or make the next counted loss NaN.

        A coordinator and a node (this process group) are killed from here too. A full disk is only a limit of 4
        KiB on the files that this process writes. Suspension, slowness, a cut and a full disk end after
        ``for_s``. With None they never end, but a link is cut only once.
        """
        print(f"fault: {fault} (rank {self.rank}, step {self.step})", flush=True)
        match fault.action:
            case faults.Kill(target="coordinator"):
                with suppress(FleetFileError, ProcessLookupError):
                    os.kill(read_fleet_file(self.here.run_dir).coordinator_pid, signal.SIGKILL)
            case faults.Kill(target="node"):
                os.killpg(os.getpgrp(), signal.SIGKILL)
            case faults.Kill():
                os.kill(os.getpid(), signal.SIGKILL)
            case faults.Freeze():
                self._stop(fault.for_s)
            case faults.Slow(_, factor):
                self._slow = factor
                self._later(fault.for_s, lambda: setattr(self, "_slow", 1.0))
            case faults.CutLink():
                self._cut_off(fault.for_s)
            case faults.DelayLink(_, delay_s):
                time.sleep(delay_s)
            case faults.Corrupt("gradient", _):
                self.witness.corrupt = _once(self.witness)
            case faults.Corrupt("parameter", _):
                _flip_bit(max(map(local, state_tensors(self._parts).values()), key=Tensor.numel))
            case faults.Corrupt():
                self._corrupt_snapshot()
            case faults.NanLoss():
                self._nan = True
            case faults.FillDisk():
                soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (_FULL_BYTES, hard))
                self._later(fault.for_s, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard)))

    def _stop(self, for_s: float | None) -> None:
        """Suspend this process by SIGSTOP; with ``for_s`` seconds, a shell resumes it then."""
        if for_s is not None:  # A stopped process cannot wake itself.
            wake = f"sleep {for_s}; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", wake], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)

    def _cut_off(self, for_s: float | None) -> None:
        """Close the connections now, and in a thread again and again for ``for_s`` seconds (None: only once)."""
        self.cut()
        until_s = time.monotonic() + (for_s or 0.0)

        def again() -> None:
            while time.monotonic() < until_s:
                self.cut()
                time.sleep(_CUT_AGAIN_S)

        threading.Thread(target=again, name="cut link", daemon=True).start()

    def _later(self, after_s: float | None, act: Callable[[], None]) -> None:
        """Call ``act`` after ``after_s`` seconds, in a thread; never if that is None."""
        if after_s is not None:
            threading.Timer(after_s, act).start()

    def _spoil_losses(self, built: Built) -> None:
        """Wrap the runner's ``gradients``: when a fault is due, the loss of one counted slot becomes NaN, once.

        Slots that an audit recomputes are left out.
        """
        gradients = built.runner.gradients

        def spoiled(work: SlotWork) -> list[Tensor]:
            """Return the losses; the first that counts is NaN if a fault is due, once."""
            losses = gradients(work)
            counted = [turn for turn, current in enumerate(work.rounds) if current.counts]
            if self._nan and counted:
                self._nan = False
                losses[counted[0]] = losses[counted[0]] * torch.nan
            return losses

        vars(built.runner)["gradients"] = spoiled

    def _dawdle(self, seconds: float) -> None:
        """Slow a slot down, after it took ``seconds``, to ``_slow`` times that."""
        if self._slow > 1:
            time.sleep((self._slow - 1) * seconds)

    def _corrupt_snapshot(self) -> None:
        """Flip one bit in the middle byte of each complete snapshot in this worker's segments."""
        for segment in self.segments:
            snapshot = segment.snapshot()
            if snapshot is not None:
                image = segment.image(snapshot.nbytes)
                image[snapshot.nbytes // 2] ^= 1


def _once(witness: Witness) -> Callable[[Tensor], None]:
    """Return a function that flips one bit of the next gradient that passes the witness."""

    def flip(gradient: Tensor) -> None:
        witness.corrupt = None
        _flip_bit(gradient)

    return flip


def _flip_bit(tensor: Tensor) -> None:
    """Flip one bit of the element in the middle of an fp32 tensor."""
    bits = tensor.view(-1).view(torch.int32)
    bits[bits.numel() // 2] ^= 1 << 21


def _before(owner: object, method: str, act: Callable[[], None]) -> None:
    """Wrap a method of one object so that ``act`` is called before each call."""
    original = getattr(owner, method)

    def both(*args: object, **kwargs: object) -> object:
        act()
        return original(*args, **kwargs)

    setattr(owner, method, both)


def _between(owner: object, first: str, last: str, act: Callable[[float], None]) -> None:
    """Wrap two methods of one object so that each call of ``last`` first calls ``act`` with the seconds since
    ``first``.

    If calls of ``first`` overlap, as slots do in a pipeline, no time is passed to ``act`` twice.
    """
    since_s = [0.0]
    under_way = [0]

    def begin() -> None:
        if not under_way[0]:
            since_s[0] = time.monotonic()
        under_way[0] += 1

    def end() -> None:
        act(time.monotonic() - since_s[0])
        under_way[0] -= 1
        since_s[0] = time.monotonic()

    _before(owner, first, begin)
    _before(owner, last, end)
