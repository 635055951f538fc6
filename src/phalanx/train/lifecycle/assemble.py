"""Puts a run together on one rank: mesh, model, optimizer, data, checkpoints, ledger."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.checkpoint.format.errors import NoSuchStepError
from phalanx.checkpoint.format.state import Shard
from phalanx.checkpoint.save.saver import AsyncSaver
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.restore import restore
from phalanx.checkpoint.tiers.retention import Retention
from phalanx.checkpoint.tiers.tier import Tier
from phalanx.data.dataset import RunData
from phalanx.hardware.accelerators import accelerator_named
from phalanx.hardware.matmul_peak import measure_matmul_flops
from phalanx.observe.ledger import Bucket, Ledger
from phalanx.parallel.mesh.mesh import Mesh, build_mesh
from phalanx.run.directory import RunDirectory, locate_checkpoints
from phalanx.run.spec import RunSpec
from phalanx.train.lifecycle.compose import Built, build_model
from phalanx.train.lifecycle.guardian import Guardian, Nobody
from phalanx.train.lifecycle.interrupt import StopRequest
from phalanx.train.lifecycle.reporter import Reporter
from phalanx.train.lifecycle.run_directory import check_data
from phalanx.train.step.state import RestoredState, fill_initial, restore_newest, state_shards, weight_shards
from phalanx.train.step.step import Votes


@dataclass(frozen=True)
class Peak:
    """What 100% MFU means."""

    flops_per_s: float
    source: str


@dataclass(frozen=True)
class Kept:
    """What a process that goes from one epoch of membership to the next need not make again."""

    data: RunData
    peak_of_rank: Peak


@dataclass(frozen=True)
class Origin:
    """Where a rank comes from and who watches over it; by default, from the newest checkpoint on disk, and nobody."""

    restore: Callable[[Tier, Sequence[Shard], Mesh], RestoredState | None] = restore_newest
    """Fills this rank's shards; ``None`` if there is nothing to restore and the run begins."""
    guardian: Guardian = field(default_factory=Nobody)
    kept: Kept | None = None


@dataclass
class Training:
    """A run on one rank, ready to step."""

    spec: RunSpec
    directory: RunDirectory
    attempt: int
    mesh: Mesh
    built: Built
    data: RunData
    shards: list[Shard]
    saver: AsyncSaver
    reporter: Reporter
    ledger: Ledger
    stop: StopRequest
    peak: Peak
    restored: RestoredState | None
    guardian: Guardian
    memory_bytes: dict[str, int] = field(default_factory=dict)
    """By kind, on the rank that holds most of it, once it has been measured."""
    stalls_s: dict[int, float] = field(default_factory=dict)
    """For how long each save held training up, by step."""
    last_saved_step: int | None = None
    last_save_good: bool = True
    """Whether the newest save that has ended is durable; rank 0 knows."""

    def votes(self) -> Votes:
        """What this rank asks of all."""
        return Votes(self.stop.made, not self.guardian.safe(), self.guardian.leaving())

    def fence(self) -> None:
        """Before weights change: copies of them that still run come first."""
        self.saver.fence()
        self.guardian.fence()


def make_deterministic(spec: RunSpec, device: torch.device) -> None:
    """Fixes what of PyTorch's own choices would reach the bits."""
    torch.set_num_threads(spec.runtime.threads)
    torch.manual_seed(spec.runtime.seed)
    torch.use_deterministic_algorithms(True)
    # Deterministic mode would also fill every new buffer with NaN, which costs a pass over memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def assemble(
    spec: RunSpec,
    directory: RunDirectory,
    attempt: int,
    device: torch.device,
    reporter: Reporter,
    ledger: Ledger,
    stop: StopRequest,
    origin: Origin,
) -> Training:
    """Builds everything on this rank and restores the state that it begins with."""
    ledger.switch(Bucket.START_PLAN_COMPILE)
    mesh = build_mesh(spec, dist.get_world_size(), device)
    built = build_model(spec, mesh)
    parts, placement = built.model.parts, built.placement
    shards = state_shards(parts, built.optimizer, placement)
    ledger.switch(Bucket.START_RESTORE)
    tier = DiskTier(directory.checkpoints)
    restored = origin.restore(tier, shards, mesh)
    if restored is None:
        fill_initial(parts, placement, spec)
        if spec.checkpoint.init_from:
            load_weights(Path(spec.checkpoint.init_from), weight_shards(parts, placement))
    saver = AsyncSaver(
        tier,
        mesh.rank,
        mesh.ranks,
        attempt=attempt,
        timeout_s=spec.checkpoint.timeout_s,
        retention=Retention(spec.checkpoint.keep_last, spec.checkpoint.keep_every or None),
    )
    kept = origin.kept
    if kept is None:
        saver.prepare(shards)
        kept = _first_time(spec, mesh, ledger)
    check_data(directory, kept.data.fingerprint)
    ledger.switch(Bucket.START_WARMUP)
    return Training(
        spec=spec,
        directory=directory,
        attempt=attempt,
        mesh=mesh,
        built=built,
        data=kept.data,
        shards=shards,
        saver=saver,
        reporter=reporter,
        ledger=ledger,
        stop=stop,
        peak=_of_all(kept.peak_of_rank, mesh.ranks),
        restored=restored,
        guardian=origin.guardian,
    )


def keep(spec: RunSpec, device: torch.device) -> Kept:
    """Opens the data and finds out what this machine can do, without any other rank."""
    return Kept(RunData(Path(spec.data.path), spec.train.seq_len, spec.runtime.seed), _peak(spec, device))


def _first_time(spec: RunSpec, mesh: Mesh, ledger: Ledger) -> Kept:
    """The same on all ranks at once: they will compute at once."""
    ledger.switch(Bucket.START_DATA_SEEK)
    dist.barrier()
    ledger.switch(Bucket.START_WARMUP)
    kept = keep(spec, mesh.device)
    rate = torch.tensor([kept.peak_of_rank.flops_per_s], dtype=torch.float64, device=mesh.device)
    dist.all_reduce(rate)
    return Kept(kept.data, Peak(float(rate.item()) / mesh.ranks, kept.peak_of_rank.source))


def load_weights(source: Path, shards: list[Shard]) -> None:
    """Fills ``shards`` with the weights of the checkpoint ``source``, a folder ``.../step-00000100``.

    Raises ``CheckpointError`` if it is damaged, or of another model.
    """
    root, step = locate_checkpoints(source)
    if step is None:
        raise NoSuchStepError(f"{source} is no committed checkpoint; give a folder .../step-00000100")
    restore(DiskTier(root), step, shards)


def _peak(spec: RunSpec, device: torch.device) -> Peak:
    """The peak of a rank: by data sheet where the accelerator is known, else measured now."""
    dtype = torch.bfloat16 if spec.precision.compute == "bf16" else torch.float32
    if device.type == "cuda" and dtype == torch.bfloat16:
        known = accelerator_named(torch.cuda.get_device_name(device))
        if known is not None:
            return Peak(known.bf16_flops, known.source)
    rate = _measured_flops(device, dtype, torch.get_num_threads())
    return Peak(rate, f"measured {spec.precision.compute} matrix product")


@functools.cache
def _measured_flops(device: torch.device, dtype: torch.dtype, threads: int) -> float:  # noqa: ARG001  a part of the key
    """Once in a process: it takes longer than many a small run."""
    return measure_matmul_flops(device, dtype)


def _of_all(one: Peak, ranks: int) -> Peak:
    return Peak(one.flops_per_s * ranks, f"{ranks} x {one.source}")
