"""Puts a run together on one rank: mesh, model, optimiser, data, checkpoints, ledger."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.checkpoint.disk import DiskTier
from phalanx.checkpoint.restore import restore
from phalanx.checkpoint.retention import Retention
from phalanx.checkpoint.saver import AsyncSaver
from phalanx.checkpoint.state import Shard
from phalanx.data.dataset import RunData
from phalanx.hardware.accelerators import accelerator_named
from phalanx.hardware.matmul_peak import measure_matmul_flops
from phalanx.observe.ledger import Bucket, Ledger
from phalanx.parallel.mesh import Mesh, build_mesh
from phalanx.run.spec import RunSpec
from phalanx.train.compose import Built, build_model
from phalanx.train.interrupt import StopRequest
from phalanx.train.reporter import Reporter
from phalanx.train.run_directory import RunDirectory, check_data
from phalanx.train.state import RestoredState, fill_initial, restore_newest, state_shards, weight_shards


@dataclass(frozen=True)
class Peak:
    """What 100% MFU means."""

    flops_per_s: float
    source: str


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
    memory_bytes: dict[str, int] = field(default_factory=dict)
    """By kind, on the rank that holds most of it, once it has been measured."""
    stalls_s: dict[int, float] = field(default_factory=dict)
    """For how long each save held training up, by step."""
    last_saved_step: int | None = None
    last_save_good: bool = True
    """Whether the newest save that has ended is durable; rank 0 knows."""


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
) -> Training:
    """Builds everything on this rank and restores the newest state that there is."""
    ledger.switch(Bucket.START_PLAN_COMPILE)
    mesh = build_mesh(spec, dist.get_world_size(), device)
    built = build_model(spec, mesh)
    parts, placement = built.model.parts, built.placement
    shards = state_shards(parts, built.optimizer, placement)
    ledger.switch(Bucket.START_RESTORE)
    tier = DiskTier(directory.checkpoints)
    restored = restore_newest(tier, shards, mesh)
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
    saver.prepare(shards)
    ledger.switch(Bucket.START_DATA_SEEK)
    data = RunData(Path(spec.data.path), spec.train.seq_len, spec.runtime.seed)
    check_data(directory, data.fingerprint)
    ledger.switch(Bucket.START_WARMUP)
    peak = _peak(spec, mesh)
    gc.collect()
    gc.freeze()  # what lives as long as the run need not be looked at by every collection
    return Training(
        spec=spec,
        directory=directory,
        attempt=attempt,
        mesh=mesh,
        built=built,
        data=data,
        shards=shards,
        saver=saver,
        reporter=reporter,
        ledger=ledger,
        stop=stop,
        peak=peak,
        restored=restored,
    )


def load_weights(source: Path, shards: list[Shard]) -> None:
    """Fills ``shards`` with the weights of the checkpoint ``source``, a folder ``.../step-00000100``.

    Raises ``CheckpointError`` if it is damaged, or of another model.
    """
    restore(DiskTier(source.parent), int(source.name.removeprefix("step-")), shards)


def _peak(spec: RunSpec, mesh: Mesh) -> Peak:
    """The peak of all ranks together: by data sheet where the accelerator is known, else measured now."""
    dtype = torch.bfloat16 if spec.precision.compute == "bf16" else torch.float32
    if mesh.device.type == "cuda" and dtype == torch.bfloat16:
        known = accelerator_named(torch.cuda.get_device_name(mesh.device))
        if known is not None:
            return Peak(known.bf16_flops * mesh.ranks, f"{mesh.ranks} x {known.source}")
    dist.barrier()  # all ranks measure at once: they will compute at once
    rate = torch.tensor([measure_matmul_flops(mesh.device, dtype)], dtype=torch.float64, device=mesh.device)
    dist.all_reduce(rate)
    return Peak(
        float(rate.item()), f"measured {spec.precision.compute} matrix product, {mesh.ranks} ranks at once"
    )
