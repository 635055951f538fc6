"""A cluster as far as time, memory, power and money depend on it: accelerators, and the paths between them.

Accelerators form scale-up *domains* (8 on an HGX board, 36 or 72 in an NVLink rack): inside, all talk to all at the link's
rate. Domains are joined by a scale-out fabric of one or more *levels* (leaf, spine, core): two ranks meet at the lowest
level whose reach covers both. Everything here is a fact or a stated assumption with its source; nothing is computed but
what follows from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from phalanx.run.fields import NOT_NEGATIVE, POSITIVE, ValueRange


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
