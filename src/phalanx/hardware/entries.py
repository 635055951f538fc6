"""Turns the catalog's TOML tables into accelerators and systems.

A table is written for people: a figure may be a plain number, which has the source and date of its table, and an entry that
is ``like`` another states only what differs. ``spelled_out`` makes of it a table with every figure in full, along the
fields' types, which ``read_entry`` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, get_args, get_origin

from phalanx.hardware.cluster import Accelerator, Fact
from phalanx.hardware.errors import HardwareError
from phalanx.hardware.system import System
from phalanx.hardware.tables import Values, read_entry
from phalanx.run.problems import Problem, listing
from phalanx.run.section_reader import field_types, unknown_value

_ORIGIN = ("source", "date")


def spelled_out(
    kind: type, stated: Values, catalog: Mapping[str, Values], key: str, place: str
) -> dict[str, object]:
    """The fields of ``kind``: those ``stated``, over those of the entry of ``catalog`` that its ``like`` names, and so on.

    An inherited figure keeps its own source and date.
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
    """The accelerator that ``values``, spelled out, describe. Raises ``HardwareError``."""
    found = read_entry(Accelerator, {name: values[name] for name in values if name not in _ORIGIN}, place)
    if not found.flops:
        remedy = "give the dense peak by format, flops = {bf16 = 1e14}"
        raise HardwareError(listing(place, [Problem("flops", "is empty", remedy)]))
    power_w, idle_w = found.power_w.value, found.idle_power_w.value
    if power_w < idle_w:
        remedy = "give the power under load, and less for idle_power_w"
        raise HardwareError(
            listing(place, [Problem("power_w", f"{power_w:g} is below idle_power_w = {idle_w:g}", remedy)])
        )
    return found


def read_system(values: Values, accelerators: Mapping[str, Accelerator], place: str) -> System:
    """The system that ``values``, spelled out, describe, made of one of ``accelerators``. Raises ``HardwareError``."""
    fields = {field: value for field, value in values.items() if field != "date"}
    name = fields.get("accelerator")
    if isinstance(name, str) and name in accelerators:
        fields["accelerator"] = accelerators[name]
    elif name is not None:
        raise HardwareError(listing(place, [unknown_value("accelerator", name, accelerators)]))
    found = read_entry(System, fields, place)
    if any(lower.reach >= upper.reach for lower, upper in pairwise(found.fabric.levels)):
        remedy = "order the levels by growing reach"
        raise HardwareError(listing(place, [Problem("fabric.levels", "are out of order", remedy)]))
    if found.pue.value < 1:
        remedy = "give the site's power over that of its machines"
        raise HardwareError(listing(place, [Problem("pue", f"{found.pue.value:g} is below 1", remedy)]))
    return found


def _origin(values: Values, outer: Values) -> dict[str, object]:
    """The source and date of a table, which are those of the ``outer`` one where it has none of its own."""
    both = {**outer, **values}
    return {name: both[name] for name in _ORIGIN if name in both}


def _with_origin(kind: type, values: Values, origin: Values) -> dict[str, object]:
    """``values`` with each figure of ``kind`` as a table of value, source and date."""
    types = field_types(kind)
    return {
        name: _figure(types[name].plain, value, origin) if name in types else value
        for name, value in values.items()
    }


def _figure(kind: Any, value: object, origin: Values) -> object:
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
    """``base`` with the fields of ``own``, table by table."""
    merged = dict(base)
    for name, value in own.items():
        below = merged.get(name)
        merged[name] = value
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            merged[name] = _merged(below, value)
    return merged
