"""From tensors to boxes: which part of which full tensor a rank holds.

A plain tensor is its own full tensor. A DTensor says by its placements which box of the full one its local tensor
is (FSDP2's uneven chunks of dimension 0 and empty chunks included; local tensors carry no padding), and which ranks
hold the same box, so that saving can be shared among them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from phalanx.checkpoint.format.boxes import Box, whole
from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.parallel.mesh.torch_compat import local_slice_of


@dataclass(frozen=True, slots=True)
class Copies:
    """Who holds the same box: this is copy `index` of `count`; `group` tells sets of holders apart."""

    index: int = 0
    count: int = 1
    group: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Shard:
    """A box and the tensor that holds its elements, of the box's shape and dtype, on any device."""

    box: Box
    tensor: torch.Tensor
    copies: Copies = Copies()

    def part(self, box: Box) -> torch.Tensor:
        """The elements of `box`, which lies within this shard, as a view."""
        return self.tensor if box == self.box else self.tensor[box.slices_in(self.box)]


def shards_of(tensors: Mapping[str, torch.Tensor], *, replica: int = 0, replicas: int = 1) -> list[Shard]:
    """The boxes that this rank holds of the named tensors, as shards that share their memory.

    `replica` of `replicas` says who else holds the plain tensors alike; DTensors know that
    themselves, within their mesh: ranks outside it that hold the same write it too, which costs bytes only. Raises
    CheckpointError for a tensor that is not one box: a partial sum, or a placement that interleaves.
    """
    plain = Copies(replica, replicas)
    return [
        _shard_of_dtensor(name, tensor)
        if isinstance(tensor, DTensor)
        else Shard(whole(name, dtype_name(tensor.dtype), tuple(tensor.shape)), tensor.detach(), plain)
        for name, tensor in tensors.items()
    ]


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The inverse of `dtype_name`, for the dtypes of `boxes.ITEMSIZE`."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is not a torch dtype")
    return dtype


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
    """Shape and global offset of this rank's part. An empty part lies at the tensor's origin."""
    offset, shape = local_slice_of(tensor)
    return shape, (0,) * len(shape) if 0 in shape else offset


def _copies_of(tensor: DTensor) -> Copies:
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise CheckpointError(f"this rank is not in the mesh {mesh} of a tensor that it should save")
    alike = tuple(
        slice(None) if isinstance(placement, Replicate) else position
        for placement, position in zip(tensor.placements, coordinate, strict=True)
    )
    group = tuple(int(rank) for rank in mesh.mesh[alike].flatten().tolist())
    return Copies(group.index(mesh.get_rank()), len(group), group)
