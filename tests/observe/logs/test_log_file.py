"""Log files stay within their bounds, keep the start and the end, and lose lines rather than anything else."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from phalanx.observe.logs.line import LogLine, decode, decode_lines, encode
from phalanx.observe.logs.log_file import Bounds, LogFile, set_aside


def lost(lines: int, reason: str) -> bytes:
    return f"lost {lines}: {reason}\n".encode()


def content(path: Path) -> list[bytes]:
    files = [*(file for _, file in set_aside(path)), path]
    return b"".join(file.read_bytes() for file in files if file.exists()).splitlines()


def test_the_first_file_and_the_newest_are_kept_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "attempt-000-a.jsonl"
    log = LogFile(path, Bounds(100, 3), lost)
    for number in range(200):
        log.write(b"%09d\n" % number)
    assert len(list(tmp_path.iterdir())) == 3
    assert all(file.stat().st_size <= 100 for file in tmp_path.iterdir())
    kept = [int(line) for line in content(path)]
    assert kept[:10] == list(range(10))
    assert kept[10:] == list(range(kept[10], 200))


@given(files=st.integers(2, 14), lines=st.integers(1, 40))
def test_a_log_has_as_many_files_as_its_bound_allows(files: int, lines: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        log = LogFile(path, Bounds(10, files), lost)
        for number in range(lines):
            log.write(b"%09d\n" % number)
        log.close()
        newest = range(max(1, lines - files + 1), lines)
        assert content(path) == [b"%09d" % number for number in (0, *newest)]


def test_a_process_that_is_started_again_continues_the_files_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for life in range(6):
        log = LogFile(path, Bounds(50, 3), lost)
        for number in range(7):
            log.write(b"%09d\n" % (10 * life + number))
        log.close()
    kept = [int(line) for line in content(path)]
    assert len(list(tmp_path.iterdir())) <= 3
    assert kept == sorted(kept)
    assert (kept[0], kept[-1]) == (0, 56)


def test_a_full_disk_costs_lines_and_one_message_and_their_number_is_logged_when_there_is_room_again(
    tmp_path: Path,
) -> None:
    path, messages, now = tmp_path / "a.jsonl", list[str](), [0.0]
    path.symlink_to("/dev/full")
    log = LogFile(path, Bounds(), lost, messages.append, lambda: now[0])
    for _ in range(10):
        log.write(b"no room\n")
    assert len(messages) == 1
    assert "No space left" in messages[0]
    path.unlink()
    log.close()
    log.write(b"too early to try again\n")
    now[0] = 5.0
    log.write(b"room\n")
    assert content(path)[-2:] == [b"lost 11: No space left on device", b"room"]


def test_the_line_after_a_torn_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"t": 1, "tex')
    LogFile(path, Bounds(), lost).write(b"whole\n")
    assert path.read_bytes() == b'{"t": 1, "tex\nwhole\n'


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "a.jsonl"
    log = LogFile(path, Bounds(10, 2), lost)
    log.write(b"123456789\n")
    path.unlink()
    path.parent.rmdir()
    log.write(b"abcdefghi\n")
    assert content(path) == [b"abcdefghi"]


@given(st.binary(max_size=300))
def test_what_is_no_line_of_a_log_is_left_out(garbage: bytes) -> None:
    line = LogLine(1.5, "info", "n", 3, None, 0, None, "text \udcff")
    block = encode(line) + garbage.replace(b"\n", b"") + b"\n" + encode(line)
    decoded = decode_lines(block)
    assert [decoded[0].t, decoded[-1].t] == [1.5, 1.5]
    assert decoded[0].text == "text \\udcff"
    decode(garbage)
