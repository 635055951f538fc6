"""Partition of a parameter over the tensor and expert axes: where a rank's part lies in the whole.

The tensor and expert axes leave each rank with plain tensors that are parts of the whole; FSDP2 then divides these parts
and knows of nothing else. A ``Partition`` keeps what FSDP2 does not know, so that initial values, checkpoints, hashes and
norms can speak of the whole parameter: for each dimension that is divided, which piece of how many this is, and among
which ranks. Pieces are as even as can be: piece *i* of *n* of a size *s* begins at ``i * s // n``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.mesh.local_slice import LocalSlice
from phalanx.parallel.mesh.torch_compat import local_slice_of


def piece(size: int, index: int, count: int) -> range:
    """The indices of piece ``index`` of ``count`` of a dimension."""
    return range(index * size // count, (index + 1) * size // count)


@dataclass(frozen=True)
class DimSplit:
    """One dimension of a parameter, divided over the ranks of ``group``; this rank has piece ``index`` of ``count``."""

    dim: int
    index: int
    count: int
    group: dist.ProcessGroup
    copies: int = 1
    """Neighbors in ``group`` that hold the same piece; the group has ``count * copies`` ranks."""


@dataclass(frozen=True)
class Partition:
    """The division of a parameter of shape ``whole`` over the tensor and expert axes."""

    whole: tuple[int, ...]
    splits: tuple[DimSplit, ...] = ()
    copy: int = 0
    """Number of this rank among those of these axes that hold the same part."""
    copies: int = 1

    @property
    def part(self) -> LocalSlice:
        """This rank's part, before FSDP divides it."""
        offset, shape = [0] * len(self.whole), list(self.whole)
        for split in self.splits:
            indices = piece(self.whole[split.dim], split.index, split.count)
            offset[split.dim], shape[split.dim] = indices.start, len(indices)
        return LocalSlice(tuple(offset), tuple(shape))

    def local_slice(self, tensor: Tensor) -> LocalSlice:
        """The part of the whole that this rank holds of a tensor that is laid out like the parameter."""
        begin, _ = self.part
        offset, shape = local_slice_of(tensor)
        return LocalSlice(tuple(a + b for a, b in zip(begin, offset, strict=True)), shape)

    def gather(self, part: Tensor) -> Tensor:
        """All-gathers the whole from the ranks' parts (not divided by FSDP). A collective of the splits' groups."""
        for split in self.splits:
            size = self.whole[split.dim]
            longest = -(-size // split.count)
            shape = list(part.shape)
            shape[split.dim] = longest
            padded = part.new_zeros(shape)
            padded.narrow(split.dim, 0, part.shape[split.dim]).copy_(part)
            pieces = [torch.empty_like(padded) for _ in range(split.count * split.copies)]
            dist.all_gather(pieces, padded, group=split.group)
            part = torch.cat(
                [
                    other.narrow(split.dim, 0, len(piece(size, index, split.count)))
                    for index, other in enumerate(pieces[:: split.copies])
                ],
                split.dim,
            )
        return part
