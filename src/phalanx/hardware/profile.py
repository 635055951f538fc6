"""Fitted constants of how fast operations run on an accelerator: the types, and the TOML files (``profiles/``) with their provenance.

Rates are kept as shares of the accelerator's peaks, and latencies in seconds, so that a profile that was fitted on one
accelerator serves a sibling whose peaks differ (an H100's for an H800).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Annotated, TypeAlias

from phalanx.hardware.cluster import Accelerator, HardwareError, Values, read_entry, read_toml, table_of
from phalanx.run.fields import NOT_NEGATIVE, Problem, listing

NotNegative: TypeAlias = Annotated[float, NOT_NEGATIVE]


@dataclass(frozen=True)
class Provenance:
    """The source of fitted constants, and the error of the fit."""

    source: str
    date: str
    versions: str = ""
    """Versions of the libraries with which the points were measured."""
    points: Annotated[int, NOT_NEGATIVE] = 0
    median_error: NotNegative = 0.0
    """Median of |predicted / measured - 1| over points that the fit has not seen."""
    mean_error: NotNegative = 0.0


@dataclass(frozen=True)
class MatmulFit:
    """Constants of one format's matrix product."""

    launch_s: NotNegative
    """Time of the smallest product: what a call costs before it computes."""
    efficiency: NotNegative
    """Share of the dense peak that a large product reaches."""
    k_half: NotNegative
    """Length of the inner dimension that costs as much as the fixed work of a tile."""
    memory_efficiency: NotNegative
    """Share of the memory's rate that a product of few rows reaches."""
    wave_share: NotNegative
    """Fraction of the last, partly filled wave of tiles that is lost: 0 none, 1 all."""
    provenance: Provenance = field(kw_only=True)


@dataclass(frozen=True)
class AttentionFit:
    """Share of the peak in 16 bits that fused attention reaches with queries and values of 128 each, on long sequences."""

    forward: NotNegative
    backward: NotNegative
    launch_s: NotNegative
    provenance: Provenance = field(kw_only=True)
    latent_forward: NotNegative = 0.0
    """The same with queries of 192 and values of 128, as in latent attention; 0 where it was not measured."""
    latent_backward: NotNegative = 0.0
    exponentials_per_s: NotNegative = 0.0
    """Exponentials per second of the accelerator that was measured; 0 if they are not known."""
    exponentials_forward: NotNegative = 1.0
    """Share of forward's exponentials that wait for those units: others are polynomials of fused multiply-adds, or hidden
    behind products (arXiv 2603.05451, section 3)."""
    half_tokens: NotNegative = 0.0
    """Length of a causal sequence that takes twice the time of its FLOP: of a short one, much is begun, masked and ended."""

    def share(self, backward: bool, latent: bool = False) -> float:
        """Return the share of the peak, forward or ``backward``. For ``latent`` attention it is the stated one for
        latents, if there is one.
        """
        usual, wide = (
            (self.backward, self.latent_backward) if backward else (self.forward, self.latent_forward)
        )
        return wide if latent and wide else usual


@dataclass(frozen=True)
class MemoryFit:
    """Constants of element-wise and normalizing kernels."""

    efficiency: NotNegative
    """Share of the memory's rate."""
    kernel_s: NotNegative
    """Time between two kernels of one stream."""
    provenance: Provenance = field(kw_only=True)


@dataclass(frozen=True)
class CollectiveFit:
    """One collective of n members inside a scale-up domain: ``a + g sqrt(a S / B) + k S / (e B)`` seconds.

    ``a`` is ``base_s + hops (n - 1)`` times the domain's latency, ``e`` is ``efficiency / (1 + small_group / (n - 1))``.
    """

    base_s: NotNegative
    hops: NotNegative
    """Latencies of the domain that each member more adds."""
    pipelining: NotNegative
    """g: what cutting the tensor into chunks costs."""
    efficiency: NotNegative
    """Share of the domain's rate that a large group reaches."""
    small_group: NotNegative = 0.0
    """Loss of efficiency of small groups, which open fewer channels."""
    provenance: Provenance = field(kw_only=True)


@dataclass(frozen=True)
class NetworkFit:
    """Constants of the scale-out network's use."""

    efficiency: NotNegative
    """Share of the network rate that bulk transfers reach."""
    base_s: NotNegative
    """Fixed time of a collective that leaves the domain, before the first hop."""
    message_s: NotNegative
    """Time of each further message from one rank to another, where a rank sends many (all-to-all)."""
    tree_efficiency: NotNegative
    """Efficiency of the tree algorithms over that of the ring."""
    provenance: Provenance = field(kw_only=True)


@dataclass(frozen=True)
class Constants:
    """All fitted constants of one kind of accelerator."""

    name: str
    matmul: Mapping[str, MatmulFit]
    """By format."""
    grouped_efficiency: NotNegative
    """Efficiency of a grouped matrix product over one product of the same tiles."""
    attention: AttentionFit
    memory: MemoryFit
    collectives: Mapping[str, CollectiveFit]
    """By name, see ``COLLECTIVES``."""
    network: NetworkFit
    joules_per_flop: Mapping[str, float] = field(default_factory=dict)
    """By format, at the rates of large products; empty where nobody measured it."""


@dataclass(frozen=True)
class Profile:
    """An accelerator's peaks, and how much of them it reaches."""

    accelerator: Accelerator
    constants: Constants


COLLECTIVES = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_reduce_in_switch",
    "all_to_all",
    "point_to_point",
    "dispatch",
)


# Profiles in TOML files: those of the package, and the ``[profile]`` table of a user's own file.


_FOLDER = Path(__file__).parent / "profiles"
_PROVENANCE = tuple(field.name for field in fields(Provenance))
_FITS = ("attention", "memory", "network")
_FITS_BY_NAME = ("matmul", "collectives")


def profile_names() -> tuple[str, ...]:
    """The profiles that come with the package."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def profile_of(accelerator: Accelerator, name: str | None = None) -> Profile:
    """Return the constants for ``accelerator``: those called ``name`` or in the TOML file ``name``, else those that
    it names, else those of its own key.

    Raises ``HardwareError`` if there is no such profile, or if a field of it is missing or wrong. Cached by the
    file's time of modification.
    """
    chosen = name or accelerator.profile or accelerator.key
    path = Path(chosen) if chosen.endswith(".toml") else _FOLDER / f"{chosen}.toml"
    if not path.is_file():
        names = ", ".join(profile_names())
        raise HardwareError(
            f"there is no profile {chosen!r}: there are {names}; set [accelerator] profile to one, or to a TOML file of your own"
        )
    return Profile(accelerator, _constants_at(path, path.stat().st_mtime_ns))


@lru_cache(maxsize=64)
def _constants_at(path: Path, changed_ns: int) -> Constants:  # noqa: ARG001 - a changed file is read again
    return _read_constants(read_toml(path), path)


def _read_constants(file: Values, path: Path) -> Constants:
    """Return the constants in the ``[profile]`` table of ``file``. Each fit's source and date are those beside its
    constants, else the file's.

    Raises ``HardwareError`` for missing or wrong fields, and a collective that is missing.
    """
    place = f"{path}, [profile]"
    shared = {name: file[name] for name in ("source", "date") if name in file}
    # The table also has the time scalars of a software stack, which the planner reads separately.
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
    constants = read_entry(Constants, {"name": path.stem, **values}, place)
    missing = [
        Problem(f"collectives.{each}", "is missing", "add it")
        for each in COLLECTIVES
        if each not in constants.collectives
    ]
    if missing:
        raise HardwareError(listing(place, missing))
    return constants


def _with_provenance(fit: object, shared: Values) -> object:
    """Return ``fit`` with source, date and the like moved into a table ``provenance``, completed from ``shared``.
    What is no table is returned unchanged.
    """
    if not isinstance(fit, Mapping):
        return fit
    stated = {name: fit[name] for name in _PROVENANCE if name in fit}
    constants = {name: value for name, value in fit.items() if name not in _PROVENANCE}
    return {**constants, "provenance": {"date": "", **shared, **stated}}
