"""Turns the catalog's TOML tables into accelerators and systems."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, get_args

from phalanx.hardware.cluster import Accelerator, Domain, Fabric, FabricKind, Level
from phalanx.hardware.errors import HardwareError
from phalanx.hardware.system import System
from phalanx.hardware.tables import Table

_SHARED = ("like", "key", "source", "date")
_ACCELERATOR_FACTS = (
    "memory_bytes",
    "memory_bytes_per_s",
    "power_w",
    "idle_power_w",
    "host_bytes_per_s",
    "price_per_hour",
)
_ACCELERATOR_TEXTS = ("name", "vendor", "announced_only", "device_names", "profile", "multiprocessors")
_SYSTEM_FACTS = ("node_power_w", "host_memory_bytes", "pue", "storage_bytes_per_s_per_accelerator")
_EXPONENTIALS = "exponentials_per_s"
_FACTS = frozenset((*_ACCELERATOR_FACTS, *_SYSTEM_FACTS, "bytes_per_s", _EXPONENTIALS))
_TABLES_OF_FACTS = frozenset(("flops", "sparse_flops"))


def inherited(table: Table, catalog: Table, key: str) -> Table:
    """``table`` with what it does not say taken from the entry of ``catalog`` that its ``like`` names, and so on.

    An inherited figure keeps its own source and date.
    """
    values = {"key": key, **table.values}
    name = values.pop("like", None)
    if name is not None:
        if name not in catalog:
            known = ", ".join(catalog.values)
            raise HardwareError(f"{table.place}: like = {name!r} is not in the catalog: there are {known}")
        parent = inherited(catalog.table(name), catalog, name)
        values = _merged(_with_sources(parent.values, parent.values), values)
    return Table(values, table.place)


def read_accelerator(table: Table) -> Accelerator:
    """The accelerator that ``table`` states in full."""
    table.check((*_SHARED, *_ACCELERATOR_FACTS, *_ACCELERATOR_TEXTS, "flops", "sparse_flops", _EXPONENTIALS))
    facts = {name: table.fact(name) for name in _ACCELERATOR_FACTS}
    if not table.facts("flops"):
        raise HardwareError(
            f"{table.place}: 'flops' is missing; give the dense peak by format, flops = {{bf16 = 1e14}}"
        )
    return Accelerator(
        key=table.text("key"),
        name=table.text("name"),
        vendor=table.text("vendor"),
        announced_only=table.flag("announced_only"),
        flops=table.facts("flops"),
        sparse_flops=table.facts("sparse_flops"),
        memory_bytes=facts["memory_bytes"],
        memory_bytes_per_s=facts["memory_bytes_per_s"],
        multiprocessors=table.whole("multiprocessors", 0),
        power_w=facts["power_w"],
        idle_power_w=facts["idle_power_w"],
        host_bytes_per_s=facts["host_bytes_per_s"],
        price_per_hour=facts["price_per_hour"],
        profile=table.text("profile", ""),
        device_names=table.texts("device_names"),
        exponentials_per_s=table.fact(_EXPONENTIALS) if _EXPONENTIALS in table.values else None,
    )


def read_system(table: Table, accelerators: Mapping[str, Accelerator]) -> System:
    """The system that ``table`` states in full, made of one of ``accelerators``."""
    table.check((*_SHARED, *_SYSTEM_FACTS, "accelerator", "per_node", "domain", "fabric"))
    key = table.text("accelerator")
    if key not in accelerators:
        raise HardwareError(
            f"{table.place}: there is no accelerator {key!r}: there are {', '.join(accelerators)}"
        )
    return System(
        key=table.text("key"),
        accelerator=accelerators[key],
        per_node=table.whole("per_node", least=1),
        domain=_domain(table.table("domain", inherit=("source", "date"))),
        fabric=_fabric(table.table("fabric", inherit=("source", "date"))),
        node_power_w=table.fact("node_power_w"),
        host_memory_bytes=table.fact("host_memory_bytes"),
        pue=table.fact("pue"),
        storage_bytes_per_s_per_accelerator=table.fact("storage_bytes_per_s_per_accelerator"),
        source=table.text("source"),
    )


def _domain(table: Table) -> Domain:
    table.check(("size", "bytes_per_s", "latency_s", "in_switch_reduction", "torus_axes", "source", "date"))
    return Domain(
        size=table.whole("size", least=1),
        bytes_per_s=table.fact("bytes_per_s"),
        latency_s=table.number("latency_s"),
        in_switch_reduction=table.flag("in_switch_reduction"),
        torus_axes=table.whole("torus_axes", 0),
    )


def _fabric(table: Table) -> Fabric:
    table.check(("kind", "bytes_per_s", "levels", "in_switch_reduction", "source", "date"))
    kind = table.text("kind")
    if kind not in get_args(FabricKind):
        raise HardwareError(f"{table.place}: kind = {kind!r}: choose among {', '.join(get_args(FabricKind))}")
    levels = tuple(_level(level) for level in table.rows("levels"))
    if any(lower.reach >= upper.reach for lower, upper in pairwise(levels)):
        raise HardwareError(f"{table.place}: order 'levels' by growing reach")
    return Fabric(kind, table.fact("bytes_per_s"), levels, table.flag("in_switch_reduction"))  # type: ignore[arg-type]


def _level(table: Table) -> Level:
    table.check(("name", "reach", "share", "latency_s"))
    share = table.number("share")
    if not 0 < share <= 1:
        raise HardwareError(f"{table.place}: 'share' must be above 0 and at most 1, not {share!r}")
    return Level(table.text("name"), table.whole("reach", least=1), share, table.number("latency_s"))


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in own.items():
        inner = base.get(name)
        if isinstance(value, Mapping) and isinstance(inner, Mapping) and name not in _FACTS:
            merged[name] = _merged(inner, value)
        else:
            merged[name] = value
    return merged


def _with_sources(
    values: Mapping[str, Any], owner: Mapping[str, Any], all_facts: bool = False
) -> dict[str, Any]:
    """``values`` with every plain figure spelled out with the source and date of its ``owner``."""
    spelled: dict[str, Any] = {}
    for name, value in values.items():
        if all_facts or name in _FACTS:
            fact = (
                value if isinstance(value, Mapping) else {"value": value, "source": owner.get("source", "")}
            )
            spelled[name] = {"date": owner.get("date", ""), **fact}
        elif isinstance(value, Mapping):
            spelled[name] = _with_sources(value, owner, name in _TABLES_OF_FACTS)
        else:
            spelled[name] = value
    return spelled
