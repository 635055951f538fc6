"""Frames of ranks' numbers for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.observe.rank_stream import RANK_COLUMNS, RankFrame, RankStream, RankStreamWriter


def drawn_frame(seed: int, step: int, ranks: int, attempt: int = 0) -> RankFrame:
    """A frame of random numbers, some of them NaN."""
    random = np.random.default_rng((seed, step, attempt))
    scales = {"compute_s": 0.3, "data_wait_s": 0.01, "memory_bytes": 3e10, "temperature_c": 60.0}
    columns = {
        name: (scales[name] * random.lognormal(0.0, 0.5, ranks)).astype(np.float32) for name in RANK_COLUMNS
    }
    for values in columns.values():
        values[random.random(ranks) < 0.1] = np.nan
    return RankFrame(step, 1e9 + step, attempt, ranks, columns, 5)


def write(path: Path, *frames: RankFrame) -> None:
    """Append frames to a file."""
    with RankStreamWriter(path) as writer:
        for frame in frames:
            writer.append(frame)


def read(path: Path) -> list[RankFrame]:
    """All frames of a file."""
    with RankStream(path) as stream:
        return [stream.frame(number) for number in range(len(stream))]


def same_values(values: NDArray[np.float32], expected: NDArray[np.float32]) -> bool:
    """True if these are the same numbers, as finely as the file keeps them."""
    return values.shape == expected.shape and np.allclose(
        values, expected, rtol=1e-3, atol=1e-6, equal_nan=True
    )


def same(frame: RankFrame, expected: RankFrame) -> bool:
    """True if a frame that was read is the frame that was written."""
    heads = [(each.step, each.t, each.attempt, each.ranks, each.steps) for each in (frame, expected)]
    return heads[0] == heads[1] and same_columns(frame.columns, expected.columns)


def same_columns(
    columns: Mapping[str, NDArray[np.float32]], expected: Mapping[str, NDArray[np.float32]]
) -> bool:
    """True if all columns are the same."""
    return columns.keys() == expected.keys() and all(
        same_values(columns[name], expected[name]) for name in expected
    )
