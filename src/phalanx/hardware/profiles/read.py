"""Reads profiles from TOML: those that come with the package, and the ``[profile]`` table of a user's own file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from pathlib import Path

from phalanx.hardware.cluster import Accelerator
from phalanx.hardware.profiles.profile import COLLECTIVES, Constants, Profile, Provenance
from phalanx.hardware.tables import HardwareError, Values, read_entry, read_toml, table_of
from phalanx.run.fields import Problem, listing

_FOLDER = Path(__file__).parent
_PROVENANCE = tuple(field.name for field in fields(Provenance))
_FITS = ("attention", "memory", "network")
_FITS_BY_NAME = ("matmul", "collectives")


def profile_names() -> tuple[str, ...]:
    """The profiles that come with the package."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def profile_of(accelerator: Accelerator, name: str | None = None) -> Profile:
    """The constants for ``accelerator``: those called ``name`` or in the TOML file ``name``, else those that it names.

    Raises ``HardwareError`` if there is no such profile, or if a field of it is missing or wrong.
    """
    chosen = name or accelerator.profile or accelerator.key
    path = Path(chosen) if chosen.endswith(".toml") else _FOLDER / f"{chosen}.toml"
    if not path.is_file():
        known = ", ".join(profile_names())
        raise HardwareError(
            f"there is no profile {chosen!r}: there are {known}; set [accelerator] profile to one, or to a TOML file of your own"
        )
    return Profile(accelerator, _constants_at(path, path.stat().st_mtime_ns))


@lru_cache(maxsize=64)
def _constants_at(path: Path, changed_ns: int) -> Constants:  # noqa: ARG001 - a changed file is read again
    return _read_constants(read_toml(path), path)


def _read_constants(file: Values, path: Path) -> Constants:
    """The ``[profile]`` table of ``file``. A fit states beside its constants where they come from; else its file does."""
    place = f"{path}, [profile]"
    shared = {name: file[name] for name in ("source", "date") if name in file}
    # The time scalars of a software stack stand in the same table; whoever plans for one reads them.
    values = {name: value for name, value in table_of(file, "profile", str(path)).items() if name != "stack"}
    for name in (*_FITS, *_FITS_BY_NAME):
        fit = values.get(name)
        if isinstance(fit, Mapping) and name in _FITS:
            values[name] = _with_provenance(fit, shared)
        elif isinstance(fit, Mapping):
            values[name] = {key: _with_provenance(each, shared) for key, each in fit.items()}
    energy = values.get("joules_per_flop")
    if isinstance(energy, Mapping):
        values["joules_per_flop"] = {name: energy[name] for name in energy if name not in _PROVENANCE}
    found = read_entry(Constants, {"name": path.stem, **values}, place)
    missing = [
        Problem(f"collectives.{each}", "is missing", "add it")
        for each in COLLECTIVES
        if each not in found.collectives
    ]
    if missing:
        raise HardwareError(listing(place, missing))
    return found


def _with_provenance(fit: object, shared: Values) -> object:
    """``fit`` with the fields of its provenance in a table of their own, where the classes have them."""
    if not isinstance(fit, Mapping):
        return fit
    stated = {name: fit[name] for name in _PROVENANCE if name in fit}
    constants = {name: value for name, value in fit.items() if name not in _PROVENANCE}
    return {**constants, "provenance": {"date": "", **shared, **stated}}
