"""A run's state as named tensors: how it begins, how it is found again, and what its weights hash to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.checkpoint.digest import TensorDigest, combine, tensor_digest
from phalanx.checkpoint.errors import CheckpointError
from phalanx.checkpoint.restore import candidates, restore
from phalanx.checkpoint.state import Copies, Shard, dtype_name, shards_of
from phalanx.checkpoint.tier import Tier
from phalanx.model.init import fill
from phalanx.model.shape import Parameter
from phalanx.parallel.data_parallel import local
from phalanx.parallel.mesh import DataMesh
from phalanx.parallel.torch_compat import box_of
from phalanx.run.spec import RunSpec
from phalanx.train.adamw import AdamW


class NoGoodCheckpointError(RuntimeError):
    """There are checkpoints, but none can be restored."""


@dataclass(frozen=True)
class RestoredState:
    """What was restored, and what had to be passed over on the way."""

    step: int
    extra: dict[str, Any]
    passed_over: tuple[str, ...]


def fill_initial(module: nn.Module, kinds: Mapping[str, Parameter], spec: RunSpec) -> None:
    """Fills what this rank holds of every parameter with its initial values."""
    for name, parameter in module.named_parameters():
        offset, _ = box_of(parameter)
        fill(local(parameter.detach()), kinds[name], offset, spec.model, spec.runtime.seed)


def weight_shards(module: nn.Module, mesh: DataMesh) -> list[Shard]:
    """What this rank holds of the weights, named as in a checkpoint."""
    return _shards({f"model/{name}": p.detach() for name, p in module.named_parameters()}, mesh)


def state_shards(module: nn.Module, optimizer: AdamW, mesh: DataMesh) -> list[Shard]:
    """What this rank holds of weights and moments, named as in a checkpoint."""
    moments = {f"optimizer/exp_avg/{name}": tensor for name, tensor in optimizer.exp_avg.items()}
    moments |= {f"optimizer/exp_avg_sq/{name}": tensor for name, tensor in optimizer.exp_avg_sq.items()}
    return [*weight_shards(module, mesh), *_shards(moments, mesh)]


def _shards(tensors: Mapping[str, Tensor], mesh: DataMesh) -> list[Shard]:
    # Shards live on their replica's mesh and do not know of the other replicas, who hold the same.
    group = tuple(int(rank) for rank in mesh.mesh.mesh[:, mesh.shard_rank].tolist())
    copies = Copies(mesh.replica, mesh.replicas, group)
    return [
        dataclasses.replace(shard, copies=copies) if shard.copies.count == 1 else shard
        for shard in shards_of(tensors)
    ]


def restore_newest(tier: Tier, shards: Sequence[Shard], mesh: DataMesh) -> RestoredState | None:
    """Fills ``shards`` from the newest checkpoint that every rank can read in full; ``None`` if there is none.

    A rank that finds its part torn or corrupted says so, and all ranks turn to the next older one together. Raises
    ``NoGoodCheckpointError`` when none is left.
    """
    passed_over: list[str] = []
    damaged: list[int] = []
    for step in _agreed_candidates(tier, mesh):
        error = ""
        extra: dict[str, Any] = {}
        try:
            extra = restore(tier, step, shards, rank=mesh.rank)
        except CheckpointError as problem:
            error = str(problem)
        errors: list[str] = [""] * mesh.ranks
        dist.all_gather_object(errors, error)
        if not any(errors):
            if mesh.rank == 0:
                # Training will come by these steps again, and then they are to be saved anew.
                for bad in damaged:
                    tier.set_aside(bad)
            dist.barrier()
            return RestoredState(step, extra, tuple(passed_over))
        damaged.append(step)
        passed_over += sorted({f"step {step}: {text}" for text in errors if text})
    if passed_over:
        raise NoGoodCheckpointError(
            "no checkpoint can be restored; remove the damaged ones to start from scratch:\n"
            + "\n".join(f"  {line}" for line in passed_over)
        )
    return None


def _agreed_candidates(tier: Tier, mesh: DataMesh) -> list[int]:
    """The steps to try, as rank 0 sees them: a shared file system may show them to others a moment later."""
    steps = [candidates(tier) if mesh.rank == 0 else []]
    dist.broadcast_object_list(steps, src=0)
    return steps[0]


def weights_sha256(module: nn.Module, mesh: DataMesh) -> str:
    """The hash of all weights, the same on any mesh and from any checkpoint (``phalanx.checkpoint.digest``).

    One tensor at a time is made whole; the ranks take turns at hashing.
    """
    mine: dict[str, TensorDigest] = {}
    for number, (name, parameter) in enumerate(module.named_parameters()):
        tensor = parameter.detach()
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if number % mesh.ranks == mesh.rank:
            data = whole.cpu().contiguous().view(torch.uint8).numpy()
            mine[name] = tensor_digest(dtype_name(whole.dtype), tuple(whole.shape), [data])
    gathered: list[dict[str, TensorDigest]] = [{} for _ in range(mesh.ranks)]
    dist.all_gather_object(gathered, mine)
    return combine({name: digest for part in gathered for name, digest in part.items()})
