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
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_args, get_origin

from phalanx.hardware.cluster import (
    Accelerator,
    Cluster,
    Fact,
    HardwareError,
    System,
    Values,
    read_entry,
    read_toml,
    table_of,
)
from phalanx.run.directory.files import home
from phalanx.run.fields import Problem, field_types, listing, unknown_field, unknown_value

# Convert the catalog's TOML tables into accelerators and systems.
#
# A table is short for its author: a figure may be a plain number, which has the source and date of its table, and an entry that
# is ``like`` another has only the differing fields. ``spelled_out`` expands it to a table with every figure in full, and
# ``read_entry`` reads that.

_ORIGIN = ("source", "date")


def spelled_out(
    kind: type, stated: Values, catalog: Mapping[str, Values], key: str, place: str
) -> dict[str, object]:
    """Return the fields of ``kind``: those ``stated``, over those of the entry of ``catalog`` that its ``like`` names,
    and so on.

    An inherited figure keeps its own source and date. Raises ``HardwareError`` for a ``like`` that is not in the
    catalog.
    """
    parent: dict[str, object] = {}
    like = stated.get("like")
    if like is not None:
        if not isinstance(like, str) or like not in catalog:
            raise HardwareError(listing(place, [unknown_value("like", like, catalog)]))
        parent = spelled_out(kind, catalog[like], catalog, like, place)
    own = {name: value for name, value in stated.items() if name != "like"}
    origin = _origin(own, parent)
    return _merged(parent, {"key": key, **origin, **_with_origin(kind, own, origin)})


def read_accelerator(values: Values, place: str) -> Accelerator:
    """Return the accelerator that ``values``, with all inherited fields, describe.

    Raises ``HardwareError`` with every mistake of a field; if there is none, for no FLOP/s or a power below idle.
    """
    accelerator = read_entry(
        Accelerator, {name: values[name] for name in values if name not in _ORIGIN}, place
    )
    if not accelerator.flops:
        remedy = "give the dense peak by format, flops = {bf16 = 1e14}"
        raise HardwareError(listing(place, [Problem("flops", "is empty", remedy)]))
    power_w, idle_w = accelerator.power_w.value, accelerator.idle_power_w.value
    if power_w < idle_w:
        remedy = "give the power under load, and less for idle_power_w"
        raise HardwareError(
            listing(place, [Problem("power_w", f"{power_w:g} is below idle_power_w = {idle_w:g}", remedy)])
        )
    return accelerator


def read_system(values: Values, accelerators: Mapping[str, Accelerator], place: str) -> System:
    """Return the system that ``values``, with all inherited fields, describe, made of one of ``accelerators``.

    Raises ``HardwareError`` with the first that holds: an unknown accelerator, every mistake of a field, levels of the
    fabric out of order, a PUE below 1.
    """
    fields = {field: value for field, value in values.items() if field != "date"}
    name = fields.get("accelerator")
    if isinstance(name, str) and name in accelerators:
        fields["accelerator"] = accelerators[name]
    elif name is not None:
        raise HardwareError(listing(place, [unknown_value("accelerator", name, accelerators)]))
    system = read_entry(System, fields, place)
    if any(lower.reach >= upper.reach for lower, upper in pairwise(system.fabric.levels)):
        remedy = "order the levels by growing reach"
        raise HardwareError(listing(place, [Problem("fabric.levels", "are out of order", remedy)]))
    if system.pue.value < 1:
        remedy = "give the site's power over that of its machines"
        raise HardwareError(listing(place, [Problem("pue", f"{system.pue.value:g} is below 1", remedy)]))
    return system


def _origin(values: Values, outer: Values) -> dict[str, object]:
    """Return the source and date of a table, and those of the ``outer`` one if it has none."""
    both = {**outer, **values}
    return {name: both[name] for name in _ORIGIN if name in both}


def _with_origin(kind: type, values: Values, origin: Values) -> dict[str, object]:
    """Return the TOML ``values`` of a ``kind``; each plain figure becomes a table with the source and date of ``origin``."""
    types = field_types(kind)
    return {
        name: _figure(types[name].plain, value, origin) if name in types else value
        for name, value in values.items()
    }


def _figure(kind: Any, value: object, origin: Values) -> object:
    """Return a stated value of type ``kind`` in which each figure is a table with its source and date: those beside it, else ``origin``."""
    if kind is Fact or (Fact in get_args(kind) and get_origin(kind) is not Mapping):
        return {**origin, **value} if isinstance(value, Mapping) else {"value": value, **origin}
    if not isinstance(value, Mapping):
        return value
    # A table of figures, or a part of a system: it may have a source and a date of its own.
    inner = {name: item for name, item in value.items() if name not in _ORIGIN}
    origin = _origin(value, origin)
    if get_origin(kind) is Mapping:
        return {name: _figure(get_args(kind)[1], item, origin) for name, item in inner.items()}
    return _with_origin(kind, inner, origin)


def _merged(base: Values, own: Values) -> dict[str, object]:
    """Return ``base`` with the fields of ``own`` over it; tables that both have are merged recursively."""
    merged = dict(base)
    for name, value in own.items():
        below = merged.get(name)
        merged[name] = value
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            merged[name] = _merged(below, value)
    return merged


_USER_FILE = ("accelerator", "system", "profile", "source", "date")
_DATA = Path(__file__).parent / "data"
_MOST_DIGITS = 15
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
    """Return the cluster that ``description`` names.

    ``h100:16384`` is so many accelerators; ``gb200-nvl72 x 1389`` so many scale-up domains; a name alone is one
    domain. The name may be a TOML file, or ``this``: the file that ``this_machine`` names.

    Raises ``HardwareError`` with the mistake and the known names, also if the fabric does not join so many.
    """
    match = _CLUSTER.fullmatch(description)
    if match is None:
        raise HardwareError(
            f"cannot read the cluster {description!r}: write NAME:ACCELERATORS, as in h100:16384, or NAME x DOMAINS, as in "
            f'"gb200-nvl72 x 1389"; the names are {", ".join(systems())}, or a TOML file'
        )
    file = cluster_file(description)
    chosen = system(match["name"]) if file is None else load_user(file)
    digits = re.sub("[_,]", "", match["count"] or "1")
    if len(digits) > _MOST_DIGITS:
        raise HardwareError(
            f"a cluster of a number with {len(digits):,} digits: write NAME:ACCELERATORS, as in h100:16384"
        )
    count = int(digits)
    return chosen.of(count if match["sign"] == ":" else count * chosen.domain.size)


def cluster_file(description: str) -> Path | None:
    """Return the TOML file that describes the cluster of that name; None if it is in the catalog or unreadable."""
    match = _CLUSTER.fullmatch(description)
    if match is None:
        return None
    path = this_machine() if match["name"] == "this" else Path(match["name"])
    return path if path.suffix == ".toml" else None


def this_machine() -> Path:
    """The path of this machine's description: ``$PHALANX_THIS_MACHINE``, else ``~/.config/phalanx/this.toml``."""
    return Path(os.environ.get("PHALANX_THIS_MACHINE", home() / ".config" / "phalanx" / "this.toml"))


def load_user(path: Path) -> System:
    """Return the system in a user's TOML file: ``[system]``, and optionally ``[accelerator]``, which replaces one of
    that name in the catalog, and ``[profile]``.

    With ``[profile]``, the file is its accelerator's profile. Raises ``HardwareError`` that names the field and the
    remedy.
    """
    if not path.is_file():
        raise HardwareError(
            f"{path} does not exist: write it with `phalanx calibrate --out {path}`, or by hand"
        )
    file = read_toml(path)
    unknown = [unknown_field(name, name, _USER_FILE) for name in file if name not in _USER_FILE]
    if unknown:
        raise HardwareError(listing(str(path), unknown))
    stated = _stated(System, file, "system", path)
    by_name = dict(accelerators())
    if "accelerator" in file:
        own = _stated(Accelerator, file, "accelerator", path)
        accelerator = read_accelerator(own, f"{path}, [accelerator]")
        by_name[accelerator.key] = accelerator
        stated["accelerator"] = accelerator.key
    if "profile" in file:
        key = str(stated.get("accelerator", ""))
        by_name[key] = replace(_named(by_name, key, "accelerator"), profile=str(path.resolve()))
    return read_system(stated, by_name, f"{path}, [system]")


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
    """Return the entry ``key``; raises ``HardwareError`` with the known ones and the nearest."""
    if key not in entries:
        near = get_close_matches(key.lower(), entries, n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise HardwareError(f"there is no {kind} {key!r}{meant}: there are {', '.join(entries)}")
    return entries[key]
