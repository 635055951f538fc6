"""Resolves a path of the command line to checkpoints: a run directory, a folder of checkpoints, or one checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from phalanx.cli.errors import explained
from phalanx.run.directory.paths import RunDirectoryError, locate_checkpoints, step_of


@dataclass(frozen=True)
class CheckpointPlace:
    """A folder of checkpoints, and the step that is meant (``None``: the newest)."""

    root: Path
    step: int | None

    def newest(self, steps: list[int]) -> int:
        """The step that is meant, of those that there are. Raises ``ClickException`` if it is not among them."""
        if not steps:
            raise click.ClickException(f"there is no committed checkpoint in {self.root}")
        if self.step is not None and self.step not in steps:
            raise click.ClickException(f"there is no step {self.step} in {self.root}; there are {steps}")
        return steps[-1] if self.step is None else self.step


def checkpoint_place(path: Path, step: int | None = None) -> CheckpointPlace:
    """Finds the checkpoints that ``path`` names: ``RUN_DIR``, ``RUN_DIR/checkpoints`` or ``.../step-00000100``.

    Raises ``ClickException`` if there is nothing of the kind, or it is a checkpoint of another step.
    """
    if not path.is_dir():
        raise click.ClickException(f"there is no directory {path}; give a run directory or a checkpoint")
    with explained(RunDirectoryError):
        root, step = locate_checkpoints(path, step)
    if root != path or any(step_of(entry) is not None for entry in path.iterdir()):
        return CheckpointPlace(root, step)
    raise click.ClickException(
        f"{path} holds no checkpoints: it is no run directory, or its run has saved none yet"
    )
