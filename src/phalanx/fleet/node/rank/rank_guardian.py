"""The guardian of one rank of a fleet: reports progress to the agent, takes snapshots, and ends the epoch on
its order.

The rule for snapshots: each rank has two, and overwrites the older one only after all ranks have agreed (by a
flag in the step's loss all-reduce) that a buddy holds their newest. All ranks get the same flags in the same
step, so all decide the same. The newest step that every rank can roll back to is never the one that is
overwritten.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import msgspec
import torch

from phalanx.checkpoint.committed.restore import Shard
from phalanx.checkpoint.format.errors import CheckpointError, SavesHeldError
from phalanx.checkpoint.save.saver import AsyncSaver
from phalanx.checkpoint.snapshot.segments import NO_STEP, Segment
from phalanx.checkpoint.snapshot.tier import SnapshotHolder, SnapshotTier, describe, restore_from_holders
from phalanx.checkpoint.snapshot.writer import SnapshotWriter, TakenSnapshot
from phalanx.checkpoint.tiers.tier import KeepingTier
from phalanx.data.reading.dataset import RunData
from phalanx.fleet.control.fleet_file import ClaimRegister
from phalanx.fleet.core.commands import Fresh, FromMemory
from phalanx.fleet.core.epochs.progress import may_begin
from phalanx.fleet.core.succession import is_superseded
from phalanx.fleet.health.live_audit import LiveAudit
from phalanx.fleet.health.stragglers import StragglerWatch
from phalanx.fleet.node import worker_link as link
from phalanx.fleet.node.worker_link import Orders, ParkedError
from phalanx.hardware.local.device import on_gpu
from phalanx.hardware.local.network import join_address
from phalanx.observe.rank_stream import RankFrame
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.process_group.abort import Connections
from phalanx.parallel.process_group.typed_gather import gather_typed
from phalanx.parallel.reduction.checksum import Witness
from phalanx.parallel.torch_compat import set_group_timeouts
from phalanx.run.identity import identity
from phalanx.run.spec import RunSpec
from phalanx.train.lifecycle.guardian import EpochSupersededError, Guardian, Samples
from phalanx.train.step.state import Built, RestoredState, restore_newest
from phalanx.train.step.step import Audit, Stepper, StepReport

# Hooks at which faults are injected during a rank's life; a worker without faults has those that do nothing.

GuardedPhase = Literal["optimizer", "snapshot", "recovery"]
"""The phases of a step, or of an epoch, that the rank's guardian announces."""


class Hooks:
    """Callbacks of one worker process, for every epoch in which it is a rank. These do nothing."""

    def enters(self, rank: int) -> None:
        """Called when the worker becomes ``rank`` of an epoch."""

    def assembled(self, built: Built, saver: AsyncSaver) -> None:
        """Called when the model is built and its state restored."""

    def audited(self, witness: Witness) -> None:
        """Called if audits are on: gradients pass through ``witness``."""

    def step_begins(self, step: int) -> None:
        """Called when ``step`` begins."""

    def at(self, phase: GuardedPhase) -> None:
        """Called when the rank reaches ``phase``."""

    def leaves(self) -> None:
        """Called when the epoch has ended; its model must not be kept alive."""


_GROUP_TIMEOUT_S = 3600.0
"""So long that collectives are aborted by the agent's order, never by their own timeout."""
_TOLD_BYTES, _TOLD_BY_ALL_BYTES = 32 << 20, 512 << 20
"""Limits of the snapshot descriptions that one rank sends to the others, and of all of them: each rank holds
all for a moment.
"""
OVERTIME_S = 60.0
"""Extra time for a request to an object store after its time limit."""
_SHORT_WAIT_S = 0.001
_MOST_FAILURES = 3
"""Number of attempts to restore a step from memory before all ranks use the disk."""


class SnapshotsUnreadableError(RuntimeError):
    """Some rank has no readable snapshot of its shard. Raised on every rank."""


class NonFiniteStepError(RuntimeError):
    """A step's loss or gradient is not finite, on this fleet of nodes.

    Raised on every rank, before the update is applied.
    """

    def __init__(self, step: int, report: StepReport) -> None:
        """Describe at most three of the values that are not finite, and keep the step and its ranks."""
        values = ", ".join(report.nonfinite[:3]) or "its gradient norm"
        super().__init__(
            f"not finite are {values} (loss {report.loss:g}, gradient norm {report.grad_norm:g})"
        )
        self.step, self.ranks = step, report.nonfinite_ranks


def last_audit(step: int, every: int) -> int:
    """Return the last audited step before ``step``, with an audit every ``every`` steps; 0 if there is none.

    A restored state has passed it. ``step`` itself does not count: its update is checked when the next step begins.
    """
    return (step - 1) - (step - 1) % every if step > 0 else 0


def _not_too_long(records: dict[int, bytes], ranks: int) -> dict[int, bytes]:
    """Return the first records that fit into one message to all of ``ranks``; ranks request the others when they
    need them.
    """
    sent, remaining_bytes = dict[int, bytes](), min(_TOLD_BYTES, _TOLD_BY_ALL_BYTES // ranks)
    for rank, record in records.items():
        remaining_bytes -= len(record)
        if remaining_bytes < 0:
            break
        sent[rank] = record
    return sent


class RankGuardian(Guardian):
    """The guardian of a worker's rank, for all epochs of the worker."""

    def __init__(
        self,
        spec: RunSpec,
        segments: Sequence[Segment],
        token: str,
        tls: ssl.SSLContext | None,
        send: Callable[[link.ToAgent], None],
        orders: Orders,
        device: torch.device,
        claims: ClaimRegister,
    ) -> None:
        """Set up the guardian. ``segments`` are this worker's own two, ``token`` (and ``tls``) open the data
        ports of other nodes.

        ``claims`` names the newest epoch.
        """
        self._spec, self._segments, self._send = spec, segments, send
        self._token, self._tls = token, tls
        self._orders, self._device, self._claims = orders, device, claims
        self._hooks = Hooks()
        self._every = spec.fleet.snapshot_every_steps
        self._writer = SnapshotWriter(segments, identity(spec), on_complete=self._complete)
        self._bind: link.JoinEpoch | None = None
        self._connections: Connections | None = None
        self._data: RunData | None = None
        self._newest = NO_STEP
        self._began_at = 0
        """The step whose state this epoch began with."""
        self._failed: dict[int, int] = {}
        """The number of failed attempts to read snapshots, for the last step that failed."""
        self._watch: StragglerWatch | None = None
        self._apart_s: float | None = None
        """When the last step apart from the run ended; None if the rank computes none."""
        self.epoch, self.step, self.phase, self.since_s = -1, NO_STEP, "warm", time.monotonic()

    def enters(self, bind: link.JoinEpoch, hooks: Hooks, connections: Connections) -> None:
        """Become the rank of ``bind``, whose token is used from now on, in phase "meeting".

        ``hooks`` are called at its epoch's moments; ``connections`` are those made before it joins.
        """
        self._connections = connections
        self._token = bind.token or self._token
        self._bind, self.epoch, self.step = bind, bind.epoch, NO_STEP
        self._newest = NO_STEP
        self._hooks = hooks
        hooks.enters(bind.rank)
        self._at("meeting")

    def leaves(self) -> None:
        """End the epoch for this worker: release its data and straggler watch, call the hooks, and be in phase
        "warm".
        """
        self.epoch, self.step = -1, NO_STEP
        # Both reference the model and its optimizer; there may be no room for the next epoch's beside them.
        self._watch, self._data = None, None
        self._hooks.leaves()
        self._at("warm")

    def restore(
        self, tiers: Sequence[KeepingTier], shards: Sequence[Shard], mesh: Mesh
    ) -> RestoredState | None:
        """Fill ``shards`` from the source in the agent's order: snapshots in memory, or the newest checkpoint on
        disk.

        Return None if there is nothing to restore. A collective. Raises as ``_restored`` does.
        """
        restored = self._restored(tiers, shards, mesh)
        self._began_at = 0 if restored is None else restored.step
        return restored

    def _restored(
        self, tiers: Sequence[KeepingTier], shards: Sequence[Shard], mesh: Mesh
    ) -> RestoredState | None:
        """Restore the state of this epoch: from memory if the order names a step there, else from the newest
        checkpoint, up to the step of the order if it has one. Return None if there is no checkpoint.

        A collective, with the same outcome on all ranks. Raises ``SnapshotsUnreadableError`` if any rank cannot
        read its snapshot; after ``_MOST_FAILURES`` in a row, uses the newest checkpoint up to that step
        instead. Raises ``NoGoodCheckpointError`` if all checkpoints are damaged.
        """
        set_group_timeouts(_GROUP_TIMEOUT_S)  # Only now: a shorter timeout applied to connecting.
        self._at("restoring")
        bind = self._bound()
        resume, began_s = bind.resume, time.monotonic()
        if bind.detected_unix_s > 0:
            self._hooks.at("recovery")
        restored_step = resume.step if isinstance(resume, FromMemory) else NO_STEP
        self._writer.bind(bind.epoch, bind.ranks, bind.rank, restored_step)
        if isinstance(resume, FromMemory):
            error, extra, moved_bytes = self._from_memory(bind, resume, shards)
            outcome = error, moved_bytes, self._failed.get(resume.step, 0)
            outcomes = gather_typed(outcome, tuple[str, int, int])
            errors = sorted({error for error, _, _ in outcomes if error})
            if not errors:
                seconds, moved = time.monotonic() - began_s, sum(moved for _, moved, _ in outcomes)
                return RestoredState(resume.step, extra, (), "snapshots in memory", seconds, moved)
            text = f"snapshots of step {resume.step} cannot be restored: {errors}"
            failed = 1 + max(before for _, _, before in outcomes)
            self._failed = {resume.step: failed}
            if failed < _MOST_FAILURES:
                # Worth another epoch: a broken link may work again, and without a lost node other copies are
                # chosen.
                raise SnapshotsUnreadableError(text)
            print(text, flush=True)
        # Also after too many failures to read from memory: all ranks use the disk together.
        return restore_newest(tiers, shards, mesh, up_to=None if isinstance(resume, Fresh) else resume.step)

    def _from_memory(
        self, bind: link.JoinEpoch, resume: FromMemory, shards: Sequence[Shard]
    ) -> tuple[str, dict[str, object], int]:
        """Fill ``shards`` from snapshots in own memory and on other nodes.

        Return the error of reading ("" if there is none; it is not raised), the snapshot's ``extra``, and the
        bytes that came from other processes. A collective if the holders are shared among ranks. Raises
        ``ParkedError`` if the epoch is over during a pause.
        """
        records = dict[int, bytes]()
        holders = [
            SnapshotHolder(rank, join_address(holder.host, holder.data_port))
            for holder in resume.holders
            for rank in holder.ranks
        ]

        def pause(seconds: float) -> None:
            self._orders.pause(bind.epoch, seconds)

        if resume.shared:
            # Each rank queries the holders of its share and sends the result to the others. If all queried
            # all, a fleet of N nodes would make N x N requests.
            records = describe(
                resume.ranks, resume.step, holders, token=self._token, tls=self._tls, pause=pause
            )
            shares = gather_typed(
                (holders, _not_too_long(records, bind.ranks)), tuple[list[SnapshotHolder], dict[int, bytes]]
            )
            holders = [holder for share, _ in shares for holder in share]
            records = {rank: record for _, share in shares for rank, record in share.items()}
        memory = SnapshotTier(
            resume.ranks,
            resume.step,
            own=self._segments,
            holders=holders,
            records=records,
            token=self._token,
            tls=self._tls,
            reader=bind.rank,
            pause=pause,
        )
        try:
            rank = bind.rank if bind.ranks == resume.ranks else None
            extra = restore_from_holders(memory, resume.step, shards, rank=rank)
            return "", extra, memory.moved_bytes
        except CheckpointError as error:
            return str(error), {}, memory.moved_bytes
        finally:
            memory.close()

    # --- hooks of the training loop ---

    def outside(self) -> AbstractContextManager[None]:
        return nullcontext() if self._connections is None else self._connections.foreign()

    def assembled(self, built: Built, saver: AsyncSaver) -> None:
        if self._connections is not None:
            self._connections.settle()
        self._hooks.assembled(built, saver)

    def reads(self, data: RunData) -> None:
        self._data = data

    def give_up(self) -> None:
        """End the main thread's wait for data, if it waits. Called by the thread that aborts epochs."""
        data = self._data
        if data is not None:
            data.give_up()

    def waiting_s(self) -> float:
        """Return seconds for which this rank has waited for an object store; 0 if it does not wait.

        0 also after ``data.timeout_s`` and a minute: then it hangs. Steps computed apart from the run count as
        a wait of 1 ms, until one takes longer than ``fleet.stall_s``. Called by the heartbeat thread.
        """
        data = self._data
        waited_s = 0.0 if data is None else data.waiting_s()
        apart_s = self._apart_s
        if apart_s is not None and time.monotonic() - apart_s < self._spec.fleet.stall_s:
            # A wait too short to be reported: the deadline of the run's step is extended.
            waited_s = max(waited_s, _SHORT_WAIT_S)
        return waited_s if waited_s < self._spec.data.timeout_s + OVERTIME_S else 0.0

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Context of steps computed apart from the run, which do not count as hanging."""
        self._apart_s = time.monotonic()
        try:
            yield
        finally:
            self._apart_s = None

    def safe(self) -> bool:
        return may_begin(self._newest, self._orders.safe_step(self.epoch))

    def leaving(self) -> bool:
        return self._orders.leaving(self.epoch)

    def audit(self, stepper: Stepper, samples: Samples) -> Audit | None:
        """Return the audit of this epoch, or None without ``fleet.audit_every_steps``. Also starts the watch for
        stragglers.
        """
        mesh = stepper.built.model.mesh
        self._watch = StragglerWatch(mesh.layout, self.window_steps())
        every = self._spec.fleet.audit_every_steps
        if every == 0:
            return None
        deal = mesh.deal(self._spec.train.slots)
        seed = self._spec.runtime.seed
        audit = LiveAudit(
            stepper.built.model,
            deal,
            seed,
            every,
            lambda extra: stepper.recompute_slot(extra, samples(self.step + 1, extra.slot)),
            good_step=last_audit(self._began_at, every),
            whole_teams=self._spec.model.context_tiles > 0 and mesh.layout.context > 1,
        )
        self._hooks.audited(audit.witness)
        return audit

    def begins(self, step: int, shards: Sequence[Shard], extra: dict[str, object]) -> None:
        """Report that the rank has joined at ``step``, and take a first snapshot if the run takes any.

        Raises ``ParkedError`` if the epoch is over, as the later calls do.
        """
        self._orders.check(self.epoch)
        self._send(link.JoinedEpoch(self.epoch, step))
        if self._every:
            self._take(step, shards, extra)
        self._progress(step)

    def computed(self) -> None:
        """Check the epoch after a step's computation: on GPUs raise ``ParkedError`` if it was parked.

        A rank that computes steps apart from the run also records the time, for ``waiting_s``.
        """
        if self._apart_s is not None:
            self._apart_s = time.monotonic()
        # On gloo an aborted collective raises an error. On a GPU its kernel just ends, and the memory it
        # leaves looks like a result.
        if on_gpu(self._device):
            self._orders.check(self.epoch)

    def not_finite(self, step: int, report: StepReport) -> None:
        """Raise ``NonFiniteStepError``, unless the epoch is to skip this step."""
        if self._bound().nonfinite_step != step:
            raise NonFiniteStepError(step, report)

    def ended(self, step: int, shards: Sequence[Shard], extra: dict[str, object], report: StepReport) -> None:
        """Report the end of ``step``, and take a snapshot if one is due or all ranks leave here, unless the step
        is unsafe.

        Raises ``ParkedError`` if the epoch is over, or all ranks leave here by plan, then after the snapshot is
        complete. At an unsafe step they leave only if the run takes no snapshots.
        """
        self._orders.check(self.epoch)
        self._send(link.StepEnded(self.epoch, step))
        safe, leave = not report.flags.unsafe, report.flags.leave
        if self._every and safe and (leave or step % self._every == 0):
            self._take(step, shards, extra)
        self._progress(step)
        if leave and (safe or not self._every):
            self._writer.wait()
            raise ParkedError

    def window_steps(self) -> int:
        return self._spec.fleet.straggler_window_steps

    def measured(self, frame: RankFrame) -> None:
        """Report this rank to the agent if it is found to be a straggler."""
        for straggler in self._watch.look(frame) if self._watch is not None else ():
            if straggler.rank == self._bound().rank:
                self._send(link.Doubted(self.epoch, "straggler", str(straggler)))

    def authorize(self) -> None:
        """Raise unless this epoch may commit a checkpoint, by the claims in the run directory.

        Raises SavesHeldError if the node has had no coordinator for ``fleet.lease_s``, CheckpointError if a claim cannot be read, and
        EpochSupersededError if a newer epoch has begun, or the run was started again or is over.
        """
        if self._orders.saves_held:
            raise SavesHeldError(
                "this node has had no coordinator for fleet.lease_s, and saves once it has one"
            )
        try:
            start, term = self._claims.newest_name()
            if start > self._claims.attempt:
                raise EpochSupersededError("the run was started again")
            claim = self._claims.read(term) if term else None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"cannot determine whether epoch {self.epoch} is the newest: {error}"
            ) from error
        if claim is not None and is_superseded(claim, self.epoch):
            reason = f"epoch {claim.epoch} has begun" if claim.epoch > self.epoch else "the run is over"
            raise EpochSupersededError(f"epoch {self.epoch} was left without this node: {reason}")

    def await_authority(self) -> None:
        self._orders.wait_for_saves(self.epoch)

    def saved(self, step: int) -> None:
        self._send(link.CheckpointCommitted(step))

    def fence(self) -> None:
        self._hooks.at("optimizer")
        self._writer.fence()

    def _take(self, step: int, shards: Sequence[Shard], extra: dict[str, object]) -> None:
        """Take a snapshot of ``step``; it is completed in the background."""
        self._at("snapshot")
        self._writer.take(step, shards, extra)
        self._hooks.at("snapshot")
        self._newest = step

    def _complete(self, taken: TakenSnapshot) -> None:
        """Report a complete snapshot to the agent."""
        key = taken.key
        self._send(link.SnapshotTaken(taken.epoch, key.ranks, key.rank, key.step))

    def _progress(self, step: int) -> None:
        """Note the end of a step, and let the hooks begin the next."""
        self.step = step
        self._at("step")
        self._hooks.step_begins(step + 1)

    def _at(self, phase: str) -> None:
        self.phase, self.since_s = phase, time.monotonic()

    def _bound(self) -> link.JoinEpoch:
        """Return the epoch that this worker has joined. Raises RuntimeError if it has none."""
        if self._bind is None:
            raise RuntimeError("restore before this worker became a rank")
        return self._bind
