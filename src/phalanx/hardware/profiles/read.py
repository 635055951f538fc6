"""Reads profiles from TOML: those that come with the package, and the ``[profile]`` table of a user's own file."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from phalanx.hardware.cluster import Accelerator
from phalanx.hardware.errors import HardwareError
from phalanx.hardware.profiles.profile import (
    COLLECTIVES,
    AttentionFit,
    CollectiveFit,
    Constants,
    MatmulFit,
    MemoryFit,
    NetworkFit,
    Profile,
    Provenance,
)
from phalanx.hardware.tables import Table, read_tables

_FOLDER = Path(__file__).parent


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
            f"there is no profile {chosen!r}: there are {known}, or name a TOML file of your own"
        )
    return Profile(accelerator, _constants_at(path, path.stat().st_mtime_ns))


@lru_cache(maxsize=64)
def _constants_at(path: Path, changed_ns: int) -> Constants:  # noqa: ARG001 - a changed file is read again
    return read_constants(read_tables(path), path.stem)


def read_constants(file: Table, name: str) -> Constants:
    """The ``[profile]`` table of ``file``."""
    table = file.table("profile")
    shared = Table({"source": file.text("source", ""), "date": file.text("date", "")}, file.place)
    network, attention, memory = (table.table(part) for part in ("network", "attention", "memory"))
    return Constants(
        name=name,
        matmul={key: _matmul(fit, shared) for key, fit in table.tables("matmul").items()},
        grouped_efficiency=table.number("grouped_efficiency"),
        attention=AttentionFit(
            attention.number("forward"),
            attention.number("backward"),
            attention.number("launch_s"),
            _provenance(attention, shared),
            attention.number("latent_forward", 0.0),
            attention.number("latent_backward", 0.0),
            attention.number("exponentials_per_s", 0.0),
            attention.number("exponentials_forward", 1.0),
            attention.number("half_tokens", 0.0),
        ),
        memory=MemoryFit(memory.number("efficiency"), memory.number("kernel_s"), _provenance(memory, shared)),
        collectives={key: _collective(table.table("collectives").table(key), shared) for key in COLLECTIVES},
        network=NetworkFit(
            network.number("efficiency"),
            network.number("base_s"),
            network.number("message_s"),
            network.number("tree_efficiency"),
            _provenance(network, shared),
        ),
        joules_per_flop={key: fact.value for key, fact in table.facts("joules_per_flop").items()},
    )


def _matmul(table: Table, shared: Table) -> MatmulFit:
    return MatmulFit(
        launch_s=table.number("launch_s"),
        efficiency=table.number("efficiency"),
        k_half=table.number("k_half"),
        memory_efficiency=table.number("memory_efficiency"),
        wave_share=table.number("wave_share"),
        provenance=_provenance(table, shared),
    )


def _collective(table: Table, shared: Table) -> CollectiveFit:
    return CollectiveFit(
        base_s=table.number("base_s"),
        hops=table.number("hops"),
        pipelining=table.number("pipelining"),
        efficiency=table.number("efficiency"),
        small_group=table.number("small_group", 0.0),
        provenance=_provenance(table, shared),
    )


def _provenance(table: Table, shared: Table) -> Provenance:
    return Provenance(
        source=table.text("source", shared.text("source")),
        date=table.text("date", shared.text("date")),
        versions=table.text("versions", ""),
        points=table.whole("points", 0),
        median_error=table.number("median_error", 0.0),
        mean_error=table.number("mean_error", 0.0),
    )
