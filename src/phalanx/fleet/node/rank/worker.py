"""A worker of a fleet: the process that holds a rank, for as many epochs of membership as it lives.

An agent starts it (``phalanx.fleet.node.rank.worker_main``). The worker loads everything slow (PyTorch, the
accelerator's context, the data), reports that it is warm, and waits. For each epoch that it joins it meets
the other ranks, builds the model for the layout of that epoch, restores the agreed state, and trains. When
the epoch ends, by a fault or because the fleet changes, everything of it is dropped (model, optimizer,
process groups). The process stays, with its loaded libraries and data. So no half-finished result of a broken
step can reach the next epoch, and recovery does not pay for the start of a process.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch._C._distributed_c10d import Store

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.snapshot.segments import segments_from
from phalanx.data.reading.dataset import RunData
from phalanx.fleet.control.fleet_file import ClaimRegister
from phalanx.fleet.control.inquiry import shortened
from phalanx.fleet.control.security import read_certificates, run_token
from phalanx.fleet.core.messages import LEFT_AS_ASKED, NO_EPOCH, NO_STEP
from phalanx.fleet.health.live_audit import CorruptionFoundError
from phalanx.fleet.health.node_health import complaints, of_device
from phalanx.fleet.node import worker_link
from phalanx.fleet.node.rank.rank_guardian import OVERTIME_S, Hooks, NonFiniteStepError, RankGuardian
from phalanx.hardware.local.detect import Throttles
from phalanx.hardware.local.device import answers, give_back_memory, keep_freed_memory, make_current, on_gpu
from phalanx.hardware.local.network import resolved
from phalanx.observe.event_log import newest_event
from phalanx.observe.goodput import ledger_of
from phalanx.observe.ledger import NS_PER_S, Bucket, Ledger
from phalanx.observe.logs.capture import place_of_process
from phalanx.observe.record.notes import ThrottlingWatch
from phalanx.parallel.process_group import rendezvous
from phalanx.parallel.process_group.abort import Connections, abort
from phalanx.parallel.process_group.meeting import MeetingPoint, meet
from phalanx.parallel.torch_compat import flight_record
from phalanx.process.exit_codes import EXIT_FAILED
from phalanx.process.this_process import StopRequest
from phalanx.run.directory.paths import (
    DamagedRecordError,
    RunDirectory,
    RunDirectoryError,
    RunResult,
    read_resolved,
)
from phalanx.run.factory import load_factory
from phalanx.run.identity import fencing_token
from phalanx.run.peers import is_loopback
from phalanx.run.read import addresses
from phalanx.run.smaller_degrees import divided_over
from phalanx.run.spec import RunSpec
from phalanx.store.open_store import is_remote
from phalanx.train.assemble import EpochInputs, WarmState, make_deterministic, warm_up
from phalanx.train.lifecycle.ending import RunFailedError
from phalanx.train.lifecycle.observers import ObserverError, maker_of
from phalanx.train.lifecycle.reporter import leave_own_machine
from phalanx.train.lifecycle.worker import freeze_gc, known_errors, run_epoch
from phalanx.train.measure.numerics import require_first
from phalanx.train.start.open_run import check_data
from phalanx.wire.messages import WireError

if TYPE_CHECKING:
    from phalanx.fleet.saboteur import Saboteur

_MEET_TIMEOUT_S = 60.0
"""Time limit for the ranks of an epoch to connect: a gloo connect cannot be aborted, nor does it notice a
lost peer.
"""
_PULSES_IN_A_LEASE = 5
_RECORD_MENDED_S = 30.0
_RECOVERABLE = (rendezvous.RendezvousError, CheckpointError, ObserverError)
"""Known errors that end the epoch but not the run: a peer was lost during rendezvous, while its snapshot was read, or in a
collective of a user's observer.
"""


class RankWorker:
    """One worker process."""

    def __init__(self, link: worker_link.WorkerEnd, args: worker_link.WorkerArgs, stop: StopRequest) -> None:
        """Read the run, choose the device, open the data, check data and numerics of this machine, and load the
        user's code.

        Raises ``RunDirectoryError`` if the run file is not the one that the agent has read, and the errors of the
        checks.
        """
        self._link, self._args, self._stop = link, args, stop
        self._orders = worker_link.Orders(stop)
        self._directory = RunDirectory(args.run_dir)
        self._spec = read_resolved(self._directory)
        if fencing_token(self._spec, 0).run_file_sha256 != args.run_file_sha256:
            raise RunDirectoryError(
                f"{self._directory.run_file} is another one than this node's agent has read: the run was started again, or somebody "
                "has changed the file"
            )
        self._device = rendezvous.device_for(self._spec.runtime.device, args.worker)
        make_current(self._device)
        rendezvous.require_interface(self._device)
        if not on_gpu(self._device):
            rendezvous.choose_interface(resolved(args.host), shared=not is_loopback(args.host))
        self._segments = segments_from(args.segments)
        tls = read_certificates(args.certificates).client_context() if args.certificates else None
        self._saboteur: Saboteur | None = None
        self._token = run_token(args.run_dir)
        self._guardian = RankGuardian(
            self._spec,
            self._segments,
            self._token,
            tls,
            link.send,
            self._orders,
            self._device,
            ClaimRegister(self._directory, args.attempt),
        )
        self._store: Store | None = None
        """The store of the epoch's process groups, which live no longer than it."""
        self._meeting = MeetingPoint(args.host)
        self._began_ns, self._began_s = time.time_ns(), time.monotonic()
        make_deterministic(self._spec, self._device)
        keep_freed_memory(self._device)
        with self._waiting_for_data():
            data = RunData.of_run(self._spec)
        self._warm = warm_up(self._spec, self._device, data)
        # An error that would end this worker's epoch shows now, before any rank depends on it.
        _check_machine(self._spec, self._directory, self._warm, args.node)
        for name in self._spec.observe.observers:
            maker_of(name)
        if args.worker == 0:
            leave_own_machine(self._directory, args.node)
            ThrottlingWatch(self._directory, args.node, Throttles().now).start()
        if self._spec.model.factory:
            load_factory(self._spec.model.factory, self._spec.model.factory_sha256)

    def serve(self) -> None:
        """Report Warm, then join the epochs that the agent orders, one after another, until it is ordered to end.

        Starts the threads of orders, aborts and heartbeats. A device that fails its health checks is reported as
        Unfit, and this returns.
        """
        _in_thread("orders", self._listen)
        _in_thread("break-off", self._orders.break_off)
        _in_thread("pulse", self._pulse)
        # A first forward and backward pass: PyTorch's lazy initialization is done before the first epoch.
        with torch.device(self._device):
            weights = torch.ones(8, 8, requires_grad=True)
            torch.autograd.backward((weights @ weights).sum())
        freeze_gc()  # The collection after each epoch then visits that epoch's objects only.
        if self._spec.fleet.health_checks and (failures := complaints(of_device(str(self._device)))):
            self._link.send(worker_link.Unfit(failures))
            return
        self._link.send(worker_link.Warm(os.getpid(), self._meeting.address))
        while (bind := self._orders.next_bind()) is not None:
            self._epoch(bind)

    def _listen(self) -> None:
        """Record orders until the link ends, then exit the process with ``EXIT_FAILED``: the agent has ended."""
        try:
            self._orders.listen(self._received)
        except WireError:
            os._exit(EXIT_FAILED)  # The agent has ended.

    def _received(self) -> worker_link.ToWorker:
        """Return the next order. Requests for flight records are served here, in threads, since the main thread may
        hang.
        """
        while isinstance(message := self._link.receive(), worker_link.SendFlightRecord):
            # In its own thread: if the recorder hangs too, LeaveEpoch must still be received.
            _in_thread("flight record", partial(self._send_flight_record, message.epoch))
        return message

    def _send_flight_record(self, epoch: int) -> None:
        """Send this rank's record of collectives, if the worker is a rank of ``epoch``."""
        with suppress(WireError, ValueError):
            if epoch == self._guardian.epoch:
                self._link.send(worker_link.FlightRecordSent(epoch, shortened(flight_record(self._began_ns))))

    @contextmanager
    def _waiting_for_data(self) -> Iterator[None]:
        """Context that sends heartbeats while datasets in object stores are opened: this worker does not hang.

        Only for ``data.timeout_s`` and a minute, and only if some dataset is remote.
        """
        began_s, over = time.monotonic(), threading.Event()

        def pulse() -> None:
            """Send heartbeats until the data are open, or have taken a minute longer than ``data.timeout_s``."""
            while not over.wait(self._spec.fleet.worker_lease_s / _PULSES_IN_A_LEASE):
                waited_s = time.monotonic() - began_s
                if waited_s > self._spec.data.timeout_s + OVERTIME_S:
                    return
                with suppress(WireError):
                    self._link.send(
                        worker_link.Alive(NO_EPOCH, NO_STEP, "opening the data", waited_s, waited_s)
                    )

        if any(map(is_remote, addresses(self._spec.data).values())):
            _in_thread("opening", pulse)
        try:
            yield
        finally:
            over.set()

    def _pulse(self) -> None:
        """Send heartbeats with the main thread's step and phase, several in a lease; the thread's endless loop.

        A heartbeat that cannot be sent is dropped.
        """
        while True:
            guardian = self._guardian
            since_s = time.monotonic() - guardian.since_s
            with suppress(WireError):
                self._link.send(
                    worker_link.Alive(
                        guardian.epoch, guardian.step, guardian.phase, since_s, guardian.waiting_s()
                    )
                )
            time.sleep(self._spec.fleet.worker_lease_s / _PULSES_IN_A_LEASE)

    def _epoch(self, bind: worker_link.JoinEpoch) -> None:
        """Run one epoch, from rendezvous to leaving, and report how it ended. Release process groups and memory
        after it.

        Unless the run was stopped, first wait to be parked, and at the end report LeftEpoch with a new meeting
        point. Exits the process if the device does not answer any more.
        """
        self._connections = connections = Connections()

        def break_off() -> None:
            abort(connections, self._device)
            self._guardian.give_up()

        with self._orders.session(bind.epoch, break_off):
            outcome = self._outcome(bind)
            if outcome is not None:
                self._link.send(outcome)
            stopped = isinstance(outcome, worker_link.TrainingFinished) and not outcome.result
            if not stopped:
                self._orders.wait_for_park(bind.epoch)
            self._guardian.leaves()
            if not on_gpu(self._device):
                connections.hold()  # Closing these connections must not disturb a peer that has not left yet.
            with suppress(Exception):  # A broken process group may fail to close.
                rendezvous.leave()
            self._store = None
        # The exception, and with it every frame of the epoch, is released by now; so are the groups' threads
        # after this.
        gc.collect()
        connections.release()
        if not answers(self._device):
            # Every later epoch would end with the same error. The agent replaces this process.
            print(f"{self._device} does not answer any more; this worker ends", file=sys.stderr, flush=True)
            os._exit(EXIT_FAILED)
        give_back_memory(self._device)
        if not stopped:
            self._link.send(worker_link.LeftEpoch(bind.epoch, self._fresh_meeting_point()))

    def _outcome(self, bind: worker_link.JoinEpoch) -> worker_link.EpochOutcome | None:
        """Train, and return the message about the end of the epoch; no ``Exception`` is raised.

        That is TrainingFinished, with an empty result if training was stopped. On an error it is the message of ``outcome_of``, or
        ``None`` if the error needs none. An error that becomes EpochBroken is also printed with its traceback, except
        ``ParkedError``.
        """
        try:
            result = self._train(bind)
            return worker_link.TrainingFinished(
                bind.epoch, "" if result is None else json.dumps(result.to_json())
            )
        except Exception as error:
            outcome = outcome_of(error, bind.epoch, over=self._orders.over(bind.epoch), device=self._device)
            if isinstance(outcome, worker_link.EpochBroken) and not isinstance(
                error, worker_link.ParkedError
            ):
                traceback.print_exc()  # Into this worker's log.
                sys.stderr.flush()
            return outcome

    def _train(self, bind: worker_link.JoinEpoch) -> RunResult | None:
        """Meet the other ranks and train the epoch of ``bind``; return the run's result, None if it was stopped.

        Raises ``ParkedError`` if the epoch is over, and the errors of training.
        """
        place = place_of_process()
        place.rank, place.epoch, place.step = bind.rank, bind.epoch, None
        ledger, self._began_ns = _account(self._directory, bind), time.time_ns()
        self._guardian.enters(bind, self._hooks(), self._connections)
        self._store = meet(
            bind.meeting_point,
            self._meeting if bind.rank == 0 else None,
            bind.epoch,
            bind.rank,
            bind.ranks,
            self._device,
            _MEET_TIMEOUT_S,
            lambda: self._orders.check(bind.epoch),
            bind.token or self._token,
        )
        return run_epoch(
            EpochInputs(
                divided_over(self._spec, bind.ranks),
                self._directory,
                bind.attempt,
                self._device,
                ledger,
                self._stop,
                self._guardian.restore,
                self._guardian,
                self._warm,
            )
        )

    def _hooks(self) -> Hooks:
        """Return the saboteur, which also learns the new faults, or hooks that do nothing if this worker was never given
        faults.

        Without faults it is not even imported.
        """
        faults = self._orders.faults()
        if faults and self._saboteur is None:
            from phalanx.fleet.saboteur import Saboteur, Whereabouts

            node = int(re.sub(r".*?(\d*)$", r"\1", self._args.node) or 0)
            worker = node * self._spec.fleet.workers_per_node + self._args.worker
            self._saboteur = Saboteur(
                Whereabouts(self._args.run_dir, node, worker),
                self._segments,
                self._cut,
                began_s=self._began_s,
            )
        if self._saboteur is None:
            return Hooks()
        self._saboteur.learn(faults)
        return self._saboteur

    def _cut(self) -> None:
        """Close this worker's connections to the other ranks."""
        self._connections.shut()

    def _fresh_meeting_point(self) -> str:
        """Open a rendezvous for the next epoch and return its address: each is used once, by the worker that
        is rank 0.
        """
        self._meeting.close()
        self._meeting = MeetingPoint(self._args.host)
        return self._meeting.address


def outcome_of(
    error: Exception, epoch: int, *, over: bool, device: torch.device
) -> worker_link.EpochOutcome | None:
    """Return the message about an error that ended ``epoch``, or ``None`` if it needs none.

    Corruption and non-finite steps are Doubted, a known error that a person must fix is RunFailed, any other is
    EpochBroken. ``over``: this worker was already ordered out; then only Doubted is sent, and on a GPU nothing.
    """
    if over and on_gpu(device):
        # An aborted collective leaves arbitrary values in a GPU's memory, so no rank may be blamed for them.
        return None
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, CorruptionFoundError):
        # Sent even if the epoch is over: another rank may have reported first that it broke, but without the
        # cause.
        verdict = error.verdict
        return worker_link.Doubted(epoch, "corruption", text, verdict.ranks, verdict.roll_back_to)
    if isinstance(error, NonFiniteStepError):
        return worker_link.Doubted(epoch, "nonfinite", str(error), error.ranks, step=error.step)
    if over:
        return None
    if isinstance(error, known_errors()) and not isinstance(error, _RECOVERABLE):
        return worker_link.RunFailed(
            epoch, str(error), type(error).__name__, isinstance(error, RunFailedError)
        )
    if isinstance(error, worker_link.ParkedError):
        # If the order to leave by plan is lost with its coordinator, this ends the epoch.
        return worker_link.EpochBroken(epoch, LEFT_AS_ASKED)
    return worker_link.EpochBroken(epoch, text)


def _check_machine(spec: RunSpec, directory: RunDirectory, warm: WarmState, node: str) -> None:
    """Check that this machine has the run's data, and (without ``mixed_machines``) kernels that round as on other
    nodes.

    A damaged record is read again for 30 s, since the coordinator repairs it. Raises the errors of both checks.
    """
    until_s = time.monotonic() + _RECORD_MENDED_S
    while True:
        try:
            check_data(directory, warm.data.fingerprint)
            if not spec.runtime.mixed_machines:
                require_first(warm.numerics, directory, node)
        except DamagedRecordError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.2)
        else:
            return


def _account(directory: RunDirectory, bind: worker_link.JoinEpoch) -> Ledger:
    """Return the open ledger of this epoch, in the bucket of the rendezvous.

    On rank 0 after another epoch it begins at the last accounted event. The time since counts as
    reconfiguration if that ended by plan; else as fault undetected until the fault was detected, then as drain.
    Raises ``EventLogError`` if the events cannot be read.
    """
    now_ns = time.monotonic_ns()
    if bind.rank != 0 or bind.detected_unix_s == 0 or not directory.events.exists():
        return Ledger(now_ns, Bucket.START_RENDEZVOUS)
    accounted = newest_event(directory.events, lambda event: bool(ledger_of(event)))
    ended_unix_s = bind.detected_unix_s if accounted is None else accounted.t
    now_unix_s = time.time()
    away_ns = max(0, int((now_unix_s - ended_unix_s) * NS_PER_S))
    drain_ns = min(away_ns, max(0, int((now_unix_s - bind.detected_unix_s) * NS_PER_S)))
    ledger = Ledger(now_ns - away_ns, Bucket.RECONFIGURE if bind.planned else Bucket.FAULT_DRAIN)
    ledger.switch(Bucket.START_RENDEZVOUS)
    if not bind.planned:
        ledger.reassign(Bucket.FAULT_DRAIN, Bucket.FAULT_UNDETECTED, away_ns - drain_ns)
    return ledger


def _in_thread(name: str, run: Callable[[], None]) -> None:
    threading.Thread(target=run, name=name, daemon=True).start()
