"""What a coordinator sees and keeps right on the run's disk: checkpoints, the run's small files, and checkpoints not to be trusted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.fleet.control.distrust import record_distrust
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.state import FleetState
from phalanx.run.directory.paths import DirectoryKeeper, RunDirectory, step_of
from phalanx.run.spec import RunSpec


class RunDisk:
    """The run directory, looked at once per tick."""

    def __init__(self, directory: RunDirectory, tick_s: float, log: Callable[[str], None]) -> None:
        self._directory, self._tick_s, self._log = directory, tick_s, log
        self._keeper = DirectoryKeeper(directory)
        self._checkpoints: tuple[int, ...] = ()
        """The committed steps that the core knows of."""
        self._complaint = ""
        self.due_s = 0.0
        """When it is to be looked at again."""

    def look(self, now_s: float) -> m.DiskHolds | None:
        """The committed checkpoints, if the core knows of others; it is told them until ``told``."""
        self.due_s = now_s + self._tick_s
        found = self._committed()
        return m.DiskHolds(found) if found != self._checkpoints else None

    def told(self, holds: m.DiskHolds) -> None:
        """The core knows of these from now on."""
        self._checkpoints = holds.steps

    def mend(self) -> list[str]:
        """Mends the run's record and run file if they were damaged; returns what is to be told of that."""
        with suppress(OSError):  # tried again at the next look
            return list(self._keeper.look())
        return []

    def _committed(self) -> tuple[int, ...]:
        """The committed steps on disk; those of the last look if the disk, or this process's open files, allow none now."""
        try:
            found = tuple(self._directory.committed_steps())
        except OSError as error:
            if str(error) != self._complaint:
                self._log(f"cannot look for checkpoints: {error}; trying again")
            self._complaint = str(error)
            return self._checkpoints
        self._complaint = ""
        return found

    def set_aside(self, state: FleetState, *, stored: bool) -> None:
        """Sets aside the checkpoints that are not to be trusted; their steps are saved again. ``stored``: there are copies in a store."""
        if state.condemned and state.distrust and stored:
            with suppress(OSError):  # written again at the next turn, for as long as they are on disk
                record_distrust(self._directory, state.distrust[-1].step)
        for saved in state.condemned:
            with suppress(CheckpointError, OSError):
                DiskTier(self._directory.checkpoints).set_aside(saved)


def first_step(spec: RunSpec, directory: RunDirectory, log: Callable[[str], None]) -> int:
    """The step that the run begins with if nothing is on disk: of the newest copy in its store, or of its parent; 0 for another run."""
    if spec.checkpoint.store and not directory.committed_steps():
        # The client of stores, only where there is one.
        from phalanx.checkpoint.tiers.object_tier import ObjectTier
        from phalanx.store.open_store import open_store

        try:
            copied = ObjectTier(open_store(spec.checkpoint.store)).steps()
        except CheckpointError as error:
            log(f"cannot look for copies: {error}")  # the workers will try again
        else:
            if copied:
                return copied[-1]
    inherits = spec.checkpoint.init_with == "training"
    return (step_of(Path(spec.checkpoint.init_from)) or 0) if inherits else 0
