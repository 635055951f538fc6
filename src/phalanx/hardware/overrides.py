"""A cluster with one of its figures replaced: for what a user knows better, and for asking what moves an answer."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass, replace
from typing import Any

from phalanx.hardware.cluster import Cluster, Fact
from phalanx.hardware.tables import HardwareError

_MAY_BE_ZERO = ("price_per_hour", "power_w")
_FARTHEST = 100
"""Factor between a figure and its replacement beyond which the unit is taken for another than the catalog's."""


def read_figure(text: str) -> float:
    """The number of a figure as it is typed. Raises ``HardwareError`` that says how numbers are written."""
    try:
        return float(text)
    except ValueError:
        raise HardwareError(
            f"{text!r} is no number: write it with a point and without units, as in 2.5 or 4e11 (bytes, FLOP/s, seconds, W, $)"
        ) from None


def with_value(cluster: Cluster, name: str, value: float, source: str = "set by the user") -> Cluster:
    """``cluster`` where the figure ``name`` is ``value``, noted in ``overrides``.

    ``name`` is dotted: ``pue``, ``fabric.bytes_per_s``, ``accelerator.price_per_hour``, ``accelerator.flops.bf16``. Raises
    ``HardwareError`` if there is no such figure.
    """
    free = value == 0 and name.endswith(_MAY_BE_ZERO)
    if not (math.isfinite(value) and (value > 0 or free)):
        raise HardwareError(f"{name} = {value:g}: set a number above 0")
    if name == "accelerators":
        raise HardwareError(
            f"accelerators = {value:g}: their number is the cluster's, as in --cluster h100:{value:.0f}"
        )
    if name == "pue" and value < 1:
        raise HardwareError(f"pue = {value:g}: set 1 or more, the site's power over that of its machines")
    limit = cluster.accelerator.power_w.value
    if name == "accelerator.power_w" and value > limit > 0:
        raise HardwareError(
            f"{name} = {value:g}: set no more than {limit:g}, with which its rates were measured; describe an accelerator that draws more in a "
            "TOML file"
        )
    idle_w = cluster.accelerator.idle_power_w.value
    if name == "accelerator.power_w" and limit > 0 and value <= idle_w:
        raise HardwareError(
            f"{name} = {value:g}: set more than accelerator.idle_power_w, which is {idle_w:g}"
        )
    if name == "accelerator.idle_power_w" and value > limit > 0:
        raise HardwareError(f"{name} = {value:g}: set no more than accelerator.power_w, which is {limit:g}")
    changed: Cluster = _replaced(cluster, name.split("."), value, source, name)
    return replace(changed, overrides={**cluster.overrides, name: value})


def _replaced(owner: Any, path: list[str], value: float, source: str, name: str) -> Any:
    here, rest = path[0], path[1:]
    if isinstance(owner, dict):
        known = list(owner)
    else:
        known = [field.name for field in fields(owner) if _is_figure(getattr(owner, field.name))]
    if here not in known:
        raise HardwareError(f"there is no figure {name!r} to set: {here!r} is not among {', '.join(known)}")
    old = owner[here] if isinstance(owner, dict) else getattr(owner, here)
    if isinstance(old, (Fact, float)) and not rest:
        _check_size(value, old.value if isinstance(old, Fact) else old, name)
    if isinstance(old, Fact) and not rest:
        new: object = Fact(value, source)
    elif isinstance(old, int) and not rest and not value.is_integer():
        raise HardwareError(f"{name} = {value:g}: set a whole number, as {old} is")
    elif isinstance(old, (int, float)) and not isinstance(old, bool) and not rest:
        new = type(old)(value)
    elif rest and not isinstance(old, Fact):
        new = _replaced(old, rest, value, source, name)
    else:
        raise HardwareError(f"{name!r} is not one figure: name one within it, as in fabric.bytes_per_s")
    return {**owner, here: new} if isinstance(owner, dict) else replace(owner, **{here: new})


def _check_size(value: float, old: float, name: str) -> None:
    """Raises ``HardwareError`` for a value so far from the figure it replaces that it must be in another unit."""
    if value > 0 and old > 0 and not 1 / _FARTHEST <= value / old <= _FARTHEST:
        raise HardwareError(
            f"{name} = {value:g} is {max(value / old, old / value):.2g} times {'more' if value > old else 'less'} than the "
            f"catalog's {old:g}, as if in another unit: plausible is {old / _FARTHEST:g} to {old * _FARTHEST:g} (bytes, FLOP/s, "
            "seconds, W, $); for other hardware, describe it in a TOML file"
        )


def _is_figure(value: object) -> bool:
    return is_dataclass(value) or (isinstance(value, (dict, int, float)) and not isinstance(value, bool))
