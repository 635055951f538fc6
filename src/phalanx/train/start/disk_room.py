"""Checks before the first step that the disk has room for the checkpoints that the run will keep."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

from phalanx.model.facts.optimizer_state import state_bytes_by_name
from phalanx.model.facts.shape import parameters
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.factory import FactoryError
from phalanx.run.spec import RunSpec


def disk_notes(spec: RunSpec, directory: RunDirectory) -> Iterator[str]:
    """Yield a sentence if the run's checkpoints will not fit on the disk of ``directory``; none where that is not known."""
    place = directory.checkpoints if directory.checkpoints.is_dir() else directory.path
    try:
        disk = shutil.disk_usage(place)
        size = checkpoint_bytes(spec)
        count = most_on_disk(spec) - len(directory.committed_steps())
    except (OSError, FactoryError):
        return
    # Some file systems of networks do not say how large they are.
    if disk.total and (note := lack_of_room(place, disk.free, count, size)):
        yield note


def lack_of_room(place: Path, free_bytes: int, count: int, size_bytes: int) -> str:
    """Return a sentence if ``count`` more checkpoints do not fit into the free bytes of ``place``; empty if they do."""
    if free_bytes >= count * size_bytes:
        return ""
    more = f"{count:,} more checkpoints" if count > 1 else "a checkpoint"
    return (
        f"the disk of {place} has {free_bytes:,} bytes free, and {more} of {size_bytes:,} bytes will be on it at once: a save that finds no room is "
        "given up. Make room, or keep fewer (checkpoint.keep_last, checkpoint.keep_every)"
    )


def checkpoint_bytes(spec: RunSpec) -> int:
    """Return the bytes of weights and optimizer state of a resolved run. Raises FactoryError for a user's own model."""
    pieces = list(parameters(spec.model))
    weights = 4 * sum(math.prod(piece.shape) for piece in pieces)
    return weights + sum(state_bytes_by_name(spec.optimizer, pieces).values())


def most_on_disk(spec: RunSpec) -> int:
    """Return the number of checkpoints that are on disk at once: those kept, and the one that is written before the oldest is deleted."""
    steps, rule = spec.train.steps, spec.checkpoint
    saved = math.ceil(steps / rule.every_steps) if rule.every_steps else steps
    for_good = steps // rule.keep_every if rule.keep_every else 0
    return min(saved, rule.keep_last + 1 + for_good)
