"""What a run's store holds of what is saved, as the run's events and its disk tell it: no store is asked, which could take minutes to answer."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.checkpoint.save.interval import is_copied
from phalanx.observe.event_log import EventLogError, newest_event
from phalanx.observe.events import CheckpointCopied, CheckpointFailed, Event, Restored
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.spec import RunSpec


@dataclass(frozen=True)
class StoreStanding:
    """The newest step that is known to be in the store, the saved ones that are to follow, and why the last copy failed, if it did."""

    url: str
    newest: int | None
    behind: tuple[int, ...]
    error: str = ""

    def __str__(self) -> str:
        there = "nothing yet" if self.newest is None else f"step {self.newest}"
        text = f"in {self.url}: {there}"
        if self.behind:
            steps = "steps" if len(self.behind) > 1 else "step"
            text += f"; on disk alone: {steps} {', '.join(map(str, self.behind))}"
        return f"{text} ({self.error})" if self.error else text


def store_standing(spec: RunSpec, directory: RunDirectory) -> StoreStanding | None:
    """How far the copies of a resolved run are; ``None`` if it has no store. Raises ``OSError`` if its disk cannot be read."""
    checkpoint = spec.checkpoint
    url = checkpoint.store
    if not url:
        return None
    there = _newest(directory, url, copied=True)
    newest = there.body.step if there and isinstance(there.body, CheckpointCopied | Restored) else None
    behind = tuple(
        step
        for step in directory.committed_steps()
        if (newest is None or step > newest)
        and is_copied(step, checkpoint.store_every_steps, spec.train.steps)
    )
    error = ""
    failed = _newest(directory, url, copied=False) if behind else None
    if failed and isinstance(failed.body, CheckpointFailed) and (not there or failed.t > there.t):
        error = failed.body.reason
    return StoreStanding(url, newest, behind, error)


def _newest(directory: RunDirectory, url: str, *, copied: bool) -> Event | None:
    def counts(event: Event) -> bool:
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
