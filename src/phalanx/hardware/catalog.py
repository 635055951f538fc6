"""The catalog: accelerators and systems by name, and clusters from a few words such as ``h100:16384``.

The facts stand in ``data/*.toml``. A user's own TOML file has the same tables in the singular, ``[accelerator]``,
``[system]`` and ``[profile]``; with ``like = "h100"`` it states only what differs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from phalanx.hardware.cluster import Accelerator, Cluster
from phalanx.hardware.entries import read_accelerator, read_system, spelled_out
from phalanx.hardware.errors import HardwareError
from phalanx.hardware.system import System
from phalanx.hardware.tables import Values, read_toml, table_of
from phalanx.run.directory.home import home
from phalanx.run.problems import listing
from phalanx.run.section_reader import unknown_field

_USER_FILE = ("accelerator", "system", "profile", "source", "date")
_DATA = Path(__file__).parent / "data"
_CLUSTER = re.compile(r"\s*(?P<name>[^:\s]+?)\s*(?:(?P<sign>[:x×])\s*(?P<count>[\d_,]+))?\s*")


@lru_cache(maxsize=1)
def accelerators() -> Mapping[str, Accelerator]:
    """Every accelerator of the catalog, by key."""
    return MappingProxyType({key: _catalog_accelerator(key) for key in _data("accelerators")})


def _catalog_accelerator(key: str) -> Accelerator:
    data, place = _data("accelerators"), f"{_DATA / 'accelerators.toml'}, [{key}]"
    return read_accelerator(spelled_out(Accelerator, data[key], data, key, place), place)


@lru_cache(maxsize=1)
def systems() -> Mapping[str, System]:
    """Every system of the catalog, by key."""
    return MappingProxyType({key: _catalog_system(key) for key in _data("systems")})


def _catalog_system(key: str) -> System:
    data, place = _data("systems"), f"{_DATA / 'systems.toml'}, [{key}]"
    return read_system(spelled_out(System, data[key], data, key, place), accelerators(), place)


def accelerator(key: str) -> Accelerator:
    """The accelerator called ``key``; raises ``HardwareError`` that lists what exists."""
    return _named(accelerators(), key, "accelerator")


def system(key: str) -> System:
    """The system called ``key``; raises ``HardwareError`` that lists what exists."""
    return _named(systems(), key, "system")


def cluster(description: str) -> Cluster:
    """The cluster that ``description`` names.

    ``h100:16384`` is so many accelerators; ``gb200-nvl72 x 1389`` so many scale-up domains; a name alone is one domain. In the
    place of the name may stand a TOML file, or ``this``: the file that ``this_machine`` names.

    Raises ``HardwareError`` that says what is wrong and lists what exists.
    """
    found = _CLUSTER.fullmatch(description)
    if found is None:
        raise HardwareError(
            f"cannot read the cluster {description!r}: write NAME:ACCELERATORS, as in h100:16384, or NAME x DOMAINS, as in "
            f'"gb200-nvl72 x 1389"; the names are {", ".join(systems())}, or a TOML file'
        )
    name, sign = found["name"], found["sign"]
    path = this_machine() if name == "this" else Path(name)
    chosen = load_user(path) if path.suffix == ".toml" else system(name)
    count = int(re.sub("[_,]", "", found["count"] or "1"))
    return chosen.of(count if sign == ":" else count * chosen.domain.size)


def this_machine() -> Path:
    """The path of this machine's description: ``$PHALANX_THIS_MACHINE``, else ``~/.config/phalanx/this.toml``."""
    return Path(os.environ.get("PHALANX_THIS_MACHINE", home() / ".config" / "phalanx" / "this.toml"))


def load_user(path: Path) -> System:
    """The system in a user's TOML file: ``[system]``, and ``[accelerator]`` and ``[profile]`` where the catalog has none.

    Raises ``HardwareError`` that names the field and the remedy.
    """
    if not path.is_file():
        raise HardwareError(
            f"{path} does not exist: write it with `phalanx calibrate --out {path}`, or by hand"
        )
    file = read_toml(path)
    unknown = [unknown_field(name, name, _USER_FILE) for name in file if name not in _USER_FILE]
    if unknown:
        raise HardwareError(listing(str(path), unknown))
    wanted = _stated(System, file, "system", path)
    known = dict(accelerators())
    if "accelerator" in file:
        own = _stated(Accelerator, file, "accelerator", path)
        found = read_accelerator(own, f"{path}, [accelerator]")
        known[found.key] = found
        wanted["accelerator"] = found.key
    if "profile" in file:
        key = str(wanted.get("accelerator", ""))
        known[key] = replace(_named(known, key, "accelerator"), profile=str(path.resolve()))
    return read_system(wanted, known, f"{path}, [system]")


def _stated(kind: type, file: Values, name: str, path: Path) -> dict[str, object]:
    """The table ``name`` of a user's file; figures without a source are the user's own and carry no date of the catalog."""
    shared = {field: file[field] for field in ("source", "date") if field in file}
    own = {"source": f"stated in {path}", "date": "", **shared, **table_of(file, name, str(path))}
    return spelled_out(kind, own, _data(f"{name}s"), path.stem, f"{path}, [{name}]")


@lru_cache(maxsize=2)
def _data(name: str) -> Mapping[str, Values]:
    path = _DATA / f"{name}.toml"
    file = read_toml(path)
    return {key: table_of(file, key, str(path)) for key in file}


_Entry = TypeVar("_Entry")


def _named(entries: Mapping[str, _Entry], key: str, kind: str) -> _Entry:
    if key not in entries:
        near = get_close_matches(key.lower(), entries, n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise HardwareError(f"there is no {kind} {key!r}{meant}: there are {', '.join(entries)}")
    return entries[key]
