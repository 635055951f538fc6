"""The profiles of a run: lists what was recorded, makes a profile's summary and trace from its ranks' files, and reads them again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.observe.profile.recorded_step import (
    ORDER_FILE,
    ProfileFileError,
    RankTrace,
    rank_file,
    read_rank_trace,
)
from phalanx.observe.profile.request import is_profile_name
from phalanx.run.directory.durable import write_atomically
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx.run.directory.plain_json import plain_json
from phalanx.run.directory.regular_file import read_small
from phalanx.watch.profile.chrome import packed
from phalanx.watch.profile.predicted import Prediction, predict
from phalanx.watch.profile.summary import analyze

SUMMARY_FILE = "summary.json"
TRACE_FILE = "trace.json.gz"
_MOST_SUMMARY_BYTES = 32 << 20


_MOST_NAMED = 8
"""Profiles that an error names, the newest."""


class ProfileError(ValueError):
    """A profile that cannot be read or made; the message says why and what to do."""


@dataclass(frozen=True)
class ProfileSummary:
    """A profile of a run."""

    name: str
    step: int
    """The first step that was recorded."""
    steps: int
    ranks: tuple[int, ...]
    step_s: float
    verdict: str
    table: Mapping[str, Any]
    """Where a step of each rank went: ``columns``, and ``rows`` with ``rank``, ``step_s`` and ``seconds`` by column."""
    asked_unix_s: float | None
    trace_bytes: int
    """The size of the merged trace."""


def profiles(directory: RunDirectory) -> list[ProfileSummary]:
    """The profiles of a run that have a summary, the newest last; those that cannot be read are left out."""
    try:
        names = sorted(path.name for path in directory.profiles.iterdir() if is_profile_name(path.name))
    except OSError:
        return []
    found = []
    for name in names:
        try:
            found.append(_listed(directory, name))
        except (ProfileError, KeyError, TypeError, ValueError, OverflowError, OSError):
            continue
    return found


def _listed(directory: RunDirectory, name: str) -> ProfileSummary:
    summary = read_summary(directory, name)
    asked = summary.get("asked_unix_s")
    return ProfileSummary(
        name,
        int(summary["step"]),
        len(summary["steps"]),
        tuple(int(rank) for rank in summary["ranks"]),
        float(summary["step_s"]),
        str(summary["verdict"]),
        dict(summary["table"]),
        float(asked) if isinstance(asked, int | float) else None,
        trace_path(directory, name).stat().st_size,
    )


def folder_of(directory: RunDirectory, name: str) -> Path:
    """The folder of a profile. Raises ``ProfileError`` if that cannot be the name of one."""
    if not is_profile_name(name):
        raise ProfileError(
            f"{name!r} cannot be the name of a profile; phalanx profile {directory.path} --show lists those that there are"
        )
    return directory.profiles / name


def trace_path(directory: RunDirectory, name: str) -> Path:
    """The file of the merged trace. Raises ``ProfileError``."""
    return folder_of(directory, name) / TRACE_FILE


def read_summary(directory: RunDirectory, name: str) -> dict[str, Any]:
    """The summary of a profile. Raises ``ProfileError``."""
    path = folder_of(directory, name) / SUMMARY_FILE
    return _read_json(path, _MOST_SUMMARY_BYTES)


def read_order(directory: RunDirectory, name: str) -> dict[str, Any]:
    """What rank 0 ordered to be recorded. Raises ``ProfileError``."""
    return _read_json(folder_of(directory, name) / ORDER_FILE, _MOST_SUMMARY_BYTES)


def _read_json(path: Path, most_bytes: int) -> dict[str, Any]:
    try:
        found = plain_json(read_small(path, most_bytes))
    except FileNotFoundError as error:
        raise ProfileError(_missing(path)) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ProfileError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ProfileError(f"{path} is no JSON object")
    return found


def _missing(path: Path) -> str:
    """Why a profile's file is not there: the profile is not, or it is not done; and which are."""
    folder, run = path.parent, path.parent.parent.parent
    if folder.is_dir():
        return f"profile {folder.name} of {run} has no {path.name}: it was not recorded to its end"
    try:
        known = sorted(one.name for one in folder.parent.iterdir() if is_profile_name(one.name))
    except OSError:
        known = []
    recorded = (
        f"there are {', '.join(known[-_MOST_NAMED:])}"
        if known
        else f"none was recorded: phalanx profile {run} does"
    )
    return f"{run} has no profile {folder.name}; {recorded}"


def ordered_ranks(order: Mapping[str, Any]) -> list[int]:
    """The ranks that an order names."""
    ranks = order.get("ranks")
    return sorted(int(rank) for rank in ranks if str(rank).isdigit()) if isinstance(ranks, dict) else []


def missing_ranks(directory: RunDirectory, name: str, order: Mapping[str, Any]) -> list[int]:
    """The ranks of an order that have not written their file."""
    folder = folder_of(directory, name)
    return [rank for rank in ordered_ranks(order) if not rank_file(folder, rank).exists()]


def make_summary(directory: RunDirectory, name: str, cluster: str | None = None) -> dict[str, Any]:
    """Analyzes what the ranks have written, and writes ``summary.json`` and ``trace.json.gz``.

    Args:
        directory: Of the run.
        name: Of the profile.
        cluster: What the planner is to expect; by default what ``phalanx calibrate`` measured, else a CPU or nothing.

    Raises:
        ProfileError: No rank has written anything that can be read.
        OSError: The files cannot be written.
    """
    folder, order = folder_of(directory, name), read_order(directory, name)
    traces, notes = _traces(directory, name, order)
    if not traces:
        raise ProfileError(
            f"no rank has recorded profile {name}: {'; '.join(notes)}. If a fault ended the epoch meanwhile, ask again"
        )
    prediction, note = _prediction(directory, order, cluster)
    try:
        done = analyze(name, traces, order, prediction, [*notes, *([note] if note else [])])
    except ValueError as error:
        raise ProfileError(f"profile {name} shows nothing: {error}; ask for a new one") from error
    write_atomically(folder / TRACE_FILE, packed(done.trace), durable=False)
    write_atomically(
        folder / SUMMARY_FILE, (json.dumps(done.summary, indent=1) + "\n").encode(), durable=False
    )
    return done.summary


def _traces(
    directory: RunDirectory, name: str, order: Mapping[str, Any]
) -> tuple[list[RankTrace], list[str]]:
    """The recordings that can be read, and what is to be said of the others."""
    found, notes = [], []
    missing = missing_ranks(directory, name, order)
    if missing:
        notes.append(
            f"nothing came from ranks {', '.join(map(str, missing[:20]))}: they died, or could not write"
        )
    for rank in ordered_ranks(order):
        if rank in missing:
            continue
        path = rank_file(folder_of(directory, name), rank)
        try:
            trace = read_rank_trace(path)
            if trace.rank != rank:
                raise ProfileFileError(f"{path} is the recording of rank {trace.rank}")
            found.append(trace)
        except (ProfileFileError, OSError) as error:
            notes.append(str(error))
    return found, notes


def _prediction(
    directory: RunDirectory, order: Mapping[str, Any], cluster: str | None
) -> tuple[Prediction | None, str]:
    """The planner's step, and why there is none if there is none."""
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
