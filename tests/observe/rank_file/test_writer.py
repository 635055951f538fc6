"""The file of ranks' numbers keeps its bounds and its history, over writers, coarsening, full disks and strangers."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observe.rank_frames import drawn_frame, read, same, write
from phalanx.observe.rank_file import FrameHead, encode_frame
from phalanx.observe.rank_stream import RANK_COLUMNS, RankStream, RankStreamError, RankStreamWriter
from phalanx.observe.rank_writer import coarser

RANKS = 8
FRAME_BYTES = len(encode_frame(drawn_frame(0, 0, RANKS)))


@pytest.mark.parametrize("bound", ["most_bytes", "most_frames"])
def test_a_file_never_grows_far_beyond_its_bound_and_keeps_its_whole_history(
    tmp_path: Path, bound: str
) -> None:
    path, steps = tmp_path / "ranks.bin", 400
    limits = {bound: 40 if bound == "most_frames" else 40 * FRAME_BYTES}
    frames = [drawn_frame(1, step, RANKS) for step in range(steps)]
    with RankStreamWriter(path, **limits) as writer:
        for frame in frames:
            writer.append(frame)
            assert path.stat().st_size <= 42 * FRAME_BYTES
    read_back = read(path)
    assert sum(frame.steps for frame in read_back) == sum(frame.steps for frame in frames)
    assert same(read_back[-1], frames[-1])
    sizes = [frame.steps for frame in read_back]
    assert sizes == sorted(sizes, reverse=True)  # the newer, the finer
    assert len(read_back) > 20


def test_a_heat_map_of_a_coarsened_file_has_the_peaks_of_the_whole(tmp_path: Path) -> None:
    frames = [drawn_frame(2, step, RANKS) for step in range(100)]
    write(tmp_path / "whole", *frames)
    with RankStreamWriter(tmp_path / "coarse", most_frames=30) as writer:
        for frame in frames:
            writer.append(frame)
    with RankStream(tmp_path / "whole") as full, RankStream(tmp_path / "coarse") as coarse:
        assert len(coarse) < len(full)
        for column in RANK_COLUMNS:
            peaks = [stream.heat_map(column, most_columns=1).values for stream in (full, coarse)]
            np.testing.assert_array_equal(*peaks)


def test_a_reader_follows_a_file_through_its_coarsening(tmp_path: Path) -> None:
    path = tmp_path / "ranks.bin"
    with RankStreamWriter(path, most_frames=10) as writer, RankStream(path) as stream:
        for step in range(60):
            writer.append(drawn_frame(3, step, RANKS))
            assert stream.refresh()
            assert same(stream.frame(-1), drawn_frame(3, step, RANKS))
            assert (np.diff(stream.steps) > 0).all()


HEADS = st.lists(
    st.builds(
        lambda ranks, attempt: FrameHead(ranks, attempt, 1, 0, 0.0, (0,) * 4),
        st.integers(1, 2),
        st.integers(0, 1),
    )
)


@given(HEADS, st.integers(0, 3000), st.integers(1, 12))
def test_coarsening_merges_only_frames_of_equal_ranks_and_attempts_and_drops_only_the_oldest(
    heads: list[FrameHead], most_bytes: int, most_frames: int
) -> None:
    groups = coarser(heads, most_bytes, most_frames)
    kept = [number for group in groups for number in group]
    assert kept == list(range(len(heads) - len(kept), len(heads)))
    assert len(groups) <= most_frames
    for group in groups:
        assert len({(heads[n].ranks, heads[n].attempt) for n in group}) == 1
        assert len(group) == 1 or group.start < len(heads) // 2
    if len(groups) > 1:
        assert sum(heads[group[-1]].nbytes for group in groups) <= most_bytes
    assert bool(groups) == bool(heads)


def test_frames_continue_over_restarts_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    frames = [drawn_frame(1, 10, 4, 0), drawn_frame(1, 20, 4, 0), drawn_frame(1, 20, 2, 1)]
    write(tmp_path / "ranks.bin", *frames[:2])
    write(tmp_path / "ranks.bin", frames[2])
    with RankStream(tmp_path / "ranks.bin") as stream:
        assert stream.steps.tolist() == [10, 20, 20]
        assert [stream.frame(n).ranks for n in range(3)] == [4, 4, 2]
        assert np.isnan(stream.heat_map("compute_s").values[2:, 2]).all()


def test_two_writers_at_once_lose_no_frame(tmp_path: Path) -> None:
    path = tmp_path / "ranks.bin"
    with RankStreamWriter(path) as old, RankStreamWriter(path) as new:
        for step in range(0, 10, 2):
            old.append(drawn_frame(1, step, 3))
            new.append(drawn_frame(2, step + 1, 5))
    with RankStream(path) as stream:
        assert stream.steps.tolist() == list(range(10))


def test_a_file_that_was_removed_is_created_again(tmp_path: Path) -> None:
    path = tmp_path / "ranks.bin"
    with RankStreamWriter(path) as writer:
        writer.append(drawn_frame(1, 1, 3))
        path.unlink()
        writer.append(drawn_frame(1, 2, 3))
    assert [frame.step for frame in read(path)] == [2]


def test_what_is_no_stream_is_moved_aside_and_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "ranks.bin"
    path.write_text("my notes on ranks\n" * 20)
    write(path, drawn_frame(1, 1, 3))
    assert [frame.step for frame in read(path)] == [1]
    assert "my notes" in (tmp_path / "ranks.bin.damaged").read_text()


FEW_DESCRIPTORS = """
import os, resource, sys
from contextlib import suppress
from pathlib import Path
from observe.rank_frames import drawn_frame
from phalanx.observe.rank_stream import RankStreamWriter

path, first, free = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
frames = [drawn_frame(1, step, 3) for step in range(first, first + 4)]
opened = RankStreamWriter(path, most_frames=8) if free == 0 else None
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
fillers = []
with suppress(OSError):
    while True:
        fillers.append(os.dup(0))
for number in fillers[:free]:
    os.close(number)
with opened or RankStreamWriter(path, most_frames=8) as writer:
    for frame in frames:
        writer.append(frame)
"""


@pytest.mark.parametrize(("before", "free"), [(8, 0), (3, 1)])
def test_a_process_with_hardly_a_descriptor_left_still_writes_and_loses_no_frame(
    tmp_path: Path, before: int, free: int
) -> None:
    path = tmp_path / "ranks.bin"
    write(path, *(drawn_frame(1, step, 3) for step in range(before)))
    words = [sys.executable, "-c", FEW_DESCRIPTORS, str(path), str(before), str(free)]
    folders = os.pathsep.join(sys.path)
    subprocess.run(words, check=True, env={**os.environ, "PYTHONPATH": folders})
    assert [frame.step for frame in read(path)] == list(range(before + 4))
    assert list(tmp_path.iterdir()) == [path]


@settings(max_examples=30)
@given(st.lists(st.integers(0, 3 * FRAME_BYTES), min_size=1, max_size=4))
def test_a_full_disk_costs_only_the_frames_that_did_not_fit(
    tmp_path_factory: pytest.TempPathFactory, rooms: list[int]
) -> None:
    path = tmp_path_factory.mktemp("full") / "ranks.bin"
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    kept: list[int] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    step = 0
    try:
        with RankStreamWriter(path) as writer:
            for room in rooms:
                resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, hard))
                for _ in range(2):
                    step += 1
                    try:
                        writer.append(drawn_frame(4, step, RANKS))
                        kept.append(step)
                    except RankStreamError:
                        pass
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            writer.append(drawn_frame(4, 1000, RANKS))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    read_back = read(path)
    intact = [frame.step for frame in read_back if same(frame, drawn_frame(4, frame.step, RANKS))]
    assert intact == [*kept, 1000]
