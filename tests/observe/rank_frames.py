"""Frames of ranks' numbers for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.observe.rank_stream import RANK_COLUMNS, RankFrame, RankStream, RankStreamWriter


def drawn_frame(seed: int, step: int, ranks: int, attempt: int = 0) -> RankFrame:
    """A frame of random numbers, some of them not known."""
    random = np.random.default_rng((seed, step, attempt))
    scales = {"compute_s": 0.3, "data_wait_s": 0.01, "memory_bytes": 3e10, "temperature_c": 60.0}
    columns = {
        name: (scales[name] * random.lognormal(0.0, 0.5, ranks)).astype(np.float32) for name in RANK_COLUMNS
    }
    for values in columns.values():
        values[random.random(ranks) < 0.1] = np.nan
    return RankFrame(step, 1e9 + step, attempt, ranks, columns, 5)


def write(path: Path, *frames: RankFrame) -> None:
    """Appends frames to a file."""
    with RankStreamWriter(path) as writer:
        for frame in frames:
            writer.append(frame)


def read(path: Path) -> list[RankFrame]:
    """All frames of a file."""
    with RankStream(path) as stream:
        return [stream.frame(number) for number in range(len(stream))]


def same_values(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> bool:
    """True if these are the same numbers, as finely as the file keeps them."""
    return found.shape == wanted.shape and np.allclose(found, wanted, rtol=1e-3, atol=1e-6, equal_nan=True)


def same(found: RankFrame, wanted: RankFrame) -> bool:
    """True if the file gave back what was written."""
    places = [(one.step, one.t, one.attempt, one.ranks, one.steps) for one in (found, wanted)]
    return places[0] == places[1] and same_columns(found.columns, wanted.columns)


def same_columns(found: Mapping[str, NDArray[np.float32]], wanted: Mapping[str, NDArray[np.float32]]) -> bool:
    """True if all columns are the same."""
    return found.keys() == wanted.keys() and all(same_values(found[name], wanted[name]) for name in wanted)
