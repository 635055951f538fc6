"""Names that PyTorch keeps private or has renamed, in one place, each with a test.

Supported: torch 2.11 and later. ``all_gather_single`` is 2.13's name for ``all_gather_into_tensor``, which it warns
about.
"""

from __future__ import annotations

from typing import cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["AllGather", "ReduceScatter", "all_gather_single", "box_of"]


def all_gather_single(output: Tensor, piece: Tensor, group: dist.ProcessGroup) -> None:
    """Concatenates every rank's ``piece`` ``(n,)`` in ``output`` ``(ranks * n,)``."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, piece, group=group)


def box_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where the piece of a tensor that this rank holds lies in the whole: (offset, shape).

    A rank that holds nothing of a sharded dimension gets a shape with a zero in it.
    """
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return cast(tuple[int, ...], tuple(offset)), cast(tuple[int, ...], tuple(shape))
