"""Resolves a path of the command line to checkpoints: a run directory, a folder of checkpoints, or one checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.object_tier import COMMITTED, ObjectTier
from phalanx.cli.errors import demand_folder, explained
from phalanx.run.directory.paths import (
    RunDirectory,
    RunDirectoryError,
    import_first,
    is_published,
    locate_checkpoints,
    step_of,
)
from phalanx.store.open_store import is_url, open_store
from phalanx.store.store import StoreError


@dataclass(frozen=True)
class CheckpointPlace:
    """A folder of checkpoints, and the chosen step (``None``: the newest)."""

    root: Path
    step: int | None

    def newest(self, steps: list[int]) -> int:
        """Return the chosen step among ``steps``. Raises ``ClickException`` if it is missing."""
        return _chosen(steps, self.step, str(self.root))


def checkpoint_place(path: Path, step: int | None = None) -> CheckpointPlace:
    """Return the folder of checkpoints that ``path`` names, and the step.

    ``path`` is ``RUN_DIR``, ``RUN_DIR/checkpoints`` or ``.../step-00000100``. The step is that of the path, else
    ``step`` (``None``: the newest). It may not exist, and the folder of a run directory may be empty;
    ``CheckpointPlace.newest`` checks both.

    Raises ``ClickException`` with a remedy if ``path`` is no folder or none of these, or is a checkpoint of another
    step than ``step``. A run directory without that folder is none of these, nor is an empty folder.
    """
    demand_folder(path)
    with explained(RunDirectoryError):
        root, step = locate_checkpoints(path, step)
    if root != path or any(step_of(entry) is not None for entry in path.iterdir()):
        return CheckpointPlace(root, step)
    if remedy := import_first(path):
        raise click.ClickException(f"{path} is no run directory{remedy}")
    raise click.ClickException(
        f"{path} holds no checkpoints: it is no run directory, or its run has saved none yet"
    )


@contextmanager
def weights_place(path: Path, step: int | None = None) -> Iterator[CheckpointPlace]:
    """Context with the checkpoints as ``checkpoint_place`` returns them, also of a Hugging Face folder.

    That is represented by a temporary run directory, whose notes are printed to standard error; its ``step`` is
    not checked. A ``CheckpointError`` in the block then becomes ``ClickException``. Raises ``ClickException``
    for another path without checkpoints, or without ``step``.
    """
    if not is_published(path):
        yield checkpoint_place(path, step)
        return
    from phalanx.checkpoint.interop.huggingface.stored_folder import stand_in

    with explained(CheckpointError), stand_in(path) as folder:
        for note in folder.notes:
            click.echo(f"note: {note}", err=True)
        yield CheckpointPlace(RunDirectory(folder.path).checkpoints, step)


@dataclass(frozen=True)
class OpenCheckpoints:
    """Checkpoints that can be listed, verified and copied: the tier, its path or URL, and the chosen step
    (``None``: any).
    """

    tier: DiskTier | ObjectTier
    name: str
    step: int | None

    def newest(self) -> int:
        """Return the chosen step, else the newest. Raises ``ClickException`` if it is missing."""
        return _chosen(self.tier.steps(), self.step, self.name)


def open_checkpoints(place: str, step: int | None = None) -> OpenCheckpoints:
    """Open the checkpoints at a path or in an object store, also a folder in the form of a store.

    Raises ``ClickException`` if a path has none; a store is not checked yet.
    """
    if is_store(place):
        return OpenCheckpoints(open_object_tier(place), place, step)
    checkpoints = checkpoint_place(Path(place), step)
    return OpenCheckpoints(DiskTier(checkpoints.root), str(checkpoints.root), checkpoints.step)


def open_object_tier(place: str) -> ObjectTier:
    """Open the checkpoints of an object store. Raises ``ClickException`` if the URL is wrong."""
    with explained(StoreError):
        return ObjectTier(open_store(place))


def is_store(place: str) -> bool:
    """Return True for a URL, and for a folder with the layout of an object store of checkpoints."""
    return is_url(place) or (Path(place) / COMMITTED).is_dir()


def _chosen(steps: list[int], step: int | None, place: str) -> int:
    """Return ``step``, or the newest of ``steps`` for None. Raises ``ClickException`` if there are none, or not
    this one.
    """
    if not steps:
        raise click.ClickException(f"there is no committed checkpoint in {place}")
    if step is not None and step not in steps:
        raise click.ClickException(f"there is no step {step} in {place}; there are {steps}")
    return steps[-1] if step is None else step
