"""State of the copies in a run's store, from the run's events and its disk. The store is not queried, because that could take minutes."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.checkpoint.save.save_schedule import is_copied
from phalanx.observe.event_log import EventLogError, newest_event
from phalanx.observe.events import CheckpointCopied, CheckpointFailed, Event, Restored
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.spec import RunSpec
from phalanx.store.open_store import joined


@dataclass(frozen=True)
class StoreStanding:
    """Newest step in the store, saved steps that are not copied yet, and the error of the last copy, if it failed."""

    url: str
    newest: int | None
    behind: tuple[int, ...]
    error: str = ""

    def __str__(self) -> str:
        """Return one line: the newest copied step, the steps that are on disk alone, and the error."""
        newest = "nothing yet" if self.newest is None else f"step {self.newest}"
        text = f"in {self.url}: {newest}"
        if self.behind:
            steps = "steps" if len(self.behind) > 1 else "step"
            text += f"; on disk alone: {steps} {', '.join(map(str, self.behind))}"
        return f"{text} ({self.error})" if self.error else text


def store_standing(spec: RunSpec, directory: RunDirectory) -> StoreStanding | None:
    """Return the state of a resolved run's copies, from its events and its disk: the newest copied step, the steps
    still to copy, and the newest failure since. ``None`` if it has no store. Raises ``OSError`` if its disk cannot be
    read.
    """
    checkpoint = spec.checkpoint
    if not checkpoint.store:
        return None
    url = joined(checkpoint.store)  # as the events have it, without a slash at its end
    last_copy = _newest(directory, url, copied=True)
    newest = (
        last_copy.body.step if last_copy and isinstance(last_copy.body, CheckpointCopied | Restored) else None
    )
    behind = tuple(
        step
        for step in directory.committed_steps()
        if (newest is None or step > newest)
        and is_copied(step, checkpoint.store_every_steps, spec.train.steps)
    )
    error = ""
    failed = _newest(directory, url, copied=False) if behind else None
    if failed and isinstance(failed.body, CheckpointFailed) and (not last_copy or failed.t > last_copy.t):
        error = failed.body.reason
    return StoreStanding(url, newest, behind, error)


def _newest(directory: RunDirectory, url: str, *, copied: bool) -> Event | None:
    """Return the newest event of a copy to ``url`` or a restore from it; if not ``copied``, that of a failed copy.

    None if there is none or the log is damaged.
    """

    def counts(event: Event) -> bool:
        """Return True for a success (``copied``) or else a failure of the copy to ``url``. A restore from it is a success."""
        match event.body:
            case CheckpointCopied(url=place) | Restored(source=place):
                return copied and place == url
            case CheckpointFailed(path=place):
                return not copied and place == url
        return False

    try:
        return newest_event(directory.events, counts)
    except EventLogError:
        return None
