"""A cluster as far as time, memory, power and money depend on it: read from TOML, sized from a ``System``, with single figures replaced.

Accelerators form scale-up *domains* (8 on an HGX board, 36 or 72 in an NVLink rack): inside, all talk to all at the link's
rate. Domains are joined by a scale-out fabric of one or more *levels* (leaf, spine, core): two ranks meet at the lowest
level whose reach covers both. Everything here is a fact or a stated assumption with its source; nothing is computed but
what follows from them.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from phalanx.run.directory.files import read_named
from phalanx.run.fields import NOT_NEGATIVE, POSITIVE, Problem, ValueRange, listing, read_section

# Reading from TOML: one ``HardwareError`` lists all mistakes of a description.


class HardwareError(ValueError):
    """A name, file or value of hardware that cannot be used; the message names the field and the remedy."""


Values: TypeAlias = Mapping[str, object]
_Entry = TypeVar("_Entry")


def read_toml(path: Path) -> Values:
    """Return the tables of the file at ``path``. Raises ``HardwareError`` if it cannot be read or is not TOML."""
    try:
        return tomllib.loads(read_named(path))
    except OSError as error:
        raise HardwareError(f"cannot read {path}: {error.strerror}; name a TOML file that exists") from error
    except (ValueError, RecursionError) as error:
        raise HardwareError(f"{path} is not TOML: {error}") from error


def read_entry(kind: type[_Entry], values: Values, place: str) -> _Entry:
    """Return the ``kind`` that ``values`` describe. Raises ``HardwareError`` with every mistake, under the name ``place``."""
    problems: list[Problem] = []
    entry = read_section(kind, values, problems)
    if entry is None or problems:
        raise HardwareError(listing(place, problems))
    return entry


def table_of(values: Values, name: str, place: str) -> Values:
    """Return the table ``name`` in ``values``. Raises ``HardwareError``, under the name ``place``, if it is missing or no table."""
    table = values.get(name)
    if not isinstance(table, Mapping):
        wrong = "is missing" if table is None else f"{table!r} is not a table"
        raise HardwareError(listing(place, [Problem(name, wrong, f"add a table [{name}]")]))
    return table


@dataclass(frozen=True)
class Fact:
    """A number with its source."""

    value: Annotated[float, NOT_NEGATIVE]
    source: str
    date: str = ""
    """When it was published or read, as YYYY-MM."""


@dataclass(frozen=True)
class Accelerator:
    """One accelerator. Rates are per second and per accelerator; links count one direction."""

    key: str
    """As one types it: "h100"."""
    name: str
    vendor: str
    announced_only: bool = field(default=False, kw_only=True)
    """True if the figures are a vendor's announcement of something that cannot be bought yet."""
    flops: Mapping[str, Fact]
    """Dense peak by format ("bf16", "fp16", "tf32", "fp32", "fp8", "fp4", "int8"), in FLOP/s."""
    sparse_flops: Mapping[str, Fact] = field(default_factory=dict, kw_only=True)
    """The vendor's figure with structured sparsity, where there is one."""
    memory_bytes: Fact
    memory_bytes_per_s: Fact
    multiprocessors: Annotated[int, NOT_NEGATIVE] = field(default=0, kw_only=True)
    """Units that tiles of a matrix product are dealt to (0 where it does not apply)."""
    power_w: Fact
    idle_power_w: Fact
    host_bytes_per_s: Fact
    """To the host's memory (PCIe or C2C)."""
    price_per_hour: Fact
    """US dollars an accelerator and hour, rented: a default that the user overrides."""
    profile: str = ""
    """Name or TOML file of the fitted constants that hold for it; empty means those of its own key."""
    device_names: tuple[str, ...] = ()
    """Parts of the name that its driver reports, by which it is recognized."""
    exponentials_per_s: Fact | None = None
    """Rate of the special function units, which can bound attention's softmax; ``None`` if it is not known."""


@dataclass(frozen=True)
class FabricLevel:
    """One level of the scale-out fabric."""

    name: str
    reach: Annotated[int, POSITIVE]
    """Accelerators that meet at this level or below."""
    share: Annotated[float, ValueRange(above=0, at_most=1)]
    """Fraction of an accelerator's network rate that is left if all send across this level at once; 1 is non-blocking."""
    latency_s: Annotated[float, NOT_NEGATIVE]
    """One way, between two accelerators that meet here."""


FabricKind: TypeAlias = Literal["fat-tree", "rail-optimized", "dragonfly", "torus", "none"]


@dataclass(frozen=True)
class Fabric:
    """The scale-out network that joins the domains."""

    kind: FabricKind
    bytes_per_s: Fact
    """Network rate of one accelerator in one direction."""
    levels: tuple[FabricLevel, ...]
    in_switch_reduction: bool = False


@dataclass(frozen=True)
class Domain:
    """A scale-up domain."""

    size: Annotated[int, POSITIVE]
    bytes_per_s: Fact
    """Link rate of one accelerator in one direction, to all others of the domain together."""
    latency_s: Annotated[float, NOT_NEGATIVE]
    in_switch_reduction: bool = False
    """NVLink SHARP: the switch adds."""
    torus_axes: Annotated[int, NOT_NEGATIVE] = 0
    """Dimensions of a torus (TPU); 0 where a switch joins all with all."""


@dataclass(frozen=True)
class Cluster:
    """A number of equal accelerators with their network, hosts, power and storage."""

    key: str
    accelerator: Accelerator
    accelerators: int
    per_node: int
    """Accelerators of one host."""
    domain: Domain
    fabric: Fabric
    node_power_w: Fact
    """Power of a node beside its accelerators: CPUs, NICs, fans."""
    host_memory_bytes: Fact
    """Host memory of one node."""
    pue: Fact
    """Power usage effectiveness: what the site draws over what the machines draw, and so 1 or more."""
    storage_bytes_per_s: Fact
    """Write rate of the whole cluster's durable storage."""
    overrides: Mapping[str, float] = field(default_factory=dict)
    """Figures that the user has replaced, by dotted name, for reports."""


# A system: the building blocks of a cluster, without its size.


@dataclass(frozen=True)
class System:
    """The building blocks of a cluster of any size: accelerator, node, domain and fabric."""

    key: str
    accelerator: Accelerator
    per_node: Annotated[int, POSITIVE]
    domain: Domain
    fabric: Fabric
    node_power_w: Fact
    host_memory_bytes: Fact
    pue: Fact
    storage_bytes_per_s_per_accelerator: Fact
    source: str

    def of(self, accelerators: int) -> Cluster:
        """Return a cluster of so many ``accelerators``; storage grows with their number. Raises ``HardwareError`` for
        fewer than one, or if the fabric does not reach so far.
        """
        if accelerators < 1:
            raise HardwareError(f"{self.key}: a cluster needs at least one accelerator, not {accelerators}")
        reach = max([level.reach for level in self.fabric.levels], default=self.domain.size)
        if accelerators > reach:
            raise HardwareError(
                f"the fabric of {self.key!r} joins {reach:,} accelerators, not {accelerators:,}: ask for fewer, or describe a "
                f'larger fabric in a TOML file with [system], like = "{self.key}" and more fabric.levels'
            )
        storage = self.storage_bytes_per_s_per_accelerator
        return Cluster(
            key=f"{self.key}:{accelerators}",
            accelerator=self.accelerator,
            accelerators=accelerators,
            per_node=self.per_node,
            domain=self.domain,
            fabric=self.fabric,
            node_power_w=self.node_power_w,
            host_memory_bytes=self.host_memory_bytes,
            pue=self.pue,
            storage_bytes_per_s=replace(storage, value=storage.value * accelerators),
        )


# A cluster with one figure replaced, by the user or for a sensitivity analysis.


_MAY_BE_ZERO = ("price_per_hour", "power_w")
_FARTHEST = 100
"""Factor between a figure and its replacement beyond which the unit is taken for another than the catalog's."""


def read_figure(text: str) -> float:
    """Return the number of a figure as it is typed, such as "4e11". Raises ``HardwareError`` that shows how numbers are written."""
    try:
        return float(text)
    except ValueError:
        raise HardwareError(
            f"{text!r} is no number: write it with a point and without units, as in 2.5 or 4e11 (bytes, FLOP/s, seconds, W, $)"
        ) from None


def with_value(cluster: Cluster, name: str, value: float, source: str = "set by the user") -> Cluster:
    """Return ``cluster`` where the figure ``name`` is ``value``, noted in ``overrides``.

    ``name`` is dotted: ``pue``, ``fabric.bytes_per_s``, ``accelerator.price_per_hour``, ``accelerator.flops.bf16``.
    Raises ``HardwareError`` if there is no such figure, or if the value is not possible, or far from the old one.
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
    """Return a copy of ``owner`` with the figure at ``path`` set to ``value``; a fact gets ``source``. Raises
    ``HardwareError`` if there is no such single figure, for a fraction in place of an integer, or for a size that
    ``_check_size`` refuses. ``name`` is the full path, for messages.
    """
    here, rest = path[0], path[1:]
    if isinstance(owner, dict):
        names = list(owner)
    else:
        names = [field.name for field in fields(owner) if _is_figure(getattr(owner, field.name))]
    if here not in names:
        raise HardwareError(f"there is no figure {name!r} to set: {here!r} is not among {', '.join(names)}")
    old = owner[here] if isinstance(owner, dict) else getattr(owner, here)
    if rest and isinstance(old, (Fact, int, float)):
        raise HardwareError(f"there is no figure {name!r} to set: {here!r} is a single one, to be set itself")
    if isinstance(old, (Fact, float)) and not rest:
        _check_size(value, old.value if isinstance(old, Fact) else old, name)
    if isinstance(old, Fact) and not rest:
        new: object = Fact(value, source)
    elif isinstance(old, int) and not rest and not value.is_integer():
        raise HardwareError(f"{name} = {value:g}: set a whole number, as {old} is")
    elif isinstance(old, (int, float)) and not isinstance(old, bool) and not rest:
        new = type(old)(value)
    elif rest:
        new = _replaced(old, rest, value, source, name)
    else:
        raise HardwareError(f"{name!r} is not one figure: name one within it, as in fabric.bytes_per_s")
    return {**owner, here: new} if isinstance(owner, dict) else replace(owner, **{here: new})


def _check_size(value: float, old: float, name: str) -> None:
    """Raise ``HardwareError`` for a ``value`` more than ``_FARTHEST`` times larger or smaller than ``old``: it must
    be in another unit. Zeros pass.
    """
    if value > 0 and old > 0 and not 1 / _FARTHEST <= value / old <= _FARTHEST:
        raise HardwareError(
            f"{name} = {value:g} is {max(value / old, old / value):.2g} times {'more' if value > old else 'less'} than the "
            f"catalog's {old:g}, as if in another unit: plausible is {old / _FARTHEST:g} to {old * _FARTHEST:g} (bytes, FLOP/s, "
            "seconds, W, $); for other hardware, describe it in a TOML file"
        )


def _is_figure(value: object) -> bool:
    return is_dataclass(value) or (isinstance(value, (dict, int, float)) and not isinstance(value, bool))
