"""Reading the logs of many processes: the order, the filters, the end, files that are torn, old or hostile."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.observe.logs.line import LogLine, encode
from phalanx.observe.logs.log_file import aside
from phalanx.observe.logs.read_lines import (
    Follower,
    LogQuery,
    LogQueryError,
    all_lines,
    first_logged_failure,
    grouped,
    normalized,
    ranges,
    read_lines,
)
from phalanx.run.directory.paths import RunDirectory

LEVELS = ("debug", "info", "warning", "error")


def line(t: float, rank: int, text: str = "x", level: str = "info", **fields: object) -> LogLine:
    values = {"node": f"node-{rank // 2}", "epoch": None, "step": None, "attempt": 0} | fields
    return LogLine(t=t, level=level, rank=rank, text=text, process=f"rank-{rank:05d}", **values)  # type: ignore[arg-type]


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    run_directory = RunDirectory(tmp_path / "run")
    run_directory.logs.mkdir(parents=True)
    return run_directory


def write(directory: RunDirectory, rank: int, lines: Sequence[LogLine], files: int = 1) -> None:
    """Write a rank's lines into ``files`` files, all but the last set aside."""
    path = directory.log(0, rank)
    each = -(-len(lines) // files) or 1
    parts = [lines[begin : begin + each] for begin in range(0, len(lines), each)] or [[]]
    for number, part in enumerate(parts):
        file = path if number == len(parts) - 1 else aside(path, number)
        file.write_bytes(b"".join(map(encode, part)))


TIMES = st.lists(st.floats(0, 50).map(lambda t: round(t, 1)), max_size=40)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(TIMES, st.integers(1, 4)), min_size=1, max_size=5),
    st.integers(0, 90),
    st.sampled_from([120, 400, 1 << 18]),
    st.sampled_from(LEVELS),
    st.floats(0, 50),
)
def test_merged_lines_are_all_lines_in_order_of_time_and_the_end_is_the_newest_of_them(
    tmp_path_factory: pytest.TempPathFactory,
    processes: list[tuple[list[float], int]],
    last: int,
    block: int,
    level: str,
    since: float,
) -> None:
    directory = RunDirectory(tmp_path_factory.mktemp("run"))
    directory.logs.mkdir()
    expected: list[LogLine] = []
    for rank, (times, files) in enumerate(processes):
        rank_lines = [line(t, rank, f"{rank}.{n}", LEVELS[n % 4]) for n, t in enumerate(sorted(times))]
        write(directory, rank, rank_lines, files)
        expected += rank_lines
    query = LogQuery(level=level, since=since)
    expected = sorted((entry for entry in expected if query.selects(entry)), key=lambda entry: entry.t)
    merged = list(all_lines(directory, query, block))
    end = read_lines(directory, query, last, block_bytes=block)
    # Lines of different processes at the very same time have no order.
    assert [entry.t for entry in merged] == [entry.t for entry in expected]
    for rank in range(len(processes)):
        assert [entry for entry in merged if entry.rank == rank] == [
            entry for entry in expected if entry.rank == rank
        ]
    assert (
        [entry.t for entry in end] == [entry.t for entry in expected[max(0, len(expected) - last) :]]
        if last
        else end == []
    )
    newest = [entry.text for entry in expected if end and entry.t > end[0].t]
    assert set(newest) <= {entry.text for entry in end}


def test_a_processes_lines_never_change_places_though_its_clock_was_set_back(directory: RunDirectory) -> None:
    write(directory, 0, [line(t, 0, str(n)) for n, t in enumerate([5.0, 6.0, 1.0, 2.0, 7.0])])
    write(directory, 1, [line(t, 1, "other") for t in (1.5, 6.5)])
    for entries in (list(all_lines(directory)), read_lines(directory, LogQuery(), 100)):
        assert [entry.text for entry in entries if entry.rank == 0] == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (LogQuery(ranks=(range(1, 2),)), "bd"),
        (LogQuery(ranks=(range(1, 10**15),)), "bcd"),
        (LogQuery(nodes=frozenset(["node-1"])), "c"),
        (LogQuery(level="warning"), "cd"),
        (LogQuery(since=2.0, until=3.0), "bc"),
        (LogQuery(grep="^[AB]$"), "ab"),
        (LogQuery(attempt=1), ""),
    ],
)
def test_lines_are_chosen(directory: RunDirectory, query: LogQuery, expected: str) -> None:
    write(directory, 0, [line(1.0, 0, "a")])
    write(directory, 1, [line(2.0, 1, "b"), line(4.0, 1, "d", "error")])
    write(directory, 2, [line(3.0, 2, "c", "warning")])
    assert "".join(entry.text for entry in all_lines(directory, query)) == expected
    assert "".join(entry.text for entry in read_lines(directory, query, 9)) == expected


def test_a_pattern_that_is_no_regular_expression_is_refused_by_name() -> None:
    with pytest.raises(LogQueryError, match=r"'\(' is no regular expression"):
        LogQuery(grep="(")


def test_torn_lines_and_strangers_files_are_left_out(directory: RunDirectory) -> None:
    write(directory, 0, [line(1.0, 0, "a"), line(2.0, 0, "b")])
    with directory.log(0, 0).open("ab") as file:
        file.write(
            b'\x00\xff\n[]\n{"t": "x"}\n{"t":1e300,"level":"info","node":null,"rank":0,"epoch":null,"attempt":0,"step":null,"text":"never"}\n{"t": 3, "lev'
        )
    (directory.logs / "attempt-000-rank-00001.jsonl").mkdir()
    (directory.logs / "attempt-000-rank-00002.jsonl").write_bytes(os.urandom(1 << 20))
    (directory.logs / "attempt-000-rank-00003.jsonl").symlink_to("nowhere")
    (directory.logs / "notes.txt").write_text("mine")
    assert [entry.text for entry in all_lines(directory)] == ["a", "b"]
    assert [entry.text for entry in read_lines(directory)] == ["a", "b"]
    assert read_lines(RunDirectory(directory.path / "nothing")) == []


def test_raw_logs_of_earlier_versions_are_read_with_the_time_of_the_file(directory: RunDirectory) -> None:
    path = directory.logs / "attempt-000-rank-00007.log"
    path.write_text('working\nTraceback (most recent call last):\n  File "a", line 1\nValueError: bad\n')
    os.utime(path, (1000.0, 1000.0))
    entries = read_lines(directory)
    assert [(entry.t, entry.rank, entry.level) for entry in entries] == [
        (1000.0, 7, "info"),
        (1000.0, 7, "error"),
    ]
    failure = first_logged_failure(directory)
    assert failure is not None
    assert failure.line == entries[1]


def test_exceptions_of_a_chain_are_read_as_one(directory: RunDirectory) -> None:
    write(
        directory,
        0,
        [
            line(1.0, 0, "KeyError: 1", "error"),
            line(1.0, 0, "ValueError: 2", "error", goes_on=True),
            line(1.0, 0, "y"),
        ],
    )
    assert [entry.text for entry in read_lines(directory)] == ["KeyError: 1\nValueError: 2", "y"]


def test_lines_that_are_written_later_are_followed_also_when_files_are_set_aside(
    directory: RunDirectory,
) -> None:
    path = directory.log(0, 0)
    write(directory, 0, [line(1.0, 0, "old")])
    follower = Follower(directory, LogQuery())
    assert follower.look() == []
    with path.open("ab") as file:
        file.write(encode(line(2.0, 0, "a")) + encode(line(3.0, 0, "b"))[:-9])
    assert [entry.text for entry in follower.look()] == ["a"]
    with path.open("ab") as file:
        file.write(encode(line(3.0, 0, "b"))[-9:])
    path.rename(aside(path, 0))
    path.write_bytes(encode(line(4.0, 0, "c")))
    write(directory, 1, [line(3.5, 1, "other")])
    assert [entry.text for entry in follower.look()] == ["b", "other", "c"]
    assert follower.look() == []


def test_a_new_file_that_has_taken_the_inode_of_a_removed_one_is_followed_from_its_beginning(
    directory: RunDirectory,
) -> None:
    path = directory.log(0, 0)
    write(directory, 0, [line(1.0, 0, "old" * 100)])
    follower = Follower(directory, LogQuery())
    inode = path.stat().st_ino
    path.write_bytes(encode(line(2.0, 0, "new")))  # in place, as if the inode had been free
    assert path.stat().st_ino == inode
    assert [entry.text for entry in follower.look()] == ["new"]


def test_lines_of_many_ranks_with_the_same_words_are_one_group_with_a_count(directory: RunDirectory) -> None:
    for rank in range(6):
        write(
            directory,
            rank,
            [line(10.0 + rank, rank, f"rank {rank} cannot reach 10.0.0.{rank}:29500 (0x7f{rank}a)", "error")],
        )
    write(directory, 6, [line(5.0, 6, "something else")])
    other, same = grouped(all_lines(directory))
    assert (other.count, same.count) == (1, 6)
    assert (same.first, same.last, same.ranks) == (10.0, 15.0, set(range(6)))
    assert same.place == "ranks 0-5 on 3 nodes"


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_texts_with_other_numbers_are_the_same_and_with_other_words_are_not(a: int, b: int) -> None:
    assert normalized(f"step {a}: {a / 7}") == normalized(f"step {b}: {b / 7}")
    assert normalized(f"read {a}") != normalized(f"wrote {a}")


@given(st.sets(st.integers(0, 40)))
def test_ranges_name_exactly_these_numbers(numbers: set[int]) -> None:
    words = ranges(numbers, most=100)
    named_numbers: set[int] = set()
    for part in filter(None, words.split(", ")):
        first, _, last = part.partition("-")
        named_numbers |= set(range(int(first), int(last or first) + 1))
    assert named_numbers == numbers


def test_a_log_without_newlines_is_read_in_bounded_memory_and_its_whole_lines_are_shown(
    tmp_path: Path,
) -> None:
    directory = RunDirectory(tmp_path)
    directory.logs.mkdir()
    path = directory.log(0, 0)
    encoded = encode(LogLine(1_790_000_000.0, "warning", "n", 0, None, 0, 1, "before"))
    path.write_bytes(encoded)
    with path.open("ab") as file:
        file.truncate(len(encoded) + (1 << 30))
    with path.open("ab") as file:
        file.write(b"\n" + encoded.replace(b"before", b"after"))
    assert [entry.text for entry in read_lines(directory)] == ["before", "after"]
    assert [entry.text for entry in all_lines(directory)] == ["before", "after"]
