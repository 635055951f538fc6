"""``/api/run/ID/ranks``: what each rank measured of itself."""

from __future__ import annotations

from phalanx.watch.page.places import Place

HEAT_COLUMNS = ("compute_s", "data_wait_s", "memory_bytes", "temperature_c")


def heat_table(_place: Place, _column: str) -> dict[str, object]:
    """There is nothing to show."""
    return {"missing": True}
