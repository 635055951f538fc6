"""The identity of a model's weights: one SHA-256 that does not depend on how they are sharded or stored.

For each tensor, sorted by name, the line ``name dtype shape`` and the SHA-256 of its full data (little-endian, C
order) go into one SHA-256. Two levels, so that ranks hash tensors side by side and only 32 bytes of each travel. Two
runs have computed the same model exactly when these digests are equal.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.checkpoint.committed.gather import gather
from phalanx.checkpoint.format.boxes import Box, Extent, whole
from phalanx.checkpoint.format.errors import NotCoveredError
from phalanx.checkpoint.format.image import spans
from phalanx.checkpoint.tiers.tier import ReadableTier

WEIGHTS = "model/"
OPTIMIZER = "optimizer/"
_BATCH_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """A tensor's dtype (as "bfloat16"), full shape, and the 32-byte SHA-256 of its data."""

    dtype: str
    shape: Extent
    sha256: bytes


def tensor_digest(dtype: str, shape: Extent, data: Iterable[Any]) -> TensorDigest:
    """The digest of a tensor whose full data, little-endian in C order, comes as bytes-like parts in turn."""
    digest = hashlib.sha256()
    for part in data:
        digest.update(part)
    return TensorDigest(dtype, shape, digest.digest())


def combine(tensors: Mapping[str, TensorDigest]) -> str:
    """The digest of all tensors together, as 64 hexadecimal digits. A shape is written as ``2,3``, a scalar's as ``()``."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        shape = ",".join(map(str, tensor.shape)) or "()"
        digest.update(f"{name} {tensor.dtype} {shape}\n".encode())
        digest.update(tensor.sha256)
    return digest.hexdigest()


def digest_checkpoint(tier: ReadableTier, step: int, prefix: str = WEIGHTS) -> str:
    """The digest of the checkpoint's tensors whose names begin with ``prefix``, which is left out of the names.

    Streams with bounded memory. Raises NotCoveredError where the checkpoint has no such tensor or not all of one.
    """
    held = tier.boxes(step)
    wholes = {
        held_box.box.name: whole(held_box.box.name, held_box.box.dtype, held_box.box.global_shape)
        for held_box in held
        if held_box.box.name.startswith(prefix)
    }
    if not wholes:
        raise NotCoveredError(f"step {step} of {tier.name} holds no tensor named {prefix}...", [prefix])
    hashes = {name: hashlib.sha256() for name in wholes}
    for batch in batches([wholes[name] for name in sorted(wholes)]):
        for box, data in zip(batch, gather(tier, step, batch, held), strict=True):
            hashes[box.name].update(data.reshape(-1).view(np.uint8).data)
    return combine(
        {
            name.removeprefix(prefix): TensorDigest(box.dtype, box.global_shape, hashes[name].digest())
            for name, box in wholes.items()
        }
    )


def batches(tensors: Sequence[Box]) -> Iterator[list[Box]]:
    """Parts of the tensors, in C order and at most about ``_BATCH_BYTES`` at a time.

    Small tensors share a batch: they lie side by side in a file, whose blocks are then read once.
    """
    batch: list[Box] = []
    size = 0
    for tensor in tensors:
        for span in spans(tensor, tensor, _BATCH_BYTES):
            if batch and size + span.part.nbytes > _BATCH_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(span.part)
            size += span.part.nbytes
    if batch:
        yield batch
