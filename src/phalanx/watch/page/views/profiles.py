"""``/api/run/ID/profiles``, ``/profile/NAME`` and ``/profile/NAME/trace``: what was recorded of a few steps, and its analysis."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from phalanx.run.directory.paths import RunDirectory
from phalanx.watch.page.answer import Parameters, RequestError, not_found
from phalanx.watch.page.places import Place
from phalanx.watch.page.views.runs import Runs
from phalanx.watch.profile.read import ProfileError, profiles, read_summary, trace_path

_MOST_EXPORTED = 8


def profiles_view(_runs: Runs, place: Place, _parameters: Parameters) -> dict[str, object]:
    """The profiles of a run, the newest last."""
    return {"profiles": profiles(RunDirectory(place.path))}


def profile_names(place: Place) -> list[str]:
    """The names of the newest profiles."""
    return [one.name for one in profiles(RunDirectory(place.path))][-_MOST_EXPORTED:]


def profile_view(_runs: Runs, place: Place, parameters: Parameters) -> Mapping[str, object]:
    """The analysis of one profile."""
    return profile_summary(place, parameters.path["name"])


def profile_summary(place: Place, name: str) -> Mapping[str, object]:
    """The analysis of the profile ``name``. Raises ``RequestError``."""
    try:
        summary: Mapping[str, object] = read_summary(RunDirectory(place.path), name)
    except ProfileError as error:
        raise RequestError(str(error), 404) from None
    return summary


def trace_file(place: Place, name: str) -> Path:
    """The file of the merged trace. Raises ``RequestError`` for a name that leads out of the run directory, by a link too."""
    try:
        path = trace_path(RunDirectory(place.path), name).resolve()
    except (ProfileError, OSError) as error:
        raise RequestError(str(error), 404) from None
    if not path.is_relative_to(place.path.resolve()) or not path.is_file():
        raise not_found(f"the profile {name[:100]!r} has no trace")
    return path
