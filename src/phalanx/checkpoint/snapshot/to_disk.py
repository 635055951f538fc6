"""Snapshots in memory written as a checkpoint, by the agents that have them and without any worker.

A snapshot's image and a rank's file of a checkpoint are the same bytes (``format/image.py``), so this is a copy. Each block is verified
by the checksum that was taken with the snapshot. Several nodes write shares of one checkpoint. They meet only in the draft, as ranks do,
and the node with state 0 commits it. No torch.
"""

from collections.abc import Callable, Sequence

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.format.image import Image, ImageLayout
from phalanx.checkpoint.snapshot.segments import SnapshotKey, SnapshotMemory, verified
from phalanx.checkpoint.tiers.tier import Draft, StepRecord, Tier, never


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
    """Write a node's share of a checkpoint of ``states`` different states; return True if it has also committed it.

    Args:
        memory: The snapshots.
        tier: Destination of the checkpoint.
        draft: The step, and an attempt number that was not used before.
        share: The snapshots to write, each with the number of its state; the node with number 0 commits.
        states: Number of different states; the checkpoint is complete with them.
        timeout_s: Limit of the wait for other nodes before the commit.
        cancelled: Ends the wait once it is true.

    Raises:
        AbandonedError: Another node could not write, or was too late.
        CheckpointError: This node's memory is damaged, or the disk is full. The draft passes the failure to the others.
    """
    extra: dict[str, object] | None = None
    for key, number in share:
        try:
            step_extra = _write(memory, tier, draft, key, number, cancelled)
        except CheckpointError as error:
            tier.fail(draft, number, str(error))
            raise
        extra = step_extra if number == 0 else extra
    for _, number in share:
        tier.collect(draft, number, states, timeout_s=timeout_s, cancelled=cancelled)
    if extra is None:
        return False
    tier.commit(draft, StepRecord(draft.step, states, extra), timeout_s=timeout_s, cancelled=cancelled)
    return True


def _write(
    memory: SnapshotMemory,
    tier: Tier,
    draft: Draft,
    key: SnapshotKey,
    number: int,
    cancelled: Callable[[], bool],
) -> dict[str, object]:
    """Verify one snapshot and write it as the file of state ``number``; return its ``extra``, which is the same in all
    of a step.
    """
    with memory.reading(key) as (segment, snapshot):
        manifest = snapshot.manifest
        image = segment.image(manifest.nbytes)
        for index, start in enumerate(range(0, manifest.nbytes, manifest.block_bytes)):
            verified(manifest, index, image[start : start + manifest.block_bytes], f"{key} in own memory")
        # The header is a part of the image already.
        layout = ImageLayout(b"", manifest.entries, manifest.nbytes)
        tier.write(draft, number, Image(layout, image), cancelled=cancelled)
        return snapshot.extra
