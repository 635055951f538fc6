"""Assembly of a run on one rank: mesh, model, optimizer, restored state, checkpoint saver, data."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.checkpoint.committed.restore import Shard, restore
from phalanx.checkpoint.format.errors import NoSuchStepError
from phalanx.checkpoint.save.save_schedule import Retention
from phalanx.checkpoint.save.saver import AsyncSaver
from phalanx.checkpoint.save.store_uploader import CopyRules, CopyShare, RankCopies
from phalanx.checkpoint.snapshot.segments import total_memory_bytes
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.object_tier import ObjectTier, open_origin
from phalanx.checkpoint.tiers.tier import KeepingTier
from phalanx.data.reading.dataset import RunData
from phalanx.hardware.local.detect import accelerator_named
from phalanx.hardware.local.device import device_name, measure_matmul_flops, on_gpu
from phalanx.hardware.portable.operations import begin as begin_portable
from phalanx.hardware.portable.operations import end as end_portable
from phalanx.observe.events import IncidentKind
from phalanx.observe.ledger import Bucket, Ledger
from phalanx.observe.logs.capture import place_of_process
from phalanx.observe.logs.log_file import LogPosition
from phalanx.observe.profile_request import ProfileDesk
from phalanx.parallel.mesh import BOOT_ID, Mesh, RankMachines, build_mesh, find_machines
from phalanx.process.this_process import StopRequest
from phalanx.run.directory.files import write_atomically
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.identity import Origin, lineage_table, read_lineage
from phalanx.run.spec import CheckpointSpec, RunSpec
from phalanx.store.open_store import is_url, open_store
from phalanx.train.compose import build_model
from phalanx.train.lifecycle.guardian import Guardian
from phalanx.train.lifecycle.progress import TrainProgress
from phalanx.train.lifecycle.reporter import Reporter, first_of_node, leave_own_machine
from phalanx.train.measure.numerics import Numerics, probe, require_equal
from phalanx.train.start.memory import require_memory
from phalanx.train.start.open_run import check_data
from phalanx.train.step.state import (
    Built,
    RestoredState,
    fill_initial,
    restore_newest,
    state_shards,
    weight_shards,
    weights_sha256,
)

_PEAK_BUDGET_S = 0.02


@dataclass(frozen=True)
class Peak:
    """The rate that counts as 100% MFU."""

    flops_per_s: float
    source: str


@dataclass(frozen=True)
class WarmState:
    """Everything that a worker process makes once and takes from one epoch of membership to the next."""

    data: RunData
    peak_of_rank: Peak
    numerics: Numerics


RestoreSource = Callable[[Sequence[KeepingTier], Sequence[Shard], Mesh], RestoredState | None]
"""Fills this rank's shards, given the tiers of checkpoints, the disk first; ``None`` if there is nothing to restore and the run begins."""


@dataclass(frozen=True)
class EpochInputs:
    """The inputs of one rank for one epoch of membership; a run without a fleet is a single epoch."""

    spec: RunSpec
    """The resolved run."""
    directory: RunDirectory
    attempt: int
    """The number under which this epoch's events and checkpoints are written."""
    device: torch.device
    ledger: Ledger
    stop: StopRequest
    restore: RestoreSource = restore_newest
    guardian: Guardian = field(default_factory=Guardian)
    warm: WarmState | None = None
    """``None``: this process lives for one epoch, and all ranks make their warm state together."""
    place: LogPosition = field(default_factory=place_of_process)
    """The place of this process in the lines of its log."""
    boot_id: Path = BOOT_ID
    """The file that identifies this machine to the other ranks."""


@dataclass
class Training:
    """A run on one rank, ready to step."""

    inputs: EpochInputs
    reporter: Reporter
    mesh: Mesh
    machines: RankMachines
    built: Built
    data: RunData
    shards: list[Shard]
    saver: AsyncSaver
    copies: RankCopies | None
    """Copies checkpoints to ``checkpoint.store``, if there is one and no agent does it."""
    peak: Peak
    """Peak FLOP/s of all ranks together."""
    restored: RestoredState | None
    numerics: Numerics
    """The results of the probes of this rank's machine."""
    profiles: ProfileDesk | None
    """Reader of profile requests, on rank 0."""

    def mfu(self, tokens_per_s: float) -> float:
        """Model FLOP/s at this speed, as a share of the peak."""
        return self.built.flops_per_token * tokens_per_s / self.peak.flops_per_s


def make_deterministic(spec: RunSpec, device: torch.device) -> None:
    """Set those of PyTorch's settings that would change the bits: threads, seed, deterministic or portable kernels. They apply to
    the whole process.

    Raises ``NotPortableError`` if the run needs portable numerics and this process cannot have it.
    """
    if spec.runtime.numerics == "portable":
        begin_portable()
    else:
        end_portable()  # an earlier run of this process may have begun it
    torch.set_num_threads(spec.runtime.threads)
    torch.manual_seed(spec.runtime.seed)
    torch.use_deterministic_algorithms(True)
    # Deterministic mode would also fill every new buffer with NaN, which costs a pass over memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if on_gpu(device):
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def assemble(inputs: EpochInputs, reporter: Reporter) -> Training:
    """Build everything on this rank and restore the state that training begins with. A collective call.

    Without a checkpoint of the run, the weights are initialized, or taken over from ``checkpoint.init_from``. Unless
    ``inputs.warm`` brings it along, it also measures the peak rate and writes the machine into the run directory. It
    then compares arithmetic between ranks, unless ``runtime.mixed_machines``, and the data with the run's record. On a
    CPU without a fleet, ``MemoryShortError`` is raised first if the machine has too little memory.
    """
    spec, ledger = inputs.spec, inputs.ledger
    ledger.switch(Bucket.START_PLAN_COMPILE)
    machines = find_machines(inputs.device, inputs.boot_id)
    machine_ranks = machines.ranks_each
    # Only sums in tree order are made machine by machine.
    by_tree = spec.train.reduction == "reproducible"
    mesh = build_mesh(
        spec, dist.get_world_size(), inputs.device, machine_ranks=machine_ranks if by_tree else 0
    )
    # Not in a fleet, which replaces a node that is too small.
    if inputs.warm is None and not on_gpu(inputs.device):
        require_memory(spec, mesh.layout, mesh.rank, total_memory_bytes())
    built = build_model(spec, mesh)
    parts, placement = built.model.parts, built.placement
    shards = state_shards(parts, built.optimizer, placement)

    ledger.switch(Bucket.START_RESTORE)
    tier = DiskTier(inputs.directory.checkpoints)
    store = ObjectTier(open_store(spec.checkpoint.store)) if spec.checkpoint.store else None
    with store.shared_on_this_machine() if store and machine_ranks != 1 else nullcontext():
        restored = inputs.restore([tier, store] if store else [tier], shards, mesh)
    if restored is None:
        fill_initial(parts, placement, spec)
        if spec.checkpoint.init_from:
            restored = take_over(spec.checkpoint, inputs.directory, built, shards, alone=machine_ranks == 1)

    saver = AsyncSaver(
        tier,
        mesh.rank,
        mesh.ranks,
        attempt=inputs.attempt,
        timeout_s=spec.checkpoint.timeout_s,
        retention=Retention(spec.checkpoint.keep_last, spec.checkpoint.keep_every or None),
        authorize=inputs.guardian.authorize,
    )
    # The agents of a fleet copy by themselves: they outlive its epochs.
    copies = _rank_copies(inputs, tier, store, mesh, machine_ranks) if store and inputs.warm is None else None
    warm = inputs.warm
    if warm is None:
        saver.prepare(shards)
        if first_of_node():
            leave_own_machine(inputs.directory)
        warm = _warm_up_together(spec, mesh, ledger)
    if inputs.warm is None:  # a fleet's worker has compared them when it began, and its data are still open
        check_data(inputs.directory, warm.data.fingerprint)
    ledger.switch(Bucket.START_WARMUP)
    return Training(
        inputs=inputs,
        reporter=reporter,
        mesh=mesh,
        machines=machines,
        built=built,
        data=warm.data,
        shards=shards,
        saver=saver,
        copies=copies,
        peak=Peak(warm.peak_of_rank.flops_per_s * mesh.ranks, f"{mesh.ranks} x {warm.peak_of_rank.source}"),
        restored=restored,
        numerics=warm.numerics,
        profiles=None
        if mesh.rank
        else ProfileDesk(
            inputs.directory, functools.partial(reporter.warn, incident=IncidentKind.PROFILE_REFUSED)
        ),
    )


def _rank_copies(
    inputs: EpochInputs, disk: DiskTier, store: ObjectTier, mesh: Mesh, machine_ranks: int
) -> RankCopies:
    """Return the copier of this rank's share of the checkpoints to the store. ``machine_ranks`` ranks share one
    machine's limits; 0 stands for all ranks.
    """
    # Where machines have different numbers of ranks, the limit of one holds for all of them together.
    sharing = machine_ranks or mesh.ranks
    rules, share = CopyRules.of(inputs.spec, sharing), CopyShare((mesh.rank,), mesh.ranks)
    timeout_s = inputs.spec.checkpoint.timeout_s
    return RankCopies(disk, store.store, rules, str(inputs.attempt), share, timeout_s)


def warm_up(spec: RunSpec, device: torch.device, data: RunData) -> WarmState:
    """Measure this machine's peak rate and probe its arithmetic, without any other rank."""
    return WarmState(data, _peak(spec, device), probe(spec, device))


def _warm_up_together(spec: RunSpec, mesh: Mesh, ledger: Ledger) -> WarmState:
    """Warm up on all ranks at once, since they will compute at once. Its peak, in FLOP/s, is the mean over the ranks.
    A collective call.

    Raises ``MixedMachinesError`` if arithmetic differs between ranks, unless ``runtime.mixed_machines`` allows it.
    """
    ledger.switch(Bucket.START_DATA_SEEK)
    dist.barrier()
    ledger.switch(Bucket.START_WARMUP)
    warm = warm_up(spec, mesh.device, RunData.of_run(spec))
    if not spec.runtime.mixed_machines:
        require_equal(warm.numerics, mesh.device)
    rate = torch.tensor([warm.peak_of_rank.flops_per_s], dtype=torch.float64, device=mesh.device)
    dist.all_reduce(rate)
    return replace(warm, peak_of_rank=Peak(float(rate.item()) / mesh.ranks, warm.peak_of_rank.source))


def _peak(spec: RunSpec, device: torch.device) -> Peak:
    """Return the peak of one rank in FLOP/s and its source: the data sheet for bf16 on an accelerator of the catalog,
    else a matrix product measured now.
    """
    dtype = torch.bfloat16 if spec.precision.compute == "bf16" else torch.float32
    name = device_name(device)
    if name is not None and dtype == torch.bfloat16:
        accelerator = accelerator_named(name)
        if accelerator is not None:
            return Peak(accelerator.bf16_flops, accelerator.source)
    rate = _measured_flops(device, dtype, torch.get_num_threads())
    return Peak(rate, f"measured {spec.precision.compute} matrix product")


@functools.cache
def _measured_flops(device: torch.device, dtype: torch.dtype, threads: int) -> float:  # noqa: ARG001  a part of the key
    """Measure the rate of a matrix product in FLOP/s for ``_PEAK_BUDGET_S``; cached in the process by device, dtype
    and threads.

    Every rank measures while the others do, as they will compute. No number of an earlier start is read, because that
    machine may have been busy.
    """
    return measure_matmul_flops(device, dtype, _PEAK_BUDGET_S)


# Start a run from another run's checkpoint, on all ranks together, and record its lineage.
#
# ``checkpoint.init_with`` in the run file selects the loaded part: the weights, the weights and the optimizer's state, or all
# of the training state. The checkpoint is read in place and not copied. The run needs it until it has saved a checkpoint of its
# own.


def take_over(
    checkpoint: CheckpointSpec,
    directory: RunDirectory,
    built: Built,
    shards: Sequence[Shard],
    *,
    alone: bool = False,
) -> RestoredState | None:
    """Fill this rank's shards from ``checkpoint.init_from``, and record the origin. A collective call.

    Return ``None`` with ``init_with = "weights"``: training begins at step 0. "optimizer" returns progress with the count of
    updates only.

    Args:
        checkpoint: The origin, and the parts that are taken over.
        directory: The run's own; rank 0 writes the origin into its record.
        built: The model, and how it is divided.
        shards: This rank's shards of weights and optimizer state.
        alone: Each rank has a machine of its own, so that what is fetched is not shared.

    Raises:
        CheckpointError: The checkpoint is gone or damaged, or holds another model or another optimizer's state.
    """
    began_s = time.monotonic()
    start = checkpoint.init_from
    tier, step = open_origin(start)
    if not tier.has(step):
        raise NoSuchStepError(
            f"{start} is gone: the run has saved no checkpoint of its own yet, so it needs that one to begin from"
        )
    parts, placement = built.model.parts, built.placement
    boxes = weight_shards(parts, placement) if checkpoint.init_with == "weights" else shards
    with tier.shared_on_this_machine() if isinstance(tier, ObjectTier) and not alone else nullcontext():
        extra = restore(tier, step, boxes, rank=placement.mesh.rank)
        dist.barrier()
    weights = tier.record(step).weights_sha256 or weights_sha256(parts, placement)
    if placement.mesh.rank == 0:
        _record(directory, start, step, weights, checkpoint.init_with)
    if checkpoint.init_with == "weights":
        return None
    if checkpoint.init_with == "optimizer":
        # Adam's bias correction depends on the number of updates in its moments; all other progress starts from zero.
        extra = asdict(TrainProgress(updates=TrainProgress.from_extra(extra).updates))
    progress = TrainProgress.from_extra(extra)
    seconds = time.monotonic() - began_s
    return RestoredState(progress.step, extra, (), start, seconds, taken_over=True)


def _record(directory: RunDirectory, start: str, step: int, weights: str, init_with: str) -> None:
    """Write the origin, appended to the parent's own origins, into the run's record. ``start`` is a checkpoint's
    folder or its URL; a store holds no record, so a URL has no earlier origins.
    """
    if is_url(start):
        place, above = start.rpartition("/")[0], dict[str, Any]()
    else:
        parent = RunDirectory(Path(start).parent.parent)
        place, above = str(parent.path), parent.read_record()
    origin = Origin(place, str(above.get("identity", "")), step, weights, init_with)
    record = {
        **directory.read_record(),
        "lineage": lineage_table([*read_lineage(above), origin]),
    }
    write_atomically(directory.record, (json.dumps(record, indent=1) + "\n").encode())
