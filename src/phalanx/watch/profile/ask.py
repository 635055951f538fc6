"""Asks a run that is under way for a profile, and waits until its ranks have written what they recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from phalanx.observe.event_log import newest_event
from phalanx.observe.events import IncidentKind, Message, Step
from phalanx.observe.profile.recorded_step import ORDER_FILE
from phalanx.observe.profile.request import ProfileRequest, new_name, request_path, write_request
from phalanx.run.directory.paths import RunDirectory
from phalanx.watch.profile.read import (
    ProfileError,
    folder_of,
    missing_ranks,
    ordered_ranks,
    read_order,
)
from phalanx.watch.runs.lock import KernelLocks

_LOOK_EVERY_S = 0.2
_LEAST_FOR_FILES_S = 60.0
_GONE_S = 2.0
"""After so long without an answer from a directory that no process holds, none will come."""
_WRITES_S = 5.0
"""Time that ranks may take over their files when the run has ended."""


def ask(
    directory: RunDirectory,
    steps: int,
    ranks: tuple[int, ...] | str,
    wait_s: float,
    tell: Callable[[str], None],
) -> str:
    """Has the next ``steps`` steps recorded; returns the profile's name once its ranks have written, or no more will.

    Args:
        directory: Of the run.
        steps: How many.
        ranks: As in ``ProfileRequest``.
        wait_s: The time within which the run must hear the request.
        tell: Takes a line on how far it is.

    Raises:
        ProfileError: The run does not hear, or refuses; the message says what to do.
        OSError: The request cannot be written.
    """
    if directory.result.exists():
        raise ProfileError(f"the run in {directory.path} is finished: --show lists what was recorded of it")
    name, since_s = new_name(), time.time()
    with _request(directory, ProfileRequest(name, steps, ranks, since_s + wait_s)) as asked:
        tell(f"asked for {steps} steps; the run hears it within a second and a step")
        _heard(directory, name, since_s, wait_s, asked)
    order = read_order(directory, name)
    count = len(ordered_ranks(order))
    tell(f"recording {steps} steps on {count} of {order.get('of_ranks')} ranks")
    _written(directory, name, steps, wait_s)
    return name


@contextmanager
def _request(directory: RunDirectory, request: ProfileRequest) -> Iterator[int | None]:
    """Leaves the request for the time inside, and takes it back if nobody has taken it. Gives its inode, if it was still there."""
    write_request(directory, request)
    path = request_path(directory)
    asked = _inode(path)  # rank 0 may have taken it already
    try:
        yield asked
    finally:
        with suppress(OSError):
            if asked is not None and _inode(path) == asked:
                path.unlink()


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def _heard(directory: RunDirectory, name: str, since_s: float, wait_s: float, asked: int | None) -> None:
    path = folder_of(directory, name) / ORDER_FILE
    while not path.exists():
        now_s = time.time()
        if now_s > since_s + wait_s:
            raise ProfileError(_silence(directory, wait_s))
        if now_s > since_s + _GONE_S and KernelLocks().holds(directory) is False:
            raise ProfileError(_silence(directory, _GONE_S))
        now = _inode(request_path(directory))
        if now is not None and asked is not None and now != asked:
            raise ProfileError(
                "somebody else asked for a profile in the same second, and theirs is made: ask again"
            )
        if now is None:
            # Taken: the answer follows within a step, or a warning in the event stream says why not.
            said = _warning(directory, since_s)
            if said is not None:
                raise ProfileError(said)
        time.sleep(_LOOK_EVERY_S)


def _warning(directory: RunDirectory, since_s: float) -> str | None:
    """What the run said about the request, if it does not follow it."""
    if not directory.events.exists():
        return None
    found = newest_event(
        directory.events,
        lambda event: isinstance(event.body, Message) and event.body.incident is IncidentKind.PROFILE_REFUSED,
    )
    if found is None or found.t < since_s or not isinstance(found.body, Message):
        return None
    return found.body.text


def _silence(directory: RunDirectory, wait_s: float) -> str:
    """Why nobody may have heard."""
    newest = None
    if directory.events.exists():
        newest = newest_event(directory.events, lambda event: isinstance(event.body, Step))
    if newest is None:
        return f"nobody took the request within {wait_s:g} s, and no step has been logged: does the run in {directory.path} train?"
    age_s = time.time() - newest.t
    gone = KernelLocks().holds(directory) is False or age_s >= 10 * wait_s
    remedy = "it seems not to run: start it first" if gone else "steps may take longer: raise --wait"
    return (
        f"nobody took the request within {wait_s:g} s; the newest step was logged {age_s:.0f} s ago; {remedy}"
    )


def _written(directory: RunDirectory, name: str, steps: int, wait_s: float) -> None:
    """Waits for the files of all ranks; for no longer than they can take."""
    began_s, ended_s = time.time(), None
    patience_s = max(wait_s, _LEAST_FOR_FILES_S) + 3 * steps * _step_s(directory)
    order = read_order(directory, name)
    while missing_ranks(directory, name, order):
        now_s = time.time()
        if directory.result.exists() or _attempt(directory) != order.get("attempt"):
            ended_s = ended_s or now_s  # also an epoch of a fleet that a fault has ended
        if now_s > began_s + patience_s or (ended_s is not None and now_s > ended_s + _WRITES_S):
            return  # what has come is analyzed, and the summary says what is missing
        time.sleep(_LOOK_EVERY_S)


def _attempt(directory: RunDirectory) -> int | None:
    """The newest attempt, or epoch, that has told anything."""
    newest = newest_event(directory.events, lambda _: True) if directory.events.exists() else None
    return None if newest is None else newest.attempt


def _step_s(directory: RunDirectory) -> float:
    if not directory.events.exists():
        return 0.0
    newest = newest_event(directory.events, lambda event: isinstance(event.body, Step))
    return newest.body.step_s if newest is not None and isinstance(newest.body, Step) else 0.0
