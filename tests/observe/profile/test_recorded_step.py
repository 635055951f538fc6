"""The file of a rank's recorded step is read as it was written, and any other file is refused by its name."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.observe.recorded_step import (
    ALLOCATION,
    EVENT,
    ProfileFileError,
    RankTrace,
    read_rank_trace,
    write_rank_trace,
)


def trace_of(**changed: Any) -> RankTrace:
    events = np.zeros(2, EVENT)
    events["mark"] = [0, -1]
    events["name"] = [0, 1]
    events["ns"] = 5
    fields: dict[str, Any] = {
        "rank": 3,
        "meta": {"device": "cpu"},
        "names": ["", "aten::mm"],
        "marks": [{"kind": "step", "name": "step 4"}],
        "events": events,
        "allocations": np.zeros(1, ALLOCATION),
    }
    return RankTrace(**{**fields, **changed})


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    path, trace = tmp_path / "rank.npz", trace_of()
    write_rank_trace(path, trace)
    read_back = read_rank_trace(path)
    assert (read_back.rank, read_back.meta, read_back.names, read_back.marks) == (
        3,
        trace.meta,
        trace.names,
        trace.marks,
    )
    assert np.array_equal(read_back.events, trace.events)
    assert np.array_equal(read_back.allocations, trace.allocations)
    assert read_back.mark(0) == {"kind": "step", "name": "step 4"}
    assert read_back.mark(1) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"names": [""]},
        {"marks": []},
        {"marks": ["step"]},
        {"marks": [{}]},
        {"meta": [1]},
        {"events": np.zeros(2)},
        {"allocations": np.zeros((1, 2), ALLOCATION)},
    ],
)
def test_tables_that_do_not_fit_together_are_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    path = tmp_path / "rank.npz"
    try:
        write_rank_trace(path, trace_of(**changed))
    except (TypeError, ValueError):
        return  # it cannot even be written
    with pytest.raises(ProfileFileError, match=r"rank\.npz"):
        read_rank_trace(path)


def test_a_torn_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "rank.npz"
    write_rank_trace(path, trace_of())
    content = path.read_bytes()
    for length in (0, 1, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ProfileFileError, match=r"rank\.npz"):
            read_rank_trace(path)


def test_neither_pickles_nor_bombs_are_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "rank.npz"
    np.savez(path, head=np.array([{"rank": 0}], dtype=object))
    with pytest.raises(ProfileFileError):
        read_rank_trace(path)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, head=np.zeros(300 << 20, np.uint8))
    path.write_bytes(buffer.getvalue())
    with pytest.raises(ProfileFileError, match="unpacks"):
        read_rank_trace(path)
