"""Snapshots in memory written as a checkpoint, by the agents that hold them and without any worker.

A snapshot's image and a rank's file of a checkpoint are the same bytes (``format/image.py``), so this is a copy, each block of which is
checked against the checksum that was taken with the snapshot. Several nodes write one checkpoint, each its share; they meet in the draft
only, as ranks do, and whoever holds state 0 commits it. No torch.
"""

from collections.abc import Callable, Sequence

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.format.image import Image, ImageLayout
from phalanx.checkpoint.snapshot.segments import SnapshotKey, SnapshotMemory, verified
from phalanx.checkpoint.tiers.tier import Draft, Record, Tier, never


def save_snapshots(
    memory: SnapshotMemory,
    tier: Tier,
    draft: Draft,
    share: Sequence[tuple[SnapshotKey, int]],
    states: int,
    *,
    timeout_s: float,
    cancelled: Callable[[], bool] = never,
) -> bool:
    """Writes a node's share of a checkpoint of ``states`` different states; True if it has committed it too.

    Args:
        memory: Holds the snapshots.
        tier: Where the checkpoint is to be.
        draft: The step, and a number that no other try has had.
        share: The snapshots to write, each with the number of its state; who has number 0 commits.
        states: Number of different states: the checkpoint is whole with them.
        timeout_s: Time for which the other nodes are waited for before the commit.
        cancelled: Ends the wait once it is true.

    Raises:
        AbandonedError: Another node could not write, or did not in time.
        CheckpointError: This one cannot: its memory is damaged, or the disk is full. The others are told, by the draft.
    """
    extra: dict[str, object] | None = None
    for key, number in share:
        try:
            found = _write(memory, tier, draft, key, number, cancelled)
        except CheckpointError as error:
            tier.fail(draft, number, str(error))
            raise
        extra = found if number == 0 else extra
    for _, number in share:
        tier.collect(draft, number, states, timeout_s=timeout_s, cancelled=cancelled)
    if extra is None:
        return False
    tier.commit(draft, Record(draft.step, states, extra), timeout_s=timeout_s, cancelled=cancelled)
    return True


def _write(
    memory: SnapshotMemory,
    tier: Tier,
    draft: Draft,
    key: SnapshotKey,
    number: int,
    cancelled: Callable[[], bool],
) -> dict[str, object]:
    """Writes one snapshot as the file of state ``number``; returns its ``extra``, which is the same in all of a step."""
    with memory.reading(key) as (segment, snapshot):
        manifest = snapshot.manifest
        image = segment.image(manifest.nbytes)
        for index, start in enumerate(range(0, manifest.nbytes, manifest.block_bytes)):
            verified(manifest, index, image[start : start + manifest.block_bytes], f"{key} in own memory")
        # The header is a part of the image already.
        layout = ImageLayout(b"", manifest.entries, manifest.nbytes)
        tier.write(draft, number, Image(layout, image), cancelled=cancelled)
        return snapshot.extra
