"""The index of logged steps is only a cache: a run's curves are the same with it, without it, and with any other file in its place."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observe.recorded import crashed_run, step
from phalanx.observe.event_log import GROUP, RECORD_BYTES, TITLE, EventLog, Row, encode_record
from phalanx.observe.events import CheckpointSaved, Evaluated, Event, Message, Step
from phalanx_watch.series.indexed import CHUNK_RECORDS, StepIndex
from phalanx_watch.series.run_series import RunSeries
from phalanx_watch.series.table import LATER, ROW, StepTable, step_row


def long_run(run_dir: Path, steps: int = 5 * GROUP + 7, killed: bool = False) -> Path:
    """Write ``steps`` steps and other events between them, in two attempts; ``killed`` leaves the last group of records unwritten."""
    run_dir.mkdir(parents=True, exist_ok=True)
    for attempt, numbers in enumerate((range(1, steps // 2), range(steps // 2 - 10, steps + 1))):
        log = EventLog(run_dir / "events.jsonl", attempt, clock=iter(range(10**6)).__next__)
        for number in numbers:
            loss = math.nan if number == 70 else 3 + 1 / number
            log.append(
                step(
                    number,
                    steps,
                    loss=loss,
                    mfu=None if number % 3 else 0.4,
                    grad_norm=10.0 ** min(number, 300),
                )
            )
            if number % 37 == 0:
                log.append(CheckpointSaved(number, "somewhere", 1))
                log.append(Evaluated(number, loss + 1))
        if killed:
            os.close(log._file._descriptor)
        else:
            log.close()
    return run_dir


def read(run_dir: Path, chunk_records: int = CHUNK_RECORDS) -> RunSeries:
    run = RunSeries(run_dir, chunk_records=chunk_records)
    run.refresh()
    return run


def bytes_of_columns(table: StepTable) -> dict[str, bytes]:
    return {name: table.column(name).tobytes() for name in (*ROW, *LATER)}


def assert_as_without_it(run_dir: Path) -> RunSeries:
    """Assert that the series read with the index equals the one read without it, and return it."""
    indexed = read(run_dir)
    (run_dir / "steps.bin").rename(run_dir / "aside")
    expected = read(run_dir)
    (run_dir / "aside").rename(run_dir / "steps.bin")
    assert bytes_of_columns(indexed.table) == bytes_of_columns(expected.table)
    assert indexed.table.sparse == expected.table.sparse
    assert list(indexed.marks) == list(expected.marks)
    assert list(indexed.others) == list(expected.others)
    assert list(indexed.starts) == list(expected.starts)
    assert (indexed.last_t, indexed.ending, indexed.torn_lines) == (
        expected.last_t,
        expected.ending,
        expected.torn_lines,
    )
    assert (indexed.version, indexed.unread) == (expected.version, expected.unread)
    return indexed


@pytest.mark.parametrize("killed", [False, True])
def test_a_run_reads_the_same_with_its_index_and_hardly_any_text(tmp_path: Path, killed: bool) -> None:
    series = assert_as_without_it(long_run(tmp_path, killed=killed))
    assert series.parsed_bytes < (0.5 if killed else 0.1) * series.version[1]


def test_a_damaged_index_changes_no_curve(tmp_path: Path) -> None:
    run_dir = long_run(tmp_path, 2 * GROUP + 5)
    index_bytes = (run_dir / "steps.bin").read_bytes()

    @settings(max_examples=60, deadline=None)
    @given(
        at=st.integers(0, len(index_bytes) - 1),
        change=st.integers(0, 255),
        cut=st.integers(0, 400),
        extra=st.binary(max_size=200),
    )
    def damage(at: int, change: int, cut: int, extra: bytes) -> None:
        content = bytearray(index_bytes)
        content[at] ^= change
        (run_dir / "steps.bin").write_bytes(bytes(content[: len(content) - cut]) + extra)
        assert_as_without_it(run_dir)

    damage()


def test_a_torn_group_of_records_costs_itself_and_none_of_the_next_start(tmp_path: Path) -> None:
    long_run(tmp_path, 3 * GROUP)
    os.truncate(tmp_path / "steps.bin", (tmp_path / "steps.bin").stat().st_size - RECORD_BYTES // 2)
    with EventLog(tmp_path / "events.jsonl", 2) as log:
        for number in range(GROUP):
            log.append(step(3 * GROUP + number, 999))
    series = assert_as_without_it(tmp_path)
    assert series.parsed_bytes < 0.1 * series.version[1]


def test_an_index_of_another_stream_is_not_used(tmp_path: Path) -> None:
    long_run(tmp_path / "one")
    long_run(tmp_path / "two")
    content = (tmp_path / "two" / "events.jsonl").read_bytes()
    (tmp_path / "two" / "events.jsonl").write_bytes(content.replace(b'"loss":3.0', b'"loss":4.0'))
    series = assert_as_without_it(tmp_path / "two")
    assert series.parsed_bytes > 0.9 * series.version[1]


def test_a_stream_that_begins_again_has_a_new_index(tmp_path: Path) -> None:
    long_run(tmp_path)
    (tmp_path / "events.jsonl").unlink()
    long_run(tmp_path, 3 * GROUP)
    series = assert_as_without_it(tmp_path)
    assert series.parsed_bytes < 0.1 * series.version[1]


def test_a_run_that_continues_is_followed_from_where_its_index_ended(tmp_path: Path) -> None:
    run = read(long_run(tmp_path))
    with EventLog(tmp_path / "events.jsonl", 1) as log:
        log.append(step(400, 999))
        log.append(Message("info", "on"))
    run.refresh()
    assert bytes_of_columns(run.table) == bytes_of_columns(read(tmp_path).table)


def test_a_chunk_at_a_time_gives_what_one_look_gives(tmp_path: Path) -> None:
    at_once = read(long_run(tmp_path))
    run = RunSeries(tmp_path, chunk_records=50)
    looks = 0
    while looks == 0 or run.unread:
        run.refresh(budget_s=0.0)
        looks += 1
    assert looks > 5
    assert bytes_of_columns(run.table) == bytes_of_columns(at_once.table)
    assert list(run.marks) == list(at_once.marks)


def test_an_index_that_cannot_be_written_costs_the_run_nothing(tmp_path: Path) -> None:
    (tmp_path / "steps.bin").mkdir()
    long_run(tmp_path)
    assert read(tmp_path).last_step == 5 * GROUP + 7


def tamper(run_dir: Path, how: str, of_another: bytes) -> None:
    """Change the index of a run that is being written, or the file or folder that has replaced it."""
    index = run_dir / "steps.bin"
    before = index.read_bytes() if index.is_file() else b""
    if index.is_dir():
        index.rmdir()
    match how:
        case "deleted":
            index.unlink(missing_ok=True)
        case "emptied":
            index.write_bytes(b"")
        case "torn":
            index.write_bytes(before[: len(before) * 2 // 3 + 5])
        case "of another run":
            index.write_bytes(of_another)
        case "of another run, in its place":
            index.unlink(missing_ok=True)
            index.write_bytes(of_another)
        case "as it was earlier":
            index.unlink(missing_ok=True)
            index.write_bytes(before[: len(before) // 2 // RECORD_BYTES * RECORD_BYTES])
        case "a folder":
            index.unlink(missing_ok=True)
            index.mkdir()


def test_the_curves_of_a_run_are_those_of_its_lines_after_any_change_of_its_index_while_it_is_written(
    tmp_path: Path,
) -> None:
    """Curves of a viewer that has followed all the time, and of one that comes afterwards."""
    chunk_records = 40  # so that a viewer is in the midst of it
    of_another = (long_run(tmp_path / "other") / "steps.bin").read_bytes()
    kinds = ("deleted", "emptied", "torn", "of another run", "of another run, in its place")
    kinds = (*kinds, "as it was earlier", "a folder")
    runs = iter(range(10**6))

    @settings(max_examples=40, deadline=None)
    @given(
        acts=st.lists(
            st.one_of(st.sampled_from((*kinds, "begun again", "looked at")), st.integers(1, 2 * GROUP)),
            min_size=2,
            max_size=10,
        )
    )
    def befall(acts: list[str | int]) -> None:
        run_dir = long_run(tmp_path / f"run-{next(runs)}", GROUP + 9)
        follower, attempt, done = RunSeries(run_dir, chunk_records=chunk_records), 2, 0
        log = EventLog(run_dir / "events.jsonl", attempt, clock=iter(range(10**6)).__next__)
        for act in acts:
            if act == "begun again":
                log.close()
                attempt += 1
                log = EventLog(run_dir / "events.jsonl", attempt, clock=iter(range(10**6)).__next__)
            elif isinstance(act, int):
                for number in range(done + 1, done + act + 1):
                    log.append(step(number, 9999, loss=3 + attempt + 1 / number))
                done += act
            elif act == "looked at":
                follower.refresh(budget_s=0.0)
            else:
                tamper(run_dir, act, of_another)
        log.close()
        late = read(run_dir, chunk_records)
        while follower.unread or follower.version != late.version:
            follower.refresh()
        tamper(run_dir, "deleted", b"")
        lines = read(run_dir).table
        assert bytes_of_columns(late.table) == bytes_of_columns(lines)
        assert bytes_of_columns(follower.table) == bytes_of_columns(lines)

    befall()


@contextmanager
def as_nobody() -> Iterator[None]:
    """Without root's right to read everything."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_an_index_that_may_not_be_read_is_done_without() -> None:
    with tempfile.TemporaryDirectory() as folder:  # a folder of pytest's is closed to others
        run_dir = long_run(Path(folder) / "run")
        expected = bytes_of_columns(read(run_dir).table)
        for path in (Path(folder), run_dir):
            path.chmod(0o755)
        (run_dir / "steps.bin").chmod(0o000)
        with as_nobody():
            with suppress(PermissionError):
                (run_dir / "steps.bin").read_bytes()
                pytest.fail("the index may be read: this test shows nothing")
            series = read(run_dir)
        assert series.problem == ""
        assert bytes_of_columns(series.table) == expected
        assert series.parsed_bytes > 0.9 * series.version[1]
        shutil.rmtree(run_dir)


def test_numbers_beyond_any_run_are_left_to_the_text(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl", 0) as log:
        for event in [*crashed_run(), Event(1.0, 0, step(2**40, 5)), Event(1.0, 0, step(3, 5, tokens=2**60))]:
            if isinstance(event.body, Step):
                log.append(event.body)
    assert_as_without_it(tmp_path)


def test_a_loss_that_is_no_number_is_the_same_with_a_sign(tmp_path: Path) -> None:
    """As processors make it: infinity less infinity has a sign on x86."""
    with EventLog(tmp_path / "events.jsonl", 0) as log:
        for number in range(1, 2 * GROUP + 1):
            log.append(step(number, 999, loss=-math.nan, grad_norm=-math.nan))
    series = assert_as_without_it(tmp_path)
    assert series.parsed_bytes < 0.1 * series.version[1]


def test_a_chunk_holds_no_more_text_than_some_blocks(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl", 0) as log:
        for number in range(1, 2 * GROUP + 1):
            log.append(step(number, 999))
            log.append(Message("info", "x" * 1000))
    index = StepIndex(tmp_path / "steps.bin", max_gap_bytes_in_chunk=1 << 16)
    chunk = index.next_chunk(tmp_path / "events.jsonl")
    assert sum(len(line) for stretch in chunk.stretches for _, line in stretch.lines) <= 1 << 16
    assert_as_without_it(tmp_path)


def test_a_run_that_has_written_nothing_yet_is_no_problem(tmp_path: Path) -> None:
    run = read(tmp_path)
    assert run.problem == ""
    long_run(tmp_path)
    run.refresh()
    assert bytes_of_columns(run.table) == bytes_of_columns(read(tmp_path).table)


@pytest.mark.parametrize(("place", "value"), [(0, -3), (3, math.nan), (3, 1e300), (4, math.nan), (4, -1.0)])
def test_a_record_of_numbers_beyond_any_run_is_not_taken_for_its_line(
    tmp_path: Path, place: int, value: float
) -> None:
    """``place`` is the index in ``Row`` of a step, a time or tokens; records within a chunk are not compared with their lines."""
    with EventLog(tmp_path / "events.jsonl", 0, clock=iter(range(10**6)).__next__) as log:
        for number in range(1, 2 * GROUP + 1):
            log.append(step(number, 999))
    index, offset = TITLE, 0
    for number, line in enumerate((tmp_path / "events.jsonl").read_bytes().splitlines(keepends=True)):
        row: Row | None = step_row(line, offset)
        assert row is not None
        changed = row if number != 3 else (*row[:place], value, *row[place + 1 :])
        index, offset = index + encode_record(changed, len(line)), offset + len(line)
    (tmp_path / "steps.bin").write_bytes(index)
    assert_as_without_it(tmp_path)
