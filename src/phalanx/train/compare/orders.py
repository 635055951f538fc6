"""What a replay's launcher and its ranks tell each other, as files in the replay's own directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phalanx.train.compare.observation import Observation


@dataclass(frozen=True)
class ReplayOrder:
    """Which steps of a run are to be computed again, and where from."""

    to_step: int
    from_step: int = 0
    """The step whose state is restored; 0 is the beginning."""
    checkpoints: str = ""
    """The folder of the run's checkpoints; not needed from the beginning."""


@dataclass(frozen=True)
class RankReplay:
    """What one rank saw."""

    layout: dict[str, int]
    """The degree of each axis."""
    observed: list[Observation]
    numbers: dict[int, dict[str, float]]
    """Loss and gradient norm of each step."""


def order_file(folder: Path) -> Path:
    """The file with the ``ReplayOrder``."""
    return folder / "replay.json"


def seen_file(folder: Path, rank: int) -> Path:
    """The file with the ``RankReplay`` of a rank."""
    return folder / f"replay-rank-{rank:05d}.msgpack"
