"""Full parameters, put together from the ranks' parts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.mesh import Partition, piece


def full_parameter(partition: Partition, part: Tensor) -> Tensor:
    """Return the full parameter, all-gathered from the ranks' parts, which FSDP has not sharded. Of several copies of
    a part, the first is taken. A collective of the splits' groups.
    """
    for split in partition.splits:
        size = partition.full_shape[split.dim]
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
