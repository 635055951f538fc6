"""The stream of ranks' numbers: written and read, torn, damaged, hostile, and drawn as a heat map."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observe.rank_frames import drawn_frame, read, same, same_values, write
from open_files import descriptors_of
from phalanx.observe.rank_file import TITLE, decode_column, encode_column, encode_frame
from phalanx.observe.rank_stream import (
    RANK_COLUMNS,
    RankFrame,
    RankStream,
    RankStreamError,
    RankStreamWriter,
)
from traced_memory import peak_and_found

FRAMES = st.lists(
    st.tuples(st.integers(0, 400), st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=6
)


def frames_of(drawn: list[tuple[int, int, int]]) -> list[RankFrame]:
    return [drawn_frame(n, step, ranks, attempt) for n, (step, ranks, attempt) in enumerate(drawn)]


def is_subsequence(part: list[RankFrame], frames: list[RankFrame]) -> bool:
    remaining = iter(frames)
    return all(any(same(frame, other) for other in remaining) for frame in part)


@settings(max_examples=30)
@given(FRAMES)
def test_what_was_appended_is_read_in_order(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[int, int, int]]
) -> None:
    path, frames = tmp_path_factory.mktemp("ranks") / "ranks.bin", frames_of(drawn)
    for frame in frames:
        write(path, frame)  # each by a writer of its own
    read_back = read(path)
    assert len(read_back) == len(frames)
    assert all(map(same, read_back, frames))


@given(st.sampled_from(RANK_COLUMNS), st.floats(0.01, 4000.0))
def test_two_bytes_keep_a_number_to_a_thousandth(name: str, value: float) -> None:
    scale = 2**20 if name == "memory_bytes" else 1.0
    values = np.array([value * scale, np.nan, 0.0], np.float32)
    decoded = decode_column(name, encode_column(name, values, 3))
    np.testing.assert_allclose(decoded, values, rtol=1e-3, equal_nan=True)


def test_a_number_that_is_too_large_is_the_largest_that_can_be_written() -> None:
    values = np.array([np.inf, 1e30, -1.0], np.float32)
    decoded = decode_column("compute_s", encode_column("compute_s", values, 3))
    assert decoded.tolist() == [8188.0, 8188.0, 0.0]


@settings(max_examples=60)
@given(FRAMES, st.integers(0, 10**6))
def test_a_file_cut_anywhere_keeps_the_frames_before_the_cut_and_can_be_appended_to(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[int, int, int]], cut: int
) -> None:
    path, frames = tmp_path_factory.mktemp("torn") / "ranks.bin", frames_of(drawn)
    write(path, *frames)
    content = path.read_bytes()
    kept = cut % len(content)
    path.write_bytes(content[:kept])
    ends = np.cumsum([len(TITLE), *(len(encode_frame(frame)) for frame in frames)])
    before = int((ends[1:] <= kept).sum())
    read_back = read(path)
    assert len(read_back) == before
    assert all(map(same, read_back, frames))
    after = drawn_frame(99, 500, 3, attempt=9)
    write(path, after)
    read_back = read(path)
    # Complete columns of a frame are kept if its head is complete.
    assert before + 1 <= len(read_back) <= before + 2
    assert same(read_back[-1], after)
    assert all(map(same, read_back[:before], frames))


@settings(max_examples=100)
@given(FRAMES, st.integers(0, 10**6), st.integers(1, 255))
def test_a_damaged_byte_costs_no_more_than_its_frame(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[int, int, int]], place: int, flip: int
) -> None:
    path, frames = tmp_path_factory.mktemp("damaged") / "ranks.bin", frames_of(drawn)
    write(path, *frames)
    damaged = bytearray(path.read_bytes())
    damaged[place % len(damaged)] ^= flip
    path.write_bytes(damaged)
    read_back = read(path)
    assert len(read_back) >= len(frames) - 1
    good = [frame for frame in read_back if any(same(frame, written) for written in frames)]
    assert len(good) >= len(frames) - 1
    assert is_subsequence(good, frames)
    for frame in read_back:  # the rest of the damaged frame is correct, or NaN
        for name, values in frame.columns.items():
            assert np.isnan(values).all() or any(
                same_values(values, written.columns[name]) for written in frames
            )


@settings(max_examples=60)
@given(
    FRAMES,
    st.sampled_from(RANK_COLUMNS),
    st.integers(1, 5),
    st.integers(1, 8),
    st.integers(0, 400),
    st.integers(0, 400),
)
def test_a_cell_of_a_heat_map_is_the_largest_of_its_ranks_and_frames(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: list[tuple[int, int, int]],
    column: str,
    most_columns: int,
    most_rows: int,
    first: int,
    last: int,
) -> None:
    path, frames = tmp_path_factory.mktemp("map") / "ranks.bin", frames_of(drawn)
    write(path, *frames)
    with RankStream(path) as stream:
        heat_map = stream.heat_map(column, first, last, most_columns, most_rows)
        chosen = [stream.frame(n) for n, step in enumerate(stream.steps) if first <= step <= last]
    ranks = max((frame.ranks for frame in chosen), default=0)
    matrix = np.full((ranks, len(chosen)), np.nan, np.float32)
    for number, frame in enumerate(chosen):
        matrix[: frame.ranks, number] = frame.columns[column]
    rows, columns = min(ranks, most_rows), min(len(chosen), most_columns)
    assert heat_map.values.shape == (rows, columns)
    starts = [*heat_map.row_ranks.tolist(), ranks]
    bounds = [number * len(chosen) // columns for number in range(columns + 1)] if columns else []
    for row in range(rows):
        for number in range(columns):
            cell = matrix[starts[row] : starts[row + 1], bounds[number] : bounds[number + 1]]
            measured = cell[~np.isnan(cell)]
            assert np.array_equal(
                heat_map.values[row, number], measured.max() if len(measured) else np.nan, equal_nan=True
            )
    assert heat_map.column_steps.tolist() == [chosen[stop - 1].step for stop in bounds[1:]]
    assert heat_map.reduced == (rows < ranks or columns < len(chosen))


def test_the_history_of_a_rank_is_that_of_its_frames(tmp_path: Path) -> None:
    frames = [drawn_frame(1, 10, 3), drawn_frame(2, 20, 5), drawn_frame(3, 30, 5)]
    write(tmp_path / "ranks.bin", *frames)
    with RankStream(tmp_path / "ranks.bin") as stream:
        for _ in range(2):  # the second time, by a shorter way
            steps, values = stream.rank("compute_s", 4)
            assert steps.tolist() == [20, 30]
            expected = np.array([frame.columns["compute_s"][4] for frame in frames[1:]])
            assert same_values(values, expected)
        assert stream.rank("compute_s", 0, 11, 20)[0].tolist() == [20]
        assert stream.rank("compute_s", 5)[0].tolist() == []


def test_a_history_whose_file_can_no_longer_be_read_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "ranks.bin"
    write(path, drawn_frame(7, 1, 4))
    with RankStream(path) as stream, path.open("ab") as unreadable:
        stream.rank("compute_s", 2)
        for number in descriptors_of(path) - {unreadable.fileno()}:
            os.dup2(unreadable.fileno(), number)
        with pytest.raises(RankStreamError, match=r"cannot read .*ranks\.bin"):
            stream.rank("compute_s", 2)


def test_a_missing_file_is_an_empty_stream_until_it_is_written(tmp_path: Path) -> None:
    with RankStream(tmp_path / "ranks.bin") as stream:
        assert len(stream) == stream.ranks == 0
        assert stream.heat_map("compute_s").values.shape == (0, 0)
        with pytest.raises(IndexError):
            stream.frame(0)
        write(tmp_path / "ranks.bin", drawn_frame(1, 10, 3))
        assert stream.refresh()
        assert not stream.refresh()
        assert stream.steps.tolist() == [10]


def test_a_reader_sees_each_frame_once_while_the_file_is_written(tmp_path: Path) -> None:
    path = tmp_path / "ranks.bin"
    frames = [drawn_frame(step, step, 4) for step in range(3)]
    data = TITLE + b"".join(map(encode_frame, frames))
    with RankStream(path) as stream, path.open("ab", buffering=0) as file:
        for byte in range(0, len(data), 7):
            file.write(data[byte : byte + 7])
            stream.refresh()
            complete_frames = (min(byte + 7, len(data)) - len(TITLE)) // len(encode_frame(frames[0]))
            assert len(stream) == max(0, complete_frames)
        assert all(same(stream.frame(number), frame) for number, frame in enumerate(frames))


def test_a_file_that_was_replaced_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "ranks.bin"
    write(path, *(drawn_frame(1, step, 4) for step in range(5)))
    with RankStream(path) as stream:
        write(tmp_path / "other", drawn_frame(2, 77, 2))
        os.replace(tmp_path / "other", path)
        assert same(stream.frame(4), drawn_frame(1, 4, 4))  # until then, the old one
        assert stream.refresh()
        assert stream.steps.tolist() == [77]
        path.write_bytes(path.read_bytes()[:-8])
        stream.refresh()
        assert len(stream) == 0


@pytest.mark.parametrize(
    "content",
    [
        b"#!/bin/sh\nrm -rf /\n" * 100,
        b"phalanx ranks 2: something new\n" + bytes(1000),
        TITLE[:20] + b"x" + TITLE[21:],
        os.urandom(100_000),
        TITLE + b"\xf7rank1\r\n" * 200_000,
    ],
    ids=["a script", "a later version", "a damaged title and no frame", "noise", "nothing but magic"],
)
def test_another_file_is_refused_by_name_and_left_in_peace_by_readers(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ranks.bin"
    path.write_bytes(content)
    with pytest.raises(RankStreamError, match=r"ranks\.bin.*Move it away"):
        RankStream(path)
    assert path.read_bytes() == content


def test_what_is_no_file_or_a_giant_is_refused_without_reading_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "giant").touch()
    os.truncate(tmp_path / "giant", 1 << 40)
    for name in ("pipe", "giant"):
        with pytest.raises(RankStreamError, match=name):
            RankStream(tmp_path / name)
    with pytest.raises(RankStreamError, match=r"cannot read|no file"):
        RankStream(tmp_path)


def test_a_frame_that_claims_many_ranks_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "ranks.bin"
    write(path, drawn_frame(1, 1, 4))
    head = encode_frame(drawn_frame(2, 2, 1 << 20))[:80]
    with path.open("ab") as file:
        file.write(head)
    peak, steps = peak_and_found(
        tmp_path,
        "from pathlib import Path; from phalanx.observe.rank_stream import RankStream",
        f"""
        with RankStream(Path({str(path)!r})) as stream:
            found = stream.steps.tolist()
            stream.heat_map("compute_s")
        """,
    )
    assert peak < 1 << 20
    assert steps == [1]


def test_a_frame_of_the_wrong_shape_is_not_written(tmp_path: Path) -> None:
    frame = drawn_frame(1, 1, 4)
    with RankStreamWriter(tmp_path / "ranks.bin") as writer:
        with pytest.raises(ValueError, match="compute_s"):
            writer.append(RankFrame(1, 1.0, 0, 5, frame.columns))
        with pytest.raises(ValueError, match="0 ranks"):
            writer.append(RankFrame(1, 1.0, 0, 0, frame.columns))
    assert read(tmp_path / "ranks.bin") == []
