"""Profiles of a run: requests to its ranks, list, summaries and traces."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.observe import profile_request, recorded_step
from phalanx.observe.event_log import newest_event
from phalanx.observe.events import IncidentKind, Message, Step
from phalanx.run.directory.files import plain_json, read_small, write_atomically
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx_watch.profile.chrome import packed
from phalanx_watch.profile.operations import Prediction, predict
from phalanx_watch.profile.summary import analyze
from phalanx_watch.runs.probe import KernelLocks

SUMMARY_FILE = "summary.json"
TRACE_FILE = "trace.json.gz"
_MOST_SUMMARY_BYTES = 32 << 20


_MOST_NAMED = 8
"""Most profiles that an error lists, the newest."""


class ProfileError(ValueError):
    """A profile that cannot be read or made. The message has the reason and the remedy."""


@dataclass(frozen=True)
class ProfileSummary:
    """A profile of a run."""

    name: str
    step: int
    """First recorded step."""
    steps: int
    ranks: tuple[int, ...]
    step_s: float
    verdict: str
    table: Mapping[str, Any]
    """Time of a step by rank: ``columns``, and ``rows`` with ``rank``, ``step_s`` and ``seconds`` by column."""
    asked_unix_s: float | None
    trace_bytes: int
    """Size of the merged trace."""


def profiles(directory: RunDirectory) -> list[ProfileSummary]:
    """Return the readable profiles of a run that have a summary and a trace, the newest last; others are skipped."""
    try:
        names = sorted(
            path.name for path in directory.profiles.iterdir() if profile_request.is_profile_name(path.name)
        )
    except OSError:
        return []
    summaries = []
    for name in names:
        try:
            summaries.append(_listed(directory, name))
        except (ProfileError, KeyError, TypeError, ValueError, OverflowError, OSError):
            continue
    return summaries


def _listed(directory: RunDirectory, name: str) -> ProfileSummary:
    """Return the summary of the profile ``name``, with the size of its trace.

    Raises ``ProfileError`` if the summary cannot be read, ``OSError`` if there is no trace, and ``KeyError``,
    ``TypeError``, ``ValueError`` or ``OverflowError`` for a damaged summary.
    """
    summary = read_summary(directory, name)
    requested = summary.get("asked_unix_s")
    return ProfileSummary(
        name,
        int(summary["step"]),
        len(summary["steps"]),
        tuple(int(rank) for rank in summary["ranks"]),
        float(summary["step_s"]),
        str(summary["verdict"]),
        dict(summary["table"]),
        float(requested) if isinstance(requested, int | float) else None,
        trace_path(directory, name).stat().st_size,
    )


def folder_of(directory: RunDirectory, name: str) -> Path:
    """Return the folder of a profile. Raises ``ProfileError`` for an invalid name."""
    if not profile_request.is_profile_name(name):
        raise ProfileError(
            f"{name!r} cannot be the name of a profile; phalanx profile {directory.path} --show lists those that there are"
        )
    return directory.profiles / name


def trace_path(directory: RunDirectory, name: str) -> Path:
    """Return the path of the merged trace. Raises ``ProfileError``."""
    return folder_of(directory, name) / TRACE_FILE


def read_summary(directory: RunDirectory, name: str) -> dict[str, Any]:
    """Return the summary of a profile. Raises ``ProfileError``."""
    path = folder_of(directory, name) / SUMMARY_FILE
    return _read_json(path, _MOST_SUMMARY_BYTES)


def read_order(directory: RunDirectory, name: str) -> dict[str, Any]:
    """Return rank 0's recording order. Raises ``ProfileError``."""
    return _read_json(folder_of(directory, name) / recorded_step.ORDER_FILE, _MOST_SUMMARY_BYTES)


def _read_json(path: Path, most_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a profile's file. Raises ``ProfileError`` if it is missing, over ``most_bytes`` or no object."""
    try:
        content = plain_json(read_small(path, most_bytes))
    except FileNotFoundError as error:
        raise ProfileError(_missing(path)) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ProfileError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ProfileError(f"{path} is no JSON object")
    return content


def _missing(path: Path) -> str:
    """Return why a profile's file is missing: the profile was not recorded to its end, or does not exist; then lists existing ones."""
    folder, run = path.parent, path.parent.parent.parent
    if folder.is_dir():
        return f"profile {folder.name} of {run} has no {path.name}: it was not recorded to its end"
    try:
        names = sorted(
            entry.name for entry in folder.parent.iterdir() if profile_request.is_profile_name(entry.name)
        )
    except OSError:
        names = []
    recorded = (
        f"there are {', '.join(names[-_MOST_NAMED:])}"
        if names
        else f"none was recorded: phalanx profile {run} does"
    )
    return f"{run} has no profile {folder.name}; {recorded}"


def ordered_ranks(order: Mapping[str, Any]) -> list[int]:
    """Return the ranks that an order names."""
    ranks = order.get("ranks")
    return sorted(int(rank) for rank in ranks if str(rank).isdigit()) if isinstance(ranks, dict) else []


def missing_ranks(directory: RunDirectory, name: str, order: Mapping[str, Any]) -> list[int]:
    """Return the ranks of an order that have not written their file."""
    folder = folder_of(directory, name)
    return [rank for rank in ordered_ranks(order) if not recorded_step.rank_file(folder, rank).exists()]


def make_summary(directory: RunDirectory, name: str, cluster: str | None = None) -> dict[str, Any]:
    """Analyze the ranks' recordings, write ``summary.json`` and ``trace.json.gz``, and return the summary.

    Args:
        directory: Of the run.
        name: Of the profile.
        cluster: Cluster of the plan; by default that of ``phalanx calibrate``, else a CPU or none.

    Raises:
        ProfileError: No rank has a readable recording of a full step.
        OSError: The files cannot be written.
    """
    folder, order = folder_of(directory, name), read_order(directory, name)
    traces, notes = _traces(directory, name, order)
    if not traces:
        raise ProfileError(
            f"no rank has recorded profile {name}: {'; '.join(notes)}. If a fault ended the epoch meanwhile, request it again"
        )
    prediction, note = _prediction(directory, order, cluster)
    try:
        analysis = analyze(name, traces, order, prediction, [*notes, *([note] if note else [])])
    except ValueError as error:
        raise ProfileError(f"profile {name} shows nothing: {error}; request a new one") from error
    write_atomically(folder / TRACE_FILE, packed(analysis.trace), durable=False)
    write_atomically(
        folder / SUMMARY_FILE, (json.dumps(analysis.summary, indent=1) + "\n").encode(), durable=False
    )
    return analysis.summary


def _traces(
    directory: RunDirectory, name: str, order: Mapping[str, Any]
) -> tuple[list[recorded_step.RankTrace], list[str]]:
    """Return the readable recordings by rank, and notes on missing and unreadable ones."""
    traces, notes = [], []
    missing = missing_ranks(directory, name, order)
    if missing:
        notes.append(
            f"nothing came from ranks {', '.join(map(str, missing[:20]))}: they died, or could not write"
        )
    for rank in ordered_ranks(order):
        if rank in missing:
            continue
        path = recorded_step.rank_file(folder_of(directory, name), rank)
        try:
            trace = recorded_step.read_rank_trace(path)
            if trace.rank != rank:
                raise recorded_step.ProfileFileError(f"{path} is the recording of rank {trace.rank}")
            traces.append(trace)
        except (recorded_step.ProfileFileError, OSError) as error:
            notes.append(str(error))
    return traces, notes


def _prediction(
    directory: RunDirectory, order: Mapping[str, Any], cluster: str | None
) -> tuple[Prediction | None, str]:
    """Return the planner's step and "", or None and the reason as a note.

    ``cluster`` None takes this machine as calibrated, else a CPU if the run was on one.
    """
    from phalanx.hardware.catalog import this_machine

    name = cluster or ("this" if this_machine().is_file() else "cpu" if order.get("device") == "cpu" else "")
    if not name:
        return (
            None,
            "no plan to compare with: name the cluster (--cluster h100), or run phalanx calibrate here",
        )
    try:
        return predict(read_resolved(directory), int(order.get("of_ranks", 1)), name), ""
    except (ValueError, RunDirectoryError) as error:
        return None, f"no plan to compare with: {error}"


# A profile of a run that is training, requested through a file and awaited.


_LOOK_EVERY_S = 0.2
_LEAST_FOR_FILES_S = 60.0
_GONE_S = 2.0
"""Seconds to wait for an answer if no process holds the directory."""
_WRITES_S = 5.0
"""Seconds that ranks may take to write their files after the run has ended."""


def request_profile(
    directory: RunDirectory,
    steps: int,
    ranks: tuple[int, ...] | str,
    wait_s: float,
    progress: Callable[[str], None],
) -> str:
    """Request a profile of the next ``steps`` steps. Return its name once its ranks have written, or no more will.

    A request that the run does not take is removed.

    Args:
        directory: Of the run.
        steps: Number of steps.
        ranks: As in ``ProfileRequest``.
        wait_s: Seconds within which the run must receive the request.
        progress: Callback for progress messages.

    Raises:
        ProfileError: The run does not receive the request, refuses it, or is finished; the message has the remedy.
        OSError: The request cannot be written.
    """
    if directory.result.exists():
        raise ProfileError(f"the run in {directory.path} is finished: --show lists what was recorded of it")
    name, since_s = profile_request.new_name(), time.time()
    with _request(directory, profile_request.ProfileRequest(name, steps, ranks, since_s + wait_s)) as inode:
        progress(f"requested {steps} steps; the run receives it within a second and a step")
        _await_order(directory, name, since_s, wait_s, inode)
    order = read_order(directory, name)
    count = len(ordered_ranks(order))
    progress(f"recording {steps} steps on {count} of {order.get('of_ranks')} ranks")
    _await_files(directory, name, steps, wait_s)
    return name


@contextmanager
def _request(directory: RunDirectory, request: profile_request.ProfileRequest) -> Iterator[int | None]:
    """Write the request for the time of the block, and remove it if it was not taken. Yields its inode, or None if
    it was taken at once.
    """
    profile_request.write_request(directory, request)
    path = profile_request.request_path(directory)
    inode = _inode(path)  # rank 0 may have taken it already
    try:
        yield inode
    finally:
        with suppress(OSError):
            if inode is not None and _inode(path) == inode:
                path.unlink()


def _inode(path: Path) -> int | None:
    """Return a file's inode; None if it is missing."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def _await_order(
    directory: RunDirectory, name: str, since_s: float, wait_s: float, inode: int | None
) -> None:
    """Wait until rank 0 has taken the request and written its order, at most ``wait_s``.

    Raises ``ProfileError`` if it is refused or replaced, or there is no order by then; earlier if no process holds
    the run.
    """
    path = folder_of(directory, name) / recorded_step.ORDER_FILE
    while not path.exists():
        now_s = time.time()
        now = _inode(profile_request.request_path(directory))
        if now is not None and inode is not None and now != inode:
            raise ProfileError(
                "another profile was requested in the same second, and that one is recorded: try again"
            )
        if now is None:
            # Taken: the order follows within a step, or a warning with the reason in the event stream.
            warning = _warning(directory, since_s)
            if warning is not None:
                raise ProfileError(warning)
        if now_s > since_s + wait_s:
            raise ProfileError(_silence(directory, wait_s))
        if now_s > since_s + _GONE_S and KernelLocks().holds(directory) is False:
            raise ProfileError(_silence(directory, _GONE_S))
        time.sleep(_LOOK_EVERY_S)


def _warning(directory: RunDirectory, since_s: float) -> str | None:
    """Return the text of the run's refusal of the request since ``since_s``; None if it has not refused it."""
    if not directory.events.exists():
        return None
    event = newest_event(
        directory.events,
        lambda event: isinstance(event.body, Message) and event.body.incident is IncidentKind.PROFILE_REFUSED,
    )
    if event is None or event.t < since_s or not isinstance(event.body, Message):
        return None
    return event.body.text


def _silence(directory: RunDirectory, wait_s: float) -> str:
    """Return why the request may not have been received within ``wait_s``, by the age of the newest step, and the remedy."""
    newest = None
    if directory.events.exists():
        newest = newest_event(directory.events, lambda event: isinstance(event.body, Step))
    if newest is None:
        return f"the run did not take the request within {wait_s:g} s, and no step has been logged: does the run in {directory.path} train?"
    age_s = time.time() - newest.t
    is_over = KernelLocks().holds(directory) is False or age_s >= 10 * wait_s
    remedy = "it seems not to run: start it first" if is_over else "steps may take longer: raise --wait"
    return f"the run did not take the request within {wait_s:g} s; the newest step was logged {age_s:.0f} s ago; {remedy}"


def _await_files(directory: RunDirectory, name: str, steps: int, wait_s: float) -> None:
    """Wait for the files of all ranks; return without them after a timeout, or ``_WRITES_S`` after the attempt has
    ended.

    The timeout grows with the length of the recorded steps.
    """
    began_s, ended_s = time.time(), None
    patience_s = max(wait_s, _LEAST_FOR_FILES_S) + 3 * steps * _step_s(directory)
    order = read_order(directory, name)
    while missing_ranks(directory, name, order):
        now_s = time.time()
        if directory.result.exists() or _attempt(directory) != order.get("attempt"):
            ended_s = ended_s or now_s  # also an epoch of a fleet that a fault has ended
        if now_s > began_s + patience_s or (ended_s is not None and now_s > ended_s + _WRITES_S):
            return  # the arrived files are analyzed, and the summary lists the missing ones
        time.sleep(_LOOK_EVERY_S)


def _attempt(directory: RunDirectory) -> int | None:
    """Return the newest attempt, or epoch, that has logged an event."""
    newest = newest_event(directory.events, lambda _: True) if directory.events.exists() else None
    return None if newest is None else newest.attempt


def _step_s(directory: RunDirectory) -> float:
    """Return the seconds of the newest logged step; 0 if there is none."""
    if not directory.events.exists():
        return 0.0
    newest = newest_event(directory.events, lambda event: isinstance(event.body, Step))
    return newest.body.step_s if newest is not None and isinstance(newest.body, Step) else 0.0
