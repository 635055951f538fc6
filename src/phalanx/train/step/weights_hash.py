"""The hash of all weights of a model that trains, the same on any mesh and from any checkpoint.

A tensor's SHA-256 goes over its elements in their order (``phalanx.checkpoint.committed.digest``), which lie on many ranks. They are brought
to one rank in pieces, so that no rank ever has a whole tensor: each rank lays its elements into a piece of zeros, and the pieces
are added up as bytes, where all but one are zero. Replicas divide the tensors among them, and the ranks of a replica hash
different tensors at the same time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.checkpoint.committed.digest import WEIGHTS, TensorDigest, combine
from phalanx.checkpoint.format.boxes import Box, whole
from phalanx.checkpoint.format.image import spans
from phalanx.checkpoint.format.shards import Shard
from phalanx.parallel.mesh.torch_compat import device_of_messages
from phalanx.parallel.process_group.typed_gather import gather_typed
from phalanx.train.step.placement import Placement
from phalanx.train.step.state import weight_shards

_PIECE_BYTES = 64 << 20


def weights_sha256(
    parts: Sequence[nn.Module], placement: Placement, *, piece_bytes: int = _PIECE_BYTES
) -> str:
    """The hash of all weights, as 64 hexadecimal digits, on every rank. A collective call of all ranks.

    Beside its weights a rank needs memory for three pieces of ``piece_bytes``. The first ranks of a replica send and receive about as
    many bytes as the model has, over the number of replicas.
    """
    mesh, group = placement.mesh, placement.mesh.stage_group
    ranks = dist.get_process_group_ranks(group)
    shards = weight_shards(parts, placement)
    members = set(ranks)
    writers = {shard.box.name: min(members.intersection(shard.copies.group)) for shard in shards}
    hashes: dict[Box, hashlib._Hash] = {}
    with ThreadPoolExecutor(1) as hashing:
        last: Future[None] | None = None
        for shard, box, hasher in _pieces(shards[mesh.replica :: mesh.replicas], ranks, piece_bytes):
            writes = writers[box.name] == mesh.rank
            piece = _laid_in(box, shard, device_of_messages(group), writes=writes)
            if len(ranks) > 1 and piece.numel():
                dist.reduce(piece, hasher, group=group)
            if hasher == mesh.rank:
                if last is not None:
                    last.result()
                digest = hashes.setdefault(shard.box, hashlib.sha256())
                last = hashing.submit(digest.update, piece.cpu().numpy().data)
    mine = {
        box.name.removeprefix(WEIGHTS): TensorDigest(box.dtype, box.global_shape, digest.digest())
        for box, digest in hashes.items()
    }
    gathered = gather_typed(mine, dict[str, TensorDigest])
    return combine({name: digest for part in gathered for name, digest in part.items()})


def _pieces(
    shards: Sequence[Shard], ranks: Sequence[int], piece_bytes: int
) -> Iterator[tuple[Shard, Box, int]]:
    """Each tensor's pieces in the order of its elements, with the rank that hashes it; those of as many tensors as ranks in turn."""
    for first in range(0, len(shards), len(ranks)):
        together = shards[first : first + len(ranks)]
        cut = []
        for shard, hasher in zip(together, ranks, strict=False):
            tensor = whole(shard.box.name, shard.box.dtype, shard.box.global_shape)
            cut.append(
                [(shard, span.part, hasher) for span in spans(tensor, tensor, piece_bytes)]
                or [(shard, tensor, hasher)]
            )
        for one_each in zip_longest(*cut):
            yield from (piece for piece in one_each if piece is not None)


def _laid_in(piece: Box, shard: Shard, device: torch.device, *, writes: bool) -> Tensor:
    """The bytes of ``piece``: those that this rank holds, if it ``writes``, and zeros."""
    laid = torch.zeros(piece.shape, dtype=shard.tensor.dtype, device=device)
    common = shard.box.intersection(piece) if writes else None
    if common is not None:
        laid[common.slices_in(piece)] = shard.part(common).to(device)
    return laid.reshape(-1).view(torch.uint8)
