"""From tensors to shards: which part of which full tensor a rank holds.

A plain tensor is its own full tensor. The placements of a DTensor give the box of the full one that its local tensor
is (FSDP2's uneven chunks of dimension 0 and empty chunks included; local tensors carry no padding), and which ranks
hold the same box, so that saving can be shared among them.
"""

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from phalanx.checkpoint.committed.restore import Copies, Shard, dtype_name
from phalanx.checkpoint.format.boxes import Box, full_box
from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.parallel.torch_compat import local_slice_of


def shards_of(tensors: Mapping[str, torch.Tensor], *, replica: int = 0, replicas: int = 1) -> list[Shard]:
    """The boxes that this rank holds of the named tensors, as shards that share their memory.

    The plain tensors are copy ``replica`` of ``replicas`` equal ones. DTensors state their copies
    themselves, within their mesh: ranks outside it that hold the same write it too, which costs bytes only. Raises
    CheckpointError for a tensor that is not one box: a partial sum, or a placement that interleaves.
    """
    plain = Copies(replica, replicas)
    return [
        _shard_of_dtensor(name, tensor)
        if isinstance(tensor, DTensor)
        else Shard(full_box(name, dtype_name(tensor.dtype), tuple(tensor.shape)), tensor.detach(), plain)
        for name, tensor in tensors.items()
    ]


def _shard_of_dtensor(name: str, tensor: DTensor) -> Shard:
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise CheckpointError(
            f"{name}: placements {tensor.placements}: reduce partial sums before saving them"
        )
    shape, offset = _local_box(tensor)
    local = tensor.to_local().detach()
    if tuple(local.shape) != shape:
        raise CheckpointError(
            f"{name}: holds {tuple(local.shape)}, but its placements {tensor.placements} say {shape}"
        )
    box = Box(name, dtype_name(tensor.dtype), tuple(tensor.shape), offset, shape)
    return Shard(box, local, _copies_of(tensor))


def _local_box(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and global offset of this rank's part. An empty part is at the tensor's origin."""
    offset, shape = local_slice_of(tensor)
    return shape, (0,) * len(shape) if 0 in shape else offset


def _copies_of(tensor: DTensor) -> Copies:
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise CheckpointError(f"this rank is not in the mesh {mesh} of a tensor that it should save")
    same_box = tuple(
        slice(None) if isinstance(placement, Replicate) else position
        for placement, position in zip(tensor.placements, coordinate, strict=True)
    )
    group = tuple(int(rank) for rank in mesh.mesh[same_box].flatten().tolist())
    return Copies(group.index(mesh.get_rank()), len(group), group)
