"""The checkpoint that a run begins from, in a folder or in an object store, under one name: PLACE/step-00000100.

In a store there is no folder of that name; it stands for the step that is committed there, so that both kinds are pinned to one step alike.
"""

from __future__ import annotations

from pathlib import Path

from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.object_tier import ObjectTier
from phalanx.run.directory.paths import step_folder, step_of
from phalanx.store.open_store import is_url, joined, open_store


def pinned_in_store(url: str) -> str | None:
    """The checkpoint that ``url`` means: the step that it names, or the newest now; ``None`` if the store has none.

    Raises CheckpointError where the store cannot be reached, StoreError where the URL names none.
    """
    place, step = _place_and_step(url)
    if step is None:
        step = max(ObjectTier(open_store(place)).steps(), default=None)
    return None if step is None else joined(place, step_folder(Path(), step).name)


def open_origin(start: str) -> tuple[DiskTier | ObjectTier, int]:
    """The place of the checkpoint ``start``, PLACE/step-00000100, and its step; whether it is there has not been looked at."""
    if is_url(start):
        place, step = _place_and_step(start)
        tier: DiskTier | ObjectTier = ObjectTier(open_store(place))
    else:
        step = step_of(Path(start))
        tier = DiskTier(Path(start).parent)
    if step is None:
        raise ValueError(f"{start} is not pinned to a step")
    return tier, step


def _place_and_step(url: str) -> tuple[str, int | None]:
    place, _, name = url.rstrip("/").rpartition("/")
    step = step_of(Path(name))
    return (url.rstrip("/"), None) if step is None else (place, step)
