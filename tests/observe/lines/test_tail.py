"""Following a file of lines gives the lines appended, also if the file is replaced, cut or removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.observe.lines import FileTail, read_lines_at


def _all(tail: FileTail) -> list[bytes]:
    lines = []
    while True:
        batch = tail.next_batch()
        lines += [line for _, line in batch.lines]
        if not batch.more:
            return lines


@given(st.lists(st.binary(max_size=40).map(lambda line: line.replace(b"\n", b"x")), max_size=30), st.data())
def test_lines_come_once_and_whole_however_they_were_appended(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("tail") / "file"
    content = b"".join(line + b"\n" for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=5)))
    tail = FileTail(path, block_bytes=16)
    followed = []
    for start, end in zip([0, *cuts], [*cuts, len(content)], strict=True):
        with path.open("ab") as file:
            file.write(content[start:end])
        followed += _all(tail)
    assert followed == [line for line in lines if line.strip()]


def test_offsets_lead_back_to_the_lines(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one\n\ntwo\nthree\n")
    batch = FileTail(path).next_batch()
    assert read_lines_at(path, [offset for offset, _ in batch.lines]) == [b"one", b"two", b"three"]


def test_a_missing_file_has_no_lines_until_it_comes(tmp_path: Path) -> None:
    tail = FileTail(tmp_path / "file")
    assert _all(tail) == []
    (tmp_path / "file").write_bytes(b"one\n")
    assert _all(tail) == [b"one"]


def test_a_file_that_was_replaced_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one\ntwo\n")
    tail = FileTail(path)
    _all(tail)
    (tmp_path / "other").write_bytes(b"three\nfour\nfive\n")
    os.rename(tmp_path / "other", path)
    batch = tail.next_batch()
    assert batch.restarted
    assert [line for _, line in batch.lines] == [b"three", b"four", b"five"]


def test_a_file_that_was_cut_and_grew_beyond_its_old_length_is_read_from_its_beginning(
    tmp_path: Path,
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one\ntwo\n")
    tail = FileTail(path)
    _all(tail)
    with path.open("r+b") as file:  # the same inode
        file.truncate(0)
        file.write(b"three\nfour\nfive\nsix\n")
    assert tail.next_batch().restarted


def test_a_file_that_vanishes_takes_its_lines_with_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one\n")
    tail = FileTail(path)
    _all(tail)
    path.unlink()
    assert tail.next_batch().restarted
    assert not tail.next_batch().restarted


def test_a_line_longer_than_any_event_is_dropped_and_the_next_one_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one\n" + b"x" * 5000 + b"\ntwo\n")
    tail = FileTail(path, most_line_bytes=1000, block_bytes=128)
    assert _all(tail) == [b"one", b"two"]
    assert tail.dropped_lines == 1


@pytest.mark.parametrize("block_bytes", [4, 7, 128])
def test_what_stands_for_a_long_line_has_the_offset_of_its_beginning(
    tmp_path: Path, block_bytes: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 25 + b"\none\n" + b"y" * 9 + b"\n\ntwo\n")
    tail = FileTail(path, most_line_bytes=5, block_bytes=block_bytes, instead_of_long=b"?")
    lines, has_more = [], True
    while has_more:
        batch = tail.next_batch()
        lines += batch.lines
        has_more = batch.more
    assert lines == [(0, b"?"), (26, b"one"), (30, b"?"), (41, b"two")]


def test_a_line_to_which_a_reader_skips_is_read_after_the_beginning_of_a_long_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 25)
    tail = FileTail(path, most_line_bytes=5, block_bytes=8)
    assert _all(tail) == []
    with path.open("ab") as file:
        file.write(b"\ntwo\n")
    tail.skip_to(26)
    assert _all(tail) == [b"two"]


def test_a_line_without_end_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100_000)
    tail = FileTail(path, most_line_bytes=1000, block_bytes=4096)
    assert _all(tail) == []
    assert len(tail._rest) <= 1000


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_no_file_is_an_error_and_not_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "events.jsonl"
    os.mkfifo(path) if kind == "pipe" else path.mkdir()
    with pytest.raises(OSError, match=r"events\.jsonl|directory"):
        FileTail(path).next_batch()
